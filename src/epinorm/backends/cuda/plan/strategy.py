"""Which strategy a problem takes on a CUDA GPU, and why."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch

from epinorm.backends.cuda.plan import costs, gradients, tuned
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan.hopper_tile import Tile
from epinorm.backends.cuda.plan.plane_layout import LINE_COLUMNS
from epinorm.backends.cuda.plan.planes import product_of, rest_of
from epinorm.backends.cuda.plan.portable_tile import PortableTile
from epinorm.backends.cuda.plan.steps import completed, single_microseconds, single_tile
from epinorm.backends.cuda.runtime.device import HOPPER, capability, supported
from epinorm.backends.cuda.text.backward_chain import backward_problem
from epinorm.backends.cuda.text.instance import columns_of
from epinorm.chain import Chain
from epinorm.problem import Core, Plan, Problem, Strategy

CORE_VARIABLE = "EPINORM_CORE"

WIDEST_TILE, LARGEST_GUARDED_GROUP = 256, 2048
"""Channels of a group that the range guard of the single kernel can compute again: by one block,
and by clusters of blocks."""
WIDEST_BY_TWO_PLANES, ITS_FEWEST_ROWS = 512, 8192
"""Channels of a group up to which the single kernel is taken by two planes, and from how many rows
on beyond `WIDEST_TILE`: wider ones lose to a norm kernel of its own (decision 12)."""

# What the host of an H200 takes for a model of one such chain, in microseconds of which eager's
# layers take costs.eager_host: no call is faster for long, whatever the GPU takes. One kernel; fp32
# as planes, three kernels; the norm kernel behind them; PyTorch's product and a kernel; a backward
# pass.
_HOST_ONE, _HOST_PLANES, _HOST_NORM, _HOST_EPILOGUE = 20.0, 28.0, 6.0, 44.0
_HOST_BACKWARD = {torch.float32: 170.0}
_HOST_OTHER_BACKWARD = 120.0
_HOST_WITHOUT_NORM = 0.8
"""Of a backward pass."""
_HOST_STATISTICS = 14.0
"""Two kernels more, and the running statistics in one operation."""
_HIDDEN = 0.05
_UNSURE, _ROWS_OF_A_TILE = 3.0, 64
"""Microseconds that a way with a norm may be estimated longer than eager on the GPU, where a tile
has all its rows: so far short estimates are off, and the host gains more (decision 18)."""
_SURELY = 0.97
"""Of what eager is estimated to take in TF32, without a norm."""

_PLANES = 1.08
"""What fp32 by planes, or as TF32 from registers, was measured to take of its estimate."""
_WITHOUT_NORM, _OF_WHOLE_LINES, _OF_FEW_COLUMNS = 1.18, 1.0, 1.4
"""The same of a kernel without a norm, in 16 bit or TF32; of an activation's alone in 16 bit on
Hopper, of up to so many products of two numbers, where rows of x and y are whole lines of L2; and
there of long sums of few columns, which the library splits (143 random shapes: 88 are taken, where
by the first of these it was 57, 1.34 times as fast as eager at the median, and two of them 3 and
6 % slower)."""
_FEW_COLUMNS, _LONG_SUM, _MANY_PRODUCTS = 64, 4096, 1e11
_STEP_WITHOUT_NORM: dict[Core, float] = {"hopper": 0.87, "portable": 1.07}
"""What a training step in 16 bit without a norm was measured to take of its estimate on Hopper: its
kernels begin while the ones before them end, and the library's large products take less than is
said of them (64 random shapes: 0.92 to 1.50 times as fast as eager, 1.28 at the median)."""

_FEW_TERMS = 16
"""From here on a sum's own roundings in fp32 weigh more than what planes leave out of its terms:
sqrt(1 + 2 + ... + k) of 2^-25 against sqrt(k) of 2^-24."""

_LIBRARY = "a library product"
_EPILOGUE = f"{_LIBRARY}, then one kernel"
_EAGER = "PyTorch's own layers"


def plan_cuda(problem: Problem, strategy: Strategy) -> Plan:
    """The plan for ``strategy`` ("auto", "single", "planes", "epilogue") on the problem's GPU.

    A strategy that cannot serve the problem comes back as a plan for the reference with the reason.
    """
    plan = _decided(problem, strategy)
    return plan if plan.strategy == "reference" else completed(problem, plan)


def _decided(problem: Problem, strategy: Strategy) -> Plan:
    """The strategy and why, without the steps."""
    refusal = supported(problem.device)
    if refusal is not None:
        return Plan("reference", refusal)
    if not problem.n:
        return Plan("reference", f"{_EAGER}: there are no columns to compute", chosen=True)
    if problem.chain.returns_statistics and (why := _why_no_batch(problem, strategy)):
        return Plan("reference", why, chosen=True)
    if strategy == "auto":
        return _auto(problem)
    if strategy == "epilogue":
        if problem.chain.norm is None:
            return Plan("reference", "without a norm there is nothing for the norm kernel")
        return Plan("epilogue", f"asked for by name: {_LIBRARY}, then {_kernels(problem)}")
    core, why_not = _core(problem) if strategy == "single" else _planes_core(problem)
    if core is None:
        return Plan("reference", why_not)
    text = (_tile_text if strategy == "single" else _planes_text)(problem, core)
    return Plan(strategy, f"asked for by name; {text}", core)


def _why_no_batch(problem: Problem, strategy: Strategy) -> str:
    """Why a BatchNorm is PyTorch's own, whatever it takes; empty where it need not be."""
    if strategy == "single":
        return "a block of the single kernel has some rows, and a BatchNorm's statistics are of all"
    if problem.m < 2 or not problem.k:
        return f"there is nothing to compute for shape ({problem.m}, {problem.k}) → {problem.n}"
    return ""


