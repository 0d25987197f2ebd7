"""A chain's calls from one place: one like an earlier one goes straight to its kernels.

The first call of a kind passes every check and is planned. What it was found to be is kept under
all that this depends on (``kinds.py``), PyTorch's modes aside, which are looked at each time.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from epinorm.backends.unpromised import saving_hooks
from epinorm.chain import Chain, reference, returns_more
from epinorm.chain.dropout import draw_seeds
from epinorm.chain.reference import Results
from epinorm.operator import calls, transforms
from epinorm.operator.autograd import differentiable
from epinorm.operator.checks import check_leading_dimensions, check_types
from epinorm.operator.kinds import Kinds, is_strided
from epinorm.operator.native_calls import LayersCalls, NativeCalls
from epinorm.operator.schema import linear_norm, linear_norm_sum
from epinorm.operator.undisturbed import (
    autograd_records,
    has_plain_types,
    is_distributed,
    is_under_autocast,
    is_under_autocast_alone,
    is_undisturbed,
    untraced,
    wants_gradient,
)
from epinorm.problem import Inputs, Strategy, check_strategy

SPENDING = ("cuda",)
"""Devices where a pass needs memory of x's size, and x's own serves."""


class _Found(NamedTuple):
    """What computes a call; training: with a gradient; folds: operands have leading dimensions."""

    executable: Any  # Executable | calls.Eager
    training: bool
    folds: bool


class Uses:
    """How many calls were not PyTorch's own layers, or may not have been."""

    count = 0


