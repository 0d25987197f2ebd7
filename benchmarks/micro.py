"""Rows that time one kernel alone, beside eager's way and a copy of the same bytes.

Add one by writing a function that makes a ``Micro`` for a shape and registering it under the name
that its rows have as ``pass``:

    @micro("my_kernel")
    def my_kernel(shape: Shape, dtype: torch.dtype, device: torch.device, kind: str) -> Micro: ...

It is verified as the models are, against float64 and eager, on ``rand`` and on ``randn``, twice, in
poisoned memory; then timed with L2 flushed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from epinorm.chain import Chain, GroupNorm, LayerNorm
from epinorm.problem import Forward, Inputs, Problem, Wanted
from epinorm.tools.accuracy import Comparison, Outcome, compare, differences, relative_error
from epinorm.tools.kinks import away_from_kinks
from epinorm.tools.results import Row, commit, device_name, today
from epinorm.tools.timing import Runner, Settings, time_interleaved
from epinorm.tools.verify import poisoned_memory
from shapes import Shape

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Micro:
    """Three ways to the same named tensors, and what a kernel must at least read and write."""

    chain: str
    ours: Callable[[], Tensors]
    eager: Callable[[], Tensors]
    truth: Callable[[], Tensors]
    bytes_moved: int


Builder = Callable[[Shape, torch.dtype, torch.device, str], Micro]

MICRO: dict[str, Builder] = {}


def micro(name: str) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        MICRO[name] = builder
        return builder

    return register


def bench_micro(
    name: str, shape: Shape, dtype: torch.dtype, device: torch.device, settings: Settings
) -> Row:
    if device.type != "cuda":
        raise ValueError(f"{name} times a CUDA kernel, the device is {device}")
    comparisons: list[Comparison] = []
    for kind in ("rand", "randn"):
        comparisons += check(MICRO[name](shape, dtype, device, kind), dtype, kind)
    worst = max(comparisons, key=lambda c: c.strain)
    case = MICRO[name](shape, dtype, device, "randn")
    row = Row(
        shape=shape.name,
        m=shape.m,
        k=None,
        n=shape.n,
        groups=shape.groups or 1,
        norm="layer_norm" if shape.groups is None else "group_norm",
        dtype=str(dtype).removeprefix("torch."),
        precision="native",
        pass_=name,
        chain=case.chain,
        verified=all(c.passed for c in comparisons),
        strategy="epilogue",
        gpu=device_name(device),
        torch=torch.__version__,
        commit=commit(),
        date=today(),
        ours_error=worst.ours,
        eager_error=worst.eager,
        error_of=f"{worst.what}, {worst.inputs}",
        reason=None if worst.passed else str(worst),
    )
    if not row.verified:
        return row
    runners = {"ours": Runner(case.ours), "eager": Runner(case.eager)}
    runners["copy"] = copy_runner(case.bytes_moved, device)
    times = time_interleaved(runners, device, settings)
    again = check(case, dtype, "randn, after timing")
    if not all(c.passed for c in again):
        return replace(row, verified=False, reason=str(max(again, key=lambda c: c.strain)))
    return replace(row, **{f"{key}_us": value for key, value in times.items()})


def check(case: Micro, dtype: torch.dtype, kind: str) -> list[Comparison]:
    truth, eager = outcome(case.truth()), outcome(case.eager())
    like = [tensor for _, tensor in eager.tensors()]
    with poisoned_memory(like):
        ours = outcome(case.ours())
    with poisoned_memory(like):
        again = outcome(case.ours())
    return [*compare(truth, eager, ours, dtype, kind), *differences(ours, again, kind)]


def outcome(tensors: Tensors) -> Outcome:
    return Outcome((), dict(tensors))


def copy_runner(bytes_moved: int, device: torch.device) -> Runner:
    """A device-to-device copy that reads and writes ``bytes_moved`` bytes together."""
    source = torch.ones(bytes_moved // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return Runner(lambda: target.copy_(source))


# --- our norm kernels, without the product --------------------------------------------------------


@dataclass(frozen=True)
class NormData:
    problem: Problem
    inputs: Inputs
    z: Tensor
    dy: Tensor


def norm_data(
    shape: Shape, dtype: torch.dtype, device: torch.device, kind: str, training: bool
) -> NormData:
    """z (m, n) and dy (m, n), and bias, gamma and beta (n,), all random."""
    generator = torch.Generator(device).manual_seed(7)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    z = torch.rand(shape.m, shape.n, generator=generator, device=device)
    z = z if kind == "rand" else draw(shape.m, shape.n)
    bias, gamma, beta = draw(shape.n) / 2, 1 + draw(shape.n) / 4, draw(shape.n) / 2
    vectors = [t.to(dtype) for t in (bias, gamma, beta)]
    norm = LayerNorm() if shape.groups is None else GroupNorm(shape.groups)
    nothing = torch.empty(0, dtype=dtype, device=device)
    problem = Problem(
        chain=Chain.build(norm, post="leaky_relu(0.01)|scale(2)"),
        m=shape.m,
        k=shape.k,
        n=shape.n,
        dtype=dtype,
        norm_dtype=dtype,
        out_dtype=dtype,
        has_bias=True,
        has_norm_weight=True,
        has_norm_bias=True,
        training=training,
        device=device,
        precision="highest" if dtype == torch.float32 else "native",
    )
    inputs = Inputs(nothing, nothing, *vectors, ())
    return NormData(problem, inputs, z.to(dtype), draw(shape.m, shape.n).to(dtype))


def by_pytorch(shape: Shape, u: Tensor, gamma: Tensor, beta: Tensor) -> Tensor:
    """What eager does after the linear layer, whose output with its bias is u (m, n)."""
    if shape.groups is None:
        y = F.layer_norm(u, (shape.n,), gamma, beta)
    else:
        y = F.group_norm(u, shape.groups, gamma, beta)
    y = F.leaky_relu(y, 0.01)
    return y + y


def zero_near_kinks(data: NormData, shape: Shape) -> None:
    """Set dy to zero where leaky_relu's input is near 0, as ``epinorm.tools.kinks`` explains."""
    inputs, u = data.inputs, data.z + data.inputs.bias
    vectors = (inputs.norm_weight, inputs.norm_bias)
    eager = by_pytorch(shape, u, *vectors)
    u = data.z.double() + inputs.bias.double()
    error = relative_error(eager, by_pytorch(shape, u, *(v.double() for v in vectors)))

    class Epilogue(torch.nn.Module):
        def forward(self, u: Tensor) -> Tensor:
            return by_pytorch(shape, u, *(v.double() for v in vectors))

    error = max(error, torch.finfo(data.z.dtype).eps)
    (kept,) = away_from_kinks(Epilogue(), (u,), [u.shape], error)
    data.dy.masked_fill_(~kept, 0)


