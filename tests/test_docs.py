"""The documentation's Python runs as it stands, and its commands exist."""

import importlib.util
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import epinorm.parallel
from epinorm_cli.commands import app

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(page for page in DOCS.rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
RUN = [page for page in PAGES if BLOCK.search(page.read_text("utf-8"))]
COMMANDS = typer.main.get_command(app)


def named(page: Path) -> str:
    return str(page.relative_to(DOCS))


@pytest.fixture
def alone_in_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torchrun would say to the one process that it starts."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    said = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    for name, value in {**said, "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.slow
@pytest.mark.parametrize("page", RUN, ids=named)
@pytest.mark.usefixtures("alone_in_a_group")
def test_blocks_of_a_page_run_one_after_another(page: Path) -> None:
    names: dict[str, object] = {"__name__": "docs"}
    for block in BLOCK.findall(page.read_text("utf-8")):
        exec(compile(block, str(page), "exec"), names)


def test_every_public_name_is_described_and_shown_in_an_example() -> None:
    text = (DOCS / "reference" / "api.md").read_text("utf-8")
    examples = "\n".join(BLOCK.findall(text))
    public = [f"epinorm.{name}" for name in epinorm.__all__ if name != "__version__"]
    public += [f"epinorm.parallel.{name}" for name in epinorm.parallel.__all__]
    assert set(public) == set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))
    assert [n for n in public if not re.search(rf"\b{n.rpartition('.')[2]}\(", examples)] == [
        "epinorm.Chain"  # by its parse
    ]


def test_messages_that_troubleshooting_explains_are_those_of_the_source() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    written = " ".join(re.sub(r"\"\s*f?\"", "", source).split())
    page = (DOCS / "troubleshooting.md").read_text("utf-8")
    messages = re.findall(r"^\*\*`(.+?)`", page.partition("## By symptom")[0], re.MULTILINE)
    assert len(messages) >= 8
    for message in messages:
        words = message.split()
        runs = (" ".join(words[i : i + n]) for n in (3, 4) for i in range(len(words) - n + 1))
        assert any(run in written for run in runs), message


def test_the_settings_page_names_every_variable_that_is_read() -> None:
    source = "".join(path.read_text("utf-8") for path in (ROOT / "src").rglob("*.py"))
    read = re.findall(r'(?:VARIABLE = |environ\.get\()"(EPINORM_\w+)"', source)
    page = (DOCS / "reference" / "settings.md").read_text("utf-8")
    assert set(read) == set(re.findall(r"`(EPINORM_\w+)`", page))


MEASURED = re.compile(
    r"(?<![\w.])(?:\d[\d.,]*(?: to \d[\d.]*)?(?: ?(?:ms|µs|us|[GT]B/s|MB)(?!\w)| %|×(?!\d))"
    r"|\d+\.\d+(?: times|e-\d+))"
)
"""A time, a rate, a size of memory, a share, a ratio or an error as something measured is written;
the shape 128 × 256 is not, nor 2 KB of shared memory."""
GENERATED = re.compile(
    r"<!-- (?:\w+: )?begin.*?<!-- (?:\w+: )?end.*?-->|^```.*?^```", re.DOTALL | re.M
)
OURS_TO_CHOOSE = {
    "README.md": {"1.1 times"},
    "measuring.md": {"1.1 times", "0.6 %", "256 MB"},
    "judging.md": {"80 ms", "10 ms", "1.1 times", "50 %", "15 %"},
    "scale.md": {"50 GB/s", "4 TB/s"},  # assumed, and the page says so
    "host.md": {"32 MB"},
    "precision.md": {"4.8e-7"},  # 4 ulps
}
"""Bounds, limits and assumptions: what is chosen and not found."""
SHOWN = [ROOT / "README.md", *(page for page in PAGES if page.parent.name != "decisions")]


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_a_page_shows_no_number_that_no_results_file_holds(page: Path) -> None:
    """Decisions do, with commit and date; elsewhere numbers stand in generated tables."""
    typed = set(MEASURED.findall(GENERATED.sub("", page.read_text("utf-8"))))
    assert typed == OURS_TO_CHOOSE.get(page.name, set())


@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.name)
def test_a_page_has_no_table_of_more_than_six_columns(page: Path) -> None:
    rows = re.findall(r"^\|(?:-+\|)+$", page.read_text("utf-8"), re.MULTILINE)
    assert all(row.count("|") - 1 <= 6 for row in rows)


def test_a_link_that_leads_nowhere_fails_the_strict_build(tmp_path: Path) -> None:
    """As `make docs` calls it: --quiet would keep `strict` from seeing any warning."""
    (recipe,) = re.findall(r"mkdocs \$\(or \$\(ARGS\),(.+)\)\n", (ROOT / "Makefile").read_text())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](missing.md)")
    settings = (ROOT / "mkdocs.yml").read_text("utf-8")
    strict = re.findall(r"^strict: .+$|^validation:\n(?:  .+\n)+", settings, re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text("\n".join(["site_name: a", *strict]))
    command = [sys.executable, "-m", "mkdocs", *recipe.split(), "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "missing.md" in done.stderr


def test_every_page_is_in_the_sites_menu() -> None:
    menu = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert [named(page) for page in PAGES if f": {named(page)}\n" not in menu] == []


def commands() -> list[str]:
    lines = (line for page in (*PAGES, ROOT / "README.md") for line in page.read_text().split("\n"))
    shown = (line.strip().partition(" #")[0].strip() for line in lines if line[:4] == "    ")
    return sorted({line for line in shown if line.startswith("epinorm ") and "[" not in line})


@pytest.mark.parametrize("line", commands())
def test_a_command_and_its_options_exist(line: str) -> None:
    name, *arguments = shlex.split(line)[1:]
    if name == "--version":
        return
    command = COMMANDS.commands[name]  # type: ignore[attr-defined]
    options = {text for option in command.params for text in (*option.opts, *option.secondary_opts)}
    assert {text for text in arguments if text.startswith("-")} <= options


def test_links_of_the_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
            target = link.partition("#")[0]
            there = (page.parent / target).resolve()  # the site holds nothing from elsewhere
            if "://" not in link and target and not (there.exists() and DOCS in there.parents):
                broken.append(f"{named(page)}: {link}")
    assert broken == []


def test_files_that_a_page_names_are_there() -> None:
    """Those of how it works now; what a decision tried may be gone."""
    files = {path.relative_to(ROOT) for path in ROOT.glob("[bdest]*/**/*.*")}
    ends = {"/".join(path.parts[-n:]) for path in files for n in range(1, 6)}
    for page in (*(DOCS / "internals").glob("*.md"), ROOT / "CONTRIBUTING.md"):
        named_files = re.findall(r"`([\w/.]+\.(?:py|cuh?|cpp|h|in))`", page.read_text("utf-8"))
        assert {name for name in named_files if "NAME" not in name} <= ends, named(page)


def test_the_drawings_are_those_of_their_script() -> None:
    spec = importlib.util.spec_from_file_location("draw", DOCS / "internals" / "draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    there = {path.stem: path.read_text("utf-8") for path in draw.HERE.glob("*.svg")}
    assert there == {name: draw.draw(name) for name in draw.DRAWINGS}
    pages = {page.stem for page in (DOCS / "internals").glob("*.md")}
    assert pages == {name if name != "how_it_works" else "index" for name in there}
