"""Is a candidate as accurate as the PyTorch model that it replaces? Truth is float64.

Both models run on the same fresh inputs with the same parameters, drawn at random (norm parameters
and biases too: at their initial ones and zeros a kernel that ignores them would pass). The truth is
the same module in float64. What counts is the error relative to eager's own error, in the output
and in every gradient.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

__all__ = [
    "Comparison",
    "Outcome",
    "Verification",
    "allowed_error",
    "compare",
    "draw_inputs",
    "poisoned_memory",
    "randomize_parameters",
    "relative_error",
    "run_model",
    "share_state",
    "verify",
]

InputKind = Literal["rand", "randn"]
Pass = Literal["forward", "training"]

RATIO_LIMITS: Mapping[torch.dtype, float] = {
    torch.float64: 1.0,
    torch.float32: 1.0,
    torch.bfloat16: 1.1,
    torch.float16: 1.1,
}
"""How many times eager's error ours may be."""

RATIO_RESOLUTION = 0.005
"""Ratios are read to two decimals: 1.00 is at most 1.005. Two results that share a library product
differ in the last bits of what follows it, and their errors then agree to a thousandth, on either
side of one."""

FLOOR_ULPS: Mapping[torch.dtype, float] = {
    torch.float64: 16.0,
    torch.float32: 2.0,
    torch.bfloat16: 0.25,
    torch.float16: 0.25,
}
"""An error of this many ulps (spacings at 1) always passes. On a tiny problem eager's error is a
handful of roundings and by luck nearly none, so that a multiple of it means nothing. In 16 bit the
floor is what rounding the exact result alone costs, 0.2 ulp; two ulps there would be far above
eager's error on any problem. In float64 the truth has the same precision, so eager's error against
it is often zero and the distance between two correct results is all there is to judge."""


