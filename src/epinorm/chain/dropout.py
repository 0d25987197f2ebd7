"""Which values dropout keeps: a function of a seed and a value's place, in PyTorch and in C++.

Every kernel of every strategy, forward and backward, so finds the same values, and no mask is
stored. A seed is an int64 from PyTorch's own generator: its lower 32 bits are a key, its upper ones
are added to the row. Row and pair of columns are the counter of Philox-2x32-10 (Salmon et al.,
"Parallel random numbers: as easy as 1, 2, 3", SC 2011), whose two words belong to the two columns.
"""

from __future__ import annotations

import ctypes
import math

import torch
from torch import Tensor

_WORD = 2**32
_MULTIPLIER, _WEYL, _ROUNDS = 0xD256D193, 0x9E3779B9, 10

CPP_FUNCTIONS = f"""\
// A seed, as memory has it.
struct alignas(8) Seed {{
  unsigned key, first_row;
}};

// Random numbers of a row, for an even column and the one behind it.
struct RandomPair {{
  unsigned even, odd;
}};
EPINORM_FUNCTION RandomPair random_words(Seed seed, long long row, long long pair) {{
  unsigned a = seed.first_row + unsigned(row), b = unsigned(pair), key = seed.key;
  for (int round = 0; round < {_ROUNDS}; ++round) {{
    const unsigned long long product = {_MULTIPLIER:#x}ull * a;
    a = unsigned(product >> 32) ^ key ^ b;
    b = unsigned(product);
    key += {_WEYL:#x}u;
  }}
  return {{a, b}};
}}

// Kept are the words up to this one, with the probability `keep`, as fp32 has it: the same in all
// types. Where it is 0 the scale is, too.
EPINORM_FUNCTION unsigned last_kept(float keep) {{
  return unsigned((unsigned long long)(keep * {_WORD}.0f) - 1);
}}
template <typename T>
EPINORM_FUNCTION T scale_of_kept(T keep) {{
  return keep > T(0) ? T(1) / keep : T(0);
}}
"""


def check_probability(p: float) -> None:
    """Raise PyTorch's error for what is no probability."""
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"dropout probability has to be between 0 and 1, but got {p:g}")


def draw_seeds(count: int, device: torch.device) -> tuple[Tensor, ...]:
    """So many seeds, int64 of shape (1,), from PyTorch's default generator for the device.

    A CUDA graph draws anew at each replay, checkpointing replays it. In a graph that is compiled it
    is an operator of its own, as PyTorch may compute others again for the backward pass.
    """
    is_traced = torch.compiler.is_compiling() or (
        torch._C._len_torch_dispatch_stack()
        and torch._C._functorch.peek_interpreter_stack() is None
    )
    seeds = (draw_operator if is_traced else _draw)(count, device=device)
    return (seeds,) if count == 1 else seeds.split(1)


def _draw(count: int, *, device: torch.device) -> Tensor:
    return torch.randint(0, 2**63 - 1, (count,), dtype=torch.int64, device=device)


_library = torch.library.Library("epinorm", "FRAGMENT")
_library.define(
    "draw_seeds(SymInt count, *, Device device) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag),
)
_library.impl("draw_seeds", _draw, "CompositeExplicitAutograd")
draw_operator = torch.ops.epinorm.draw_seeds.default


@torch.library.register_fake("epinorm::draw_seeds", lib=_library)
def _fake(count: int, *, device: torch.device) -> Tensor:
    return torch.empty(count, dtype=torch.int64, device=device)


def drop(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x (..., N) with each value zeroed with probability p, else divided by 1 - p.

    seed: int64 (1,). 16 bits are computed in fp32 and rounded once.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    keep, single = 1.0 - p, ctypes.c_float(1.0 - p).value
    if wide == torch.float32:
        keep = single
    words = _words(seed, math.prod(x.shape[:-1]), x.shape[-1])
    scale = torch.full((), 1.0 / keep if keep else 0.0, dtype=wide, device=x.device)
    kept = torch.where(words < int(single * _WORD), scale, scale.new_zeros(()))
    return (x.to(wide) * kept.view(x.shape)).to(x.dtype)


def _words(seed: Tensor, rows: int, columns: int) -> Tensor:
    """The random word of each value, int64 (rows, columns)."""
    low = _WORD - 1
    row = torch.arange(rows, device=seed.device).unsqueeze(1)
    a = (row + (seed >> 32)) & low
    b = torch.arange((columns + 1) // 2, device=seed.device)
    key = seed & low
    for _ in range(_ROUNDS):
        product = a * _MULTIPLIER  # modulo 2^64, as int64 wraps
        a, b = (product >> 32 & low) ^ key ^ b, product & low
        key = (key + _WEYL) & low
    return torch.stack((a, b.expand_as(a)), -1).flatten(-2)[..., :columns]
