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
            f"The keys are those of {trainer.source}.",
            "",
            "| theirs | ours | note |",
            "|---|---|---|",
        ]
        for row in trainer.rows:
            if row.ours:
                notes = [row.note, _values_in_words(row), f"for {', '.join(row.of)}" if row.of else ""]
                ours = ", ".join(f"`{key}`" for key in row.ours)
                lines.append(f"| `{row.theirs}` | {ours} | {'; '.join(note for note in notes if note)} |")
        nowhere = ", ".join(f"`{row.theirs}`" for row in trainer.rows if not row.ours)
        lines += ["", f"mrl has nothing for these keys: {nowhere}.", ""]
    return "\n".join(lines)


_HEADER = """\
# Coming from verl, NeMo-RL or TRL

This page lists the keys of these trainers next to the keys of mrl. You need it to bring a config of theirs.

    mrl config translate FILE > ours.yaml     # prints what it can translate; lists the rest and exits with 2
    mrl config translate FILE --as dpo        # names the command, if the file does not show it

- mrl does not read their keys. If you write one, the error names ours.
- For `mrl ppo`, keys of `model`, `engine` and `optimizer` begin with `actor.`.
- The translation writes out their defaults if ours differ.
- In the notes, "there" is the other trainer and "here" is mrl.
- Keys that mrl has nothing for are listed at the end of each section.

`make docs` makes this page from `mrl/config/foreign_*.py`.
"""


def _values_in_words(row: Row) -> str:
    told = [
        f"{theirs} is {ours}" for theirs, ours in row.values.items() if isinstance(ours, str) and str(theirs) != ours
    ]
    return ", ".join(told).replace("True", "true").replace("False", "false")


if __name__ == "__main__":
    print(page(), end="")
