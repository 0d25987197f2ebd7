"""Time an exported file beside the library's fused module and eager, and its start.

    PYTHONPATH=src python3 benchmarks/exported.py --out benchmarks/results/exported/nvidia-h200.json

The example (or --problem FILE) is exported with products of our own. In one process, interleaved,
for each dtype, precision and pass: the exported ModelNew, the fused module and eager, all verified
before and after. In fresh processes: the first start, which builds, and later ones, which load the
build. Under EPINORM_CORE=portable file and library both take the portable core. Rows go into OUT as
soon as they are measured, each in place of the one that measured the same. The exit code is 0 only
if every row was verified.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from epinorm.backends.cuda.plan.strategy import wanted_core
from epinorm.tools.accuracy import Verification
from epinorm.tools.bench import fp32_precision_set, model_runner
from epinorm.tools.export.export import export
from epinorm.tools.kernelbench.problem import ProblemFile, load_problem
from epinorm.tools.kernelbench.protocol import Precision, fused_copy
from epinorm.tools.results import commit, device_name, put_values, today
from epinorm.tools.timing import Settings, gpu_times, time_interleaved
from epinorm.tools.verify import verify

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "matmul_groupnorm_leakyrelu_sum.py"
SETTINGS: dict[str, tuple[str, Precision]] = {
    "highest": ("float32", "highest"),
    "high": ("float32", "high"),
    "bfloat16": ("bfloat16", "native"),
    "float16": ("float16", "native"),
}
PASSES = ("start", "forward", "training")
LATER_STARTS = 5
KEY = ("problem", "dtype", "precision", "pass", "core", "gpu")

START = """
import time

def passed():
    return time.time() - began

import json, sys
began, path, dtype, precision = float(sys.argv[1]), *sys.argv[2:]
at = {"python": passed()}
import torch
at["torch"] = passed()
torch.zeros(1, device="cuda")
torch.cuda.synchronize()
at["context"] = passed()
import importlib.util
spec = importlib.util.spec_from_file_location("model_new", path)
model_new = importlib.util.module_from_spec(spec)
spec.loader.exec_module(model_new)
at["file"] = passed()
if precision != "native":
    torch.set_float32_matmul_precision(precision)
dtype = getattr(torch, dtype)
model = model_new.ModelNew(*model_new.get_init_inputs()).to("cuda", dtype)
inputs = [value.to("cuda", dtype) for value in model_new.get_inputs()]
torch.cuda.synchronize()
at["model"] = passed()
with torch.no_grad():
    model(*inputs)
torch.cuda.synchronize()
at["result"] = passed()
print(json.dumps(at))
"""


@dataclass(frozen=True)
class Start:
    """Seconds from a process' start until: Python runs, torch is imported, CUDA has its context,
    the file is imported, the model and its inputs are on the GPU, and there is a first result."""

    python: float
    torch: float
    context: float
    file: float
    model: float
    result: float

    @property
    def share_of_file(self) -> float:
        """What the file itself takes of that: its import and its first call."""
        return (self.file - self.context) + (self.result - self.model)


def start(path: Path, dtype: str, precision: str) -> Start:
    """Run a file's ModelNew in a fresh process, on its own inputs."""
    command = [sys.executable, "-c", START, repr(time.time()), str(path), dtype, precision]
    run = subprocess.run(command, capture_output=True, text=True)
    if run.returncode:
        raise RuntimeError(f"{path.name} did not start:\n{run.stderr[-4000:]}")
    return Start(**json.loads(run.stdout.splitlines()[-1]))


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    if not torch.cuda.is_available():
        raise SystemExit("an exported file computes on a CUDA GPU, and PyTorch sees none")
    device = torch.device("cuda")
    settings = Settings(runs=10, warmup=2) if chosen.quick else Settings()
    problem = load_problem(chosen.problem)
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCH_EXTENSIONS_DIR"] = str(Path(folder) / "extensions")  # a first build
        path = Path(folder) / "model_new.py"
        path.write_text(export(chosen.problem).text)
        solution = loaded(path)
        for name in chosen.settings:
            dtype, precision = SETTINGS[name]
            facts = {
                "problem": problem.name,
                "dtype": dtype,
                "precision": precision,
                "core": wanted_core(),
                "gpu": device_name(device),
                "torch": torch.__version__,
                "commit": commit(),
                "date": today(),
            }
            for pass_ in chosen.passes:
                if pass_ == "start":
                    row = starts(path, dtype, precision)
                else:
                    row = measure(problem, solution, dtype, precision, pass_, device, settings)
                failed += not row["verified"]
                put(chosen.out, {**facts, "pass": pass_, **row})
                gc.collect()
                torch.cuda.empty_cache()
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    def names(known: Sequence[str]) -> Any:
        def parse(text: str) -> list[str]:
            wanted = text.split(",")
            for name in wanted:
                if name not in known:
                    raise argparse.ArgumentTypeError(f"unknown: {name!r}; known: {list(known)}")
            return wanted

        return parse

    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--problem", type=Path, default=EXAMPLE, metavar="FILE", help="default: the example")
    add("--settings", type=names(list(SETTINGS)), default=["highest", "high", "bfloat16"])
    add("--passes", type=names(PASSES), default=list(PASSES))
    add("--out", type=Path, required=True, metavar="FILE.json")
    add("--quick", action="store_true", help="fewer runs: to try things out")
    return made


def loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("exported_model_new", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def starts(path: Path, dtype: str, precision: str) -> dict[str, Any]:
    """The first start, which builds, and the median of later ones, stage by stage, in seconds."""
    first = start(path, dtype, precision)
    later = [start(path, dtype, precision) for _ in range(LATER_STARTS)]
    stages = asdict(first)
    return {
        "verified": True,
        "first_start_s": first.result,
        "first_build_s": first.share_of_file,
        "later_start_s": statistics.median(each.result for each in later),
        "later_share_of_file_s": statistics.median(each.share_of_file for each in later),
        "import_torch_s": statistics.median(each.torch for each in later),
        "later_stages_s": {
            name: statistics.median(asdict(each)[name] for each in later) for name in stages
        },
    }


def measure(
    problem: ProblemFile,
    solution: ModuleType,
    dtype: str,
    precision: Precision,
    pass_: str,
    device: torch.device,
    settings: Settings,
) -> dict[str, Any]:
    """Errors and times of one row; no times unless both are verified, before and after."""
    training = pass_ == "training"
    with fp32_precision_set(precision):
        model, inputs = problem.make(getattr(torch, dtype), device)
        exported = solution.ModelNew(*problem.get_init_inputs()).to(device, getattr(torch, dtype))
        fused, _ = fused_copy(problem.name, model, inputs)
        candidates: dict[str, nn.Module] = {"exported": exported, "fused": fused}

        def check(seed: int) -> dict[str, Verification]:
            return {
                name: verify(model, candidate, inputs, training=training, seed=seed)
                for name, candidate in candidates.items()
            }

        found = check(0)
        row: dict[str, Any] = errors(found)
        if not row["verified"]:
            return row
        runners = {
            name: model_runner(module, inputs, training)
            for name, module in {**candidates, "eager": model}.items()
        }
        gc.collect()
        times = time_interleaved(runners, device, settings)
        alone = gpu_times(runners, device, settings)
        again = errors(check(1))
        if not again["verified"]:
            return again
    row |= {f"{name}_us": value for name, value in times.items()}
    row |= {f"{name}_gpu_us": value for name, value in alone.items()}
    row["exported_over_fused"] = times["exported"] / times["fused"]
    row["exported_speedup"] = times["eager"] / times["exported"]
    row["fused_speedup"] = times["eager"] / times["fused"]
    return row


def errors(found: dict[str, Verification]) -> dict[str, Any]:
    worst = {name: verification.worst for name, verification in found.items()}
    wrong = [f"{name}: {worst[name]}" for name, each in found.items() if not each.passed]
    return {
        "verified": not wrong,
        "reason": "; ".join(wrong) or None,
        **{f"{name}_error": each.ours for name, each in worst.items()},
        **{f"eager_error_beside_{name}": each.eager for name, each in worst.items()},
    }


def rounded(value: Any) -> Any:
    """Numbers to four digits; JSON has no Inf and NaN."""
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    if isinstance(value, float):
        return float(f"{value:.4g}") if math.isfinite(value) else None
    return value


def put(path: Path, row: dict[str, Any]) -> None:
    """Add a row to the file, in place of the one with the same key; print it."""
    row = rounded(row)
    put_values(path, row, KEY)
    facts = {*KEY, "torch", "commit", "date"}
    said = {key: value for key, value in row.items() if key not in facts and value is not None}
    print(f"{row['dtype']} {row['precision']}, {row['pass']}: {said}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
