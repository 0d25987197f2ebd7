"""The CUDA text of an exported file, from the library's own kernels and their headers.

The headers that do not depend on a tile come once; each kernel lies in a namespace of its own with
its tile's constants. What depends on dtype, sizes or constructor arguments stays a macro, which the
exported file defines when it builds.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from epinorm.backends.cuda.text.chain_text import chain_text, constant_list
from epinorm.backends.cuda.text.source import KERNEL_FOLDER
from epinorm.chain import Chain
from epinorm.chain.pointwise import Pointwise
from epinorm.tools.export.recipe import Recipe

__all__ = ["TEMPLATE_FOLDER", "binding_text", "norm_cuda_text", "speakable"]

TEMPLATE_FOLDER = Path(__file__).parent / "templates"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]+"(?P<name>[^"\n]+)"[^\n]*\n?', re.MULTILINE)
_PRAGMA = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[ \t]*\n?", re.MULTILINE)

SHARED_HEADERS = (
    "norm/norm_types.cuh", "common/vector.cuh", "common/reduce.cuh", "common/variance.cuh",
    "common/dependent.cuh", "norm/dz_store.cuh",
)  # fmt: skip

# Static checkers of KernelBench reject these words anywhere, also in comments.
_WORDS = (
    (re.compile(r"\bPass\b"), "Batch"),
    (re.compile(r"\bpass\b"), "batch"),
    (re.compile(r"\btry\b"), "attempt"),
    (re.compile(r"\bexcept\b"), "but"),
)
_LETTERS = {"ᵀ": "^T", "→": "->", "×": "x", "−": "-", "²": "^2", "–": "-", "·": "*", "µ": "u"}


def speakable(text: str) -> str:
    """The text without the words that static checkers reject, in ASCII: not every machine on which
    it is built writes and reads more."""
    for word, instead in _WORDS:
        text = word.sub(instead, text)
    for letter, instead in _LETTERS.items():
        text = text.replace(letter, instead)
    return text


def expanded(name: str, seen: set[str]) -> str:
    """A kernel file with our own headers in place of their includes; those ``seen`` left out."""
    seen.add(name)
    text = _PRAGMA.sub("", (KERNEL_FOLDER / name).read_text(encoding="utf-8"))

    def replace(match: re.Match[str]) -> str:
        return "" if match["name"] in seen else expanded(match["name"], seen)

    return _INCLUDE.sub(replace, text)


def chain_macros(recipe: Recipe) -> tuple[str, tuple[str, ...]]:
    """The chain's text, and its constants as the launches' C++ has them: CONSTANT_i is a number
    that is read at run time."""
    numbers: dict[float, str] = {}

    def marked(value: float, expression: str | None) -> float:
        if expression is None:
            return value
        mark = 1.0 + (len(numbers) + 1) * 2.0**-30  # a number that no chain holds
        numbers[mark] = f"CONSTANT_{len(numbers)}"
        return mark

    before = len(recipe.chain.pre)
    marked_pre = _marked(recipe, marked, 0, before)
    norm = recipe.chain.norm
    if norm is not None and recipe.eps is not None:
        norm = dataclasses.replace(norm, eps=marked(recipe.eps.value, recipe.eps.expression))
    marked_post = _marked(recipe, marked, before, len(recipe.operations))
    chain = Chain(norm, marked_pre, marked_post, recipe.chain.rounding)
    text = chain_text(chain)
    for mark, name in numbers.items():  # eps is in the text itself
        text = text.replace(f"T({mark!r})", f"T({name})")
        assert repr(mark) not in text, f"a constant of {chain} did not become {name}"
    values = (numbers.get(c, cpp_number(c)) for c in plain_numbers(chain))
    return text, tuple(f"T({value})" for value in values)


def plain_numbers(chain: Chain) -> tuple[float, ...]:
    """The chain's own numbers as its kernels take them."""
    return tuple(c for c in chain.arguments if isinstance(c, float))


def cpp_number(value: float) -> str:
    """A number in the C++ of a launch."""
    return repr(value).replace("inf", "HUGE_VAL")


