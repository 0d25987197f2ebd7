"""The Hopper kernel compiles without a GPU, whatever tile a problem takes: no spills, no stalls.

ptxas says in its log when it had to serialise wgmma (C7508 to C7520): the result would still be
right, at a third of the speed. Where a disassembler is found, the products are looked at as well.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from epinorm.backends.cuda.fp32.planes import split_source
from epinorm.backends.cuda.gemm.hopper.text import linear_norm_source
from epinorm.backends.cuda.plan import hopper as hopper_plan
from epinorm.backends.cuda.plan.hopper_tile import (
    Tile,
    largest_stages,
    operand_slots,
    shared_bytes,
)
from epinorm.backends.cuda.runtime.jit import KernelSource, compile_cubin, compiled
from epinorm.problem import Problem

sys.path.insert(0, str(Path(__file__).parent))

from problems import EASY, HEAVY, problem_of

pytestmark = pytest.mark.usefixtures("kept_figures")

DROPS = "dropout(0.1)|add_residual|layer_norm"
SMS = 132  # of an H200
SHARED_LIMIT = 227 * 1024

BF16, F16, HIGH, HIGHEST = "bfloat16", "float16", "high", "highest"
KINDS = (BF16, F16, HIGH, HIGHEST)

# m, k, channels in a group, groups.
SHAPES = {
    "kb62": (1024, 8192, 16, 512),
    "kb62_v0": (128, 512, 32, 8),
    "skinny": (65536, 128, 4, 32),
    "mid": (16384, 1024, 32, 32),
    "wide_groups": (8192, 4096, 128, 32),
    "decode_1": (1, 8192, 16, 512),
    "decode_16": (16, 8192, 16, 512),
    "layer_norm_512": (4096, 512, 512, 1),
    "layer_norm_768": (16384, 768, 768, 1),  # in halves
}


def source_of(problem: Problem, tile: Tile | None = None) -> KernelSource:
    """The kernel's text; it asserts that it lays out the shared memory that the launch asks for."""
    assert hopper_plan.why_not(problem) is None
    tile = tile or hopper_plan.choose_tile(problem, SMS, converts=False)
    assert tile is not None, problem
    instance = hopper_plan.instance_for(problem, tile)
    source = linear_norm_source(instance)
    layout = (
        "constexpr int kExchangeBarriers = kExchanges > 2 ? kExchanges : 2;\n"
        "constexpr int kBarriers = 2 * kStages * kSlotParts + kConsumers + 1 + kExchangeBarriers;\n"
        "static_assert(kBarrierOffset + 8 * kBarriers == "
        f'{shared_bytes(instance)}, "hopper.py and the kernel lay it out differently");\n'
    )
    assert shared_bytes(instance) <= SHARED_LIMIT
    return dataclasses.replace(source, text=source.text + layout)


def check(source: KernelSource, stack: int = 0) -> None:
    result = compiled(source)
    assert result.stack_bytes <= stack, result.log
    assert stack or not result.spill_bytes, result.log
    assert result.shared_bytes == 0  # all of it is dynamic: the layout above is the whole
    assert not re.search(r"C75\d\d|serializ", result.log), result.log


