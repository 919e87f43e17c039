"""Keys of other trainers in ours: what an unknown key is told, and `mrl config translate`.

foreign/*.txt are the tables of keys of verl, NeMo-RL and TRL with ours for them. A table is text. A line that begins
with blanks continues the one before, and `#` begins a comment. A row is

    THEIRS -> OURS OURS | values V=W V | default V | when KEY | on KEY | times KEY | of COMMAND | part | note TEXT

No key of ours means that nothing here stands for theirs. `a.{b c}.d` stands for `a.b.d` and `a.c.d`. `Row` has the
meaning of each part. A value is JSON, or else text. `V` alone is `V=V`, and `*` is any other value. The words `unset`,
`by_hand` and `same` for ours mean: write nothing, tell the user to set it, keep the value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

from mrl.config.keys import join_key, value_at, walk_keys
from mrl.errors import show

FOLDER = pathlib.Path(__file__).parent / "foreign"
_WORDS: Mapping[str, Any] = {"unset": None, "by_hand": KeyError, "same": ...}


@dataclasses.dataclass(frozen=True)
class Row:
    """One key of another trainer."""

    theirs: str
    ours: tuple[str, ...]  # () where nothing here stands for it; `actor.` is put before it where ours is a role's
    note: str = ""  # the change of unit or meaning
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    """Theirs -> ours, "*" for any other: None where nothing needs to be written, KeyError where it cannot be told, ...
    where the value is kept. Without entries it is kept."""
    times: str = ""  # their key of a number that the value is multiplied with, as prompts are with samples
    when: str = ""  # their key that has to be true, or, after `not `, false, for this one to mean anything
    on: str = ""  # their key that is true unless the file says otherwise, and has to be
    default: Any = None  # theirs where the file has none, written out where ours differs
    part: bool = False  # theirs is a part of ours, which is told by hand as a whole if a part before it is
    of: tuple[str, ...] = ()  # commands of ours that it is for; () for all


@dataclasses.dataclass(frozen=True)
class Trainer:
    name: str
    source: str  # what was read for it, with the version
    sections: tuple[str, ...]  # top-level keys that only its configs have
    begins: tuple[str, ...]  # beginnings of dotted keys in sections that ours have too, which only its configs have
    rows: tuple[Row, ...]


@functools.cache
def read_table(name: str) -> Trainer:
    """Returns the table foreign/NAME.txt."""
    text = re.sub(r"\n +", " ", (FOLDER / f"{name}.txt").read_text(encoding="utf-8"))
    head = {"name": "", "source": "", "sections": "", "begins": ""}
    rows: list[Row] = []
    for line in text.splitlines():
        theirs, arrow, rest = line.partition(" ->")
        if arrow:
            rows += _rows(theirs, rest)
        elif line and not line.startswith("#"):
            field, _, value = line.partition(":")
            head[field] = value.strip()
    begins, sections = head["begins"].split(), head["sections"].split()
    return Trainer(head["name"], head["source"], tuple(sections), tuple(begins), tuple(rows))


def _rows(theirs: str, rest: str) -> list[Row]:
    """Returns the rows of a line, one for each of their names."""
    ours, *parts = rest.split(" | ")
    about: dict[str, Any] = {}
    for part in parts:
        name, _, value = part.partition(" ")
        about[name] = value
    if "values" in about:
        about["values"] = dict(_pair(pair) for pair in about["values"].split())
    if "default" in about:
        about["default"] = _scalar(about["default"])
    about["part"] = "part" in about
    if "of" in about:
        about["of"] = tuple(about["of"].split())
    before, _, inside = theirs.partition("{")
    names, _, after = inside.partition("}")
    return [Row(f"{before}{name}{after}", tuple(ours.split()), **about) for name in names.split() or [""]]


def _pair(text: str) -> tuple[Any, Any]:
    """Returns a value of theirs and what it is here, from `V=W` or `V`."""
    theirs, equals, ours = text.partition("=")
    if not equals:
        return _scalar(theirs), _scalar(theirs)
    return _scalar(theirs), _WORDS[ours] if ours in _WORDS else _scalar(ours)


def _scalar(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


MAX_DEPTH = 16
"""Sections inside one another that `leaf_keys` looks into."""
_MOST = 8  # `${...}` in others
_REFERENCE = re.compile(r"\$\{(?:oc\.select:)?\s*(\.*)([\w.]+)(?:,\s*([^{}]*))?\}")

_TRL_SIGNS = (
    ("ppo", {"num_generations", "max_completion_length", "reward_funcs", "num_iterations", "epsilon", "use_vllm"}),
    ("rm", {"center_rewards_coefficient"}),
    ("dpo", {"beta", "precompute_ref_log_probs", "rpo_alpha", "desirable_weight", "label_smoothing", "ref_model"}),
)
"""Keys that only one kind of TRL's trainers has."""


