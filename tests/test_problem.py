"""Problem files: what is right loads and scales, what is wrong is one clear sentence."""

from pathlib import Path

import pytest
import torch

from epinorm.tools.kernelbench import ProblemError, load_problem

EXAMPLE = Path(__file__).parents[1] / "examples" / "matmul_groupnorm_leakyrelu_sum.py"

GOOD = """
import torch
from torch import nn

batch_size = 16
in_features = 32
out_features = 64
num_groups = 8
shape = (out_features,)
eps = 2

class Model(nn.Module):
    def __init__(self, k, n, groups, shape):
        super().__init__()
        self.fc = nn.Linear(k, n)
        self.gn = nn.GroupNorm(groups, n)
        self.scale = nn.Parameter(torch.randn(shape))

    def forward(self, x):
        return self.gn(self.fc(x)) * self.scale

def get_inputs():
    return [torch.rand(batch_size, in_features)]

def get_init_inputs():
    return [in_features, out_features, num_groups, shape]
"""


def write(folder: Path, text: str, name: str = "model.py") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def refused(path: Path, scale: int = 1) -> str:
    """The sentence with which loading and making the problem ends."""
    with pytest.raises(ProblemError) as caught:
        load_problem(path, scale).make(torch.float32, "cpu")
    message = str(caught.value)
    assert "\n" not in message
    assert path.name in message or "--scale" in message
    return message


def test_the_example_has_the_sizes_of_the_benchmark() -> None:
    problem = load_problem(EXAMPLE)
    assert problem.get_init_inputs() == [8192, 8192, 512]
    assert problem.scaled == {}


def test_scale_divides_every_size_of_the_example() -> None:
    problem = load_problem(EXAMPLE, scale=64)
    assert problem.scaled == {
        "batch_size": 16,
        "input_size": 128,
        "hidden_size": 128,
        "num_groups": 8,
    }
    model, (x,) = problem.make(torch.float32, "cpu")
    assert x.shape == (16, 128)
    assert model(x).shape == (16, 128)
    assert model.gn.num_groups == 8


def test_scale_reaches_values_computed_from_the_sizes(tmp_path: Path) -> None:
    model, _ = load_problem(write(tmp_path, GOOD), scale=2).make(torch.float32, "cpu")
    assert model.scale.shape == (32,)


def test_scale_leaves_constants_that_are_no_size(tmp_path: Path) -> None:
    text = GOOD + "\nassert eps == 2\n"
    assert "eps" not in load_problem(write(tmp_path, text), scale=2).scaled


def test_a_window_of_pooling_is_no_size(tmp_path: Path) -> None:
    """KernelBench's 55, whose kernel_size = 2 allowed no scale but 2 of its 32768 features."""
    text = GOOD + "\nkernel_size = 2\npool_kernel_size = 3\n"
    scaled = load_problem(write(tmp_path, text), scale=4).scaled
    assert scaled
    assert not {"kernel_size", "pool_kernel_size"} & set(scaled)


def test_one_is_no_size(tmp_path: Path) -> None:
    """KernelBench's 80, whose max_dim = 1 allowed no scale at all."""
    scaled = load_problem(write(tmp_path, GOOD + "\nmax_dim = 1\n"), scale=4).scaled
    assert scaled
    assert "max_dim" not in scaled


