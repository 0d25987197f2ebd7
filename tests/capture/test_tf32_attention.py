"""``backend="epinorm"`` computes fp32 attention by products in TF32 where PyTorch allows these."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from epinorm.capture.masks import leave_out_masks
from epinorm.capture.tf32_attention import take_attention
from epinorm.operator.attention import attention

S, D = 64, 64
aot_eager: Any = torch._dynamo.lookup_backend("aot_eager")
Function = Callable[..., Tensor]


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A GPU that the kernels were measured on, where TF32 is allowed."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    was = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(was)


def on_a_gpu(graph: fx.Graph) -> None:
    """Have the graph's example values say that they are on a GPU; what runs stays on the CPU."""
    for node in graph.nodes:
        value = node.meta.get("example_value")
        if isinstance(value, Tensor):
            with value.fake_mode:
                shape = (value.shape, value.stride())
                moved = torch.empty_strided(*shape, dtype=value.dtype, device="cuda")
            node.meta["example_value"] = moved


def taken(function: Function, *inputs: Tensor, masks: bool = False) -> tuple[int, Any]:
    """In how many places the pass takes the captured function's attention, and what it computes
    then."""
    torch._dynamo.reset()
    counts = []

    def backend(gm: fx.GraphModule, given: Any) -> Any:
        for inner in gm.modules():
            on_a_gpu(inner.graph)  # type: ignore[arg-type, union-attr]
        if masks:
            leave_out_masks(gm.graph)
        counts.append(take_attention(gm))
        return aot_eager(gm, given)

    made = torch.compile(function, backend=backend, dynamic=False, fullgraph=True)(*inputs)
    return sum(counts), made


def heads(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """(B, H, rows, D), laid out as a Linear's result that is viewed as heads."""
    batch, count, rows, width = shape
    return torch.randn(batch, rows, count, width, dtype=dtype).transpose(1, 2).requires_grad_()


def inputs(rows: int = S, keys: int | None = None, width: int = D) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return tuple(heads(2, 3, n, width) for n in (rows, keys or rows, keys or rows))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def scaled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, None, 0.0, False, scale=0.5)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def in_a_layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0)
    return mixed.transpose(1, 2).reshape(2, -1, 3 * D).tanh()


def checkpointed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return checkpoint(scaled, q, k, v, use_reentrant=False)


def error(made: Tensor, exact: Tensor) -> float:
    return ((made - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("keys", [S, 100])
@pytest.mark.parametrize("function", [plain, scaled, in_a_layer, checkpointed])
def test_values_and_gradients_are_pytorchs(function: Function, keys: int) -> None:
    given = inputs(S, keys)
    wide = [t.detach().double().requires_grad_() for t in given]
    count, ours = taken(function, *given)
    assert count == 1
    eager, exact = function(*given), function(*wide)
    assert ours.stride() == eager.stride()
    dy = torch.randn_like(eager)
    results = [
        (y, *torch.autograd.grad(y, x, dy.to(y.dtype)))
        for y, x in ((ours, given), (eager, given), (exact, wide))
    ]
    for our, their, true in zip(*results, strict=True):
        assert error(our, true) <= max(2 * error(their, true), 4.8e-7)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool, device=q.device).tril(3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def dropped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1)


def chosen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return plain(q, k, v)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], enable_gqa=True)


def broadcast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k[:1], v[:1])


def halved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return plain(q.bfloat16(), k.bfloat16(), v.bfloat16()).float()


def autocast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return plain(q, k, v).float()


@torch.compiler.allow_in_graph
def scaled_dot_product_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return v - q * k


def named_alike(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def other_layout(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads are one to what reads the result, which only (B, H, M, D) in order can be."""
    return plain(q.contiguous(), k.contiguous(), v.contiguous()).view(6, S, D)


@pytest.mark.parametrize(
    "function",
    [masked, causal, dropped, chosen, grouped, broadcast, halved, autocast, named_alike],
    ids=lambda function: function.__name__,
)
def test_what_is_another_function_stays(function: Function) -> None:
    count, _ = taken(function, *inputs())
    assert count == 0


def test_a_layout_that_others_see_stays() -> None:
    given = inputs()
    with sdpa_kernel(SDPBackend.MATH):  # whose result is in order on a CPU too
        count, ours = taken(other_layout, *given)
        assert count == 0
        torch.testing.assert_close(ours, other_layout(*given))


@pytest.mark.parametrize("rows, width", [(16, D), (S, 80)])
def test_sizes_without_a_kernel_stay(rows: int, width: int) -> None:
    count, _ = taken(plain, *inputs(rows, width=width))
    assert count == 0


def test_at_highest_nothing_is_taken() -> None:
    torch.set_float32_matmul_precision("highest")
    assert taken(plain, *inputs())[0] == 0


def test_where_pytorchs_kernel_is_switched_off_so_is_ours() -> None:
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    try:
        assert taken(plain, *inputs())[0] == 0
    finally:
        torch.backends.cuda.enable_mem_efficient_sdp(True)


def test_the_setting_is_asked_again_when_it_changes() -> None:
    counts = []

    def backend(gm: fx.GraphModule, _: Any) -> Any:
        on_a_gpu(gm.graph)
        counts.append(take_attention(gm))
        return gm.forward

    compiled = torch.compile(plain, backend=backend, dynamic=False)
    for precision in ("high", "highest", "high"):
        torch.set_float32_matmul_precision(precision)
        compiled(*inputs())
    assert counts[:2] == [1, 0]


def says_nothing(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    rows = torch.arange(S, device=q.device)
    mask = (rows >= 0)[None, None, :, None].expand(2, 1, S, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).contiguous()


def test_a_mask_that_hides_nothing_is_left_out() -> None:
    given = inputs()
    count, ours = taken(says_nothing, *given, masks=True)
    assert count == 1
    torch.testing.assert_close(ours, says_nothing(*given))


def test_the_operator_is_registered_as_pytorch_asks() -> None:
    q, k, v = inputs(8, 5, 4)
    torch.library.opcheck(attention, (q, k, v, 0.5))
