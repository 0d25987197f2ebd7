"""``rounding="eager"`` gives what eager gives, by an evaluator's tolerance: exported and fused."""

from __future__ import annotations

import copy
import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import epinorm
from epinorm.tools.accuracy import relative_error
from epinorm.tools.export.export import export

sys.path.insert(0, str(Path(__file__).parents[1]))

import activation_errors
from export_case import gpu_here
from rounding_problems import PROBLEMS, TOLERANCES, far_off, loaded, problem_text, trials

SEEDS = 20
SIZES = (1024, 8192, 8192)
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: str(d)[6:])
NAMES = pytest.mark.parametrize("name", PROBLEMS)


def check_error(ours: torch.Tensor, eager: torch.Tensor, model: Any, inputs: Any) -> None:
    """The model is float64 on return."""
    truth = model.double()(*(x.double() for x in inputs))
    assert relative_error(ours, truth) <= 1.05 * relative_error(eager, truth)


@NAMES
@DTYPES
@pytest.mark.filterwarnings("error:ModelNew runs PyTorch's own layers")
def test_an_exported_file_passes_on_every_seed(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    problem = loaded(problem_text(name, *SIZES), tmp_path, "problem")
    mode = "float32 highest" if dtype == torch.float32 else str(dtype)[6:]
    text = export(tmp_path / "problem.py", gpus=[gpu_here()], modes=[mode]).text
    ours = loaded(text, tmp_path, "solution").ModelNew().to("cuda", dtype)
    wrong = {}
    with torch.no_grad():
        for seed, (model, inputs) in enumerate(trials(problem, SEEDS, dtype, "cuda")):
            ours.load_state_dict(model.state_dict())
            made, eager = ours(*inputs), model(*inputs)
            wrong[seed] = far_off(made, eager)
            if seed == 0:
                check_error(made, eager, model, inputs)
    assert not any(wrong.values()), wrong


@NAMES
@DTYPES
@pytest.mark.parametrize("strategy", ["auto", "epilogue"])
def test_a_fused_model_passes_and_is_as_accurate(
    name: str, dtype: torch.dtype, strategy: str, tmp_path: Path
) -> None:
    problem = loaded(problem_text(name, *SIZES), tmp_path, "problem")
    wrong = {}
    with torch.no_grad():
        for seed, (model, inputs) in enumerate(trials(problem, SEEDS, dtype, "cuda")):
            fused = epinorm.fuse(copy.deepcopy(model), rounding="eager", strategy=strategy)  # type: ignore[arg-type]
            ours, eager = fused(*inputs), model(*inputs)
            wrong[seed] = far_off(ours, eager)
            if seed == 0:
                check_error(ours, eager, model, inputs)
    assert not any(wrong.values()), wrong


NORMS: dict[str, Any] = {
    "group_norm": (epinorm.GroupNorm(16), lambda z, w, b, eps: F.group_norm(z, 16, w, b, eps)),
    "layer_norm": (epinorm.LayerNorm(), lambda z, w, b, eps: F.layer_norm(z, (256,), w, b, eps)),
    "rms_norm": (epinorm.RMSNorm(), lambda z, w, b, eps: F.rms_norm(z, (256,), w, eps)),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("eps", [1e-5, 0.1])
@pytest.mark.parametrize("strategy", ["single", "epilogue"])
@pytest.mark.parametrize("norm", NORMS)
def test_a_norm_rounds_where_pytorchs_does(
    norm: str, strategy: str, eps: float, dtype: torch.dtype
) -> None:
    """x passes the product as it is; PyTorch up to 2.12 rounds group_norm's statistics."""
    torch.manual_seed(0)
    m, n = 512, 256
    x = torch.randn(m, n, device="cuda") * torch.rand(m, 1, device="cuda") + torch.randn(
        m, 16, device="cuda"
    ).repeat_interleave(16, 1)
    gamma, beta = (torch.randn(n, device="cuda").to(dtype) for _ in range(2))
    beta = None if norm == "rms_norm" else beta
    kind, eager = NORMS[norm]
    x, one = x.to(dtype), torch.eye(n, device="cuda", dtype=dtype)
    ours = epinorm.linear_norm(
        *(x, one), norm=dataclasses.replace(kind, eps=eps), norm_weight=gamma, norm_bias=beta,
        rounding="eager", strategy=strategy,
    )  # fmt: skip
    assert (ours == eager(x, gamma, beta, eps)).float().mean() > 0.995


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["mish", "silu", "sigmoid", "softplus"])
def test_all_values_of_16_bits_give_pytorchs_results(name: str, dtype: torch.dtype) -> None:
    """But for those that an approximation of exp moves across a tie: of 65,536 not many more than
    with CUDA's own exp, which PyTorch takes, are not the nearest to the truth; and to the next."""
    bits = torch.arange(-(2**15), 2**15, device="cuda", dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    x = torch.where(x.isfinite(), x, 0).view(1024, 64)
    one = torch.eye(64, device="cuda", dtype=dtype)
    eager, nearest = getattr(F, name)(x), getattr(F, name)(x.double()).to(dtype)
    for rounding in ("eager", "once"):
        ours = epinorm.linear_norm(
            x, one, norm=None, pre=name, rounding=rounding, strategy="single"
        )
        assert torch.equal(ours.isnan(), eager.isnan())
        order = [t.view(torch.int16).int() for t in (ours, eager)]
        order = [torch.where(t < 0, -(t & 0x7FFF), t) for t in order]  # 0.0 and -0.0 are one
        assert (order[0] - order[1]).abs().max() <= 1  # numbers of the dtype between
        assert (ours != nearest).sum() <= (eager != nearest).sum() + 48


ACTIVATIONS = [
    *(
        (name, dtype)
        for name in activation_errors.NAMES
        for dtype in (torch.bfloat16, torch.float16)
    ),
    *((name, torch.float32) for name in activation_errors.AS_PYTORCH),
]


@pytest.mark.parametrize("rounding", ["once", "eager"])
@pytest.mark.parametrize("name,dtype", ACTIVATIONS)
def test_activations_of_all_numbers_are_as_accurate_as_eagers(
    name: str, dtype: torch.dtype, rounding: Any
) -> None:
    """Infinities and NaN, too: behind a norm of single channels, which passes its bias on."""
    x = activation_errors.numbers(dtype).cuda().requires_grad_()
    z, weight = torch.zeros(2, 16, device="cuda", dtype=dtype), torch.zeros(len(x), 16).to(x)
    y = epinorm.linear_norm(
        *(z, weight), norm=epinorm.GroupNorm(len(x)), norm_weight=torch.ones_like(x), norm_bias=x,
        post=name, rounding=rounding, strategy="epilogue",
    )  # fmt: skip
    (dx,) = torch.autograd.grad(y, x, torch.full_like(y, 0.5))  # of either row
    eager, truth = (activation_errors.eagers(name, t) for t in (x, x.double()))
    for one in zip((y.detach()[0], dx), eager, truth, activation_errors.SMALL, strict=True):
        activation_errors.check_as_accurate(*one)
