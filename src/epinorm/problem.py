"""The facts of one call, and what passes between what decides and what computes: types alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from torch import Tensor

from epinorm.chain import Chain
from epinorm.chain.reference import Results
from epinorm.precision import Precision

Strategy = Literal["auto", "single", "planes", "epilogue", "cpu", "reference"]

CUDA_STRATEGIES: tuple[Strategy, ...] = ("single", "planes", "epilogue")


def check_strategy(strategy: str) -> None:
    """Raise ValueError for a name that is no strategy's."""
    if strategy not in get_args(Strategy):
        known = ", ".join(get_args(Strategy))
        raise ValueError(f"unknown strategy {strategy!r}; known are {known}")


Core = Literal["hopper", "portable"]
"""What multiplies in ``single`` and ``planes``: wgmma and TMA, or what every GPU since Ampere
has."""


@dataclass(frozen=True)
class Problem:
    """The facts of one call that decide how it is computed. Hashable; holds no tensor.

    ``chain``: as a rule a structure (``Chain.structure``), whose numbers come with each call, in
    ``Inputs.constants``; it may also hold the numbers itself, which then serve where none come.
    ``dtype`` is that of x, weight and bias; ``norm_dtype`` that of the norm's parameters and of
    the chain's tensor operands; ``out_dtype`` that of y. They differ under autocast, 16 bit, fp32
    and fp32, and where a BatchNorm has fp32 parameters, 16 bit, fp32 and 16 bit, without operands.
    ``training``: z, mean and rstd are kept for a backward pass. ``prepacked``: the weight is kept
    converted (``epinorm.prepack``), which the plan need not count. ``whole_step``: the backward
    pass follows in this process, and gets from the forward pass what is no output of the operators
    too. ``spends_x``, ``spends_dy``: nobody reads x after the forward pass (in inference alone), dy
    after the backward pass, which may overwrite it. ``column_moments``: what enters the norm is the
    y of a product that leaves moments of its columns too, where its kernel can.
    """

    chain: Chain
    m: int
    k: int
    n: int
    dtype: torch.dtype
    norm_dtype: torch.dtype
    out_dtype: torch.dtype
    has_bias: bool
    has_norm_weight: bool
    has_norm_bias: bool
    training: bool
    device: torch.device
    precision: Precision
    prepacked: bool = False
    whole_step: bool = False
    spends_x: bool = False
    spends_dy: bool = False
    column_moments: bool = False

    @property
    def groups(self) -> int:
        return self.chain.groups(self.n)

    @property
    def planes(self) -> int:
        """16-bit planes of each operand: two for fp32 at full accuracy, else one."""
        return 2 if self.precision == "highest" else 1

    @property
    def keeps_z(self) -> bool:
        """Whether forward keeps z for a backward pass."""
        return self.training and self.chain.keeps_z

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype of what enters the norm, where that is a result."""
        return self.chain.sum_dtype(self.dtype, self.norm_dtype)

    @property
    def saved_dtype(self) -> torch.dtype:
        """The dtype of the matrix that backward reads: z, or the sum or y in its place."""
        if self.chain.saves_y:
            return self.out_dtype
        return self.sum_dtype if self.chain.saves_sum else self.dtype

    @property
    def matrix_dtype(self) -> torch.dtype | None:
        """Of what a product with the chain in its epilogue writes beside y: the sum, or z."""
        if self.chain.returns_sum:
            return self.sum_dtype
        return self.dtype if self.keeps_z else None

    @property
    def keeps_statistics(self) -> bool:
        """Whether forward keeps mean and rstd for a backward pass."""
        return self.training and self.chain.norm is not None

    @property
    def keeps_mean(self) -> bool:
        """Whether forward keeps the mean too."""
        return self.keeps_statistics and self.chain.centred

    @property
    def made_by_forward(self) -> str:
        """What the forward pass writes, in words."""
        kept = ", z" * self.keeps_z + ", mean, rstd" * self.keeps_statistics
        more = ", sum" * self.chain.returns_sum + ", statistics" * self.chain.returns_statistics
        return "y" + more + kept

    @property
    def bias_in_z(self) -> bool:
        """Whether z has the bias, rounded as PyTorch's linear layer rounds its output: also where
        the sum, which may be z itself, is a result, and in 16 bit where a derivative reads it. With
        the bias added behind the rounding it would fall on the other side of a kink now and then.
        """
        read = self.dtype.itemsize == 2 and self.chain.reads_z
        return self.has_bias and (self.chain.rounding == "eager" or self.chain.saves_sum or read)

    @property
    def stats_dtype(self) -> torch.dtype:
        """The dtype that statistics are computed and kept in."""
        return torch.float64 if self.dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Step:
    """One launch of a pass, decided.

    kernel: its entry point, or PyTorch's own product as "aten::mm". makes: what it writes, in
    words. choice: the tile, or all that is decided of it beyond its name. otherwise: when something
    else is launched in its place that only a call, or the compiler, can tell.
    """

    kernel: str
    makes: str
    reason: str
    choice: Any = None
    otherwise: str = ""


@dataclass(frozen=True)
class Buffer:
    """Memory that a step takes besides what its caller gets; from and until: kernels' names.

    each: it is so large for each of the blocks, of a column of them, that run at once.
    """

    name: str
    nbytes: int
    since: str
    until: str
    each: bool = False


@dataclass(frozen=True)
class Plan:
    """How a problem is computed: a strategy and, in one sentence, why this one; and every step.

    core: what multiplies where the strategy is ``single`` or ``planes``. backward: of all
    gradients; fewer have fewer steps. saved: what waits for the backward pass. chosen: something
    else would have served too, so the reference is no makeshift. gain: how many times as fast as
    PyTorch's own layers it is estimated to be; None where nothing was estimated. microseconds: what
    it is estimated to take, a call or, in training, a step. ``print`` shows it on a screen.
    """

    strategy: Strategy
    reason: str
    core: Core | None = None
    forward: tuple[Step, ...] = ()
    backward: tuple[Step, ...] = ()
    saved: tuple[Buffer, ...] = ()
    scratch: tuple[Buffer, ...] = ()
    chosen: bool = False
    gain: float | None = None
    microseconds: float | None = None

    def __str__(self) -> str:
        lines = [f"{self.strategy}: {self.reason}"]
        for name, steps in (("forward", self.forward), ("backward", self.backward)):
            lines += _table(name, steps)
        for name, buffers in (("saved", self.saved), ("scratch", self.scratch)):
            lines += [f"{name:9}{_size(b):>12}  {b.name}, {b.since} to {b.until}" for b in buffers]
        return "\n".join(lines)


def _table(name: str, steps: tuple[Step, ...]) -> list[str]:
    kernels = max((len(step.kernel) for step in steps), default=0)
    makes = max((len(step.makes) for step in steps), default=0)
    lines = []
    for i, step in enumerate(steps, 1):
        choice = "" if step.choice is None else f"{step.choice}: "
        lines.append(
            f"{name:9}{i:2} {step.kernel:{kernels}}  {step.makes:{makes}}  {choice}{step.reason}"
        )
        if step.otherwise:
            lines.append(f"{'':12}{'':{kernels + makes + 4}}else {step.otherwise}")
        name = ""
    return lines


def _size(buffer: Buffer) -> str:
    size, unit = float(buffer.nbytes), "B"
    for larger in ("kB", "MB", "GB"):
        if size >= 1000:
            size, unit = size / 1000, larger
    return f"{size:.3g} {unit}" + " each" * buffer.each


class Inputs(NamedTuple):
    """The tensors of one call, leading dimensions folded: x (M, K), weight (N, K), the rest (N,),
    element operands (M, N). The last dimension is contiguous; rows may have a stride.
    ``constants``: the numbers of the chain, where its problem has only names for them."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    operands: tuple[Tensor, ...]
    constants: tuple[float, ...] = ()


