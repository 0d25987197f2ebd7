"""Exported files on a GPU: judged clean, in every dtype, forward and gradients, by every strategy.

Exported for the GPU that is there and, under EPINORM_CORE=portable, for the portable core on it.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from epinorm.backends.cuda.runtime.device import gpu_of
from epinorm.problem import Strategy
from epinorm.tools.accuracy import relative_error
from epinorm.tools.bench import fp32_precision_set
from epinorm.tools.export.export import export
from epinorm.tools.judge.facts import JudgeOptions
from epinorm.tools.judge.judge import judge
from export_case import gpu_here, load
from exported import start

Precision = Literal["highest", "high", "native"]
PROBLEM = Path(__file__).parents[1] / "zoo" / "problem.py"

LAYER_NORM = """
import torch
import torch.nn as nn
import torch.nn.functional as F

class Model(nn.Module):
    def __init__(self, k, n, high=0.3):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(k, n), nn.GELU(), nn.LayerNorm(n, eps=1e-3))
        self.act = nn.Hardtanh(-0.5, high)
        self.gain = nn.Parameter(torch.randn(n))

    def forward(self, x, residual):
        return F.silu(self.act(self.net(x)) * self.gain + residual) * 3.0

def get_inputs():
    return [torch.rand(4, 16, 96), torch.randn(4, 16, 320)]

def get_init_inputs():
    return [96, 320]
"""

RMS_NORM = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.lin = nn.Linear(k, n, bias=False)
        self.norm = nn.RMSNorm(n)

    def forward(self, x):
        return torch.clamp(self.norm(self.lin(x)), min=-1.0).tanh()

def get_inputs():
    return [torch.rand(64, 256)]

def get_init_inputs():
    return [256, 1536]
"""


WHOLE = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, k, n):
        super().__init__()
        self.fc = nn.Linear(k, n)
        self.out = nn.Linear(n, k, bias=False)
        self.gn = nn.GroupNorm(8, k)

    def forward(self, x):
        kept = x
        x = torch.relu(self.fc(x))
        x = self.out(x) + kept
        x = self.gn(x)
        return torch.logsumexp(x, dim=1)

def get_inputs():
    return [torch.rand(256, 512)]

def get_init_inputs():
    return [512, 1024]
"""


@pytest.fixture(scope="session")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # of all workers
    return base / "extensions"


@pytest.fixture(autouse=True)
def own_extensions(extensions: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Build in a folder of the test run's own; tests of one text share its builds."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions))


@pytest.fixture(autouse=True)
def kernels_run() -> Iterator[None]:
    """A file that leaves a call to PyTorch's layers says so, which here is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="ModelNew runs PyTorch's own layers")
        yield


def exported(folder: Path, text: str, core: str = "auto", **options: Any) -> tuple[Path, Path]:
    problem, solution = folder / "problem.py", folder / "model_new.py"
    problem.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("EPINORM_CORE", core)
        solution.write_text(export(problem, gpus=[gpu_here()], **options).text)
    return problem, solution