class Caller:
    """``linear_norm`` for one chain, strategy and strictness.

    like: what calls of a chain of the same structure were found to be; nothing yet if None. uses:
    where calls are counted.
    """

    def __init__(
        self,
        chain: str,
        strategy: Strategy = "auto",
        strict: bool = False,
        like: Kinds[_Found] | None = None,
        uses: Uses | None = None,
    ) -> None:
        check_strategy(strategy)
        self.facts: calls.Facts = (chain, strategy, strict, None)
        self._uses = Uses() if uses is None else uses
        self._spends_x = False
        self._spending: Caller | None = None
        self._constants, parsed = calls.constants_of(self.facts), Chain.parse(chain)
        self._kinds_of_operands = parsed.operand_kinds
        self._drops = "seed" in self._kinds_of_operands
        self._kinds: Kinds[_Found] = Kinds() if like is None else like
        self._autocast_facts: calls.Facts = (chain, strategy, strict, torch.float32)
        self._autocast_training = (str(_keeping_its_sum(parsed)), *self._autocast_facts[1:])
        self.returns_more = parsed.returns_more
        self._layers = calls.layers_of(self.facts)
        self._native, self._left = NativeCalls(), LayersCalls()
        self._has_layers = strategy in ("auto", "reference") and not strict
        self._casts = transforms.out_dtype_under_autocast(parsed) is not None
        self._stays_low = transforms.stays_low_under_autocast(parsed)

    @untraced
    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        operands: tuple[Tensor, ...],
    ) -> Results:
        """x (..., K) → y (..., N); see ``epinorm.linear_norm``. Not to be traced by dynamo.

        Seeds may be left out: they are drawn.
        """
        if self._drops:
            operands = with_seeds(operands, self._kinds_of_operands, x.device)
            self._uses.count += 1  # the model's own code, if it ran next, would drop others
        tensors: tuple[Any, ...] = (x, weight, bias, norm_weight, norm_bias, *operands)
        y = self._native.find(tensors)
        if y is not None:
            self._uses.count += 1
            return y if self.returns_more or y.__class__ is Tensor else y[0]
        y = self._left.find(tensors)
        if y is not None:
            return y
        if x.__class__ is not Tensor and is_distributed((x,)) and not is_under_autocast():
            self._uses.count += 1
            return call(*(*tensors[:5], tensors[5:], *self.facts[:3]))
        if not is_undisturbed():
            return self._disturbed(tensors)
        results = self.again(tensors, self.facts)
        return self._first(tensors, self.facts) if results is None else results

    @property
    def spending(self) -> Caller:
        """The same where x is the result of another Caller, which nobody else has; with nothing
        in common, so that no other call is taken for one of these."""
        if self._spending is None:
            self._spending = made = copy(self)
            made._spends_x, made._spending = True, made
            made._kinds, made._native, made._left = Kinds(), NativeCalls(), LayersCalls()
        return self._spending

    def native(self, tensors: Sequence[Any]) -> Any:
        """What computes calls of tensors like these, in the order of ``Inputs``, in C++, with a
        tensor alone as their result; None before it was kept, where the weight is marked, and where
        Python draws a seed."""
        return None if self._drops or self.returns_more else self._native.like(tensors)

    def _spends(self, tensors: tuple[Any, ...], facts: calls.Facts) -> bool:
        """Whether the pass may write over x. What else holds x holds it for a gradient."""
        x = tensors[0]
        return (
            self._spends_x
            and facts[3] is None
            and x.__class__ is Tensor
            and x.dtype == torch.float32
            and x.device.type in SPENDING
            and x.is_contiguous()
            and not x.requires_grad
            and not wants_gradient(*tensors)
        )

    def _first(self, tensors: tuple[Any, ...], facts: calls.Facts) -> Results:
        """As a call that is like no earlier one."""
        asked = (*tensors[:5], tensors[5:], *self.facts[:3])
        hooked = saving_hooks(False) is not None
        if hooked:
            # Checkpointing compares what two runs of a call save, and the second will be like this.
            with torch.no_grad():
                call(*asked)
        # Of a call that spends x the ordinary pass is not compiled, nor is it loaded when a second
        # call is captured.
        if hooked or self._spends(tensors, facts):
            self._keep(tensors, facts)
            if (found := self.again(tensors, facts)) is not None:
                return found
        self._uses.count += 1
        results = call(*asked)
        if not hooked:
            self._keep(tensors, facts)
        return results

    def _disturbed(self, tensors: tuple[Any, ...]) -> Results:
        """As a call, where a mode, a transform or autocast may want it."""
        x, prepared = tensors[0], False
        kind = x.device.type
        has_autocast = kind in ("cpu", "cuda") and torch.is_autocast_enabled(kind)
        if has_autocast and is_under_autocast_alone():
            plain, casts = not is_distributed((x,)), self._casts and kind == "cuda"
            if self._has_layers and plain and not casts:
                # These mix dtypes as no kernel of ours does.
                return self._layers.results(self._constants, *tensors)
            prepared = plain and casts and x.dtype != torch.float64
        if prepared:
            facts = self._autocast_training if autograd_records() else self._autocast_facts
            if self._stays_low:
                facts = (*facts[:3], torch.get_autocast_dtype("cuda"))
            results = self.again(tensors, facts)
            return self._asked(self._first(tensors, facts) if results is None else results)
        self._uses.count += 1
        return self._asked(call(*(*tensors[:5], tensors[5:], *self.facts[:3])))

    def _asked(self, results: Results) -> Results:
        """Without a sum that was computed to be kept alone."""
        return results if self.returns_more or isinstance(results, Tensor) else results[0]

    def again(self, tensors: tuple[Any, ...], facts: calls.Facts) -> Results | None:
        """What the call gives if it is like an earlier one, else None; tensors: operands last."""
        found = self._kinds.find(tensors, _modes(facts))
        if found is None:
            return None
        if isinstance(found.executable, calls.Eager):
            layers = partial(found.executable.results, self._constants)
            if facts[3] is None:
                self._left.keep(layers, tensors)
            return layers(*tensors)
        self._uses.count += 1
        self._native.keep(found.executable, tensors, facts, found.training, self.returns_more)
        if facts[3] is None:
            return self._run(found, tensors, facts)
        with torch._C._ExcludeDispatchKeyGuard(transforms.CUDA_AUTOCAST):
            results = self._run(found, transforms.cast(tensors, facts[3]), facts)
        if isinstance(results, Tensor) or not self.returns_more or self._stays_low:
            return results
        y, total = results
        return y, total.to(transforms.sum_dtype_under_autocast(tensors, Chain.parse(facts[0])))

    def _run(self, found: _Found, tensors: tuple[Any, ...], facts: calls.Facts) -> Results:
        executable, training, folds = found
        if training:
            return differentiable(executable, facts, tensors)
        operands = tensors[5:]
        if folds:
            operands = calls.fold_operands(operands, facts)
        made = executable.forward(*(*tensors[:5], operands, self._constants))
        if made.second is None:
            return made.y
        if made.y.dim() == 2:  # as what it is: BatchNorm's statistics have rows of their own
            return made.y, made.second
        return made.y, calls.unfold(made.second, made.y.shape[:-1])

    def _keep(self, tensors: tuple[Any, ...], facts: calls.Facts) -> None:
        self._kinds.keep(tensors, _modes(facts), partial(self._find, tensors, facts))

    def _find(self, tensors: tuple[Any, ...], facts: calls.Facts) -> _Found | None:
        """What computes these tensors; None where x or an operand cannot be folded as it lies."""
        if facts[3] is not None:
            tensors = transforms.cast(tensors, facts[3])
        x, weight, *vectors = tensors[:5]
        matrix, operands, y_size = x, tensors[5:], None
        training = wants_gradient(*tensors)
        if x.dim() != 2:
            if not all(t.is_contiguous() for t in (x, *operands)):
                return None
            matrix, operands = calls.fold(x), calls.fold_operands(operands, facts)
            y_size = None if training else (*x.shape[:-1], weight.shape[0])
        given = (matrix, weight, *vectors, operands)
        spends_x = self._spends(tensors, facts)
        made = calls.executable_for_call(given, facts, training, training, y_size, spends_x)
        return _Found(calls.eager_for(made) or made, training, matrix is not x and bool(operands))


