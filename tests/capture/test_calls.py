"""Ways to call a fused model: sizes, modes, transforms, threads, errors, other compilers."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import threading
import weakref
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._dynamo.guards import CheckFunctionManager
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import epinorm
from epinorm.capture import rewriting
from epinorm.capture.dynamo import DYNAMO, OF_ITS_OWN
from epinorm.capture.fuse import fused_of
from epinorm.capture.guards import guards_as_needed
from epinorm.capture.rewriting import Recorder
from own_masks import own_masks

K, N, GROUPS, ROWS = 12, 16, 4, 5


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)
        self.norm = nn.GroupNorm(GROUPS, N)
        self.act = nn.LeakyReLU(0.1)
        self.gain = 2.0

    def forward(self, x):
        return self.act(self.norm(self.fc(x))) * self.gain


class Adds(Model):
    def forward(self, x, other):
        return self.norm(self.fc(x)) + other


def randomised(model: nn.Module) -> Any:
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    return model.double()


def fused_copy(model: nn.Module, **settings: Any) -> Any:
    return epinorm.fuse(copy.deepcopy(model), **{"strategy": "reference", **settings})


@pytest.fixture
def pair() -> tuple[Any, Any]:
    model = randomised(Model())
    return model, fused_copy(model)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(ROWS, K, dtype=torch.float64)


def assert_same(a: Any, b: Any) -> None:
    torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def captures() -> int:
    """How often a graph was captured in this test."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_other_sizes_are_captured_once_more_and_no_more(pair: Any) -> None:
    model, fused = pair
    for rows in (5, 7, 9, 11, 200, 2, 33):
        x = torch.randn(rows, K, dtype=torch.float64)
        assert_same(fused(x), model(x))
    assert captures() == 2


@pytest.mark.parametrize("rows", [0, 1])
def test_no_and_one_row(pair: Any, rows: int) -> None:
    model, fused = pair
    x = torch.randn(rows, K, dtype=torch.float64)
    assert_same(fused(x), model(x))


def test_models_of_one_class_do_not_share_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DYNAMO, "recompile_limit", 2)
    for rows in range(2, 6):  # more than Dynamo captures of one function
        model = randomised(Model())
        fused = fused_copy(model)
        x = torch.randn(rows, K, dtype=torch.float64)
        assert_same(fused(x), model(x))
        assert epinorm.explain(fused).fused == 1


def test_a_model_that_differs_at_every_call_is_right(pair: Any, x: Any) -> None:
    model, fused = pair
    for step in range(40):
        model.gain = fused.gain = step / 7
        assert_same(fused(x), model(x))
    assert captures() <= 4


class Chooses(Model):
    def forward(self, x, which):
        return self.norm(self.fc(x)) if which == "plain" else -self.norm(self.fc(x))


