"""What an executable launches, as a table that a program repeats (cuda/runtime/program.h).

``Tables.add`` takes one chain, with a norm or without, plans, compiles and runs it for each GPU and
mode as if that GPU were there (``backends/cuda/runtime/recorder.py``), and gives its number. In the
file

    y = _fused(number, x, weight, bias, norm_weight, norm_bias, operands, facts)

is y, with gradients, or None where no table serves these tensors: the caller has the layers' own
code for that. ``facts`` are values read from the model, compared with those of ``add``.

A table holds what ``templates/repeat.py.in`` makes a program of: names of what is given, which
results there are, shapes and dtypes of what is allocated, with the buffer that it may be written
over or -1, and of the constants, which are zeros, and then, with buffers as numbers (those given,
those allocated, the constants)

    large       of those given: more than one value, so that its address has to be aligned
    results     in order
    maps        sizes, stride in bytes, box, and the driver's numbers of type, swizzle, promotion
    steps       a launch: number of its kernel, grid, block and bytes of shared memory, cluster, is
                it a programmatic dependent, the arguments' bytes behind the launch's configuration,
                their offsets, and the places of addresses: offset, buffer, map or -1, offset in it;
                or a product of PyTorch's: out, a, b and bias, each a buffer, an offset, sizes and
                strides in values; both with the buffers made before and let go of behind it
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epinorm.backends.cuda.executable import CudaExecutable
from epinorm.backends.cuda.fp32.kept_planes import KeptPlanes
from epinorm.backends.cuda.plan.strategy import plan_cuda
from epinorm.backends.cuda.runtime import replay
from epinorm.backends.cuda.runtime.arguments import CONFIG_BYTES, SHAPE
from epinorm.backends.cuda.runtime.device import Gpu
from epinorm.backends.cuda.runtime.jit import KernelSource
from epinorm.backends.cuda.runtime.recorder import Launched, recording
from epinorm.backends.cuda.runtime.tensor_map import TENSOR_MAP_BYTES
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
    "h100": Gpu((9, 0), 132, 232448, 233472),
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
LEFT = ("left_x", "left_weight")
PLACE = "=Iiiiq"
"""``Place`` of program.h: where, buffer, map, padding, offset."""


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
        for a chain that returns its sum too, that drops, or that has numbers of rows."""
        if chain.returns_sum or {"seed", "row"}.intersection(chain.operand_kinds):
            what = "with two results" if chain.returns_sum else "that drops or has numbers of rows"
            raise ValueError(f"a chain {what} cannot be exported: {chain}")
        number = len(self.chains)
        self.chains.append(_Chain(chain, m, k, n, has, facts, dims))
        for gpu, mode in itertools.product(self.gpus, self.modes):
            self._add(number, gpu, mode)
        return number

    def _add(self, number: int, gpu: str, mode: str) -> None:
        dtype, precision = MODES[mode]
        of = self.chains[number]
        for training in (False, True):
            chain = of.chain.rounded_for(dtype, dtype, "cuda")
            problem = Problem(
                *(chain, of.m, of.k, of.n, dtype, dtype, dtype, *of.has),
                *(training, torch.device("cpu"), precision),
                whole_step=training,
            )
            with recording(GPUS[gpu]) as recorder:
                plan = plan_cuda(problem, self.strategy)
                if plan.strategy == "reference":
                    step = "training" if training else "inference"
                    self.refused.append(f"{mode} on {gpu}, {step}: {plan.reason}")
                    continue
                run = _Step(problem, plan, recorder.launches, self._number_of).passes()
            self.served += [] if training else [Served(number, gpu, mode, plan)]
            for name, table in run.items():
                self.tables[number, GPUS[gpu].capability, mode, name] = table

    def _number_of(self, source: KernelSource) -> int:
        if source not in self.sources:
            self.sources.append(source)
        return self.sources.index(source)


def _planes(out: Forward) -> tuple[Tensor | None, Tensor | None]:
    """Those of x and weight that a forward pass leaves for backward."""
    left = getattr(out, "left", None)
    return (None, None) if left is None else (left.x, left.weight)


