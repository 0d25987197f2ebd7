"""Say, in one table, where a model's Linears reach norms, what is fused, how, and why not."""

from __future__ import annotations

import html
import json
import re
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import zip_longest
from typing import Any

from torch import nn

from epinorm.backends.engine import plan_for
from epinorm.backends.prepack import keeps, marked
from epinorm.capture.dynamo import run_without_values
from epinorm.capture.fuse import checked_settings, fused_of, without_forward
from epinorm.capture.paying import Settings
from epinorm.capture.rewriting import Recorder
from epinorm.capture.sites import Captured, Site

_NOT_CALLED = (
    "Nothing was captured since it was fused: call it as model(x), which is what is fused, or "
    "explain(model, *inputs). Submodules that are called by themselves are to be fused themselves. "
    "What cannot be captured, as a forward that is all within a try, runs its own code. "
    'Within torch.compile a model\'s own code runs: torch.compile(..., backend="epinorm") fuses it.'
)
_NOT_FUSED = "It is not fused: call epinorm.fuse, or explain(model, *inputs)."
_ATTENTION = (
    "Attention without mask and dropout, if it is large enough, is computed by products in TF32, "
    "as the setting for products allows, instead of PyTorch's kernel in full fp32."
)
_SHAPE = re.compile(r"\[[^]]*\]")
_COLUMNS = ("chain", "where", "fused", "strategy", "gain", "why")


@dataclass(frozen=True)
class Row:
    """One place of a model. ``fused``: it is one chain, which a plan is made for; ``left``: that
    plan is PyTorch's own layers. ``reason``: why it is not fused, or why this strategy. gain: how
    many times as fast as PyTorch's own layers the plan estimates it; None where nothing was
    estimated.
    """

    chain: str
    where: str
    fused: bool
    strategy: str
    reason: str
    shape: str = ""
    gain: float | None = None

    @property
    def left(self) -> bool:
        """Whether the chain's plan leaves it to PyTorch's own layers."""
        return self.fused and self.strategy == "reference"

    def cells(self) -> tuple[str, ...]:
        """What the table shows, in the order of its columns."""
        place = f"{self.where}\n{self.shape}" if self.shape else self.where
        gain = "" if self.gain is None else f"{self.gain:.1f}×"
        fused = "PyTorch's" if self.left else "yes" if self.fused else "no"
        return self.chain, place, fused, self.strategy, gain, self.reason


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found. ``rows``: in the order in which the model computes; ``linears``:
    those without a norm, which the table counts by what computes them; ``notes``: where the graph
    breaks, and what else limits what was seen; ``seen``: whether there was anything to look at."""

    model: str
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    linears: tuple[Row, ...] = ()
    seen: bool = True

    @property
    def fused(self) -> int:
        """The number of chains that are, or would be, one operation, ``left`` included."""
        return sum(row.fused for row in self.rows)

    @property
    def left(self) -> int:
        """The number of those chains whose plans leave them to PyTorch's own layers."""
        return sum(row.left for row in self.rows)

    def to_json(self) -> str:
        """As JSON text: {"model": ..., "rows": [...], "linears": [...], "notes": [...], ...}."""
        return json.dumps(asdict(self), indent=2)

    @property
    def _title(self) -> str:
        if not self.seen:
            return self.model
        if not self.rows:
            within = " in what was captured" if self.notes else ""
            return f"{self.model}: no chain was found: no Linear's result reaches a norm{within}"
        if not self.left:
            return f"{self.model}: {self.fused} of {len(self.rows)} chains fused"
        ours = f"{self.fused - self.left} of {len(self.rows)} chains by epinorm's kernels"
        return f"{self.model}: {ours}, {self.left} left to PyTorch's own layers"

    @property
    def _below(self) -> tuple[str, ...]:
        return (*_summary(self.linears), *self.notes)

    def __str__(self) -> str:
        width = shutil.get_terminal_size((120, 24)).columns
        lines = [self._title, *_table([row.cells() for row in self.rows], width)]
        return "\n".join((*lines, *(textwrap.fill(note, width) for note in self._below)))

    def _repr_html_(self) -> str:
        def line(cells: tuple[str, ...], tag: str) -> str:
            inner = (html.escape(cell).replace("\n", "<br>") for cell in cells)
            return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in inner) + "</tr>"

        body = "".join(line(row.cells(), "td") for row in self.rows)
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._below)
        table = f"<table>{line(_COLUMNS, 'th')}{body}</table>" if self.rows else ""
        return f"<p><b>{html.escape(self._title)}</b></p>{table}{notes}"