def test_past_the_limit_the_models_own_code_runs_and_says_so(
    x: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(DYNAMO, "recompile_limit", 4)
    model = randomised(Chooses())
    fused = fused_copy(model)
    with caplog.at_level(logging.WARNING, logger="epinorm"):
        for step in range(7):
            assert_same(fused(x, str(step)), model(x, str(step)))
    assert caplog.text.count("captured too often") == 1


own_captures = pytest.mark.skipif(not OF_ITS_OWN, reason="PyTorch counts captures of all together")


@own_captures
def test_each_model_has_its_own_limit(x: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of the frames that models of a class share, where their graph breaks."""
    monkeypatch.setitem(DYNAMO, "recompile_limit", 2)
    models = [fused_copy(randomised(Breaks())) for _ in range(4)]
    for model in models:
        model(x)
        assert epinorm.explain(model).fused == 1


def test_the_users_settings_of_dynamo_do_not_matter(pair: Any, x: Any) -> None:
    model, fused = pair
    users = {
        "recompile_limit": 1,
        "fail_on_recompile_limit_hit": True,
        "automatic_dynamic_shapes": False,
        "error_on_recompile": True,
    }
    with torch._dynamo.config.patch(users):
        for rows in (2, 3, 4, 5):
            assert_same(fused(x[:rows]), model(x[:rows]))
        for name, value in users.items():
            assert getattr(torch._dynamo.config, name) == value
    assert epinorm.explain(fused).fused == 1


@pytest.mark.parametrize("stance", ["eager_then_compile", "aot_eager_then_compile"])
def test_a_stance_that_delays_compiling_runs_the_models_own_code(
    pair: Any, x: Any, caplog: pytest.LogCaptureFixture, stance: str
) -> None:
    """PyTorch would ask for a backend that it does not find, at the first call or later."""
    model, fused = pair
    for rows in (2, 3, 3, 4):
        with torch.compiler.set_stance(stance):
            assert_same(fused(x[:rows]), model(x[:rows]))
    assert caplog.text.count(stance) == 1
    for _ in range(2):
        assert_same(fused(x), model(x))
    assert epinorm.explain(fused).fused == 1


@pytest.mark.parametrize(
    "other", [torch.randn(ROWS, 1), torch.randn(N), torch.randn(2, ROWS, N), 2.5, 1]
)
def test_a_sum_with_anything_is_right(x: Any, other: Any) -> None:
    model = randomised(Adds())
    fused = fused_copy(model)
    if isinstance(other, Tensor):
        other = other.double()
    assert_same(fused(x, other), model(x, other))
    assert_same(fused(x, other=other), model(x, other))


def test_a_residual_of_another_dtype_promotes_as_in_eager(x: Any) -> None:
    model = randomised(Adds()).float()
    fused = fused_copy(model)
    other = torch.randn(ROWS, N, dtype=torch.float64)
    y = fused(x.float(), other)
    assert y.dtype == torch.float64
    torch.testing.assert_close(y, model(x.float(), other), rtol=1e-5, atol=1e-5)


def test_mistakes_raise_what_the_model_raises_and_do_not_end_fusing(pair: Any, x: Any) -> None:
    model, fused = pair
    for mistake in (
        lambda m: m(),
        lambda m: m(x, x),
        lambda m: m(y=x),
        lambda m: m(x, x=x),
        lambda m: m("text"),
        lambda m: m(x[:, 1:]),
        lambda m: m(x.float()),
    ):
        with pytest.raises(Exception) as expected:  # noqa: PT011
            mistake(model)
        with pytest.raises(expected.type) as got:
            mistake(fused)
        assert str(got.value) == str(expected.value)
    before = captures()
    assert_same(fused(x), model(x))
    assert before in (captures(), captures() - 1)
    assert epinorm.explain(fused).fused == 1


@pytest.mark.parametrize("training", [False, True])
def test_a_model_that_raised_is_not_traced_at_each_such_call(
    pair: Any, x: Any, caplog: pytest.LogCaptureFixture, training: bool
) -> None:
    """In training it is, where another run of the call may have to drop the same."""
    model, fused = (m.train(training) for m in pair)
    pytorchs = logging.getLogger("torch._subclasses.fake_tensor")
    pytorchs.addHandler(caplog.handler)
    frames = torch._dynamo.utils.counters["frames"]
    tried = []
    assert_same(fused(x), model(x))
    for rows in (5, 4, 3, 7):
        with pytest.raises(RuntimeError, match=rf"mat1 and mat2 .* \({rows}x11 and 12x16\)"):
            fused(torch.randn(rows, K - 1, dtype=torch.float64))
        tried.append(frames["total"])
        assert_same(fused(x), model(x))
    pytorchs.removeHandler(caplog.handler)
    assert len(set(tried)) == (4 if training else 1)
    assert not any("failed while attempting" in record.message for record in caplog.records)

    before, row = captures(), x[:1]
    for expected in [1, 1] if training else [0, 1]:  # of what was not captured yet: once as it is
        assert_same(fused(row), model(row))
        assert captures() - before == expected
    assert epinorm.explain(fused).fused == 1


def test_a_model_that_raised_is_strict_all_the_same() -> None:
    fused = fused_copy(randomised(Model()), strict=True).eval()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fused(torch.randn(ROWS, K - 1, dtype=torch.float64))
    for _ in range(2):
        with pytest.raises(RuntimeError, match="strict=True"):
            fused(torch.randn(2, N, K, dtype=torch.float64))


def test_checkpointing_after_a_mistake_saves_the_same_twice(x: Any) -> None:
    fused = fused_copy(randomised(Model()), strategy="auto").eval()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fused(x[:, 1:])
    checkpoint(fused, x.requires_grad_(), use_reentrant=False).sum().backward()
    assert x.grad is not None


class Drops(Model):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        return self.drop(self.norm(self.fc(x)))


def test_checkpointing_after_a_mistake_drops_the_same_twice(x: Any) -> None:
    """In eval too, where dropout alone is in training."""
    fused = fused_copy(randomised(Drops())).eval()
    fused.drop.train()
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        fused(x[:, 1:])
    y = checkpoint(fused, x.requires_grad_(), use_reentrant=True)
    y.sum().backward()
    assert_same(fused.norm.bias.grad, 2.0 * (y != 0).double().sum(0))


class Raises(Model):
    def forward(self, x):
        if x.shape[0] > 6:
            raise KeyError(x.shape[0])
        return super().forward(x)


def test_an_error_of_the_models_own_comes_through(x: Any) -> None:
    model = randomised(Raises())
    fused = fused_copy(model)
    for _ in range(2):
        assert_same(fused(x), model(x))
        for m in (model, fused):
            with pytest.raises(KeyError, match="10"):
                m(torch.cat([x, x]))
    assert epinorm.explain(fused).fused == 1


@pytest.mark.parametrize("shape", [(2, N, K), (2, 3, N, K)])
def test_group_norm_of_more_dimensions_is_another_function(
    pair: Any, shape: tuple[int, ...]
) -> None:
    model, x = pair[0], torch.randn(*shape, dtype=torch.float64)
    if len(shape) == 4:
        model.norm = nn.GroupNorm(3, 3).double()
    fused = fused_copy(model)
    assert_same(fused(x), model(x))
    (row,) = epinorm.explain(fused).rows
    assert not row.fused
    assert f"{len(shape)}-dimensional input normalises dimension 1" in row.reason


def test_strict_raises_instead() -> None:
    fused = fused_copy(randomised(Model()), strict=True)
    with pytest.raises(RuntimeError, match=r"strict=True, but fc → norm .*normalises dimension 1"):
        fused(torch.randn(2, N, K, dtype=torch.float64))


@pytest.mark.parametrize("wrong", ["fast", "", None])
def test_an_unknown_strategy_is_refused_at_once(wrong: Any) -> None:
    with pytest.raises(ValueError, match="unknown strategy"):
        epinorm.fuse(Model(), strategy=wrong)


def test_train_and_eval_switch_dropout(x: Any) -> None:
    model = randomised(nn.Sequential(nn.Linear(K, N), nn.Dropout(0.5), nn.LayerNorm(N), nn.ReLU()))
    fused = fused_copy(model)
    for training in (True, False, True, False):
        results = []
        for m, masks in ((model, own_masks()), (fused, contextlib.nullcontext())):
            torch.manual_seed(7)
            with masks:
                results.append(m.train(training)(x))
        assert_same(*results)
    rows = epinorm.explain(fused).rows
    assert [(row.fused, "dropout(0.5)" in row.chain) for row in rows] == [
        (True, True),
        (True, False),
    ]


def test_inference_mode_then_training(pair: Any, x: Any) -> None:
    model, fused = pair
    with torch.inference_mode():
        y = fused(x)
        assert y.is_inference()
    assert_same(y.clone(), model(x).detach())
    with torch.no_grad():
        assert not fused(x).requires_grad
    for m in pair:
        m(x).square().sum().backward()
    for a, b in zip(fused.parameters(), model.parameters(), strict=True):
        assert_same(a.grad, b.grad)


@pytest.mark.parametrize("strategy", ["reference", "cpu"])
@pytest.mark.parametrize(
    "join", [lambda h, r: h + r, lambda h, r: r - h, lambda h, r: h + r[0], lambda h, r: h * r]
)
def test_operands_made_under_inference_mode(join: Any, strategy: Any) -> None:
    """Eager's sum does not keep them, and its product cannot."""

    class Joins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.norm = nn.Linear(K, N), nn.LayerNorm(N)

        def forward(self, x: Any, r: Any) -> Any:
            return join(self.norm(join(self.fc(x), r)), r)

    model = randomised(Joins())
    fused, x = fused_copy(model, strategy=strategy), torch.randn(ROWS, K, dtype=torch.float64)
    with torch.inference_mode():
        r = torch.randn(ROWS, N, dtype=torch.float64)
    if isinstance(expected := gradients_or_error(model, x, r), str):
        assert gradients_or_error(fused, x, r) == expected
    else:
        for a, b in zip(gradients_or_error(fused, x, r), expected, strict=True):
            assert_same(a, b)


def gradients_or_error(model: nn.Module, *inputs: Any) -> Any:
    try:
        loss = model(*inputs).square().sum()
    except RuntimeError as error:
        return str(error)
    return torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize("rows", [(ROWS,), (2, ROWS)])
def test_gradients_enabled_within_inference_mode_record_nothing(rows: tuple[int, ...]) -> None:
    model = randomised(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.ReLU()))
    fused, x = fused_copy(model, strategy="cpu"), torch.randn(*rows, K, dtype=torch.float64)
    for _ in range(2):
        assert fused(x).requires_grad
        with torch.inference_mode(), torch.enable_grad():
            given = x.clone()  # which no backward pass could keep
            y = fused(given)
            assert (y.requires_grad, y.is_inference()) == (False, True)
            assert_same(y, model(given))
    assert all(row.fused for row in epinorm.explain(fused).rows)


NORMS_IN_VIEWS = {
    "rows": lambda y: F.layer_norm(y, (N,)),
    "heads": lambda y: F.rms_norm(y.unflatten(-1, (-1, GROUPS)), (GROUPS,), eps=1e-6),
    "in front": lambda y: F.layer_norm(y.view(-1, N), (N,)).relu(),
    "groups": lambda y: F.group_norm(y.flatten(0, -2), GROUPS),
}


@pytest.mark.parametrize("strategy", ["reference", "cpu"])
@pytest.mark.parametrize("name", NORMS_IN_VIEWS)
def test_what_is_no_view_in_eager_may_be_changed_by_what_has_a_gradient(
    name: str, strategy: str
) -> None:
    """Where a frozen part of a model was run without gradients, as a mask token is put there."""

    class Frozen(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(K, N).double()

        def forward(self, x: Tensor) -> Any:
            return NORMS_IN_VIEWS[name](self.fc(x))

    model = Frozen()
    fused, x = fused_copy(model, strategy=strategy), torch.randn(2, ROWS, K, dtype=torch.float64)
    for given in (x, x, x.transpose(0, 1)):
        results = []
        for m in (model, fused):
            with torch.no_grad():
                y = m(given)
            token = torch.ones(y.shape[-1], dtype=torch.float64, requires_grad=True)
            y[0] = token
            y.sum().backward()
            results.append((y.detach_(), token.grad))
        assert_same(*results)
    assert all(row.fused for row in epinorm.explain(fused).rows)


def test_training_steps(pair: Any) -> None:
    results = []
    for m in pair:
        optimizer = torch.optim.AdamW(m.parameters(), lr=0.1)
        torch.manual_seed(0)
        for rows in (5, 6, 7, 5):
            optimizer.zero_grad()
            m(torch.randn(rows, K, dtype=torch.float64)).square().mean().backward()
            optimizer.step()
        results.append([p.detach() for p in m.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_around_the_model(pair: Any, x: Any, reentrant: bool) -> None:
    results = []
    for m in pair:
        given = x.clone().requires_grad_()
        y = checkpoint(m, given, use_reentrant=reentrant)
        m.zero_grad()
        y.square().sum().backward()
        results.append([y, given.grad, *(p.grad for p in m.parameters())])
    for a, b in zip(*results, strict=True):
        assert_same(a, b)


def test_checkpointing_from_the_first_call_on() -> None:
    """x of three dimensions, which a later call folds in its own node."""
    model = randomised(nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8)))
    fused, results = epinorm.fuse(copy.deepcopy(model), strategy="cpu"), []
    x = torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    for one in (model.double(), fused.double()):
        y = checkpoint(one, x, use_reentrant=False)
        results.append([y, *torch.autograd.grad(y.sin().sum(), [x, *one.parameters()])])
    torch.testing.assert_close(*results)


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm, self.drop = nn.Linear(8, 8), nn.LayerNorm(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm(self.drop(self.fc(x)))


_KEEPS_ORDER = hasattr(torch._C._dynamo.eval_frame, "_set_lru_cache")


@pytest.mark.skipif(not _KEEPS_ORDER, reason="PyTorch 2.9 runs what ran last")
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_blocks_of_which_one_breaks_its_graph(reentrant: bool) -> None:
    """What is in front of its break fits the others too, where dropout is PyTorch's own then."""
    model = epinorm.fuse(nn.Sequential(*(Dropping() for _ in range(3))).double(), strategy="cpu")
    seen: list[float] = []
    model[2].norm.register_forward_pre_hook(lambda _, x: seen.append(float(x[0].detach().sum())))
    for _ in range(3):
        runs: list[Tensor] = []

        def run(x: Tensor, runs: list[Tensor] = runs) -> Tensor:
            runs.append(model(x))
            return runs[-1]

        x = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
        with set_checkpoint_early_stop(False):
            checkpoint(run, x, use_reentrant=reentrant).sum().backward()
        torch.testing.assert_close(*runs)


def test_functional_call_and_grad(pair: Any, x: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, fused = pair
    parameters = {k: v.detach() * 2 for k, v in model.named_parameters()}

    def loss(p: Any, m: nn.Module) -> Tensor:
        return torch.func.functional_call(m, p, (x,)).square().sum()

    assert_same(loss(parameters, fused), loss(parameters, model))
    assert_same(fused(x), model(x))
    expected = torch.func.grad(loss)(parameters, model)
    got = torch.func.grad(loss)(parameters, fused)
    for name in expected:
        assert_same(got[name], expected[name])


def test_vmap_over_samples_and_over_models(pair: Any, x: Any) -> None:
    model, fused = pair
    many = torch.stack([x, x * 2, -x])
    assert_same(torch.func.vmap(fused)(many), torch.func.vmap(model)(many))
    models = [randomised(Model()) for _ in range(3)]
    parameters, buffers = torch.func.stack_module_state(models)

    def run(m: nn.Module) -> Any:
        def one(p: Any, b: Any, x: Tensor) -> Tensor:
            return torch.func.functional_call(m, (p, b), (x,))

        return torch.func.vmap(one, in_dims=(0, 0, None))(parameters, buffers, x)

    assert_same(run(fused), run(model))


def test_forward_mode(pair: Any, x: Any) -> None:
    tangent = torch.randn_like(x)
    for a, b in zip(*(torch.func.jvp(m, (x,), (tangent,)) for m in pair), strict=True):
        assert_same(a, b)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, tangent)
        results = [torch.autograd.forward_ad.unpack_dual(m(dual)).tangent for m in pair]
    assert_same(*results)


def test_a_backward_pass_within_a_compiled_step(x: Any) -> None:
    model = randomised(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.ReLU()))
    found = []
    for each in (model, fused_copy(model, strategy="cpu")):
        torch._dynamo.reset()

        @torch.compile(backend="eager")
        def update(loss: Any) -> int:
            loss.backward()
            return 1

        for _ in range(2):
            each.zero_grad()
            update(each(x).square().sum())
        found.append([p.grad for p in each.parameters()])
    for a, b in zip(*found, strict=True):
        assert_same(a, b)
    seen = [code() for code in torch._dynamo.convert_frame.input_codes.seen]
    names = [code.co_filename for code in seen if code is not None]
    assert not [name for name in names if "epinorm/operator" in name]


@pytest.mark.parametrize("strategy", ["reference", "cpu"])
def test_compiled_autograd(x: Any, strategy: Any) -> None:
    from torch._dynamo import compiled_autograd

    model = randomised(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.ReLU()))
    found = []
    for each in (model, fused_copy(model, strategy=strategy)):
        torch._dynamo.reset()
        with compiled_autograd._enable(torch.compile(backend="eager")):
            for _ in range(3):
                each.zero_grad()
                each(x).square().sum().backward()
        found.append([p.grad for p in each.parameters()])
    for a, b in zip(*found, strict=True):
        assert_same(a, b)


def test_second_derivatives(pair: Any, x: Any) -> None:
    results = []
    for m in pair:
        given = x.clone().requires_grad_()
        (g,) = torch.autograd.grad(m(given).square().sum(), given, create_graph=True)
        results.append(torch.autograd.grad(g.square().sum(), [given, *m.parameters()]))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_two_threads(x: Any) -> None:
    model = randomised(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.Linear(N, K), nn.Tanh()))
    fused = fused_copy(model)
    expected = {rows: model(x[:rows]) for rows in (1, 2, 3, 4, 5)}
    wrong: list[Any] = []

    def work(rows: int) -> None:
        try:
            for i in range(10):
                n = (rows + i) % 5 + 1
                assert_same(fused(x[:n]), expected[n])
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(rows,)) for rows in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_autocast_gives_what_eager_gives(pair: Any, x: Any) -> None:
    model, fused = pair[0].float(), pair[1].float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected, got = model(x.float()), fused(x.float())
    assert torch.equal(got, expected)
    torch.testing.assert_close(fused(x.float()), model(x.float()), rtol=1e-5, atol=1e-5)