@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("name", SHAPES)
def test_named_shapes(name, turn):
    """In either 16-bit kind and in both kinds of fp32, every other one with training."""
    i = list(SHAPES).index(name)
    kind = ((BF16, F16)[i // 2 % 2], HIGH, HIGHEST)[turn]
    check(source_of(problem_of(*SHAPES[name], kind, training=(i + turn) % 2 == 1)))


KB94 = "add_channel|hardtanh(-1,1)|mish|group_norm({groups})"
ROUNDED = [
    (SHAPES["kb62"], EASY),
    ((1024, 8192, 512, 16), "group_norm({groups})|hardtanh(-2,2)"),
    ((1024, 8192, 32, 256), KB94),
    (SHAPES["skinny"], EASY),
    (SHAPES["mid"], KB94),
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("i, shape, chain", [(i, *case) for i, case in enumerate(ROUNDED)])
def test_rounding_as_eager_does_stalls_no_product(i, shape, chain, training):
    """Statistics are rounded too, whatever this PyTorch's norm does."""
    kind = BF16 if (i + training) % 2 else F16
    source = source_of(problem_of(*shape, kind, training, f"{chain}|rounding(eager)"))
    kept = "bf16" if kind == BF16 else "fp16"
    check(dataclasses.replace(source, text=f"#define EPINORM_STATISTICS {kept}\n{source.text}"))


GROUP_SIZES = (2, 4, 8, 16, 24, 32, 40, 48, 64, 96, 128, 192, 256, 384, 1024, 2048, 12, 20, 60)


@pytest.mark.parametrize("channels", GROUP_SIZES)
def test_group_sizes(channels):
    """Training, whose epilogue is the larger one, in one kind after another."""
    kind = KINDS[(GROUP_SIZES.index(channels) + 1) % 4]
    groups = max(1, 1024 // channels)
    groups += groups % 2 if channels % 8 == 4 else 0  # rows of whole 16-byte units
    check(source_of(problem_of(4096, 1024, channels, groups, kind, True)))


@pytest.mark.parametrize("kind", [BF16, HIGHEST])
@pytest.mark.parametrize(
    "chain", ["layer_norm|gelu", "silu|rms_norm(1e-06)|scale(2)", HEAVY, DROPS]
)
def test_chains(chain, kind):
    groups = 8 if "group" in chain else 1
    channels = 32 if groups > 1 else 128
    parameters = (True, True, "rms" not in chain)
    shape = (4096, 1024, channels, groups)
    check(source_of(problem_of(*shape, kind, True, chain, parameters=parameters)))


@pytest.mark.parametrize("parameters", [(False, False, False), (False, True, False)])
def test_absent_parameters(parameters):
    check(source_of(problem_of(*(4096, 64, 16, 8), BF16, parameters=parameters)))


@pytest.mark.slow
def test_autocast():
    check(source_of(problem_of(*(4096, 1024, 16, 64), BF16, True, HEAVY, torch.float32)))


RESIDUAL = "add_residual|layer_norm"
HELD = [
    ((16384, 768, 768, 1), BF16, RESIDUAL, False),
    ((16384, 768, 768, 1), HIGH, f"{RESIDUAL}|returns(sum)", True),
    ((16384, 1024, 1024, 1), F16, RESIDUAL, True),
    ((16384, 768, 32, 24), HIGHEST, "add_residual|group_norm({groups})", True),
    ((16384, 768, 32, 24), HIGHEST, "group_norm({groups})|mul_element", False),
    ((65536, 256, 256, 1), HIGHEST, RESIDUAL, False),  # in clusters, in turn
    ((65536, 1024, 256, 1), HIGHEST, RESIDUAL, False),  # together
    ((65536, 256, 192, 1), HIGHEST, RESIDUAL, True),
    ((65536, 512, 512, 1), HIGH, RESIDUAL, True),  # TF32 from registers, in clusters
]


@pytest.mark.parametrize("shape, kind, chain, training", HELD)
def test_an_element_operand_through_the_ring(shape, kind, chain, training):
    problem = problem_of(*shape, kind, training, chain)
    tile = hopper_plan.choose_tile(problem, SMS, converts=False)
    assert operand_slots(hopper_plan.instance_for(problem, tile)) > 0
    check(source_of(problem, tile))


OFTEN_IN_HALVES = [RESIDUAL, f"{RESIDUAL}|returns(sum)", f"dropout(0.1)|{RESIDUAL}", "layer_norm"]
IN_HALVES = [
    *("rms_norm(1e-06)", "add_residual|rms_norm(1e-06)", "layer_norm|gelu", "silu|rms_norm(1e-06)"),
    *("gelu|layer_norm", f"gelu|{RESIDUAL}", f"mul_channel|{RESIDUAL}|returns(sum)"),
    *(f"dropout(0.1)|{RESIDUAL}|returns(sum)", "mul_row|layer_norm"),
    "gelu|layer_norm|mul_channel|softplus",
]
FEW_REGISTERS_BYTES = 24
"""Six registers on the stack, where accumulators take 192 of 240: kernels that do were timed."""


@pytest.mark.parametrize("i, chain", list(enumerate(OFTEN_IN_HALVES)))
def test_two_products_a_row(i, chain):
    kind = (BF16, HIGH)[i % 2]
    _check_in_halves(problem_of(16384, 768, (768, 384)[i // 2], 1, kind, False, chain), i < 3)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [384, 576, 640, 768])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("chain", OFTEN_IN_HALVES + IN_HALVES)
@pytest.mark.parametrize("kind", [BF16, F16, HIGH])
def test_two_products_a_row_in_any_chain(kind, chain, training, channels):
    problem = problem_of(16384, 768, channels, 1, kind, training, chain)
    _check_in_halves(problem, kind != HIGH and channels != 576)


def _check_in_halves(problem: Problem, must: bool) -> None:
    """must: there is such a tile."""
    tiles = [t for t in hopper_plan.candidates(problem) if t.in_halves and not t.converts]
    assert len(tiles) == 1 or not must
    for tile in tiles:
        check(source_of(problem, tile), FEW_REGISTERS_BYTES)


TILES = [
    (Tile(128, 256, 0, ping_pong=False, cluster=2), BF16),
    (Tile(128, 128, 0, ping_pong=True, cluster=2), BF16),
    (Tile(64, 256, 0, ping_pong=True), BF16),
    (Tile(64, 256, 0, ping_pong=False, split_columns=True), BF16),
    (Tile(128, 128, 0, ping_pong=True, tf32=True), HIGH),
    (Tile(64, 128, 0, ping_pong=True, load_m=16, tf32=True), HIGH),
    (Tile(64, 256, 0, tf32=True, register_a=True), HIGH),
    (Tile(128, 256, 0, ping_pong=False, tf32=True, register_a=True), HIGH),
    (Tile(64, 128, 0, tf32=True, register_a=True, consumers=3), HIGH),
    (Tile(64, 64, 0, tf32=True, register_a=True, consumers=4), HIGH),
    (Tile(128, 128, 0, ping_pong=False, cluster=2), HIGHEST),
    (Tile(64, 64, 0, ping_pong=True, fold_steps=1), HIGHEST),
    (Tile(64, 64, 0, ping_pong=True, fold_steps=0), HIGHEST),
    (Tile(128, 128, 0, ping_pong=False, fold_steps=0), HIGHEST),
]


@pytest.mark.parametrize("tile, kind", TILES)
def test_tiles_that_the_plan_seldom_takes(tile, kind):
    training = not (kind == HIGHEST and tile.cluster > 1)  # that one would spill 32 bytes
    problem = problem_of(*(4096, 1024, 16, 64), kind, training)
    stages = largest_stages(hopper_plan.instance_for(problem, tile))
    check(source_of(problem, dataclasses.replace(tile, stages=min(stages, 12))))


FROM_REGISTERS = [
    ((65536, 512, 512, 1), Tile(128, 256, 0, ping_pong=False, cluster_n=2)),
    ((300, 36, 512, 1), Tile(64, 64, 0, ping_pong=False, split_columns=True, cluster_n=8)),
    ((16384, 256, 512, 1), Tile(64, 256, 0, ping_pong=False, split_columns=True, cluster_n=2)),
    ((8192, 64, 2048, 1), Tile(64, 256, 0, cluster_n=8)),
]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("shape, tile", FROM_REGISTERS)
def test_tf32_from_registers_where_blocks_share_groups(shape, tile, training):
    problem = problem_of(*shape, HIGH, training, "layer_norm|relu")
    tile = dataclasses.replace(tile, tf32=True, register_a=True)
    stages = min(largest_stages(hopper_plan.instance_for(problem, tile)), hopper_plan.MOST_STAGES)
    tile = dataclasses.replace(tile, stages=stages)
    assert tile in hopper_plan.candidates(problem)
    check(source_of(problem, tile))


@pytest.mark.parametrize("k", [128, 256, 1024])
@pytest.mark.parametrize("chain", ["layer_norm|relu", "rms_norm|silu", "gelu|layer_norm|gelu"])
def test_two_planes_in_clusters(chain, k):
    """Inference at 256 channels; z beside it where a part is narrower."""
    for channels, training in ((256, False), (224, True)):
        problem = problem_of(65536, k, channels, 1, HIGHEST, training, chain)
        problem = dataclasses.replace(problem, has_norm_bias="rms" not in chain)
        tile = hopper_plan.choose_tile(problem, SMS)
        assert tile.cluster_n == 2
        check(source_of(problem, tile))


def test_the_largest_ring_fits_and_one_slot_more_does_not():
    problem = problem_of(*SHAPES["kb62"], BF16)
    tile = hopper_plan.choose_tile(problem, SMS)
    most = largest_stages(hopper_plan.instance_for(problem, tile))

    def size(stages: int) -> int:
        larger = dataclasses.replace(tile, stages=stages)
        return shared_bytes(hopper_plan.instance_for(problem, larger))

    assert size(most) <= SHARED_LIMIT < size(most + 1)


SPLITS = [(1, 7, False), (2, 8192, True), (2, 99999, True)]


@pytest.mark.parametrize("planes, columns, aligned", SPLITS)
def test_splitting(planes, columns, aligned):
    result = compiled(split_source(planes, columns, aligned, "sm_90a"))
    assert (result.spill_bytes, result.stack_bytes) == (0, 0), result.log


def disassembler() -> Path | None:
    """cuobjdump: on PATH, or as Triton's wheel brings it."""
    if found := shutil.which("cuobjdump"):
        return Path(found)
    triton = importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return None
    bundled = Path(triton.origin).parent / "backends/nvidia/bin/cuobjdump"
    return bundled if bundled.exists() else None


def machine_code(cubin: bytes, folder: Path) -> list[str]:
    """The instructions of a cubin that holds one kernel, without predicates and addresses."""
    tool = disassembler()
    if tool is None:
        pytest.skip("no cuobjdump: neither a CUDA toolkit nor Triton")
    file = folder / "kernel.cubin"
    file.write_bytes(cubin)
    done = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True)
    found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?(.*?);", done.stdout)
    assert found, done.stdout[:1000]
    return found


# Instructions that wait or touch memory, by their first letters.
WAITING = r"LD|ST|ATOM|RED|SYNCS|BAR|B2R|WARPSYNC|WARPGROUP|SHFL|MEMBAR|DEPBAR|BRA|CCTL|NANOSLEEP"


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind", [("kb62", BF16), ("mid", F16), ("kb62", HIGHEST), ("layer_norm_768", BF16)]
)
def test_products_stand_back_to_back(name, kind, tmp_path):
    """Nothing but arithmetic on addresses between the products of a step, and no local memory."""
    problem = problem_of(*SHAPES[name], kind)
    tile = hopper_plan.choose_tile(problem, SMS)
    source = linear_norm_source(hopper_plan.instance_for(problem, tile))
    code = machine_code(compile_cubin(source).cubin, tmp_path)
    assert not [line for line in code if re.match("LDL|STL", line)]
    step: list[str] = []
    steps = 0
    for line in code:
        if line.startswith("HGMMA"):
            assert not [between for between in step if re.match(WAITING, between)], step
            step = [line]
            if "gsb0" in line:  # the last product of a step tells the scoreboard
                steps, step = steps + 1, []
        elif step:
            step.append(line)
    assert steps >= 1
    assert not step


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, kind", [("kb62", BF16), ("mid", F16), ("layer_norm_512", BF16), ("kb62", HIGHEST)]
)
def test_rows_leave_by_16_bytes_a_lane(name, kind, tmp_path):
    """The compiler once took every other one of these stores apart into four of 4 bytes."""
    problem = problem_of(*SHAPES[name], kind)
    code = machine_code(compile_cubin(source_of(problem)).cubin, tmp_path)
    stores = [line.split()[0] for line in code if line.startswith("STG")]
    assert stores
    assert all(".128" in store for store in stores), stores


def test_instances_differ_only_where_their_text_must():
    """Rows and groups are arguments: other counts share the kernel if they share the tile."""
    first = problem_of(*(4096, 1024, 16, 64), BF16)
    other = problem_of(*(5000, 1032, 16, 65), BF16)
    tile = hopper_plan.choose_tile(first, SMS)
    sources = [linear_norm_source(hopper_plan.instance_for(p, tile)) for p in (first, other)]
    assert sources[0] == sources[1]