def _auto(problem: Problem) -> Plan:
    """The fastest of what serves the problem."""
    if problem.chain.returns_statistics:
        return _fastest(problem, None, "")
    if problem.chain.is_linear and problem.dtype != torch.float32:
        reason = f"{_EAGER}: cuBLAS multiplies it as fast as it is"
        cost = Cost(costs.eager(problem), costs.eager_host(problem))
        return Plan("reference", reason, chosen=True, microseconds=cost.microseconds)
    if problem.precision == "highest" and problem.k < _FEW_TERMS:
        plain = f"fp32 sums of fewer than {_FEW_TERMS} terms lose least as they are"
        if problem.chain.norm is None:
            return Plan("reference", f"{_EAGER}: {plain}", chosen=True)
        return Plan("epilogue", f"{_EPILOGUE}: {plain}")
    core, why_not_single = _core(problem)
    # Groups of few channels whose variance is small by chance magnify the linear's error: gradients
    # are more accurate so than by a library product, in as much time (internals/training.md).
    short = problem.precision == "highest" and problem.k <= hopper_plan.SHORT_SUM
    if short and problem.training and core == "hopper":
        return Plan(
            "single",
            f"{_tile_text(problem, core)}: gradients of fp32 sums as short as {problem.k} are more "
            "accurate than by a library product",
            core,
        )
    if core == "hopper":
        remembered = tuned.choice(problem, hopper_plan.candidates)
        tile = None if remembered is None else remembered.tile
        converts = tile is not None and tile.converts  # nothing is left to, if prepacked
        if remembered is not None and not (converts and problem.prepacked):
            measured = (
                f"`epinorm tune` measured it fastest here, at {remembered.microseconds:.1f} us"
            )
            if remembered.strategy == "epilogue":
                return Plan("epilogue", f"{_EPILOGUE}: {measured}")
            return Plan("single", f"{_tile_text(problem, core)}: {measured}", core)
    return _fastest(problem, core, why_not_single)


def _fastest(problem: Problem, core: Core | None, why_not_single: str) -> Plan:
    """What is estimated to take the least time: in training, with its backward pass."""
    ways: list[tuple[Cost, str, Strategy, Core | None]] = []
    if core is not None:
        cost = _single_cost(problem, core) + _backward_cost(problem, core)
        if problem.chain.norm is None and problem.dtype.itemsize == 2 and problem.training:
            cost = replace(cost, gpu=_STEP_WITHOUT_NORM[core] * cost.gpu)
        ways.append((cost, _tile_text(problem, core), "single", core))
    planes_core = _planes_core(problem)[0]
    if planes_core is not None:
        cost = _single_cost(product_of(problem), planes_core)
        cost += Cost(costs.norm_forward(rest_of(problem)), _HOST_NORM + _host_of_batch(problem))
        cost += _backward_cost(problem, planes_core)
        ways.append((cost, _planes_text(problem, planes_core), "planes", planes_core))
    if problem.chain.norm is not None:
        forward = costs.library_product(problem) + costs.norm_forward(problem)
        host = _HOST_EPILOGUE + _host_of_batch(problem)
        cost = Cost(forward, host) + _backward_cost(problem, None)
        ways.append((cost, f"{_LIBRARY}, then {_kernels(problem)}", "epilogue", None))
    # PyTorch's layers would have to make the kernels' mask in dozens of operations.
    drops = "seed" in problem.chain.operand_kinds
    eager = None
    if problem.chain.returns_statistics:  # whose dropout a graph leaves to PyTorch as it is
        eager, text = _linear_alone(problem)
        ways.append((eager, text, "reference", None))
    elif problem.out_dtype == problem.dtype and not drops:
        eager = Cost(costs.eager(problem), costs.eager_host(problem))
        ways.append((eager, _EAGER, "reference", None))
    if not ways:
        return Plan("reference", why_not_single)
    # In a loop of small calls the host decides, in a CUDA graph the GPU: neither may lose to eager,
    # but for what estimates of short kernels are off.
    most = math.inf if eager is None else eager.gpu
    if problem.chain.norm is not None:
        most += _UNSURE if problem.m >= _ROWS_OF_A_TILE else 0.0
    elif problem.precision == "high":
        most *= _SURELY

    def said_of_gpu(cost: Cost) -> str:
        late = cost is not eager and cost.gpu > most
        return f", but {cost.gpu:.1f} of the GPU, where {most:.1f} is the limit" if late else ""

    ways.sort(key=lambda way: (said_of_gpu(way[0]) != "", way[0].microseconds))
    cost, text, strategy, core = ways[0]
    time = cost.microseconds
    reason = f"{text}: estimated {time:.0f} us"
    for slower, other, *_ in ways[1:]:
        reason += f"; {other}: {slower.microseconds:.0f}{said_of_gpu(slower)}"
    if why_not_single:
        reason += f"; {why_not_single}"
    gain = eager.microseconds / time if eager is not None and time else None
    return Plan(strategy, reason, core, chosen=True, gain=gain, microseconds=time)


