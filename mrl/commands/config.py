"""`mrl config`: every key of the commands that train."""

from __future__ import annotations

from mrl.commands import Argument, Command, Option, echo
from mrl.config.command import roots


def show(names: tuple[str, ...], wanted: str | None) -> None:
    from mrl.config.docs import asked

    echo(asked(names, wanted), end="")


COMMAND = Command(
    help="""Print config keys: type, default, meaning. Without arguments every one of `mrl sft`.

    SECTION is a dotted name, as in rollout or engine.parallel, or that of a key; it is looked for in the commands that
    have it.
    """,
    examples="""
        mrl config                           every key of mrl sft
        mrl config ppo                       every key of mrl ppo
        mrl config rollout                   those of a section
        mrl config --grep clip               those whose name or meaning has a text""",
    run=show,
    params=(
        Argument(name="names", metavar=lambda: f"[{'|'.join(roots())}] [SECTION]", required=False, several=True),
        Option(names="--grep", into="wanted", metavar="TEXT", help="Only keys whose name or meaning has TEXT."),
    ),
)
