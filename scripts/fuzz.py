"""Random chains against float64: `make fuzz FUZZ_SECONDS=600`.

    python scripts/fuzz.py --seconds 60 --device cuda --workers 12 --cases 1000

Draws chains × shapes × strides × dtypes × modes by hypothesis, computes outputs and all gradients
by epinorm and by PyTorch's own layers, and compares both with float64. On a GPU a case is computed
so often that native code takes its later inputs, where it can. Where ours is further away than
eager's, which on a few values may be luck, what roundings cost is asked of float64 itself
(``Perturbed``). Each failure is shrunk and printed as a few lines that reproduce it; such a case
belongs into the tests. Chains and their widths come out of a pool, since a new one is a new kernel
to compile; all workers share it, and so their kernels. Another --pool has other chains.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import epinorm
from epinorm.backends import memo
from epinorm.backends.cuda.runtime.native import settle
from epinorm.chain import Chain, reference
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.operator.functional import apply_chain
from epinorm.tools.accuracy import relative_error
from epinorm.tools.results import commit, device_name, write_atomic

CHUNK = 20
"""Cases between two looks at the clock."""
SUMMARY = "{cases} cases, {served} of them served, {native} trained by native code, {failed} failed"
TOTALS = re.compile(r"seed \d+: " + re.sub(r"{\w+}", r"(\\d+)", SUMMARY))
KINDS_OF_CHAINS = 24
"""In one run's pool."""
SIZES_OF_CHAIN = 3
DRAWS = 3
"""Of inputs, whose errors are pooled: that of a single small problem is luck, ours and eager's."""
UNTIL_NATIVE = {"cuda": 4, "cpu": 0}
"""Calls until one like them is native code's: planned, bound, recorded, kept (native_calls.py)."""
NATIVE = "LinearNormBackward"
"""The node of native code; Python's have another name."""
LIMIT = 1.5
"""Times eager's pooled error, or the worst of the perturbed ones. Small problems scatter: 1.1 is
held by the tests over large ones (tools/accuracy.py); what this looks for is wrong by more."""
PERTURBED = 32
"""Runs with other roundings. Where one value decides, its error is near to normal, and the largest
of so many about 2.4 deviations: LIMIT times that is 3.6 of them, by chance once in 3000, of the few
tensors that get here."""
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten.bmm.default,  # of x of more dimensions whose rows lie apart
)
EXACT = 4 * torch.finfo(torch.float64).eps
"""Between two results of float64 that are right. Its truth has roundings of its own, which are
eager's where both add a small product to a bias: eager's error is zero then."""
TF32 = 2.0**-11
"""What a product's operands lose by being rounded to TF32."""
STRATEGIES = {"cuda": ("auto", "auto", "single", "planes", "epilogue"), "cpu": ("auto",)}
KINDS = {
    "cuda": ("float32 highest", "float32 high", "bfloat16", "float16", "float64"),
    "cpu": ("float32 highest", "float64", "bfloat16"),
}


class Failure(AssertionError):
    """What is wrong, in one line."""


class Perturbed(TorchDispatchMode):
    """What an operation gives is off by ``unit`` of it, up or down at random, and what goes into a
    product by ``operand_unit``: a run, in float64, of a type with larger roundings.

    One ulp an operation is what PyTorch's elementary functions keep to (SLEEF's u10). The operands
    of a product stand for its sum, whose partial sums may be far larger than what is left of them.
    """

    def __init__(self, unit: float, operand_unit: float, seed: int) -> None:
        super().__init__()
        self.unit, self.operand_unit = unit, operand_unit
        self.generator = torch.Generator().manual_seed(seed)

    def off(self, t: Any, unit: float) -> Any:
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        up = torch.empty_like(t).bernoulli_(0.5, generator=self.generator)
        return t * (1 + unit * (2 * up - 1))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in PRODUCTS:
            args = tuple(self.off(t, self.operand_unit) for t in args)
        out = func(*args, **(kwargs or {}))
        if any(result.alias_info for result in func._schema.returns):
            return out  # a view
        if isinstance(out, tuple):
            return tuple(self.off(t, self.unit) for t in out)
        return self.off(out, self.unit)