def test_a_fused_child_of_a_fused_model(x: Any) -> None:
    model = randomised(nn.Sequential(Model(), nn.Linear(N, K), nn.LayerNorm(K)))
    fused = copy.deepcopy(model)
    epinorm.fuse(fused[0], strategy="reference")
    assert_same(fused(x), model(x))
    epinorm.fuse(fused, strategy="reference")
    assert_same(fused(x), model(x))
    assert epinorm.explain(fused).fused == 2
    assert_same(fused[0](x), model[0](x))


@pytest.mark.parametrize("hooked", [False, True])
def test_a_fused_child_within_torch_compile(x: Any, hooked: bool) -> None:
    model = randomised(nn.Sequential(Model(), nn.Linear(N, K)))
    fused = copy.deepcopy(model)
    epinorm.fuse(fused[0], strategy="reference")
    fused[0](x)
    if hooked:
        for m in (model, fused):
            m[0].register_forward_hook(lambda module, given, y: y * 2)
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    assert_same(compiled(x), model(x))


def test_torch_compile_of_a_fused_model_compiles_its_own_code(
    pair: Any, x: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model, fused = pair
    seen: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(graph)
        return graph

    with caplog.at_level(logging.WARNING, logger="epinorm"):
        assert_same(torch.compile(fused, backend=backend)(x), model(x))
    assert len(seen) == 1
    assert_same(fused(x), model(x))
    assert epinorm.explain(fused).fused == 1


def test_script_traces_and_symbolic_traces_see_the_layers(pair: Any, x: Any) -> None:
    model, fused = pair
    fused(x)
    assert_same(torch.jit.trace(fused, x)(x), model(x))
    assert_same(torch.fx.symbolic_trace(nn.Sequential(fused))(x), model(x))
    assert_same(torch.jit.script(Chain())(x), x)


class Chain(nn.Module):
    def forward(self, x):
        return x


def test_a_torchscript_model_stays_as_it_is(x: Any) -> None:
    script = torch.jit.trace(randomised(Model()), x)
    expected = script(x)
    assert_same(epinorm.fuse(script)(x), expected)


@pytest.mark.parametrize("strict", [False, True])
def test_export_sees_the_layers(pair: Any, x: Any, strict: bool) -> None:
    model, fused = pair
    fused(x)
    program = torch.export.export(fused, (x,), strict=strict)
    assert "group_norm" in str(program.graph)
    assert_same(program.module()(x), model(x))


def test_a_mode_that_counts_sees_the_layers(pair: Any, x: Any) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    counts = []
    for m in pair:
        with FlopCounterMode(display=False) as counter:
            m(x)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_data_parallel_replicas_run_their_own_code(pair: Any, x: Any) -> None:
    _, fused = pair
    fused(x)
    replica = fused._replicate_for_data_parallel()
    for name, child in fused.named_children():
        replica._modules[name] = copy.deepcopy(child)
    replica.gain = -1.0
    with torch.no_grad():
        replica.fc.weight.mul_(3)
    assert not torch.allclose(replica(x), fused(x))
    assert_same(replica(x), replica._call_impl(x))


def test_what_is_tried_on_values_is_freed(x: Any) -> None:
    """Of the graphs by which a norm is recognised that is written out."""

    class ByHand(Model):
        def forward(self, x):
            h = self.fc(x)
            return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)

    def results() -> int:
        return sum(type(t) is Tensor and t.grad_fn is not None for t in gc.get_objects())

    before = results()
    fused = fused_copy(randomised(ByHand()))
    fused(x).sum().backward()
    gc.collect()
    assert results() == before
    assert epinorm.explain(fused).fused == 1


