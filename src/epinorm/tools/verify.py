"""Is a candidate as accurate as the PyTorch model that it replaces? Truth is float64.

Both models run on the same fresh inputs with the same parameters, drawn at random (norm parameters
and biases too: at their initial ones and zeros a kernel that ignores them would pass). The truth is
the same module in float64. What counts is the error relative to eager's own error, in the output
and in every gradient.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from epinorm.tools.accuracy import (
    Comparison,
    Outcome,
    Verification,
    allowed_error,
    compare,
    differences,
    over_draws,
)
from epinorm.tools.kinks import away_from_kinks
from epinorm.tools.progress import Progress, silent
from epinorm.tools.tf32 import RoundedOperands, allows_tf32

InputKind = Literal["rand", "randn"]


def stop_dropout(model: nn.Module) -> bool:
    """Let the model's modules for dropout drop nothing, for good; whether any dropped something."""
    dropping = [
        module
        for module in model.modules()
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.p
    ]
    for module in dropping:
        module.p = 0.0
    return bool(dropping)


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


def of_floats(values: Iterable[Any], change: Callable[[Tensor], Any]) -> tuple[Any, ...]:
    """The values, each floating tensor among them changed."""
    return tuple(change(v) if is_floating(v) else v for v in values)


def is_floating(value: Any) -> bool:
    """Whether the value is a tensor of floating-point numbers."""
    return isinstance(value, Tensor) and value.is_floating_point()


def draw_inputs(inputs: Sequence[Any], kind: InputKind, seed: int) -> tuple[Any, ...]:
    """Fresh floating tensors like ``inputs``, uniform in [0, 1) or normal; the rest unchanged."""
    drawn = []
    for index, value in enumerate(inputs):
        if is_floating(value):
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
    switch: Any = torch.utils.deterministic  # a module whose one property mypy does not see
    filled = switch.fill_uninitialized_memory
    # torch.use_deterministic_algorithms does this, and imports the whole of Inductor: a second.
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    switch.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(was, warn_only=only_warned)
        switch.fill_uninitialized_memory = filled


