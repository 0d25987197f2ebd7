"""Time the named shapes and put the rows into a results file.

    PYTHONPATH=src python3 benchmarks/run.py --shapes kb62,skinny --dtypes float32,bfloat16 \\
        --precisions highest,high --passes forward,training --out benchmarks/results

Rows go into OUT/<gpu>.json as soon as they are measured, each in place of the one with the same
shape, dtype, precision, pass and strategy; under EPINORM_CORE=portable into the file
OUT/<gpu>-portable.json. A pass may also be one of micro.py's rows, which time a kernel alone. The
exit code is 0 only if every row was verified.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from epinorm.backends.cuda.plan.strategy import wanted_core
from epinorm.tools.bench import bench
from epinorm.tools.kernelbench.protocol import make_case
from epinorm.tools.results import Row, device_name, device_slug, merge_rows
from epinorm.tools.timing import Settings
from micro import MICRO, bench_micro
from readme_tables import markdown_table
from shapes import SHAPES, Shape

HERE = Path(__file__).resolve().parent
DTYPES = ("float32", "bfloat16", "float16", "float64")
PASSES = ("forward", "training")
QUICK = Settings(runs=10, warmup=2, cpu_runs=3, cpu_seconds=2.0, wall_calls=20, wall_blocks=3)


@dataclass(frozen=True)
class Wanted:
    """One row to measure."""

    shape: Shape
    dtype: str
    precision: str
    pass_: str

    def __str__(self) -> str:
        setting = self.dtype if self.precision == "native" else f"{self.dtype} {self.precision}"
        return f"{self.shape.name}, {setting}, {self.pass_}"


def main(arguments: Sequence[str] | None = None) -> int:
    chosen = parser().parse_args(arguments)
    device = torch.device(chosen.device)
    path = chosen.out / f"{device_slug(device_name(device))}{forced_core(device)}.json"
    wanted = list(rows_wanted(chosen, device))
    measured: list[Row] = []
    failed = 0
    began = time.perf_counter()
    for index, what in enumerate(wanted):
        print(
            f"[{index + 1}/{len(wanted)}, {time.perf_counter() - began:.0f} s] {what}", flush=True
        )
        try:
            row = measure(what, chosen, device)
        except Exception as error:
            # One row that breaks must not cost the others their machine time.
            traceback.print_exc()
            print(f"  broke: {type(error).__name__}: {error}", flush=True)
            failed += 1
            continue
        finally:
            clean_up(device)
        failed += not row.verified
        print(f"  {summary(row)}", flush=True)
        merge_rows(path, [row])
        measured.append(row)
    print(f"\n{markdown_table(measured)}\n\n{len(measured)} rows in {path}, {failed} failed")
    return 1 if failed else 0


def forced_core(device: torch.device) -> str:
    """What the file of the results is also named after, so that they stay apart."""
    if device.type != "cuda" or wanted_core() == "auto":
        return ""
    return f"-{wanted_core()}"


def names(known: Sequence[str]):
    def parse(text: str) -> list[str]:
        chosen = [part for part in text.split(",") if part]
        for name in chosen:
            if name not in known:
                raise argparse.ArgumentTypeError(f"unknown: {name!r}; known are {', '.join(known)}")
        return chosen

    return parse


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--shapes", type=names(list(SHAPES)), default=list(SHAPES), help="default: all")
    add("--dtypes", type=names(DTYPES), default=["float32", "bfloat16"])
    add(
        "--precisions", type=names(("highest", "high")), default=["highest", "high"], help="of fp32"
    )
    add("--passes", type=names((*PASSES, *MICRO)), default=list(PASSES))
    add("--strategy", default="auto", help="auto, single, planes, epilogue, cpu or reference")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--out", type=Path, default=HERE / "results", metavar="DIR")
    add("--no-compile", action="store_true", help="do not time torch.compile")
    add("--autotune", action="store_true", help="time torch.compile max-autotune (slow)")
    add("--quick", action="store_true", help="fewer runs, no max-autotune: to try things out")
    return made


def rows_wanted(chosen: argparse.Namespace, device: torch.device) -> Iterator[Wanted]:
    for name in chosen.shapes:
        for dtype in chosen.dtypes:
            precisions = chosen.precisions if dtype == "float32" else ["native"]
            if device.type == "cpu" and dtype == "float32":
                precisions = ["highest"]  # TF32 exists on CUDA alone
            for pass_ in chosen.passes:
                for precision in precisions:
                    if pass_ in MICRO and precision == "high":
                        continue  # no product in it
                    yield Wanted(SHAPES[name], dtype, precision, pass_)


def measure(what: Wanted, chosen: argparse.Namespace, device: torch.device) -> Row:
    settings = QUICK if chosen.quick else Settings()
    dtype = getattr(torch, what.dtype)
    if what.pass_ in MICRO:
        return bench_micro(what.pass_, what.shape, dtype, device, settings)
    model, inputs = what.shape.make(dtype, device)
    training = what.pass_ == "training"
    case = make_case(
        *(what.shape.name, model, inputs, dtype, what.precision, device, training),
        strategy=chosen.strategy,
    )
    competitors = ["compile"] * (not chosen.no_compile)
    competitors += ["compile_autotune"] * (chosen.autotune and not chosen.quick)
    row, _ = bench(case, settings, competitors)
    return row


def clean_up(device: torch.device) -> None:
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def summary(row: Row) -> str:
    if not row.verified:
        return f"NOT VERIFIED: {row.reason}"
    parts = []
    for key in ("ours", "ours_prepacked", "eager", "compile", "compile_autotune", "linear", "copy"):
        value = getattr(row, f"{key}_us")
        if value is not None:
            parts.append(f"{key} {value:.4g}")
    ratio = row.error_ratio
    error = "" if ratio is None else f"; error {row.ours_error:.2e}, {ratio:.2f}x eager's"
    gpus = (row.ours_gpu_us, row.eager_gpu_us, row.linear_gpu_us)
    gpu = "" if None in gpus else "; on the GPU {:.1f}, eager {:.1f}, linear {:.1f}".format(*gpus)
    walls = (row.ours_wall_us, row.eager_wall_us, row.linear_wall_us)
    wall = "" if None in walls else "; wall {:.1f}, eager {:.1f}, linear {:.1f}".format(*walls)
    return f"us: {', '.join(parts)}{error}{gpu}{wall} ({row.strategy})"


if __name__ == "__main__":
    sys.exit(main())
