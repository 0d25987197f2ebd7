"""Whole problems exported: a chain's statements become one call, all other text stays."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epinorm.operator.functional import apply_chain
from epinorm.tools.export.export import export
from epinorm.tools.export.recipe import read_recipes
from epinorm.tools.export.source import forward_of, model_class
from epinorm.tools.kernelbench.problem import ProblemError, load_problem

sys.path.insert(0, str(Path(__file__).parent))

from export_case import load

PROBLEM = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, k, n):
        super(Model, self).__init__()
        self.fc = nn.Linear(k, n)
        self.bn = nn.BatchNorm1d(n)
        self.gn = nn.GroupNorm(4, n)
        self.out = nn.Linear(n, n, bias=False)
        self.drop = nn.Dropout(0.5)
        self.factor = 2.0

    def forward(self, x, y):
{forward}

def get_inputs():
    return [torch.rand(512, 1024), torch.rand(512, 1024)]

def get_init_inputs():
    return [1024, 1024]
"""

CASES = {
    "batch norm behind": (
        """
        x = self.fc(x)
        x = x * self.factor  # scaled
        x = self.bn(x)
        return x.sum(dim=1)""",
        ["scale(2)"],
    ),
    "instance norm": (
        """
        x = x.unsqueeze(0)
        x = self.fc(x)
        return nn.functional.instance_norm(x)""",
        ["identity"],
    ),
    "two chains and a residual": (
        """
        kept = x
        x = torch.relu(self.fc(x))
        x = self.out(x) + kept
        x = self.gn(x)
        return x, y""",
        ["relu", "add_residual|group_norm(4,1e-05)"],
    ),
    "two uses": (
        """
        x = self.fc(x)
        original = x.clone().detach()
        x = x * 0.5
        return x + original""",
        ["identity"],
    ),
    "dropout stays": (
        """
        x = torch.relu(self.fc(x))
        x = self.drop(x)
        return torch.softmax(x, dim=1)""",
        ["relu"],
    ),
    "a number for each row": (
        """
        x = self.fc(x)
        x = x * y[:, :1]
        x = self.gn(x)
        return x""",
        ["identity"],
    ),
    "returned whole": (
        """
        return torch.tanh(self.gn(self.fc(x)))""",
        ["group_norm(4,1e-05)|tanh"],
    ),
    "one number for all channels": (
        """
        factor = y.mean()
        x = self.fc(x)
        x = x * factor
        return self.gn(x)""",
        ["identity"],
    ),
    "its width is asked for": (
        """
        h = self.fc(x)
        z = torch.relu(h)
        return z.reshape(h.shape[0], 2, -1)""",
        ["identity"],
    ),
}


def write(folder: Path, forward: str) -> Path:
    path = folder / "problem.py"
    path.write_text(PROBLEM.replace("{forward}", forward))
    return path


def chains_of(path: Path) -> list[str]:
    with torch.device("meta"):
        model, inputs = load_problem(path).make(torch.float32, "meta")
    recipes, _ = read_recipes(path, forward_of(model_class(path)), model, inputs)
    return [str(recipe.chain) for recipe in recipes]


@pytest.mark.parametrize("name", CASES)
def test_the_chains_of_whole_statements_are_found(name: str, tmp_path: Path) -> None:
    forward, chains = CASES[name]
    assert chains_of(write(tmp_path, forward)) == chains


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mode"),
    [  # in 16 bit, where a table serves: there is no guard to compile
        ("two chains and a residual", "bfloat16"),
        ("returned whole", "bfloat16"),
        ("two uses", "float32 highest"),
    ],
)
def test_the_file_computes_what_model_does(name: str, mode: str, tmp_path: Path) -> None:
    """By the layers where no table serves, and by what the calls are given where one does."""
    path = write(tmp_path, CASES[name][0])
    made = export(path, gpus=("h200",), modes=(mode,))
    (tmp_path / "new.py").write_text(made.text)
    problem, exported = load(path, "problem"), load(tmp_path / "new.py", "exported")
    torch.manual_seed(1)
    model = problem.Model(1024, 1024)
    torch.manual_seed(1)
    model_new = exported.ModelNew(1024, 1024)
    inputs = problem.get_inputs()
    calls = []

    def fused(number: int, *tensors: Tensor, operands: Any = (), facts: Any = ()) -> Tensor:
        calls.append(number)
        return apply_chain(*tensors, operands, CASES[name][1][number], "reference")

    def leaves(output: Any) -> list[Tensor]:
        return list(output) if isinstance(output, tuple) else [output]

    theirs = leaves(model(*inputs))
    for ours, want in zip(leaves(model_new(*inputs)), theirs, strict=True):
        assert torch.equal(ours, want)
    exported._fused = fused
    for ours, want in zip(leaves(model_new(*inputs)), theirs, strict=True):
        torch.testing.assert_close(ours, want)
    assert calls == list(range(len(CASES[name][1])))


@pytest.mark.slow
def test_a_last_activations_result_is_what_its_gradient_reads(tmp_path: Path) -> None:
    path = write(tmp_path, CASES["dropout stays"][0])
    made = export(path, gpus=("h200",), modes=("float32 highest",))
    (tmp_path / "new.py").write_text(made.text)
    tables = load(tmp_path / "new.py", "exported").TABLES
    given = {key[3]: table[0] for key, table in tables.items()}
    assert given["forward"] == ("x", "weight", "bias")
    planes = ("left_x", "left_weight")
    assert given["backward"] == ("x", "weight", "bias", "y", *planes, "dy")
    assert given["backward again"] == ("x", "weight", "bias", "y", "dy")


@pytest.mark.slow
def test_the_text_around_a_chain_is_the_problems_own(tmp_path: Path) -> None:
    path = write(tmp_path, CASES["batch norm behind"][0])
    text = export(path, gpus=("h200",), modes=("float32 highest",)).text
    assert (
        """
        if fused is None:
            x = self.fc(x)
            x = x * self.factor  # scaled
        else:
            x = fused
        x = self.bn(x)
        return x.sum(dim=1)
"""
        in text
    )
    assert "facts=(self.factor,)," in text


@pytest.mark.parametrize(
    "forward, behind",
    [
        ("        x = self.fc(x); return self.gn(x)", "x = self.fc(x);"),
        ("        'é'; return self.gn(self.fc(x))", "'é';"),
    ],
)
def test_statements_that_share_a_line_are_said(tmp_path: Path, forward: str, behind: str) -> None:
    """Their lines could not be replaced one by one."""
    file = tmp_path / "problem.py"
    file.write_text(PROBLEM.format(forward=forward), encoding="utf-8")
    with pytest.raises(ProblemError) as said:
        model_class(file)
    assert f"a statement of forward stands behind {behind!r}; give it a line" in str(said.value)
