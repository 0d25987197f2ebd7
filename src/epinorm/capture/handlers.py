"""Whether a model's own Python may handle what the operation raises that Dynamo traces there."""

from __future__ import annotations

import builtins
import contextlib
import dis
from collections import ChainMap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

_RAISED = (RuntimeError, IndexError, ValueError, AssertionError)
"""What an operation raises for its values or for memory. For types, as a TypeError, Dynamo sees it
raised while it traces."""
_RETHROWING = ("torch", "contextlib")
"""Whose handlers hand on what an operation raises."""


_ENDING = ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT", "RETURN_VALUE", "RETURN_CONST")
"""What comes before ``RERAISE`` only where an error may end."""


def _is_of(module: Any, packages: tuple[str, ...]) -> bool:
    return str(module).partition(".")[0] in packages


def _catches(kind: Any) -> bool:
    """kind: what stands behind ``except``. Not an exception that a library derives for itself."""
    if isinstance(kind, tuple):
        return any(map(_catches, kind))
    if not isinstance(kind, type) or any(issubclass(raised, kind) for raised in _RAISED):
        return True
    return issubclass(kind, _RAISED) and _is_of(kind.__module__, ("builtins", "torch"))


def _handles(tx: Any, start: Any) -> bool:
    """Whether what starts there, where an error goes or the next ``except`` does, may end it. The
    end of a ``with`` is not asked here. Bytecode that is of no known form may."""
    names = ChainMap(tx.f_globals, vars(builtins))
    kinds: list[Any] = []
    known = True
    for inst, following in pairwise(tx.instructions[tx.indexof[start] :]):
        match inst.opname:
            case "PUSH_EXC_INFO" | "NOP":
                pass
            case "WITH_EXCEPT_START" | "RERAISE":  # the end of a finally, or no except was left
                return False
            case "LOAD_GLOBAL" | "LOAD_NAME" if known:
                kinds.append(names.get(inst.argval))
            case "LOAD_ATTR" if known and kinds:
                kinds[-1] = getattr(kinds[-1], inst.argval, None)
            case "BUILD_TUPLE" if known:
                kinds = [tuple(kinds)]
            case "CHECK_EXC_MATCH" if known and following.target is not None:
                return _catches(tuple(kinds)) or _handles(tx, following.target)
            case "POP_TOP" if known and not kinds:
                return True  # a bare except
            case name if name in _ENDING:
                return True
            case _:  # a finally, most likely
                known = False
    return True


def _may_return_true(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    instructions = dis.get_instructions(code) if code is not None else ()
    for before, inst in pairwise(instructions):
        if inst.opname in ("RETURN_VALUE", "RETURN_CONST"):
            value = before if inst.opname == "RETURN_VALUE" else inst
            if value.opname not in ("LOAD_CONST", "RETURN_CONST") or value.argval:
                return True
    return False


def _frames(tx: Any) -> Iterator[Any]:
    """Those that are called at present, innermost first."""
    while tx is not None:
        yield tx
        tx = tx.parent


def _ends_errors(context: Any, tx: Any) -> bool:
    """Whether a context manager of Python's that is entered may do so."""
    of = type(context.cm_obj)
    if of is contextlib._GeneratorContextManager:
        made, known = getattr(context, "cm_vt", context), tx.output.side_effects
        if not known.has_pending_mutation_of_attr(made, "gen"):
            return True  # it was made elsewhere
        waiting = getattr(known.load_attr(made, "gen"), "inline_tracer", None)
        return waiting is None or _is_protected(waiting)
    return not _is_of(of.__module__, ("torch",)) and _may_return_true(of.__exit__)


def _is_protected(tx: Any) -> bool:
    """Whether an error at the instruction that a frame has reached may end in that frame."""
    if any(_ends_errors(context, tx) for context in tx.active_generic_context_managers):
        return True
    if _is_of(tx.f_globals.get("__name__"), _RETHROWING):
        return False
    entry = tx.current_instruction.exn_tab_entry
    seen: list[Any] = []
    while entry is not None and not any(entry.target is other for other in seen):
        if entry.target.opname == "PUSH_EXC_INFO" and _handles(tx, entry.target):
            return True
        seen.append(entry.target)  # what goes on from there goes to the next one around it
        entry = entry.target.exn_tab_entry
    return False


def is_handled(tx: Any) -> bool:
    """Whether the model may handle an error that is raised where this translator is."""
    return any(map(_is_protected, _frames(tx)))
