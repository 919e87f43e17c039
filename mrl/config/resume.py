"""Differences between the config of a checkpoint and the config of the run that resumes it."""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from mrl.config.command import TrainingCommand, command_of_data
from mrl.config.keys import join_key, walk_keys
from mrl.config.recipes import ROWS
from mrl.config.urls import without_signatures
from mrl.errors import MAX_SHOWN, ConfigError, Shown, show

ABSENT = Shown("(absent)")

NEW_LENGTH = "the learning-rate schedule follows the new length"
OF_ROWS = "the run is as long as the rows that are used"


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
            changes.append(Change(dotted, before, after, _effect(dotted, (before, after), new)))
        else:
            breaking[dotted] = (before, after)
    if not breaking:
        return changes
    _check_adapters(breaking)
    (key, was, now), *others = (_innermost(dotted, *pair, keys, defaults) for dotted, pair in breaking.items())
    rest = "".join(f"; {k} was {b} and is {a}" for k, b, a in others)
    raise ConfigError(
        key,
        Shown(now),
        f"is not the {was} that the checkpoint was saved with{rest}",
        f"set the saved values again, or start anew with another output_dir than {new['output_dir']}",
    )


def _check_adapters(breaking: Mapping[str, tuple[Any, Any]]) -> None:
    """Raises ConfigError if only one of the run and the checkpoint has adapters."""
    for key, pair in breaking.items():
        if key.endswith("model.lora") and None in pair:
            was, now, fix = "without", "with", "set it to null"
            if pair[1] is None:
                was, now, fix = "with", "without", "give it as config.yaml of output_dir has it"
            why = f"the checkpoint was saved {was} adapters, and this run is {now}"
            raise ConfigError(key, why=why, fix=f"{fix}, or start anew with another output_dir")


def _innermost(
    key: str, before: Any, after: Any, whole: Collection[str] = (), defaults: Mapping[str, Any] = MappingProxyType({})
) -> tuple[str, str, str]:
    """Returns the first key or entry of a list below `key` that differs, with what differs of its values, in words.

    whole: keys whose value may be a mapping. defaults: by key, for a section that is null in one of the configs.
    """
    if isinstance(before, list) and isinstance(after, list):
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(before, after, strict=False)))
        if len(before) == len(after) and all(isinstance(values[same], Mapping) for values in (before, after)):
            return _innermost(f"{key}[{same}]", before[same], after[same], whole)
        return key, _listed(before, same), _listed(after, same)
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        pairs = {n: (_plain(before.get(n, ABSENT)), _plain(after.get(n, ABSENT))) for n in {**before, **after}}
        names = [name for name, (one, other) in pairs.items() if one != other]
        if names and key not in whole:
            return _innermost(f"{key}.{names[0]}", *pairs[names[0]], whole)
        before, after = ({n: value[n] for n in names if n in value} for value in (before, after))
        return key, _mapped(before), _mapped(after)
    meant = {name.removeprefix(f"{key}."): value for name, value in defaults.items()}
    texts = [
        _mapped({n: v for n, v in value.items() if _plain(v) != meant.get(n, ABSENT)})
        if isinstance(value, Mapping)
        else _listed(value, 0)
        for value in (before, after)
    ]
    return key, texts[0], texts[1]


def _mapped(value: Mapping[str, Any]) -> str:
    return _within([f"{show(name)}: {_listed(entry, 0)}" for name, entry in value.items()], "{}")


def _listed(value: Any, same: int) -> str:
    """Returns a value in words; of a list the entries after the `same` first, and of each mapping its first key."""
    if not isinstance(value, list):
        return show(value)
    if not any(isinstance(entry, Mapping) for entry in value) and len(whole := show(value)) < MAX_SHOWN:
        return whole
    entries = [
        f"{{{show(name)}: {show(entry[name])}, ...}}"
        if isinstance(entry, Mapping) and (name := next((n for n, v in entry.items() if v is not None), None))
        else show(entry)
        for entry in value[same:]
    ]
    return _within([*["..."][:same], *entries], "[]")


def _within(entries: Sequence[str], brackets: str) -> str:
    """Returns entries in brackets, the first ones if all are too long for a message."""
    fit = list(itertools.takewhile(lambda n: len(", ".join(entries[:n])) <= MAX_SHOWN, range(1, len(entries) + 1)))
    shown = [*entries[: max(1, len(fit))], *["..."][: len(entries) - max(1, len(fit))]]
    return f"{brackets[0]}{', '.join(shown)}{brackets[1]}"


@dataclasses.dataclass(frozen=True)
class Change:
    """A key that holds another value now than at the save, as it may; `str` says so to the user."""

    key: str
    before: Any
    after: Any
    effect: str = ""  # what else the change changes

    def __str__(self) -> str:
        effect = f" ({self.effect})" if self.effect else ""
        key, before, after = _innermost(self.key, self.before, self.after, (self.key,))
        return f"{key}: {before} at the save, {after} now{effect}"


def _effect(key: str, pair: tuple[Any, Any], new: Mapping[str, Any]) -> str:
    """Returns what else the change of a key changes, in words; "" for nothing. new: the config of the resume."""
    algorithm = new.get("algorithm") or {}
    advantage = algorithm.get("advantage") or ROWS.get(algorithm.get("name", ""), {}).get("advantage")
    roles = ["actor", "critic"] if advantage == "gae" else ["actor"]
    optimizers = [_at(new, "optimizer"), *(_at(new, role, "optimizer") for role in roles)]
    follows = any(optimizer and optimizer.get("schedule") != "constant" for optimizer in optimizers)
    if key in ("train.steps", "train.epochs") and follows:
        return NEW_LENGTH
    leaves_rows_out = key == "data.on_bad_row" or (key == "data.truncation" and "drop" in pair)
    if leaves_rows_out and new["train"].get("steps") is None:
        return f"{OF_ROWS}, and so is the schedule" if follows else OF_ROWS
    return ""


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
        *sections, name = dotted.split(".")
        held = [_at(data, *sections) for data in both]
        if any(section is None for section in held) or (held[0].get(name) is None) == (held[1].get(name) is None):
            continue
        for data, section, values in zip(both, held, meant, strict=True):
            if section.get(name) is None and dotted in command.null_fallbacks:
                *others, other = command.null_fallbacks[dotted].split(".")
                section[name] = copy.deepcopy(_at(data, *others)[other])
            elif section.get(name) is None:
                section[name] = values.get(dotted)
    return both


def _at(data: Mapping[str, Any], *names: str) -> Any:
    """Returns the section below `names`; None where an older version had none."""
    for name in names:
        data = data.get(name) or {}
    return data or None


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
