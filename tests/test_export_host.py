"""The host of an exported file repeats its tables: built for the CPU, with a driver that writes."""

import ctypes
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from epinorm.chain import Chain
from epinorm.tools.export.dump import MODES, Tables
from epinorm.tools.export.export import export
from export_case import load

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")

ZOO = Path(__file__).parent / "zoo" / "problem.py"
STREAM = 77


@pytest.fixture(scope="module")
def fake(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The driver, under the name that hosts look for."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    source = Path(__file__).parent / "fake_cuda" / "libcuda.c"
    flags = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-O1"]
    subprocess.run(["gcc", *flags, "-o", str(path), str(source)], check=True)
    library = ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)
    library.fake_log.restype = ctypes.c_char_p
    return library


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, fake: ctypes.CDLL) -> ModuleType:
    """An exported file, whose extension is built."""
    folder = tmp_path_factory.mktemp("host")
    path = folder / "model_new.py"
    path.write_text(export(ZOO, gpus=["h200"], modes=["bfloat16"]).text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        module = load(path, "exported")
        module._host()
        return module


def tables(chain: str, m: int, k: int, n: int, has: tuple, strategy: Any, gpu: str) -> Tables:
    found = Tables([gpu], MODES, strategy)
    found.add(Chain.parse(chain), m, k, n, has)
    assert found.tables
    return found


class Names:
    """Which tensor a name stands for, in bytes: what is given and given back, and what was seen."""

    def __init__(self) -> None:
        self.at: dict[str, int] = {}

    def check(self, name: str, offset: int, address: int) -> None:
        assert self.at.setdefault(name, address - offset) == address - offset, name
        assert self.at[name] % 16 == 0


TYPES = {"float16": 6, "float32": 7, "bfloat16": 9}
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}
L2 = {0: 0, 64: 1, 128: 2, 256: 3}


def check_argument(expected: str, found: str, names: Names) -> None:
    kind, text = expected[0], expected[1:]
    assert found[0] == kind
    if kind == "p" and text != "0":
        name, offset = text.split("+")
        names.check(name, int(offset), int(found[1:]))
    elif kind == "m":
        at, dtype, *sizes, swizzle, l2 = text.split(":")
        name, offset = at.split("+")
        address, *rest = found[1:].split(":")
        names.check(name, int(offset), int(address))
        numbers = [TYPES[dtype], *map(int, sizes), SWIZZLES[int(swizzle)], L2[int(l2)]]
        assert list(map(int, rest)) == numbers
    elif kind == "f":
        rounded = ctypes.c_float(float.fromhex(text)).value
        assert float.fromhex(found[1:]) == rounded
    else:
        assert found[1:] == text


def check_repeated(exported: ModuleType, fake: ctypes.CDLL, made: Tables, key: tuple) -> int:
    """Run one table twice on the CPU and compare each launch; how many there are."""
    table = made.tables[key]
    lines = [line.split() for line in table.splitlines()]
    chain, dtype = made.chains[key[0]], MODES[key[2]][0]
    launched = [line for line in lines if line[0] == "run"]
    signatures = {
        int(line[1]): "".join(word[0] for word in line[13:]).encode() for line in launched
    }
    kernels = [(source.entry, signatures.get(n)) for n, source in enumerate(made.sources)]
    exported.KERNELS, exported._machine_code = kernels, lambda number: kernels[number][1]
    exported._kernel.cache_clear()
    exported._room.clear()
    fake.fake_log()
    program = exported._repeated(exported._host(), table, 0)
    allowed = fake.fake_log().decode()
    for line in launched:
        shared, cluster = int(line[8]), int(line[9])
        entry = made.sources[int(line[1])].entry
        assert (f"allow {entry} 8 {shared}\n" in allowed) == (shared > 48 * 1024)
        assert cluster <= 8 or f"allow {entry} 14 1\n" in allowed
    sizes = {"x": (chain.m, chain.k), "weight": (chain.n, chain.k)}
    wide = {"dy", "z", *(f"operand{i}" for i in range(9))}
    names = lines[0][1:]
    for _ in range(2):
        given = []
        for name in names:
            size = sizes.get(name, (chain.m, chain.n) if name in wide else (chain.n,))
            nbytes = name.startswith("left_")
            given.append(
                torch.zeros(2**20, dtype=torch.uint8) if nbytes else torch.zeros(size, dtype=dtype)
            )
        known = Names()
        known.at = {n: t.data_ptr() for n, t in zip(names, given, strict=True)}
        held = list(given)
        back = program.run(given, STREAM)
        assert not given
        assert len(held) == len(names)
        seen = [line.split() for line in fake.fake_log().decode().splitlines()]
        assert len(seen) == len(launched)
        for line, found in zip(launched, seen, strict=True):
            assert found[1] == made.sources[int(line[1])].entry
            assert found[2:13] == line[2:13]
            assert found[-2:] == ["stream", str(STREAM)]
            for expected, argument in zip(line[13:], found[13:-2], strict=True):
                check_argument(expected, argument, known)
        for name, tensor in zip(lines[-1][1:], back, strict=True):
            assert (tensor is None) == (name == "-")
            if tensor is not None and name in known.at:
                assert known.at[name] == tensor.data_ptr()
    return len(launched)


CASES = [
    ("group_norm(8)|leaky_relu(0.01)|scale(2)", 32, 96, 128, (True, True, True), "auto", "h200"),
    ("add_residual|layer_norm|gelu", 64, 256, 768, (True, True, True), "planes", "h200"),
    ("layer_norm|mul_channel", 64, 256, 768, (False, True, False), "epilogue", "h200"),
    ("group_norm(8)|relu", 65, 97, 128, (True, True, True), "auto", "a100"),
    ("group_norm(64)|scale(1e300)", 512, 256, 768, (True, True, True), "single", "h200"),
    ("gelu", 256, 256, 512, (True, False, False), "auto", "h200"),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[5]} {case[6]}")
def test_each_table_is_repeated(exported: ModuleType, fake: ctypes.CDLL, case: tuple) -> None:
    made = tables(*case)
    count = sum(check_repeated(exported, fake, made, key) for key in made.tables)
    assert count > 0
