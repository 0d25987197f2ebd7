"""One rank of test_tensor_parallel.py: pairs of blocks split over RANKS processes, and their twins.

    python tensor_worker.py RANK RANKS FOLDER [cpu | cuda [CASE ...]]

Rank 0 writes FOLDER/results.json: for each rank and case the largest difference of the output or a
gradient from those of one process, relative to the largest value, and what else the case tells.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from ranks import attempt, finish, start
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import parallelize_module
from torch.torch_version import TorchVersion

import epinorm
from epinorm.operator import overlapped, peers
from epinorm.parallel import ColwiseParallel, RowwiseParallel

IN, HIDDEN, ROWS = 32, 64, 24
STYLES = {"up": ColwiseParallel(), "down": RowwiseParallel()}
GROUPS = epinorm.GroupNorm(8)


class Pair(nn.Module):
    """The pair as modules of ours: by channels, then with a residual by rows."""

    def __init__(self, norm: Any, post: str = "silu", return_sum: bool = False) -> None:
        super().__init__()
        self.up = epinorm.LinearNorm(IN, HIDDEN, norm=norm, post=post)
        self.down = epinorm.LinearNorm(
            HIDDEN, IN, norm=epinorm.LayerNorm(), pre="add_residual", return_sum=return_sum
        )

    def forward(self, x: Tensor) -> Any:
        return self.down(self.up(x), x)


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, norm: nn.Module) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(inputs, outputs), norm

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        h = self.linear(x)
        if residual is not None:
            return self.norm(h + residual)
        return nn.functional.silu(self.norm(h))


class Written(nn.Module):
    """The pair as a user writes it, for ``fuse``."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.up, self.down = Block(IN, HIDDEN, norm), Block(HIDDEN, IN, nn.LayerNorm(IN))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x), x)


