"""Random chains against float64: `make fuzz FUZZ_SECONDS=600`.

    python scripts/fuzz.py --seconds 60 --device cuda --workers 12 --cases 1000

Draws chains × shapes × strides × dtypes × modes by hypothesis, computes outputs and all gradients
by epinorm and by PyTorch's own layers, and compares both with float64. Each failure is shrunk and
printed as a few lines that reproduce it; such a case belongs into the tests. Chains come out of a
pool, since a new one is a new kernel to compile: another --seed is another pool.
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import time
import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as hypothesis_seed
from hypothesis import strategies as st
from torch import Tensor

import epinorm
from epinorm.chain import Chain, reference
from epinorm.chain.pointwise import DEFINITIONS
from epinorm.operator.functional import apply_chain
from epinorm.tools.accuracy import FLOOR_ULPS, relative_error

CHUNK = 40
"""Cases between two looks at the clock."""
DRAWS = 3
"""Of inputs, whose errors are pooled: that of a single small problem is luck, ours and eager's."""
FEW = 64
"""Values whose pooled error is luck still: a whole ulp of one of them is most of it."""
LIMIT = 1.5
"""Times eager's pooled error, or the floor's. Small problems scatter: 1.1 is held by the tests over
large ones (tools/accuracy.py); what this looks for is wrong by more."""
STRATEGIES = {"cuda": ("auto", "auto", "single", "planes", "epilogue"), "cpu": ("auto",)}
KINDS = {
    "cuda": ("float32 highest", "float32 high", "bfloat16", "float16", "float64"),
    "cpu": ("float32 highest", "float64", "bfloat16"),
}


class Failure(AssertionError):
    """What is wrong, in one line."""


def pool(seed: int, size: int) -> list[tuple[tuple[str, ...], str, tuple[str, ...]]]:
    """Operations before the norm, the norm, operations behind it."""
    rng = random.Random(seed)
    names = [name for name, d in DEFINITIONS.items() if d.operand != "seed"]
    smooth = [n for n in names if DEFINITIONS[n].kinks(*DEFINITIONS[n].parameters.values()) == ()]
    found = []
    for _ in range(size):
        norm = rng.choice(["group_norm", "group_norm", "layer_norm", "rms_norm"])
        pre = tuple(rng.choices(smooth, k=rng.choice([0, 0, 1, 2])))
        post = tuple(rng.choices(names, k=rng.choice([0, 1, 1, 2, 3])))
        found.append((pre, norm, post))
    return found


