"""The pages: links lead somewhere, the site lists each page, each begins with something to use, and the picture is its source's.

`make docs` checks links and anchors between pages of the site; here are those of README and CONTRIBUTING, which are outside.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
OUTSIDE = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "benchmarks/README.md", "examples/gsm8k/README.md")]
FIRST_SCREEN = 25  # lines
HOW_TO = [page for page in PAGES if page.parent.name == "docs"]  # others are evidence, and for developers
TABLES = {"config.md", "coming-from.md", "metrics.md", "gpu-keys.md", "terms.md"}  # one looks up a key or a word there


@pytest.mark.parametrize("page", [*PAGES, *OUTSIDE], ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    dead = [
        target
        for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
        if "://" not in target and not (page.parent / target).exists()
    ]
    assert not dead, f"{page.name} links to {dead}"


def listed(nav: list | dict | str) -> list[str]:
    """The pages of mkdocs.yml's nav, which nests lists in mappings of one name."""
    if isinstance(nav, str):
        return [nav]
    return [page for entry in (nav.values() if isinstance(nav, dict) else nav) for page in listed(entry)]


def test_the_site_lists_every_page_once():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = [page.relative_to(ROOT / "docs").as_posix() for page in PAGES]
    assert sorted(listed(site["nav"])) == sorted(pages) and site["strict"]


@pytest.mark.parametrize("page", HOW_TO, ids=lambda page: page.name)
def test_the_first_screen_has_something_to_use(page):
    """A command, a config, a piece of code or a table, in reach of one who reads no further."""
    first = page.read_text(encoding="utf-8").splitlines()[:FIRST_SCREEN]
    assert any(re.match(r"    \S|```|\|", line) for line in first)


def test_a_page_that_says_how_is_short():
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in HOW_TO}
    assert not {name: count for name, count in lines.items() if count > 150 and name not in TABLES}


def test_files_that_pages_name_are_there():
    text = "".join(page.read_text(encoding="utf-8") for page in (*PAGES, *OUTSIDE))
    named = set(re.findall(r"`((?:mrl|tests|docs|examples|benchmarks)/[\w/.-]*)`", text))
    gone = [name for name in sorted(named) if "NAME" not in name and not (ROOT / name).exists()]
    assert len(named) > 50 and not gone


def test_nothing_names_an_extra_of_a_package_that_no_index_has():
    files = [*ROOT.glob("*.md"), *PAGES, *ROOT.glob("examples/**/*.md"), *ROOT.glob("mrl/**/*.py")]
    found = [file.relative_to(ROOT) for file in files if "mrl[" in file.read_text() and file.name != "CHANGELOG.md"]
    assert len(files) > 400 and found == []


def test_what_an_engine_can_build_on_is_there():
    """The table of docs/backends.md: `module.name` and files of mrl/engine."""
    table = (ROOT / "docs/backends.md").read_text(encoding="utf-8").split("| for | in mrl/engine |")[1].split("\n\n")[0]
    named = re.findall(r"`(\w+)\.(\w+)`", table)
    missing = []
    for module, name in named:
        file = ROOT / "mrl/engine" / f"{module}.py"
        if name != "py" and not (
            file.exists() and re.search(rf"^(?:def|class) {name}\b", file.read_text(), re.MULTILINE)
        ):
            missing.append(f"{module}.{name}")
    assert len(named) > 6 and not missing


def test_where_things_are_is_true():
    """The table "Where is it?" names functions that its files define."""
    page = (ROOT / "docs/developers/index.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [^|]+ \| ([^|]+\.py[^|]*) \| ([^|]+) \|$", page, re.MULTILINE)
    assert len(rows) > 9
    for files, names in rows:
        text = "".join((ROOT / "mrl" / file).read_text(encoding="utf-8") for file in re.findall(r"[\w/]+\.py", files))
        for name in re.findall(r"`([^`]+)`", names):
            *_, last = name.split(".")
            assert re.search(rf"^ *(def|class) {last}\b|^{last}\b.*=", text, re.MULTILINE), name


def test_the_picture_is_what_its_source_draws():
    source = ROOT / "docs/images/architecture.py"
    drawn = subprocess.run([sys.executable, source], capture_output=True, text=True, check=True).stdout
    assert source.with_suffix(".svg").read_text(encoding="utf-8") == drawn, "run `make docs`"


def test_the_picture_shows_the_floors():
    from tests.test_floors import FLOORS

    rooms = {name for name in FLOORS if (ROOT / "mrl" / name).is_dir()} - {"launch", "commands"}
    picture = (ROOT / "docs/images/architecture.svg").read_text(encoding="utf-8")
    shown = {*re.findall(r"[a-z_]+", picture)}
    assert not rooms - shown, f"not in the picture: {sorted(rooms - shown)}"
