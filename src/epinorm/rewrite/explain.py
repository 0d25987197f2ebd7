"""Say, in one table, which chains a model holds, where, and how each one is computed."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from epinorm.backends.engine import plan_for
from epinorm.backends.prepack import keeps
from epinorm.chain import GroupNorm
from epinorm.precision import product_precision
from epinorm.problem import Problem
from epinorm.rewrite.match import Candidate
from epinorm.rewrite.program import Analysis, Settings, layers_of
from epinorm.rewrite.replace import analyse_modes, settings_of
from epinorm.rewrite.spelling import arguments, plain_type, target_name
from epinorm.rewrite.trace import Untraceable

__all__ = ["Explanation", "Row", "explain"]

_NORMS = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Row:
    """One chain of a model. ``reason``: why it is not fused, or why this strategy."""

    chain: str
    where: str
    fused: bool
    strategy: str
    reason: str
    shape: str = ""


@dataclass(frozen=True)
class Explanation:
    """What ``explain`` found; ``rows`` in the order of the model's modules."""

    model: str
    rows: tuple[Row, ...]

    @property
    def fused(self) -> int:
        """The number of chains that are, or would be, fused."""
        return sum(row.fused for row in self.rows)

    def to_json(self) -> str:
        """The rows as JSON text: {"model": ..., "rows": [...]}."""
        return json.dumps({"model": self.model, "rows": [asdict(r) for r in self.rows]}, indent=2)

    def table(self) -> Table:
        """The rows as a rich table."""
        table = Table(title=f"{self.model}: {self.fused} of {len(self.rows)} chains fused")
        for name in ("chain", "where", "fused", "strategy", "why"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            place = f"{row.where}\n{row.shape}" if row.shape else row.where
            mark = "yes" if row.fused else "no"
            table.add_row(row.chain, place, mark, row.strategy, row.reason)
        return table

    def __rich__(self) -> Table | str:
        return self.table() if self.rows else str(self)

    def __str__(self) -> str:
        if not self.rows:
            return f"{self.model}: no chain Linear → pointwise* → norm was found"
        console = Console(file=io.StringIO(), width=120, color_system=None)
        console.print(self.table())
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]


