"""``rounding="eager"`` rounds in 16 bit where PyTorch's own layers do; "once" rounds y alone."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.torch_version import TorchVersion

import epinorm
from epinorm.backends.cuda.text.chain_text import chain_text, statistics_text
from epinorm.chain import Chain
from epinorm.chain.reference import epilogue
from epinorm.chain.reference import linear_norm as reference
from epinorm.tools.accuracy import allowed_error, relative_error

sys.path.insert(0, str(Path(__file__).parent))

from rounding_problems import PROBLEMS, TOLERANCES, far_off, loaded, problem_text, trials

NORM = epinorm.GroupNorm(8)
M, K, N = 48, 96, 128
CHAINS = (
    ("", ""),
    ("", "leaky_relu(0.01)|scale(2)"),
    ("", "hardtanh(-0.3,0.7)"),
    ("add_channel|hardtanh|mish", ""),
    ("silu|scale(1.7)", "gelu|tanh|scale(3)"),
    ("add_channel|elu(0.7)", "mul_channel|add_residual|softplus(2,3)"),
    ("mul_row|add_residual", "gelu|mul_row"),
)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Case:
    """One chain's tensors; by ``dtype``: the fused operation, eager's layers and the truth."""

    def __init__(self, pre: str, post: str, dtype: torch.dtype = torch.bfloat16) -> None:
        self.chain = Chain.build(NORM, pre, post)
        sizes = {"channel": (N,), "element": (M, N), "row": (M, 1)}
        operands = [sizes[kind] for kind in self.chain.operand_kinds]
        shapes = [(M, K), (N, K), (N,), (N,), (N,), *operands]
        scales = [1.0, 0.1, *[1.0] * (len(shapes) - 2)]
        pairs = zip(shapes, scales, strict=True)
        self.tensors = [(torch.randn(shape) * scale).to(dtype) for shape, scale in pairs]
        self.dy = torch.randn(M, N).to(dtype)

    def fused(self, rounding: str) -> list[Tensor]:
        def run(
            x: Tensor, w: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, *more: Tensor
        ) -> Tensor:
            return epinorm.linear_norm(
                x, w, b, norm=NORM, norm_weight=gamma, norm_bias=beta, pre=self.chain.pre,
                post=self.chain.post, operands=more, rounding=rounding, strategy="cpu",  # type: ignore[arg-type]
            )  # fmt: skip

        return self._results(run, self.tensors[0].dtype)

    def layers(self, dtype: torch.dtype) -> list[Tensor]:
        def run(
            x: Tensor, w: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, *more: Tensor
        ) -> Tensor:
            return reference(x, w, b, self.chain, gamma, beta, more)

        return self._results(run, dtype)

    def _results(self, run: Callable[..., Tensor], dtype: torch.dtype) -> list[Tensor]:
        """y and the gradients of all tensors that have one."""
        leaves = [t.detach().to(dtype).clone() for t in self.tensors]
        trained = [t.requires_grad_() for t in leaves if t.shape != (M, 1)]
        y = run(*leaves)
        return [y.detach(), *torch.autograd.grad(y, trained, self.dy.to(dtype))]


@pytest.mark.slow
@pytest.mark.parametrize("pre,post", CHAINS)
def test_values_are_eagers_bit_for_bit_and_gradients_as_accurate(pre: str, post: str) -> None:
    case = Case(pre, post)
    found, eager = case.fused("eager"), case.layers(torch.bfloat16)
    truth = case.layers(torch.float64)
    # Where the two differ, an approximation of exp or tanh fell on the other side of a tie, which
    # before the norm moves a whole group's statistics.
    assert (found[0] == eager[0]).float().mean() > 0.995
    for ours, theirs, exact in zip(found, eager, truth, strict=True):
        limit = allowed_error(relative_error(theirs, exact), torch.bfloat16)
        assert relative_error(ours, exact) <= limit


@pytest.mark.parametrize("eps", [1e-5, 0.1])
def test_eps_counts_as_group_norm_counts_it(eps: float) -> None:
    """x passes the product as it is, and its groups vary about as much as eps."""
    x, one = (torch.randn(512, N) * eps**0.5).bfloat16(), torch.eye(N).bfloat16()
    gamma, beta = (torch.randn(N).bfloat16() for _ in range(2))
    y = epinorm.linear_norm(
        *(x, one), norm=epinorm.GroupNorm(8, eps=eps), norm_weight=gamma, norm_bias=beta,
        rounding="eager", strategy="cpu",
    )  # fmt: skip
    assert (y == F.group_norm(x, 8, gamma, beta, eps)).float().mean() > 0.995


def test_on_a_gpu_it_is_rounded() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for eps in (0.0, 1e-12, 3e-8, 1e-6, 1e-5, 1e-3, 0.1, 1.0):
            chain = Chain(epinorm.GroupNorm(8, eps=eps), rounding="eager")
            norm = chain.rounded_for(dtype, dtype, "cuda").norm
            assert isinstance(norm, epinorm.GroupNorm)
            assert norm.eps == torch.tensor(eps, dtype=dtype).item()
            assert chain.rounded_for(dtype, dtype, "cpu") == chain
            assert chain.rounded_for(dtype, torch.float32, "cuda") == chain


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_statistics_are_rounded_on_a_gpu_where_pytorch_rounds_them(dtype: torch.dtype) -> None:
    older = TorchVersion(torch.__version__) < "2.13" and dtype.itemsize == 2
    chain = Chain(NORM, rounding="eager")
    assert bool(statistics_text(chain, dtype)) == older
    assert not statistics_text(Chain(NORM), dtype)
    assert not statistics_text(Chain(epinorm.LayerNorm(), rounding="eager"), dtype)


@pytest.mark.slow
def test_rounding_once_is_another_and_more_accurate() -> None:
    case = Case("silu|scale(1.7)", "gelu|tanh|scale(3)")
    once, eager, truth = (
        case.fused("once")[0],
        case.fused("eager")[0],
        case.layers(torch.float64)[0],
    )
    assert relative_error(once, truth) < 0.9 * relative_error(eager, truth)


@pytest.mark.parametrize(
    "dtype, pre, post",
    [
        (torch.float32, "mish", "mish"),
        (torch.float64, "hardtanh|identity", "leaky_relu(0.2)|mish"),
    ],
)
def test_in_fp32_and_fp64_both_are_the_same(dtype: torch.dtype, pre: str, post: str) -> None:
    case = Case(pre, post, dtype)
    for once, eager in zip(case.fused("once"), case.fused("eager"), strict=True):
        assert torch.equal(once, eager)


@pytest.mark.slow
@pytest.mark.parametrize("pre", ["", "silu|add_channel|tanh"])
def test_under_autocast_what_is_of_16_bit_is_rounded(pre: str) -> None:
    """The linear layer is, and what follows it up to the norm, or to an operand of fp32."""
    case = Case(pre, "gelu|scale(0.7)")
    x, w, b = case.tensors[:3]
    gamma, beta, *operands = (t.float() for t in case.tensors[3:])
    chain = Chain.build(NORM, case.chain.pre, case.chain.post, "eager")
    y = torch.ops.epinorm.linear_norm(
        x, w, b, gamma, beta, operands, str(chain), "cpu", False, torch.float32
    )
    z, left = F.linear(x, w, b), list(case.chain.pre)
    while left and left[0].operand is None:
        z = left.pop(0)(z)
    rest = Chain(NORM, tuple(left), case.chain.post)
    expected = epilogue(z.float(), rest, gamma, beta, operands)
    torch.testing.assert_close(y, expected, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("dtype", TOLERANCES, ids=lambda d: str(d)[6:])
def test_a_fused_model_passes_an_evaluators_tolerance(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    problem = loaded(problem_text(name, 64, 512, 512), tmp_path, "problem")
    fused = epinorm.fuse(problem.Model().to(dtype), rounding="eager")
    with torch.no_grad():
        for model, inputs in trials(problem, 20, dtype, "cpu"):
            fused.load_state_dict(model.state_dict())
            ours, eager = fused(*inputs), model(*inputs)
            assert far_off(ours, eager) == 0
            truth = model.double()(*(x.double() for x in inputs))
            limit = max(1.05 * relative_error(eager, truth), 4 * torch.finfo(torch.float32).eps)
            assert relative_error(ours, truth) <= limit


def test_it_is_part_of_the_chain_and_of_its_text() -> None:
    chain = Chain.build(NORM, "relu", "scale(3)", "eager")
    assert str(chain) == "relu|group_norm(8,1e-05)|scale(3)|rounding(eager)"
    assert Chain.parse(str(chain)) == chain
    assert chain != Chain.build(NORM, "relu", "scale(3)")
    assert chain.structure.rounding == chain.structure.filled((3.0,)).rounding == "eager"
    module = epinorm.LinearNorm(8, 16, norm=NORM, rounding="eager")
    assert module.chain.endswith("|rounding(eager)")


@pytest.mark.parametrize("wrong", ["Eager", "never", None])
def test_another_rounding_is_refused_at_once(wrong: str | None) -> None:
    x, w = torch.randn(4, 8), torch.randn(16, 8)
    message = "rounding must be 'once' or 'eager', got "
    with pytest.raises(ValueError, match=message):
        epinorm.linear_norm(x, w, norm=NORM, rounding=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        epinorm.LinearNorm(8, 16, norm=NORM, rounding=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        epinorm.fuse(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16)), rounding=wrong)  # type: ignore[arg-type]


EXACT = {"relu": True, "identity": True, "hardtanh(-1,1)": True, "clamp(-inf,65280)": True}
EXACT |= {"clamp(-0.1,1)": False, "clamp(0,65536)": False, "gelu": False}


@pytest.mark.parametrize("text", EXACT)
def test_what_is_of_16_bits_already_is_not_rounded_again(text: str) -> None:
    """A bound that bf16 or fp16 has not comes out, and must be rounded."""
    (operation,) = Chain.parse(f"{text}|layer_norm").pre
    assert operation.keeps_16_bits == operation.structure.keeps_16_bits == EXACT[text]
    counts = [
        chain_text(Chain.parse(f"scale(3)|{more}layer_norm|gelu|rounding(eager)")).count(
            "EPINORM_ROUNDED(EPINORM_Z"
        )
        for more in ("", f"{text}|")
    ]
    # The backward pass has its input, rounded, once more.
    assert counts[1] - counts[0] == (1 if EXACT[text] else 2)


def test_what_is_rounded_or_stored_takes_functions_for_its_type() -> None:
    """Rounded: of the linear's up to the first operand of the norm's; derivatives share it."""
    operations = "mish|add_channel|silu|layer_norm|sigmoid"

    def found(rounding: str, stored: str | None = None) -> dict[str, int]:
        text = chain_text(Chain.parse(operations + rounding), stored)
        calls = re.findall(r"EPINORM_FOR\((?:exp|gated), (\w+)\)\(", text)
        return {to: calls.count(to) for to in sorted(set(calls))}

    assert found("|rounding(eager)") == {"EPINORM_Y": 4, "EPINORM_Z": 2}
    assert found("|rounding(eager)", "bf16") == {"EPINORM_Y": 4, "EPINORM_Z": 2}
    assert found("", "bf16") == {"bf16": 6}
    assert not found("")
