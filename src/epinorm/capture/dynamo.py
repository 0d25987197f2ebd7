"""TorchDynamo with settings of our own: a call as graphs, and Python where there is none."""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch._dynamo as dynamo
from torch import Tensor, fx, nn
from torch._C._dynamo.eval_frame import (
    _FrameAction,
    _FrameExecStrategy,
    set_code_exec_strategy,
)
from torch._dynamo import trace_rules
from torch._dynamo.types import ConvertFrameReturn
from torch._dynamo.utils import CleanupManager
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils import _pytree as pytree

from epinorm.backends.unpromised import saving_hooks
from epinorm.capture.as_in_eager import as_in_eager
from epinorm.capture.convolution import depends_on_tf32
from epinorm.capture.guards import Owners, guards_as_needed, has_zero
from epinorm.capture.unchanged import Capture, Guarded, Unchanged, unchanged
from epinorm.said import log_once

Backend = Callable[[fx.GraphModule, Any], Callable[..., Any]]
"""From a captured graph and its example inputs to what runs in its place. One that has a method
``see`` is told of each frame (``f_code``, ``f_globals``) that is captured, also without a graph."""


# Dynamo's settings while it captures a fused model, whatever the user has set for others. First
# those that trade correctness for time: hooks added later, tensors that change in place inside a
# module, functions' defaults that are bound anew, numpy's own numbers and random stream, the type
# of a failed assert, the roundings of addcmul and its like.
DYNAMO = {
    "skip_nnmodule_hook_guards": False,
    "skip_tensor_guards_with_matching_dict_tags": False,
    "skip_guards_on_constant_func_defaults": False,
    "assume_dunder_attributes_remain_unchanged": False,
    "use_recursive_dict_tags_for_guards": False,
    "guard_nn_modules": True,
    "trace_numpy": False,
    "use_numpy_random_stream": True,
    "rewrite_assert_with_torch_assert": False,
    "enable_dynamo_decompositions": False,
    "capture_func_transforms": False,
    "capture_profiler_record_function": True,
    # Then those that belong to whoever compiles.
    "assume_static_by_default": True,
    "automatic_dynamic_shapes": True,
    "specialize_int": False,
    "specialize_float": False,
    "optimize_ddp": False,
    "recompile_limit": 32,
    "accumulated_recompile_limit": 512,
    "error_on_recompile": False,
    "fail_on_recompile_limit_hit": False,
    "suppress_errors": False,
    "repro_after": None,
    "nested_graph_breaks": False,
    "invalidate_compile_context_weakrefs": True,  # as for PyTorch's own backends: swap_tensors
    # And those that cost time at each call: marks for profilers, a guard in Python for each object
    # that is read in two places, which only serves the recursive tags that are off above.
    "record_runtime_overhead": False,
    "use_lamba_guard_for_object_aliasing": False,
}
_ATTEMPTS = 3
# Each model has its own captures to count, of the frames too that others of its class have: those
# of a forward where the graph breaks. Older PyTorch counts them together.
_KNOWN = inspect.signature(dynamo.eval_frame._optimize).parameters
OF_ITS_OWN = {"isolate_recompiles": True} if "isolate_recompiles" in _KNOWN else {}

_numbers = itertools.count()
_FAKE_TENSORS = logging.getLogger("torch._subclasses.fake_tensor")
"""Says at length what raises while it is traced, which the model's own code is about to raise."""
_NOT_TRACED = _FrameExecStrategy(_FrameAction.SKIP, _FrameAction.SKIP)


def _itself(saved: Tensor) -> Tensor:
    return saved


def _unwrap(graph: fx.GraphModule | None, code: Any, known: dict[str, Any]) -> None:
    """Dynamo wraps a graph's forward, so that nothing within is captured, in three functions of
    Python's at each call. The code of the graph can say so to Dynamo's own look-up, in C++.

    graph: what code calls by a global name, if it was not wrapped for another purpose as well;
    known: the globals."""
    for name in code.co_names:
        inner: Any = getattr(known.get(name), "_torchdynamo_orig_callable", None)
        if graph is not None and getattr(inner, "__self__", None) is graph:
            set_code_exec_strategy(inner.__code__, _NOT_TRACED)
            known[name] = inner