def test_scale_that_does_not_divide_names_the_value_and_what_does(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    message = refused(path, 16)
    assert "num_groups = 8" in message
    assert "1, 2, 4, 8" in message


@pytest.mark.parametrize("scale", [0, -2])
def test_scale_below_one(tmp_path: Path, scale: int) -> None:
    assert f"got {scale}" in refused(write(tmp_path, GOOD), scale)


def test_scale_without_any_size(tmp_path: Path) -> None:
    text = GOOD.replace("batch_size", "a").replace("in_features", "b")
    text = text.replace("out_features", "c").replace("num_groups", "x")
    assert "no size to divide" in refused(write(tmp_path, text), 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_model_and_inputs_get_the_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    model, (x,) = load_problem(write(tmp_path, GOOD)).make(dtype, "cpu")
    assert x.dtype == dtype
    assert {p.dtype for p in model.parameters()} == {dtype}


def test_one_seed_makes_one_model(tmp_path: Path) -> None:
    problem = load_problem(write(tmp_path, GOOD))
    (a, (x,)), (b, (y,)) = (problem.make(torch.float32, "cpu", seed=7) for _ in range(2))
    assert torch.equal(a.fc.weight, b.fc.weight)
    assert torch.equal(x, y)
    assert not torch.equal(a.fc.weight, problem.make(torch.float32, "cpu", 8)[0].fc.weight)


def test_two_files_of_one_name_do_not_see_each_other(tmp_path: Path) -> None:
    first = load_problem(write(tmp_path, GOOD))
    (tmp_path / "other").mkdir()
    second = load_problem(write(tmp_path / "other", GOOD.replace("= 16", "= 4")))
    assert first.model_type.__module__ != second.model_type.__module__
    assert len(first.get_inputs()[0]) == 16
    assert len(second.get_inputs()[0]) == 4


def test_what_the_file_prints_goes_to_stderr(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    load_problem(write(tmp_path, "print('hello')\n" + GOOD)).make(torch.float32, "cpu")
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "hello" in printed.err


def test_missing_file(tmp_path: Path) -> None:
    assert "does not exist" in refused(tmp_path / "nothing.py")


def test_folder(tmp_path: Path) -> None:
    folder = tmp_path / "model.py"
    folder.mkdir()
    assert "is a folder" in refused(folder)


def test_not_text(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refused(path)


def test_null_bytes(tmp_path: Path) -> None:
    assert "not valid Python" in refused(write(tmp_path, "a = 1\0"))


def test_does_not_parse(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "x = 1\nclass Model(:\n"))
    assert "line 2" in message
    assert "not valid Python" in message


def test_raises_on_import(tmp_path: Path) -> None:
    message = refused(write(tmp_path, "x = 1\n\nraise KeyError('no weights')\n"))
    assert "KeyError at line 3" in message
    assert "no weights" in message


def test_exits_on_import(tmp_path: Path) -> None:
    assert "SystemExit" in refused(write(tmp_path, "import sys; sys.exit(3)\n"))


def test_lacks_model(tmp_path: Path) -> None:
    message = refused(write(tmp_path, GOOD.replace("Model", "Net")))
    assert "defines no class Model" in message
    assert ".py:FUNCTION" in message
    solution = refused(write(tmp_path, GOOD.replace("Model", "ModelNew")))
    assert "judged by `epinorm judge PROBLEM" in solution


def test_model_is_no_module(tmp_path: Path) -> None:
    message = refused(write(tmp_path, GOOD.replace("class Model(nn.Module)", "class Model")))
    assert "subclass of torch.nn.Module" in message


@pytest.mark.parametrize("name", ["get_inputs", "get_init_inputs"])
def test_lacks_a_function(tmp_path: Path, name: str) -> None:
    text = GOOD.replace(f"def {name}(", "def other(")
    assert f"{name}()" in refused(write(tmp_path, text))


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        ("None", "nothing (None)"),
        ("3", "got int"),
        ("torch.rand(4, 32)", "got Tensor"),
        ("[]", "without any tensor"),
        ("[1, 2]", "without any tensor"),
        ("[torch.ones(16, 32, dtype=torch.int64)]", "torch.int64"),
    ],
)
def test_get_inputs_returns_the_wrong_thing(tmp_path: Path, returned: str, said: str) -> None:
    text = GOOD.replace("return [torch.rand(batch_size, in_features)]", f"return {returned}")
    message = refused(write(tmp_path, text))
    assert "get_inputs() must return" in message
    assert said in message


def test_get_init_inputs_returns_the_wrong_thing(tmp_path: Path) -> None:
    text = GOOD.replace("return [in_features, out_features, num_groups, shape]", "return 5")
    assert "get_init_inputs() must return a list" in refused(write(tmp_path, text))


def test_get_inputs_raises(tmp_path: Path) -> None:
    text = GOOD.replace("return [torch.rand(batch_size", "return [torch.rnd(batch_size")
    message = refused(write(tmp_path, text))
    assert "get_inputs() raised AttributeError at line" in message


def test_groups_that_do_not_divide(tmp_path: Path) -> None:
    message = refused(write(tmp_path, GOOD.replace("num_groups = 8", "num_groups = 7")))
    assert "Model(32, 64, 7" in message
    assert "divisible" in message


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    text = GOOD.replace("torch.rand(batch_size, in_features)", "torch.rand(batch_size, 33)")
    message = refused(write(tmp_path, text))
    assert "Model.forward on the inputs of get_inputs() raised RuntimeError" in message


def test_forward_returns_nothing(tmp_path: Path) -> None:
    text = GOOD.replace("return self.gn(self.fc(x)) * self.scale", "self.fc(x)")
    assert "Model.forward must return a tensor" in refused(write(tmp_path, text))
