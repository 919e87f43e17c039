"""docs/families.md shows a whole family, the file as it is; docs/supported-models.md lists what is refused."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_field_that_is_held_to_some_values_is_on_the_page():
    page = (ROOT / "docs/supported-models.md").read_text(encoding="utf-8")
    code = "".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "mrl/weights").rglob("*.py")))
    names = set(re.findall(r'require\(hf(?:\["rope_scaling"\])?, "(\w+)"', code))
    assert len(names) > 12 and [name for name in sorted(names) if f"`{name}`" not in page] == []


def test_the_example_is_the_file():
    page = (ROOT / "docs/families.md").read_text(encoding="utf-8")
    shown = page.split("```python\n")[1].split("```")[0]
    assert shown == (ROOT / "mrl/weights/families/olmoe.py").read_text(encoding="utf-8")
