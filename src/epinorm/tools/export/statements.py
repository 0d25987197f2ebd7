"""Where in the text of ``forward`` a captured chain is computed: by whole statements or not at all.

So ``ModelNew.forward`` is the user's own text, with a chain's statements under an ``if``. A node of
the graph belongs to the statement of ``forward``'s body that its stack trace names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from epinorm.capture.found import Found
from epinorm.capture.purity import is_pure
from epinorm.tools.kernelbench.problem import target_of


@dataclass(frozen=True)
class Span:
    """Statements ``first`` to ``last`` of forward's body, which compute a chain and nothing else.

    ``names``: the local variables that hold a node's value where the first of them begins;
    ``target``: the variable that takes the chain's value, None where it is returned.
    """

    first: int
    last: int
    names: Mapping[fx.Node, str]
    target: str | None


class Body:
    """The statements of one ``forward``, and the nodes of a graph captured from it.

    ``file``: as stack traces name it; ``arguments``: forward's parameters and their nodes;
    ``broken``: stack traces of what is not in the graph.
    """

    def __init__(
        self,
        file: str,
        forward: ast.FunctionDef,
        graph: fx.Graph,
        arguments: Mapping[str, fx.Node],
        broken: Iterable[str] = (),
    ) -> None:
        self.statements = forward.body
        self.arguments = arguments
        self._line = re.compile(rf'File "{re.escape(file)}", line (\d+)')
        self._nodes: list[list[fx.Node]] = [[] for _ in self.statements]
        self._index: dict[fx.Node, int] = {}
        for node in graph.nodes:
            known = node.op not in ("placeholder", "output")
            index = self._statement_at(node.meta.get("stack_trace") or "") if known else None
            if index is not None:
                self._nodes[index].append(node)
                self._index[node] = index
        self._broken = {self._statement_at(trace) for trace in broken}

    def _statement_at(self, trace: str) -> int | None:
        for line in map(int, self._line.findall(trace)):
            for index, statement in enumerate(self.statements):
                if statement.lineno <= line <= (statement.end_lineno or statement.lineno):
                    return index
        return None

    def ends(self, node: fx.Node) -> int | None:
        """The statement whose value the node is: what it assigns to one name, or returns."""
        index = self._index.get(node)
        if index is None or self._nodes[index][-1] is not node or index in self._broken:
            return None
        statement = self.statements[index]
        return index if isinstance(statement, ast.Return) or target_of(statement) else None

    def span(self, found: Found) -> Span | str:
        """The statements that a chain can stand for; a str: why there are none."""
        first, last = self._index.get(found.linear.nodes[0]), self.ends(found.nodes[-1])
        if first is None or last is None:
            return "it begins or ends in the midst of a statement: give it lines of its own"
        inside = set(found.nodes)
        for node in (n for part in self._nodes[first : last + 1] for n in part):
            used = [u for u in node.users if not first <= self._index.get(u, -1) <= last]
            if node not in inside and (used or not is_pure(node)):
                return f"{node.name} is computed between its operations, in the same statements"
        if later := self._needed_later(first, last):
            return f"its value on the way, {later}, is read after it"
        statement = self.statements[last]
        target = None if isinstance(statement, ast.Return) else target_of(statement)
        return Span(first, last, self._names_before(first), target)

    def _names_before(self, index: int) -> dict[fx.Node, str]:
        known = dict(self.arguments)
        for statement, nodes in zip(self.statements[:index], self._nodes[:index], strict=True):
            target = target_of(statement)
            value = getattr(statement, "value", None)
            alias = known.get(value.id) if isinstance(value, ast.Name) else None
            for name in _stored(statement):
                known.pop(name, None)
            node = nodes[-1] if nodes else alias
            if target is not None and node is not None:
                known[target] = node
        return {node: name for name, node in known.items()}

    def _needed_later(self, first: int, last: int) -> str | None:
        """A variable that the statements set on their way and that a later one reads."""
        names = {n for s in self.statements[first : last + 1] for n in _stored(s)}
        names.discard(target_of(self.statements[last]) or "")
        for statement in self.statements[last + 1 :]:
            read = names & _loaded(statement)
            if read:
                return min(read)
            names -= _stored(statement)
        return None


def _names(statement: ast.stmt, context: type[ast.expr_context]) -> set[str]:
    found = [n for n in ast.walk(statement) if isinstance(n, ast.Name)]
    return {n.id for n in found if isinstance(n.ctx, context)}


def _stored(statement: ast.stmt) -> set[str]:
    return _names(statement, ast.Store)


def _loaded(statement: ast.stmt) -> set[str]:
    of_augmented = {target_of(statement) or ""} if isinstance(statement, ast.AugAssign) else set()
    return _names(statement, ast.Load) | of_augmented


def parameters_of(forward: ast.FunctionDef) -> Sequence[str]:
    """The names of forward's arguments but self."""
    given = forward.args
    return [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)][1:]
