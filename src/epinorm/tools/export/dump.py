"""What an executable launches, as text: a table that ``templates/host.cpp`` repeats.

``Tables.add`` takes one chain, with a norm or without, plans, compiles and runs it for each GPU and
mode by a recorder (``backends/cuda/runtime/recorder.py``), and gives its number. In the file

    y = _fused(number, x, weight, bias, norm_weight, norm_bias, operands, facts)

is y, with gradients, or None where no table serves these tensors: the caller has the layers' own
code for that. ``facts`` are values read from the model, compared with those of ``add``.

A table has a line for each thing that happens; a name stands for a tensor:

    take NAME...              what is given, in order
    new NAME dtype size...    zeros NAME ...: filled; keep NAME ...: once for all calls
    run KERNEL grid(3) block(3) shared cluster(3) dependent ARGUMENT...
    mm OUT VIEW VIEW          addmm, linear: PyTorch's own
    give NAME...              what comes back, - for nothing

An argument is its letter in ``Kernel.prepare``'s signature and its value; of a pointer, p, a name
and an offset in bytes; of a tensor map, m, besides that its dtype, rows, columns, bytes of a row,
rows and columns of its box, swizzle and L2 promotion. A view is a name, an offset, rows, columns
and their strides, in values.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.runtime.recorder import (
    Allocated,
    Event,
    Launched,
    Mapped,
    Operated,
    recording,
)
from epinorm.chain import Chain
from epinorm.precision import Precision
from epinorm.problem import Forward, Inputs, Layout, Plan, Problem, Strategy, Wanted

MODES: Mapping[str, tuple[torch.dtype, Precision]] = {
    "float32 highest": (torch.float32, "highest"),
    "float32 high": (torch.float32, "high"),
    "bfloat16": (torch.bfloat16, "native"),
    "float16": (torch.float16, "native"),
}
"""dtype and precision by the name that an exported file has for them."""

GPUS: Mapping[str, Gpu] = {
    "h200": Gpu((9, 0), 132, 232448, 233472),
    "a100": Gpu((8, 0), 108, 166912, 167936),
    "l40s": Gpu((8, 9), 142, 101376, 102400),
    "b200": Gpu((10, 0), 148, 232448, 233472),
    "rtx5090": Gpu((12, 0), 170, 101376, 102400),
}
"""Bytes: CUDA programming guide, compute capabilities."""

PASSES = ("inference", "forward", "backward", "backward without x", "backward again")
"""Of a training step the last four; without x: of inputs that have no gradient; again: a second
time through a retained graph, where what forward left for backward is used up."""

NAMES = ("x", "weight", "bias", "norm_weight", "norm_bias")
KEPT = ("z", "mean", "rstd")


@dataclass(frozen=True)
class Served:
    """A chain in a mode on a GPU, and how it is computed there."""

    chain: int
    gpu: str
    mode: str
    plan: Plan


@dataclass(frozen=True)
class _Chain:
    """What tensors the tables of a chain are for."""

    chain: Chain
    m: int
    k: int
    n: int
    has: tuple[bool, bool, bool]
    facts: tuple[Any, ...]
    dims: int


class Tables:
    """The tables of a file's chains, and the kernels that they run."""

    def __init__(
        self,
        gpus: Sequence[str] = ("h200", "a100"),
        modes: Iterable[str] = MODES,
        strategy: Strategy = "auto",
    ) -> None:
        self.gpus, self.modes, self.strategy = tuple(gpus), tuple(modes), strategy
        self.chains: list[_Chain] = []
        self.sources: list[KernelSource] = []
        self.tables: dict[tuple[int, tuple[int, int], str, str], str] = {}
        self.served: list[Served] = []
        self.refused: list[str] = []

    def add(
        self,
        chain: Chain,
        m: int,
        k: int,
        n: int,
        has: tuple[bool, bool, bool],
        facts: tuple[Any, ...] = (),
        dims: int = 2,
    ) -> int:
        """Record a chain over x (m, k) and weight (n, k) and give its number; has: a bias, the
        norm's weight and its bias; dims: of x, whose first ones are folded to m. Raises ValueError
        for a chain that returns its sum too, and for one that draws a dropout's mask."""
        if chain.returns_sum:
            raise ValueError(f"a chain with two results cannot be exported: {chain}")
        if "seed" in chain.operand_kinds:
            raise ValueError(f"a chain with dropout in training cannot be exported: {chain}")
        number = len(self.chains)
        self.chains.append(_Chain(chain, m, k, n, has, facts, dims))
        for gpu in self.gpus:
            for mode in self.modes:
                self._add(number, gpu, mode)
        return number

    def _add(self, number: int, gpu: str, mode: str) -> None:
        dtype, precision = MODES[mode]
        of = self.chains[number]
        for training in (False, True):
            problem = Problem(
                *(
                    of.chain.rounded_for(dtype, dtype, "cuda"),
                    of.m,
                    of.k,
                    of.n,
                    dtype,
                    dtype,
                    dtype,
                    *of.has,
                ),
                *(training, torch.device("cpu"), precision),
                whole_step=training,
            )
            with recording(GPUS[gpu]) as recorder:
                plan = plan_cuda(problem, self.strategy)
                if plan.strategy == "reference":
                    step = "training" if training else "inference"
                    self.refused.append(f"{mode} on {gpu}, {step}: {plan.reason}")
                    continue
                run = _Step(problem, plan, recorder.events).passes(self._number_of)
            self.served += [] if training else [Served(number, gpu, mode, plan)]
            for name, table in run.items():
                self.tables[number, GPUS[gpu].capability, mode, name] = table

    def _number_of(self, source: KernelSource) -> int:
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)