class Forward(NamedTuple):
    """y (M, N) in ``out_dtype``; and, where training, what backward needs: z (M, N), the linear's
    output without its bias (but see ``Problem.bias_in_z``), in ``dtype``, mean and rstd (M, groups)
    or, of BatchNorm, (N,) in ``stats_dtype``. Not training: three tensors of shape (0,). RMSNorm
    has no mean: shape (0,). Without a norm there are no statistics, and z where its values decide
    the gradient. ``second``: where the chain ``returns_sum``, that, (M, N) in ``sum_dtype``, and z
    of shape (0,) if it ``saves_sum`` or ``saves_y``; where it ``returns_statistics``, these, (2, N)
    in ``stats_dtype``, which have no gradient.

    Only the backward of the backend that made them reads z and the statistics, so their values may
    differ between backends (the reference's z includes the bias); shapes and dtypes may not."""

    y: Tensor
    z: Tensor
    mean: Tensor
    rstd: Tensor
    second: Tensor | None = None

    def saved(self, chain: Chain) -> Tensor:
        """What stands as z among what the backward pass reads: z, or the result in its place."""
        if chain.saves_y:
            return self.y
        return self.second if self.second is not None and chain.saves_sum else self.z

    @property
    def results(self) -> Results:
        """What the operator returns."""
        return self.y if self.second is None else (self.y, self.second)

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """All that there is, as the operators of the forward pass return it."""
        return tuple(t for t in self if t is not None)

    @property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of y, of the matrix that a product writes beside it, and of mean and rstd."""
        matrix = self.z if self.second is None else self.second
        y, mean, rstd = self.y, self.mean, self.rstd
        return y.data_ptr(), matrix.data_ptr(), mean.data_ptr(), rstd.data_ptr()


class StepForward(Forward):
    """A ``Forward`` whose backend left something more for the backward pass of the same step.

    ``left`` is handed to that backward once, by what keeps it; the gradients are as accurate
    without it. It is no output of the operators.
    """

    left: StepLeftovers


class StepLeftovers(Protocol):
    """What ``StepForward`` holds: it frees its memory when nothing holds it any more."""

    def restrict(self, x: bool, weight: bool) -> None:
        """Free what serves other gradients than those of x or of the weight."""

    def weight_moved(self) -> None:
        """The weight's values lie elsewhere than in the forward pass: others, perhaps."""


