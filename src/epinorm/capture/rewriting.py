"""Replace the chains of a captured graph by calls of the operation, and record what was found."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from epinorm.capture.aliasing import AsCaptured, changed_inputs
from epinorm.capture.attention import close_unused, open_functions, tidy
from epinorm.capture.batch_norm import Lowered, batch_norm_of
from epinorm.capture.chains import Search
from epinorm.capture.convolution import open_convolutions
from epinorm.capture.distributed import as_in_eager
from epinorm.capture.found import Found, Place
from epinorm.capture.heads import open_heads
from epinorm.capture.likes import make_apart
from epinorm.capture.moves import moved
from epinorm.capture.operands import as_matrix, as_own, expanded_like, one_each, rows_like
from epinorm.capture.parts import open_parts
from epinorm.capture.paying import Settings, may_pay, pays, why_left, with_paying_dropout
from epinorm.capture.purity import (
    changed_argument,
    may_be_changed,
    tensor_of,
    value_of,
)
from epinorm.capture.running import Updating
from epinorm.capture.seeds import draw_at_once
from epinorm.capture.sites import Captured, Site, layer_of, problem_of, record
from epinorm.capture.spelling import checkpoints
from epinorm.capture.spent import let_spend
from epinorm.capture.tf32_attention import take_at_calls
from epinorm.capture.together import groups_of, put_together
from epinorm.capture.unwinding import leave_what_is_entered, running
from epinorm.capture.watched import Watched
from epinorm.chain import BatchNorm, GroupNorm
from epinorm.chain.reference import Results
from epinorm.operator.dispatch import Caller, Uses

_log = logging.getLogger("epinorm")

Apply = Callable[..., Results]
"""(x, weight, bias, norm_weight, norm_bias, operands) → y, or y and the sum, for one chain."""

ApplyFor = Callable[[Place, str], Apply]


class Recorder:
    """Rewrites each graph that is captured of a model, to run as eager does but for its chains, and
    notes what it saw.
    """

    def __init__(self, settings: Settings, model: nn.Module, name: str = "") -> None:
        self.settings = settings
        self.saw_frames = False
        self._name = name
        self.graphs: list[Captured] = []
        self.watched = Watched()
        self._model = model
        self._callers: dict[tuple[str, str], Caller] = {}
        self.uses = Uses()

    def __call__(self, gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        model, modules = self._model, self._model.named_modules()
        names = {str(id(m)): f"{self._name}.{name}".strip(".") for name, m in modules}

        def caller(place: Place, chain: str) -> Apply:
            return self._caller(layer_of(place.linear, names), chain, place.has_norm)

        as_captured = AsCaptured(gm)
        found = rewrite(gm, caller, self.settings)
        placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
        inputs = dict(zip(placeholders, example_inputs, strict=True))
        captured = record(gm, found.places, found.linears, names, inputs)
        if self.settings.strategy != "reference" and self.settings.rounding == "once":
            captured = replace(captured, takes_attention=take_at_calls(gm, self.uses) > 0)
        self.graphs.append(captured)
        where = f"{type(model).__name__} {self._name}".strip()
        _log.info("epinorm: %s: %s", where, captured)
        self.watched.look_at({type(m) for m in model.modules()})
        unfused = [site for site in captured.sites if site.obstacle]
        if self.settings.strict and unfused:
            return _refusing(unfused[0])
        return as_captured.guarded(running(gm))

    def _caller(self, where: str, chain: str, normed: bool) -> Apply:
        """One for each place, whichever graph it is in: what it has learnt of a size stays."""
        caller = self._callers.get((where, chain))
        if caller is None:
            strategy, strict = self.settings.of(normed)
            caller = Caller(chain, strategy, strict, uses=self.uses)
            name = "linear_norm" if normed else "linear"
            caller.__dict__.update(__name__=name, __module__="epinorm")
            self._callers[where, chain] = caller
        return caller

    def see(self, frame: Any) -> None:
        """Watch what a captured frame reads, also where it had no graph."""
        self.saw_frames = True
        self.watched.look_at_globals(frame.f_code, frame.f_globals)


def _refusing(site: Site) -> Callable[..., Any]:
    def refuse(*args: Any) -> Any:
        raise RuntimeError(f"strict=True, but {site.where} is not fused: {site.obstacle}")

    return refuse


class Rewritten(NamedTuple):
    """What ``rewrite`` found: where Linears reach norms, and the other Linears."""

    places: list[Place]
    linears: list[Place]


def rewrite(
    gm: fx.GraphModule, apply: ApplyFor, settings: Settings, runs_eagerly: bool = True
) -> Rewritten:
    """Put one call of ``apply(place, chain)`` in the place of each chain with a norm, and of each
    without one that its plan does not leave to PyTorch.

    runs_eagerly: nothing compiles the graph, so what only compilers act on is done here.
    """
    inner = _enter_checkpoints(gm, apply, settings, runs_eagerly)
    make_apart(gm.graph)
    _follow_changes(gm.graph)
    opened = open_functions(gm.graph, always=settings.strategy != "auto")
    by_name = settings.strategy != "auto" or settings.strict
    open_parts(gm.graph, settings.rounding, always=by_name)
    if settings.rounding == "once":
        open_heads(gm.graph, always=by_name)
    open_convolutions(gm.graph, settings, is_guarded=runs_eagerly)
    batch_norms = None if settings.rounding == "eager" else Lowered(gm.graph)
    search = Search(gm.graph, settings.rounding)
    places = [_with_paying_batch_norm(search, p, settings) for p in search.places()]
    linears = [
        replace(p, taken=pays(p, settings), norm=batch_norm_of(p.found.nodes if p.found else ()))
        for p in search.linears()
    ]
    # A BatchNorm by running statistics may have been taken with a Linear that has no other norm.
    without = {node for p in linears if p.found is not None for node in p.found.nodes}
    places = [p for p in places if p.found is not None or p.norm not in without]
    taken = [
        (p, p.found)
        for p in (*(p for p in places if may_pay(p, settings)), *linears)
        if p.found is not None and p.taken
    ]
    fused = close_unused(gm.graph, opened, {node for _, f in taken for node in f.nodes})
    seeds = draw_at_once(search, [found for _, found in taken])
    groups = {}
    if settings.strategy == "auto":
        groups = groups_of(search, linears, problem_of, compiled=not runs_eagerly)
    for place in linears:
        if place.linear in groups and place.linear not in fused:
            group = groups[place.linear]
            made = apply(place, str(group[0].chain))
            fused |= put_together(gm.graph, group, made, fused)
    for place, found in taken:
        if found.nodes[0] in fused:
            continue  # with others of its x
        made = apply(place, str(found.chain))
        fused |= _replace(gm.graph, found, made, fused, seeds.get(found.nodes[-1], ()))
    if batch_norms is not None:
        batch_norms.restore()
    places += [place for place in linears if place.norm is not None]
    linears = [place for place in linears if place.norm is None]
    tidy(gm.graph, opened)
    let_spend(gm.graph)
    if taken or opened or groups:
        gm.graph.lint()
    gm.recompile()
    if runs_eagerly:
        leave_what_is_entered(gm)
    return Rewritten(inner.places + places, inner.linears + linears)


def _with_paying_batch_norm(search: Search, place: Place, settings: Settings) -> Place:
    """A place as it is taken; where its BatchNorm is left to PyTorch, its Linear may be a chain."""
    paying = with_paying_dropout(place, settings)
    if place.found is None or not place.found.chain.returns_statistics:
        return paying
    obstacle = paying.obstacle or why_left(place.found, settings)
    if not obstacle:
        return paying
    search.taken.difference_update(place.found.nodes)
    return replace(place, found=None, obstacle=obstacle)


def _follow_changes(graph: fx.Graph) -> None:
    """Where an operation changes a tensor in place, let what comes later read its result.

    It is the same tensor; but now each user says which state of it is meant.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    for node in graph.nodes:
        changed = changed_argument(node)
        if changed is not None:
            for user in list(changed.users):
                if order[user] > order[node]:
                    user.replace_input_with(changed, node)


