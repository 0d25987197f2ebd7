"""Count the places where a Linear's result reaches a norm, and those that can be fused.

`make coverage`, or `python tests/models/coverage.py [NAME...] [--all]`: a line for each model, in
training and in eval, then the share of all; BatchNorm counts by itself. Whether a plan then
leaves a chain to PyTorch's layers does not count. --all: each place that cannot be fused, and why.
"""

from __future__ import annotations

import sys
from collections import Counter

import torch

import epinorm
from epinorm.capture.explain import Row
from zoo import CASES, Missing


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
    return "BatchNorm" in row.reason or (of_chain and "norm" not in row.chain)


def main(arguments: list[str]) -> None:
    names = [a for a in arguments if not a.startswith("-")] or list(CASES)
    totals: Counter[str] = Counter()
    for name in names:
        parts = []
        for training in (True, False):
            mode = "training" if training else "eval"
            try:
                rows = rows_of(name, training)
            except Missing as error:
                parts.append(f"{mode}: {error}")
                continue
            for kind in ("norm", "BatchNorm"):
                those = [row for row in rows if _is_batch_norm(row) == (kind != "norm")]
                fused = sum(row.fused for row in those)
                totals[kind, mode, "fused"] += fused
                totals[kind, mode, "places"] += len(those)
                if those:
                    parts.append(f"{mode} {kind} {fused}/{len(those)}")
            if "--all" in arguments:
                parts += [f"\n    {mode} {r.where}: {r.reason}" for r in rows if not r.fused]
        print(f"{name:28} {'  '.join(parts)}", flush=True)
    for kind in ("norm", "BatchNorm"):
        for mode in ("training", "eval"):
            fused, places = (totals[kind, mode, what] for what in ("fused", "places"))
            share = f"{100 * fused / places:.0f} %" if places else "none"
            print(f"{kind}, {mode}: {fused} of {places} can be fused ({share})")


if __name__ == "__main__":
    main(sys.argv[1:])