class ExactSums(TorchDispatchMode):
    """Products of float64 whose sums are exact but for 2^-60 of their largest terms and a last
    rounding or two: what float64's own are compared with (Ozaki et al., 2012)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in PRODUCTS:
            return func(*args, **(kwargs or {}))
        *bias, a, b = [t.detach().numpy() for t in args]
        left, right = parts_of(a, -1), parts_of(b, -2)
        places = sorted(((i, j) for i in range(3) for j in range(3 - i)), key=sum, reverse=True)
        terms = [left[i] @ right[j] for i, j in places]  # smallest first
        return torch.from_numpy(np.asarray(sum(bias, sum(terms))))


def parts_of(matrix: Any, axis: int) -> list[Any]:
    """Three matrices of that sum, of 20 bits each below the largest number along the axis."""
    exponent = np.frexp(np.abs(matrix).max(axis, keepdims=True, initial=0.0))[1]
    parts = []
    for i in range(1, 4):
        unit = np.ldexp(1.0, exponent - 20 * i)
        parts.append(np.round(matrix / unit) * unit)
        matrix = matrix - parts[-1]
    return parts


@dataclass(frozen=True)
class Kind:
    """What is compiled anew: a chain but for its constants. norm: "" for none; sizes: channels of a
    group, and groups."""

    pre: tuple[str, ...]
    norm: str
    post: tuple[str, ...]
    eps: float
    ends: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]


def pool(seed: int, size: int) -> list[Kind]:
    rng = random.Random(seed)
    names = list(DEFINITIONS)
    smooth = [n for n in names if DEFINITIONS[n].kinks(*DEFINITIONS[n].parameters.values()) == ()]
    found = []
    for _ in range(size):
        norm = rng.choice(["group_norm", "group_norm", "layer_norm", "rms_norm", ""])
        pre = tuple(rng.choices(smooth, k=rng.choice([0, 0, 1, 2])))
        post = tuple(rng.choices(names, k=rng.choice([0, 1, 1, 2, 3])))
        ends = ("returns(sum)",) * (norm != "" and rng.random() < 0.3)
        ends += ("rounding(eager)",) * (rng.random() < 0.3)
        eps = rng.choice([1e-05, 0.001, 0.1])
        widths = [16, 24, 32, 40, 64, 100, 128, 256]
        if eps == 0.1 or norm != "group_norm":  # few values may be all but equal
            widths = [2, 3, 4, 8, 12, *widths]
        channels = rng.sample(widths, SIZES_OF_CHAIN)
        parted = norm == "group_norm" or rng.random() < 0.4  # norms of heads
        most = [512 // width if parted else 1 for width in channels]
        sizes = tuple(
            (width, rng.randint(1, groups)) for width, groups in zip(channels, most, strict=True)
        )
        found.append(Kind(pre, norm, post, eps, ends, sizes))
    return found


def text_of(name: str, numbers: list[float]) -> str:
    """An operation with constants out of ``numbers``; bounds are in order."""
    count = len(DEFINITIONS[name].parameters)
    given = [round(x, 3) for x in numbers[:count]]
    if name in ("clamp", "hardtanh"):
        given = [-abs(given[0]) - 0.1, abs(given[1]) + 0.1]
    if name == "softplus":
        given = [abs(given[0]) + 0.5, 20.0]
    if name == "dropout":
        given = [abs(given[0]) / 2]
    return f"{name}({','.join(map(str, given))})" if given else name


@dataclass(frozen=True)
class Case:
    """One problem; its repr is what reproduces it."""

    chain: str
    m: int
    k: int
    n: int
    kind: str
    training: bool
    parameters: tuple[bool, bool, bool]
    layout: str
    scale: int
    leading: bool
    strategy: str
    seed: int


@st.composite
def cases(draw: Any, device: str, chains: Any) -> Case:
    kind = draw(st.sampled_from(chains))
    norm = kind.norm
    number = st.floats(-2, 2, width=32)

    def operations(names: tuple[str, ...]) -> list[str]:
        return [text_of(name, draw(st.lists(number, min_size=2, max_size=2))) for name in names]

    channels, groups = draw(st.sampled_from(kind.sizes))
    n = channels * groups
    given = f"{groups},{kind.eps}" if norm == "group_norm" or groups > 1 else f"{kind.eps}"
    parts = [*operations(kind.pre), *[f"{norm}({given})"] * (norm != ""), *operations(kind.post)]
    parts = [*(parts or ["identity"]), *kind.ends]
    rows = [0, 1, 2, 7, 33, 64, 130, 300] + ([1100] if device == "cuda" else [])
    return Case(
        "|".join(parts),
        draw(st.sampled_from(rows)),
        draw(st.sampled_from([1, 3, 8, 20, 36, 64, 100, 128, 200, 264])),
        n,
        draw(st.sampled_from(KINDS[device])),
        draw(st.booleans()),
        (draw(st.booleans()), *[norm != "" and draw(st.booleans()) for _ in range(2)]),
        draw(st.sampled_from(["plain", "plain", "rows", "columns", "offset"])),
        draw(st.sampled_from([0, 0, 0, -20, 12])),
        norm != "group_norm" and draw(st.booleans()),
        draw(st.sampled_from(STRATEGIES[device])),
        draw(st.integers(0, 2**20)),
    )


def laid_out(t: Tensor, layout: str) -> Tensor:
    """The same values with other strides, or an address that is not aligned."""
    if t.dim() < 2 or layout == "plain":
        return t
    *leading, columns = t.shape
    if layout == "columns":
        return t.mT.contiguous().mT
    if layout == "rows":
        return t.new_empty(*leading, columns + 5)[..., :columns].copy_(t)
    return t.new_empty(t.numel() + 1)[1:].view(t.shape).copy_(t)


def tensors_of(case: Case, device: str, draw: int) -> list[Tensor | None]:
    """x, weight, bias, gamma, beta and the operands, in the case's dtype."""
    rng = torch.Generator().manual_seed(case.seed + draw)
    dtype = getattr(torch, case.kind.split()[0])
    rows = (2, case.m // 2) if case.leading else (case.m,)

    def new(*size: int) -> Tensor:
        made = (
            torch.randn(size, generator=rng) if case.seed % 2 else torch.rand(size, generator=rng)
        )
        return made

    x = new(*rows, case.k) * 2.0**case.scale
    kinds = Chain.parse(case.chain).operand_kinds
    seeds = torch.randint(2**63 - 1, (len(kinds), 1), generator=rng)
    sizes = {"channel": (case.n,), "element": (*rows, case.n), "row": (*rows, 1)}
    operands = [seeds[i] if kind == "seed" else new(*sizes[kind]) for i, kind in enumerate(kinds)]
    vectors = [new(case.n) if given else None for given in case.parameters]
    made = [laid_out(x, case.layout), laid_out(new(case.n, case.k), case.layout), *vectors]
    made += [laid_out(t, case.layout) for t in operands]
    if case.chain.find("rms_norm") >= 0:
        made[4] = None if not case.parameters[2] else made[4]
    # Rounded to the dtype first, so that float64 computes the same problem.
    return [None if t is None else _like(t, dtype, device) for t in made]


def _like(t: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    kept = dtype if t.is_floating_point() else t.dtype
    moved = torch.empty_strided(t.size(), t.stride(), dtype=kept, device=device)
    return moved.copy_(t)


def exact(t: Tensor | None) -> Tensor | None:
    """On the CPU: PyTorch's hardswish on a GPU takes 1/6 as a float, in float64 too."""
    if t is None:
        return None
    return t.detach().cpu().double() if t.is_floating_point() else t.cpu()


def step(
    compute: Any, tensors: list[Tensor | None], wanted_of: Sequence[bool], seed: int
) -> list[Tensor]:
    """What it returns, and the gradients of the tensors that are wanted."""
    training = any(wanted_of)
    leaves = [
        None if t is None else t.detach().requires_grad_() if wanted else t.detach()
        for t, wanted in zip(tensors, wanted_of, strict=True)
    ]
    with torch.set_grad_enabled(training):
        made = compute(*leaves[:5], tuple(leaves[5:]))
    results = [made] if isinstance(made, Tensor) else list(made)
    if not training:
        return results
    rng = torch.Generator().manual_seed(seed)
    given = [torch.randn(t.shape, generator=rng).to(t.device, t.dtype) for t in results]
    asked = [t for t in leaves if t is not None and t.requires_grad]
    return [*[t.detach() for t in results], *torch.autograd.grad(results, asked, given)]


def errors(
    runs: list[list[Tensor]], truths: list[list[Tensor]], dtypes: list[torch.dtype]
) -> list[float]:
    """Of each result, pooled over the draws, where its dtype holds the truth: beyond, one rounding
    more or less, both right, decides between the largest number and infinity."""

    def pooled(of: list[list[Tensor]]) -> list[Tensor]:
        together = zip(*of, strict=True)
        return [torch.cat([t.cpu().double().flatten() for t in same]) for same in together]

    found = []
    for made, truth, dtype in zip(pooled(runs), pooled(truths), dtypes, strict=True):
        held = truth.to(dtype).isfinite()
        found.append(relative_error(made[held], truth[held]))
    return found


def perturbed_errors(
    case: Case,
    problems: list[list[Tensor | None]],
    compute: Any,
    wanted: Sequence[bool],
    truths: Any,
    dtypes: list[torch.dtype],
) -> Iterator[list[float]]:
    """The largest error of each result so far in runs with roundings of the case's dtype."""
    unit = torch.finfo(getattr(torch, case.kind.split()[0])).eps
    operand_unit = max(unit, TF32) if case.kind.endswith("high") else unit
    largest = [0.0] * len(truths[0])
    for run in range(PERTURBED):
        with Perturbed(unit, operand_unit, run):
            made = [step(compute, p, wanted, draw) for draw, p in enumerate(problems)]
        largest = [max(pair) for pair in zip(largest, errors(made, truths, dtypes), strict=True)]
        yield largest


def check(case: Case, device: str) -> tuple[bool, bool]:
    """Raise Failure where epinorm is wrong. Whether the strategy serves the case, and whether
    native code did its training step."""
    if UNTIL_NATIVE[device]:
        memo.clear()  # what was recorded repeats the constants of an earlier case
    chain = Chain.parse(case.chain)
    smooth = all(not op.kinks for op in (*chain.pre, *chain.post))
    training = case.training and smooth
    wanted = [training] * 5 + [
        training and k in ("channel", "element") for k in chain.operand_kinds
    ]
    torch.set_float32_matmul_precision("high" if case.kind.endswith("high") else "highest")
    mine, theirs, truths, problems = [], [], [], []
    nodes = set()

    def eager(x: Any, w: Any, b: Any, gamma: Any, beta: Any, operands: Any) -> Any:
        return reference.linear_norm(x, w, b, chain, gamma, beta, operands)

    def ours(*given: Any) -> Any:
        made = apply_chain(*given, str(chain), case.strategy)
        node = (made if isinstance(made, Tensor) else made[0]).grad_fn
        nodes.add(None if node is None else node.name())
        return made

    for draw in range(DRAWS):
        tensors = tensors_of(case, device, draw)
        try:
            theirs.append(step(eager, tensors, wanted, draw))
        except RuntimeError:
            return False, False  # PyTorch's own layers cannot: GroupNorm of no rows, say
        try:
            mine.append(step(ours, tensors, wanted, draw))
        except RuntimeError as error:
            if "cannot serve" in str(error):
                return False, False
            raise
        if draw == 0:
            first = mine[0]
            for _ in range(UNTIL_NATIVE[device]):
                mine[0] = step(ours, tensors, wanted, draw)
        problems.append([exact(t) for t in tensors])
        with ExactSums() if case.kind == "float64" else nullcontext():
            truths.append(step(eager, problems[-1], wanted, draw))
    names = [f"result {i}" for i in range(1 + chain.returns_sum)]
    names += [f"gradient {i}" for i in range(len(truths[0]) - len(names))]
    for results, others, exacts in zip(
        [*mine, first], [*theirs, theirs[0]], [*truths, truths[0]], strict=True
    ):
        for what, made, other, truth in zip(names, results, others, exacts, strict=True):
            if made.dtype != other.dtype:
                raise Failure(f"{what} is {made.dtype}, eager's {other.dtype}")
            beyond = ~truth.to(made.dtype).isfinite() | ~other.cpu().isfinite()
            if not bool((made.cpu().isfinite() | beyond).all()):
                raise Failure(f"{what} is not finite where eager's is")
    dtypes = [t.dtype for t in theirs[0]]
    yardsticks = errors(theirs, truths, dtypes)
    both = [errors(runs, truths, dtypes) for runs in (mine, [first, *mine[1:]])]
    found = np.max(both, axis=0).tolist()
    floor = EXACT if case.kind == "float64" else 0.0
    own = [math.inf if math.isinf(error) else max(LIMIT * error, floor) for error in yardsticks]
    wrong = [i for i, error in enumerate(found) if not error <= own[i]]
    runs = perturbed_errors(case, problems, eager, wanted, truths, dtypes)
    for limits in runs if wrong else ():
        wrong = [i for i in wrong if not found[i] <= LIMIT * limits[i]]
        if not wrong:
            return True, NATIVE in nodes
    for i in wrong:
        raise Failure(
            f"{names[i]}: error {found[i]:.2e}, eager's {yardsticks[i]:.2e}, "
            f"largest of perturbed ones {limits[i]:.2e}"
        )
    return True, NATIVE in nodes


def hunt(device: str, seconds: float, cases_wanted: int, seed: int, chains: list[Kind]) -> int:
    """Draw until the time or the number is up; how many failed."""
    counts = {"cases": 0, "served": 0, "native": 0}
    ends, failures, chunk = time.monotonic() + seconds, 0, 0
    failing: dict[Case, Exception] = {}
    while time.monotonic() < ends and counts["cases"] < cases_wanted and failures < 3:

        @hypothesis_seed(seed * 10007 + chunk)
        @settings(
            max_examples=CHUNK,
            deadline=None,
            database=None,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=list(HealthCheck),
            print_blob=False,
        )
        @given(cases(device, chains))
        def one(case: Case) -> None:
            if case in failing:
                raise failing[case]
            if time.monotonic() > ends + (min(30, seconds / 4) if failing else 0):  # of shrinking
                return
            counts["cases"] += 1
            try:
                served, native = check(case, device)
                counts["served"] += served
                counts["native"] += native
            except Exception as error:
                failing[case] = error
                raise

        try:
            one()
        except Exception:
            failures += 1
            smallest, wrong = failing.popitem()  # the last one
            print(f"FAILED: {type(wrong).__name__}: {wrong}", flush=True)
            if not isinstance(wrong, Failure):
                traceback.print_exception(wrong, limit=-6)
            print(f'  check({smallest!r}, "{device}")  # in scripts/fuzz.py', flush=True)
            failing.clear()
        chunk += 1
        print(f"seed {seed}: {SUMMARY.format(**counts, failed=failures)}", flush=True)
    return failures


def totals(
    workers: list[subprocess.Popen[str]], look: Callable[[dict[str, int]], None]
) -> dict[str, int]:
    """Cases, those served, those by native code and failures of all, whose lines are shown as they
    come; ``look`` is given what there is after each."""
    last: list[tuple[int, ...]] = [(0, 0, 0, 0)] * len(workers)
    lock = threading.Lock()

    def summed() -> dict[str, int]:
        sums = [sum(counts) for counts in zip(*last, strict=True)]
        return dict(zip(("cases", "served", "native", "failed"), sums, strict=True))

    def follow(index: int) -> None:
        for line in workers[index].stdout or ():
            print(line, end="", flush=True)
            if found := TOTALS.match(line):
                with lock:
                    last[index] = tuple(map(int, found.groups()))
                    look(summed())
        *counts, failed = last[index]
        counted_nothing = counts[0] == 0
        last[index] = (*counts, max(failed, workers[index].wait(), counted_nothing))

    with ThreadPoolExecutor(len(workers)) as threads:
        list(threads.map(follow, range(len(workers))))
    return summed()


class Recorded:
    """A run's row in a file of them, as far as the run has come: one that is cut off counts."""

    def __init__(self, chosen: argparse.Namespace) -> None:
        self.path: Path = chosen.record
        self.rows = json.loads(self.path.read_text()) if self.path.exists() else []
        settings_of = ("seed", "pool", "chains", "workers", "seconds")
        self.facts = {name: getattr(chosen, name) for name in settings_of}
        self.facts |= {"torch": torch.__version__, "commit": commit()}
        self.facts |= {"date": date.today().isoformat()}
        self.device = device_name(torch.device(chosen.device))

    def __call__(self, found: dict[str, int]) -> None:
        row = {"device": self.device, **found, **self.facts}
        write_atomic(self.path, json.dumps([*self.rows, row], indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=10**9, help="of each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--pool", type=int, help="default: the seed")
    parser.add_argument("--chains", type=int, default=KINDS_OF_CHAINS, help="in the pool")
    parser.add_argument("--record", type=Path, help="a file to add the totals of this run to")
    chosen = parser.parse_args()
    if chosen.pool is None:
        chosen.pool = chosen.seed
    version = f"epinorm {epinorm.__version__} on {chosen.device}"
    print(f"{version}, seed {chosen.seed}, pool {chosen.pool}", flush=True)
    if chosen.workers > 1 or chosen.record:
        own = [sys.executable, __file__, f"--seconds={chosen.seconds}", f"--device={chosen.device}"]
        own += [f"--cases={chosen.cases}", f"--pool={chosen.pool}", f"--chains={chosen.chains}"]
        threads = max(1, (os.cpu_count() or 1) // chosen.workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))
        record = Recorded(chosen) if chosen.record else lambda found: None
        workers = [
            subprocess.Popen([*own, f"--seed={chosen.seed + i}"], stdout=subprocess.PIPE, text=True)
            for i in range(chosen.workers)
        ]
        found = totals(workers, record)
        record(found)
        print(f"all workers: {SUMMARY.format(**found)}")
        return min(found["failed"], 1)
    warnings.simplefilter("ignore")
    if chosen.device == "cuda":
        settle()
    chains = pool(chosen.pool, chosen.chains)
    return min(hunt(chosen.device, chosen.seconds, chosen.cases, chosen.seed, chains), 1)


if __name__ == "__main__":
    sys.exit(main())
