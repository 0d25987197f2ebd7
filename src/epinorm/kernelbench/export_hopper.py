"""The Hopper kernels of an exported file: the whole forward chain in one product's epilogue.

For each dtype and precision, with and without what backward needs, the library's own choice of tile
for the problem's sizes; the kernels' bodies come once, what differs is a prelude for each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epinorm.cuda.hopper import linear_norm_source, shared_bytes
from epinorm.cuda.hopper_plan import choose_tile, instance_for, planes_of, why_not
from epinorm.cuda.planes import split_shape, split_source
from epinorm.cuda.rescue import rescue_source, rescue_tile
from epinorm.cuda.source import read_kernel
from epinorm.kernelbench.export_backward import backward_cuda, bodies, products_of
from epinorm.kernelbench.export_cuda import TEMPLATE_FOLDER, speakable
from epinorm.kernelbench.export_recipe import Recipe
from epinorm.kernelbench.export_text import ELEMENTS, SMS, entry, prelude_of, product_function
from epinorm.plan import Problem

__all__ = ["MODES", "Hopper", "hopper_of"]

ARCH = "sm_90a"

MODES: Mapping[str, tuple[torch.dtype, str]] = {
    "float32 highest": (torch.float32, "highest"),
    "float32 high": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "native"),
    "float16": (torch.float16, "native"),
}


@dataclass(frozen=True)
class Hopper:
    """``cuda``, ``backward_cuda``: the kernels with marks for what differs. Python text:
    ``instances``, the entries (mode, keep) → (numbers, preludes); ``backward``, the entries mode →
    (numbers, preludes); ``bodies``, kernels that marks name; ``limits``, those on M, K and N;
    ``chains``, the texts that preludes name; ``product``, a function. ``left_out`` and
    ``backward_left_out``: mode → why it is not there.
    """

    cuda: str
    backward_cuda: str
    instances: str
    backward: str
    bodies: str
    limits: str
    chains: str
    product: str
    modes: tuple[str, ...]
    left_out: Mapping[str, str]
    backward_left_out: Mapping[str, str]


def hopper_of(recipe: Recipe, has: tuple[bool, bool, bool]) -> Hopper:
    """The Hopper part for a recipe; ``has``: is there a bias, a gamma, a beta."""
    lines, modes, left_out = [], [], {}
    backward, without_products = "", {}
    chains: list[str] = []
    limits: list[str] = []
    for mode in MODES:
        problems = [_problem(recipe, mode, has, keep) for keep in (False, True)]
        reason = next((r for p in problems if (r := _why_not(p))), None)
        if reason is not None:
            left_out[mode] = reason
            continue
        modes.append(mode)
        for problem in problems:
            lines.append(_instance(mode, problem, chains))
            limits.append(_limits(mode, problem))
        products = products_of(mode, problems[1])
        backward += products.text
        if products.left_out is not None:
            without_products[mode] = products.left_out
    kernels = "".join(f'    {name!r}: r"""\n{text}""",\n' for name, text in bodies().items())
    texts = "".join(f'    r"""\n{speakable(chain)}""",\n' for chain in chains)
    return Hopper(
        cuda=_cuda(recipe),
        backward_cuda=backward_cuda(),
        instances="".join(lines),
        backward=backward,
        bodies=kernels,
        limits="".join(limits),
        chains=texts,
        product=product_function(),
        modes=tuple(modes),
        left_out=left_out,
        backward_left_out=without_products,
    )


def _problem(recipe: Recipe, mode: str, has: tuple[bool, bool, bool], keep: bool) -> Problem:
    dtype, precision = MODES[mode]
    m, k, n = recipe.m_k_n
    return Problem(
        recipe.chain, m, k, n, dtype, dtype, dtype, *has, keep, torch.device("cuda"),
        precision,  # type: ignore[arg-type]
    )  # fmt: skip


def _why_not(problem: Problem) -> str | None:
    reason = why_not(problem)
    if reason is not None:
        return reason
    if problem.k % 8:
        return f"rows of {problem.k} input features are not a multiple of 8"
    tile = choose_tile(problem, SMS)
    if tile is None:
        return "no tile of the kernel fits the shared memory"
    if problem.dtype == torch.float32 and not tile.tf32:
        try:
            rescue_tile(problem.chain.channels_per_group(problem.n))
        except ValueError as error:
            return str(error)
    return None


def _instance(mode: str, problem: Problem, chains: list[str]) -> str:
    tile = choose_tile(problem, SMS)
    assert tile is not None
    instance = instance_for(problem, tile)
    split = problem.dtype == torch.float32 and not tile.tf32
    numbers: dict[str, int | str] = {
        "SPLIT": int(split),
        "PLANES": planes_of(problem),
        "ELEMENT_TYPE": ELEMENTS[instance.operand_dtype],
        "ELEMENT_BYTES": tile.element_bytes,
        "BLOCK_K": tile.block_k,
        "BOX_M": tile.load_m or tile.block_m,
        "BOX_N": tile.box_n,
        "CLUSTER": tile.cluster_blocks,
        "ROWS_PER_CLUSTER": tile.block_m * tile.cluster,
        "COLUMNS_PER_CLUSTER": tile.block_n * tile.group_blocks,
        "SHARED_BYTES": shared_bytes(instance),
        "MULTIPLY_THREADS": tile.threads,
    }
    prelude = prelude_of(linear_norm_source(instance), "hopper_linear_norm.cu")
    preludes = {"MULTIPLY": _shortened(prelude, chains)}
    if split:
        rows = -(-problem.m // 16) * 16 + problem.n
        shape = split_shape(rows, problem.k, SMS)
        rescue = rescue_tile(instance.group_columns)
        numbers |= {
            "SPLIT_BLOCK_ROWS": shape.block_rows,
            "RESCUE_ROWS": rescue.rows,
            "RESCUE_COLUMNS": rescue.columns,
            "RESCUE_BYTES": rescue.shared_bytes,
        }
        source = split_source(planes_of(problem), problem.k, True, ARCH, rows, SMS)
        preludes["SPLIT"] = prelude_of(source, "split.cu")
        text = prelude_of(rescue_source(problem, True, ARCH), "rescue.cu")
        preludes["RESCUE"] = _shortened(text, chains)
    return entry(repr((mode, problem.training)), numbers, preludes)


def _limits(mode: str, problem: Problem) -> str:
    """A tile for few rows loads no more; one with W in shared memory has room for that W alone."""
    tile = choose_tile(problem, SMS)
    assert tile is not None
    only = (problem.k, problem.n) if tile.resident_steps else None
    return f"    ({mode!r}, {problem.training}): ({tile.load_m}, {only}),\n"


_CHAIN = re.compile(
    r"// What the generated text of a chain.*?^}  // namespace chain\n", re.S | re.M
)


def _shortened(prelude: str, chains: list[str]) -> str:
    """The prelude with a mark for the chain, which is long."""

    def mark(match: re.Match[str]) -> str:
        if match.group() not in chains:
            chains.append(match.group())
        return f"@CHAIN {chains.index(match.group())}@\n"

    return _CHAIN.sub(mark, prelude)


def _cuda(recipe: Recipe) -> str:
    def kernel(namespace: str, mark: str, body: str) -> str:
        return (
            f"namespace {namespace} {{\n@{mark}@\n{body}\n}}  // namespace {namespace}\n"
            "#undef OPERAND_PARAMETERS\n#undef OPERAND_LIST\n#undef STRIDE_LIST\n"
        )

    common, launch = (
        (TEMPLATE_FOLDER / name).read_text(encoding="utf-8")
        for name in ("launch_common.cu.in", "launch_hopper.cu.in")
    )
    kinds = recipe.chain.operand_kinds
    operands = "".join(f", static_cast<const Norm*>(operands[{i}])" for i in range(len(kinds)))
    rescue = "".join(
        f", static_cast<const float*>(operands[{i}]), " + ("0ll" if kind == "channel" else "n")
        for i, kind in enumerate(kinds)
    )
    launch = launch.replace("@operands@", operands).replace("@rescue_operands@", rescue)
    multiply = read_kernel("hopper_linear_norm.cu").strip("\n")
    rescue_rows = _own_memory(kernel("rescue_rows", "RESCUE", read_kernel("rescue.cu").strip("\n")))
    parts = [
        f"#if SPLIT\n{kernel('split_rows', 'SPLIT', '@BODY split@')}#endif\n",
        _renamed(kernel("multiply", "MULTIPLY", multiply)),
        f"#if SPLIT\n{rescue_rows}#endif\n",
        common,
        launch,
    ]
    return speakable("\n".join(parts))


def _renamed(text: str) -> str:
    """The types as names in the namespace too, for the launch, before the macros end."""
    types = "".join(
        f"using Launch{name} = {name};\n" for name in ("OutType", "KeptType", "NormType")
    )
    return text.replace("}  // namespace multiply", f"{types}}}  // namespace multiply")


def _own_memory(text: str) -> str:
    """Two kernels of one file cannot name their dynamic shared memory alike."""
    found = re.search(r"extern __shared__ (?P<align>__align__\(\d+\)) float shared\[\];", text)
    assert found is not None, "rescue.cu declares its shared memory otherwise"
    own = f"extern __shared__ {found['align']} float rescue_memory[];"
    return text.replace(found.group(), f"{own}\n  float* const shared = rescue_memory;")