class _Step:
    """The passes of one problem, run once each."""

    def __init__(self, problem: Problem, plan: Plan, events: list[Event]) -> None:
        self.problem, self.events = problem, events
        layout = Layout(problem.k, problem.k, (problem.m, problem.n))
        m, k, n, dtype = problem.m, problem.k, problem.n, problem.dtype
        has = (problem.has_bias, problem.has_norm_weight, problem.has_norm_bias)
        bias, norm_weight, norm_bias = [torch.empty(n, dtype=dtype) if h else None for h in has]
        kinds = problem.chain.operand_kinds
        operands = [torch.empty(n if c == "channel" else (m, n), dtype=dtype) for c in kinds]
        x, weight = torch.empty(m, k, dtype=dtype), torch.empty(n, k, dtype=dtype)
        self.inputs = Inputs(x, weight, bias, norm_weight, norm_bias, tuple(operands))
        self.given = {
            name: t for name, t in zip(NAMES, self.inputs[:5], strict=True) if t is not None
        } | {f"operand{i}": t for i, t in enumerate(operands)}
        del events[:]
        self.executable = CudaExecutable(problem, plan, layout)

    def passes(self, number_of: Callable[[KernelSource], int]) -> dict[str, str]:
        """The table of each pass by its name."""
        out = self.executable.forward(*self.inputs)
        if not self.problem.training:
            return {"inference": _text(self.events, self.given, [out.y], number_of)}
        left = getattr(out, "left", None)
        self.kept = {n: t for n, t in zip(KEPT, out[1:4], strict=True) if t.numel()}
        planes = (("left_x", left and left.x), ("left_weight", left and left.weight))
        self.left = {name: t for name, t in planes if t is not None}
        saved = {**self.kept, **self.left}
        found = {"forward": _text(self.events, self.given, [out.y, *saved.values()], number_of)}
        found["backward"] = self._backward(out, True, self.left, number_of)
        found["backward without x"] = self._backward(out, False, self.left, number_of)
        if self.left:
            found["backward again"] = self._backward(out, True, {}, number_of)
        return found

    def _backward(self, out: Forward, of_x: bool, left: dict[str, Tensor], number_of: Any) -> str:
        del self.events[:]
        inputs = self.inputs
        bias, norm_weight, norm_bias = [t is not None for t in inputs[2:5]]
        operands = tuple(True for _ in inputs.operands)
        want = Wanted(of_x, True, bias, norm_weight, norm_bias, operands)
        planes = KeptPlanes(left.get("left_x"), left.get("left_weight")) if left else None
        if planes is not None:
            planes.restrict(of_x, True)
        dy = torch.empty_like(out.y)
        given = {**self.given, **self.kept, **left, "dy": dy}
        found = self.executable.backward(inputs, [Forward(*out)], dy, want, planes)
        wanted = [g for g, t in zip(found[:5], inputs[:5], strict=True) if t is not None]
        return _text(self.events, given, [*wanted, *found.operands], number_of)


