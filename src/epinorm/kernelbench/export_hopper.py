"""The Hopper kernels of an exported file: the whole forward chain in one product's epilogue.

For each dtype and precision, with and without what backward needs, the library's own choice of tile
for the problem's sizes; the kernels' bodies come once, what differs is a prelude for each.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epinorm.cuda.hopper import THREADS, linear_norm_source, shared_bytes
from epinorm.cuda.hopper_plan import choose_tile, instance_for, planes_of, why_not
from epinorm.cuda.jit import KernelSource
from epinorm.cuda.planes import split_shape, split_source
from epinorm.cuda.rescue import rescue_source, rescue_tile
from epinorm.cuda.source import read_kernel
from epinorm.kernelbench.export_cuda import TEMPLATE_FOLDER, speakable
from epinorm.kernelbench.export_recipe import Recipe
from epinorm.plan import Problem

__all__ = ["MODES", "Hopper", "hopper_of"]

ARCH = "sm_90a"
SMS = 132
"""Of an H100 and an H200; the number of blocks is asked of the GPU itself."""

MODES: Mapping[str, tuple[torch.dtype, str]] = {
    "float32 highest": (torch.float32, "highest"),
    "float32 high": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "native"),
    "float16": (torch.float16, "native"),
}

_NOT_EXPORTED = "  # type: ignore[no-untyped-def]  # written into the exported file"

_ELEMENTS = {
    torch.float16: "CU_TENSOR_MAP_DATA_TYPE_FLOAT16",
    torch.bfloat16: "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16",
    torch.float32: "CU_TENSOR_MAP_DATA_TYPE_FLOAT32",
}


@dataclass(frozen=True)
class Hopper:
    """``cuda``: the kernels with marks for what differs. Python text: ``instances``, the entries
    (mode, keep) → (numbers, preludes); ``limits``, those on M, K and N; ``chains``, the texts that
    preludes name; ``product``, a function. ``left_out``: mode → why it is not there.
    """

    cuda: str
    instances: str
    limits: str
    chains: str
    product: str
    modes: tuple[str, ...]
    left_out: Mapping[str, str]


def hopper_of(recipe: Recipe, has: tuple[bool, bool, bool]) -> Hopper:
    """The Hopper part for a recipe; ``has``: is there a bias, a gamma, a beta."""
    lines, modes, left_out = [], [], {}
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
    product = inspect.getsource(_product).replace(_NOT_EXPORTED, "")
    texts = "".join(f'    r"""\n{speakable(chain)}""",\n' for chain in chains)
    return Hopper(
        _cuda(recipe), "".join(lines), "".join(limits), texts, product, tuple(modes), left_out
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
        "ELEMENT_TYPE": _ELEMENTS[instance.operand_dtype],
        "ELEMENT_BYTES": tile.element_bytes,
        "BLOCK_K": tile.block_k,
        "BOX_M": tile.load_m or tile.block_m,
        "BOX_N": tile.box_n,
        "CLUSTER": tile.cluster_blocks,
        "ROWS_PER_CLUSTER": tile.block_m * tile.cluster,
        "COLUMNS_PER_CLUSTER": tile.block_n * tile.group_blocks,
        "SHARED_BYTES": shared_bytes(instance),
        "MULTIPLY_THREADS": THREADS,
    }
    prelude = _prelude(linear_norm_source(instance), "hopper_linear_norm.cu")
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
        preludes["SPLIT"] = _prelude(source, "split.cu")
        text = _prelude(rescue_source(problem, True, ARCH), "rescue.cu")
        preludes["RESCUE"] = _shortened(text, chains)
    values = "".join(f"            {name!r}: {value!r},\n" for name, value in numbers.items())
    texts = "".join(f'            {n!r}: r"""\n{t}""",\n' for n, t in preludes.items())
    keep = problem.training
    return speakable(
        f"    ({mode!r}, {keep}): (\n        {{\n{values}        }},\n        {{\n{texts}"
        "        },\n    ),\n"
    )


def _limits(mode: str, problem: Problem) -> str:
    """A tile for few rows loads no more; one with W in shared memory has room for that W alone."""
    tile = choose_tile(problem, SMS)
    assert tile is not None
    only = (problem.k, problem.n) if tile.resident_steps else None
    return f"    ({mode!r}, {problem.training}): ({tile.load_m}, {only}),\n"


def _prelude(source: KernelSource, file: str) -> str:
    body = read_kernel(file)
    assert source.text.endswith(body), f"{file} is not the end of its own text"
    return source.text[: -len(body)]


_CHAIN = re.compile(
    r"// What the generated text of a chain.*?^}  // namespace chain\n", re.S | re.M
)
_PRODUCT = re.compile(
    r"^__device__ __forceinline__ void wgmma\(.*?"
    r"m64n(?P<columns>\d+)k\d+\.f32\.(?P<kind>\w+)\..*?^}\n",
    re.S | re.M,
)


def _shortened(prelude: str, chains: list[str]) -> str:
    """The prelude with marks for the chain and for the product instruction, which are long."""

    def chain_mark(match: re.Match[str]) -> str:
        if match.group() not in chains:
            chains.append(match.group())
        return f"@CHAIN {chains.index(match.group())}@\n"

    def product_mark(match: re.Match[str]) -> str:
        columns, kind = int(match["columns"]), match["kind"]
        assert _product(columns, kind) == match.group()
        return f"@PRODUCT {columns} {kind}@\n"

    return _PRODUCT.sub(product_mark, _CHAIN.sub(chain_mark, prelude))


def _product(columns, kind):  # type: ignore[no-untyped-def]  # written into the exported file
    """wgmma.mma_async.m64n<columns> with fp32 accumulators as a function."""
    count = columns // 2
    depth, flags = (8, "1, 1") if kind == "tf32" else (16, "1, 1, 0, 0")
    registers = ", ".join(f"%{i}" for i in range(count))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return (
        f"__device__ __forceinline__ void wgmma(float (&d)[{count}], unsigned long long a, "
        "unsigned long long b, int accumulate) {\n"
        f'  asm volatile("{{ .reg .pred p; setp.ne.b32 p, %{count + 2}, 0; '
        f"wgmma.mma_async.sync.aligned.m64n{columns}k{depth}.f32.{kind}.{kind} "
        f'{{{registers}}}, %{count}, %{count + 1}, p, {flags}; }}"\n'
        f'    : {outputs} : "l"(a), "l"(b), "r"(accumulate));\n}}\n'
    )


def _cuda(recipe: Recipe) -> str:
    def kernel(namespace: str, mark: str, file: str, condition: bool) -> str:
        body = read_kernel(file).strip("\n")
        text = f"namespace {namespace} {{\n@{mark}@\n{body}\n}}  // namespace {namespace}\n"
        text += "#undef OPERAND_PARAMETERS\n#undef OPERAND_LIST\n#undef STRIDE_LIST\n"
        return f"#if SPLIT\n{text}#endif\n" if condition else text

    launch = (TEMPLATE_FOLDER / "launch_hopper.cu.in").read_text(encoding="utf-8")
    kinds = recipe.chain.operand_kinds
    operands = "".join(f", static_cast<const Norm*>(operands[{i}])" for i in range(len(kinds)))
    rescue = "".join(
        f", static_cast<const float*>(operands[{i}]), " + ("0ll" if kind == "channel" else "n")
        for i, kind in enumerate(kinds)
    )
    launch = launch.replace("@operands@", operands).replace("@rescue_operands@", rescue)
    parts = [
        kernel("split_rows", "SPLIT", "split.cu", True),
        _renamed(kernel("multiply", "MULTIPLY", "hopper_linear_norm.cu", False)),
        _own_memory(kernel("rescue_rows", "RESCUE", "rescue.cu", True)),
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