def models(folder: Path, text: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """Model and ModelNew on the GPU, with the same parameters."""
    problem, solution = exported(folder, text, **options)
    module = load(problem, "problem")
    model = module.Model(*module.get_init_inputs())
    model_new = load(solution, "solution").ModelNew(*module.get_init_inputs())
    model_new.load_state_dict(model.state_dict())
    return model.cuda(), model_new.cuda()


def check_judged(
    folder: Path, text: str, dtype: str, precision: Precision, seed: int, **options: Any
) -> None:
    mode = dtype if precision == "native" else f"{dtype} {precision}"
    problem, solution = exported(folder, text, modes=[mode], **options)
    made, here = load(solution, "solution"), gpu_of().capability
    for chain in range(len(made.CHAINS)):  # else PyTorch's layers would be judged
        for step in ("inference", "forward", "backward"):
            assert (chain, here, mode, step) in made.TABLES
    asked = JudgeOptions(dtype, precision, "cuda", timing=False, seed=seed)
    verdict = judge(problem, solution, asked)
    assert verdict.clean, verdict.failures


MODES = (
    ("float32", "highest"), ("float32", "high"), ("bfloat16", "native"), ("float16", "native"),
)  # fmt: skip


@pytest.mark.parametrize("core", ["auto", "portable"])
@pytest.mark.parametrize(("dtype", "precision"), MODES)
def test_the_example_is_judged_clean(
    tmp_path: Path, core: str, dtype: str, precision: Precision
) -> None:
    check_judged(tmp_path, PROBLEM.read_text(), dtype, precision, 1, core=core)


def sized(m: int, k: int, n: int, groups: int) -> str:
    """The problem with other sizes."""
    text = PROBLEM.read_text().replace("batch_size = 32", f"batch_size = {m}")
    text = text.replace("input_size = 96", f"input_size = {k}")
    text = text.replace("hidden_size = 128", f"hidden_size = {n}")
    return text.replace("num_groups = 8", f"num_groups = {groups}")


@pytest.mark.parametrize(
    ("sizes", "dtype", "precision", "strategy"),
    [
        # Several tiles, the last of each not full.
        ((300, 264, 528, 33), "float32", "highest", "auto"),
        ((300, 264, 528, 33), "float32", "highest", "planes"),
        ((300, 264, 528, 33), "float32", "high", "epilogue"),
        ((300, 264, 528, 33), "bfloat16", "native", "epilogue"),
        # What Hopper's copy engine cannot read: rows of x and W on 4 bytes and on 2.
        ((33, 97, 80, 5), "float32", "highest", "single"),
        ((33, 97, 80, 5), "bfloat16", "native", "single"),
        # Few rows of a wide weight, which is converted on its way; many of x, which is; a long sum,
        # split over blocks.
        ((300, 4096, 8192, 512), "float32", "high", "auto"),
        ((8192, 2048, 256, 16), "float32", "high", "single"),
        # Groups of 12 channels.
        ((512, 256, 768, 64), "bfloat16", "native", "single"),
        ((8192, 128, 128, 8), "float32", "highest", "auto"),
    ],
)
def test_other_sizes_are_judged_clean(
    tmp_path: Path, sizes: tuple, dtype: str, precision: Precision, strategy: Strategy
) -> None:
    check_judged(tmp_path, sized(*sizes), dtype, precision, 4, strategy=strategy)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "highest"), ("bfloat16", "native")])
def test_operands_and_leading_dimensions(tmp_path: Path, dtype: str, precision: Precision) -> None:
    check_judged(tmp_path, LAYER_NORM, dtype, precision, 2)


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "highest"), ("bfloat16", "native")])
def test_chains_within_a_forward_of_the_users_own(
    tmp_path: Path, dtype: str, precision: Precision
) -> None:
    """By name: in 16 bit PyTorch's own layers are as fast at this size."""
    check_judged(tmp_path, WHOLE, dtype, precision, 3, strategy="single")


LIBRARY_KERNELS = ("gemm", "cutlass", "nvjet", "xmma", "splitk")


@pytest.mark.parametrize(
    ("core", "mode"),
    [("auto", mode) for mode in ("float32 highest", "float32 high", "bfloat16")]
    + [("portable", "float32 highest")],
)
def test_what_the_table_says_is_launched(tmp_path: Path, core: str, mode: str) -> None:
    _, model_new = models(tmp_path, sized(256, 256, 256, 16), core=core, modes=[mode])
    solution = type(model_new).forward.__globals__
    dtype, _, precision = mode.partition(" ")
    model_new.to(getattr(torch, dtype))
    x = torch.randn(256, 256, device="cuda", dtype=getattr(torch, dtype), requires_grad=True)
    dy = torch.ones_like(x)
    with fp32_precision_set(precision or "native"):
        model_new(x).backward(dy)  # builds
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            model_new(x).backward(dy)
            torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    expected, library = [], False
    for step in ("forward", "backward"):
        table = solution["TABLES"][0, torch.cuda.get_device_capability(), mode, step]
        expected += [solution["KERNELS"][step[0]][0] for step in table[-1] if len(step) > 3]
        library |= any(len(step) == 3 for step in table[-1])
    assert [name for name in names if name in set(expected)] == expected
    assert any(word in name.lower() for name in names for word in LIBRARY_KERNELS) == library


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_gradients_of_what_planes_cannot_hold(tmp_path: Path, precision: Precision) -> None:
    """A feature of 1e12 that no weight sees, and a row of dz far below its neighbours."""
    model, model_new = models(tmp_path, PROBLEM.read_text())
    with torch.no_grad():
        model.fc.weight[:, 5] = 0
    model_new.load_state_dict(model.state_dict())
    x = torch.randn(32, 96, device="cuda")
    x[::7, 5] = 1e12
    dy = torch.randn(32, 128, device="cuda")
    dy[3] *= 1e-30

    def gradients(m: nn.Module, dtype: torch.dtype) -> list[torch.Tensor]:
        leaf = x.to(dtype).requires_grad_()
        return list(torch.autograd.grad(m(leaf), [leaf, *m.parameters()], dy.to(dtype)))

    with fp32_precision_set(precision):
        ours, eager = gradients(model_new, torch.float32), gradients(model, torch.float32)
    truth = gradients(model.double(), torch.float64)
    limit = 2.0 * 2**-11 if precision == "high" else 1e-6
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert relative_error(mine, exact) <= max(1.1 * relative_error(theirs, exact), limit)
    small = [g[0][3] for g in (ours, eager, truth)]
    assert relative_error(small[0], small[2]) <= max(1.1 * relative_error(*small[1:]), limit)


