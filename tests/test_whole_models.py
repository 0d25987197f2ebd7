"""``epinorm bench MODEL``: which models, how exact, and what of it stands in files and tables."""

import copy
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typer.testing import CliRunner

import epinorm
from epinorm.tools.accuracy import DRAWS, Comparison
from epinorm.tools.kinks import rows_away_from_kinks
from epinorm.tools.models import SETTINGS, bench_model, load_subject
from epinorm.tools.models.families import family
from epinorm.tools.models.rows import ModelRow
from epinorm.tools.models.subject import dropout_off, most_dropout
from epinorm.tools.models.verify import Judged, compare_candidate, judge, truth_of
from epinorm.tools.page import html_page
from epinorm.tools.results import merge_rows, read_rows_of
from epinorm.tools.tf32 import RoundedOperands
from epinorm.tools.timing import Settings
from epinorm_cli.commands import app
from processes import as_script, run_python
from readme_tables import details_table, models_table

CPU = torch.device("cpu")
FAST = Settings(runs=2, cpu_runs=2, cpu_seconds=0.1)


class Net(nn.Module):
    def __init__(self, wrong: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.fc = nn.Linear(32, 32)
        self.norm = nn.LayerNorm(32)
        self.drop = nn.Dropout(0.5)
        self.out = nn.Linear(32, 8)
        self.wrong = wrong

    def forward(self, ids: Tensor) -> Tensor:
        h = self.drop(torch.relu(self.norm(self.fc(self.embed(ids)))))
        return self.out(h + self.wrong * h.detach())


def net() -> tuple[nn.Module, tuple[Tensor]]:
    return Net(), (torch.randint(0, 20, (4, 16)),)


@pytest.fixture(scope="module")
def rows() -> list[ModelRow]:
    """One model from an import path, in two settings, dropout active while it is timed."""
    subject = load_subject(f"{__name__}:net")
    return [
        bench_model(subject, SETTINGS[setting], training, CPU, (), FAST)
        for setting, training in (("highest", False), ("bf16-autocast", True))
    ]


def test_torch_compile_is_run_once_and_ours_at_every_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    asked = iter([DRAWS, 0, 0, 0])  # of both ways, twice: one missed narrowly over the first draws
    monkeypatch.setattr("epinorm.tools.models.bench.more_draws", lambda *_: next(asked))
    told: list[str] = []
    ways, setting = ("compile", "backend"), SETTINGS["highest"]
    subject = load_subject(f"{__name__}:net")
    row = bench_model(subject, setting, True, CPU, ways, FAST, lambda stage, _: told.append(stage))
    assert {"fused", "backend", "fused over compile", "backend over compile"} < set(row.spreads)
    assert told.count("verifying compile") == 1
    assert told.count("verifying fused") == told.count("verifying backend") == 2 * DRAWS


def test_each_row_says_what_was_measured(rows: list[ModelRow]) -> None:
    forward, training = rows
    assert forward.verified
    assert training.verified
    assert (forward.model, forward.setting, forward.pass_) == ("net", "highest", "forward")
    assert (training.setting, training.dtype, training.pass_) == (
        "bf16-autocast", "float32", "training",
    )  # fmt: skip
    assert (forward.dropout, training.dropout) == (0.0, 0.5)
    assert forward.fused_places == 1
    for row in rows:
        assert row.eager_ms > 0
        assert row.fused_ms > 0
        assert (
            row.compile_ms is row.backend_ms is row.fused_peak_mb is row.fused_workspace_mb is None
        )
        assert set(row.spreads) == {"fused"}
        assert row.reasons is None
    assert 1e-9 < forward.ours_error <= 1.1 * forward.eager_error < 1e-5
    assert 1e-4 < training.ours_gradient_error <= 1.1 * training.eager_gradient_error < 1e-1


def test_a_page_refuses_what_is_noise_against_compile_too(rows: list[ModelRow]) -> None:
    row = replace(rows[0], eager_ms=10.0, compile_ms=8.0, fused_ms=4.0, runs=9)
    for spread, said in (
        ([0.4, 0.625], "2.00× torch.compile (1.60 to 2.50)."),
        ([0.4, 1.25], "not distinguishable from torch.compile (0.80 to 2.50)."),
    ):
        shown = replace(row, spreads={"fused": [0.25, 0.5], "fused over compile": spread}).as_row()
        page = html_page("net", [shown])
        assert f"Forward: 2.50× eager (2.00 to 4.00 over 9 runs); {said}" in page
        assert "<p>–</p>" not in page


HIGHEST = SETTINGS["highest"]


def judged(
    model: nn.Module, candidate: nn.Module, inputs: tuple[Tensor], training: bool = True
) -> Judged:
    draws = []
    for seed in range(3):
        truth = truth_of(model, inputs, HIGHEST, training, seed)
        candidate.load_state_dict(model.state_dict())
        draws.append(compare_candidate(truth, candidate, candidate, inputs, HIGHEST, training))
    return judge(draws, HIGHEST)


@pytest.mark.parametrize("training", [False, True])
def test_a_wrong_model_is_found(training: bool) -> None:
    model, inputs = net()
    model.drop.p = 0.0
    wrong = copy.deepcopy(model)
    assert judged(model, wrong, inputs, training).reason is None
    wrong.wrong = 1e-4
    assert "allowed" in judged(model, wrong, inputs, training).reason


def _scaled(model: Net) -> None:
    model.norm.bias.register_hook(lambda gradient: gradient * 1.001)


def _without_one_row(model: Net) -> None:
    fc = model.fc
    fc.forward = lambda x: torch.cat(
        [F.linear(x[:1], fc.weight.detach(), fc.bias), F.linear(x[1:], fc.weight, fc.bias)]
    )


def _turned(model: Net) -> None:
    fc = model.fc

    def forward(x: Tensor) -> Tensor:
        turned = F.linear(x, fc.weight.detach().t())
        return F.linear(x.detach(), fc.weight, fc.bias) + turned - turned.detach()

    fc.forward = forward


@pytest.mark.parametrize(
    ("wrong", "gradient"),
    [(_scaled, "norm.bias"), (_without_one_row, "fc.weight"), (_turned, "embed.weight")],
)
def test_one_wrong_gradient_is_found(wrong: Callable[[Net], None], gradient: str) -> None:
    model, inputs = net()
    model.drop.p = 0.0
    candidate = copy.deepcopy(model)
    wrong(candidate)
    found = {c.what: c.passed for c in judged(model, candidate, inputs).comparisons}
    assert not found.pop(f"gradient of {gradient}")
    assert not found.pop("all gradients together") or gradient == "norm.bias"
    assert all(found.values())


@pytest.mark.parametrize(("operands", "right"), [(torch.float32, True), (torch.bfloat16, False)])
def test_tf32_is_the_yardstick_where_it_is_allowed(
    monkeypatch: pytest.MonkeyPatch, operands: torch.dtype, right: bool
) -> None:
    model, inputs = net()
    model.drop.p = 0.0

    def call(*inputs: Tensor) -> Any:
        with RoundedOperands(), torch.autocast("cpu", torch.bfloat16, operands == torch.bfloat16):
            return model(*inputs).float()

    said = []
    for allowed in (False, True):
        monkeypatch.setattr("epinorm.tools.verify.allows_tf32", lambda *_, found=allowed: found)
        truth = truth_of(model, inputs, HIGHEST, False)
        of = (truth, model, call, inputs, HIGHEST, False)
        said.append(judge([compare_candidate(*of)], HIGHEST).reason)
    assert said[0]
    assert (said[1] is None) == right


class Attention(nn.Module):
    """One layer, of tokens that have nearly all in common: what they have in common adds nothing to
    the gradients of queries and keys, but its roundings do."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))
        self.common = nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        x = x * 0.01 + self.common
        q, k, v = (layer(x).unflatten(-1, (4, 8)).transpose(1, 2) for layer in self.qkv)
        return F.scaled_dot_product_attention(q, k, v)


class Permuted(nn.Module):
    """A model on its features in another order: the same function, rounded otherwise."""

    def __init__(self, model: Attention) -> None:
        super().__init__()
        self.model, self.order = model, torch.randperm(32)

    def forward(self, x: Tensor) -> Tensor:
        model, order = self.model, self.order
        x = x[..., order] * 0.01 + model.common[order]
        made = (F.linear(x, fc.weight[:, order], fc.bias) for fc in model.qkv)
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in made)
        return F.scaled_dot_product_attention(q, k, v)


@pytest.fixture(scope="module")
def another_order() -> tuple[Attention, Tensor, list[tuple[Comparison, ...]]]:
    """Draws of what eager gives in another order of summation."""
    torch.manual_seed(0)
    model, x = Attention(), torch.randn(8, 64, 32)
    order, draws = Permuted(model), []
    for seed in range(24):
        truth = truth_of(model, (x,), HIGHEST, True, seed)
        draws.append(compare_candidate(truth, model, order, (x,), HIGHEST, True))
    return model, x, draws


def test_orders_of_summation_are_equivalent_over_several_draws(another_order: Any) -> None:
    _, _, draws = another_order
    alone = [judge([draw], HIGHEST).reason for draw in draws]
    assert any("qkv." in reason for reason in alone if reason)  # which one: the CPU's orders
    for first in range(0, len(draws), DRAWS):
        assert judge(draws[first : first + DRAWS], HIGHEST).reason is None


def test_a_wrong_gradient_whose_terms_cancel_is_found(another_order: Any) -> None:
    model, x, _ = another_order
    wrong = copy.deepcopy(model)
    wrong.qkv[1].weight.register_hook(lambda gradient: gradient * 1.02)
    found = judged(model, wrong, (x,))
    (key,) = [c for c in found.comparisons if c.what == "gradient of qkv.1.weight"]
    assert key.eager > 1e-3
    assert found.reason.startswith("gradient of qkv.1.weight")


def test_a_gradient_that_is_zero_but_for_roundings_is_no_yardstick(another_order: Any) -> None:
    model, x, _ = another_order
    noisy = copy.deepcopy(model)
    noisy.qkv[1].bias.register_hook(lambda gradient: gradient * 3)
    found = judged(model, noisy, (x,))
    (of_bias,) = [c for c in found.comparisons if c.what == "gradient of qkv.1.bias"]
    assert of_bias.eager > 0.5
    assert found.reason is None


def test_rows_near_a_kink_of_any_layer_are_left_out() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    x = torch.ones(6, 4, dtype=torch.float64)
    x[1, 2] = -1e-9
    (kept,) = rows_away_from_kinks(model, (x,), [torch.Size((6, 2))], 1e-8)
    assert kept[:, 0].tolist() == kept[:, 1].tolist() == [True, False, *[True] * 4]
    assert rows_away_from_kinks(model, (x * 1e-3,), [torch.Size((6, 2))], 1.0) == [None]


def test_dropout_is_off_within_alone() -> None:
    model, inputs = net()
    with dropout_off(model):
        assert torch.equal(model(*inputs), model(*inputs))
    assert not torch.equal(model(*inputs), model(*inputs))


def test_dropout_that_is_no_module_is_off_too() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.5)
    x = torch.randn(4, 3, 8)
    with dropout_off(layer):
        assert torch.equal(layer(x), layer(x))
    assert most_dropout(layer) == layer.self_attn.dropout == 0.5


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.fc(x), 0.5, True)


def test_a_model_that_does_not_repeat_its_result_cannot_be_verified() -> None:
    with pytest.raises(ValueError, match="another result at each call"):
        truth_of(Noisy(), (torch.randn(4, 8),), SETTINGS["highest"], False)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("bert", "expected one of bert_base"),
        ("no.such:thing", "cannot be imported"),
        ("missing.py:net", "missing.py does not exist"),
        (f"{__name__}:nothing", "defines no function nothing()"),
        (f"{__name__}:CPU", "defines no function CPU()"),
    ],
)
def test_a_name_that_is_none_is_one_sentence(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        load_subject(text)
    result = CliRunner().invoke(app, ["bench", text])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert "TRACEBACK" not in result.stderr  # the user's mistake, not ours


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["ours.py", "--settings", "bf16"], "--settings, --small and --runs are for a whole model"),
        (["ours.py", "--small"], "ours.py:Model to bench it as a whole model"),
        (["ours.py", "--runs", "3"], "ours.py:Model to bench it as a whole model"),
        (["ours.py", "--problems", "62"], "--problems goes with --kernelbench"),
        (["tdmpc2", "--autotune"], "tdmpc2 is a whole model"),
        (["--kernelbench", "folder", "--dtype", "bf16"], "--kernelbench runs forward in fp32"),
        (["--kernelbench", "folder", "--training"], "--kernelbench runs forward in fp32"),
    ],
)
def test_an_option_that_does_nothing_is_an_error(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())


def test_a_problem_files_options_are_not_taken_for_a_whole_models() -> None:
    result = CliRunner().invoke(app, ["bench", "tdmpc2", "--small", "--dtype", "bfloat16"])
    assert result.exit_code == 2
    assert "--settings highest, high, bf16" in result.stderr
    result = CliRunner().invoke(app, ["check", "model.py:factory"])
    assert "a whole model is for bench and explain" in result.stderr


def test_a_factory_in_a_file_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("WIDTH = 6\n")
    (tmp_path / "mine.py").write_text(
        "import torch\nfrom neighbour import WIDTH\n"
        "def factory():\n    return torch.nn.Linear(WIDTH, 2), torch.ones(3, WIDTH)\n"
    )
    subject = load_subject(f"{tmp_path}/mine.py:factory")
    model, (x,) = subject.make(SETTINGS["highest"], CPU)
    assert (subject.name, model(x).shape) == ("factory", (3, 2))


def test_a_factorys_own_classes_are_captured_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, fresh_dynamo: None
) -> None:
    """Dynamo imports the module of a function's globals, here ``torch`` within ``forward``."""
    (tmp_path / "critic.py").write_text(
        "import torch\n"
        "class Critic(torch.nn.Sequential):\n"
        "    def forward(self, x, y):\n"
        "        return super().forward(torch.cat([x, y], -1))\n"
        "def make():\n"
        "    print('not for stdout')\n"
        "    parts = torch.nn.Linear(16, 32), torch.nn.GroupNorm(4, 32)\n"
        "    return Critic(*parts), (torch.randn(64, 8), torch.randn(64, 8))\n"
    )
    result = CliRunner().invoke(app, ["explain", f"{tmp_path}/critic.py:make", "--device", "cpu"])
    assert result.exit_code == 0, result.stderr
    assert "1 of 1 chains fused" in result.stdout
    assert "not for stdout" not in result.stdout
    model, inputs = load_subject(f"{tmp_path}/critic.py:make").make(SETTINGS["highest"], CPU)
    with caplog.at_level("INFO", logger="epinorm"):
        epinorm.fuse(model)(*inputs)
    assert "unfused" not in caplog.text


@pytest.mark.slow
def test_the_command_writes_rows_and_says_what_it_found(tmp_path: Path) -> None:
    arguments = ["bench", "tdmpc2", "--small", "--forward", "--no-compile", "--runs", "2"]
    arguments += ["--device", "cpu", "--out", str(tmp_path)]
    for _ in range(2):  # the second run's row replaces the first's
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
    assert (
        "tdmpc2_small, highest, forward: 4 of 4 chains can be fused, 0 of 0 other Linears are"
        in " ".join(result.stdout.split())
    )
    (path,) = (tmp_path / "models").iterdir()
    said = result.stdout.replace("\n", "")
    assert f"results: {path}" in said
    assert re.search(r"highest: Forward: .*eager.* \(\d+\.\d\d to \d+\.\d\d over \d+ runs\)", said)
    assert f"page: {tmp_path / 'tdmpc2_small.html'}" in said
    assert "tdmpc2_small, forward" in (tmp_path / "tdmpc2_small.html").read_text("utf-8")
    (row,) = read_rows_of(ModelRow, path)
    assert row.model == "tdmpc2_small"
    assert row.verified
    assert json.loads(path.read_text())[0]["pass"] == "forward"


FORKED = """
import os, runpy, subprocess, sys, traceback

Popen = subprocess.Popen

class Forked:
    # A process that runs a script as a new Python would, which would have to import PyTorch.

    def __init__(self, command, env, pass_fds):
        self.returncode = None
        self.pid = os.fork()
        if self.pid:
            return
        status = 1
        try:
            for number in map(int, os.listdir("/proc/self/fd")):
                if number > 2 and number not in pass_fds:
                    try:
                        os.close(number)
                    except OSError:  # of this list itself
                        pass
            subprocess.Popen = Popen
            os.environ.update(env)
            sys.argv = command[3:]
            runpy.run_path(sys.argv[0], run_name="__main__")
        except SystemExit as ended:
            status = ended.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)

    def wait(self, timeout=None):
        if self.returncode is None:
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self):
        if self.returncode is None:
            os.kill(self.pid, 9)

subprocess.Popen = Forked
"""


@pytest.mark.slow
def test_rows_are_verified_side_by_side_and_timed_one_by_one(tmp_path: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "models.py"
    wanted = ["tdmpc2:bf16:forward", "tdmpc2:highest"]
    arguments = ["--small", "--device", "cpu", "--competitors", "", "--out", str(tmp_path)]
    done = run_python(FORKED + as_script(script, *wanted, *arguments))
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (tmp_path / "models").iterdir()
    found = {(row.setting, row.pass_) for row in read_rows_of(ModelRow, path) if row.verified}
    assert found == {("bf16", "forward"), ("highest", "forward"), ("highest", "training")}
    told = done.stdout.splitlines()
    ready = [i for i, line in enumerate(told) if "verified after" in line]
    assert ready == [0, 1, 2], "a row was timed while another one was verified"


@pytest.mark.parametrize(
    ("kernel", "name"),
    [
        ("linear_norm", "epinorm product"),
        ("split_and_sample", "epinorm planes and guards"),
        ("norm_backward_planes", "epinorm norm"),
        ("void cublasLt::splitKreduce_kernel<32, 16>", "library product"),
        ("sm90_xmma_gemm_f32f32_tf32f32", "library product"),
        ("void at::native::vectorized_layer_norm_kernel<float>", "norm"),
        ("void at::native::vectorized_elementwise_kernel<4>", "pointwise, copies"),
        ("fmha_cutlassF_f32_aligned_64x64_rf_sm80", "attention"),
        ("triton_poi_fused_add_0", "Triton"),
    ],
)
def test_kernels_have_families(kernel: str, name: str) -> None:
    assert family(kernel) == name


def test_tables_show_times_ratios_and_what_is_not_verified(
    rows: list[ModelRow], tmp_path: Path
) -> None:
    good = replace(
        rows[0], eager_ms=10.0, compile_ms=8.0, fused_ms=4.0, backend_ms=2.5, spreads=None
    )
    bad = replace(good, setting="bf16", fused_ms=None, reasons={"fused": "output: error 1"})
    table = models_table([good, bad])
    assert "| net | highest | 10 ms | 8 ms (1.25×) | 4 ms (2.50×) | 2.5 ms (4.00×) |" in table
    assert "| net | bf16 | 10 ms | 8 ms (1.25×) | not verified | 2.5 ms (4.00×) |" in table
    noisy = replace(good, spreads={"fused": [0.2, 1.5], "compile": [0.75, 0.9]})
    assert "8 ms (1.25×) | 4 ms (within noise) | 2.5 ms (4.00×) |" in models_table([noisy])
    assert "| 1 of 1, 0 of 1 |" in details_table([good])
    assert models_table([]) == "Not measured yet."
    path = tmp_path / "gpu.json"
    merge_rows(path, [good, bad, good])
    assert [row.setting for row in read_rows_of(ModelRow, path)] == ["highest", "bf16"]
    (tmp_path / "none.json").write_text('{"a": 1}')
    with pytest.raises(ValueError, match="not a results file"):
        read_rows_of(ModelRow, tmp_path / "none.json")