def allowed_error(eager_error: float, dtype: torch.dtype) -> float:
    """The largest relative error that passes, given eager's own (dimensionless)."""
    limit = RATIO_LIMITS[dtype] + RATIO_RESOLUTION
    return max(limit * eager_error, FLOOR_ULPS[dtype] * torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Comparison:
    """One tensor of the candidate against eager's, both against the float64 truth.

    ``what`` is "output", "gradient of fc.weight", ...; errors are ‖out − truth‖ / ‖truth‖.
    ``reason`` says what is wrong beside the error (shape, NaN, missing); None for nothing.
    """

    what: str
    inputs: str
    ours: float
    eager: float
    allowed: float
    reason: str | None = None

    @property
    def ratio(self) -> float:
        """Our error over eager's: 1 where both are zero."""
        if self.eager > 0:
            return self.ours / self.eager
        return 1.0 if self.ours == 0 else math.inf

    @property
    def passed(self) -> bool:
        return self.reason is None and self.ours <= self.allowed

    @property
    def strain(self) -> float:
        """Our error over the allowed one: how close this comparison is to failing."""
        return math.inf if self.reason else self.ours / self.allowed

    def __str__(self) -> str:
        verdict = self.reason or (
            f"error {self.ours:.2e}, eager {self.eager:.2e} ({self.ratio:.2f}×), "
            f"allowed {self.allowed:.2e}"
        )
        return f"{self.what} on {self.inputs}: {verdict}"


@dataclass(frozen=True)
class Verification:
    """The outcome for one dtype and pass: it passed if there are comparisons and all passed."""

    dtype: torch.dtype
    training: bool
    comparisons: tuple[Comparison, ...]

    @property
    def passed(self) -> bool:
        return bool(self.comparisons) and all(c.passed for c in self.comparisons)

    @property
    def failures(self) -> tuple[Comparison, ...]:
        return tuple(c for c in self.comparisons if not c.passed)

    @property
    def worst(self) -> Comparison:
        """The comparison closest to its limit, or furthest beyond it."""
        return max(self.comparisons, key=lambda c: c.strain)


@dataclass(frozen=True)
class Outcome:
    """What one run of a model gave: its output tensors and, where asked for, gradients by name."""

    outputs: tuple[Tensor, ...]
    gradients: Mapping[str, Tensor | None]

    def tensors(self) -> Iterator[tuple[str, Tensor | None]]:
        for index, output in enumerate(self.outputs):
            yield ("output" if len(self.outputs) == 1 else f"output {index}"), output
        yield from self.gradients.items()


def relative_error(result: Tensor, truth: Tensor) -> float:
    """‖result − truth‖ / ‖truth‖ in float64; inf where result holds NaN or Inf and truth does not.

    Both of the same shape, any floating dtype. A truth of zeros gives ‖result‖; NaN and Inf must
    stand where the truth has them, and the finite elements are compared. Empty tensors: 0.
    """
    result, truth = result.detach().double(), truth.detach().double()
    finite = truth.isfinite()
    if not bool(finite.all()):
        same = torch.equal(result.isnan(), truth.isnan()) and bool(
            (result[truth.isinf()] == truth[truth.isinf()]).all()
        )
        if not same:
            return math.inf
        result, truth = result[finite], truth[finite]
    if not bool(result.isfinite().all()):
        return math.inf
    difference = torch.linalg.vector_norm(result - truth).item()
    norm = torch.linalg.vector_norm(truth).item()
    return difference / norm if norm > 0 else difference


def randomize_parameters(model: nn.Module, seed: int = 0) -> None:
    """Give every one-dimensional parameter (norm weight and bias, linear bias) random values.

    Weights of norms become 1 + randn/4, so that no sign or order of channels is special; every
    other vector randn/2. Matrices keep the values that their layers drew. Changed in place.
    """
    norms = {
        id(module.weight)
        for module in model.modules()
        if isinstance(getattr(module, "weight", None), Tensor)
    }
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 or not parameter.is_floating_point():
                continue
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            value = 1 + noise / 4 if id(parameter) in norms else noise / 2
            parameter.copy_(value.to(parameter.dtype))


def share_state(source: nn.Module, target: nn.Module) -> None:
    """Copy the state_dict of ``source`` into ``target``; raises RuntimeError where keys differ."""
    target.load_state_dict(source.state_dict(), strict=True)


def draw_inputs(inputs: Sequence[Any], kind: InputKind, seed: int) -> tuple[Any, ...]:
    """Fresh floating tensors like ``inputs``, uniform in [0, 1) or normal; the rest unchanged."""
    drawn = []
    for index, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.is_floating_point():
            generator = torch.Generator(value.device).manual_seed(seed + index)
            draw = torch.rand if kind == "rand" else torch.randn
            fresh = draw(value.shape, generator=generator, device=value.device)
            value = fresh.to(value.dtype)
        drawn.append(value)
    return tuple(drawn)


@contextlib.contextmanager
def poisoned_memory(like: Sequence[Tensor | None], copies: int = 3) -> Iterator[None]:
    """Within, new memory of the sizes of ``like`` holds NaN (in any floating dtype).

    So an output that is never written shows, where it might have held the right values of an
    earlier call. On CUDA, blocks of these sizes are filled with bytes 0xFF and freed just before:
    PyTorch's allocator hands them out again. On the CPU the system's allocator may not, so there
    PyTorch itself is told to fill what it allocates.
    """
    blocks = []
    for tensor in like:
        if tensor is not None and tensor.numel():
            size = tensor.numel() * tensor.element_size()
            blocks += [
                torch.full((size,), 0xFF, dtype=torch.uint8, device=tensor.device)
                for _ in range(copies)
            ]
    del blocks
    if any(tensor is not None and tensor.device.type != "cpu" for tensor in like):
        yield
        return
    was = torch.are_deterministic_algorithms_enabled()
    only_warned = torch.is_deterministic_algorithms_warn_only_enabled()
    filled = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was, warn_only=only_warned)
        torch.utils.deterministic.fill_uninitialized_memory = filled