def _reason(error: Exception) -> str:
    """In a frame of its own: one that keeps an error is kept by its traceback, and keeps all that
    it knows."""
    cause = getattr(error, "inner_exception", error)
    said = str(cause).strip().splitlines() or [""]
    return f"{type(cause).__name__}: {said[0]}"


def _is_traced(code: Any) -> bool:
    """False for PyTorch's own files that Dynamo leaves out."""
    return not trace_rules.check(code)


class Callback:
    """What Dynamo calls for a frame that it has not captured yet, under settings of our own.

    A failure to capture leaves the frame to Python: an error of the model's own is raised there as
    without us. A frame that failed is tried again a few times. Where the model raised too, its own
    code runs first at the next call that would be captured, untraced: it may well raise again.

    Dynamo keeps what it captured under this object, as it names no ``_torchdynamo_orig_backend``:
    following such names to the innermost takes a tenth of a small call's instructions.
    """

    def __init__(self, inner: Any, model: nn.Module, see: Callable[[Any], None]) -> None:
        self._inner, self._name, self._see = inner, type(model).__name__, see
        self._model, self._wary = weakref.ref(model), False
        self.own: Any = None  # the code that is captured first, in which others are called
        self.skipped = False  # in the call that is under way a frame runs untraced
        self._failures: Counter[Any] = Counter()
        self._owners: Owners = weakref.WeakSet()
        self._codes: list[weakref.ref[Any]] = []
        self._captures: list[weakref.ref[Any]] = []
        self.graph: fx.GraphModule | None = None  # that is captured; one at a time is
        self.run: Any = None  # what runs it
        self.has_zero = self.convolves = False  # of it

    def __call__(self, frame: Any, *arguments: Any) -> Any:
        code = frame.f_code
        if self._wary and _is_traced(code) and self._may_skip():
            self.skipped = True
            return ConvertFrameReturn(frame_exec_strategy=_NOT_TRACED, apply_to_code=False)
        owners = self._owners if OF_ITS_OWN else None  # tried with these versions alone
        guarded: Guarded = []
        guards = guards_as_needed(lambda: self.has_zero, lambda: self.convolves, owners, guarded)
        settings = {key: v for key, v in DYNAMO.items() if hasattr(dynamo.config, key)}
        try:
            with (
                dynamo.config.patch(settings),
                as_in_eager(),
                mock.patch.object(_FAKE_TENSORS, "disabled", True),
                guards,
            ):
                self.graph, self.has_zero, self.convolves = None, False, False
                result = self._inner(frame, *arguments)
                if (made := result.guarded_code) is not None:
                    self._codes.append(weakref.ref(made.code))
                    _unwrap(self.graph, made.code, frame.f_globals)
                    if code is self.own and self.graph is not None and not self.convolves:
                        graph, known = self.graph.graph, frame.f_globals
                        capture = Capture.of(made.code, graph, self.run, guarded, known)
                        if capture is not None:
                            self._captures.append(capture.keep_with(made.guard_manager))
        except Exception as error:
            result = ConvertFrameReturn()
            self._say(code, _reason(error))
        finally:
            self.graph = self.run = None
        self._see(frame)
        action = result.frame_exec_strategy.cur_action
        if result.guarded_code is None and action == _FrameAction.SKIP:
            self._failures[code] += 1
            if self._failures[code] < _ATTEMPTS:
                result = ConvertFrameReturn(
                    frame_exec_strategy=_FrameExecStrategy(_FrameAction.SKIP, _FrameAction.DEFAULT),
                    apply_to_code=False,
                )
        elif action == _FrameAction.RUN_ONLY:
            self._say(code, "it was captured too often, at each time under other conditions")
        return result

    def free(self) -> None:
        """Let go of what was captured. Dynamo keeps it with the codes of frames, of which those
        where a graph broke belong to the model's class, and keeps all codes in caches."""
        for owner in list(self._owners):
            owner.invalidate("the fused model")
        for known in self._codes:
            if (code := known()) in CleanupManager.instance:
                CleanupManager.instance._remove_id(id(code))

    def unchanged(self, given: dict[str, Any]) -> Unchanged | None:
        """What a later call may be compared with for this one's result by native code alone, for
        the call's arguments by name; None where Python is needed."""
        return unchanged(self._captures, given)

    def forgive(self, wary: bool) -> None:
        """Do not count what failed so far: the model's own code failed too. wary: that code runs
        first from now on."""
        self._wary = wary and (self._wary or any(map(_is_traced, self._failures)))
        self._failures.clear()
        self.skipped = False

    def trust(self) -> None:
        """Capture again: the model's own code did not raise."""
        self._wary = self.skipped = False

    def _may_skip(self) -> bool:
        """Not where another run of the call has to drop, or to save, the same."""
        model = self._model()
        if model is None or saving_hooks(False) is not None:
            return False
        return not any(module.training for module in model.modules())

    def _say(self, code: Any, reason: str) -> None:
        log_once(f"{self._name}: {code.co_qualname} runs its own code here, unfused ({reason})")


