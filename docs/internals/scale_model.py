"""The cost model of docs/scale.md: constants from measured rows, what it predicts, and by how much
it is off.

    python docs/internals/scale_model.py

Rewrites the tables between the markers of docs/scale.md. Times are ms, sizes bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from marked import replace_marked

PAGE = Path(__file__).parents[1] / "scale.md"
RESULTS = PAGE.parents[1] / "benchmarks" / "results" / "parallel" / "nvidia-h200-x2.json"
WIDTH, BLOCKS, PAIR_ROWS = 4096, 4, 8192
BYTES = {"bf16": 2, "highest": 4}
BESIDE = 0.5
"""Of a hidden collective's time, what kernels beside it lose: NCCL has 24 of 132 multiprocessors,
and a kernel of equal shares ends with its last (decision 23); fitted to DDP's rows at 4096."""
HOST_OF_8, NETWORK, MEMORY = 8, 5e7, 4e9
"""GPUs of one host; bytes a ms, both assumed and not measured: between hosts for each GPU and way
(400 Gb/s), and of a GPU's memory. Between hosts latency is taken to be four times as long."""


@dataclass(frozen=True)
class Link:
    """A collective of ``size`` bytes, the whole of it, over n GPUs: latency and ring."""

    latency: float
    rate: float  # bytes a ms that one GPU sends

    def time(self, size: float, n: int, passes: int = 1) -> float:
        """passes: 1 for all-gather and reduce-scatter, 2 for all-reduce."""
        if n == 1:
            return 0.0
        rate = self.rate if n <= HOST_OF_8 else NETWORK
        return self.latency * (1 if n <= HOST_OF_8 else 4) + passes * size * (n - 1) / n / rate


