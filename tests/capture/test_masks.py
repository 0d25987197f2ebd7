"""``backend="epinorm"`` leaves out attention masks that say nothing; no other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from epinorm.capture.masks import leave_out_masks

L = 6


def indices(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    batch, rows, columns = (torch.arange(n, device=device) for n in (2, L, L))
    return batch[:, None, None, None], rows[None, None, :, None], columns[None, None, None, :]


def bidirectional(q: Tensor) -> Tensor:  # as transformers makes it
    _, rows, _ = indices(q.device)
    return (rows + 0 >= 0).expand(2, -1, L, L)


def causal(q: Tensor) -> Tensor:
    _, rows, columns = indices(q.device)
    return (columns <= rows).expand(2, -1, L, L)


def packed(q: Tensor) -> Tensor:
    """Causal, and of one sequence: no position is further than one from the last."""
    batch, rows, columns = indices(q.device)
    positions = torch.arange(L, device=q.device).unsqueeze(0).expand(2, -1)
    sequences = (torch.diff(positions, prepend=positions[:, :1] - 1, dim=-1) != 1).cumsum(-1)
    return (columns <= rows) & (sequences[batch, rows] == sequences[batch, columns])


def window(q: Tensor) -> Tensor:
    _, rows, columns = indices(q.device)
    return (columns <= rows) & (columns > rows - 3)


def first_key(q: Tensor) -> Tensor:
    """One row for all queries: a lower half of one row, and not what ``is_causal`` means."""
    return torch.arange(L, device=q.device)[None] < 1


def of_an_input(q: Tensor) -> Tensor:
    return (q[:, :1, :, :1] > -1e9).expand(2, -1, L, L)


def changed(q: Tensor) -> Tensor:
    mask = torch.ones(L, L, dtype=torch.bool, device=q.device)
    mask[0, 1] = False
    return mask


def changed_by_a_view(q: Tensor) -> Tensor:
    mask = torch.ones(L, L, dtype=torch.bool, device=q.device)
    mask.t()[3].logical_not_()
    return mask


def additive(q: Tensor) -> Tensor:
    return torch.ones(L, L, device=q.device).tril()


Made = Callable[[Tensor], Tensor]
LEFT: list[tuple[Made, Any]] = [
    (bidirectional, (None, False)),
    (causal, (None, True)),
    (packed, (None, True)),
    *((made, ("kept", False)) for made in (window, first_key, of_an_input, changed)),
    *((made, ("kept", False)) for made in (changed_by_a_view, additive)),
]


@pytest.mark.parametrize(("mask", "left"), LEFT)
def test_what_says_nothing_is_left_out(mask: Made, left: Any) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    told: list[Any] = []

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask(q), scale=0.5)

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        leave_out_masks(gm.graph)
        gm.recompile()
        (node,) = (n for n in gm.graph.nodes if "scaled_dot" in str(n.target))
        kept = "kept" if node.kwargs["attn_mask"] is not None else None
        told.append((kept, node.kwargs.get("is_causal", False)))
        return gm.forward

    q = torch.randn(2, 3, L, 4, requires_grad=True)
    ours, eagers = torch.compile(attend, backend=backend, dynamic=False)(q), attend(q)
    assert told == [left]
    torch.testing.assert_close(ours, eagers)
    gradients = [torch.autograd.grad(y.square().sum(), q)[0] for y in (ours, eagers)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("size", [(3, 1, L, L), (1, 1, 1, L, L), (L + 1, L)])
def test_what_has_more_sizes_than_the_scores_is_kept(size: tuple[int, ...]) -> None:
    """The result has them too, or PyTorch says that they do not fit."""
    graph = fx.Graph()
    q, mask = (
        graph.placeholder("q"),
        graph.call_function(torch.ones, (size,), {"dtype": torch.bool}),
    )
    q.meta["example_value"] = torch.empty(1, 2, L, 4)
    node = graph.call_function(F.scaled_dot_product_attention, (q, q, q, mask))
    graph.output(node)
    leave_out_masks(graph)
    assert node.args == (q, q, q, mask)


@pytest.mark.parametrize(
    ("precision", "dtype", "kept"),
    [
        ("high", torch.float32, True),
        ("highest", torch.float32, False),
        ("high", torch.bfloat16, False),
    ],
)
def test_a_mask_that_makes_attention_follow_the_setting_is_kept(
    precision: str, dtype: torch.dtype, kept: bool
) -> None:
    torch._dynamo.reset()
    masks: list[Any] = []

    def attend(q: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, q, q, attn_mask=bidirectional(q))

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        (node,) = (n for n in gm.graph.nodes if "scaled_dot" in str(n.target))
        value = node.args[0].meta["example_value"]
        with value.fake_mode:
            node.args[0].meta["example_value"] = torch.empty_like(value, device="cuda")
        leave_out_masks(gm.graph)
        masks.append(node.kwargs["attn_mask"])
        return gm.forward

    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        torch.compile(attend, backend=backend, dynamic=False)(torch.randn(2, 3, L, 4).to(dtype))
    finally:
        torch.set_float32_matmul_precision(was)
    assert (masks[0] is not None) == kept


def test_masks_of_sizes_that_change_are_kept() -> None:
    torch._dynamo.reset()
    masks: list[Any] = []

    def attend(q: Tensor) -> Tensor:
        rows = torch.arange(q.shape[2])
        return F.scaled_dot_product_attention(q, q, q, attn_mask=rows[:, None] >= rows[None])

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        leave_out_masks(gm.graph)
        (node,) = (n for n in gm.graph.nodes if "scaled_dot" in str(n.target))
        masks.append(node.kwargs["attn_mask"])
        return gm.forward

    compiled = torch.compile(attend, backend=backend, dynamic=True)
    q = torch.randn(2, 3, L, 4)
    torch.testing.assert_close(compiled(q), attend(q))
    assert masks[0] is not None