class Wanted(NamedTuple):
    """Which gradients backward must compute."""

    x: bool
    weight: bool
    bias: bool
    norm_weight: bool
    norm_bias: bool
    operands: tuple[bool, ...]


class Gradients(NamedTuple):
    """The gradients in the shapes and dtypes of ``Inputs``; None where not wanted."""

    x: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    operands: tuple[Tensor | None, ...]


class Layout(NamedTuple):
    """What an executable is bound to: rows of x and weight, so many values apart, and the size of
    y, which is (M, N) but for its leading dimensions."""

    x_stride: int
    weight_stride: int
    y_size: tuple[int, ...]


class CannotCompile(RuntimeError):
    """A plan cannot be compiled on this machine; the text says why."""


Tensors = tuple[Tensor, ...]
Numbers = tuple[float, ...]
Run = Callable[
    [Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None, Tensors, Numbers], Forward
]
"""The forward pass of one problem, given the fields of ``Inputs``.

The tensors have the sizes, dtypes, device and strides that it was made for; nothing is checked.
It may have been made for an x of any leading dimensions, which is contiguous then; so has y.
"""


class Rest(NamedTuple):
    """x's gradient, left for later: ``compute`` makes it, once, of the tensors that were carried
    over, which it takes out of their list, and of the weight."""

    carried: list[Tensor]
    compute: Callable[[list[Tensor], Tensor], Tensor | None]

    def __call__(self, weight: Tensor) -> Tensor | None:
        return self.compute(self.carried, weight)


Later = list[Rest]


class Executable(Protocol):
    """A plan whose kernels are compiled, loaded and bound to tensors of one layout."""

    problem: Problem
    plan: Plan

    @property
    def forward(self) -> Run:
        """Computes y, and where training what backward needs."""

    def backward(
        self,
        inputs: Inputs,
        kept: list[Forward],
        dy: Tensor,
        want: Wanted,
        left: Any = None,
        into: Tensor | None = None,
        dsum: Tensor | None = None,
        later: Later | None = None,
    ) -> Gradients:
        """The wanted gradients from dy (M, N) and from what forward kept, in a list of one: it is
        taken out, so that z's memory can be used again; z is ``Forward.saved``. left: what forward
        left besides (``StepForward``). into: a tensor that dW may be added to, which is then the
        gradient. dsum: the gradient of the sum, as it is. later: where dX may be left, which then
        reads neither dy nor what was kept, and is None among the gradients."""
