"""Tensor parallelism: styles for ``torch.distributed.tensor.parallel.parallelize_module``.

    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})

Each is for one block: an ``epinorm.LinearNorm``, or a module with an nn.Linear and the norm behind
it, which ``epinorm.fuse`` makes one operation. Between blocks rows are sharded (sequence
parallelism), within a pair channels are.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.experimental import register_sharding
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement
from torch.torch_version import TorchVersion

__all__ = ["ColwiseParallel", "RowwiseParallel"]


def _group_norm_sharding(x: Any, weight: Any, bias: Any, *sizes: int) -> Any:
    """What PyTorch computes of GroupNorm on DTensors: on copies."""
    vectors = [None if t is None else Replicate() for t in (weight, bias)]
    return [([Replicate()] * 3, [Replicate(), *vectors, *[None] * len(sizes)])]


if TorchVersion(torch.__version__) < "2.13":  # which knows none before: no model could be captured
    register_sharding(torch.ops.aten.native_group_norm.default)(_group_norm_sharding)


class _BlockStyle(ParallelStyle):
    """A block whose Linears and other parameters are placed as a style says, with DTensors in and
    out; plain tensors that come in are this process' parts."""

    weight: Placement
    vectors: Placement
    inputs: Placement
    outputs: Placement

    def __init__(
        self,
        *,
        input_layouts: Placement | None = None,
        output_layouts: Placement | None = None,
        use_local_output: bool = False,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or self.inputs,)
        self.output_layouts = (output_layouts or self.outputs,)
        self.use_local_output = use_local_output

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        hooks = partial(self._enter), partial(self._leave)
        return distribute_module(module, device_mesh, self._place, *hooks)

    def _place(self, name: str, module: nn.Module, mesh: DeviceMesh) -> None:
        for key, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                continue
            placement = self.weight if parameter.dim() == 2 else self.vectors
            placement = placement if parameter.dim() else Replicate()
            if placement.is_shard() and parameter.shape[placement.dim] % mesh.size():  # type: ignore[attr-defined]
                raise ValueError(
                    f"{name}.{key} of shape {list(parameter.shape)} cannot be split evenly over "
                    f"{mesh.size()} processes"
                )
            placed = distribute_tensor(parameter.data, mesh, [placement])
            module.register_parameter(key, nn.Parameter(placed, parameter.requires_grad))

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...], mesh: DeviceMesh) -> Any:
        layouts = (self.input_layouts, *(self.output_layouts,) * (len(inputs) - 1))
        return tuple(
            DTensor.from_local(t, mesh, layout, run_check=False)
            if isinstance(t, Tensor) and not isinstance(t, DTensor)
            else t
            for t, layout in zip(inputs, layouts, strict=False)  # x may come by its name
        )

    def _leave(self, module: nn.Module, outputs: Any, mesh: DeviceMesh) -> Any:
        if isinstance(outputs, tuple):
            return tuple(self._leave(module, output, mesh) for output in outputs)
        if outputs.placements != self.output_layouts:
            outputs = outputs.redistribute(placements=self.output_layouts)
        return outputs.to_local() if self.use_local_output else outputs


class ColwiseParallel(_BlockStyle):
    """The block's weight, bias and norm split along the output's channels: the first of a pair.

    x (..., K) comes as ``input_layouts``, rows by default, and is gathered; y (..., N) has its
    channels sharded. GroupNorm's groups split with them, and nothing is exchanged for it; LayerNorm
    and RMSNorm exchange two numbers a row. Raises ValueError where channels do not split evenly.
    """

    weight, vectors = Shard(0), Shard(0)
    inputs, outputs = Shard(0), Shard(1)


class RowwiseParallel(_BlockStyle):
    """The block's weight split along the input's channels, the rest copied: the second of a pair.

    x (..., K) comes with its channels sharded; partial products are summed and scattered, and
    bias, residual, norm and what follows are computed on each process' rows. y (..., N) comes out
    as ``output_layouts``, rows by default. Residuals come as y comes out. Raises ValueError where
    channels do not split evenly.
    """

    weight, vectors = Shard(1), Replicate()
    inputs, outputs = Shard(1), Shard(0)