def drawn(make: Callable[[], nn.Module], dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    model = make()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.to(DEVICE, dtype)


def relative(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max()).item()


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def step(model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs, x's gradient and the parameters', each as every rank has it whole."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    outputs = model(x)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    sum((i + 1) * y.double().square().mean() for i, y in enumerate(outputs)).backward()  # type: ignore[union-attr]
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    assert all(isinstance(g, DTensor) == isinstance(x, DTensor) for g in gradients)
    return [whole(t).detach().clone() for t in (*outputs, *gradients)]  # type: ignore[arg-type]


def rows(shape: tuple[int, ...], axis: int = 0, dtype: torch.dtype = torch.float64) -> Any:
    torch.manual_seed(3)
    x = torch.rand(*shape).to(DEVICE, dtype)
    return x, distribute_tensor(x, MESH, [Shard(axis)])


def compared(
    one: nn.Module, split: nn.Module, shape: tuple[int, ...] = (ROWS, IN), axis: int = 0
) -> dict[str, Any]:
    """The largest difference, and whether a second run gives the same bits."""
    x, parts = rows(shape, axis, next(one.parameters()).dtype)
    truth, found, again = step(one, x), step(split, parts), step(split, parts)
    error = max(relative(a, b) for a, b in zip(found, truth, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    return {"error": error, "repeats": same}


def modules(norm: Any, dtype: torch.dtype = torch.float64, **more: Any) -> dict[str, Any]:
    one, split = (drawn(lambda: Pair(norm, **more), dtype) for _ in range(2))
    return compared(one, parallelize_module(split, MESH, STYLES))


def sequences() -> dict[str, Any]:
    """(batch, sequence, channels), split along the sequence."""
    one, split = (drawn(lambda: Pair(epinorm.LayerNorm())) for _ in range(2))
    layouts = {"input_layouts": Shard(1), "output_layouts": Shard(2)}
    turned = {"input_layouts": Shard(2), "output_layouts": Shard(1)}
    styles = {"up": ColwiseParallel(**layouts), "down": RowwiseParallel(**turned)}
    return compared(one, parallelize_module(split, MESH, styles), (3, ROWS, IN), 1)


def written(norm: Callable[[], nn.Module], fused_first: bool) -> dict[str, Any]:
    torch._dynamo.reset()
    one, split = (drawn(lambda: Written(norm())) for _ in range(2))
    split = epinorm.fuse(split) if fused_first else split
    split = parallelize_module(split, MESH, STYLES)
    found = compared(one, split if fused_first else epinorm.fuse(split))
    told = epinorm.explain(split)
    return found | {"fused": told.fused, "why": [row.reason for row in told.rows]}


def read_by_plain_code() -> dict[str, Any]:
    """What eager gathers before the user takes the local tensor is gathered here too."""
    torch._dynamo.reset()

    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = Block(IN, HIDDEN, nn.LayerNorm(HIDDEN))

        def forward(self, x: Any) -> Tensor:
            y = self.up(x)
            return y.to_local() if isinstance(y, DTensor) else y

    one, split = (drawn(Reader) for _ in range(2))
    style = ColwiseParallel(output_layouts=Replicate())
    epinorm.fuse(parallelize_module(split, MESH, {"up": style}))
    x, parts = rows((ROWS, IN))
    return {"error": relative(split(parts), one(x)), "repeats": True}


def uneven() -> dict[str, Any]:
    """Rows that do not split evenly; and channels, which PyTorch's own layers compute."""
    torch.manual_seed(5)
    x, w, b = (torch.randn(*s).to(DEVICE, torch.float64) for s in ((11, IN), (42, IN), (42,)))
    chain = {"norm": epinorm.GroupNorm(2), "post": "silu"}
    truth = epinorm.linear_norm(x, w, b, **chain)
    worst = 0.0
    for placement in (Shard(0), Shard(1), Replicate()):
        vector = Shard(0) if placement == Shard(0) else Replicate()
        for rows_of_x in (Shard(0), Shard(1), Replicate()):
            placed = ((x, rows_of_x), (w, placement), (b, vector))
            y = epinorm.linear_norm(*(distribute_tensor(t, MESH, [p]) for t, p in placed), **chain)
            worst = max(worst, relative(whole(y), truth))
    return {"error": worst, "repeats": True}


def one_row() -> dict[str, Any]:
    """x of one dimension: there are no rows to split."""
    torch.manual_seed(5)
    x, w = (torch.randn(*s).to(DEVICE, torch.float64) for s in ((IN,), (HIDDEN, IN)))
    worst = 0.0
    leaves = [t.clone().requires_grad_() for t in (x, w)]
    truth = epinorm.linear_norm(*leaves, norm=epinorm.LayerNorm())
    truth.pow(3).sum().backward()
    for placed in ((Shard(0), Shard(1)), (Replicate(), Shard(1)), (Replicate(), Shard(0))):
        pairs = zip((x, w), placed, strict=True)
        parts = [distribute_tensor(t, MESH, [p]).requires_grad_() for t, p in pairs]
        y = epinorm.linear_norm(*parts, norm=epinorm.LayerNorm())
        y.pow(3).sum().backward()
        found = [(y, truth), *((a.grad, b.grad) for a, b in zip(parts, leaves, strict=True))]
        worst = max(worst, *(relative(whole(a), b) for a, b in found))  # type: ignore[arg-type]
    return {"error": worst, "repeats": True}


def sum_alone() -> dict[str, Any]:
    """A loss of the sum alone, by rows: the norm's parameters have no gradient, as in eager."""
    model = drawn(lambda: epinorm.LinearNorm(IN, HIDDEN, norm=epinorm.LayerNorm(), return_sum=True))
    parallelize_module(model, MESH, RowwiseParallel())
    x, _ = rows((ROWS, IN))
    model(distribute_tensor(x, MESH, [Shard(1)]))[1].square().mean().backward()
    grads = [p.grad for p in model.norm.parameters()]
    found = grads == [None, None] and model.linear.bias.grad is not None
    # Copies, of which no vector has a gradient at all.
    x, parts = rows((ROWS, IN))
    w = distribute_tensor(torch.ones(HIDDEN, IN).to(x), MESH, [Replicate()]).requires_grad_()
    gamma = distribute_tensor(torch.ones(HIDDEN).to(x), MESH, [Replicate()]).requires_grad_()
    given = {"norm": epinorm.LayerNorm(), "norm_weight": gamma, "return_sum": True}
    given["strategy"] = "cpu" if DEVICE == "cpu" else "auto"
    epinorm.linear_norm(parts, w, **given)[1].square().mean().backward()
    return {"error": 0.0, "repeats": found and gamma.grad is None and w.grad is not None}


def gated() -> dict[str, Any]:
    """A parameter without dimensions, and x given by its name."""

    class Gated(Block):
        def __init__(self) -> None:
            super().__init__(IN, HIDDEN, nn.LayerNorm(HIDDEN))
            self.gate = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x) * self.gate

    one, split = drawn(Gated), drawn(Gated)
    parallelize_module(split, MESH, ColwiseParallel())
    x, parts = rows((ROWS, IN))
    return {"error": relative(whole(split(x=parts)), one(x)), "repeats": True}


def compiled() -> dict[str, Any]:
    """Modules of ours, which a compiler leaves to Python; layers whose operations are in graphs."""
    torch._dynamo.reset()
    one, split = (drawn(lambda: Pair(GROUPS)) for _ in range(2))
    parallelize_module(split, MESH, STYLES)
    x, parts = rows((ROWS, IN))
    with torch.no_grad():
        y = torch.compile(split, backend="aot_eager")(parts)
        worst = relative(whole(y), one(x))
    columns, by_rows = (ColwiseParallel(), Shard(0)), (RowwiseParallel(), Shard(1))
    for style, placed in (columns, by_rows, columns):  # again: from PyTorch's caches, where it may
        torch._dynamo.reset()
        one, split = (drawn(lambda: Block(IN, HIDDEN, nn.GroupNorm(8, HIDDEN))) for _ in range(2))
        parallelize_module(split, MESH, style)
        split = torch.compile(split, backend="epinorm")
        found = step(split, distribute_tensor(x, MESH, [placed]))
        worst = max(worst, *(relative(a, b) for a, b in zip(found, step(one, x), strict=True)))
    return {"error": worst, "repeats": True}


def second_derivatives() -> dict[str, Any]:
    """Gradients of gradients: by columns, and by rows of which some split evenly."""
    worst = 0.0

    def run(shapes: list[Tensor], norm: Any) -> list[Tensor]:
        leaves = [t.detach().requires_grad_() for t in shapes]
        y = epinorm.linear_norm(*leaves, norm=norm, post="silu")
        first = torch.autograd.grad(y.square().sum(), leaves, create_graph=True)
        sum((g.square().sum() for g in first), torch.zeros(())).backward()
        return [whole(t.grad) for t in leaves]  # type: ignore[arg-type]

    ways = [
        (ROWS, (Shard(0), Shard(0), Shard(0)), epinorm.LayerNorm()),
        (ROWS, (Replicate(), Shard(0), Shard(0)), epinorm.RMSNorm()),
        (ROWS, (Shard(1), Shard(1), Replicate()), epinorm.LayerNorm()),
        (ROWS - 1, (Shard(1), Shard(1), Replicate()), epinorm.LayerNorm()),
    ]
    for m, placements, norm in ways:
        torch.manual_seed(5)
        given = [torch.randn(*s).to(DEVICE, torch.float64) for s in ((m, IN), (IN, IN), (IN,))]
        split = [distribute_tensor(t, MESH, [p]) for t, p in zip(given, placements, strict=True)]
        pairs = zip(run(split, norm), run(given, norm), strict=True)
        worst = max(worst, *(relative(a, b) for a, b in pairs))
    return {"error": worst, "repeats": True}


def dropout(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    """Parts drop by seeds of their own, forward and backward alike; a seed drops alike again."""
    model = drawn(lambda: epinorm.LinearNorm(IN, HIDDEN, norm=GROUPS, post="dropout(0.5)"), dtype)
    split = parallelize_module(model, MESH, ColwiseParallel())
    _, parts = rows((ROWS, IN), dtype=dtype)
    torch.manual_seed(9)
    y = split(parts)
    torch.manual_seed(9)
    again = split(parts)
    parts_of_y = whole(y).view(ROWS, RANKS, -1) == 0
    differ = all(not torch.equal(parts_of_y[:, 0], parts_of_y[:, i]) for i in range(1, RANKS))
    kept = (whole(y) != 0).double().mean().item()
    # Copies of a result drop alike, whatever the processes' own seeds: by operations of ours, and
    # by PyTorch's layers, of channels that do not split.
    torch.manual_seed(dist.get_rank())
    for channels, placement in ((HIDDEN, Replicate()), (15, Shard(0))):
        w = torch.ones(channels, IN).to(DEVICE, dtype)
        x = parts.redistribute(placements=[Replicate()])
        w = distribute_tensor(w, MESH, [placement]).requires_grad_()
        copies = epinorm.linear_norm(x, w, norm=epinorm.LayerNorm(), post="dropout(0.5)|add(1)")
        copies.square().sum().backward()
        every = [torch.empty_like(copies.to_local()) for _ in range(RANKS)]
        dist.all_gather(every, copies.to_local().detach())
        differ &= all(torch.equal(every[0], other) for other in every)
    repeats = torch.equal(y.to_local(), again.to_local()) and differ and 0.4 < kept < 0.6
    return {"error": 0.0, "repeats": repeats}


def watched() -> dict[str, Any]:
    """Under the mode that counts collectives, whose hooks of all modules want each layer called."""
    one, split = (drawn(lambda: Pair(GROUPS)) for _ in range(2))
    parallelize_module(split, MESH, STYLES)
    x, parts = rows((ROWS, IN))
    truth, alone = step(one, x), step(split, parts)
    with CommDebugMode() as seen:
        found = step(split, parts)
    counts = {str(name).rpartition(".")[2]: n for name, n in seen.get_comm_counts().items()}
    error = max(relative(a, b) for a, b in zip(found, truth, strict=True))
    same = all(torch.equal(a, b) for a, b in zip(found, alone, strict=True))
    dropping = epinorm.LinearNorm(IN, HIDDEN, norm=GROUPS, pre="dropout(0.5)", dtype=torch.float64)
    parallelize_module(dropping.to(DEVICE), MESH, ColwiseParallel())
    with CommDebugMode():
        dropping(parts)
    return {"error": error, "repeats": same, "counts": counts}


def under_autocast() -> dict[str, Any]:
    """16 bits as one process has them; and with a dropout, of which it has others."""
    one, split = (drawn(lambda: Pair(GROUPS), torch.float32) for _ in range(2))
    parallelize_module(split, MESH, STYLES)
    x, parts = rows((ROWS, IN), dtype=torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        truth, found = one(x), split(parts)
        assert found.dtype == truth.dtype
        dropped = dropout(torch.float32)
    return {"error": relative(whole(found), truth), "repeats": dropped["repeats"]}


class SharedFiles(peers.Peers):
    """Memory that processes of a CPU share, in the place of GPUs'."""

    def __init__(self, group: Any, _device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.is_broken, self._meets = False, 0
        self._process_group, self._nbytes = group, 0

    def make_room(self, nbytes: int) -> bool:
        if nbytes > self._nbytes:
            names = [str(FOLDER / f"part{rank}-{nbytes}") for rank in range(self.size)]
            of = {"shared": True, "size": nbytes, "dtype": torch.uint8}
            self._parts = [torch.from_file(name, **of) for name in names]  # type: ignore[arg-type]
            self._nbytes = nbytes
        return True

    def part(self, rank: int, like: Tensor, shape: tuple[int, ...], index: int = 0) -> Tensor:
        flat = self._parts[rank][: self._nbytes // like.itemsize * like.itemsize].view(like.dtype)
        size = torch.Size(shape).numel()
        return flat[index * size : (index + 1) * size].view(shape)

    def follow(self) -> None:
        pass

    @contextmanager
    def copying(self) -> Iterator[None]:
        yield

    def copied(self) -> Callable[[], None]:
        return self.wait

    def wait(self) -> None:
        pass

    def barrier(self) -> None:
        dist.barrier(self._process_group)


def beside() -> dict[str, Any]:
    """Inference with rows that are exchanged beside the products, in turn with other sizes and with
    steps that exchange them as ever; three dimensions; a norm over split rows; error: in eps."""
    known = overlapped.pays, overlapped.peers_of, overlapped.DEVICES
    counted = []

    def pays(*given: Any) -> bool:
        counted.append(given)
        return True

    overlapped.pays = pays  # type: ignore[assignment]
    overlapped.DEVICES = (DEVICE,)
    if DEVICE == "cpu":
        files = SharedFiles(MESH.get_group(0), torch.device("cpu"))
        overlapped.peers_of = lambda *_: files  # type: ignore[assignment]
    worst, same, dtype = 0.0, True, torch.float32 if DEVICE == "cuda" else torch.float64
    turned = {"output_layouts": Shard(2)}, {"input_layouts": Shard(2)}
    deep = {"up": ColwiseParallel(**turned[0]), "down": RowwiseParallel(**turned[1])}
    kinds: list[Any] = [(GROUPS, (ROWS, IN), STYLES), (GROUPS, (2 * ROWS, IN), STYLES)]
    for norm in (epinorm.LayerNorm(), epinorm.RMSNorm()):
        kinds += [(norm, (ROWS, IN), STYLES), (norm, (ROWS, 3, IN), deep)]
    try:
        for norm, shape, styles in kinds:
            one, split = (drawn(lambda norm=norm: Pair(norm), dtype) for _ in range(2))
            parallelize_module(split, MESH, styles)
            x, parts = rows(shape, 0, dtype)
            for _ in range(2):
                with torch.no_grad():
                    truth, found = one(x), [whole(split(parts)) for _ in range(2)]
                worst = max(worst, *(relative(y, truth) for y in found))
                same &= all(torch.equal(y, found[0]) for y in found)
                step(split, parts)
        x, parts = rows((ROWS, IN - 1), 0, dtype)  # of whose channels one process has fewer
        weight = drawn(lambda: nn.Linear(IN - 1, IN), dtype).weight.detach()
        with torch.no_grad():
            y = epinorm.linear_norm(parts, distribute_tensor(weight, MESH, [Shard(1)]), norm=GROUPS)
            worst = max(worst, relative(whole(y), epinorm.linear_norm(x, weight, norm=GROUPS)))
    finally:
        overlapped.pays, overlapped.peers_of, overlapped.DEVICES = known
    return {"error": worst / torch.finfo(dtype).eps, "repeats": same, "asked": len(counted)}


def state() -> dict[str, Any]:
    """A split model's state is the plain one's, name by name."""
    one, split = (drawn(lambda: Pair(GROUPS)) for _ in range(2))
    parallelize_module(split, MESH, STYLES)
    known = get_model_state_dict(split, options=StateDictOptions(full_state_dict=True))
    expected = one.state_dict()
    same = known.keys() == expected.keys()
    return {
        "error": 0.0,
        "repeats": same and all(torch.equal(known[k], expected[k]) for k in known),
    }


def on_two_dimensions() -> dict[str, Any]:
    """Rows over one dimension of the mesh by fully_shard, channels over the other."""
    torch._dynamo.reset()
    one, split = (drawn(lambda: Written(nn.GroupNorm(8, HIDDEN))) for _ in range(2))
    mesh = init_device_mesh(DEVICE, (RANKS // 2, 2), mesh_dim_names=("data", "tensor"))
    parallelize_module(split, mesh["tensor"], STYLES)
    epinorm.fuse(fully_shard(split, mesh=mesh["data"]))
    x, _ = rows((ROWS, IN))
    truth = step(one, x)
    mine = x.chunk(RANKS // 2)[mesh.get_local_rank("data")]
    parts = distribute_tensor(mine, mesh["tensor"], [Shard(0)])
    worst = 0.0
    for _ in range(2):
        split.zero_grad()
        y = split(parts)
        y.square().mean().backward()
        gradients = [whole(p.grad) for p in split.parameters()]  # type: ignore[arg-type]
        share = truth[0].chunk(RANKS // 2)[mesh.get_local_rank("data")]
        pairs = zip((whole(y), *gradients), (share, *truth[2:]), strict=True)
        worst = max(worst, *(relative(a, b) for a, b in pairs))
    return {"error": worst, "repeats": True, "fused": epinorm.explain(split).fused}


def refused() -> dict[str, Any]:
    """Errors that say what is wrong, in all ranks, and a group that works afterwards."""
    said = []

    def attempt(call: Callable[[], Any]) -> None:
        try:
            call()
        except (RuntimeError, ValueError) as error:
            said.append(f"{type(error).__name__}: {error}")

    odd = epinorm.LinearNorm(IN, 31, norm=epinorm.LayerNorm())
    attempt(lambda: parallelize_module(odd.to(DEVICE), MESH, ColwiseParallel()))
    split = parallelize_module(drawn(lambda: Pair(GROUPS)), MESH, STYLES)
    _, parts = rows((ROWS, IN + 1))
    attempt(lambda: split(parts))
    x, _ = rows((ROWS, IN))
    attempt(lambda: epinorm.linear_norm(x, split.up.linear.weight, norm=GROUPS))
    return modules(GROUPS) | {"said": said}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "group norm": lambda: modules(GROUPS),
    "layer norm": lambda: modules(epinorm.LayerNorm()),
    "rms norm": lambda: modules(epinorm.RMSNorm()),
    "sum": lambda: modules(GROUPS, return_sum=True),
    "float32": lambda: modules(GROUPS, torch.float32),
    "sequences": sequences,
    "fuse, parallelize_module": lambda: written(lambda: nn.GroupNorm(8, HIDDEN), True),
    "parallelize_module, fuse": lambda: written(lambda: nn.GroupNorm(8, HIDDEN), False),
    "layer norm, fused": lambda: written(lambda: nn.LayerNorm(HIDDEN), False),
    "read by plain code": read_by_plain_code,
    "uneven": uneven,
    "one row": one_row,
    "sum alone": sum_alone,
    "gated": gated,
    "compiled": compiled,
    "second derivatives": second_derivatives,
    "beside": beside,
    "dropout": dropout,
    "watched": watched,
    "autocast": under_autocast,
    "state": state,
    "two dimensions": on_two_dimensions,
    "refused": refused,
}

if TorchVersion(torch.__version__) < "2.13":  # whose LayerNorm takes no vectors that are sharded
    del CASES["layer norm, fused"], CASES["read by plain code"]

if __name__ == "__main__":
    _, RANKS, FOLDER, DEVICE = start()
    MESH = init_device_mesh(DEVICE, (RANKS,))
    asked = sys.argv[5:] or CASES
    finish(FOLDER, {name: attempt(CASES[name]) for name in asked if name in CASES})
