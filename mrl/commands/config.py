"""`mrl config`: every key of the commands that train."""

from __future__ import annotations

from mrl.commands import EXIT_USER_ERROR, Argument, Command, Option, echo, say
from mrl.config.command import roots
from mrl.errors import ConfigError


def show(names: tuple[str, ...], wanted: str | None, of: str | None) -> int | None:
    from mrl.config.docs import config_text

    if names[:1] == ("translate",):
        return _translate(names[1:], of)
    echo(config_text(names, wanted), end="")
    return None


def _translate(paths: tuple[str, ...], of: str | None) -> int | None:
    """Prints another trainer's config in our keys, and on stderr what it could not translate."""
    from mrl.config import translate, yaml_text
    from mrl.config.build import build_section
    from mrl.config.load import read_yaml

    if len(paths) != 1:
        raise ConfigError("mrl config translate", why="takes one file", fix="write mrl config translate FILE")
    raw = read_yaml(paths[0])
    trainer = translate.trainer_of(raw)
    if trainer is None:
        raise ConfigError(paths[0], why="has no keys of verl, NeMo-RL or TRL", fix="see docs/coming-from.md")
    command = of or translate.command_for(raw, trainer)
    made = translate.translate(raw, trainer, command, roots()[command])
    echo(f"# for mrl {command}, from {trainer.name}")
    echo(yaml_text.dump(made.ours), end="")
    try:
        build_section(roots()[command], made.ours, "", roots()[command])
    except ConfigError as error:
        made.rest += [one.line for one in (error, *error.others)]
    for line in made.rest:
        say(f"not translated: {line}")
    return EXIT_USER_ERROR if made.rest else None


COMMAND = Command(
    help="""Print config keys: type, default, meaning. Without arguments every one of `mrl sft`.

    SECTION is a dotted name, as in rollout or engine.parallel, or that of a key; it is looked for in the commands that
    have it. `translate FILE` prints a config of verl, NeMo-RL or TRL in our keys, lists what it could not translate,
    and then exits with 2 (docs/coming-from.md).
    """,
    examples="""
        mrl config                           every key of mrl sft
        mrl config ppo                       every key of mrl ppo
        mrl config rollout                   those of a section
        mrl config translate verl.yaml       another trainer's config in our keys
        mrl config --grep clip               those whose name or meaning has a text""",
    run=show,
    params=(
        Argument(name="names", metavar=lambda: f"[{'|'.join(roots())}] [SECTION]", required=False, several=True),
        Option(names="--grep", into="wanted", metavar="TEXT", help="Only keys whose name or meaning has TEXT."),
        Option(names="--as", into="of", choices=lambda: list(roots()), help="With translate, the command it is for."),
    ),
)
