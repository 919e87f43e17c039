"""`mrl data show`: what the rows of a config become, before anything is trained on them."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any, Literal

from mrl.commands import CONFIG, OVERRIDES, Command, Group, Option, echo
from mrl.config.command import all_training


def _show(config_path: str, overrides: Sequence[str], *, evaluation: bool, **options: Any) -> None:
    from mrl.launch import showing

    coloured = sys.stdout.isatty() and not os.environ.get("NO_COLOR")
    part: Literal["train", "eval"] = "eval" if evaluation else "train"
    showing.run(config_path, overrides, part=part, coloured=coloured, echo=echo, **options)


def _commands_with_rows() -> list[str]:
    return [command.name for command in all_training() if command.task is not None]


SHOW = Command(
    help="""Say what rows become: their tokens, which of them train and with what weight, lengths.

    CONFIG is the file of any command that trains on rows; `data` and a model's path suffice. Only the tokenizer of the
    model is read, no weights. Rows are those that the run begins with, in its order. What trains is coloured on a
    terminal, and stands in ⟦ ⟧ elsewhere.
    """,
    examples="""
        mrl data show sft.yaml
        mrl data show sft.yaml data.loss_on=last --rows 1 --tokens
        mrl data show dpo.yaml --eval
        mrl data show sft.yaml --count""",
    run=_show,
    params=(
        CONFIG,
        OVERRIDES,
        Option(names="--as", into="of", choices=_commands_with_rows, help="Command whose config it is."),
        Option(names="--rows", kind="number", minimum=0, default=3, metavar="N", help="Rows whose tokens are shown."),
        Option(names="--count", kind="flag", help="Read every row: all lengths, and what is left out."),
        Option(names="--eval", into="evaluation", kind="flag", help="Rows of data.eval in place of data.train."),
        Option(
            names="--tokens", into="by_token", kind="flag",
            help="A line for each token: its place, id, weight and text.",
        ),
    ),
)  # fmt: skip

COMMAND = Group(
    help="See what data becomes.",
    examples="""
        mrl data show sft.yaml
        mrl data show sft.yaml --count""",
    commands={"show": SHOW},
)
