"""Every launch of a problem's forward and backward pass, with what was decided of it and why.

What only a call can tell, an address that is not aligned say, is a step's ``otherwise``.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch

from epinorm.backends.cuda.plan import hopper, hopper_product, norm_batch, portable, tuned
from epinorm.backends.cuda.plan.gradients import (
    backward_choice,
    planes_taken,
    residual_has_dz,
    weight_waits,
)
from epinorm.backends.cuda.plan.hopper_product import Choice, ProductShape
from epinorm.backends.cuda.plan.hopper_tile import Tile, rounded_columns
from epinorm.backends.cuda.plan.norm_backward import Outputs, backward_plans
from epinorm.backends.cuda.plan.norm_forward import forward_plans
from epinorm.backends.cuda.plan.norm_planes import rows_plans
from epinorm.backends.cuda.plan.norm_tile import NARROW, vector_width
from epinorm.backends.cuda.plan.plane_layout import LINE_COLUMNS, PlaneLayout
from epinorm.backends.cuda.plan.planes import over_x, product_of, rest_of, sum_is_z
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.runtime.device import gpu_of, max_shared_bytes, sm_count
from epinorm.backends.cuda.text.backward_chain import backward_problem
from epinorm.problem import Buffer, Core, Plan, Problem, Step, Wanted

_SPILLS = "the next tile, where ptxas spills registers"
_LIBRARY = "the library's product"
_GUARD = "what planes do not hold is computed again in fp32"


def all_gradients(problem: Problem) -> Wanted:
    """Every gradient that the problem has."""
    given = problem.has_bias, problem.has_norm_weight, problem.has_norm_bias
    return Wanted(True, True, *given, (True,) * len(problem.chain.operand_kinds))


def dz_alone(problem: Problem) -> Wanted:
    """What the norm kernel is asked for where nothing but dz is."""
    return Wanted(True, False, False, False, False, (False,) * len(problem.chain.operand_kinds))


def completed(problem: Problem, plan: Plan) -> Plan:
    """The plan with all its steps, and what memory they take."""
    forward = _Forward(problem, plan, weight_waits(problem))
    scratch, saved = forward.scratch, tuple(forward.saved)
    backward: tuple[Step, ...] = ()
    if problem.training:
        found = _Backward(problem, dataclasses.replace(plan, saved=saved), all_gradients(problem))
        backward, scratch = tuple(found.steps), scratch + found.scratch
    return dataclasses.replace(
        plan, forward=tuple(forward.steps), backward=backward, saved=saved, scratch=tuple(scratch)
    )


class _Pass:
    """Collects the steps of a pass."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.steps: list[Step] = []
        self.scratch: list[Buffer] = []

    def _step(
        self, kernel: str, makes: str, reason: str, choice: Any = None, otherwise: str = ""
    ) -> None:
        self.steps.append(Step(kernel, makes, reason, choice, otherwise))

    def _take(self, name: str, nbytes: int, since: str, until: str, each: bool = False) -> None:
        self.scratch.append(Buffer(name, nbytes, since, until, each))


