"""Linears that read one tensor, as the q, k and v of an attention, multiplied as one.

fp32's x is then converted once instead of for each, forward and backward, dX is one product, and
the launches and the host's work of one operation serve all. The weights are put together at each
call, a copy that must be small beside the conversions of x that it saves, and for the backward pass
again, so that it does not wait in memory beside the activations.

Under autocast each weight is copied at each call anyway: a compiler's cast writes them as one.
"""

from __future__ import annotations

import itertools
import operator
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import traceback
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.checkpoint import CheckpointPolicy

from epinorm.backends.engine import plan_for
from epinorm.backends.prepack import keeps, marked
from epinorm.capture.chains import Search
from epinorm.capture.found import Found, Place, gather
from epinorm.capture.purity import storage_of, tensor_of, value_of
from epinorm.capture.spelling import read_linear
from epinorm.operator.undisturbed import has_plain_types, is_under_autocast_alone
from epinorm.problem import CUDA_STRATEGIES, Problem

CAST_TOGETHER = ("cuda",)
"""Devices where the launches saved are worth it."""
_VIEWS = frozenset(
    ("view", "reshape", "flatten", "unflatten", "transpose", "permute", "contiguous")
)


def groups_of(
    search: Search,
    places: Sequence[Place],
    problem_of: Callable[[Found], Problem],
    compiled: bool = False,
) -> dict[fx.Node, list[Found]]:
    """By each one's linear layer, the two or more that are faster as one; compiled: whether a
    compiler joins casts to what puts tensors together."""
    readers: dict[Any, list[Found]] = {}
    gradients_of = _sources_of_gradients(search)
    for place in places:
        found = place.found if place.taken else None
        is_cast = found is None and compiled
        if is_cast and (linear := read_linear(place.linear)) is not None:
            found = gather(linear, (), search.rounding)
        if found is not None and _is_plain(found) and (not is_cast or _is_cast(found)):
            given = [value_of(node) for node in (found.linear.weight, found.bias)]
            asks = tuple(t is not None and t.requires_grad for t in given)
            y = found.nodes[0]
            sources = gradients_of[y] if any(asks) and _wants_gradient(y) else 0
            kind = found.linear.x, found.bias is None, asks, sources, is_cast
            readers.setdefault(kind, []).append(found)
    groups = {}
    for (*_, is_cast), group in readers.items():
        faster = len(group) > 1 and (is_cast or _is_faster(group, problem_of))
        if faster and _is_undisturbed(search, group):
            groups.update(dict.fromkeys([each.nodes[0] for each in group], group))
    return groups


def _sources_of_gradients(search: Search) -> dict[fx.Node, int]:
    """By node, a bit for each result that it has a part in, and for each tensor that is changed by
    it. As one, Linears have a gradient if any has: where a loss reads the result of one alone, the
    others would get zeros for None, which optimizers take for a gradient."""
    found: dict[fx.Node, int] = defaultdict(int)
    bits, effects = itertools.count(), {node for node, _ in search.effects}
    for node in reversed(search.graph.nodes):
        if node in effects:
            found[node] |= 1 << next(bits)
        for given in node.all_input_nodes:
            if node.op == "output":
                found[given] |= 1 << next(bits)
            elif node in effects or _wants_gradient(node):
                found[given] |= found[node]
    return found


def _wants_gradient(node: fx.Node) -> bool:
    values = pytree.tree_leaves(node.meta.get("example_value"))
    return any(isinstance(value, Tensor) and value.requires_grad for value in values)


def _is_cast(found: Found) -> bool:
    """Whether autocast makes copies in 16 bits of its weight and bias, on a GPU."""
    y, read = tensor_of(found.nodes[0]), [value_of(node) for node in found.reads]
    return y.dtype.itemsize == 2 and all(
        t is not None
        and t.device == y.device
        and t.device.type in CAST_TOGETHER
        and t.layout is torch.strided
        and not (t.is_nested or is_traceable_wrapper_subclass(t))
        and (t.dtype == torch.float32 or t is read[0])
        for t in read
    )


def _is_plain(found: Found) -> bool:
    """Whether it is y = x Wᵀ + b of parameters, and all that read y can read parts of rows."""
    if not found.chain.is_linear or found.linear.turned or len(found.nodes) != 1:
        return False
    if any(node.op not in ("placeholder", "get_attr") for node in found.reads[1:]):
        return False
    y = value_of(found.nodes[0])
    if y is None or not all(isinstance(size, int) for size in y.shape):
        return False
    if found.bias is not None and tensor_of(found.bias).shape != y.shape[-1:]:
        return False  # one value for all channels
    part = torch.empty((*y.shape[:-1], 2 * y.shape[-1]), device="meta")[..., : y.shape[-1]]
    return _can_read(found.nodes[0], part)


