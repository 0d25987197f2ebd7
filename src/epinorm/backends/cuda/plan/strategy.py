"""Which strategy a problem takes on a CUDA GPU, and why."""

from __future__ import annotations

import torch

from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan import portable as portable_plan
from epinorm.backends.cuda.plan import tuned
from epinorm.backends.cuda.plan.core import wanted_core
from epinorm.backends.cuda.plan.steps import completed
from epinorm.backends.cuda.runtime.device import capability, gpu_of, sm_count, supported
from epinorm.problem import Core, Plan, Problem, Strategy

__all__ = ["plan_cuda"]

HOPPER = (9, 0)

LARGEST_GUARDED_GROUP = 256
"""Channels of a group that the range guard of the single kernel can compute again."""

# What a library product reaches on an H200, TFLOP/s, by precision; kernel launches in microseconds;
# what the norm kernel moves, bytes a microsecond.
_LIBRARY_TFLOPS = {"native": 750.0, "high": 400.0, "highest": 50.0}
_LAUNCH = 4.0
_BYTES = 3.5e6

# What the host of an H200 takes for a call, in microseconds: no call is faster for long, whatever
# the GPU takes. One kernel; fp32 as planes, three kernels; PyTorch's product and a kernel.
_HOST_ONE, _HOST_PLANES, _HOST_EPILOGUE = 13.0, 26.0, 28.0


def plan_cuda(problem: Problem, strategy: Strategy) -> Plan:
    """The plan for ``strategy`` ("auto", "single", "epilogue") on the problem's GPU.

    A strategy that cannot serve the problem comes back as a plan for the reference with the reason.
    """
    plan = _decided(problem, strategy)
    return plan if plan.strategy == "reference" else completed(problem, plan)


def _decided(problem: Problem, strategy: Strategy) -> Plan:
    """The strategy and why, without the steps."""
    refusal = supported(problem.device)
    if refusal is not None:
        return Plan("reference", refusal)
    core, why_not_single = _core(problem)
    if strategy == "single":
        if core is None:
            return Plan("reference", why_not_single)
        return Plan("single", f"asked for by name; {_tile_text(problem, core)}", core)
    if strategy == "epilogue":
        return Plan("epilogue", "asked for by name: a library product, then one kernel")
    if core is None:
        return Plan("epilogue", f"a library product, then one kernel: {why_not_single}")
    if problem.m == 1 and problem.precision == "high":
        return Plan(
            "epilogue",
            "a library product, then one kernel: PyTorch computes a single row in full fp32 also "
            "where TF32 is allowed",
        )
    # Groups of few channels whose variance is small by chance magnify the linear's error: gradients
    # are more accurate so than by a library product, in as much time (docs/training.md).
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
        converts = tile is not None and tile.fp32_weight  # nothing is left to, if prepacked
        if remembered is not None and not (converts and problem.prepacked):
            measured = (
                f"`epinorm tune` measured it fastest here, at {remembered.microseconds:.1f} us"
            )
            if remembered.strategy == "epilogue":
                return Plan("epilogue", f"a library product, then one kernel: {measured}")
            return Plan("single", f"{_tile_text(problem, core)}: {measured}", core)
    single, epilogue = _single_microseconds(problem, core), _epilogue_microseconds(problem)
    if single > epilogue:
        return Plan(
            "epilogue",
            f"a library product, then one kernel: estimated {epilogue:.0f} us against "
            f"{single:.0f} in a single kernel",
        )
    return Plan("single", _tile_text(problem, core), core)


def _core(problem: Problem) -> tuple[Core | None, str]:
    """The core that serves the problem in a single kernel; or None, and in a sentence why."""
    wanted = wanted_core()
    why_not_hopper = _why_not_hopper(problem)
    if why_not_hopper is None and wanted != "portable":
        return "hopper", ""
    if why_not_hopper is not None and wanted == "hopper":
        return None, why_not_hopper
    why_not = _why_not_portable(problem)
    if why_not is None:
        return "portable", ""
    on_hopper = wanted == "auto" and capability(problem.device) == HOPPER
    return None, why_not_hopper if on_hopper and why_not_hopper else why_not


