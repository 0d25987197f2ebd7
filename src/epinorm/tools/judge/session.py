"""The judge's own side: the original model, its float64 truth, and comparing against them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from epinorm.tools.accuracy import (
    RATIO_RESOLUTION,
    Comparison,
    Outcome,
    allowed_error,
    compare,
    over_draws,
)
from epinorm.tools.judge.facts import JudgeOptions
from epinorm.tools.judge.process import SolutionProcess
from epinorm.tools.kernelbench.problem import ProblemFile, placed
from epinorm.tools.verify import (
    BETWEEN_DRAWS,
    InputKind,
    Truth,
    by_the_larger_yardstick,
    draw_inputs,
    expected,
    is_floating,
    randomize_parameters,
    run_model,
    stop_dropout,
)

PUBLIC_TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4}
"""KernelBench compares with atol = rtol = 1e-4 in fp32 and 1e-2 in 16 bit."""
PUBLIC_TOLERANCE_16_BIT = 1e-2
"""Also where TF32 is allowed: its products have the mantissa of fp16."""

STRESS_RATIO = 2.0
"""How many times eager's error is allowed on unusual inputs and sizes, where both are a matter of
which roundings happened to cancel; at the problem's own size the limits of verify hold."""

TF32_RATIO = 1.1 + RATIO_RESOLUTION
TF32_ROUNDING = 2.0**-11
"""With --precision high products have a mantissa of 10 bits: the ratio of the 16-bit types holds.
Eager takes fp32 products for some sizes then (a single row), so half a spacing of TF32 is let
through on unusual inputs and sizes."""

LARGE_MEAN = {torch.float64: 1e4, torch.float32: 100.0}
LARGE_MEAN_16_BIT = 4.0
LARGE_MEAN_FLOOR_64 = 16 * 1e4 * torch.finfo(torch.float64).eps
"""In float64 eager is the truth itself and has no error: there the mean's own last bits are let
through (E[x²] − E[x]² loses ten thousand times more)."""

SPARE_BYTES = 1 << 26
"""Above four times the problem's own tensors, what an answer may have."""