def _marked(recipe: Recipe, marked, first: int, last: int) -> tuple[Pointwise, ...]:  # type: ignore[no-untyped-def]
    return tuple(
        Pointwise(operation.name, tuple(marked(c.value, c.expression) for c in constants))
        for operation, constants in recipe.operations[first:last]
    )


def _kernel(namespace: str, tile: str, file: str, seen: set[str], extra: str = "") -> str:
    names = ("Vector", "Lanes", "Vectors", "Rows", "WarpsX", "WarpsY", "Keep", "Resident")
    constants = "".join(
        f"constexpr int k{name} = {tile}_{_upper(name)};\n" for name in (*names, "Prefetch")
    )
    constants = constants if tile else ""
    body = expanded(file, set(seen)).strip("\n")
    return f"namespace {namespace} {{\n{constants}{extra}\n{body}\n}}  // namespace {namespace}\n"


def _upper(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).upper()


def norm_cuda_text(recipe: Recipe) -> str:
    """The norm kernels, forward and backward, and the functions that launch them."""
    seen = {"common/chain.cuh"}
    chain, constants = chain_macros(recipe)
    parts = [chain, _operands(recipe, len(constants))]
    parts += [expanded(name, seen).strip("\n") for name in SHARED_HEADERS if name not in seen]
    forward = (
        "#define kKeepStatistics (rstd != nullptr)\n"
        "constexpr bool kWritesSum = false;\n"
        "#define EPINORM_SUM_PARAMETER\n#define EPINORM_SUM static_cast<S*>(nullptr)\n"
    )
    parts.append(_kernel("forward", "FORWARD", "norm/norm_forward.cu", seen, forward))
    parts.append(_kernel("backward", "BACKWARD", "norm/norm_backward.cu", seen, _outputs(recipe)))
    parts.append(_kernel("column_sums", "", "norm/norm_column_sums.cu", seen, _sums(recipe)))
    parts.append((TEMPLATE_FOLDER / "launch.cu.in").read_text(encoding="utf-8"))
    text = "\n\n".join(part.strip("\n") for part in parts) + "\n"
    for name, value in _argument_lists(recipe, constants).items():
        text = text.replace(f"@{name}@", value)
    return speakable(text)


def binding_text(recipe: Recipe, part: str) -> str:
    """The C++ between PyTorch's tensors and the launches; part: common, norm, hopper or
    backward."""
    text = (TEMPLATE_FOLDER / f"binding_{part}.cpp.in").read_text(encoding="utf-8")
    kinds = recipe.chain.operand_kinds
    channel = ", ".join("true" if kind == "channel" else "false" for kind in kinds) or "false"
    text = text.replace("@operands@", str(len(kinds)))
    return speakable(text.replace("@is_channel@", channel))


def _operands(recipe: Recipe, constants: int) -> str:
    names = tuple(f"constant{i}" for i in range(constants))
    count = len(recipe.chain.operand_kinds)
    parameters = "".join(f", const P* operand{i}, i64 stride{i}" for i in range(count))
    parameters += "".join(f", T {name}" for name in names)
    pointers = ", ".join(f"operand{i}" for i in range(count)) or "nullptr"
    strides = ", ".join(f"stride{i}" for i in range(count)) or "0"
    return (
        "constexpr int kChannels = CHANNELS;\n"
        "constexpr bool kHasBias = HAS_BIAS, kHasGamma = HAS_GAMMA, kHasBeta = HAS_BETA;\n"
        "constexpr bool kAddsBias = HAS_BIAS && !BIAS_IN_Z;\n"
        f"#define EPINORM_CHAIN_PARAMETERS {parameters}\n"
        f"#define EPINORM_OPERAND_POINTERS {{{pointers}}}\n"
        f"#define EPINORM_OPERAND_STRIDES {{{strides}}}\n"
        f"#define EPINORM_CONSTANTS {constant_list(names)}\n"
    )