def _linear_alone(problem: Problem) -> tuple[Cost, str]:
    """What a BatchNorm takes that is PyTorch's own, behind a product that need not be."""
    chain = problem.chain
    linear = replace(
        problem,
        chain=Chain(None, chain.pre),
        norm_dtype=problem.out_dtype,
        has_norm_weight=False,
        has_norm_bias=False,
    )
    found = Cost(costs.eager(linear), costs.eager_host(linear))
    core = None if linear.chain.is_linear and linear.dtype != torch.float32 else _core(linear)[0]
    if core is not None:
        ours = _single_cost(linear, core) + _backward_cost(linear, core)
        found = min(found, ours, key=lambda cost: cost.microseconds)
    layers = Cost(
        costs.eager_layers(problem, chain.post), costs.eager_layers_host(problem, len(chain.post))
    )
    return found + layers, "PyTorch's own BatchNorm behind the Linear"


def _host_of_batch(problem: Problem) -> float:
    return _HOST_STATISTICS if problem.chain.returns_statistics else 0.0


def _planes_core(problem: Problem) -> tuple[Core | None, str]:
    """The core that multiplies fp32 by planes with the norm in a kernel of its own; or why not."""
    kinds = (problem.dtype, problem.norm_dtype, problem.out_dtype)
    if any(kind != torch.float32 for kind in kinds):
        return None, "planes stand in for float32, and this is not float32 throughout"
    if problem.chain.norm is None:
        return None, "there is no norm: the single kernel computes all of it"
    return _core(product_of(problem))


def _planes_text(problem: Problem, core: Core) -> str:
    tile = single_tile(product_of(problem), core)
    assert tile is not None
    return f"a product {_operands_text(problem, tile, 'by')}, then {_kernels(problem)}"


def _kernels(problem: Problem) -> str:
    return "three kernels" if problem.chain.returns_statistics else "one kernel"


def _operands_text(problem: Problem, tile: Tile | PortableTile, word: str) -> str:
    """What fp32 matrices are multiplied as, and whether a prepacked weight is read."""
    if tile.tf32:
        return f"{word} TF32"
    text = f"{word} {'two fp16 planes' if problem.planes == 2 else 'one fp16 plane'}"
    if not isinstance(tile, PortableTile) and tile.converts:
        text += f", the {'weight' if tile.fp32_weight else 'input'}'s made on the way"
        return text + (", which is faster than with W prepacked" if problem.prepacked else "")
    return text + (", W's kept from call to call" if problem.prepacked else "")


def wanted_core() -> Core | Literal["auto"]:
    """What ``$EPINORM_CORE`` asks to multiply in strategy `single`: "auto", "hopper" or "portable".

    Read when a call is planned, so one that was planned before keeps its core. Raises
    ``ValueError`` for any other value.
    """
    known = ("auto", *get_args(Core))
    text = os.environ.get(CORE_VARIABLE, "").strip() or "auto"
    if text not in known:
        raise ValueError(f"{CORE_VARIABLE} is one of {', '.join(known)}, but got {text!r}")
    return text  # type: ignore[return-value]