def _why_not_hopper(problem: Problem) -> str | None:
    if capability(problem.device) != HOPPER:
        major, minor = capability(problem.device)
        return f"the Hopper core needs compute capability 9.0, this GPU has {major}.{minor}"
    why_not = hopper_plan.why_not(problem)
    if why_not is not None:
        return why_not
    tile = hopper_plan.choose_tile(problem, sm_count(problem.device), problem.prepacked)
    if tile is None:
        return "no tile of the single kernel fits the shared memory"
    return None if tile.tf32 else _why_not_guarded(problem)


def _why_not_portable(problem: Problem) -> str | None:
    why_not = portable_plan.why_not(problem)
    if why_not is not None:
        return why_not
    if portable_plan.choose_tile(problem, gpu_of(problem.device)) is None:
        return "no tile of the single kernel fits the shared memory"
    return _why_not_guarded(problem)


def _why_not_guarded(problem: Problem) -> str | None:
    channels = problem.chain.channels_per_group(problem.n)
    if problem.dtype == torch.float32 and channels > LARGEST_GUARDED_GROUP:
        return (
            f"the range guard of fp32 computes groups of up to {LARGEST_GUARDED_GROUP} channels, "
            f"and these have {channels}"
        )
    return None


def _tile_text(problem: Problem, core: Core) -> str:
    kind, rows, columns, tf32, fp32_weight = _tile_facts(problem, core)
    operands = ""
    if problem.dtype == torch.float32:
        count = hopper_plan.planes_of(problem)
        planes = "two fp16 planes" if count == 2 else "one fp16 plane"
        operands = ", as TF32" if tf32 else f", as {planes}"
        operands += ", the weight's made on the way" * fp32_weight
    return f"one kernel{operands}, tiles of {rows} x {columns}, {kind}"


def _tile_facts(problem: Problem, core: Core) -> tuple[str, int, int, bool, bool]:
    """What multiplies, a tile's rows and columns, whether it is TF32, and whether the weight is
    converted on the way."""
    if core == "portable":
        portable = portable_plan.choose_tile(problem, gpu_of(problem.device))
        assert portable is not None
        return "the portable core (mma.sync)", portable.block_m, portable.block_n, False, False
    tile = hopper_plan.choose_tile(problem, sm_count(problem.device), problem.prepacked)
    assert tile is not None
    kind = "warpgroups in turn" if tile.ping_pong else "warpgroups together"
    return kind, tile.block_m, tile.block_n, tile.tf32, tile.fp32_weight


def _single_microseconds(problem: Problem, core: Core) -> float:
    planes = problem.dtype == torch.float32 and not _tile_facts(problem, core)[3]
    if core == "portable":
        estimate = portable_plan.microseconds(problem, gpu_of(problem.device))
    else:
        estimate = hopper_plan.microseconds(problem, sm_count(problem.device))
    return max(estimate, _HOST_PLANES if planes else _HOST_ONE)


def _epilogue_microseconds(problem: Problem) -> float:
    if capability(problem.device) != HOPPER:
        estimate = portable_plan.library_microseconds(problem, gpu_of(problem.device))
        return max(estimate, _HOST_EPILOGUE)
    flops = 2.0 * problem.m * problem.n * problem.k
    itemsize = problem.dtype.itemsize
    product = max(
        flops / (_LIBRARY_TFLOPS[problem.precision] * 1e6),
        (problem.m + problem.n) * problem.k * itemsize / _BYTES,
    )
    norm = problem.m * problem.n * (2 * itemsize + problem.out_dtype.itemsize) / _BYTES
    return max(2 * _LAUNCH + product + norm, _HOST_EPILOGUE)
