"""docs/families.md shows a whole family: the file as it is."""

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_example_is_the_file():
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    shown = page.split("```python\n")[1].split("```")[0]
    assert shown == (ROOT / "mrl/converters/families/olmoe.py").read_text(encoding="utf-8")
