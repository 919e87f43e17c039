"""Differences between the config of a checkpoint and the config of the run that resumes it."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from mrl.config.command import TrainingCommand, command_of_data
from mrl.config.keys import join_key, value_at, walk_keys
from mrl.config.urls import without_signatures
from mrl.errors import ConfigError, Shown, show

ABSENT = Shown("(absent)")

EFFECTS = dict.fromkeys(("train.steps", "train.epochs"), "a schedule that decays follows the new length")
"""Key -> what else its change changes."""


def may_change(root: type) -> tuple[str, ...]:
    """Returns keys and sections of the config that a resumed run may change; for mappings, the entries.

    The models and the data stay the same.
    """
    paths = []
    for key in walk_keys(root, sections=True):
        if key.may_change is True:
            paths.append(key.path)
        elif isinstance(key.may_change, frozenset):
            paths += [f"{key.path}.{name}" for name in key.may_change]
    return tuple(paths)


def path_keys(root: type) -> tuple[str, ...]:
    """Returns those of them that name what must be the same wherever it lies now; the run compares its content with the
    checkpoint's."""
    return tuple(key.path for key in walk_keys(root) if key.moves)


def changed_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], path: str = "", whole: Collection[str] = ()
) -> dict[str, tuple[Any, Any]]:
    """Returns dotted key -> (old value, new value) for differences of two configs; ABSENT if one lacks the key.

    old, new: plain data. A section that is null in one of them is one key. So is a mapping at one of the keys `whole`,
    such as data.columns.
    """
    changes: dict[str, tuple[Any, Any]] = {}
    for name in {**old, **new}:
        dotted = join_key(path, name)
        before, after = _plain(old.get(name, ABSENT)), _plain(new.get(name, ABSENT))
        sections = [value for value in (before, after) if value is not ABSENT]
        if dotted not in whole and all(isinstance(value, Mapping) for value in sections):
            changes |= changed_keys(old.get(name, {}), new.get(name, {}), dotted, whole)
        elif before != after:
            changes[dotted] = (before, after)
    return changes


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[Change]:
    """Returns the keys that differ and may. old, new: resolved configs as plain data (`to_dict`), of either command.

    Raises ConfigError naming every key whose change breaks the run. A key that `old` lacks, because an older version
    saved it, counts as its default.
    """
    before_command, command = command_of_data(old), command_of_data(new)
    if before_command is not command:
        why = f"is given to `mrl {command.name}`, and what was saved is of `mrl {before_command.name}`"
        raise ConfigError("output_dir", new.get("output_dir"), why, "give another output_dir")
    root = command.root
    old, new = without_signatures(old), without_signatures(new)  # they are renewed, and are nobody's to read
    old, new = expand_nulls(old, new, command)
    keys = {key.path: key for key in walk_keys(root)}
    defaults = {path: _plain(key.default) for path, key in keys.items() if not key.required}
    whole = [path for path, key in keys.items() if not isinstance(key.may_change, frozenset)]
    changes: list[Change] = []
    breaking: dict[str, tuple[Any, Any]] = {}
    for dotted, (before, after) in changed_keys(old, new, whole=whole).items():
        if before == ABSENT and after == defaults.get(dotted):  # a section that may be null is null
            continue
        of_rows = dotted in keys and keys[dotted].long_rows
        if _may_change(dotted, (before, after), root) or (of_rows and _changes_no_used_row(dotted, before, after, old)):
            changes.append(Change(dotted, before, after, EFFECTS.get(dotted, "")))
        else:
            breaking[dotted] = (before, after)
    if not breaking:
        return changes
    (key, was, now), *others = (_innermost(dotted, *pair) for dotted, pair in breaking.items())
    rest = "".join(f"; {k} was {b} and is {a}" for k, b, a in others)
    raise ConfigError(
        key,
        Shown(now),
        f"is not the {was} that the checkpoint was saved with{rest}",
        f"set the saved values again, or start anew with another output_dir than {new['output_dir']}",
    )


def _innermost(key: str, before: Any, after: Any) -> tuple[str, str, str]:
    """Returns the first key or entry of a list below `key` that differs, with both values, in words."""
    pairs: dict[str, tuple[Any, Any]] = {}
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        pairs = {f"{key}.{name}": (before.get(name, ABSENT), after.get(name, ABSENT)) for name in {**before, **after}}
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = {f"{key}[{i}]": pair for i, pair in enumerate(zip(before, after, strict=True))}
    for inner, (one, other) in pairs.items():
        if _plain(one) != _plain(other):
            return _innermost(inner, _plain(one), _plain(other))
    return key, show(before), show(after)


@dataclasses.dataclass(frozen=True)
class Change:
    """A key that holds another value now than at the save, as it may; `str` says so to the user."""

    key: str
    before: Any
    after: Any
    effect: str = ""  # what else the change changes

    def __str__(self) -> str:
        effect = f" ({self.effect})" if self.effect else ""
        key, before, after = _innermost(self.key, self.before, self.after)
        return f"{key}: {before} at the save, {after} now{effect}"


def _may_change(key: str, pair: tuple[Any, Any], root: type) -> bool:
    if key in path_keys(root) and None in pair:
        return False  # there was no such model, or there is none now
    return any(key == allowed or key.startswith(allowed + ".") for allowed in may_change(root))


def _changes_no_used_row(key: str, before: Any, after: Any, old: Mapping[str, Any]) -> bool:
    """Returns whether rows that were used stay as they are: a longer one than the limit stops a run under `error`."""
    if (old.get("data") or {}).get("truncation", "error") != "error":
        return False
    if key == "data.truncation":
        return True
    # kto joins prompts with answers of other rows, and cuts them to the limit (trainers/dpo.py)
    cuts_pairs = (old.get("loss") or {}).get("name") == "kto"
    return type(before) is type(after) is int and before < after and not cuts_pairs


def with_limits_of(before: Mapping[str, Any], now: Mapping[str, Any], root: type) -> dict[str, Any]:
    """Returns the config `before` with the keys of long rows that `now` has. Both are plain data."""
    names = [key.path.removeprefix("data.") for key in walk_keys(root) if key.long_rows]
    return {**before, "data": {**(before.get("data") or {}), **{name: now["data"][name] for name in names}}}


def expand_nulls(
    old: Mapping[str, Any], new: Mapping[str, Any], command: TrainingCommand[Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns both configs. A key that is null in only one of them gets the value of null."""
    both = copy.deepcopy(dict(old)), copy.deepcopy(dict(new))
    meant = [command.null_values(data) for data in both]
    for dotted in dict.fromkeys([*command.null_fallbacks, *meant[0], *meant[1]]):
        section_path, _, name = dotted.rpartition(".")
        held = [value_at(data, section_path) for data in both]
        if not all(held) or (held[0].get(name) is None) == (held[1].get(name) is None):
            continue
        for data, section, values in zip(both, held, meant, strict=True):
            if section.get(name) is None and dotted in command.null_fallbacks:
                section[name] = copy.deepcopy(value_at(data, command.null_fallbacks[dotted]))
            elif section.get(name) is None:
                section[name] = values.get(dotted)
    return both


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
