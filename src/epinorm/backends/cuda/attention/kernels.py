# mypy: ignore-errors
"""Attention, forward and backward, a block of queries or of keys a program, in Triton.

The tensor cores cut fp32 operands off after TF32's ten bits, which shrinks every product; PyTorch's
products round them, and so do these kernels, in registers. Scores are in units of log2: ``scale``
holds log2(e). Tensors are (B, H, rows, D), rows D numbers in a line, and otherwise of any strides.

What all keys of a head have in common changes no result: a part of k adds the same to all scores of
a query, and one of v comes out as it is. Where tokens are nearly alike it would be most of every
sum, and the roundings with it; so about that much, ``_centre``, is taken off both.
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
        return tl.load(at)
    return tl.load(at, mask=rows[:, None] < count, other=0.0)


@triton.jit
def _centre(start, count, stride, columns):
    """About what all rows have in common (1, D): of eight means of four rows from everywhere that
    nearest to 0 if all have its sign, else 0, so that a few large rows do not move it."""
    eight = tl.arange(0, 8)
    means = tl.zeros([8, columns.shape[0]], tl.float32)
    for turn in tl.static_range(4):
        rows = (2 * (turn * 8 + eight) + 1) * count // 64
        means += tl.load(start + rows[:, None] * stride + columns[None, :]) / 4
    centre = tl.maximum(tl.min(means, 0), 0.0) + tl.minimum(tl.max(means, 0), 0.0)
    return tl.where(tl.abs(centre) < float("inf"), centre, 0.0)[None, :]


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
    """A block of queries: o = softmax(q kᵀ) v, and the log2 of each query's sum of powers, rounded
    as they are multiplied."""
    b, h, both, first = _place(BLOCK_M, queries, heads)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q = _rounded(_load_rows(q_start + b * q_b + h * q_h, m, queries, q_m, d, WHOLE_M))
    k_start += b * k_b + h * k_h
    v_start += b * v_b + h * v_h
    k_centre, v_centre = _centre(k_start, keys, k_n, d), _centre(v_start, keys, v_n, d)
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, D], tl.float32)
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, keys, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        k = _rounded(_load_rows(k_start, n, keys, k_n, d, WHOLE_N) - k_centre)
        scores = _product(q, tl.trans(k), zeros) * scale
        if not WHOLE_N:
            scores = tl.where(n[None, :] < keys, scores, float("-inf"))
        grown = tl.maximum(largest, tl.max(scores, 1))
        finite = tl.where(grown == float("-inf"), 0.0, grown)  # where all of them are infinite
        p = _rounded(tl.math.exp2(scores - finite[:, None]))
        shrink = tl.math.exp2(largest - finite)
        total = total * shrink + tl.sum(p, 1)
        v = _rounded(_load_rows(v_start, n, keys, v_n, d, WHOLE_N) - v_centre)
        mixed = _product(p, v, mixed * shrink[:, None])
        largest = grown
    o = mixed / total[:, None] + v_centre
    _store_rows(o_start + b * o_b + h * o_h, o, m, queries, o_m, d)
    tl.store(lse_start + both * queries + m, largest + tl.math.log2(total), mask=m < queries)


@triton.jit
def attention_backward_queries(
    q_start, k_start, v_start, g_start, o_start, dq_start, lse_start, delta_start,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_m,
    o_b, o_h, o_m, dq_b, dq_h, dq_m,
    heads, queries, keys, scale, score_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr,
):  # fmt: skip
    """A block of queries: dq, and delta, the mean of g v over the keys, weighted by p, as g o."""
    b, h, both, first = _place(BLOCK_M, queries, heads)
    m = first + tl.arange(0, BLOCK_M)
    d = tl.arange(0, D)
    q = _rounded(_load_rows(q_start + b * q_b + h * q_h, m, queries, q_m, d, WHOLE_M))
    g = _rounded(_load_rows(g_start + b * g_b + h * g_h, m, queries, g_m, d, WHOLE_M))
    lse = tl.load(lse_start + both * queries + m, mask=m < queries, other=float("inf"))
    o = _load_rows(o_start + b * o_b + h * o_h, m, queries, o_m, d, WHOLE_M)
    k_start += b * k_b + h * k_h
    v_start += b * v_b + h * v_h
    k_centre, v_centre = _centre(k_start, keys, k_n, d), _centre(v_start, keys, v_n, d)
    delta = tl.sum(g * (o - v_centre), 1)
    tl.store(delta_start + both * queries + m, delta, mask=m < queries)
    dq = tl.zeros([BLOCK_M, D], tl.float32)
    zeros = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, keys, BLOCK_N):
        n = begin + tl.arange(0, BLOCK_N)
        k = _rounded(_load_rows(k_start, n, keys, k_n, d, WHOLE_N) - k_centre)
        v = _rounded(_load_rows(v_start, n, keys, v_n, d, WHOLE_N) - v_centre)
        p = tl.math.exp2(_product(q, tl.trans(k), zeros) * scale - lse[:, None])
        if not WHOLE_N:
            p = tl.where(n[None, :] < keys, p, 0.0)
        ds = p * (_product(g, tl.trans(v), zeros) - delta[:, None])
        dq = _product(_rounded(ds), k, dq)
    _store_rows(dq_start + b * dq_b + h * dq_h, dq * score_scale, m, queries, dq_m, d)


@triton.jit
def attention_backward_keys(
    q_start, k_start, v_start, g_start, dk_start, dv_start, lse_start, delta_start,
    q_b, q_h, q_m, k_b, k_h, k_n, v_b, v_h, v_n, g_b, g_h, g_m,
    dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    heads, queries, keys, scale, score_scale,
    D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    WHOLE_M: tl.constexpr, WHOLE_N: tl.constexpr,
):  # fmt: skip
    """A block of keys: dk and dv, from the delta that the queries' kernel wrote."""
    b, h, both, first = _place(BLOCK_N, keys, heads)
    n = first + tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    k_start += b * k_b + h * k_h
    v_start += b * v_b + h * v_h
    k_centre, v_centre = _centre(k_start, keys, k_n, d), _centre(v_start, keys, v_n, d)
    k = _rounded(_load_rows(k_start, n, keys, k_n, d, WHOLE_N) - k_centre)
    v = _rounded(_load_rows(v_start, n, keys, v_n, d, WHOLE_N) - v_centre)
    q_start += b * q_b + h * q_h
    g_start += b * g_b + h * g_h
    dk = tl.zeros([BLOCK_N, D], tl.float32)
    dv = tl.zeros([BLOCK_N, D], tl.float32)
    zeros = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for begin in range(0, queries, BLOCK_M):
        m = begin + tl.arange(0, BLOCK_M)
        q = _rounded(_load_rows(q_start, m, queries, q_m, d, WHOLE_M))
        g = _rounded(_load_rows(g_start, m, queries, g_m, d, WHOLE_M))
        lse = tl.load(lse_start + both * queries + m, mask=m < queries, other=float("inf"))
        delta = tl.load(delta_start + both * queries + m, mask=m < queries, other=0.0)
        scores = _product(k, tl.trans(q), zeros) * scale
        p = tl.math.exp2(scores - lse[None, :])
        if not WHOLE_M:  # an Inf in the key makes NaN of the zeros there
            p = tl.where(m[None, :] < queries, p, 0.0)
        dv = _product(_rounded(p), g, dv)
        ds = p * (_product(v, tl.trans(g), zeros) - delta[None, :])
        if not WHOLE_M:
            ds = tl.where(m[None, :] < queries, ds, 0.0)
        dk = _product(_rounded(ds), q, dk)
    _store_rows(dk_start + b * dk_b + h * dk_h, dk * score_scale, n, keys, dk_n, d)
    _store_rows(dv_start + b * dv_b + h * dv_h, dv, n, keys, dv_n, d)
