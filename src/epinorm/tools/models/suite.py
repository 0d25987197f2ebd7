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
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import epinorm
from epinorm.tools.bench import fp32_precision_set, model_runner
from epinorm.tools.kernelbench.problem import ProblemError, ProblemFile, load_problem
from epinorm.tools.models.bench import FEW_RUNS
from epinorm.tools.models.exported import (
    exported_model,
    judged,
    left_to_pytorch,
    write_exported,
)
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

    The same of the file that ``epinorm export`` writes, where it was asked for; ``judged``: whether
    the judge finds it clean, ``exported_reason``: what is wrong with it.
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
    exported_us: float | None = None
    exported_seeds: int | None = None
    judged: bool | None = None
    exported_reason: str | None = None

    @property
    def is_right(self) -> bool:
        """In every way that was asked for."""
        return self.right and self.exported_reason is None

    def over(self, key: str, mine: str = "ours") -> float | None:
        """The competitor's time over ours, or over that of ``mine``."""
        own, other = getattr(self, f"{mine}_us"), getattr(self, f"{key}_us")
        return other / own if own and other else None


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
    exported: Path | None = None,
    judging: bool = False,
) -> SuiteRow:
    """Fuse, verify and time one problem; whatever goes wrong with it is the row's reason.

    ``exported``: where to export it to; that file is held against the rule and timed beside, and,
    with ``judging``, given to the judge.
    """
    row = SuiteRow(number, path.stem, False, 0, 0, 0, 0, **measured_on(device))
    torch._dynamo.reset()
    try:
        with fp32_precision_set("highest"), torch.no_grad():
            row = _bench(row, load_problem(path, scale), device, compile, timing, notify, exported)
        if exported is None or not judging or row.exported_reason is not None:
            return row
        _make_room(device)
        notify("judging", 0.8)
        wrong = judged(path, exported, device, scale)
        return replace(row, judged=wrong is None, exported_reason=wrong and f"judge: {wrong}")
    except KeyboardInterrupt:
        raise
    except Exception as error:  # one problem's failure is its row, not the end of the table
        return replace(row, reason=in_a_line(error))
    finally:
        _make_room(device)


def _make_room(device: torch.device) -> None:
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
    exported: Path | None,
) -> SuiteRow:
    notify("making the model", 0.0)
    with device:  # billions of random numbers take a CPU long
        model, inputs = problem.make(torch.float32, device)
        new = None if exported is None else _exported(problem, model, exported, device)
    fused = epinorm.fuse(copy.deepcopy(model))
    notify("KernelBench's five seeds", 0.2)
    candidates = {"ours": fused} if new is None else {"ours": fused, "exported": new}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        exact, passed, missed = _by_the_rule(problem, model, candidates, device)
    seeds, reason = passed["ours"], missed["ours"]
    explained = epinorm.explain(fused)
    places = (*explained.rows, *explained.linears)
    row = replace(row, seeds=seeds, exact_seeds=exact)
    if new is not None:
        wrong_file = missed["exported"] or left_to_pytorch(warned, device)
        row = replace(row, exported_seeds=passed["exported"], exported_reason=wrong_file)
    row = replace(row, fused=sum(place.fused for place in places), places=len(places))
    notify("against float64", 0.4)
    row, wrong = _judged(row, model, fused, inputs)
    if reason := reason or wrong:
        return replace(row, reason=reason)
    runners = {
        name: model_runner(m, inputs, False) for name, m in (("ours", fused), ("eager", model))
    }
    if new is not None and row.exported_reason is None:
        runners["exported"] = model_runner(new, inputs, False)
    if compile:
        notify("compiling", 0.5)
        compiled = torch.compile(model, dynamic=False)
        compiled(*inputs)
        runners["compile"] = model_runner(model, inputs, False, call=compiled)
    notify("timing", 0.6)
    samples = sample_interleaved(runners, device, timing)
    times: dict[str, Any] = {f"{n}_us": statistics.median(of) for n, of in samples.items()}
    return replace(row, right=True, **times)


def _exported(
    problem: ProblemFile, model: nn.Module, file: Path, device: torch.device
) -> nn.Module:
    with torch.device("cpu"):  # where export looks at the problem
        write_exported(problem.path, file, device)
    return exported_model(problem, model, file)


def _by_the_rule(
    problem: ProblemFile,
    model: nn.Module,
    candidates: Mapping[str, nn.Module],
    device: torch.device,
) -> tuple[int, dict[str, int], dict[str, str | None]]:
    """On how many seeds Model passes in float64; how many each candidate passes; what is wrong."""
    exact_model = copy.deepcopy(model).double()
    exact = 0
    passed, missed = dict.fromkeys(candidates, 0), dict.fromkeys(candidates, 0)
    for seed in SEEDS:
        torch.manual_seed(seed)
        with device:
            given = problem.get_inputs()
        given = [v.to(device) if isinstance(v, Tensor) else v for v in given]
        wide = of_floats(given, Tensor.double)
        eager = model(*given)
        could = within_tolerance(exact_model(*wide), eager)
        exact += could
        for name, candidate in candidates.items():
            right = within_tolerance(candidate(*given), eager)
            passed[name] += right
            missed[name] += could and not right
    of = f"of {len(SEEDS)} seeds, of float64's {exact}"
    wrong = {
        name: f"KernelBench's rule passes {passed[name]} {of}" if missed[name] else None
        for name in candidates
    }
    return exact, passed, wrong


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


def geometric_mean(
    rows: Iterable[SuiteRow], key: str = "eager", mine: str = "ours"
) -> float | None:
    """Of the competitor's time over ours, over the rows that have both; None if none has."""
    logs = [math.log(ratio) for row in rows if (ratio := row.over(key, mine))]
    return math.exp(sum(logs) / len(logs)) if logs else None