def _can_read(node: fx.Node, part: Tensor) -> bool:
    """Whether no reader of a node, or of a view of it, needs the rows to be one behind another."""
    for user in node.users:
        if user.op == "output":
            return False
        method = user.op == "call_method" and user.target in _VIEWS
        if method or user.target is operator.getitem:
            name = str(user.target) if method else "__getitem__"
            try:
                made = getattr(part, name)(*user.args[1:], **user.kwargs)
            except (RuntimeError, TypeError):
                return False
            if not _can_read(user, made):
                return False
        elif storage_of(user) == storage_of(node):
            return False
    return True


def _is_faster(found: Sequence[Found], problem_of: Callable[[Found], Problem]) -> bool:
    first = problem_of(found[0])
    n = sum(problem_of(each).n for each in found)
    if first.dtype != torch.float32 or (len(found) - 1) * first.m <= n:
        return False
    return plan_for(replace(first, n=n), "auto").strategy in CUDA_STRATEGIES


def _is_undisturbed(search: Search, found: Sequence[Found]) -> bool:
    """Whether nothing changes what they read between them, nor what they write at all: in place,
    autograd lets no code change one of several views."""
    orders = [search.order[each.nodes[0]] for each in found]
    read = {storage_of(node) for each in found for node in each.reads}
    written = {storage_of(each.nodes[0]) for each in found}
    for node, changed in search.effects:
        memory = {storage_of(tensor) for tensor in changed}
        between = min(orders) < search.order[node] < max(orders)
        if not changed:
            memory = {storage_of(given) for given in node.all_input_nodes} - {None}
        if memory & written or (between and (not changed or memory & read)):
            return False
    return True


def _together(apply: Callable[..., Any], sizes: tuple[int, ...]) -> Callable[..., Any]:
    """The linear layers of one x, by one call or, where a weight is prepacked, one by one."""

    def linears(
        x: Tensor, weights: tuple[Tensor, ...], biases: tuple[Tensor, ...]
    ) -> Sequence[Tensor]:
        """biases: none or one for each."""
        if marked and any(keeps(weight) for weight in weights):
            each = biases or (None,) * len(weights)
            pairs = zip(weights, each, strict=True)
            return [apply(x, weight, bias, None, None, ()) for weight, bias in pairs]
        bias = torch.cat(biases) if biases else None
        weight = _traced_cat(weights) if traceback.has_preserved_node_meta() else torch.cat(weights)
        y: Tensor = apply(x, weight, bias, None, None, ())
        if y.requires_grad and _is_kept_by_autograd_alone(weights):
            _let_go(weight, weights, y)
        return y.split(sizes, -1)

    return linears


def _traced_cat(weights: tuple[Tensor, ...]) -> Tensor:
    """As one, which a compiler is to make again for the backward pass, where it would keep it."""
    with traceback.preserve_node_meta():  # to put back what changes here
        traceback.get_current_meta()["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
        return torch.cat(weights)


def _is_kept_by_autograd_alone(weights: tuple[Tensor, ...]) -> bool:
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks is None and is_under_autocast_alone() and has_plain_types(weights)


def _let_go(whole: Tensor, parts: tuple[Tensor, ...], y: Tensor) -> None:
    """Free the parts' copy, which y's gradient reads, until that is asked for."""
    waiting, versions = [whole], [part._version for part in parts]
    size = whole.untyped_storage().nbytes()
    whole.untyped_storage().resize_(0)

    def put_back(_: Any) -> None:
        if not waiting:
            return  # an earlier backward pass, whose graph was retained
        if versions != [part._version for part in parts]:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an "
                "inplace operation: a weight of Linears that are multiplied as one"
            )
        whole = waiting.pop()
        whole.untyped_storage().resize_(size)
        torch.cat([part.detach() for part in parts], out=whole.data)  # leaves the version as it is

    assert y.grad_fn is not None
    y.grad_fn.register_prehook(put_back)


def put_together(
    graph: fx.Graph,
    found: Sequence[Found],
    apply: Callable[..., Any],
    fused: Mapping[fx.Node, fx.Node],
) -> dict[fx.Node, fx.Node]:
    """Put one call in the place of a group; returns what stands for its results now."""
    first = found[0].linear
    sizes = tuple(tensor_of(each.linear.weight).shape[0] for each in found)
    weights = tuple(each.linear.weight for each in found)
    biases = tuple(each.bias for each in found if each.bias is not None)
    results = {}
    with graph.inserting_before(found[0].nodes[0]):
        given = (fused.get(first.x, first.x), weights, biases)
        made = graph.call_function(_together(apply, sizes), given)
        made.meta = dict(found[0].nodes[0].meta) | {"example_value": None}
        for index, each in enumerate(found):
            (old,) = each.nodes
            part = graph.call_function(operator.getitem, (made, index))
            part.meta = dict(old.meta)
            old.replace_all_uses_with(part)
            results[old] = part
    for each in found:
        graph.erase_node(each.nodes[0])
    return results