run_last_first: Callable[[bool], None] = getattr(
    torch._C._dynamo.eval_frame, "_set_lru_cache", lambda _: None
)
"""Whether of several graphs whose guards fit a frame the one runs that ran last, as PyTorch has it,
or the one that was captured first. PyTorch 2.9 has but the one order."""


def capture(
    model: nn.Module, backend: Backend, without_hooks: bool = False
) -> tuple[Callable[..., Any], Callback]:
    """``model._call_impl`` as Dynamo captures it for the backend: a function of the model and its
    arguments whose code, and so what Dynamo keeps with it, is this model's own. If without_hooks,
    its ``forward``, unbound, is the argument before the model: looked up outside, at less than what
    guards of the look-up take. (Of a bound one PyTorch 2.9 compares the address.)

    The backend is not kept alive.
    """

    def call(model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return model._call_impl(*args, **kwargs)

    def forward(own: Callable[..., Any], model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        return own(model, *args, **kwargs)

    function: Any = forward if without_hooks else call

    # Dynamo keeps what it captured with the code, and what it learnt of sizes under its name.
    name = f"{type(model).__name__}_{next(_numbers)}"
    function.__code__ = function.__code__.replace(co_name=name, co_qualname=name)
    known = weakref.ref(backend)  # Dynamo keeps every backend that it has seen

    def call_backend(gm: fx.GraphModule, example_inputs: Any) -> Any:
        callback.graph, callback.has_zero = gm, has_zero(gm)
        callback.convolves = depends_on_tf32(gm)
        alive = known()
        # What is tried on example values is none of those whose hooks wait for saved tensors.
        with torch.autograd.graph.saved_tensors_hooks(_itself, _itself):
            callback.run = gm.forward if alive is None else alive(gm, example_inputs)
        return callback.run

    def see(frame: Any) -> None:
        if (told := getattr(known(), "see", None)) is not None:
            told(frame)

    context: Any = dynamo.optimize(backend=call_backend, **OF_ITS_OWN)
    inner = getattr(context, "callback", None)  # TORCHDYNAMO_DISABLE leaves none
    callback = Callback(inner, model, see)
    callback.own = function.__code__
    if inner is not None:
        context.callback = callback
        for enter in list(context.enter_exit_hooks):
            if getattr(enter, "__name__", "") == "call_on_enter":
                enter()  # once, not at each call: exports alone ask how old a module is
                context.enter_exit_hooks.remove(enter)
        weakref.finalize(function, callback.free).atexit = False
    return context(function), callback


def run_without_values(
    model: nn.Module,
    backend_for: Callable[[nn.Module], Backend],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Capture a call on copies of the model's tensors and of the inputs that hold no values, for
    the backend that ``backend_for`` gives for the copy.

    No kernel runs, and nothing of the model changes. Raises what copying the model raises, and what
    a model raises that needs a value.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with FakeCopyMode(mode):
        twin = copy.deepcopy(model)

    def without_values(value: Any) -> Any:
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    args, kwargs = pytree.tree_map(without_values, (args, kwargs))
    state = random.getstate()
    try:
        with torch.random.fork_rng(devices=[]), mock.patch.object(_FAKE_TENSORS, "disabled", True):
            backend = backend_for(twin)
            captured, _ = capture(twin, backend)
            captured(twin, *args, **kwargs)
    finally:
        random.setstate(state)
