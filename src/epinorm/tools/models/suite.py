"""All of KernelBench's level 2 that begins with a matrix product, from a folder the user fetched.

Each problem as KernelBench runs it: fp32 at ``highest``, in train mode as Model is constructed,
forward without gradients. Right is what is at least as near to float64 as eager is and passes
KernelBench's rule, allclose to eager, on each of five seeds on which Model itself in float64 passes
it: where a sum of millions of products ends near zero (14, 18) eager's own error is beyond the
rule's tolerance, and where dropout draws (66) the rule compares two different masks.
"""

from __future__ import annotations

import copy
import gc
import math
import re
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epinorm
from epinorm.tools.bench import fp32_precision_set, model_runner
from epinorm.tools.kernelbench.problem import ProblemError, ProblemFile, load_problem
from epinorm.tools.models.bench import FEW_RUNS
from epinorm.tools.models.subject import SETTINGS, dropout_off
from epinorm.tools.models.verify import compare_candidate, judge, truth_of
from epinorm.tools.progress import Notify, in_a_line, silent
from epinorm.tools.results import JsonRow, measured_on
from epinorm.tools.timing import Settings, sample_interleaved
from epinorm.tools.verify import of_floats

LEVEL_2 = (
    *(9, 12, 14, 18, 22, 28, 29, 30, 33, 37, 39, 40, 41, 45, 51, 53, 55, 56, 59, 62, 63, 64, 66),
    *(68, 70, 75, 76, 80, 81, 84, 86, 88, 94, 95, 97, 98, 99),
)
"""The problems of level 2 whose name begins with Gemm, Matmul or BMM."""
SEEDS = (42, 43, 44, 45, 46)
TOLERANCE = 1e-4
"""KernelBench's for float32, absolute and relative."""
NO_YARDSTICK = 1e-3
"""An error of eager's that roundings do not explain: a Model that draws random numbers itself."""


@dataclass(frozen=True)
class SuiteRow(JsonRow):
    """One problem. Times in µs, by KernelBench's measure: forward, without gradients.

    ``seeds``: how many of SEEDS KernelBench's rule passes; ``exact_seeds``: how many it would of
    Model in float64. Errors are relative to float64.
    ``fused``: chains that can be fused and other Linears that run as ours, of ``places``. What is
    not ``right`` has no times, and ``reason`` says why.
    """

    KEY = ("problem", "gpu")

    problem: int
    name: str
    right: bool
    seeds: int
    exact_seeds: int
    fused: int
    places: int
    gpu: str
    torch: str
    commit: str | None
    date: str
    ours_us: float | None = None
    eager_us: float | None = None
    compile_us: float | None = None
    ours_error: float | None = None
    eager_error: float | None = None
    reason: str | None = None

    def over(self, key: str) -> float | None:
        """The competitor's time over ours."""
        other = getattr(self, f"{key}_us")
        return other / self.ours_us if self.ours_us and other else None


def problem_files(folder: Path) -> dict[int, Path]:
    """LEVEL_2's files by number, in the folder or its ``level2``; raises ProblemError for none."""
    found: dict[int, Path] = {}
    for place in (folder, folder / "level2", folder / "KernelBench" / "level2"):
        for path in sorted(place.glob("*_*.py")):
            number = re.match(r"(\d+)_", path.name)
            if number and int(number[1]) in LEVEL_2:
                found.setdefault(int(number[1]), path)
    if not found:
        raise ProblemError(
            f"{folder} holds no problem of KernelBench's level 2 (62_….py); expected a copy of "
            "https://github.com/ScalingIntelligence/KernelBench"
        )
    return {number: found[number] for number in LEVEL_2 if number in found}


def within_tolerance(ours: Any, eager: Any) -> bool:
    """Whether KernelBench takes an output for that of its Model: allclose, of one shape."""
    if not isinstance(ours, Tensor) or not isinstance(eager, Tensor) or ours.shape != eager.shape:
        return False
    return torch.allclose(eager, ours.to(eager.dtype), atol=TOLERANCE, rtol=TOLERANCE)


