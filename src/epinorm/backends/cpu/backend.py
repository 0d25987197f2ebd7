"""The fused chain on the CPU: plans bound to the compiled kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cpu import abi, proof
from epinorm.backends.cpu.blocks import choose_blocks
from epinorm.backends.cpu.build import BuildError, load_kernel, load_runner
from epinorm.backends.cpu.codegen import kernel_source
from epinorm.backends.reference import ReferenceExecutable
from epinorm.chain.pointwise import complement
from epinorm.problem import Forward, Gradients, Inputs, Layout, Plan, Problem, Wanted
from epinorm.said import warn_once

_NOTHING = torch.empty(0)


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()


class CpuExecutable(ReferenceExecutable):
    """A problem's two passes by the compiled kernels; where a square overflows, by PyTorch's own
    layers, whose NaNs are their own.

    library: the kernel's, where it is loaded already. Where these cannot be built, warns once and
    raises BuildError.
    """

    def __init__(
        self, problem: Problem, plan: Plan, layout: Layout, library: ctypes.CDLL | None = None
    ) -> None:
        super().__init__(problem, plan, layout)
        chain, source = problem.chain, kernel_source(problem)
        try:
            library = library or load_kernel(source, str(chain), self._prove)
            self.runner = load_runner(problem)
        except BuildError as error:
            warn_once(f"epinorm computes with PyTorch's own layers: {error}")
            raise
        kernel = abi.Kernel()
        library.epinorm_describe(problem.n, problem.groups, ctypes.byref(kernel))
        assert chain.norm is not None  # see `supports`
        eps = chain.norm.eps
        if eps is None:
            eps = torch.finfo(problem.stats_dtype).eps
        self.blocks = choose_blocks(problem, bool(self.runner.epinorm_can_pack()))
        dtypes = problem.dtype, problem.out_dtype, problem.saved_dtype
        self.template = abi.Problem(
            abi.Call(problem.n, problem.groups, eps),
            kernel,
            abi.Blocks(*self.blocks[:-1]),
            *(problem.m, problem.k, *map(abi.DTYPE_CODES.get, dtypes)),
        )
        self.own_numbers, self.complemented = chain.arguments, chain.complemented

    def _prove(self, library: ctypes.CDLL) -> None:
        abi.declare_kernel(library)
        problem = proof.small(self.problem)
        layout = Layout(problem.k, problem.k, (problem.m, problem.n))
        proof.prove_kernel(CpuExecutable(problem, self.plan, layout, library))

    def _call(
        self,
        inputs: Inputs,
        mean: Tensor | None,
        rstd: Tensor | None,
        operand_gradients: tuple[Tensor | None, ...] = (),
    ) -> abi.Problem:
        """The runner's arguments, without results. The tensors must outlive it."""
        x, weight, bias, norm_weight, norm_bias, operands, constants = inputs
        result = abi.Problem.from_buffer_copy(self.template)
        result.x, result.x_stride = x.data_ptr(), x.stride(0)
        result.weight, result.weight_stride = weight.data_ptr(), weight.stride(0)
        result.bias = _pointer(bias)
        call = result.call
        values: Any = constants or self.own_numbers
        if True in self.complemented:
            values = complement(values, self.complemented)
        numbers = (ctypes.c_double * max(len(values), 1))(*values)
        arrays: tuple[Any, ...] = (numbers,)
        call.constants = ctypes.addressof(numbers)
        call.norm_weight, call.norm_bias = _pointer(norm_weight), _pointer(norm_bias)
        if self.problem.training:
            call.mean, call.rstd = _pointer(mean), _pointer(rstd)
        if count := len(operands):
            pointers = ctypes.c_void_p * count
            strides = [
                operand.stride(0) if kind in ("element", "row") else 0
                for operand, kind in zip(operands, self.problem.chain.operand_kinds, strict=True)
            ]
            gradients = operand_gradients or (None,) * count
            addresses = pointers(*(t.data_ptr() for t in operands))
            rows = (ctypes.c_int64 * count)(*strides)
            results = pointers(*(_pointer(t) for t in gradients))
            call.operands = ctypes.addressof(addresses)
            call.operand_strides = ctypes.addressof(rows)
            call.operand_gradients = ctypes.addressof(results)
            arrays += addresses, rows, results
        result.arrays = arrays  # the struct holds addresses only
        return result

    def _run(self, function: Callable[..., int], call: abi.Problem) -> None:
        if function(call):
            raise RuntimeError(self.runner.epinorm_message().decode(errors="replace"))

    def compute(self, inputs: Inputs) -> Forward:
        """Raises RuntimeError with PyTorch's message where its product fails."""
        problem = self.problem
        m, n, x = problem.m, problem.n, inputs.x
        y = x.new_empty((m, n), dtype=problem.out_dtype)
        z = mean = rstd = total = None
        if problem.chain.returns_sum:
            total = x.new_empty((m, n), dtype=problem.sum_dtype)
        if problem.keeps_z:
            z = x.new_empty((m, n))
        if problem.training:
            rstd = x.new_empty((m, problem.groups), dtype=problem.stats_dtype)
            if problem.keeps_mean:
                mean = torch.empty_like(rstd)
        call = self._call(inputs, mean, rstd)
        call.y, call.y_stride, call.z = y.data_ptr(), n, _pointer(z)
        call.call.sum = _pointer(total)
        self._run(self.runner.epinorm_forward, call)
        if call.call.overflow:
            return super().compute(inputs)
        if rstd is None:
            return Forward(y, _NOTHING, _NOTHING, _NOTHING, total)
        z, mean = (x.new_empty(0) if t is None else t for t in (z, mean))
        return Forward(y, z, mean, rstd, total)

    def differentiate(
        self, inputs: Inputs, kept: Forward, dy: Tensor, want: Wanted, dsum: Tensor | None
    ) -> Gradients:
        problem, blocks = self.problem, self.blocks
        m, k, n, x = problem.m, problem.k, problem.n, inputs.x
        kinds = problem.chain.operand_kinds
        if dy.stride(1) != 1 and n > 1:
            dy = dy.contiguous()
        if dsum is not None and dsum.stride(1) != 1 and n > 1:
            dsum = dsum.contiguous()

        by_parts = want.weight and blocks.weight_parts
        dx = x.new_empty((m, k)) if want.x else None
        dweight = x.new_empty((n, k)) if want.weight else None
        weight_parts = x.new_empty((blocks.chunks, n, k)) if by_parts else None
        whole_dz = (blocks.dx_rows and want.x) or (want.weight and not by_parts)
        dz = x.new_empty((m, n)) if whole_dz else None
        elements = tuple(
            x.new_empty((m, n), dtype=problem.norm_dtype) if kind == "element" and wanted else None
            for kind, wanted in zip(kinds, want.operands, strict=True)
        )
        mean = kept.mean if kept.mean.numel() else None
        call = self._call(inputs, mean, kept.rstd, elements)
        call.z, call.y, call.y_stride = kept.z.data_ptr(), dy.data_ptr(), dy.stride(0)
        call.call.dsum = _pointer(dsum)
        call.call.dsum_stride = 0 if dsum is None else dsum.stride(0)
        call.dz, call.dx, call.dweight = _pointer(dz), _pointer(dx), _pointer(dweight)
        call.dweight_parts = _pointer(weight_parts)
        # In the kernel's order: bias, norm_weight, norm_bias, then the operands that are channels.
        wanted = [want.norm_weight, want.norm_bias]
        wanted += [w for kind, w in zip(kinds, want.operands, strict=True) if kind == "channel"]
        sums = [x.new_empty(n) if want.bias else None]
        sums += [x.new_empty(n, dtype=problem.norm_dtype) if w else None for w in wanted]
        addresses = (ctypes.c_void_p * len(sums))(*(_pointer(t) for t in sums))
        call.norm_dtype = abi.DTYPE_CODES[problem.norm_dtype]
        call.column_sums = ctypes.addressof(addresses)
        self._run(self.runner.epinorm_backward, call)
        if call.call.overflow:
            return super().differentiate(inputs, kept, dy, want, dsum)
        channels = iter(sums[3:])
        operands = tuple(
            next(channels) if kind == "channel" else element
            for kind, element in zip(kinds, elements, strict=True)
        )
        return Gradients(dx, dweight, sums[0], sums[1], sums[2], operands)