def gradients_of(module: nn.Module, x: torch.Tensor, dy: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(module(x), [x, *module.parameters()], dy, retain_graph=True))


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_a_second_backward_through_a_retained_graph(tmp_path: Path, precision: Precision) -> None:
    """Planes that forward left are used up by the first; x's are rewritten by it."""
    _, model_new = models(tmp_path, sized(1024, 1024, 1024, 64))
    x = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    dy = torch.randn(1024, 1024, device="cuda")
    with fp32_precision_set(precision):
        y = model_new(x)
        first, second = (
            torch.autograd.grad(y, [x, *model_new.parameters()], dy, retain_graph=True)
            for _ in range(2)
        )
        again = torch.autograd.grad(model_new(x), [x, *model_new.parameters()], dy)
        alone = torch.autograd.grad(model_new(x.detach()), list(model_new.parameters()), dy)
    for one, other, repeated in zip(first, second, again, strict=True):
        assert torch.equal(one, repeated)
        assert relative_error(other, one.double()) <= (1e-6 if precision == "highest" else 1e-3)
    for one, other in zip(first[1:], alone, strict=True):
        assert relative_error(other, one.double()) <= (1e-6 if precision == "highest" else 1e-3)


def off_16_bytes(matrix: torch.Tensor) -> torch.Tensor:
    """The same values, each row where the copy engine cannot read it."""
    values = torch.empty(matrix.numel() + 1, device=matrix.device, dtype=matrix.dtype)
    return values[1:].view(matrix.shape).copy_(matrix)


def test_strides_and_addresses(tmp_path: Path) -> None:
    """The same bits as of tensors that the copy engine can read."""
    _, model_new = models(tmp_path, sized(300, 264, 528, 33))
    x, dy = torch.randn(300, 264, device="cuda"), torch.randn(300, 528, device="cuda")
    expected = gradients_of(model_new, x.requires_grad_(), dy)
    turned, apart = x.detach().t().contiguous().t(), off_16_bytes(x.detach())
    for other in (turned, apart):
        found = gradients_of(model_new, other.requires_grad_(), dy.t().contiguous().t())
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_what_the_tables_do_not_serve_is_the_layers_own(tmp_path: Path) -> None:
    model, model_new = models(tmp_path, PROBLEM.read_text(), modes=["float32 highest"])

    def check(**other: Any) -> None:
        x = other.get("x", torch.randn(32, 96, device="cuda"))
        with pytest.warns(UserWarning, match="ModelNew runs PyTorch's own layers here"):
            found = model_new(x)
        assert torch.equal(found, model(x))

    check(x=torch.randn(33, 96, device="cuda"))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        check()
    with fp32_precision_set("high"):
        check()
    for module in (model, model_new):
        module.leaky_relu.negative_slope = 0.5
    check()
    for module in (model, model_new):
        module.leaky_relu.negative_slope = 0.01
        module.double()
    check(x=torch.randn(32, 96, device="cuda", dtype=torch.float64))


@pytest.mark.alone
def test_a_first_build_and_later_starts_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 s, and 3 s from the process' start to the first result, of which all but half a second is
    `import torch`, the CUDA context and the model: slow machines need 3 s for the first alone."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "extensions"))
    _, solution = exported(tmp_path, PROBLEM.read_text())
    first = start(solution, "float32", "highest")
    later = min((start(solution, "float32", "highest") for _ in range(3)), key=lambda s: s.result)
    assert first.share_of_file <= 20.0, first
    assert later.share_of_file <= 0.5, later
    assert later.result - later.torch <= 0.6, later


@pytest.mark.alone
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_on_the_second_gpu(tmp_path: Path) -> None:
    _, model_new = models(tmp_path, PROBLEM.read_text())
    x = torch.randn(32, 96)
    results = []
    for device in ("cuda:0", "cuda:1"):
        y = model_new.to(device)(x.to(device))
        y.sum().backward()
        results.append((y.detach().cpu(), model_new.fc.weight.grad.cpu()))
        model_new.zero_grad()
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)
