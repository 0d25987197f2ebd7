"""Count the places where a Linear's result reaches a norm, and those that can be fused.

`make coverage`, or `python tests/models/coverage.py [NAME...] [--all] [--out FILE | --check FILE]`:
a line for each model, in training and in eval, then the sum of all; BatchNorm counts by itself.
Whether a plan then leaves a chain to PyTorch's layers does not count. --all: each place that cannot
be fused, and why.
--out: the sums as a results file (benchmarks/results/coverage/cpu.json, for docs/internals).
--check: the exit code is 1 if fewer places are found, or fused, than that file says.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import torch

import epinorm
from epinorm.capture.explain import Row
from epinorm.tools.results import commit, today, write_atomic
from zoo import CASES, Missing

KINDS = {"norm": "a norm of rows or groups", "BatchNorm": "BatchNorm"}
MODES = ("training", "eval")
PACKAGES = ("torch", "transformers", "timm", "torchvision", "diffusers", "x-transformers")


def rows_of(name: str, training: bool) -> list[Row]:
    """The places of one model; raises Missing where its package is."""
    make, inputs = CASES[name]
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = epinorm.fuse(make().train(training), strategy="reference")
    with torch.set_grad_enabled(training):
        model(**inputs)
    return list(epinorm.explain(model).rows)


def _is_batch_norm(row: Row) -> bool:
    of_chain = "→" not in row.chain  # else it is the path to an obstacle
    by_statistics = "batch_norm" in row.chain or "norm" not in row.chain  # of the batch, or running
    reached = not of_chain and row.chain.endswith("batch_norm")
    return reached or "BatchNorm" in row.reason or (of_chain and by_statistics)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--check", type=Path)
    chosen = parser.parse_args()
    names = chosen.names or list(CASES)
    totals: Counter[str] = Counter()
    for name in names:
        parts = []
        for mode in MODES:
            try:
                rows = rows_of(name, mode == "training")
            except Missing as error:
                parts.append(f"{mode}: {error}")
                continue
            for kind in KINDS:
                those = [row for row in rows if _is_batch_norm(row) == (kind != "norm")]
                fused = sum(row.fused for row in those)
                totals[kind, f"{mode}_fused"] += fused
                totals[kind, f"{mode}_places"] += len(those)
                if those:
                    parts.append(f"{mode} {kind} {fused}/{len(those)}")
            if chosen.all:
                parts += [f"\n    {mode} {r.where}: {r.reason}" for r in rows if not r.fused]
        print(f"{name:28} {'  '.join(parts)}", flush=True)
    sums = {kind: {what: n for (of, what), n in totals.items() if of == kind} for kind in KINDS}
    for kind, numbers in sums.items():
        for mode in MODES:
            fused, places = numbers.get(f"{mode}_fused", 0), numbers.get(f"{mode}_places", 0)
            print(f"{kind}, {mode}: {fused} of {places} can be fused")
    if chosen.out:
        facts = {"models": len(names), "packages": ", ".join(f"{p} {version(p)}" for p in PACKAGES)}
        facts |= {"commit": commit(), "date": today()}
        counted = [{"kind": KINDS[kind], **numbers, **facts} for kind, numbers in sums.items()]
        write_atomic(chosen.out, json.dumps(counted, indent=1) + "\n")
    if chosen.check:
        kept = {row["kind"]: row for row in json.loads(chosen.check.read_text())}
        lost = [
            f"{KINDS[kind]}: {what} is {numbers[what]}, was {kept[KINDS[kind]][what]}"
            for kind, numbers in sums.items()
            for what in numbers
            if numbers[what] < kept[KINDS[kind]][what]
        ]
        if lost:
            raise SystemExit("; ".join(lost))


if __name__ == "__main__":
    main()