class Kept:
    """What a model makes and returns beside its result, as a cache."""

    h: Tensor


class Results(OrderedDict[str, Any]):
    pass


class Caching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.norm = nn.Linear(K, N), nn.Linear(N, N), nn.LayerNorm(N)

    def forward(self, x: Tensor) -> Results:
        kept, results = Kept(), Results()
        kept.h = self.first(x)
        torch._dynamo.graph_break()
        results["y"], results["kept"] = self.norm(self.second(kept.h)), kept
        vars(results)["extra"] = results["y"]
        return results


@pytest.mark.parametrize("fails", [False, True])
def test_the_first_calls_graph_is_freed_with_its_results(
    x: Any, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(*_: Any) -> None:
        raise RuntimeError("wrong")

    fused = fused_copy(randomised(Caching()))
    if fails:
        monkeypatch.setattr(rewriting, "rewrite", wrong)
    gc.collect()
    gc.disable()
    try:
        results = fused(x)
        kept = weakref.ref(results["kept"])
        del results
        assert kept() is None
    finally:
        gc.enable()


@pytest.mark.skipif(
    not hasattr(torch._dynamo.config, "invalidate_compile_context_weakrefs"),
    reason="no compiled model's parameters can be swapped before PyTorch 2.11",
)
def test_parameters_can_be_swapped(x: Any) -> None:
    """As ``Module.to`` does with tensors of other classes: DTensors, quantised ones."""
    model = randomised(Model())
    fused = fused_copy(model)
    fused(x).sum().backward()
    fused.zero_grad()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        fused.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert fused(x.float()).dtype == torch.float32


class Sized(Model):
    def forward(self, x, y):
        return (super().forward(x) * 2 if len(x) < 8 else super().forward(x)) + y


MARKS = ("mark_dynamic", "maybe_mark_dynamic", "mark_static", "mark_unbacked")


@pytest.mark.slow
@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("marked_first", [False, True])
def test_marks_for_compilers_change_nothing(mark: str, marked_first: bool) -> None:
    model = randomised(Sized())
    fused = fused_copy(model)
    for call, rows in enumerate((ROWS, 9, 1, ROWS, 12, 9, 1)):
        x = torch.randn(rows, K, dtype=torch.float64)
        shift = torch.randn(rows, 1, dtype=torch.float64)
        if (call % 2 == 0) == marked_first:
            getattr(torch._dynamo.decorators, mark)(x, 0)
        for y in (shift, shift[:1]):
            assert_same(fused(x, y), model(x, y))


def test_marks_capture_nothing_again(pair: Any, x: Any) -> None:
    _, fused = pair
    fused(x)
    for mark in MARKS:
        fused(marked := x.clone())
        getattr(torch._dynamo.decorators, mark)(marked, 0)
        fused(marked)
    assert len(fused_of(fused).recorder.graphs) == 1  # type: ignore[union-attr]


@pytest.mark.parametrize("cls", [nn.Linear, nn.GroupNorm])
def test_a_layer_of_pytorchs_replaced_for_all_is_noticed(
    pair: Any, x: Any, cls: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As LoRA is added to every nn.Linear of a process by some."""
    model, fused = pair
    own, expected = cls.forward, model(x)
    assert_same(fused(x), expected)
    monkeypatch.setattr(cls, "forward", lambda layer, h: own(layer, h).sin())
    changed = model(x)
    assert_same(fused(x), changed)
    assert not torch.allclose(changed, expected)
    monkeypatch.setattr(cls, "forward", own)
    assert_same(fused(x), expected)


def test_any_method_of_pytorchs_replaced_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer
    block = layer(K, 2, 64, dropout=0.0, batch_first=True, dtype=torch.float64)
    tail = nn.Sequential(nn.Linear(K, 32), nn.GroupNorm(4, 32)).double()
    model = nn.Sequential(block, nn.Flatten(0, 1), tail)
    fused, x = fused_copy(model), torch.randn(4, 5, K, dtype=torch.float64)
    assert_same(fused(x), model(x))
    own = layer._ff_block
    for value in (lambda self, h: own(self, h) * 0.1, own):
        monkeypatch.setattr(layer, "_ff_block", value)
        assert_same(fused(x), model(x))
    first = lambda self: iter(list(self._modules.values())[:1])  # noqa: E731
    monkeypatch.setattr(nn.Sequential, "__iter__", first)
    assert_same(fused(x), model(x))


def test_a_class_that_is_only_written_to_is_captured_once(pair: Any, x: Any) -> None:
    """A class' version changes at each call, nothing that was captured does."""

    model, fused = pair

    class Counted(type(model)):  # type: ignore[misc]
        calls = 0

    fused.__class__ = Counted
    for _ in range(5):
        Counted.calls += 1
        Counted.unread = lambda self: None  # type: ignore[attr-defined]
        Counted.__init__ = lambda self: None  # type: ignore[method-assign]
        assert_same(fused(x), model(x))
    assert len(fused_of(fused).recorder.graphs) == 1  # type: ignore[union-attr]


def test_another_threads_guards_are_its_own() -> None:
    """What exports a model takes no lock against what is captured meanwhile."""
    seen: list[int] = []

    def backend(gm: Any, _: Any) -> Any:
        seen.append(len(gm.graph.nodes))
        return gm.forward

    function = torch.compile(lambda x: x + 1, backend=backend)
    marked = torch.ones(4)
    torch._dynamo.mark_dynamic(marked, 0)

    def elsewhere() -> None:
        function(torch.ones(4))

    with guards_as_needed(lambda: False, lambda: False, None, []):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    function(torch.ones(4))
    assert len(seen) == 1
    function(marked)
    assert len(seen) == 2


class Named(Model):
    def forward(self, x, *, own, model, args):
        return self.act(self.norm(self.fc(x)) * own + model) * args


def test_arguments_of_any_name(x: Any) -> None:
    model = randomised(Named())
    fused, named = fused_copy(model), {"own": 2.0, "model": torch.ones_like(x[:, :1]), "args": 3}
    for _ in range(2):
        assert_same(fused(x, **named), model(x, **named))


def test_a_fused_model_can_be_freed(x: Any) -> None:
    """With what was captured of it, though Dynamo keeps each backend."""

    def captures() -> int:
        return sum(type(known) is Recorder for known in gc.get_objects())

    alive, before = [], captures()
    for _ in range(3):
        model = fused_copy(randomised(Model()))
        model(x).sum().backward()
        alive.append(weakref.ref(model))
    del model
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3
    assert captures() <= before


def kept() -> int:
    """How many graphs and guards are alive."""
    for _ in range(3):  # what a finalizer lets go of is garbage of the next time
        gc.collect()
    held = fx.GraphModule, CheckFunctionManager
    return sum(issubclass(type(known), held) for known in gc.get_objects())


class Breaks(Model):
    def forward(self, x):
        h = self.norm(self.fc(x))
        torch._dynamo.graph_break()
        return self.act(h)


@pytest.mark.slow
@own_captures
@pytest.mark.parametrize("make", [Model, Breaks])
def test_what_was_captured_is_freed_with_the_model(x: Any, make: Any) -> None:
    """Guards compare PyTorch's classes by identity: finalizers of these held the graphs."""
    before = kept()
    for _ in range(3):
        fused_copy(randomised(make()))(x).sum().backward()
    assert kept() <= before


@pytest.mark.slow
@own_captures
def test_what_was_captured_for_an_object_is_freed_with_it(x: Any) -> None:
    """Another may have its id, by which guards know it."""

    class Picks(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.of.factor

    model = randomised(Picks())
    fused = fused_copy(model)
    before = kept()
    for factor in range(4):
        model.of = fused.of = type("Of", (), {"factor": float(factor)})
        assert_same(fused(x), model(x))
    assert kept() <= before


def test_what_compile_had_set_comes_back(x: Any) -> None:
    model = randomised(Model())
    model.compile(backend="eager")
    before = vars(model)["_compiled_call_impl"]
    epinorm.unfuse(epinorm.fuse(epinorm.fuse(model)))
    assert vars(model)["_compiled_call_impl"] is before


def test_the_graph_breaks_and_each_part_is_fused(x: Any) -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(K, N), nn.Linear(N, N)
            self.na, self.nb = nn.LayerNorm(N), nn.RMSNorm(N)

        def forward(self, x):
            h = F.relu(self.na(self.a(x)))
            torch._dynamo.graph_break()
            h = self.nb(self.b(h))
            return h if h.sum() < 1e9 else -h

    model = randomised(Two())
    fused = fused_copy(model)
    assert_same(fused(x), model(x))
    explained = epinorm.explain(fused)
    assert [row.where for row in explained.rows] == ["a → na", "b → nb"]
    assert explained.fused == 2
    for note, why in zip(explained.notes, ("", "branches on the value of a tensor"), strict=True):
        assert "breaks" in note
        assert "test_calls.py:" in note
        assert why in note


def test_classes_are_freed(x: Any) -> None:
    def local_class() -> weakref.ref[type]:
        class Local(Model):
            def forward(self, x: Tensor) -> Tensor:
                return super().forward(x)

        fused_copy(Local().double())(x)
        return weakref.ref(Local)

    classes = [local_class() for _ in range(5)]
    torch._dynamo.reset()
    gc.collect()
    assert not any(cls() for cls in classes)


def test_eagers_roundings_are_asked_for_by_name() -> None:
    """In 16 bit, layer by layer: what is written out by hand rounds more often, and stays."""

    class ByHand(Model):
        def forward(self, x):
            h = self.fc(x)
            h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
            return F.relu(self.norm(self.fc(x))) + h

    x = torch.randn(ROWS, K).bfloat16()
    for make, chains in ((Model, 1), (ByHand, 1)):
        model = randomised(make()).bfloat16()
        fused = fused_copy(model, rounding="eager")
        assert torch.equal(fused(x), model(x))
        rows = epinorm.explain(fused).rows
        assert sum(row.fused for row in rows) == chains
    with pytest.raises(ValueError, match="rounding"):
        epinorm.fuse(Model(), rounding="twice")  # type: ignore[arg-type]