def _table(rows: Sequence[tuple[str, ...]], width: int) -> list[str]:
    """Rows of cells as lines of at most ``width`` characters, the last column the widest."""
    if not rows:
        return []
    cells = [_COLUMNS, *rows]
    widths = [
        max(len(line) for cell in column for line in cell.split("\n"))
        for column in zip(*cells, strict=True)
    ]
    room = max(width - 2 * (len(widths) - 1), 8 * len(widths))
    while sum(widths) > room:  # the widest column gives way
        widths[max(range(len(widths)), key=widths.__getitem__)] -= 1
    lines = []
    for i, row in enumerate(cells):
        if i == 1:
            lines.append("  ".join("─" * w for w in widths))
        folded = [
            [part for line in cell.split("\n") for part in textwrap.wrap(line, w) or [""]]
            for cell, w in zip(row, widths, strict=True)
        ]
        for parts in zip_longest(*folded, fillvalue=""):
            padded = (part.ljust(w) for part, w in zip(parts, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return lines


def _summary(linears: tuple[Row, ...]) -> list[str]:
    """A line for each way in which Linears without a norm are computed."""
    gains: dict[tuple[str, str], list[float]] = {}
    for row in linears:
        # What a plan computes by comes first in its reason, then what is of this shape alone.
        reason = re.split(", tiles of|: estimated", row.reason)[0]
        gains.setdefault((row.strategy, reason), []).append(row.gain or 1.0)
    lines = []
    for (strategy, reason), known in gains.items():
        least, most = f"{min(known):.1f}", f"{max(known):.1f}"
        span = least if least == most else f"{least} to {most}"
        faster = f", {span} times as fast" if max(known) > 1.05 else ""
        count = f"{len(known)} Linear{'s' * (len(known) > 1)}"
        lines.append(f"{count} without a norm by {strategy}{faster}: {reason}")
    return lines


def explain(model: nn.Module, *example_inputs: Any, **example_arguments: Any) -> Explanation:
    """Say where the model's Linears reach norms, what is fused of that, how, and why not the rest.

    With ``example_inputs`` the model is captured as it stands, fused or not, on copies of its
    tensors and of the inputs that hold no values: no kernel runs and the model is not changed.
    Without, it tells of the calls that a fused model was captured at so far. Raises TypeError for
    anything but an nn.Module, and what copying the model raises.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    name, note = type(model).__name__, without_forward(model)
    # Its parts may be fused by themselves, as those that fully_shard or DDP stand around.
    known = [found for m in model.modules() if (found := fused_of(m)) is not None]
    recorders = [found.recorder for found in known]
    if example_inputs or example_arguments:
        if not note:
            fused = fused_of(model)
            settings = fused.settings if fused else checked_settings("auto", False, "once")
            return _without_values(name, model, settings, example_inputs, example_arguments)
    elif any(recorder.graphs for recorder in recorders):
        apart = any(found.leaves_rest for found in known)
        notes = ("What is outside of fully_shard's units is not fused.",) * apart
        return _explanation(name, recorders, notes)
    return Explanation(name, (), (note or (_NOT_CALLED if known else _NOT_FUSED),), seen=False)


def _without_values(
    name: str, model: nn.Module, settings: Settings, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Explanation:
    recorders: list[Recorder] = []

    def recorder_for(twin: nn.Module) -> Recorder:
        recorders.append(Recorder(settings, twin))
        return recorders[0]

    stopped: tuple[str, ...] = ()
    try:
        run_without_values(model, recorder_for, args, kwargs)
    except Exception as error:
        if not recorders:
            raise
        said = str(error).strip().splitlines() or [type(error).__name__]
        stopped = (f"What follows was not seen: without values the model stops ({said[0]}).",)
    return _explanation(name, recorders, stopped)


def _explanation(name: str, recorders: list[Recorder], notes: tuple[str, ...]) -> Explanation:
    rows: dict[tuple[str, ...], Row] = {}
    linears: dict[tuple[str, ...], Row] = {}
    breaks: dict[str, None] = {}
    for recorder in recorders:
        for graph in recorder.graphs:
            for site in graph.sites:  # what was captured last stands for a place's other captures
                obstacle = _SHAPE.sub("", site.obstacle)  # of one place at other sizes
                rows[(site.where, site.chain, obstacle)] = _row(site, recorder)
            for site in graph.linears:
                linears[(site.where, site.chain)] = _row(site, recorder)
            if graph.broken_by:
                breaks[_break(graph)] = None
            breaks |= dict.fromkeys(graph.unseen)
            breaks |= dict.fromkeys((_ATTENTION,) * graph.takes_attention)
    graphs = [graph for recorder in recorders for graph in recorder.graphs]
    unseen = any(graph.unseen for graph in graphs) or bool(
        notes and not graphs
    )  # it stopped at once
    shown = tuple(rows.values()), (*breaks, *notes), tuple(linears.values())
    return Explanation(name, *shown, seen=bool(rows) or not unseen)


def _break(graph: Captured) -> str:
    reason = graph.broken_by.splitlines()[0]
    if reason.startswith("generic_jump"):
        reason = "Python branches on the value of a tensor"
    return f"The graph breaks at {graph.broken_at}: {reason}" if graph.broken_at else reason


def _row(site: Site, recorder: Recorder) -> Row:
    if site.problem is None:
        return Row(site.chain, site.where, False, "layers", site.obstacle, site.shape)
    settings, problem = recorder.settings, site.problem
    strategy, _ = settings.of(problem.chain.norm is not None)
    mark = None if site.weight is None else marked.get(site.weight)
    weight = None if mark is None else mark.weight()
    if weight is not None and keeps(weight) and not problem.training:
        problem = replace(problem, prepacked=True)
    if not site.taken:
        strategy = "auto"
    try:
        plan = plan_for(problem, strategy)
    except (RuntimeError, ValueError) as error:
        return Row(site.chain, site.where, False, strategy, f"the call raises: {error}", site.shape)
    reason = f"{site.split}; there {plan.reason}" if site.split else plan.reason
    if site.ends:
        reason += f"; it ends early: {site.ends}"
    by = plan.strategy if site.taken else "layers"
    return Row(site.chain, site.where, site.taken, by, reason, site.shape, plan.gain)