def trainers() -> tuple[Trainer, ...]:
    return read_table("verl"), read_table("nemo_rl"), read_table("trl")


@functools.cache
def known_keys(root: type) -> frozenset[str]:
    return frozenset(key.path for key in walk_keys(root, sections=True))


def leaf_keys(raw: Mapping[Any, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the dotted keys below `path` that hold a value, with it."""
    for name, value in raw.items():
        dotted = join_key(path, name)
        if isinstance(value, Mapping) and value and dotted.count(".") < MAX_DEPTH:
            yield from leaf_keys(value, dotted)
        else:
            yield dotted, value


def advice(dotted: str, root: type) -> str | None:
    """Returns advice about an unknown key of another trainer; None if none has it."""
    known = known_keys(root)
    if f"actor.{dotted}" in known:
        return f"did you mean actor.{dotted}?"
    rows = [(trainer, row) for trainer in (read_table("aliases"), *trainers()) for row in trainer.rows]
    matches = [pair for pair in rows if pair[1].theirs == dotted]
    if not matches:  # a key of a mapping that stands in the tables as a whole
        matches = [pair for pair in rows if dotted.startswith(f"{pair[1].theirs}.")]
    name = dotted.rpartition(".")[2]
    if not matches and name not in {key.rpartition(".")[2] for key in known}:
        matches = [pair for pair in rows if pair[0].name == "TRL" and pair[1].theirs == name]  # it has no sections
    commands = {"ppo"} if "algorithm.name" in known else {"sft", "dpo", "rm"}
    for _, row in matches:
        ours = _resolved(row, root, commands)
        if ours is not None:
            return f"did you mean {' and '.join(ours)}?" + (f" ({row.note})" if row.note else "")
    if matches:
        trainer, row = matches[0]
        if row.ours:
            return f"it is {trainer.name}'s for {' and '.join(row.ours)}, which this command lacks"
        return f"leave it out: {row.note or _nowhere(trainer)}"
    section = dotted.partition(".")[0]
    owner = next((one for one in trainers() if section in one.sections or dotted.startswith(one.begins)), None)
    return None if owner is None else f"leave it out: {_nowhere(owner)}"


def _nowhere(trainer: Trainer) -> str:
    return f"it is {trainer.name}'s, and mrl has nothing for it"


def translate_key(keys: Sequence[str], root: type) -> tuple[str, ...] | None:
    """Returns keys as `root` has them, those of a role in `actor`; None where it lacks one, or there are none."""
    known = known_keys(root)
    ours = tuple(key if key in known else f"actor.{key}" for key in keys)
    return ours if ours and known.issuperset(ours) else None


def _resolved(row: Row, root: type, commands: Set[str]) -> tuple[str, ...] | None:
    """Returns the keys of a row as `root` has them; None where it lacks one, or the row is for other commands."""
    return None if row.of and commands.isdisjoint(row.of) else translate_key(row.ours, root)


@dataclasses.dataclass
class Translation:
    ours: dict[str, Any]
    rest: list[str]  # lines on what was not translated


def trainer_of(raw: Mapping[Any, Any]) -> Trainer | None:
    """Returns the trainer whose keys a file has."""
    sections = {name for name, value in raw.items() if isinstance(value, Mapping)}  # TRL has `optim`, which is text
    for trainer in trainers():
        if sections & set(trainer.sections):
            return trainer
    trl = read_table("trl")
    return trl if any(row.theirs in raw for row in trl.rows) else None


def command_for(raw: Mapping[Any, Any], trainer: Trainer) -> str:
    """Returns the command of ours that a file of another trainer is for."""
    if trainer.name == "verl":
        return "ppo" if {"actor_rollout_ref", "algorithm"} & raw.keys() else "sft"
    if trainer.name == "TRL":
        return next((command for command, signs in _TRL_SIGNS if signs & raw.keys()), "sft")
    return next((one for one in ("sft", "dpo", "rm") if one in raw), "ppo")


def translate(raw: Mapping[Any, Any], trainer: Trainer, command: str, root: type) -> Translation:
    """Returns what can be told of another trainer's config in the keys of `root`, the config of `command`."""
    given = {key: _interpolated(value, key, raw) for key, value in leaf_keys(raw)}
    made, by_hand = Translation(_beside(raw, trainer, command), []), set[str]()
    used = {key for key, value in given.items() if value is None or key.endswith("_target_")}
    has_critic = given.get("algorithm.adv_estimator", "gae") == "gae"
    for row in trainer.rows:
        ours = _resolved(row, root, {command})
        if ours is None:
            continue
        value = given.get(row.theirs)
        is_null = value is None and row.theirs in given and None in row.values  # which means something there
        if value is not None or is_null:
            used.add(row.theirs)
        elif all(value_at(made.ours, key) is None for key in ours) and by_hand.isdisjoint(ours):
            value = row.default
        is_read = (
            _holds(row.when, given)
            and given.get(row.on) is not False
            and (has_critic or not row.theirs.startswith("critic."))
        )
        if (value is None and not is_null) or not is_read:
            continue
        try:
            value = _value(row, value, given, trainer)
            if row.part and value is not None and not by_hand.isdisjoint(ours):
                raise KeyError(row.theirs)
        except KeyError:
            note = f" ({row.note})" if row.note else ""
            made.rest.append(f"{row.theirs}: {show(given.get(row.theirs))}: give {' and '.join(ours)}{note}")
            by_hand.update(ours)
            continue
        for key in ours if value is not None else ():
            _put(made.ours, key, value)
    for key, value in given.items():
        if key in used or (key.startswith("critic.") and not has_critic):
            continue
        if key in known_keys(root):
            _put(made.ours, key, value)
        else:
            made.rest.append(f"{key}: {show(value)}: {advice(key, root) or 'mrl has nothing for it'}")
    return made


def _beside(raw: Mapping[Any, Any], trainer: Trainer, command: str) -> dict[str, Any]:
    """Returns what the other trainer says by the choice of a program or section; verl has a key for it."""
    if command == "ppo" and trainer.name != "verl":
        return {"algorithm": {"name": "opd" if "distillation" in raw and "grpo" not in raw else "grpo"}}
    return {"loss": {"name": "bradley_terry"}} if command == "rm" else {}


def _holds(when: str, given: Mapping[str, Any]) -> bool:
    """Returns whether a row's condition holds; of a number, whether it is above 0."""
    if not when:
        return True
    value = given.get(when.removeprefix("not "))
    is_true = value > 0 if isinstance(value, int | float) else value not in (None, "null", "")
    return not is_true if when.startswith("not ") else is_true


def _value(row: Row, value: Any, given: Mapping[str, Any], trainer: Trainer) -> Any:
    """Returns our value for theirs. Raises KeyError where it cannot be told."""
    if isinstance(value, str) and "${" in value:
        raise KeyError(value)
    if row.values:
        is_plain = value is None or isinstance(value, str | int | float | bool)
        translated = row.values[value] if is_plain and value in row.values else row.values["*"]
        if translated is KeyError:
            raise KeyError(value)
        value = value if translated is ... else translated
    if row.times:
        default = next(one.default for one in trainer.rows if one.theirs == row.times)
        times = given.get(row.times, default)
        if type(times) is not int or type(value) is not int:
            raise KeyError(row.times)
        value *= times
    return value


def _interpolated(value: Any, key: str, raw: Mapping[Any, Any], depth: int = 0) -> Any:
    """Returns a value with `${key}`, `${.key}` and `${oc.select:key,default}` of OmegaConf resolved; others stay."""
    from mrl.config import yaml_text  # PyYAML, which a help does not need

    if not isinstance(value, str) or depth > _MOST:
        return value

    def looked_up(found: re.Match[str]) -> Any:
        dots, name, default = found.groups()
        section = key.split(".")[: -len(dots)] if dots else []
        path = ".".join([*section, name])
        there = value_at(raw, path)
        if there is None and default is not None:
            return yaml_text.parse(default, key)
        return found[0] if there is None else _interpolated(there, path, raw, depth + 1)

    text = " ".join(value.split())
    whole = _REFERENCE.fullmatch(text)
    return looked_up(whole) if whole is not None else _REFERENCE.sub(lambda found: str(looked_up(found)), value)


def _put(ours: dict[str, Any], dotted: str, value: Any) -> None:
    """Writes a value at a dotted key; lists of the same key are joined, as those of engine.offload are."""
    *sections, name = dotted.split(".")
    node = ours
    for section in sections:
        node = node.setdefault(section, {})
    if isinstance(value, list) and isinstance(node.get(name), list) and name == "offload":
        value = [*node[name], *(one for one in value if one not in node[name])]
    node[name] = value