class Measured:
    """The rows of one file, and the constants that they give."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.rows = rows
        gathers = {r["mib"]: r["ms"] for r in rows if r.get("what") == "all_gather"}
        small, large = min(gathers), max(gathers)
        n = rows[0]["gpus"]
        sent = (large - small) * 2**20 * (n - 1) / n
        rate = sent / (gathers[large] - gathers[small])
        self.link = Link(gathers[small] - small * 2**20 * (n - 1) / n / rate, rate)

    def ms(self, precision: str, **facts: Any) -> float | None:
        """The measured time of the row with these facts; None where there is none."""
        facts = {"precision": precision, "fused": True, **facts}
        found = (r["ms"] for r in self.rows if all(r.get(k) == v for k, v in facts.items()))
        return next(found, None)

    def host(self, precision: str, **facts: Any) -> float:
        """The host's time of a fused step; eager's where no fused row was measured."""
        for fused in (True, False):
            known = {"precision": precision, "fused": fused, **facts}
            for row in self.rows:
                if all(row.get(k) == v for k, v in known.items()):
                    return float(row["host_ms"])
        raise ValueError(f"no row of {precision} {facts} says what the host needs")

    def alone(self, precision: str, rows: int) -> float:
        """A step of the blocks on one GPU: proportional to the rows, from the largest measured."""
        most = max(r["rows"] for r in self.rows if r.get("what") == "blocks")
        measured = self.ms(precision, what="blocks", way="one", rows=rows)
        if measured is not None:
            return measured
        return (self.ms(precision, what="blocks", way="one", rows=most) or 0.0) * rows / most

    def data(self, precision: str, way: str, rows: int, n: int) -> float:
        """A step of the blocks: its products, and what of the communication they cannot hide."""
        step = self.alone(precision, rows)
        backward = step * 2 / 3
        size = BYTES[precision] * WIDTH * WIDTH
        host_of_8 = self.link.time(size, min(n, HOST_OF_8), passes=1 + (way == "ddp"))
        beside = BESIDE * host_of_8
        if way == "ddp":  # a bucket a block; the last has nothing beside it
            one = self.link.time(size, n, passes=2)
            moved = 4 * size * BLOCKS / MEMORY  # into the buckets, and divided there
            late = max(0.0, (BLOCKS - 1) * one - backward * (BLOCKS - 1) / BLOCKS)
            gpu = step + moved + one + late + beside * (BLOCKS - 1)
        else:  # the first gather and the last scatter have nothing beside them
            one = self.link.time(size, n)
            ahead = max(0.0, one - (step - backward) / BLOCKS) * (BLOCKS - 1)
            behind = max(0.0, 2 * one - backward / BLOCKS) * (BLOCKS - 1)
            gpu = step + 2 * one + ahead + behind + beside * (3 * BLOCKS - 2)
        return max(gpu, self.host(precision, what="blocks", way=way, rows=min(rows, 4096)))

    def pair(self, precision: str, kind: str, n: int) -> float:
        """The pair: an n-th of the products, and four collectives a step that nothing hides."""
        whole = self.ms(precision, what="pair", way="one", **{"pass": kind}) or 0.0
        size = BYTES[precision] * PAIR_ROWS * WIDTH
        collectives = 2 if kind == "forward" else 4
        return whole / n + collectives * self.link.time(size, n)


def checks(known: Measured) -> list[str]:
    """Measured, predicted and the difference of every row of several GPUs."""
    lines = [
        "| what | precision | rows | measured | predicted | off by |",
        "|---|---|---|---|---|---|",
    ]
    for row in known.rows:
        if row["what"] not in ("blocks", "pair") or not row["fused"]:
            continue
        if row["way"] not in ("ddp", "fsdp2", "tensor"):
            continue
        precision, n = row["precision"], row["gpus"]
        if row["what"] == "blocks":
            predicted = known.data(precision, row["way"], row["rows"], n)
            name = f"{row['way']}, step"
        else:
            predicted = known.pair(precision, row["pass"], n)
            name = f"tensor, {row['pass']}"
        if row["what"] == "blocks" and predicted == row["host_ms"]:
            name += " (by its own host time: no check)"
        off = predicted / row["ms"] - 1
        times = f"{row['ms']:.2f} | {predicted:.2f} | {off:+.0%}"
        lines.append(f"| {name} | {precision} | {row['rows']} | {times} |")
    return lines


def wanted(known: Measured) -> list[str]:
    """What issue 23 asks for beside what was measured: ratios."""
    lines = ["| two GPUs against | | measured | wanted |", "|---|---|---|---|"]

    hosts = [r for r in known.rows if r["what"] == "block_host_us"]
    for row in (r for r in hosts if r["fused"]):
        eager = [r for r in hosts if not r["fused"] and r["precision"] == row["precision"]]
        for kind, most in (("forward", 60), ("backward", 150)):
            beside = "".join(f" (eager's {r[kind]:.0f})" for r in eager)
            cells = f"{row['precision']} | {row[kind]:.0f} µs{beside} | at most {most}"
            lines.append(f"| a block's own host time under fsdp2, {kind} | {cells} |")

    def add(name: str, precision: str, facts: Any, base: Any, gain: bool, want: str) -> None:
        ours, other = known.ms(precision, **facts), known.ms(precision, **base)
        if ours is not None and other is not None:
            ratio = f"{other / ours:.2f}×" if gain else f"{ours / other:.3f} of its time"
            lines.append(f"| {name} | {precision} | {ratio} | {want} |")

    for precision, tensor, ddp in (("bf16", "1.40×", "0.34"), ("highest", "1.55×", "0.24")):
        for kind in ("forward", "step"):
            pair = {"what": "pair", "pass": kind}
            name = f"one, fused: tensor, {kind}"
            add(name, precision, {**pair, "way": "tensor"}, {**pair, "way": "one"}, True, tensor)
        for way, most in (("ddp", ddp), ("fsdp2", "1.00, aim 0.80")):
            blocks = {"what": "blocks", "rows": 4096, "way": way}
            name = f"eager: {way}, step, 4096 rows"
            add(name, precision, blocks, {**blocks, "fused": False}, False, most)
        for way in ("ddp", "fsdp2"):
            blocks = {"what": "blocks", "rows": 32768, "way": way}
            name = f"one, fused: {way}, step, 32768 rows"
            add(name, precision, blocks, {**blocks, "way": "one"}, False, "1.10, aim 1.05")
    return lines


def predictions(known: Measured) -> list[str]:
    """How much of n GPUs' work is left: 1.0 where nothing is lost."""
    lines = [
        "| GPUs | precision | DDP, 32768 rows | FSDP2, 32768 | FSDP2, 4096 | tensor, the pair |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for n in (8, 64, 1000):
        for precision in BYTES:
            cells = [
                known.alone(precision, rows) / known.data(precision, way, rows, n)
                for way, rows in (("ddp", 32768), ("fsdp2", 32768), ("fsdp2", 4096))
            ]
            whole = known.ms(precision, what="pair", way="one", **{"pass": "step"}) or 0.0
            shares = [f"{c:.2f}" for c in cells]
            inside = n <= HOST_OF_8
            shares.append(f"{whole / n / known.pair(precision, 'step', n):.2f}" if inside else "–")
            lines.append(f"| {n} | {precision} | {' | '.join(shares)} |")
    return lines


def write(results: Path = RESULTS, page: Path = PAGE) -> None:
    """Rewrite the page's tables from one results file."""
    known = Measured(json.loads(results.read_text()))
    link = [
        f"One collective: {known.link.latency * 1e3:.0f} µs, and {known.link.rate / 1e6:.0f} GB/s "
        "that each GPU sends."
    ]
    for name, lines in (
        ("link", link),
        ("wanted", wanted(known)),
        ("checks", checks(known)),
        ("predictions", predictions(known)),
    ):
        replace_marked(page, name, lines)


if __name__ == "__main__":
    write()