def _keeping_its_sum(chain: Chain) -> Chain:
    """The chain with what enters the norm as a result, if that stands in a residual's place: under
    autocast nothing else keeps the residual in fp32, and z besides would take more memory."""
    if chain.norm is None or chain.returns_more:
        return chain
    with_sum = replace(chain, returns_sum=True)
    return with_sum if with_sum.residual_place >= 0 else chain


def _modes(facts: calls.Facts) -> tuple[Any, ...]:
    """What a call depends on besides its tensors; facts[3]: y's dtype under autocast."""
    low = None if facts[3] is None else torch.get_autocast_dtype("cuda")
    return autograd_records(), facts[3], low


@lru_cache(maxsize=1024)
def caller_of(chain: str, strategy: Strategy = "auto", strict: bool = False) -> Caller:
    """The caller where no module has its own; those of a structure know the same."""
    return Caller(chain, strategy, strict, _known(calls.structure_of(chain), strategy, strict))


@lru_cache(maxsize=1024)
def _known(structure: str, strategy: Strategy, strict: bool) -> Kinds[_Found]:
    return Kinds()


def call(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    operands: tuple[Tensor, ...],
    chain: str,
    strategy: Strategy = "auto",
    strict: bool = False,
) -> Results:
    """x (..., K) → y (..., N); and the sum where the chain returns it."""
    check_types(Inputs(x, weight, bias, norm_weight, norm_bias, operands))
    facts: calls.Facts = chain, strategy, strict, None
    if "dropout" in chain:
        operands = with_seeds(operands, Chain.parse(chain).operand_kinds, x.device)
    given = weight, bias, norm_weight, norm_bias
    if is_distributed((x, weight)):
        from epinorm.operator import sharded  # loads torch.distributed.tensor and torch._dynamo

        return sharded.call(caller_of, Inputs(x, *given, operands), facts)
    if not is_strided((x, *given, *operands)):
        if strict or strategy not in ("auto", "reference"):
            raise RuntimeError(
                "sparse and nested tensors are computed by PyTorch's own layers alone"
            )
        if torch.compiler.is_compiling():
            parsed = Chain.parse(chain)
            return reference.linear_norm(x, weight, bias, parsed, norm_weight, norm_bias, operands)
        return calls.layers_of(facts).results(calls.constants_of(facts), x, *given, *operands)
    tensors = (x, *given, *operands)
    if x.dim() == 2:
        return _of_matrices(Inputs(x, *given, operands), facts, tensors)
    check_leading_dimensions(x, operands, Chain.parse(chain))
    folded = Inputs(calls.fold(x), *given, calls.fold_operands(operands, facts))
    found, leading = _of_matrices(folded, facts, tensors), x.shape[:-1]
    if isinstance(found, tuple):
        y, total = (calls.unfold(t, leading) for t in found)
        return y, total
    return calls.unfold(found, leading)


def _of_matrices(inputs: Inputs, facts: calls.Facts, given: tuple[Any, ...]) -> Results:
    """x (M, K) → y (M, N), past the dispatcher where nothing waits there. given: the tensors before
    x and operands were folded; where autograd records, y may have their leading dimensions.

    That saves two thirds of a call's overhead. The operator itself is called for everything that
    hangs on it: compiling, autocast, torch.func, tensor subclasses, modes, tracing, profiling.
    """
    folded = inputs[:6]
    tensors = (*inputs[:5], *inputs.operands)
    if torch.compiler.is_compiling() or not (is_undisturbed() and has_plain_types(tensors)):
        operator = linear_norm_sum if returns_more(facts[0]) else linear_norm
        return operator(*folded, *facts)
    if not wants_gradient(*tensors):
        return calls.run_inference(folded, facts)
    executable = calls.executable_for_call(folded, facts, True, True)
    if (eager := calls.eager_for(executable)) is not None:
        return eager.results(calls.constants_of(facts), *given)
    return differentiable(executable, facts, given)


def with_seeds(
    operands: tuple[Tensor, ...], kinds: Sequence[str], device: torch.device
) -> tuple[Tensor, ...]:
    """The operands with seeds drawn where the chain takes them, if all of these were left out."""
    missing = kinds.count("seed")
    if len(operands) != len(kinds) - missing:
        return operands  # they were given; else the checks say what is wrong
    seeds, rest = iter(draw_seeds(missing, device)), iter(operands)
    return tuple(next(seeds if kind == "seed" else rest) for kind in kinds)