_LARGEST = """#if SPLIT_DZ
#define EPINORM_LARGEST_PARAMETERS \\
  , const float* column_factor, const float* row_factor, unsigned* row_largest, \\
      unsigned* column_largest, unsigned char* row_flag, unsigned char* column_flag
#define EPINORM_LARGEST \\
  {column_factor, row_factor, row_largest, column_largest, row_flag, column_flag}
#else
#define EPINORM_LARGEST_PARAMETERS
#define EPINORM_LARGEST {}
#endif
"""


def _outputs(recipe: Recipe) -> str:
    """Every sum over rows that there is, and the gradients of element operands."""
    kinds = recipe.chain.operand_kinds
    channels = [i for i, kind in enumerate(kinds) if kind == "channel"]
    elements = [i for i, kind in enumerate(kinds) if kind == "element"]
    places = "".join(f"i == {i} ? kParameterSums + {place} : " for place, i in enumerate(channels))
    writes = "".join(f"i == {i} ? true : " for i in elements)
    parameters = "".join(f", P* gradient{i}" for i in elements)
    pointers = ", ".join(f"gradient{i}" if i in elements else "nullptr" for i in range(len(kinds)))
    return (
        "constexpr int kSumGamma = kHasGamma ? 0 : -1;\n"
        "constexpr int kSumBeta = kHasBeta ? int(kHasGamma) : -1;\n"
        "constexpr int kSumBias = kHasBias ? kHasGamma + kHasBeta : -1;\n"
        "constexpr int kParameterSums = kHasGamma + kHasBeta + kHasBias;\n"
        f"constexpr int kSums = kParameterSums + {len(channels)};\n"
        "constexpr bool kWriteDz = true, kSumsGiven = false;\n"
        "constexpr bool kEveryGroup = false, kRaggedRows = true;\n"
        "constexpr bool kRowLargest = SPLIT_DZ, kColumnLargest = SPLIT_DZ;\n"
        f"{_LARGEST}"
        f"EPINORM_FUNCTION constexpr int sum_of_operand(int i) {{ return {places}-1; }}\n"
        f"EPINORM_FUNCTION constexpr bool writes_operand(int i) {{ return {writes}false; }}\n"
        f"#define EPINORM_OUTPUT_PARAMETERS {parameters}\n"
        f"#define EPINORM_OUTPUT_POINTERS {{{pointers or 'nullptr'}}}\n"
    )


def _sums(recipe: Recipe) -> str:
    count = recipe.chain.operand_kinds.count("channel")
    names = ["gamma", "beta", "bias", *(f"channel{i}" for i in range(count))]
    types = ["P", "P", "Z", *["P"] * count]
    parameters = "".join(f", {t}* sum_{n}" for t, n in zip(types, names, strict=True))
    stores = "".join(
        f"    if (row == backward::{place}) sum_{name}[column] = Rounded<{kind}>::from(sum); \\\n"
        for name, kind, place in zip(
            names,
            types,
            [
                "kSumGamma",
                "kSumBeta",
                "kSumBias",
                *(f"kParameterSums + {i}" for i in range(count)),
            ],
            strict=True,
        )
    )
    return (
        f"#define EPINORM_SUM_PARAMETERS {parameters}\n"
        "#define EPINORM_SUM_STORES default: { \\\n"
        "    const int row = blockIdx.y; \\\n"
        f"{stores}"
        "  }\n"
    )


def _argument_lists(recipe: Recipe, constants: Sequence[str]) -> dict[str, str]:
    kinds = recipe.chain.operand_kinds
    elements = [i for i, kind in enumerate(kinds) if kind == "element"]
    channels = [i for i, kind in enumerate(kinds) if kind == "channel"]
    return {
        "operands": "".join(
            f", static_cast<const P*>(operands[{i}]), kind_stride({i}, groups)"
            for i in range(len(kinds))
        ),
        "constants": "".join(f", {constant}" for constant in constants),
        "gradients": "".join(f", static_cast<P*>(elements[{j}])" for j in range(len(elements))),
        "channel_sums": "".join(f", static_cast<P*>(sums[{3 + j}])" for j in range(len(channels))),
        "is_channel": "".join(f"i == {i} || " for i in channels) + "false",
    }
