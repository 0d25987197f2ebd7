"""README is short, its Python runs as it stands, and what it shows and links to is there."""

import re
from pathlib import Path

import pytest

import epinorm
from epinorm.tools.models.verify import POOLED_LIMIT, SINGLE_LIMIT

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
TEXT = README.read_text("utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("example", EXAMPLES, ids=range(len(EXAMPLES)))
def test_readme_example_runs(example: str) -> None:
    names: dict[str, object] = {}
    exec(compile(example, str(README), "exec"), names)
    assert names["y"].isfinite().all()
    # What a newcomer sees first, on a CPU too.
    assert str(epinorm.explain(names["model"])).startswith("Sequential: 1 of 1 chains fused")


def test_readme_opens_with_a_sentence_a_picture_and_six_lines_of_code() -> None:
    assert len(TEXT.splitlines()) <= 150
    opening = TEXT.split("\n\n")
    assert opening[0] == "# epinorm"
    assert opening[1].count(". ") == 0
    assert opening[2].startswith("<picture>")
    assert len([line for line in EXAMPLES[0].splitlines() if line]) == 6


def test_readme_says_the_bounds_that_gradients_of_whole_models_are_held_to() -> None:
    said = f"{POOLED_LIMIT:g} times for all together and {SINGLE_LIMIT:g} for each"
    assert said in " ".join(TEXT.split())


def test_readme_has_no_wide_table() -> None:
    rows = [line for line in TEXT.splitlines() if line.startswith("|")]
    assert len(rows) > 10
    assert max(line.count("|") - 1 for line in rows) <= 6


def test_what_readme_links_to_is_there() -> None:
    links = re.findall(r"""\]\(([^)#:]+)\)|(?:src|srcset)="([^"]+)\"""", TEXT)
    named = [name for pair in links for name in pair if name]
    assert {"docs/speedups-light.svg", "docs/speedups-dark.svg", "docs/results.md"} <= set(named)
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_sections_that_are_linked_to_are_there() -> None:
    for page in (README, *ROOT.glob("*.md")):
        for name, section in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", page.read_text("utf-8")):
            target = page.parent / name if name else page
            heads = re.findall(r"^#+ (.+)$", target.read_text("utf-8"), re.MULTILINE)
            slugs = {
                re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-") for head in heads
            }
            assert section in slugs, f"{page.name}: {name}#{section}"