def _core(problem: Problem) -> tuple[Core | None, str]:
    """The core that serves the problem in a single kernel; or None, and in a sentence why."""
    if problem.keeps_z and problem.chain.returns_sum:
        return None, "one kernel writes z or the sum beside y, and gradients need both"
    if problem.chain.norm is None and problem.out_dtype != problem.dtype:
        return None, f"without a norm y has x's dtype, and {problem.out_dtype} is asked for"
    wanted = wanted_core()
    why_not_hopper = _why_not(problem, "hopper")
    if why_not_hopper is None and wanted != "portable":
        return "hopper", ""
    if why_not_hopper is not None and wanted == "hopper":
        return None, why_not_hopper
    why_not = _why_not(problem, "portable")
    if why_not is None:
        return "portable", ""
    on_hopper = wanted == "auto" and capability(problem.device) == HOPPER
    return None, why_not_hopper if on_hopper and why_not_hopper else why_not


def _why_not(problem: Problem, core: Core) -> str | None:
    """Why the single kernel of this core cannot serve the problem; None where it can."""
    hopper = core == "hopper"
    if hopper and capability(problem.device) != HOPPER:
        major, minor = capability(problem.device)
        return f"the Hopper core needs compute capability 9.0, this GPU has {major}.{minor}"
    why_not = (hopper_plan if hopper else portable_plan).why_not(problem)
    if why_not is not None:
        return why_not
    tile = single_tile(problem, core)
    if tile is None:
        return "no tile of the single kernel fits the shared memory"
    largest = largest_guarded_group(problem) if hopper else WIDEST_TILE
    channels = columns_of(problem)
    if problem.dtype == torch.float32 and not tile.tf32 and channels > largest:
        return (
            f"the range guard of fp32 computes groups of up to {largest} channels here, and these "
            f"have {channels}"
        )
    return None


def largest_guarded_group(problem: Problem) -> int:
    """Channels of a group up to which the Hopper core's single kernel is taken in planes."""
    if problem.planes == 1:
        return LARGEST_GUARDED_GROUP
    return WIDEST_BY_TWO_PLANES if problem.m >= ITS_FEWEST_ROWS else WIDEST_TILE


def _tile_text(problem: Problem, core: Core) -> str:
    tile, operands = single_tile(problem, core), ""
    assert tile is not None
    if problem.dtype == torch.float32:
        operands = f", {_operands_text(problem, tile, 'as')}"
    if isinstance(tile, PortableTile):
        kind = "the portable core (mma.sync)"
    else:
        kind = "warpgroups in turn" if tile.ping_pong else "warpgroups together"
    return f"one kernel{operands}, tiles of {tile.block_m} x {tile.block_n}, {kind}"


@dataclass(frozen=True)
class Cost:
    """Estimated microseconds of a way, or of a part of it, on the GPU and on the host."""

    gpu: float
    host: float

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.gpu + other.gpu, self.host + other.host)

    @property
    def microseconds(self) -> float:
        """Of calls in a loop: the longer of both, and a little of the other, which ranks equals."""
        return max(self.gpu, self.host) + _HIDDEN * min(self.gpu, self.host)


def _single_cost(problem: Problem, core: Core) -> Cost:
    tile, estimate = single_tile(problem, core), single_microseconds(problem, core)
    planes = problem.dtype == torch.float32 and tile is not None and not tile.tf32
    if planes or (isinstance(tile, Tile) and tile.register_a):
        estimate *= _PLANES
    elif problem.chain.norm is None:
        estimate *= _without_norm(problem, core)
    return Cost(estimate, _HOST_PLANES if planes else _HOST_ONE)


def _without_norm(problem: Problem, core: Core) -> float:
    whole_lines = problem.k % LINE_COLUMNS == 0 == problem.n % LINE_COLUMNS
    measured = core == "hopper" and problem.dtype.itemsize == 2 and not problem.training
    many = problem.m * problem.n * problem.k > _MANY_PRODUCTS
    if not (measured and whole_lines) or many or problem.chain.operand_kinds:
        return _WITHOUT_NORM
    few = problem.n <= _FEW_COLUMNS and problem.k >= _LONG_SUM
    return _OF_FEW_COLUMNS if few else _OF_WHOLE_LINES


def _backward_cost(problem: Problem, core: Core | None) -> Cost:
    if not problem.training:
        return Cost(0.0, 0.0)
    problem = backward_problem(problem, True)
    estimate = costs.norm_backward(problem) + gradients.products(problem, core)
    host = _HOST_BACKWARD.get(problem.dtype, _HOST_OTHER_BACKWARD)
    return Cost(estimate, host * (_HOST_WITHOUT_NORM if problem.chain.norm is None else 1.0))