def run_model(
    model: nn.Module,
    inputs: Sequence[Any],
    training: bool,
    dy_seed: int = 0,
    kept: Sequence[Tensor | None] = (),
    call: Callable[..., Any] | None = None,
) -> Outcome:
    """Run forward, and in training also backward with a random dy drawn from ``dy_seed``.

    ``kept`` says for each output where dy stays (elsewhere it is zero); None: everywhere.
    ``call``: what runs in the model's place, on its parameters. Without training, the run is under
    ``torch.no_grad``. Gradients come by name: "gradient of input 0", "gradient of fc.weight", ...;
    None where backward gave none.
    """
    call = model if call is None else call
    if not training:
        with torch.no_grad():
            return Outcome(_floating_leaves(call(*inputs)), {})
    inputs = of_floats(inputs, lambda v: v.detach().clone().requires_grad_())
    model.zero_grad(set_to_none=True)
    every = _floating_leaves(call(*inputs))
    outputs = [output for output in every if output.requires_grad] or every  # autograd says which
    dys = draw_dy(outputs, dy_seed)
    for dy, keep in zip(dys, kept, strict=False):
        if keep is not None and keep.shape == dy.shape:
            dy.masked_fill_(~keep, 0)
    torch.autograd.backward(outputs, dys)
    gradients = {
        f"gradient of input {index}": value.grad
        for index, value in enumerate(inputs)
        if is_floating(value)
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
    return tuple(filter(is_floating, tree_leaves(output)))


@dataclass(frozen=True)
class Truth:
    """What float64 and eager give on the same inputs; for each output where dy is not zero (None:
    everywhere); ``seed``: of dy. ``in_tf32`` gives the same with the operands of eager's products
    rounded to TF32; None where the setting does not allow TF32."""

    exact: Outcome
    eager: Outcome
    kept: Sequence[Tensor | None] = ()
    seed: int = 0
    in_tf32: Callable[[], Truth] | None = None


def expected(
    model: nn.Module,
    inputs: Sequence[Any],
    dtype: torch.dtype,
    training: bool,
    seed: int = 0,
    away: Callable[..., list[Tensor | None]] | None = None,
    call: Callable[..., Any] | None = None,
) -> Truth:
    """Run the model in float64 and as it is, or as ``call`` does on its parameters.

    ``dtype``: of its products; in training, dy is zero where ``away`` finds a kink within the error
    that eager's forward pass has; without it ``away_from_kinks``, within an ulp too."""
    twin, wide = copy.deepcopy(model).double(), of_floats(inputs, Tensor.double)
    exact, eager = run_model(twin, wide, False), run_model(model, inputs, False, call=call)
    in_tf32 = None
    if any(allows_tf32(dtype, output.device) for output in eager.outputs):
        in_tf32 = partial(_in_tf32, model, inputs, dtype, training, seed, away, call)
    if not training:
        return Truth(exact, eager, in_tf32=in_tf32)
    errors = [c.eager for c in compare(exact, eager, eager, dtype, "")]
    if away is None:
        away, errors = away_from_kinks, [*errors, torch.finfo(dtype).eps]
    kept = away(twin, wide, [output.shape for output in exact.outputs], max(errors))
    exact = run_model(twin, wide, True, seed, kept)
    eager = run_model(model, inputs, True, seed, kept, call)
    return Truth(exact, eager, kept, seed, in_tf32)


def must_repeat(first: Outcome, second: Outcome) -> None:
    """Raise ValueError where nothing can be verified: two runs of a model differ by more than
    orders of summation, or give numbers of which none is finite."""
    filled = [output for output in first.outputs if output.numel()]
    if filled and not any(bool(output.isfinite().any()) for output in filled):
        raise ValueError(
            "the model gives no finite number on these inputs, all are NaN or infinite, so nothing "
            "can be verified"
        )
    for one, other in zip(first.outputs, second.outputs, strict=True):
        size, difference = (
            torch.linalg.vector_norm(t.double()).item() for t in (one, (one - other).nan_to_num())
        )
        if difference > 8 * torch.finfo(one.dtype).eps * size:
            raise ValueError(
                "the model gives another result at each call, so none can be verified: switch off "
                "what is random in it, such as a dropout with a fixed probability"
            )


def _in_tf32(*of: Any) -> Truth:
    with RoundedOperands():  # float64's products stay as they are
        return expected(*of)


def by_the_larger_yardstick(
    truth: Truth, judged: Callable[[Truth], Sequence[Comparison]]
) -> list[Comparison]:
    """What ``judged`` finds; where it misses eager's error and TF32 is allowed, by the larger error
    of eager and of TF32.

    ``judged`` runs the candidate anew: dy is zero near kinks, and how near depends on the error.
    """
    found = list(judged(truth))
    if truth.in_tf32 is None or not any(c.missed for c in found):
        return found
    rounded = {
        c.what: replace(c, inputs=f"{c.inputs}, eager in TF32") for c in judged(truth.in_tf32())
    }
    return [_by_the_larger(c, rounded.get(c.what, c)) for c in found]


def _by_the_larger(first: Comparison, again: Comparison) -> Comparison:
    """Of two runs, the second by TF32's error. It excuses no other fault of either, nor outputs of
    the first, which dy has no part in."""
    if first.reason or again.reason:
        return first if first.reason else again
    if first.passed or again.eager <= first.eager:
        return first
    if again.what.startswith("output"):
        return replace(again, ours=max(first.ours, again.ours))
    return again


def verify(
    model: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    *,
    training: bool = True,
    kinds: Sequence[InputKind] = ("rand", "randn"),
    seed: int = 0,
    progress: Progress = silent,
) -> Verification:
    """Compare ``candidate`` with ``model``, of the same state_dict keys, on fresh inputs.

    ``inputs`` give shapes, dtypes and device; their floating tensors are redrawn for each of
    ``kinds``. The parameters are randomised for the comparison and given back afterwards. The
    candidate runs twice: freed memory is poisoned before each run, and the runs must agree bit for
    bit. Errors that are a little too large are judged over further draws of inputs and dy. Raises
    RuntimeError if the candidate cannot load the model's state_dict, and ValueError where the model
    does not repeat its own result.
    """
    dtype = next(filter(is_floating, inputs)).dtype
    comparisons: list[Comparison] = []
    saved, saved_candidate = (copy.deepcopy(m.state_dict()) for m in (model, candidate))
    try:
        randomize_parameters(model, seed)
        candidate.load_state_dict(model.state_dict())
        for index, kind in enumerate(kinds):
            seeds = seed, seed + 1000 * (index + 1)
            told = partial(_told_of, progress, index, len(kinds))
            draw = partial(_draw, model, candidate, inputs, dtype, training, kind, seeds, told)
            comparisons += over_draws(draw, lambda _, eager: allowed_error(eager, dtype))
    finally:
        model.load_state_dict(saved)
        candidate.load_state_dict(saved_candidate)
    return Verification(dtype, training, tuple(comparisons))


def _told_of(progress: Progress, index: int, kinds: int, draws: float) -> None:
    """Of how many draws there will be, one knows no more than that."""
    progress((index + draws / (draws + 1)) / kinds)


BETWEEN_DRAWS = 10_000
"""From one draw's seeds to the next one's."""


def _draw(
    model: nn.Module,
    candidate: nn.Module,
    inputs: Sequence[Any],
    dtype: torch.dtype,
    training: bool,
    kind: InputKind,
    seeds: tuple[int, int],
    told: Progress,
    number: int,
) -> list[Comparison]:
    """Compare on the draw of a number, from seeds of dy and of inputs; on the first one two runs of
    the candidate, bit for bit, too."""
    dy_seed, seed = (of + BETWEEN_DRAWS * number for of in seeds)
    told(number)
    fresh = draw_inputs(inputs, kind, seed)
    if not number:
        copies = (of_floats(fresh, Tensor.clone) for _ in range(2))
        must_repeat(*(run_model(model, copy, False) for copy in copies))
    truth = expected(model, fresh, dtype, training, dy_seed)
    told(number + 0.5)
    runs: list[Outcome] = []

    def run(truth: Truth) -> Outcome:
        with poisoned_memory([tensor for _, tensor in truth.eager.tensors()]):
            return run_model(candidate, fresh, training, truth.seed, truth.kept)

    def judged(truth: Truth) -> Sequence[Comparison]:
        runs.append(run(truth))
        return compare(truth.exact, truth.eager, runs[-1], dtype, kind)

    found = by_the_larger_yardstick(truth, judged)
    return found if number else found + differences(runs[0], run(truth), kind)