def text_of(name: str, numbers: list[float]) -> str:
    """An operation with constants out of ``numbers``; bounds are in order."""
    count = len(DEFINITIONS[name].parameters)
    given = [round(x, 3) for x in numbers[:count]]
    if name in ("clamp", "hardtanh"):
        given = [-abs(given[0]) - 0.1, abs(given[1]) + 0.1]
    if name == "softplus":
        given = [abs(given[0]) + 0.5, 20.0]
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
    pre, norm, post = draw(st.sampled_from(chains))
    number = st.floats(-2, 2, width=32)

    def operations(names: tuple[str, ...]) -> list[str]:
        return [text_of(name, draw(st.lists(number, min_size=2, max_size=2))) for name in names]

    channels = draw(st.sampled_from([2, 3, 4, 8, 12, 16, 24, 32, 40, 64, 100, 128, 256]))
    groups = draw(st.integers(1, max(1, 512 // channels))) if norm == "group_norm" else 1
    n = channels * groups
    eps = "0.1" if channels < 16 else draw(st.sampled_from(["1e-05", "0.001", "0.1"]))
    named = f"group_norm({groups},{eps})" if norm == "group_norm" else f"{norm}({eps})"
    rows = [0, 1, 2, 7, 33, 64, 130, 300] + ([1100] if device == "cuda" else [])
    return Case(
        "|".join((*operations(pre), named, *operations(post))),
        draw(st.sampled_from(rows)),
        draw(st.sampled_from([1, 3, 8, 20, 36, 64, 100, 128, 200, 264])),
        n,
        draw(st.sampled_from(KINDS[device])),
        draw(st.booleans()),
        draw(st.tuples(st.booleans(), st.booleans(), st.booleans())),
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
    operands = [new(case.n) if kind == "channel" else new(*rows, case.n) for kind in kinds]
    vectors = [new(case.n) if given else None for given in case.parameters]
    made = [laid_out(x, case.layout), laid_out(new(case.n, case.k), case.layout), *vectors]
    made += [laid_out(t, case.layout) for t in operands]
    if case.chain.find("rms_norm") >= 0:
        made[4] = None if not case.parameters[2] else made[4]
    # Rounded to the dtype first, so that float64 computes the same problem.
    return [None if t is None else _like(t, dtype, device) for t in made]


def _like(t: Tensor, dtype: torch.dtype, device: str) -> Tensor:
    moved = torch.empty_strided(t.size(), t.stride(), dtype=dtype, device=device)
    return moved.copy_(t)


def nudged(tensors: list[Tensor | None]) -> list[Tensor | None]:
    """Each value off by a rounding of float64: on a CPU eager is its own truth there, and what it
    loses to its inputs' last bits is the yardstick."""
    eps = torch.finfo(torch.float64).eps
    return [
        None if t is None else t * (1 + (torch.rand_like(t) - 0.5).sign() * eps) for t in tensors
    ]


def step(compute: Any, tensors: list[Tensor | None], training: bool, seed: int) -> list[Tensor]:
    """y, and where training the gradients of all tensors."""
    leaves = [None if t is None else t.detach().requires_grad_(training) for t in tensors]
    with torch.set_grad_enabled(training):
        y = compute(*leaves[:5], tuple(leaves[5:]))
    if not training:
        return [y]
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(seed)).to(y.device, y.dtype)
    return [y.detach(), *torch.autograd.grad(y, [t for t in leaves if t is not None], dy)]


def check(case: Case, device: str) -> bool:
    """Raise Failure where epinorm is wrong; False where the strategy does not serve the case."""
    chain = Chain.parse(case.chain)
    smooth = all(not op.kinks for op in (*chain.pre, *chain.post))
    training = case.training and smooth
    torch.set_float32_matmul_precision("high" if case.kind.endswith("high") else "highest")
    pooled: dict[str, list[list[Tensor]]] = {"ours": [], "eager": [], "truth": []}
    for draw in range(DRAWS):
        tensors = tensors_of(case, device, draw)
        # On the CPU: PyTorch's hardswish on a GPU takes 1/6 as a float, in float64 too.
        exact = [None if t is None else t.detach().cpu().double() for t in tensors]

        def eager(x: Any, w: Any, b: Any, gamma: Any, beta: Any, operands: Any) -> Tensor:
            return reference.linear_norm(x, w, b, chain, gamma, beta, operands)

        def ours(*given: Any) -> Tensor:
            return apply_chain(*given, case.chain, case.strategy)

        try:
            seen = nudged(tensors) if case.kind == "float64" else tensors
            pooled["eager"].append(step(eager, seen, training, draw))
        except RuntimeError:
            return False  # PyTorch's own layers cannot compute it (GroupNorm of no rows, say)
        try:
            pooled["ours"].append(step(ours, tensors, training, draw))
        except RuntimeError as error:
            if "cannot serve" in str(error):
                return False
            raise
        pooled["truth"].append(step(eager, exact, training, draw))
    dtype = getattr(torch, case.kind.split()[0])
    for i in range(len(pooled["ours"][0])):
        made, theirs, truth = (
            torch.cat([outputs[i].cpu().double().flatten() for outputs in pooled[who]])
            for who in ("ours", "eager", "truth")
        )
        what = "y" if i == 0 else f"gradient {i - 1}"
        for draws in pooled["ours"]:
            if draws[i].dtype != pooled["eager"][0][i].dtype:
                raise Failure(f"{what} is {draws[i].dtype}, eager's {pooled['eager'][0][i].dtype}")
        finite = torch.isfinite(theirs)
        if not torch.equal(torch.isfinite(made) | ~finite, torch.ones_like(finite)):
            raise Failure(f"{what} is not finite where eager's is")
        if not made.numel() or not torch.isfinite(truth).all() or not finite.all():
            continue
        error, yardstick = relative_error(made, truth), relative_error(theirs, truth)
        floor = FLOOR_ULPS[dtype] * torch.finfo(dtype).eps
        if made.numel() < FEW:
            floor *= 4
        if case.kind.endswith("high"):
            floor = 2.0**-11
        if not error <= LIMIT * max(yardstick, 2 * floor):
            raise Failure(f"{what}: error {error:.2e}, eager's {yardstick:.2e}")
    return True


def hunt(device: str, seconds: float, cases_wanted: int, seed: int) -> int:
    """Draw until the time or the number is up; how many failed."""
    chains = pool(seed, 24 if device == "cpu" else 48)
    counts = {"cases": 0, "served": 0}
    ends, failures, chunk = time.monotonic() + seconds, 0, 0
    last: list[Case] = []
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
            if time.monotonic() > ends + 30:
                return
            counts["cases"] += 1
            last[:] = [case]
            counts["served"] += check(case, device)

        try:
            one()
        except Exception as error:
            failures += 1
            print(f"FAILED: {type(error).__name__}: {error}", *last, sep="\n  ", flush=True)
            if not isinstance(error, Failure):
                traceback.print_exc(limit=-6)
            print(f'  check({last[-1]!r}, "{device}")  # in scripts/fuzz.py', flush=True)
        chunk += 1
    print(f"{counts['cases']} cases, {counts['served']} of them served, {failures} failed")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--cases", type=int, default=10**9, help="of each worker")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    chosen = parser.parse_args()
    print(f"epinorm {epinorm.__version__} on {chosen.device}, seed {chosen.seed}", flush=True)
    if chosen.workers > 1:
        own = [sys.executable, __file__, f"--seconds={chosen.seconds}", f"--device={chosen.device}"]
        own += [f"--cases={chosen.cases}"]
        started = [
            subprocess.Popen([*own, f"--seed={chosen.seed + i}"], env=os.environ.copy())
            for i in range(chosen.workers)
        ]
        return max(worker.wait() for worker in started)
    warnings.simplefilter("ignore")
    return min(hunt(chosen.device, chosen.seconds, chosen.cases, chosen.seed), 1)


if __name__ == "__main__":
    sys.exit(main())
