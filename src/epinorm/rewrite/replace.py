"""Put rewritten forwards into a model without changing anything else about it.

A module keeps its identity, parameters, children, hooks and attributes. Only its class changes, to
a subclass of its own class whose ``forward`` runs the rewritten code where that holds and the
class's own ``forward`` where it does not.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import fx, nn

from epinorm.rewrite.program import (
    Analysis,
    Parameters,
    Program,
    Settings,
    analyse,
    compile_program,
    unfused_program,
)
from epinorm.rewrite.spelling import plain_type
from epinorm.rewrite.trace import Silent, Untraceable

__all__ = ["analyse_modes", "fuse_module", "not_replaceable", "settings_of", "unfuse_module"]

_PROGRAMS = "_epinorm_programs"
_MAX_PROGRAMS = 8
_FUSED = "_epinorm_fused"


class FusedModule(Silent):
    """What every fused module's class has besides its own class; see ``fused_class``."""

    _epinorm_original: type[nn.Module]
    _epinorm_settings: Settings
    _epinorm_parameters: Parameters

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = object.__getattribute__(self, "__getstate__")()
        if isinstance(state, dict):
            state = {key: value for key, value in state.items() if key != _PROGRAMS}
        return _restore, (self._epinorm_original, self._epinorm_settings), state

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        _prepare(self)  # type: ignore[arg-type]


def _restore(cls: type[nn.Module], settings: Settings) -> nn.Module:
    """Make the empty object that a pickle or a copy then fills with state."""
    try:
        fused = fused_class(cls, settings)
    except Untraceable:  # its forward was edited since
        fused = cls
    return object.__new__(fused)


def fused_class(cls: type[nn.Module], settings: Settings) -> type[nn.Module]:
    """The subclass of ``cls`` that runs rewritten forwards, one for each; raises Untraceable."""
    made: dict[Settings, type[nn.Module]] | None = cls.__dict__.get(_FUSED)
    if made is None:  # on the class itself, so that they are freed with it
        made = {}
        type.__setattr__(cls, _FUSED, made)
    if settings not in made:
        made[settings] = _make_class(cls, settings)
    return made[settings]


def _make_class(cls: type[nn.Module], settings: Settings) -> type[nn.Module]:
    parameters = Parameters.of(cls)
    original = cls.forward

    @functools.wraps(original)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        values = parameters.bind(args, kwargs)
        if values is None:
            return original(self, *args, **kwargs)
        for program in self.__dict__.get(_PROGRAMS, ()):
            if program.accepts(self, values):
                break
        else:
            if torch.compiler.is_compiling():
                return original(self, *args, **kwargs)
            program = _add_program(self, values)
        if program is None or program.run is None:
            return original(self, *args, **kwargs)
        return program(self, values)

    namespace = {
        "forward": forward,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "_epinorm_original": cls,
        "_epinorm_settings": settings,
        "_epinorm_parameters": parameters,
    }
    try:
        metaclass: Any = type(cls)
        return metaclass(cls.__name__, (FusedModule, cls), namespace)
    except Exception as error:
        raise Untraceable(f"its class cannot be extended: {error}") from error


def _add_program(module: nn.Module, values: tuple[Any, ...]) -> Program | None:
    """Trace the module for a call that no program fits; None: the call cannot be traced."""
    cls: Any = type(module)
    arguments = cls._epinorm_parameters.kinds(values)
    programs = module.__dict__.setdefault(_PROGRAMS, [])
    if arguments is None or len(programs) >= _MAX_PROGRAMS:
        _say(module, "its arguments or attributes differ from call to call", arguments is not None)
        return None
    try:
        program = compile_program(analyse(module, arguments, None), cls._epinorm_settings)
    except Untraceable as error:
        program = unfused_program(tuple(arguments.values()), str(error))
    programs.append(program)
    _say(module, program.reason, program.run is None and program.reason != "")
    return program


def _say(module: nn.Module, reason: str, unfused: bool) -> None:
    if unfused:
        warnings.warn(
            f"epinorm: this call of {type(module).__name__} runs unfused: {reason}", stacklevel=4
        )


def settings_of(module: nn.Module) -> Settings | None:
    """The settings that a fused module runs with; None for a module that is not fused."""
    return type(module).__dict__.get("_epinorm_settings")


def not_replaceable(module: nn.Module) -> str | None:
    """Why the module's forward cannot be replaced; None where it can."""
    cls = plain_type(module)
    if isinstance(module, torch.jit.ScriptModule):
        return "it is a TorchScript module"
    if isinstance(module, fx.GraphModule):
        return "it is a GraphModule, whose code is its own"
    if "forward" in module.__dict__:
        return "its forward was replaced on the object"
    reduces = (cls.__reduce_ex__, cls.__reduce__) != (object.__reduce_ex__, object.__reduce__)
    return "its class defines how it is pickled" if reduces else None


def analyse_modes(module: nn.Module) -> list[Analysis]:
    """Analyse a call with tensors for all required arguments, in the module's mode and the other.

    The second is left out where train() and eval() cannot differ. Raises Untraceable.
    """
    arguments = Parameters.of(plain_type(module)).defaulted()
    if reason := not_replaceable(module):
        raise Untraceable(reason)
    now = analyse(module, arguments, module.training)
    if not now.depends_on_training:
        return [now]
    return [now, analyse(module, arguments, not module.training)]


def _programs(module: nn.Module, settings: Settings) -> list[Program]:
    return [compile_program(a, settings) for a in analyse_modes(module)]


def _prepare(module: nn.Module) -> None:
    """Make the programs of a restored module; one that is not complete yet makes them later."""
    settings = settings_of(module)
    try:
        if settings is not None:
            module.__dict__[_PROGRAMS] = _programs(module, settings)
    except Untraceable:
        module.__dict__.pop(_PROGRAMS, None)


def fuse_module(module: nn.Module, settings: Settings) -> bool:
    """Give one module a rewritten forward; False where it holds no chain that can be fused."""
    unfuse_module(module)
    if not any(True for _ in module.children()) and not module._parameters:
        return False
    try:
        programs = _programs(module, settings)
        if not any(program.run for program in programs):
            return False
        module.__class__ = fused_class(type(module), settings)
    except Untraceable:
        return False
    module.__dict__[_PROGRAMS] = programs
    return True


def unfuse_module(module: nn.Module) -> None:
    """Give a fused module its own class back."""
    if settings_of(module) is not None:
        module.__class__ = plain_type(module)
        module.__dict__.pop(_PROGRAMS, None)
