"""The loop in which a solution and eager are timed: the same code in both processes.

Every run has inputs, gradients to start from and a checksum of its own, which nobody can know
before the run before it has ended: they come from a state of 64 bits, and the next state from the
checksums of all that the run returned. A checksum is a random projection that costs as much to have
without the result as the result itself. The judge computes them again with the original model; so a
run that was not made, or made less exactly, shows, whichever it was.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

FLUSH_BYTES = 256 * 1024 * 1024
SPREAD = 1024.0
"""How often a number wraps around between the smallest and the largest key. Inputs and masks have
two keys each: too many for results to be had ahead, also if checksums are chosen within what is
allowed for them."""
KEY_BITS = 24
MIX = 0x9E3779B97F4A7C15 - 2**64
"""An odd number near 2^64 over the golden ratio, which spreads what it multiplies (Knuth)."""
ORDERS = (-0x61C8864680B583EB, -0x3D4D51C2D82B14B1, 0x7FB5D329728EA185, 0x2545F4914F6CDD1D)
"""Odd numbers, one for each key that a state gives."""

_clock = time.perf_counter_ns
_synchronize = torch.cuda.synchronize
_Event = torch.cuda.Event


@dataclass(frozen=True)
class Recipe:
    """What both sides must agree on. ``shapes`` of the outputs; ``trained``: names of parameters;
    ``longest``: elements of the largest part (outputs, gradients of inputs and of parameters)."""

    seed: int
    training: bool
    shapes: list[list[int]]
    trained: list[str]
    longest: int


def next_state(state: Tensor, sums: Tensor) -> Tensor:
    """The state after a run (int64, no dimension), from its checksums (float32 or float64)."""
    bits = sums.view(torch.int64 if sums.dtype == torch.float64 else torch.int32)
    order = torch.arange(1, 2 * bits.numel(), 2, device=bits.device)
    mixed = (state ^ (bits * order).sum() * MIX) * MIX
    return mixed ^ (mixed >> 29)


class Loop:
    """Timed runs of one model on one device."""

    def __init__(self, model: nn.Module, inputs: Sequence[Any], recipe: Recipe) -> None:
        self.model, self.recipe, self.given, self.clock = model, recipe, inputs, _clock
        tensors = {i: v for i, v in enumerate(inputs) if isinstance(v, Tensor)}
        floating = {i: v for i, v in tensors.items() if v.is_floating_point()}
        first = next(iter(floating.values()))
        self.device, self._dtype = first.device, first.dtype
        exact = torch.float64 if self._dtype == torch.float64 else torch.float32
        generator = torch.Generator(self.device).manual_seed(recipe.seed)

        def draw(of: Callable[..., Tensor], size: Sequence[int], dtype: torch.dtype) -> Tensor:
            return of(size, generator=generator, device=self.device, dtype=dtype)

        self._bank = {
            index: tuple(draw(torch.rand, v.shape, torch.float32) for _ in range(2))
            for index, v in floating.items()
        }
        self._masks = [draw(torch.randn, [recipe.longest], exact) for _ in range(2)]
        self._orders = torch.tensor(ORDERS, device=self.device)
        self.dys: list[Tensor] = []
        self._flush: Tensor | None = None

    def begin(self, state: Tensor) -> tuple[list[Any], Tensor]:
        """For a state: the inputs, uniform in [0, 1), and the mask of its checksums, uniform in
        (-1, 1), of which ``dys`` is a part."""
        numbers = (state * self._orders >> 64 - KEY_BITS) & (2**KEY_BITS - 1)
        keys = numbers * (SPREAD / 2**KEY_BITS) + 1.0
        made = list(self.given)
        for index, (base, other) in self._bank.items():
            drawn = torch.addcmul(base * keys[0], other, keys[1]).frac_()
            made[index] = drawn.to(made[index].dtype).requires_grad_(self.recipe.training)
        mask = torch.addcmul(self._masks[0] * keys[2], self._masks[1], keys[3]).frac_()
        if self.recipe.training:
            self.dys = [mask[: math.prod(s)].view(s).to(self._dtype) for s in self.recipe.shapes]
            for parameter in self.model.parameters():
                parameter.grad = None
        return made, mask

    def step(self, inputs: Sequence[Any]) -> list[Tensor]:
        """The timed region: forward, and backward where trained; the outputs."""
        if not self.recipe.training:
            with torch.no_grad():
                return _outputs(self.model(*inputs))
        outputs = _outputs(self.model(*inputs))
        torch.autograd.backward(outputs, self.dys)
        return outputs

    def parts(self, outputs: Sequence[Tensor], inputs: Sequence[Any]) -> list[Tensor | None]:
        """What a run returned: outputs, then gradients of inputs and of parameters."""
        if not self.recipe.training:
            return list(outputs)
        parameters = [self.model.get_parameter(name) for name in self.recipe.trained]
        return [*outputs, *(inputs[i].grad for i in self._bank), *(p.grad for p in parameters)]

    def checksums(self, parts: Sequence[Tensor | None], mask: Tensor) -> Tensor:
        """A random projection of each part, of the size of its RMS; zero for a missing gradient."""
        return torch.stack([self._project(part, mask) for part in parts])

    def _project(self, part: Tensor | None, mask: Tensor) -> Tensor:
        if part is None or not part.numel():
            return mask.new_zeros(())
        flat = part.detach().reshape(-1).to(mask.dtype)
        return (flat * mask[: flat.numel()]).sum() * math.sqrt(3 / flat.numel())

    def run(self, state: int, runs: int, cold: bool) -> tuple[list[float], list[list[float]]]:
        """Microseconds and checksums of each run. ``cold``: with the GPU's L2 cache flushed."""
        marks, sums = self.launch(state, runs, cold)
        values = torch.stack(sums).tolist()
        if self.device.type == "cuda":
            _synchronize(self.device)
        return self.microseconds(marks), values

    def microseconds(self, marks: Sequence[tuple[Any, Any]]) -> list[float]:
        """Between each run's marks, once the device is done."""
        if self.device.type == "cuda":
            return [1000 * begin.elapsed_time(end) for begin, end in marks]
        return [(end - begin) / 1000 for begin, end in marks]

    def launch(
        self, state: int, runs: int, cold: bool = False
    ) -> tuple[list[tuple[Any, Any]], list[Tensor]]:
        """``run`` without waiting for the device: marks around each run, and its checksums."""
        marks: list[tuple[Any, Any]] = []
        sums: list[Tensor] = []
        now = torch.tensor(state, device=self.device)
        for _ in range(runs):
            inputs, mask = self.begin(now)
            if cold:
                self._flush_cache()
            begin = self._mark()
            outputs = self.step(inputs)
            marks.append((begin, self._mark()))
            sums.append(self.checksums(self.parts(outputs, inputs), mask))
            now = next_state(now, sums[-1])
        return marks, sums

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return self.clock()
        event = _Event(enable_timing=True)
        event.record()
        return event

    def _flush_cache(self) -> None:
        if self._flush is None:
            self._flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device=self.device)
        self._flush.zero_()


def _outputs(result: Any) -> list[Tensor]:
    leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point()]
