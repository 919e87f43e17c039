"""Keys of verl, NeMo-RL and TRL, and ours for them: the tables that messages, `mrl config translate` and
docs/coming-from.md are made of.

`python -m mrl.config.foreign > docs/coming-from.md` brings the page up to date; a test compares them.
"""

from __future__ import annotations

from mrl.config.foreign_nemo_rl import NEMO_RL
from mrl.config.foreign_rows import Row
from mrl.config.foreign_trl import TRL
from mrl.config.foreign_verl import VERL

TRAINERS = (VERL, NEMO_RL, TRL)


def page() -> str:
    """Returns docs/coming-from.md."""
    lines = [_HEADER]
    for trainer in TRAINERS:
        lines += [
            f"## {trainer.name}",
            "",
            f"Read from {trainer.source}.",
            "",
            "| theirs | ours | what differs |",
            "|---|---|---|",
        ]
        for row in trainer.rows:
            if row.ours:
                notes = [row.note, _values_in_words(row), f"of {', '.join(row.of)}" if row.of else ""]
                ours = ", ".join(f"`{key}`" for key in row.ours)
                lines.append(f"| `{row.theirs}` | {ours} | {'; '.join(note for note in notes if note)} |")
        nowhere = ", ".join(f"`{row.theirs}`" for row in trainer.rows if not row.ours)
        lines += ["", f"Nothing here stands for {nowhere}.", ""]
    return "\n".join(lines)


_HEADER = """\
# Coming from verl, NeMo-RL or TRL

    mrl config translate FILE > ours.yaml     # what can be told, in our keys; the rest is listed, with exit code 2
    mrl config translate FILE --as dpo        # where it is not plain of which command the file is

A key of another trainer stays an error, which names ours. `model`, `engine` and `optimizer` of `mrl ppo` are in
`actor`.
Numbers that a file leaves to the other trainer's defaults are written out where ours differ.
Made from `mrl/config/foreign_*.py` by `make docs`.
"""


def _values_in_words(row: Row) -> str:
    told = [
        f"{theirs} is {ours}" for theirs, ours in row.values.items() if isinstance(ours, str) and str(theirs) != ours
    ]
    return ", ".join(told).replace("True", "true").replace("False", "false")


if __name__ == "__main__":
    print(page(), end="")
