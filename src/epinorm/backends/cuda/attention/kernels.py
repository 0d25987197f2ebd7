# mypy: ignore-errors
"""Attention's forward pass, a block of queries a program, in Triton.

The tensor cores cut fp32 operands off after TF32's ten bits, which shrinks every product; PyTorch's
products round them, and so does this kernel, in registers. Scores are in units of log2: ``scale``
holds log2(e). Tensors are (B, H, rows, D), rows D numbers in a line, and otherwise of any strides.
"""

import triton
import triton.language as tl


@triton.jit
def _rounded(x):
    """x to the nearest number of TF32 (PTX ISA, cvt.rna.tf32.f32)."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = tl.inline_asm_elementwise(
        "cvt.rna.tf32.f32 $0, $1;", "=r,r", [bits], dtype=tl.int32, is_pure=True, pack=1
    )
    return nearest.to(tl.float32, bitcast=True)


@triton.jit
def _product(a, b, total):
    """total + a b."""
    return tl.dot(a, b, total, input_precision="tf32")


@triton.jit
def _load_rows(start, rows, count, stride, columns, whole: tl.constexpr):
    at = start + rows[:, None] * stride + columns[None, :]
    if whole:
        x = tl.load(at)
    else:
        x = tl.load(at, mask=rows[:, None] < count, other=0.0)
    return _rounded(x)


@triton.jit
def _store_rows(start, x, rows, count, stride, columns):
    at = start + rows[:, None] * stride + columns[None, :]
    tl.store(at, x, mask=rows[:, None] < count)


@triton.jit
def _place(block_rows: tl.constexpr, rows, heads):
    """The sample, the head, both as one number, and the first row of this program."""
    blocks = tl.cdiv(rows, block_rows)
    both = tl.program_id(0) // blocks
    first = tl.program_id(0) % blocks * block_rows
    return (both // heads).to(tl.int64), (both % heads).to(tl.int64), both.to(tl.int64), first


@triton.jit
def attention_forward(
    q_start, k_start, v_start, o_start, lse_start,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_m,
    heads, queries, keys, scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr,
):  # fmt: skip
    """A block of queries: o = softmax(q kᵀ) v, and the log2 of each query's sum of powers.

    o is divided by the sum of the rounded powers, so that what all of v have in common comes out
    as it is.
    """
    b, h, both, first = _place(BLOCK_M, queries, heads)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q = _load_rows(q_start + b * q_b + h * q_h, m, queries, q_m, d, WHOLE_M)
    k_start += b * k_b + h * k_h
    v_start += b * v_b + h * v_h
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    weight = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, keys, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        k = _load_rows(k_start, n, keys, k_n, d, WHOLE_N)
        scores = _product(q, tl.trans(k), zeros) * scale
        if not WHOLE_N:
            scores = tl.where(n[None, :] < keys, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(grown == float("-inf"), 0.0, grown)  # where all of them are infinite
        p = tl.math.exp2(scores - finite[:, None])
        shrink = tl.math.exp2(largest - finite)
        total = total * shrink + tl.sum(p, 1)
        p = _rounded(p)
        weight = weight * shrink + tl.sum(p, 1)
        v = _load_rows(v_start, n, keys, v_n, d, WHOLE_N)
        mixed = _product(p, v, mixed * shrink[:, None])
        largest = grown
    _store_rows(o_start + b * o_b + h * o_h, mixed / weight[:, None], m, queries, o_m, d)
    tl.store(lse_start + both * queries + m, largest + tl.math.log2(total), mask=m < queries)