class _RecordLinears(TorchFunctionMode):
    """Note what each linear layer's weight is multiplied with during a run."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[int, Tensor] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            x, weight = (*args, kwargs.get("input"), kwargs.get("weight"))[:2]
            self.inputs[id(weight)] = torch.empty_like(x, device="meta")
            self.devices = x.device
        return func(*args, **kwargs)


@contextmanager
def _as_written(model: nn.Module) -> Iterator[None]:
    """Run every module by its own forward, and leave buffers and random numbers as they were."""
    fused = [(m, type(m)) for m in model.modules() if settings_of(m) is not None]
    buffers = [(b, b.detach().clone()) for b in model.buffers()]
    try:
        for module, _ in fused:
            module.__class__ = plain_type(module)
        devices = list({b.device for b in model.parameters() if b.is_cuda})
        with torch.random.fork_rng(devices), torch.no_grad():
            yield
            for buffer, value in buffers:
                buffer.copy_(value)
    finally:
        for module, cls in fused:
            module.__class__ = cls


def _record(model: nn.Module, inputs: tuple[Any, ...]) -> dict[int, Tensor]:
    if not inputs:
        return {}
    with _as_written(model), _RecordLinears() as record:
        model(*inputs)
    return record.inputs


def _get(module: nn.Module, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)  # type: ignore[assignment]
    return module


def _weights(owner: nn.Module, node: fx.Node) -> tuple[Any, Any]:
    """Weight and bias of a linear or norm node; None for what is not a plain parameter."""
    if node.op == "call_module":
        module = _get(owner, str(node.target))
        return module.weight, getattr(module, "bias", None)
    if node.target is F.group_norm or node.target is F.layer_norm:
        named = arguments(node, "input", "shape", "weight", "bias")
    elif node.target is F.rms_norm:
        named = arguments(node, "input", "shape", "weight")
    else:
        named = arguments(node, "input", "weight", "bias")
    return tuple(  # type: ignore[return-value]
        _get(owner, str(n.target)) if isinstance(n, fx.Node) and n.op == "get_attr" else None
        for n in (named.get("weight"), named.get("bias"))
    )


def _planned(analysis: Analysis, candidate: Candidate, x: Tensor, settings: Settings) -> Row:
    """The row of a chain whose input was seen: x is a meta tensor of its shape and dtype."""
    owner, chain = analysis.module, candidate.chain
    weight, bias = _weights(owner, candidate.linear)
    norm_weight, norm_bias = _weights(owner, candidate.norm_node)
    shape = f"{list(x.shape)} → {[*x.shape[:-1], weight.shape[0]]}"
    if isinstance(chain.norm, GroupNorm) and x.dim() != 2:
        reason = (
            f"GroupNorm of {x.dim()}-dimensional input normalises dimension 1, which is not the "
            "linear layer's output: such calls run layer by layer"
        )
        return Row(str(chain), "", False, "layers", reason, shape)
    rest = (weight, bias, norm_weight, norm_bias)
    if any(t is not None and t.dtype != x.dtype for t in rest):
        return Row(str(chain), "", False, "layers", "its tensors are of several dtypes", shape)
    problem = Problem(
        chain=chain,
        m=x.shape[:-1].numel(),
        k=x.shape[-1],
        n=weight.shape[0],
        dtype=x.dtype,
        norm_dtype=x.dtype,
        out_dtype=x.dtype,
        has_bias=bias is not None,
        has_norm_weight=norm_weight is not None,
        has_norm_bias=norm_bias is not None,
        training=owner.training,
        device=weight.device,
        precision=product_precision(
            x.dtype, weight.device.type, (x.shape[:-1].numel(), *weight.shape)
        ),
        prepacked=keeps(weight) and not owner.training,
    )
    try:
        plan = plan_for(problem, settings.strategy)
    except (RuntimeError, ValueError) as error:
        return Row(str(chain), "", True, settings.strategy, str(error), shape)
    prepacked = "; its weight is prepacked" if keeps(weight) and plan.strategy == "single" else ""
    return Row(str(chain), "", True, plan.strategy, plan.reason + prepacked, shape)


def _text(candidate: Candidate) -> str:
    if candidate.obstacle is None:
        return str(candidate.chain)
    names = [target_name(n) if n.op != "call_module" else str(n.target) for n in candidate.nodes]
    return " → ".join(names)


def _row(
    analysis: Analysis, candidate: Candidate, path: str, seen: dict[int, Tensor], default: Settings
) -> Row:
    where = layers_of(candidate, path)
    if candidate.obstacle is not None:
        return Row(_text(candidate), where, False, "layers", candidate.obstacle)
    settings = settings_of(analysis.module) or default
    weight, _ = _weights(analysis.module, candidate.linear)
    if id(weight) in seen:
        row = _planned(analysis, candidate, seen[id(weight)], settings)
        return Row(row.chain, where, row.fused, row.strategy, row.reason, row.shape)
    ends = f"; ends where {candidate.stopped_by}" if candidate.stopped_by else ""
    reason = f"decided at the first call{ends}"
    return Row(str(candidate.chain), where, True, settings.strategy, reason)


def _suspects(module: nn.Module) -> bool:
    """Whether a module that cannot be traced holds layers that could have made a chain."""
    children = list(module.children())
    norms = any(isinstance(child, _NORMS) for child in children)
    return norms and any(isinstance(child, nn.Linear) for child in children)


def _rows_of(
    path: str, module: nn.Module, seen: dict[int, Tensor], covered: set[str], default: Settings
) -> list[Row]:
    try:
        analysis, *other = analyse_modes(module)
    except Untraceable as error:
        if not _suspects(module):
            return []
        where = path or plain_type(module).__name__
        return [Row("?", where, False, "layers", f"its forward cannot be traced: {error}")]
    rows = []
    for candidate in analysis.candidates:
        prefix = f"{path}." if path else ""
        name = f"{prefix}{candidate.linear.target}"
        if candidate.linear.op == "call_module" and name in covered:
            continue
        if candidate.obstacle is not None and any(
            c.linear.target == candidate.linear.target for a in other for c in a.fusable
        ):
            mode = "eval" if module.training else "train"
            row = _row(analysis, candidate, path, seen, default)
            rows.append(replace(row, reason=f"{row.reason}; fused in {mode} mode"))
            continue
        rows.append(_row(analysis, candidate, path, seen, default))
    covered |= {
        f"{path}.{c.linear.target}" if path else str(c.linear.target)
        for c in analysis.candidates
        if c.linear.op == "call_module"
    }
    return rows


def explain(model: nn.Module, *example_inputs: Any) -> Explanation:
    """Say which chains the model holds, which of them ``fuse`` fuses, how, and why others not.

    With ``example_inputs`` the model is run once on them, without gradients, to learn the shapes;
    buffers and random state are put back. Without, the strategy shows as decided at the first call.
    The model itself may be fused or not, and is not changed. Raises what running it raises, and
    TypeError for anything but an nn.Module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    seen = _record(model, example_inputs)
    rows: list[Row] = []
    covered: set[str] = set()
    for path, module in model.named_modules():
        rows += _rows_of(path, module, seen, covered, Settings())
    return Explanation(plain_type(model).__name__, tuple(rows))