class _Buffers:
    """Whose memory an address is in."""

    def __init__(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        found = sorted((t.data_ptr(), name, t) for name, t in tensors if t.numel())
        self.starts = [start for start, _, _ in found]
        self.found = found

    def at(self, address: int) -> tuple[str, int]:
        """The tensor's name, and how many bytes after its beginning."""
        i = bisect_right(self.starts, address) - 1
        if i >= 0:
            start, name, tensor = self.found[i]
            if address <= start + tensor.nbytes:
                return name, address - start
        raise RuntimeError(f"a launch is given the address {address:#x}, which is nobody's")


def _text(
    events: list[Event],
    given: Mapping[str, Tensor],
    results: Sequence[Tensor | None],
    number_of: Callable[[KernelSource], int],
) -> str:
    """The table of what happened, from tensors of these names to these results."""
    known = {t.data_ptr() for t in given.values()}
    new = [e for e in events if isinstance(e, (Allocated, Operated))]
    new = [event for event in new if _made(event).data_ptr() not in known]
    made = {f"t{i}": event for i, event in enumerate(new)}
    tensors = {**given, **{name: _made(event) for name, event in made.items()}}
    buffers = _Buffers(tensors.items())
    for_products = {t.data_ptr() for e in events if isinstance(e, Operated) for t in e.arguments}
    lines, there = [f"take {' '.join(given)}"], set(given)

    def named(address: int) -> tuple[str, int]:
        """As ``_Buffers.at``; a tensor begins to be there when it is first used."""
        name, offset = buffers.at(address)
        if name not in there:
            there.add(name)
            event = made[name]
            if isinstance(event, Allocated):
                how = "keep" if address in for_products else "zeros"
                lines.append(f"{how if event.zeros else 'new'} {name} {_size(event.tensor)}")
        return name, offset

    def argument(letter: str, value: Any) -> str:
        if isinstance(value, Mapped):
            name, offset = named(value.address)
            box = f"{value.rows}:{value.columns}:{value.row_bytes}:{value.box_rows}"
            rest = f"{box}:{value.box_columns}:{value.swizzle}:{value.l2_promotion}"
            return f"m{name}+{offset}:{str(value.dtype)[6:]}:{rest}"
        if letter == "p":
            return "p{}+{}".format(*named(value)) if value else "p0"
        return f"{letter}{float(value).hex() if letter in 'fd' else value}"

    def view(tensor: Tensor) -> str:
        name, offset = named(tensor.data_ptr())
        numbers = (offset // tensor.itemsize, *tensor.shape, *tensor.stride())
        return f"{name}:{':'.join(map(str, numbers))}"

    for event in events:
        if isinstance(event, Launched):
            values = zip(event.signature, event.values, strict=True)
            arguments = " ".join([argument(letter, value) for letter, value in values])
            shape = (*event.grid, *event.block, event.shared_bytes, *event.cluster)
            head = f"run {number_of(event.source)} {' '.join(map(str, shape))}"
            lines.append(f"{head} {int(event.dependent)} {arguments}")
        elif isinstance(event, Operated):
            views = " ".join([view(t) for t in event.arguments])
            lines.append(f"{event.name} {named(event.result.data_ptr())[0]} {views}")
    back = ["-" if t is None else named(t.data_ptr())[0] for t in results]
    return "\n".join([*lines, f"give {' '.join(back)}"]) + "\n"


def _made(event: Allocated | Operated) -> Tensor:
    return event.tensor if isinstance(event, Allocated) else event.result


def _size(tensor: Tensor) -> str:
    return " ".join([str(tensor.dtype)[6:], *map(str, tensor.shape)])
