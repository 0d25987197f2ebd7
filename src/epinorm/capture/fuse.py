"""``fuse``: TorchDynamo captures what a model computes, our pass replaces its chains, in place.

Only ``_compiled_call_impl`` of the model changes, which nn.Module asks for at each call and leaves
out of copies and pickles. What Dynamo cannot capture runs the model's own code.
"""

from __future__ import annotations

import sys
import threading
import warnings
from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any, TypeVar

import torch
import torch._dynamo as dynamo
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from epinorm.backends.prepack import marked
from epinorm.backends.unpromised import saving_hooks
from epinorm.capture.dynamo import Callback, capture, run_last_first
from epinorm.capture.paying import Settings
from epinorm.capture.rewriting import Recorder
from epinorm.capture.unchanged import Unchanged, as_before
from epinorm.capture.watched import Watched
from epinorm.chain import Rounding
from epinorm.chain.chain import check_rounding
from epinorm.operator import calls
from epinorm.precision import convolutions_take_tf32, fp32_precision
from epinorm.problem import Strategy, check_strategy
from epinorm.said import is_new, log_once

M = TypeVar("M", bound=nn.Module)
_MOST_CAPTURES = 16

_is_profiling = torch._C._autograd._profiler_enabled
_waiting_transforms = torch._C._functorch.peek_interpreter_stack
_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_script_tracing = torch._C._is_tracing
_is_compiling = torch.compiler.is_compiling
_symbolic_trace: Any = torch.fx._symbolic_trace
_is_symbolic_tracing = getattr(
    _symbolic_trace, "is_fx_symbolic_tracing", _symbolic_trace.is_fx_tracing
)
_callback_of_thread = torch._C._dynamo.eval_frame.get_eval_frame_callback
_eval_frame: Any = dynamo.eval_frame
_DELAYING_STANCES = ("eager_then_compile", "aot_eager_then_compile")
"""Under which Dynamo looks for a backend where ours is not, and raises."""


