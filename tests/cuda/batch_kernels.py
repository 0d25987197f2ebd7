"""What BatchNorm's kernels compute, for the GPU of the imagination (conftest.py)."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.norm import batch_backward, batch_forward
from epinorm.backends.cuda.norm.text import chain_signature
from epinorm.chain.reference import apply_pointwise

STAND_INS = {
    batch_forward: ("batch_statistics", "batch_join", "batch_forward"),
    batch_backward: ("batch_backward", "batch_sums"),
}
"""By host module: the kinds of what its functions of sources make."""
SOURCES = {
    "batch_statistics": "statistics_source",
    "batch_join": "join_source",
    "batch_forward": "forward_source",
    "batch_backward": "backward_source",
    "batch_sums": "sums_source",
}


def matrix_at(address: int, rows: int, columns: int, stride: int, dtype: torch.dtype) -> Tensor:
    """The (rows, columns) of memory that begin at an address, ``stride`` values apart."""
    values = (rows - 1) * stride + columns
    memory = (ctypes.c_char * (values * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).as_strided((rows, columns), (stride, 1))


class BatchKernels:
    """Launches with the arguments that they were given, by PyTorch.

    sums: by the address of the scratch, what the next kernel is to join."""

    sums: dict[int, list[Tensor]]

    def _given(self, problem: Any, more: tuple[Any, ...]) -> tuple[Any, list[Tensor], list[int]]:
        """The chain with its numbers, its operands in fp64, and the arguments behind them."""
        kinds = problem.chain.operand_kinds
        addresses, numbers = more[: 2 * len(kinds)], more[2 * len(kinds) :]
        count = len(problem.chain.arguments)
        operands = [
            matrix_at(at, 1, problem.n, problem.n, problem.norm_dtype)[0].double()
            if kind == "channel"
            else matrix_at(at, problem.m, problem.n, stride, problem.norm_dtype).double()
            for at, stride, kind in zip(addresses[::2], addresses[1::2], kinds, strict=True)
        ]
        return problem.chain.filled(numbers[:count]), operands, list(numbers[count:])

    def _vector(self, problem: Any, address: int, dtype: torch.dtype) -> Tensor | None:
        return matrix_at(address, 1, problem.n, problem.n, dtype)[0].double() if address else None

    def _z(self, problem: Any, z: int, stride: int, bias: int) -> Tensor:
        value = matrix_at(z, problem.m, problem.n, stride, problem.dtype).double()
        added = None if problem.bias_in_z else self._vector(problem, bias, problem.dtype)
        return value if added is None else value + added

    def _columns(self, problem: Any, *addresses: int) -> list[Tensor]:
        shape = 1, problem.n, problem.n, problem.stats_dtype
        return [matrix_at(at, *shape)[0].double() for at in addresses]

    def signature_of_batch_statistics(self, source: Any) -> str:
        entering = batch_forward._entering(source[0])
        return batch_forward.STATISTICS_SIGNATURE + chain_signature(entering)

    def compute_batch_statistics(self, source: Any, *arguments: Any) -> None:
        problem = batch_forward._entering(source[0])
        z, stride, bias, partial, rows, groups, *more = arguments
        assert (rows, groups) == (problem.m, problem.groups)
        chain, operands, rest = self._given(problem, tuple(more))
        assert not rest
        entering = apply_pointwise(self._z(problem, z, stride, bias), chain.pre, iter(operands))
        self.sums[partial] = [entering]

    def signature_of_batch_join(self, _source: Any) -> str:
        return batch_forward.JOIN_SIGNATURE

    def compute_batch_join(self, source: Any, partial: int, *arguments: Any) -> None:
        problem, of_product = source[0], len(source) > 3 and source[3]
        parts, z, stride, bias, rows, columns, mean, rstd, statistics = arguments
        assert parts == -(-rows // 64) if of_product else parts >= 1
        assert (rows, columns) == (problem.m, problem.n)
        (entering,) = [self._z(problem, z, stride, bias)] if of_product else self.sums.pop(partial)
        biased, means = torch.var_mean(entering, 0, correction=0)
        for at, values in (
            (mean, means),
            (rstd, (biased + problem.chain.norm.eps).rsqrt()),
            (statistics, means),
            (statistics + problem.n * problem.stats_dtype.itemsize, entering.var(0)),
        ):
            matrix_at(at, 1, columns, columns, problem.stats_dtype)[0].copy_(values)

    def signature_of_batch_forward(self, source: Any) -> str:
        return batch_forward.SIGNATURE + chain_signature(source[0])

    def compute_batch_forward(self, source: Any, *arguments: Any) -> None:
        problem = source[0]
        z, stride, bias, gamma, beta, y, mean, rstd, _, _, *more = arguments
        chain, operands, rest = self._given(problem, tuple(more))
        assert not rest
        given = iter(operands)
        entering = apply_pointwise(self._z(problem, z, stride, bias), chain.pre, given)
        means, scales = self._columns(problem, mean, rstd)
        value = self._affine(problem, (entering - means) * scales, gamma, beta)
        value = apply_pointwise(value, chain.post, given)
        matrix_at(y, problem.m, problem.n, problem.n, problem.out_dtype).copy_(value)

    def _affine(self, problem: Any, value: Tensor, gamma: int, beta: int) -> Tensor:
        weight, bias = (self._vector(problem, at, problem.norm_dtype) for at in (gamma, beta))
        value = value if weight is None else value * weight
        return value if bias is None else value + bias

    def signature_of_batch_backward(self, source: Any) -> str:
        problem, _, outputs, _ = source
        elements = "p" * sum(outputs.elements)
        return batch_backward.SIGNATURE + chain_signature(problem) + elements

    def compute_batch_backward(self, source: Any, *arguments: Any) -> None:
        problem, _, outputs, _ = source
        dy, dy_stride, z, stride, mean, rstd, given_sums, *more = arguments
        bias, gamma, beta, dz, partial, m, _, *more = more
        n = problem.n
        chain, operands, elements = self._given(problem, tuple(more))
        means, scales = self._columns(problem, mean, rstd)
        value = self._z(problem, z, stride, bias)
        gradient = matrix_at(dy, m, n, dy_stride, problem.out_dtype).double()
        before = sum(op.operand is not None for op in chain.pre)

        def differentiate() -> None:
            leaves = [t.requires_grad_() for t in (value, *operands)]
            with torch.enable_grad():
                entering = apply_pointwise(value, chain.pre, iter(operands[:before]))
                h = ((entering - means) * scales).detach().requires_grad_()
                normed = self._affine(problem, h, gamma, beta)
                y = apply_pointwise(normed, chain.post, iter(operands[before:]))
                du, *of_post = torch.autograd.grad(y, [normed, *leaves[1 + before :]], gradient)
                if outputs.gamma:
                    assert (dz, given_sums) == (0, 0)
                    self.sums[partial] = [(du * h).sum(0).detach(), du.sum(0)]
                    return
                sums = self._columns(
                    problem, given_sums, given_sums + n * problem.stats_dtype.itemsize
                )
                weight = self._vector(problem, gamma, problem.norm_dtype)
                dv = scales * (du - sums[0] / m - h.detach() * sums[1] / m)
                dv = dv if weight is None else dv * weight
                own, *of_pre = torch.autograd.grad(entering, leaves[: 1 + before], dv)
            if dz:
                matrix_at(dz, m, n, n, problem.dtype).copy_(own)
            of_operands = [*of_pre, *of_post]
            by_name = [None, None, own.sum(0), *of_operands]
            taken = (g for g, wanted in zip(by_name, outputs.sums, strict=True) if wanted)
            self.sums[partial] = [
                (each if each.dim() == 1 else each.sum(0)).to(dtype)  # type: ignore[union-attr]
                for each, dtype in zip(taken, outputs.sum_dtypes(problem), strict=True)
            ]
            wanted = (g for g, asked in zip(of_operands, outputs.elements, strict=True) if asked)
            for at, each in zip(elements, wanted, strict=True):
                matrix_at(at, m, n, n, problem.norm_dtype).copy_(each)

        with ThreadPoolExecutor(1) as fresh:  # this thread may be below autograd
            fresh.submit(differentiate).result()

    def signature_of_batch_sums(self, source: Any) -> str:
        _, gamma, beta, _ = source
        return "ppilp" + "p" * (gamma + beta)

    def compute_batch_sums(self, source: Any, at: int, *arguments: Any) -> None:
        problem, gamma, beta, _ = source
        largest, parts, n, kept, *into = arguments
        assert (largest, n) == (0, problem.n)
        assert parts >= 1
        of_gamma, of_beta = self.sums.pop(at)
        both = matrix_at(kept, 2, n, n, problem.stats_dtype)
        both[0].copy_(of_beta)
        both[1].copy_(of_gamma)
        wanted = [of_gamma] * gamma + [of_beta] * beta
        for address, values in zip(into, wanted, strict=True):
            matrix_at(address, 1, n, n, problem.norm_dtype)[0].copy_(values)
