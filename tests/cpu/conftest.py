"""What the tests of the CPU kernels share: a case, its truth, and threads put back afterwards."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from epinorm.backends import reference as reference_backend
from epinorm.backends.cpu import supports
from epinorm.chain import Chain, reference
from epinorm.problem import Inputs, Problem, Wanted
from epinorm.tools.accuracy import allowed_error, relative_error

sys.path.insert(0, str(Path(__file__).parent))
import kernels as backend

NAMES = ("y", "dx", "dweight", "dbias", "dnorm_weight", "dnorm_bias")


@dataclass(frozen=True)
class Case:
    """One problem with its tensors; ``run`` gives y and the gradients of all of them."""

    problem: Problem
    inputs: Inputs
    dy: Tensor

    def wanted(self) -> Wanted:
        given = [t is not None for t in self.inputs[:5]]
        return Wanted(*given, (True,) * len(self.inputs.operands))  # type: ignore[arg-type]

    def run(self, module=backend) -> tuple[Tensor | None, ...]:
        kept = module.forward(self.problem, self.inputs)
        gradients = module.backward(self.problem, self.inputs, kept, self.dy, self.wanted())
        return (kept.y, *gradients[:5], *gradients.operands)

    def eager(self) -> tuple[Tensor | None, ...]:
        return self.run(reference_backend)

    def exact(self) -> tuple[Tensor | None, ...]:
        """In float64, by autograd through plain PyTorch."""
        leaves = [
            None if t is None else t.double().detach().requires_grad_()
            for t in (*self.inputs[:5], *self.inputs.operands)
        ]
        x, weight, bias, norm_weight, norm_bias, *operands = leaves
        y = reference.linear_norm(
            x, weight, bias, self.problem.chain, norm_weight, norm_bias, operands
        )
        found = iter(torch.autograd.grad(y, [t for t in leaves if t is not None], self.dy.double()))
        return (y.detach(), *(None if t is None else next(found) for t in leaves))


MakeCase = Callable[..., Case]


def _make_case(
    chain: str,
    m: int,
    k: int,
    n: int,
    dtype: torch.dtype = torch.float32,
    norm_dtype: torch.dtype | None = None,
    *,
    bias: bool = True,
    affine: bool = True,
    draw: Callable[..., Tensor] = torch.randn,
    offset: float = 0.0,
) -> Case:
    norm_dtype = norm_dtype or dtype
    parsed = Chain.parse(chain)
    problem = Problem(
        *(parsed, m, k, n, dtype, norm_dtype, norm_dtype, bias, affine, affine, True),
        device=torch.device("cpu"),
        precision="highest" if dtype == torch.float32 else "native",
    )
    shapes = {"channel": (n,), "element": (m, n)}
    inputs = Inputs(
        draw(m, k).to(dtype),
        (torch.randn(n, k) / k**0.5).to(dtype),
        (torch.randn(n) + offset).to(dtype) if bias else None,
        torch.randn(n).to(norm_dtype) if affine else None,
        torch.randn(n).to(norm_dtype) if affine else None,
        tuple(torch.randn(shapes[kind]).to(norm_dtype) for kind in parsed.operand_kinds),
    )
    return Case(problem, inputs, torch.randn(m, n).to(norm_dtype))


@pytest.fixture
def make_case() -> MakeCase:
    return _make_case


def _check_as_accurate_as_eager(cases: list[Case]) -> None:
    """Each result's error, over all cases together, is at most eager's own (tools.accuracy)."""
    ours, eager, exact = ([case.__getattribute__(how)() for case in cases] for how in HOW)
    dtype = cases[0].problem.dtype
    for index, first in enumerate(exact[0]):
        if first is None:
            assert ours[0][index] is None
            continue
        truth, mine, theirs = (
            torch.stack([results[index].double() for results in run])
            for run in (exact, ours, eager)
        )
        assert ours[0][index].dtype == eager[0][index].dtype
        assert ours[0][index].shape == eager[0][index].shape
        error, yardstick = relative_error(mine, truth), relative_error(theirs, truth)
        name = NAMES[index] if index < len(NAMES) else f"doperand{index - len(NAMES)}"
        assert error <= allowed_error(yardstick, dtype), f"{name}: {error:.3g} > {yardstick:.3g}"


HOW = ("run", "eager", "exact")


@pytest.fixture
def check_as_accurate_as_eager() -> Callable[[list[Case]], None]:
    return _check_as_accurate_as_eager


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Undo what a test does to the number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def needs_kernels(make_case: MakeCase) -> None:
    """Without a compiler the reference would be compared with itself: skip, and say why."""
    reason = supports(make_case("layer_norm", 4, 4, 4).problem)
    if reason is not None:
        pytest.skip(reason)