def run_model(model: nn.Module, inputs: Sequence[Any], training: bool, dy_seed: int = 0) -> Outcome:
    """Run forward, and in training also backward with a random dy drawn from ``dy_seed``.

    Without training, the run is under ``torch.no_grad``. Gradients come by name: "gradient of
    input 0", "gradient of fc.weight", ...; None where backward gave none.
    """
    if not training:
        with torch.no_grad():
            return Outcome(_floating_leaves(model(*inputs)), {})
    inputs = tuple(
        value.detach().clone().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for value in inputs
    )
    model.zero_grad(set_to_none=True)
    outputs = _floating_leaves(model(*inputs))
    torch.autograd.backward(outputs, draw_dy(outputs, dy_seed))
    gradients = {
        f"gradient of input {index}": value.grad
        for index, value in enumerate(inputs)
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            gradients[f"gradient of {name}"] = parameter.grad
    model.zero_grad(set_to_none=True)
    return Outcome(tuple(o.detach() for o in outputs), gradients)


def draw_dy(outputs: Sequence[Tensor], seed: int) -> list[Tensor]:
    """The gradients to start backward from, the same for every model and dtype on a device.

    Drawn in float32 and rounded to bf16, which float16 and all wider types hold nearly or fully:
    so truth, eager and candidate start from one value.
    """
    drawn = []
    for index, output in enumerate(outputs):
        generator = torch.Generator(output.device).manual_seed(seed + index)
        dy = torch.randn(output.shape, generator=generator, device=output.device)
        drawn.append(dy.bfloat16().clamp(-4, 4).to(output.dtype))
    return drawn


def _floating_leaves(output: Any) -> tuple[Tensor, ...]:
    return tuple(
        leaf
        for leaf in tree_leaves(output)
        if isinstance(leaf, Tensor) and leaf.is_floating_point()
    )


def compare(
    truth: Outcome, eager: Outcome, ours: Outcome, dtype: torch.dtype, inputs: str
) -> tuple[Comparison, ...]:
    """Compare every output and gradient of the truth; what the candidate lacks fails."""
    ours_by_name, eager_by_name = dict(ours.tensors()), dict(eager.tensors())
    comparisons = []
    for what, exact in truth.tensors():
        if exact is None:
            continue
        theirs = eager_by_name[what]
        assert theirs is not None, f"eager has no {what}"
        eager_error = relative_error(theirs, exact)
        allowed = allowed_error(eager_error, dtype)
        result = ours_by_name.get(what)
        reason = _mismatch(result, theirs)
        error = math.inf
        if reason is None and result is not None:
            error = relative_error(result, exact)
            if not math.isfinite(error):
                reason = _not_finite(result, exact)
            elif not math.isfinite(eager_error):
                reason = f"eager's own result is not finite in {dtype}, so there is no yardstick"
        comparisons.append(Comparison(what, inputs, error, eager_error, allowed, reason))
    return tuple(comparisons)


def _mismatch(result: Tensor | None, theirs: Tensor) -> str | None:
    if result is None:
        return "missing"
    if result.shape != theirs.shape:
        return f"has shape {tuple(result.shape)}, eager's has {tuple(theirs.shape)}"
    if result.dtype != theirs.dtype:
        return f"has dtype {result.dtype}, eager's has {theirs.dtype}"
    if result.device != theirs.device:
        return f"is on {result.device}, eager's is on {theirs.device}"
    return None


def _not_finite(result: Tensor, truth: Tensor) -> str:
    wrong = int((result.isfinite() != truth.isfinite()).sum())
    return (
        f"{wrong} of {result.numel()} elements are NaN or Inf where the truth is finite, or the "
        "other way round (never written, or overflowed)"
    )


def verify(
    model: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    *,
    training: bool = True,
    kinds: Sequence[InputKind] = ("rand", "randn"),
    seed: int = 0,
) -> Verification:
    """Compare ``candidate`` with ``model`` on fresh inputs; both must hold the same state_dict keys.

    ``inputs`` give shapes, dtypes and device; their floating tensors are redrawn for each of
    ``kinds``. The parameters are randomised for the comparison and given back afterwards. The
    candidate runs twice: freed memory is poisoned before each run, and the runs must agree bit for
    bit. Raises RuntimeError if the candidate cannot load the model's state_dict.
    """
    saved = copy.deepcopy(model.state_dict())
    saved_candidate = copy.deepcopy(candidate.state_dict())
    try:
        randomize_parameters(model, seed)
        share_state(model, candidate)
        return _verify(model, candidate, inputs, training, kinds, seed)
    finally:
        model.load_state_dict(saved)
        candidate.load_state_dict(saved_candidate)


def _verify(
    model: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    training: bool,
    kinds: Sequence[InputKind],
    seed: int,
) -> Verification:
    dtype = next(v.dtype for v in inputs if isinstance(v, Tensor) and v.is_floating_point())
    exact_model = copy.deepcopy(model).double()
    comparisons: list[Comparison] = []
    for index, kind in enumerate(kinds):
        fresh = draw_inputs(inputs, kind, seed + 1000 * (index + 1))
        exact = tuple(
            v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for v in fresh
        )
        truth = run_model(exact_model, exact, training, seed)
        eager = run_model(model, fresh, training, seed)
        like = [tensor for _, tensor in eager.tensors()]
        with poisoned_memory(like):
            ours = run_model(candidate, fresh, training, seed)
        comparisons += compare(truth, eager, ours, dtype, kind)
        with poisoned_memory(like):
            again = run_model(candidate, fresh, training, seed)
        comparisons += _differences(ours, again, kind)
    return Verification(dtype, training, tuple(comparisons))


def _differences(first: Outcome, second: Outcome, inputs: str) -> list[Comparison]:
    """A failed comparison for each tensor that a second run on the same inputs changed."""
    again = dict(second.tensors())
    failed = []
    for what, tensor in first.tensors():
        other = again.get(what)
        if tensor is None or other is None or tensor.shape != other.shape:
            continue  # missing or of another shape: compare() has said so
        if not torch.equal(tensor.nan_to_num(), other.nan_to_num()):
            changed = int((tensor != other).sum())
            reason = f"a second run on the same inputs changed {changed} of {tensor.numel()} values"
            failed.append(Comparison(what, inputs, math.inf, 0.0, 0.0, reason))
    return failed