def _replace(
    graph: fx.Graph,
    found: Found,
    apply: Apply,
    fused: dict[fx.Node, fx.Node],
    seeds: Sequence[fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Put the call in the chain's place; returns what stands for its results now."""

    def now(node: fx.Node | None) -> fx.Node | None:
        return None if node is None else fused.get(node, node)

    n = tensor_of(found.linear.nodes[-1]).shape[-1]

    def channels(node: fx.Node | None) -> fx.Node | None:
        """A tensor of one value a channel as a vector, repeated where parts of a row share it."""
        made, given = now(node), value_of(node)
        if given is None:
            return made
        if given.dim() != 1:
            made = graph.call_method("reshape", (made, -1))
        parts = n // given.numel() if isinstance(n, int) and n else 1
        return made if parts == 1 else graph.call_method("repeat", (made, parts))

    last, kept, inside = found.nodes[-1], found.kept, set(found.nodes)
    with graph.inserting_before(_first_reader(kept, last, inside)):
        operands: list[Any] = []
        x = found.linear.x
        x = moved(graph, fused.get(x, x), found.moves, tensor_of(x).shape[-1])
        shaped, flat = x, _normalizes_a_matrix(found)
        if flat:
            x = graph.call_function(as_matrix, (x,))
        drawn, given_nodes = iter(seeds), enumerate(found.operands)
        for kind in found.chain.operand_kinds:
            if kind == "seed":
                operands.append(next(drawn))
                continue
            index, node = next(given_nodes)
            if kind == "channel":
                operands.append(channels(node))
                continue
            each = now(node)
            if kind == "row":
                each = graph.call_function(one_each, (each, shaped))
                each = graph.call_function(as_matrix, (each,)) if flat else each
            elif index in found.broadcast:
                each = graph.call_function(expanded_like, (each, shaped, n))
            if kind != "row" and found.views:
                each = graph.call_function(rows_like, (each, x, n))
            operands.append(each)
        norm, weight = found.norm, now(found.linear.weight)
        if found.linear.turned:
            weight = graph.call_method("t", (weight,))
        vectors = map(channels, (found.bias, norm.weight, norm.bias))
        given_all = (x, weight, *vectors, tuple(operands))
        if found.chain.returns_statistics:
            running = norm.running
            apply = Updating(apply, None if running is None else running.momentum)
            if running is not None:
                given_all = (now(running.mean), now(running.variance), *given_all)
        new = graph.call_function(apply, given_all)
        new.meta = dict(found.linear.nodes[-1].meta)

        def result(of: fx.Node, made: fx.Node, views: list[fx.Node]) -> fx.Node:
            if flat:
                made = graph.call_function(rows_like, (made, shaped, n))
            for view in views:
                made = graph.create_node(view.op, view.target, (made, *view.args[1:]), view.kwargs)
                made.meta = dict(view.meta)
            if (flat or views) and of not in views and may_be_changed(of, inside):
                made = graph.call_function(as_own, (made,))
            made = as_in_eager(graph, made, of)
            made.meta["example_value"] = value_of(of)
            of.replace_all_uses_with(made, delete_user_cb=lambda user: user not in inside)
            return made

        if kept is None:
            results = {last: result(last, new, found.views)}
        else:
            y, total = (graph.call_function(operator.getitem, (new, i)) for i in range(2))
            before = found.views[: found.kept_views]
            results = {kept: result(kept, total, before), last: result(last, y, found.views)}
    for node in reversed(found.nodes):
        graph.erase_node(node)
    return results


def _first_reader(kept: fx.Node | None, last: fx.Node, inside: set[fx.Node]) -> fx.Node:
    """Where what stands for a chain's results must be there: at its end, or before what reads
    the value that enters its norm."""
    if kept is None:
        return last
    node = kept.next
    while node is not last and (node in inside or kept not in node.all_input_nodes):
        node = node.next
    return node


def _normalizes_a_matrix(found: Found) -> bool:
    """Whether the rows of the Linear's x must be those of one matrix first, as the norm's are."""
    return isinstance(found.norm.norm, (BatchNorm, GroupNorm)) and len(found.leading) != 1


def _enter_checkpoints(
    gm: fx.GraphModule, apply: ApplyFor, settings: Settings, runs_eagerly: bool
) -> Rewritten:
    """Fuse what the model checkpoints; Dynamo's own operator leaves checkpointing to a compiler."""
    found = Rewritten([], [])
    for node, inner in checkpoints(gm):
        inner.meta[_CHANGED] = changed_inputs(inner)
        places, linears = rewrite(inner, apply, settings, runs_eagerly)
        found.places.extend(places)
        found.linears.extend(linears)
        if runs_eagerly:
            node.target = run_checkpointed
    return found


def run_checkpointed(inner: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """``checkpoint`` on a captured function, with the settings of the model's call."""
    context = inner.meta.get("_checkpoint_context_fn")
    if context is not None:
        kwargs["context_fn"] = context
    kwargs["use_reentrant"] = False  # parameters are arguments here, which both ways serve
    changed = inner.meta.get(_CHANGED, ())
    if not changed:
        return checkpoint(running(inner), *args, **kwargs)

    def run(*others: Any) -> Any:
        rest = iter(others)
        return running(inner)(*(a if i in changed else next(rest) for i, a in enumerate(args)))

    return checkpoint(run, *(a for i, a in enumerate(args) if i not in changed), **kwargs)


_CHANGED = "epinorm_changed"
"""In the meta of a graph that is checkpointed: the places of arguments that it changes, a
BatchNorm's buffers. As in eager they are not saved, which would forbid that."""