class _Forward(_Pass):
    """Collects the forward pass."""

    def __init__(self, problem: Problem, plan: Plan, weight_waits: bool) -> None:
        super().__init__(problem)
        self.weight_waits = weight_waits
        self.saved: list[Buffer] = []
        self.y = problem.made_by_forward
        if plan.strategy == "epilogue":
            as_eager = problem.dtype == torch.float32 and problem.has_bias
            kernel = "aten::addmm" if as_eager or problem.bias_in_z else "aten::mm"
            self._step(kernel, "the sum" if sum_is_z(problem) else "z", _LIBRARY)
            self._norm(rest_of(problem) if sum_is_z(problem) else problem)
        elif plan.strategy == "planes":
            self._planes(plan.core or "hopper")
        elif plan.strategy == "single" and problem.m:
            self._single(plan.core or "hopper")
        if problem.chain.saves_sum and problem.training and self.steps:
            self._save("the sum, a result", problem.m * problem.n * problem.sum_dtype.itemsize)
        if problem.chain.saves_y and problem.training and self.steps:
            self._save("y, a result", problem.m * problem.n * problem.out_dtype.itemsize)
        if problem.keeps_z and self.steps:
            self._save("z", problem.m * problem.n * problem.dtype.itemsize)
        if problem.keeps_statistics and self.steps:
            count = math.prod(problem.chain.statistics_shape(problem.m, problem.n))
            self._save("mean and rstd", 2 * count * problem.stats_dtype.itemsize)

    def _save(self, name: str, nbytes: int, until: str = "") -> None:
        norm = "batch_backward" if self.problem.chain.returns_statistics else "norm_backward"
        self.saved.append(Buffer(name, nbytes, self.steps[0].kernel, until or norm))

    def _planes(self, core: Core) -> None:
        """The product as a chain of its own, then the norm kernel."""
        product = _Forward(product_of(self.problem), Plan("single", "", core), self.weight_waits)
        z = "the sum" if self.problem.chain.saves_sum else "z"
        self.steps += [
            dataclasses.replace(step, makes=step.makes.replace("y", z)) for step in product.steps
        ]
        self.saved += product.saved
        self.scratch += product.scratch
        tile = single_tile(product.problem, core) if product.problem.column_moments else None
        self._norm(rest_of(self.problem), isinstance(tile, Tile) and not tile.converts)

    def _norm(self, problem: Problem, has_moments: bool = False) -> None:
        if not problem.chain.returns_sum:  # the product wrote it
            self.y = self.y.replace(", sum", "")
        if problem.chain.returns_statistics:
            norm_batch.add_forward_steps(problem, self.steps, self.scratch, has_moments)
        elif problem.m:
            vector = vector_width(problem.n // problem.groups, problem.dtype.itemsize, ())
            first = forward_plans(problem, vector, max_shared_bytes(problem.device))[0]
            otherwise = f"{NARROW}; {_SPILLS}"
            self._step(first.kernel, self.y, first.reason, first, otherwise)

    def _single(self, core: Core) -> None:
        problem = self.problem
        tile, why = _tile(problem, core)
        if isinstance(tile, Tile) and tile.converts:
            self._converts(tile, why)
        elif problem.dtype == torch.float32 and not tile.tf32:
            self._by_planes(core, tile, why)
        elif core == "portable":
            otherwise = "narrower copies, where rows are not aligned to 16 bytes"
            self._step("portable_linear_norm", self.y, why, tile, otherwise)
        else:
            copied = "x or W"
            if isinstance(tile, Tile) and tile.register_a:
                copied, rounded = "x", "W as TF32"
                self._step("round_weight", rounded, "the tensor cores would cut what is below off")
                nbytes = problem.n * rounded_columns(problem.k) * 4
                self._take(rounded, nbytes, "round_weight", "linear_norm")
            otherwise = f"copies of {copied} first, where their rows are not aligned to 16 bytes"
            self._step("linear_norm", self.y, why, tile, otherwise)

    def _leaves(self, core: Core) -> bool:
        """Whether planes stay for the backward pass."""
        problem = self.problem
        return problem.whole_step and planes_taken(problem, True, True, core)[0]

    def _by_planes(self, core: Core, tile: Tile | PortableTile, why: str) -> None:
        problem, planes = self.problem, self.problem.planes
        m, n, k = problem.m, problem.n, problem.k
        over = core == "hopper" and over_x(problem)
        of_x, of_w = PlaneLayout(planes, k, m, 0, over), PlaneLayout(planes, k, n, 0)
        first = "split_over" if over else "split"
        kernel = "portable_linear_norm" if core == "portable" else "linear_norm"
        if self._leaves(core):
            reason = f"{_planes(planes)}; the backward pass reads them too"
            otherwise = "x and W in one launch, where no memory may be taken for planes that wait"
            of_weight = reason if self.weight_waits else f"{_planes(planes)}; their scales wait"
            self._step("split", "W's planes", of_weight, otherwise=otherwise)
            self._step("split", "x's planes", reason)
            if self.weight_waits:
                self._save("W's planes", of_w.nbytes, "dX")
            else:
                self._save("W's scales and flags", of_w.nbytes - of_w.spoilt, "dX")
                self._take("W's planes", of_w.spoilt, "split", kernel)
            self._save("x's planes", of_x.nbytes, "dW")
        elif problem.prepacked:
            reason = f"{_planes(planes)}; W's are kept from call to call"
            otherwise = "W's too, where they cannot be kept"
            makes = "x's planes over x" if over else "x's planes"
            self._step(first, makes, reason, otherwise=otherwise)
            name = "x's scales and flags" if over else makes
            alone = PlaneLayout(planes, k, m, 0, over, lists=False)
            self._take(name, alone.nbytes, first, "rescue")
        else:
            makes = "x's planes over x, W's planes" if over else "x's and W's planes"
            otherwise = "split, where rows are not aligned to 16 bytes" if over else ""
            self._step(first, makes, _planes(planes), otherwise=otherwise)
            both = PlaneLayout(planes, k, m, n, over, lists=False).nbytes
            name = "W's planes, x's scales and flags" if over else "x's and W's planes"
            self._take(name, both, first, "rescue")
        self._step(kernel, self.y, why, tile)
        self._step("rescue", self.y, _GUARD)

    def _converts(self, tile: Tile, why: str) -> None:
        problem = self.problem
        planes = problem.planes
        of_x = PlaneLayout(planes, problem.k, problem.m, 0)
        of_w = PlaneLayout(planes, problem.k, problem.n, 0)
        leaves = self._leaves("hopper")
        plane, converted, rows = "x", "W", problem.m
        if tile.fp32_input:
            plane, converted, rows = "W", "x", problem.n
        made = f"{plane}'s plane{'s' * (planes - 1)}"
        makes = f"{made}, {'flags' if tile.in_halves else 'scales'} of {converted}"
        self._step("split_and_sample", makes, f"{converted} is converted in the product")
        otherwise = f"by planes of x and W, where the copy engine cannot read {converted}'s rows"
        kernel = "linear_norm_fp32_input" if tile.fp32_input else "linear_norm_fp32_weight"
        self._step(kernel, self.y, why, tile, otherwise)
        self._step("rescue", self.y, _GUARD)
        first, last = "split_and_sample", "rescue"
        columns = -(-problem.k // LINE_COLUMNS) * LINE_COLUMNS
        ordered = planes * rows * columns * 2
        self._take(f"{made} in the order of fragments", ordered, first, last)
        if leaves:
            self._save("W's planes", of_w.nbytes, "dX")
            self._save("x's planes", of_x.nbytes, "dW")
        else:
            rest = of_x.nbytes - of_x.spoilt + of_w.nbytes - of_w.spoilt
            self._take("scales and flags", rest, first, last)


def _planes(planes: int) -> str:
    return "tensor cores multiply " + ("two fp16 planes" if planes == 2 else "one fp16 plane")


def single_tile(problem: Problem, core: Core) -> Tile | PortableTile | None:
    """The single kernel's tile on this core; None where none fits."""
    if core == "portable":
        return portable.choose_tile(problem, gpu_of(problem.device))
    return hopper.choose_tile(problem, sm_count(problem.device), problem.prepacked)


def single_microseconds(problem: Problem, core: Core) -> float:
    """Estimated time of the whole forward pass by the single kernel, conversions included."""
    if core == "portable":
        return portable.microseconds(problem, gpu_of(problem.device))
    return hopper.microseconds(problem, sm_count(problem.device))


def _tile(problem: Problem, core: Core) -> tuple[Tile | PortableTile, str]:
    """The single kernel's tile, and why this one."""
    tile = single_tile(problem, core)
    assert tile is not None
    remembered = tuned.choice(problem, hopper.candidates) if core == "hopper" else None
    if remembered is not None and remembered.tile == tile:
        return tile, f"`epinorm tune` measured {remembered.microseconds:.1f} us"
    estimate = single_microseconds(problem, core)
    return tile, f"{estimate:.1f} us, the least estimate of the tiles that fit"


class _Backward(_Pass):
    """Collects the backward pass."""

    def __init__(self, problem: Problem, plan: Plan, want: Wanted) -> None:
        problem = backward_problem(problem, True)
        kinds = problem.chain.operand_kinds
        want = want._replace(operands=want.operands + (False,) * (len(kinds) - len(want.operands)))
        super().__init__(problem)
        self.want = want
        self.choice = choice = backward_choice(problem, plan, want)
        self.left = any(buffer.name == "x's planes" for buffer in plan.saved)
        if not (choice.x or choice.weight):
            self._norm(Outputs.of(problem, want))
        else:
            self._by_planes(choice.x, choice.weight)
        if want.x and not choice.x:
            self._direct("dX")
        if want.weight and not choice.weight:
            self._direct("dW")

    def _norm(self, outputs: Outputs, if_wanted: bool = False) -> None:
        """norm_backward, and what surrounds it."""
        problem = self.problem
        if not problem.m or outputs.is_empty:
            return
        if problem.chain.returns_statistics:
            norm_batch.add_backward_steps(problem, outputs, self.steps, self.scratch)
            return
        vector = vector_width(problem.n // problem.groups, problem.dtype.itemsize, ())
        plan = backward_plans(problem, vector, outputs)[0]
        if plan.row_sums is not None:
            reason = "groups too wide for norm_backward to hold"
            self._step("norm_backward_sums", "sums of groups", reason, plan.row_sums)
        sums = sum(outputs.sums)
        makes = ", ".join(["dz"] * outputs.dz + ["partial sums over rows"] * (sums > 0))
        reason = "the least idle lanes for the group's channels"
        otherwise = f"{NARROW}; {_SPILLS}"
        if if_wanted:
            makes, reason = "dz in fp32", "for the range guard, only where something is flagged"
            reason += "; over x's planes" * self.choice.dz_over_x
        if outputs.elements and any(outputs.elements):
            makes += ", operands' gradients"
        self._step("norm_backward", makes, reason, plan, otherwise)
        if outputs.dz and not (if_wanted and self.choice.dz_over_x):
            self._take("dz", problem.m * problem.n * problem.dtype.itemsize, "norm_backward", "dW")
        of_columns = ["gradients over channels"] * (sums > 0)
        of_columns += ["largest magnitudes of columns"] * outputs.column_largest
        if of_columns:
            reason = "joined in a fixed order"
            self._step("norm_column_sums", ", ".join(of_columns), reason)
            sizes = sums * problem.stats_dtype.itemsize + 4 * outputs.column_largest
            nbytes = sizes * problem.n
            self._take("partial sums", nbytes, "norm_backward", "norm_column_sums", each=True)

    def _direct(self, name: str) -> None:
        """The library's product of dz as it is."""
        planes = self.problem.dtype == torch.float32 and self.choice.core is not None
        reason = "the library's product is as fast as any here"
        reason = "conversions to planes cost more than they save" if planes else reason
        self._step("aten::mm", name, reason)

    def _product(self, name: str, shape: ProductShape, choice: Choice) -> None:
        makes = f"{name} in {choice.parts} parts" if choice.parts > 1 else name
        reason = f"{choice.microseconds:.1f} us, the least estimate"
        self._step("hopper_product", makes, reason, choice)
        if choice.parts > 1:
            self._step("add_splits", name, "too few tiles to fill the GPU")
            nbytes = 4 * choice.parts * shape.rows * shape.columns
            self._take(f"{name}'s parts", nbytes, "hopper_product", "add_splits")

    def _by_planes(self, x: bool, weight: bool) -> None:
        problem, planes = self.problem, self.problem.planes
        m, n, k = problem.m, problem.n, problem.k
        for taken, name, rows, until in ((x, "W", n, "dX"), (weight, "x", m, "dW")):
            if taken and not self.left:
                layout, reason = PlaneLayout(planes, k, rows, 0), "forward left none"
                if self.choice.dz_over_x and name == "W":
                    self._step("split", "W's scales", reason)
                    self._take("W's scales and flags", layout.nbytes - layout.spoilt, "split", "dX")
                    continue
                self._step("split", f"{name}'s planes", f"{_planes(planes)}; {reason}")
                self._take(f"{name}'s planes", layout.nbytes, "split", until)
        if not self.choice.writes_planes:
            self._norm(Outputs.of(problem, self.want, x, weight))
            makes = "dz's planes for " + " and ".join(["dX"] * x + ["dW"] * weight)
            self._step("split_gradient", makes, "with the scales of W and x")
            nbytes = (x + weight) * 2 * planes * m * n + 4 * (m * x + n * weight)
            self._take("dz's planes", nbytes, "split_gradient", "dW")
            products = ["dX"] * x + ["dW"] * weight
            for product in reversed(products) if self.choice.weight_first else products:
                if product == "dX":
                    self._weight_again(k, n)
                self._guarded(product)
            return
        vector = vector_width(n // problem.groups, problem.dtype.itemsize, ())
        rows_plan = next(rows_plans(problem, vector))
        reason = "a cluster holds whole rows: dz is written once"
        otherwise = f"{_SPILLS}; norm_backward and split_gradient, where all tiles do"
        makes = "dz's planes, partial sums over rows"
        self._step("norm_backward_planes", makes, reason, rows_plan, otherwise)
        self._take("dz's planes", 2 * planes * m * n + 4 * (m + n), "norm_backward_planes", "dW")
        dz = Outputs.of(problem, dz_alone(problem), if_wanted=True)
        beside = self.choice.beside_dx
        if beside:
            self._product_of_planes("dX")
        reason = "beside dX's last tiles" if beside else "before dX: its memory is the peak"
        otherwise = "before dX, where dW is added to a gradient" if beside else ""
        makes = "scales of x for dW, sums over rows"
        self._step("rescale_planes", makes, reason, otherwise=otherwise)
        over_x = self.choice.dz_over_x
        if over_x:
            self._product_of_planes("dW")
        if not residual_has_dz(problem, self.want):
            self._norm(dz, if_wanted=True)
        if over_x:
            self._step("rescue_gradient", "dW", _GUARD)
        elif self.choice.weight_first:
            self._guarded("dW")
        if not beside:
            self._weight_again(k, n)
            self._product_of_planes("dX")
        self._step("rescue_gradient", "dX", _GUARD)
        if not self.choice.weight_first:
            self._guarded("dW")

    def _weight_again(self, k: int, n: int) -> None:
        if self.choice.dz_over_x if not self.left else not weight_waits(self.problem):
            reason = "a step's memory peaks before"
            self._step("split", "W's planes", reason)
            self._take("W's planes again", PlaneLayout(2, k, n, 0).nbytes, "split", "dX")

    def _guarded(self, name: str) -> None:
        self._product_of_planes(name)
        self._step("rescue_gradient", name, _GUARD)

    def _product_of_planes(self, name: str) -> None:
        problem = self.problem
        shape = hopper_product.gradient_shape(problem, name == "dW")
        if self.choice.core == "hopper":
            self._product(name, shape, hopper_product.choose(shape, sm_count(problem.device)))
            return
        gpu = gpu_of(problem.device)
        tile = portable.choose_product_tile(shape.planes, gpu)
        reason = f"{portable.product_microseconds(shape, gpu):.1f} us by estimate"
        self._step("portable_product", name, reason, tile)
