"""The host of an exported file repeats its tables: built for the CPU, with a driver that writes."""

import ast
import ctypes
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parent / "cuda"))

from test_signatures import letter_of, parameters

from epinorm.backends.cuda.runtime.arguments import CONFIG_BYTES
from epinorm.chain import Chain
from epinorm.tools.export.dump import MODES, Tables
from epinorm.tools.export.export import export
from export_case import load

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++"),
]

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
def exported(tmp_path_factory: pytest.TempPathFactory, fake: ctypes.CDLL) -> Iterator[ModuleType]:
    """An exported file, whose extension is built."""
    folder = tmp_path_factory.mktemp("host")
    path = folder / "model_new.py"
    path.write_text(export(ZOO, gpus=["h200"], modes=["bfloat16"]).text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_EXTENSIONS_DIR", str(folder / "extensions"))
        module = load(path, "exported")
        module._host()
        yield module


def test_two_files_of_a_process_build_at_once(
    exported: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As two exported models do that are first called side by side."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    text = Path(str(exported.__file__)).read_text()
    files = []
    for name in ("first", "second"):
        path = tmp_path / f"{name}.py"
        path.write_text(text)
        files.append(load(path, name))
    with ThreadPoolExecutor() as pool:
        hosts = list(pool.map(lambda file: file._host(), files))
    assert all(callable(host.ask) for host in hosts)
    (kept,) = tmp_path.rglob("*.so")  # of the faster one
    assert kept.stat().st_mode & 0o777 == 0o700
    assert kept.parent.name == kept.stem


def take(exported: ModuleType, kernels: list[tuple[str, bytes]]) -> None:
    """Let the file consist of these kernels, and its cache on disk hold their machine code."""
    exported.FILES = {"none.cu": ""}
    exported.KERNELS = [(entry, "none.cu", "sm_90a", [f"// {code!r}"]) for entry, code in kernels]
    for kept in (exported._kernel, exported._machine_code):
        kept.cache_clear()
    exported._room.clear()
    for number, (_, code) in enumerate(kernels):
        text = "\0".join((exported._text(number), "sm_90a", exported.CUDA_VERSION))
        folder, path, there = exported._kept(text, ".cubin")
        if not there:
            Path(folder).mkdir(mode=0o700)
            Path(path).write_bytes(code)
            Path(path).chmod(0o600)


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


def check_number(letter: str, data: bytes, written: str) -> None:
    """An argument's bytes are what the driver wrote."""
    code = {"p": "Q", "i": "i", "l": "q", "u": "I", "v": "Q", "f": "f", "d": "d"}[letter]
    (number,) = struct.unpack_from(code, data)
    assert written[0] == letter
    assert number == (float.fromhex if letter in "fd" else int)(written[1:])


def check_repeated(exported: ModuleType, fake: ctypes.CDLL, made: Tables, key: tuple) -> int:
    """Run one table twice on the CPU and compare each launch; how many there are."""
    table = ast.literal_eval(made.tables[key])
    names, there, buffers, constants, _, results, maps, steps = table
    chain, dtype = made.chains[key[0]], MODES[key[2]][0]
    launched = [step for step in steps if len(step) > 3]
    signatures = [
        "".join([letter_of(one, source.text) for one in parameters(source.text, source.entry)])
        for source in made.sources
    ]
    kernels = [
        (source.entry, signature.encode())
        for source, signature in zip(made.sources, signatures, strict=True)
    ]
    take(exported, kernels)
    fake.fake_log()
    program = exported._repeated(exported._host(), table, torch.device("cpu"))
    exported._host().ask(lambda: 0, lambda device: STREAM, None)
    allowed = fake.fake_log().decode()
    for number, shape, cluster, *_ in launched:
        entry, shared = kernels[number][0], shape[6]
        assert (f"allow {entry} 8 {shared}\n" in allowed) == (shared > 48 * 1024)
        assert cluster[0] <= 8 or f"allow {entry} 14 1\n" in allowed
    sizes = {"x": (chain.m, chain.k), "weight": (chain.n, chain.k)}
    wide = {"dy", "y", "z", *(f"operand{i}" for i in range(9))}
    for _ in range(2):
        given = []
        for name in names:
            size = sizes.get(name, (chain.m, chain.n) if name in wide else (chain.n,))
            nbytes = name.startswith("left_")
            given.append(
                torch.zeros(2**20, dtype=torch.uint8) if nbytes else torch.zeros(size, dtype=dtype)
            )
        held = list(given)
        at = {i: t.data_ptr() for i, t in enumerate(held)}
        back = program(given)
        assert not given
        assert [(tuple(t.shape), str(t.dtype)[6:]) for t in back] == [
            buffers[i - len(names)][:2] for i in results
        ]
        at |= {i: t.data_ptr() for i, t in zip(results, back, strict=True)}
        seen = [line.split() for line in fake.fake_log().decode().splitlines()]
        assert len(seen) == len(launched)
        for step, found in zip(launched, seen, strict=True):
            number, shape, cluster, dependent, data, offsets, places, *_ = step
            assert found[1] == kernels[number][0]
            assert list(map(int, found[2:13])) == [*shape, *cluster, dependent]
            assert found[-2:] == ["stream", str(STREAM)]
            where = {place[0]: place[1:] for place in places}
            arguments = bytes(CONFIG_BYTES) + bytes.fromhex(data)
            for letter, offset, argument in zip(
                signatures[number], offsets, found[13:-2], strict=True
            ):
                if offset not in where:
                    check_number(letter, arguments[offset:], argument)
                    continue
                buffer, of, shift = where[offset]
                address, *facts = argument[1:].split(":")
                # A buffer made on the way may lie where one before it did.
                begins = int(address) - shift
                assert begins % 16 == 0 or letter == "p"
                if buffer in at:
                    assert begins == at[buffer]
                assert argument[0] == letter
                if letter == "m":
                    columns, rows, stride, box_columns, box_rows, *kinds = maps[of]
                    kind, *rest = kinds
                    assert list(map(int, facts)) == [
                        *(kind, rows, columns, stride, box_rows, box_columns, *rest)
                    ]
    assert sum(there) == len(results)
    assert len(constants) <= 1
    return len(launched)


CASES = [
    ("group_norm(8)|leaky_relu(0.01)|scale(2)", 32, 96, 128, (True, True, True), "auto", "h200"),
    ("add_residual|layer_norm|gelu", 64, 256, 768, (True, True, True), "planes", "h200"),
    ("layer_norm|mul_channel", 64, 256, 768, (False, True, False), "epilogue", "h200"),
    ("group_norm(8)|relu", 65, 97, 128, (True, True, True), "auto", "a100"),
    ("group_norm(64)|scale(1e300)", 512, 256, 768, (True, True, True), "single", "h200"),
    ("gelu", 256, 256, 512, (True, False, False), "auto", "h200"),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]} {case[5]} {case[6]}")
def test_each_table_is_repeated(exported: ModuleType, fake: ctypes.CDLL, case: tuple) -> None:
    made = tables(*case)
    count = sum(check_repeated(exported, fake, made, key) for key in made.tables)
    assert count > 0


@pytest.mark.slow
def test_a_product_reads_a_slice_where_it_begins(exported: ModuleType, fake: Any) -> None:
    made = tables("layer_norm", 32, 64, 128, (False, True, True), "epilogue", "h200")
    key = next(key for key in made.tables if key[2:] == ("bfloat16", "forward"))
    table = ast.literal_eval(made.tables[key])
    take(exported, [(source.entry, b"") for source in made.sources])
    program = exported._repeated(exported._host(), table, torch.device("cpu"))
    exported._host().ask(lambda: 0, lambda device: STREAM, None)
    x, weight = torch.randn(64, 64).bfloat16(), torch.randn(256, 64).bfloat16()
    given = [x[32:], weight[128:], torch.ones(128).bfloat16(), torch.ones(128).bfloat16()]
    expected = nn.functional.linear(*given[:2])
    found = program(given)
    z = next(t for t in found[1:] if t.shape == expected.shape)
    torch.testing.assert_close(z, expected)