def bench_problem(
    number: int,
    path: Path,
    device: torch.device,
    *,
    compile: bool = True,
    scale: int = 1,
    timing: Settings = FEW_RUNS,
    notify: Notify = silent,
) -> SuiteRow:
    """Fuse, verify and time one problem; whatever goes wrong with it is the row's reason."""
    row = SuiteRow(number, path.stem, False, 0, 0, 0, 0, **measured_on(device))
    torch._dynamo.reset()
    try:
        with fp32_precision_set("highest"), torch.no_grad():
            return _bench(row, load_problem(path, scale), device, compile, timing, notify)
    except KeyboardInterrupt:
        raise
    except Exception as error:  # one problem's failure is its row, not the end of the table
        return replace(row, reason=in_a_line(error))
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _bench(
    row: SuiteRow,
    problem: ProblemFile,
    device: torch.device,
    compile: bool,
    timing: Settings,
    notify: Notify,
) -> SuiteRow:
    notify("making the model", 0.0)
    with device:  # billions of random numbers take a CPU long
        model, inputs = problem.make(torch.float32, device)
    fused = epinorm.fuse(copy.deepcopy(model))
    notify("KernelBench's five seeds", 0.2)
    seeds, exact, reason = _by_the_rule(problem, model, fused, device)
    explained = epinorm.explain(fused)
    places = (*explained.rows, *explained.linears)
    row = replace(row, seeds=seeds, exact_seeds=exact)
    row = replace(row, fused=sum(place.fused for place in places), places=len(places))
    notify("against float64", 0.4)
    row, wrong = _judged(row, model, fused, inputs)
    if reason := reason or wrong:
        return replace(row, reason=reason)
    runners = {
        name: model_runner(m, inputs, False) for name, m in (("ours", fused), ("eager", model))
    }
    if compile:
        notify("compiling", 0.5)
        compiled = torch.compile(model, dynamic=False)
        compiled(*inputs)
        runners["compile"] = model_runner(model, inputs, False, call=compiled)
    notify("timing", 0.6)
    samples = sample_interleaved(runners, device, timing)
    times: dict[str, Any] = {f"{n}_us": statistics.median(of) for n, of in samples.items()}
    return replace(row, right=True, **times)


def _by_the_rule(
    problem: ProblemFile, model: nn.Module, fused: nn.Module, device: torch.device
) -> tuple[int, int, str | None]:
    """How many seeds pass, how many would in float64, and on how many of these ours does not."""
    exact_model = copy.deepcopy(model).double()
    passed, exact, missed = 0, 0, 0
    for seed in SEEDS:
        torch.manual_seed(seed)
        with device:
            given = problem.get_inputs()
        given = [v.to(device) if isinstance(v, Tensor) else v for v in given]
        wide = of_floats(given, Tensor.double)
        eager = model(*given)
        right = within_tolerance(fused(*given), eager)
        could = within_tolerance(exact_model(*wide), eager)
        passed, exact, missed = passed + right, exact + could, missed + (could and not right)
    said = f"KernelBench's rule passes {passed} of {len(SEEDS)} seeds, of float64's {exact}"
    return passed, exact, said if missed else None


def _judged(
    row: SuiteRow, model: nn.Module, fused: nn.Module, inputs: tuple[Any, ...]
) -> tuple[SuiteRow, str | None]:
    """The row with both errors, and what is wrong; the parameters are random meanwhile."""
    setting = SETTINGS["highest"]
    with dropout_off(model, fused):
        truth = truth_of(model, inputs, setting, training=False)
        fused.load_state_dict(model.state_dict())
        compared = compare_candidate(truth, fused, fused, inputs, setting, training=False)
        judged = judge([compared], setting)
    output = judged.output
    row = replace(row, ours_error=output.ours, eager_error=output.eager)
    if output.eager > NO_YARDSTICK:
        return row, f"eager's own error is {output.eager:.1e}: it is no yardstick"
    return row, judged.reason


def geometric_mean(rows: Iterable[SuiteRow], key: str = "eager") -> float | None:
    """Of the competitor's time over ours, over the rows that have both; None if none has."""
    logs = [math.log(ratio) for row in rows if (ratio := row.over(key))]
    return math.exp(sum(logs) / len(logs)) if logs else None