def _innermost_units(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """What is captured by itself, by name: the modules that ``fully_shard`` made, but for those
    around others, or what DistributedDataParallel wraps."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return [("module", model.module)]
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []

    def units(within: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(n, m) for n, m in within.named_modules() if isinstance(m, fsdp.FSDPModule)]

    return [(name, unit) for name, unit in units(model) if len(units(unit)) == 1]


_CALLS_AS_WRITTEN, _MOST_AS_WRITTEN = 256, 4096
"""After a call that gained nothing; four times as many after the next one, up to the latter."""
_MOST_KINDS = 1024
_FIRST_LOOK, _MOST_KNOWN = 4, 4
"""Of calls by Python the first behind which it is looked whether native code can run the next ones,
then twice as many each time; and how many kinds of calls that does."""
_PLAIN = (int, float, bool, str, type(None))


def _likeness(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What calls have in common that gain the same, as far as can be seen at once; None for those
    with arguments that are looked into nowhere here."""
    given = args if not kwargs else (*args, *kwargs.values())
    facts: list[Any] = [model.training, torch.is_grad_enabled(), fp32_precision(), len(marked)]
    facts += (convolutions_take_tf32(), torch.backends.cuda.mem_efficient_sdp_enabled())
    facts.append(torch._C._len_torch_function_stack())
    facts += kwargs
    if torch._C._is_any_autocast_enabled():
        facts += [(torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in _DEVICES]
    for value in given:
        if isinstance(value, Tensor) and not value.is_nested:
            facts += (value.shape, value.dtype, value.device, value.requires_grad)
        elif isinstance(value, _PLAIN):
            facts.append(value)
        else:
            return None
    return tuple(facts)


_DEVICES = ("cuda", "cpu")


class _Calls(threading.local):
    """How many of this thread's calls ran what was captured by Python."""

    by_python = 0


class Fused:
    """The state of one fused model: its settings, and what was captured of it.

    Where ``fully_shard`` was called, before ``fuse`` or after, each innermost unit is captured by
    itself and without its hooks, which gather its parameters: Dynamo does not capture these.
    units: those within the model, by name; the model's own code runs around them. leaves_rest:
    there may be chains in that.
    """

    def __init__(self, model: nn.Module, settings: Settings, name: str = "") -> None:
        self.settings, self.name = settings, name
        self.units: dict[str, nn.Module] = {}
        self.is_unit = self.leaves_rest = False
        self.of_class: type | None = None
        self.replaced = model.__dict__.get("_compiled_call_impl")
        self.times = 0
        self.as_written: dict[Any, int] = {}
        self.gained_nothing: dict[Any, int] = {}
        self.known: list[Unchanged] = []
        self.calls = _Calls()
        calls.remembering.add(self)
        self.capture(model)
        self.call = _calling(model, self)
        self.call.__dict__["_epinorm"] = self

    def capture_again(self, model: nn.Module) -> bool:
        """Begin anew for classes that changed; False if they keep changing."""
        self.times += 1
        if self.times > _MOST_CAPTURES:
            name = type(model).__name__
            log_once(f"{name} runs its own code, unfused: its classes keep changing")
            return False
        self.capture(model)
        return True

    def forget(self) -> None:
        """Look again at each call whether anything is gained."""
        self.as_written.clear()
        self.gained_nothing.clear()
        self.known.clear()

    def run(
        self, own: Callable[..., Any], model: nn.Module, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """What was captured; or, where calls like this one gained nothing, the model's own code,
        which then costs nothing but this look. Now and then what was captured runs all the same,
        as there may be more to gain in a model that has changed. Under hooks for saved tensors it
        always does: checkpointing compares what two runs of a call save, which is not the same."""
        looks = self.as_written and saving_hooks(False) is None
        key = _likeness(model, args, kwargs) if looks else None
        if key is not None and (left := self.as_written.get(key, 0)) > 0:
            self.as_written[key] = left - 1
            return own(*args, **kwargs)
        before, by_python = self.recorder.uses.count, self.calls.by_python
        run = self.run_unit if self.is_unit else self.go
        # Checkpointing runs a call again, which is to save, and to drop, the same.
        may_be_run_again = model.training or saving_hooks(False) is not None
        if may_be_run_again:
            run_last_first(False)
        try:
            result = run(model, *args, **kwargs)
        finally:
            if may_be_run_again:
                run_last_first(True)
        if self.calls.by_python == by_python:
            return result
        if self.callback.skipped:
            self.callback.trust()
            return result
        if self.recorder.uses.count > before or self.settings.strict:
            return result
        if (key := key or _likeness(model, args, kwargs)) is not None:
            if len(self.as_written) >= _MOST_KINDS:
                self.forget()
            times = self.gained_nothing[key] = self.gained_nothing.get(key, -1) + 1
            self.as_written[key] = min(_CALLS_AS_WRITTEN << 2 * times, _MOST_AS_WRITTEN)
        return result

    def capture(self, model: nn.Module) -> None:
        """Forget what was captured; the next call begins anew."""
        self.forget()
        self.recorder = Recorder(self.settings, model, self.name)
        self.captured, self.callback = capture(model, self.recorder, self.is_unit)
        self.go: Callable[..., Any] = self.run_captured

    def run_captured(self, *given: Any, **kwargs: Any) -> Any:
        """What was captured, by Python; now and then, what native code may run for calls like this
        one is looked for."""
        before = self.recorder.uses.count
        result = self.captured(*given, **kwargs)
        self.calls.by_python = count = self.calls.by_python + 1
        if (
            (count & (count - 1) == 0 and count >= _FIRST_LOOK)
            and type(result) is Tensor
            and self.recorder.uses.count > before
            and not (saving_hooks(False) or _is_profiling())  # such calls are Python's
        ):
            self.look_for_native(given, kwargs)
        return result

    def look_for_native(self, given: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Let native code run calls like this one from now on, if it can."""
        names = ("own", "model") if self.is_unit else ("model",)
        arguments = dict(zip(names, given, strict=False))
        arguments |= {"args": given[len(names) :], "kwargs": kwargs}
        found = self.callback.unchanged(arguments)
        if found is not None:
            self.known.insert(0, found)
            del self.known[_MOST_KNOWN:]
            self.go = as_before(self.known, self.run_captured)

    def find_units(self, model: nn.Module) -> None:
        """Look whether the model was sharded since; its class or a capture says when to."""
        self.of_class, self.recorder.saw_frames = type(model), False
        units = dict(_innermost_units(model))
        is_unit = units.pop("", None) is not None
        for name, unit in units.items():
            if fused_of(unit) is None:
                within = Fused(unit, self.settings, f"{self.name}.{name}".strip("."))
                unit.__dict__["_compiled_call_impl"] = within.call
        self.units = units
        self.leaves_rest = bool(units) and not isinstance(
            model, nn.parallel.DistributedDataParallel
        )
        if self.leaves_rest:
            log_once(f"{type(model).__name__}: what is outside of fully_shard's units is not fused")
        if is_unit != self.is_unit:
            self.is_unit = is_unit
            self.capture(model)

    def run_unit(self, model: nn.Module, /, *args: Any, **kwargs: Any) -> Any:
        """The model's own hooks around its captured forward."""
        if "forward" in model.__dict__:
            return model._call_impl(*args, **kwargs)
        own = model.forward
        if not isinstance(own, MethodType) or own.__self__ is not model:
            log_once(f"{type(model).__name__} runs its own code, unfused: its forward is no method")
            return model._call_impl(*args, **kwargs)
        model.__dict__["forward"] = partial(self.go, own.__func__, model)
        try:
            return model._call_impl(*args, **kwargs)
        finally:
            del model.__dict__["forward"]


def _calling(model: nn.Module, fused: Fused) -> Callable[..., Any]:
    """What nn.Module calls in the place of ``_call_impl``."""
    own = model._call_impl
    name = type(model).__name__

    def call(*args: Any, **kwargs: Any) -> Any:
        # DataParallel's replicas share this function, but not what it is for.
        caller = sys._getframe(1).f_locals.get("self", model)
        if caller is not model and isinstance(caller, nn.Module):
            log_once(f"{name}: a replica runs its own code, unfused")
            return caller._call_impl(*args, **kwargs)
        if (
            _waiting_transforms() is not None
            or _dispatch_modes()
            or _is_script_tracing()
            or _is_compiling()
            or _eval_frame._stance.stance in _DELAYING_STANCES
            or _callback_of_thread() is not None
            or _is_symbolic_tracing()
            or _has_any_global_hook()
        ):
            return _as_written(own, name, args, kwargs)
        for value in args if not kwargs else (*args, *kwargs.values()):
            if isinstance(value, Tensor) and value.is_nested:
                # Dynamo's guards of other calls would end the process: they ask for strides.
                log_once(f"{name} runs its own code on nested tensors, unfused")
                return own(*args, **kwargs)
        if fused.of_class is not model.__class__ or fused.recorder.saw_frames:
            fused.find_units(model)
        if fused.units:
            return own(*args, **kwargs)
        if fused.recorder.watched.has_changed() and not fused.capture_again(model):
            return own(*args, **kwargs)
        try:
            return fused.run(own, model, args, kwargs)
        except Exception:
            fused.callback.forgive(wary=not fused.settings.strict)
            raise

    call._torchdynamo_inline = own  # type: ignore[attr-defined]  # for another's capture
    for function in (call, _as_written, log_once, is_new, Watched.has_changed):
        dynamo.eval_frame.skip_code(function.__code__)
    return call


def _as_written(
    own: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Run the model's own code for a transform, a mode or a tracer that wants to see it."""
    callback = _callback_of_thread()
    if callback is not None and not isinstance(callback, Callback):
        reason = "within torch.compile, whose backend may be 'epinorm'"
    elif _waiting_transforms() is not None:
        reason = "under torch.func"
    elif _is_script_tracing() or _is_compiling():
        reason = "while it is traced or exported"
    elif _eval_frame._stance.stance in _DELAYING_STANCES:
        reason = f"under torch.compiler's stance {_eval_frame._stance.stance!r}"
    else:
        reason = "" if callback is not None else "under a dispatch mode"
    if reason:
        log_once(f"{name} runs its own code {reason}, unfused")
    return own(*args, **kwargs)


def checked_settings(strategy: Any, strict: Any, rounding: Any) -> Settings:
    """The settings; raises ValueError for a strategy or rounding that does not exist."""
    check_strategy(strategy)
    return Settings(strategy, bool(strict), check_rounding(rounding))


def fused_of(model: nn.Module) -> Fused | None:
    """What ``fuse`` made of the model; None for one that is not fused."""
    return getattr(model.__dict__.get("_compiled_call_impl"), "_epinorm", None)


def without_forward(model: nn.Module) -> str:
    """What to say of a model without a ``forward`` of its own; empty for one that has it."""
    inherited = getattr(type(model), "forward", None) is nn.Module.forward
    if not inherited or "forward" in model.__dict__:
        return ""
    return (
        f"{type(model).__name__} has no forward, and model(x) is what is fused: fuse the "
        "submodules that are called by themselves."
    )


def fuse(
    model: M, *, rounding: Rounding = "once", strategy: Strategy = "auto", strict: bool = False
) -> M:
    """Compute every Linear → pointwise* → norm → pointwise* of the model as one operation.

    Works on the model itself and returns it. TorchDynamo captures what a call computes, at the
    first call and at calls that differ in more than a tensor's size; the rest of it runs as
    without, but for large fp32 attention on Hopper, which follows the setting for products. Class,
    parameters, state_dict, hooks, modes and attributes stay as they are and are read at each call.
    Copies and pickles of the model are not fused. ``explain`` says what is fused and what is not.

    ``rounding``, ``strategy`` and ``strict`` are those of ``linear_norm``; under ``strict`` a chain
    that is found and cannot be fused is a RuntimeError at the call too. Warns of a model without a
    ``forward``: calls of its methods and submodules are not captured. Raises TypeError for anything
    but an nn.Module and ValueError for an unknown strategy or rounding.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    settings = checked_settings(strategy, strict, rounding)
    unfuse(model)
    if isinstance(model, torch.jit.ScriptModule):
        log_once(f"{type(model).__name__} is TorchScript: it runs as it is, unfused")
        return model
    if said := without_forward(model):
        warnings.warn(f"epinorm: {said}", stacklevel=2)
    model.__dict__["_compiled_call_impl"] = Fused(model, settings).call
    return model


def unfuse(model: M) -> M:
    """Undo ``fuse`` on the model and on all modules within it, and return it."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    for module in model.modules():
        fused = fused_of(module)
        if fused is not None:
            del module.__dict__["_compiled_call_impl"]
            if fused.replaced is not None:
                module.__dict__["_compiled_call_impl"] = fused.replaced
    return model
