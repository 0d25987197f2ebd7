"""Kept figures serve the very text, architecture and compiler that they are of, and no warning."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import figures
import pytest
from test_jit import SPILLING, TEXT

from epinorm.backends import cache
from epinorm.backends.cuda.runtime.jit import KernelSource, cache_key, compiled

SUM = KernelSource("sum32", TEXT, "sm_80")
SPILLS = KernelSource("spills", SPILLING.replace("BOUNDS", "__launch_bounds__(1024, 2)"), "sm_80")
SERIALISED = "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async is serialized"


def test_what_is_kept_is_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures, "KEPT", tmp_path / "figures.txt")
    monkeypatch.setattr(figures, "COMPILED_ANYWAY", 1 << 32)
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path / "first"))
    made = [compiled(source) for source in (SUM, SPILLS)]
    stalled = cache_key(replace(SUM, text=f"{TEXT}// another"))
    facts = {name: getattr(made[0], name) for name in figures.NAMES[2:]}
    cache.write(stalled, {**facts, "entry": "sum32", "arch": "sm_80", "log": SERIALISED}, b"")
    figures.main(str(tmp_path / "first"))
    monkeypatch.setenv("EPINORM_CACHE_DIR", str(tmp_path / "second"))
    figures.fill_cache()
    for source, before in zip((SUM, SPILLS), made, strict=True):
        found = compiled(source)
        assert found == replace(before, cubin=b"", log="")
        assert (found.spill_bytes > 0) == (source is SPILLS)
    assert cache.read(stalled) is None
    for other in (replace(SUM, text=TEXT + "\n"), replace(SUM, arch="sm_90")):
        assert compiled(other).cubin  # compiled now