class _Step:
    """The passes of one problem, run twice each: what is prepared once is not part of a table."""

    def __init__(
        self,
        problem: Problem,
        plan: Plan,
        launches: list[Launched],
        number_of: Callable[[KernelSource], int],
    ) -> None:
        self.problem, self.launches, self.number_of = problem, launches, number_of
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
        self.executable = CudaExecutable(problem, plan, layout)

    def passes(self) -> dict[str, str]:
        """The table of each pass by its name."""
        out = self.executable.forward(*self.inputs)
        if not self.problem.training:
            return {"inference": self._table(self.given, lambda: self._forward()[:1])}
        left = _planes(out)
        waiting = {name: t for name, t in zip(LEFT, left, strict=True) if t is not None}
        kept = {n: t for n, t in zip(KEPT, out[1:4], strict=True) if t.numel()}
        if self.problem.chain.saves_y:
            kept, out = {"y": out.y, **kept}, out._replace(z=out.y)
        found = {"forward": self._table(self.given, self._forward)}
        found["backward"] = self._backward(out, True, kept, waiting)
        found["backward without x"] = self._backward(out, False, kept, waiting)
        if waiting:
            found["backward again"] = self._backward(out, True, kept, {})
        return found

    def _forward(self) -> list[Tensor]:
        made = self.executable.forward(*self.inputs)
        return [t for t in (*made[:4], *_planes(made)) if t is not None and t.numel()]

    def _backward(
        self, out: Forward, of_x: bool, kept: dict[str, Tensor], left: dict[str, Tensor]
    ) -> str:
        inputs = self.inputs
        bias, norm_weight, norm_bias = [t is not None for t in inputs[2:5]]
        operands = tuple(True for _ in inputs.operands)
        want = Wanted(of_x, True, bias, norm_weight, norm_bias, operands)
        dy = torch.empty_like(out.y)

        def backward() -> list[Tensor | None]:
            planes = KeptPlanes(*map(left.get, LEFT)) if left else None
            if planes is not None:
                planes.restrict(of_x, True)
            found = self.executable.backward(inputs, [Forward(*out)], dy, want, planes)
            wanted = [g for g, t in zip(found[:5], inputs[:5], strict=True) if t is not None]
            return [*wanted, *found.operands]

        backward()
        return self._table({**self.given, **kept, **left, "dy": dy}, backward)

    def _table(
        self, given: Mapping[str, Tensor], run: Callable[[], Sequence[Tensor | None]]
    ) -> str:
        with replay.recording(list(given.values())) as noted:
            found = run()
        facts = replay.recorded(noted, [t for t in found if t is not None])
        if any(t.any() for t in facts.constants):
            raise RuntimeError("a pass reads a tensor of its own that is not zeros")
        made = [(shape, str(dtype)[6:], over) for shape, dtype, over in facts.made]
        constants = [(tuple(t.shape), str(t.dtype)[6:]) for t in facts.constants]
        maps = [(*m.sizes, m.stride, *m.box, m.type, m.swizzle, m.promotion) for m in facts.maps]
        head = (tuple(given), tuple(t is not None for t in found), made, constants)
        lines = (*head, facts.large, facts.results, maps)
        steps = [self._step(*step) for step in facts.steps]
        of_lines = "".join(f"        {line!r},\n" for line in lines)
        of_steps = "".join(f"            {step!r},\n" for step in steps)
        return f"(\n{of_lines}        (\n{of_steps}        ),\n    )"

    def _step(
        self,
        kernel: int,
        frame: bytes,
        offsets: bytes,
        places: bytes,
        matrices: Any,
        made: list[int],
        done: list[int],
    ) -> tuple[Any, ...]:
        if kernel == 0:
            return (matrices, made, done)
        launched = self.launches[kernel - 1]
        arguments, where = bytearray(frame), []
        for at, buffer, number, _, offset in struct.iter_unpack(PLACE, places):
            size = 8 if number < 0 else TENSOR_MAP_BYTES
            arguments[at : at + size] = bytes(size)
            where.append((at, buffer, number, offset))
        return (
            *(self.number_of(launched.source), SHAPE.unpack_from(frame), launched.cluster),
            *(int(launched.dependent), arguments[CONFIG_BYTES:].hex()),
            *(struct.unpack(f"{len(offsets) // 4}I", offsets), where, made, done),
        )