@dataclass
class Session:
    """One judgement in progress. ``inputs`` are the problem's own, in its dtype on its device.

    ``model`` has the solution's parameters; ``example`` has its own, and is there to be timed.
    ``dropped``: they had dropout, which is off: two masks cannot be compared.
    """

    problem: ProblemFile
    options: JudgeOptions
    process: SolutionProcess
    device: torch.device
    dtype: torch.dtype
    model: nn.Module
    init: Sequence[Any]
    inputs: tuple[Any, ...]
    example: nn.Module
    dropped: bool = False
    earlier: list[tuple[str, Tensor]] = field(default_factory=list)

    @staticmethod
    def start(problem: ProblemFile, options: JudgeOptions, process: SolutionProcess) -> Session:
        """Make the original model under the seed; raises ProblemError for what is wrong there."""
        device, dtype = torch.device(options.device), getattr(torch, options.dtype)
        if device.type == "cuda" and device.index is None:
            device = torch.device("cuda", torch.cuda.current_device())
        example, inputs = problem.make(dtype, device, options.seed)
        tensors = [*example.state_dict().values(), *run_model(example, inputs, False).outputs]
        tensors += [v for v in inputs if isinstance(v, Tensor)]
        process.device = device
        process.most = SPARE_BYTES + 4 * sum(t.numel() * t.element_size() for t in tensors)
        torch.manual_seed(options.seed)
        init = problem.get_init_inputs()
        torch.manual_seed(options.seed)
        model = problem.model_type(*init)
        dropped = any([stop_dropout(m) for m in (model, example)])
        made = model, init, inputs, example, dropped
        return Session(problem, options, process, device, dtype, *made)

    @property
    def tolerance(self) -> float:
        """The public protocol's tolerance for this dtype and precision."""
        if self.dtype == torch.float32 and self.options.precision == "high":
            return PUBLIC_TOLERANCE_16_BIT
        return PUBLIC_TOLERANCES.get(self.dtype, PUBLIC_TOLERANCE_16_BIT)

    def randomize(self, seed: int, large_mean: bool = False, behind: bool = False) -> None:
        """Random values for every vector of parameters, in both models.

        ``large_mean``: the linear layers' biases are shifted far from zero, so that what enters the
        norm has a mean far above its spread. ``behind``: the solution's go through ``.data``.
        """
        randomize_parameters(self.model, seed)
        if large_mean:
            shift = LARGE_MEAN.get(self.dtype, LARGE_MEAN_16_BIT)
            with torch.no_grad():
                for module in self.model.modules():
                    if isinstance(module, nn.Linear) and module.bias is not None:
                        module.bias.add_(shift)
        if behind:
            with torch.no_grad():
                for parameter in self.model.parameters():
                    parameter.mul_(0.75)
        self.process.set_state(self.model.state_dict(), behind)

    def change_one_weight_a_row(self) -> None:
        """Another value for one number of each row of every matrix, at a column that nobody knows
        before, in both models: who looks at some of a weight to know it does not see these."""
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1 and parameter.numel():
                    rows = parameter.flatten(1)
                    columns = torch.randint(rows.shape[1], (len(rows), 1), device=rows.device)
                    rows.scatter_add_(1, columns, rows.norm(dim=1, keepdim=True).to(rows.dtype))
        self.process.set_state(self.model.state_dict(), behind=True)

    def with_a_silent_feature(self, inputs: Sequence[Any], value: float) -> tuple[Any, ...] | None:
        """Inputs whose first feature is ``value``, after every linear layer's weight for it became
        zero in both models: it must not be seen. None where no input goes into a linear layer."""
        layers = [m for m in self.model.modules() if isinstance(m, nn.Linear)]
        widths = {layer.in_features for layer in layers}

        def loud(v: Any) -> bool:
            return is_floating(v) and v.shape[-1:].numel() in widths

        if not any(loud(v) for v in inputs):
            return None
        with torch.no_grad():
            for layer in layers:
                layer.weight[:, 0] = 0
        self.process.set_state(self.model.state_dict())
        return tuple(_with_first_feature(v, value) if loud(v) else v for v in inputs)

    def restore(self, state: dict[str, Tensor]) -> None:
        """Give both models these parameters."""
        self.model.load_state_dict(state)
        self.process.set_state(state)

    def drawn(self, number: int, kind: InputKind = "randn") -> tuple[Any, ...]:
        """Random values in the shapes of the inputs; another number, other values."""
        return draw_inputs(self.inputs, kind, self.options.seed + number)

    def fresh_inputs(self, seed: int) -> tuple[Any, ...]:
        """What get_inputs gives under a seed, in the dtype and on the device that are judged."""
        torch.manual_seed(seed)
        return placed(self.problem.get_inputs(), self.dtype, self.device)

    def compared(
        self,
        label: str,
        inputs: Sequence[Any],
        training: bool = False,
        stress: bool = False,
        into_old: bool = False,
        floor: float = 0.0,
    ) -> list[Comparison]:
        """The solution's results on these inputs against float64 and eager.

        What eager itself cannot compute in this dtype (overflow) is left out. ``stress``: allow
        STRESS_RATIO. ``into_old``: the inputs come in the memory of those before. ``floor``: an
        error that always passes.
        """
        truth = self.expected(inputs, training)
        self.process.take_inputs(inputs, into_old)

        def judged(truth: Truth) -> list[Comparison]:
            ours = self.process.run(training, truth.seed, truth.kept)
            return self.judged(label, truth, ours, stress)

        found = by_the_larger_yardstick(truth, judged)
        return [replace(c, allowed=max(c.allowed, floor)) for c in found]

    def compared_over_draws(
        self, kind: InputKind, first: int, training: bool = False
    ) -> list[Comparison]:
        """``compared`` on inputs of a kind from a number on; near misses on further draws too."""
        known = len(self.earlier)

        def draw(number: int) -> Sequence[Comparison]:
            label = f"{kind}, draw {number + 1}" if number else kind
            inputs = self.drawn(first + BETWEEN_DRAWS * number, kind)
            return self.compared(label, inputs, training)

        found = over_draws(draw, lambda _, eager: self._limit(eager, stress=False))
        del self.earlier[known + 1 :]  # of further draws nothing is asked again
        return list(found)

    def judged(self, label: str, truth: Truth, ours: Outcome, stress: bool) -> list[Comparison]:
        """``compare``, with the limits for ``stress`` and a word on answers given before."""
        stale = self._stale(label, ours)
        self.earlier.append((label, ours.outputs[0] if ours.outputs else torch.empty(0)))
        found = []
        for one in compare(truth.exact, truth.eager, ours, self.dtype, label):
            if not math.isfinite(one.eager):
                continue
            one = replace(one, allowed=self._limit(one.eager, stress))
            if stale and not one.passed and one.what.startswith("output"):
                one = replace(one, reason=f"is, bit for bit, the answer to {stale}")
            found.append(one)
        if len(ours.outputs) != len(truth.exact.outputs):
            reason = f"{len(ours.outputs)} outputs, the original has {len(truth.exact.outputs)}"
            found.append(Comparison("output", label, math.inf, 0.0, 0.0, reason))
        return found

    def _limit(self, eager: float, stress: bool) -> float:
        limits = [allowed_error(eager, self.dtype)]
        if stress:
            limits.append(STRESS_RATIO * eager)
        if self.dtype == torch.float32 and self.options.precision == "high":
            limits.append(TF32_ROUNDING if stress else TF32_RATIO * eager)
        return max(limits)

    def _stale(self, label: str, ours: Outcome) -> str | None:
        """The other inputs of an earlier call that had this answer, if it is no coincidence."""
        if not ours.outputs or not ours.outputs[0].numel():
            return None
        output = ours.outputs[0]
        if bool((output == output.flatten()[0]).all()):
            return None  # a constant is not remembered, it is wrong in its own way
        for other, before in self.earlier:
            same = before.shape == output.shape and torch.equal(before, output)
            if same and other != label:
                return f"{other} before"
        return None

    def expected(self, inputs: Sequence[Any], training: bool = False) -> Truth:
        """Truth and eager and, in training, which elements lie away from a kink (see kinks.py)."""
        return expected(self.model, inputs, self.dtype, training, self.options.seed)


def _with_first_feature(x: Tensor, value: float) -> Tensor:
    changed = x.clone()
    changed[..., 0] = value
    return changed


def outside_public_tolerance(result: Tensor, eager: Tensor, tolerance: float) -> tuple[int, float]:
    """How many elements differ by more than the public protocol allows, and by how much at most."""
    result, eager = result.double(), eager.double()
    difference = (result - eager).abs()
    close = torch.isclose(result, eager, rtol=tolerance, atol=tolerance, equal_nan=True)
    worst = difference.nan_to_num(math.inf).max().item() if difference.numel() else 0.0
    return int((~close).sum()), worst
