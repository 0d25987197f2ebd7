"""Write every launch of every named case, so that a move can be shown to change nothing else.

    python scripts/snapshot.py OUT.json             each launch: kernel, hash of its text, shape
    python scripts/snapshot.py OUT.json --compile   registers and spills of each text as well (slow)
    python scripts/snapshot.py OUT.json --against OLD.json    and say what differs

Everything on the host runs as for an H200; the driver is a stand-in that notes launches, and
tensors are memory of the CPU that nothing reads. Needs no GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from epinorm.backends.cuda.runtime import jit
from imaginary import CASES, KINDS, hash_of, imaginary_h200, launches


def steps() -> tuple[dict[str, Any], list[Any]]:
    """The launches in their order by case, kind and pass; and every source that was loaded."""
    found: dict[str, Any] = {}
    with imaginary_h200(compiles=True) as api:
        for name, (m, k, n, norm, pre, post) in CASES.items():
            for kind, (dtype, precision) in KINDS.items():
                torch.set_float32_matmul_precision(precision)
                for training in (False, True):
                    key = f"{name} {kind} {'training' if training else 'forward'}"
                    found[key] = launches(api, m, k, n, norm, pre, post, dtype, training)
    return found, api.sources


def figures(sources: list[Any]) -> dict[str, str]:
    """Registers and spills by the hash of a text."""
    found = {}
    for i, source in enumerate(sources):
        if hash_of(source) not in found:
            print(f"{i + 1}/{len(sources)} {source.entry}", file=sys.stderr)
            code = jit.compiled(source)
            found[hash_of(source)] = f"{code.registers} registers, {code.spill_bytes} spilled"
    return found


def compare(old: dict[str, Any], new: dict[str, Any]) -> int:
    differing = [k for k in old["steps"] if old["steps"][k] != new["steps"].get(k)]
    differing += [k for k in new["steps"] if k not in old["steps"]]
    for key in differing:
        print("differs:", key)
        for which, side in (("old", old), ("new", new)):
            for one in side["steps"].get(key, []):
                print(f"  {which} {one}")
    shared = old["figures"].keys() & new["figures"].keys()
    worse = [k for k in shared if old["figures"][k] != new["figures"][k]]
    for key in worse:
        print(f"{key}: {old['figures'][key]}, now {new['figures'][key]}")
    print(f"{len(new['steps'])} cases, {len(differing)} differ")
    return bool(differing or worse)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--against", type=Path)
    chosen = parser.parse_args()
    found, sources = steps()
    found = {"steps": found, "figures": figures(sources) if chosen.compile else {}}
    chosen.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
    if chosen.against:
        return compare(json.loads(chosen.against.read_text()), found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