@micro("norm_epilogue_forward")
def norm_epilogue_forward(
    shape: Shape, dtype: torch.dtype, device: torch.device, kind: str
) -> Micro:
    from epinorm.backends.cuda.norm.forward import NormForward

    data = norm_data(shape, dtype, device, kind, training=False)
    inputs, z = data.inputs, data.z
    normalise = NormForward(data.problem).bind(z.stride(0), tuple(z.shape))
    gamma, beta = inputs.norm_weight, inputs.norm_bias
    u = z + inputs.bias  # eager's linear layer adds it
    exact = z.double() + inputs.bias.double()
    return Micro(
        chain=str(data.problem.chain),
        ours=lambda: {"output": normalise(z, *inputs[2:]).y},
        eager=lambda: {"output": by_pytorch(shape, u, gamma, beta)},
        truth=lambda: {"output": by_pytorch(shape, exact, gamma.double(), beta.double())},
        bytes_moved=2 * z.numel() * z.element_size(),
    )


@micro("norm_epilogue_backward")
def norm_epilogue_backward(
    shape: Shape, dtype: torch.dtype, device: torch.device, kind: str
) -> Micro:
    from epinorm.backends.cuda.norm.backward import NormBackward
    from epinorm.backends.cuda.norm.forward import NormForward

    data = norm_data(shape, dtype, device, kind, training=True)
    inputs, z, dy = data.inputs, data.z, data.dy
    kept: Forward = NormForward(data.problem)(z, inputs)
    norm_backward = NormBackward(data.problem)
    want = Wanted(True, True, True, True, True, ())
    zero_near_kinks(data, shape)

    def ours() -> Tensors:
        found = norm_backward(inputs, kept, dy, want)
        names = ("dz", "bias", "norm_weight", "norm_bias")
        return {f"gradient {name}": getattr(found, name) for name in names}

    def graph(u: Tensor, of: torch.dtype) -> Callable[[], Tensors]:
        leaves = [u.detach(), inputs.norm_weight.to(of), inputs.norm_bias.to(of)]
        leaves = [leaf.clone().requires_grad_() for leaf in leaves]
        y = by_pytorch(shape, *leaves)

        def backward() -> Tensors:
            dz, gamma, beta = torch.autograd.grad(y, leaves, dy.to(of), retain_graph=True)
            return {
                "gradient dz": dz,
                "gradient bias": dz.sum(0),
                "gradient norm_weight": gamma,
                "gradient norm_bias": beta,
            }

        return backward

    return Micro(
        chain=str(data.problem.chain),
        ours=ours,
        eager=graph(z + inputs.bias, dtype),
        truth=graph(z.double() + inputs.bias.double(), torch.float64),
        bytes_moved=3 * z.numel() * z.element_size(),
    )
