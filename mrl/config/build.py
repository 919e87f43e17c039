"""Plain data, as YAML gives it, to the dataclasses of the schema: types, bounds and names of keys, one key at a time.

Every mistake is a line `dotted.key: value VALUE is ...; what would work`; one ConfigError has those of a whole parse.
Keys are checked against each other elsewhere (`mrl.config.load.from_dict`). Nothing here knows any particular key.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.config.keys import Key, accepted_values, join_key, join_names, nearest_key, section_keys, value_kind
from mrl.config.translate import advice as advice_on
from mrl.config.translate import leaf_keys
from mrl.errors import ConfigError, MistakeCollector, shortened, show

_DEFAULT = object()
_LEAVE = "leave it out: mrl has nothing for it"


def build_section(section: type, raw: Any, path: str, root: type) -> Any:
    """Returns the dataclass `section` from plain data written at the dotted `path`; the nearest key is looked for in
    `root`."""
    raw = {} if raw is None else raw
    keys = {key.path.rsplit(".", 1)[-1]: key for key in section_keys(section, path)}
    if not isinstance(raw, Mapping):
        fix = f"give a mapping with any of the keys {join_names(keys)}"
        raise ConfigError(path, raw, f"is {value_kind(raw)}", fix)
    values: dict[str, Any] = {}
    with MistakeCollector() as mistakes:
        for name in raw:
            if name not in keys:
                mistakes.found += _unknown(name, raw[name], section, path, root)
        for name, key in keys.items():
            with mistakes.noted():
                values[name] = _value(key, name, raw, root)
    return section(**{name: value for name, value in values.items() if value is not _DEFAULT})


def _value(key: Key, name: str, raw: Mapping[Any, Any], root: type) -> Any:
    """Returns what `raw` has for a key of its section; _DEFAULT where it has nothing."""
    if key.section is not None and key.nullable and raw.get(name) is None:
        return None
    if key.parse is not None:
        return key.parse(raw.get(name), key.path)
    if key.section is not None:
        return build_section(key.section, raw.get(name), key.path, root)
    if name in raw:
        return _coerce(key.annotation, raw[name], key)
    if key.required:
        fix = f"give {accepted_values(key.annotation)} ({key.help})"
        raise ConfigError(key.path, why="is missing and has no default", fix=fix)
    return _DEFAULT


def _unknown(name: Any, value: Any, section: type, path: str, root: type) -> list[ConfigError]:
    """Returns the mistakes of an unknown key: one; or one for each key below a section that another trainer has."""
    name = name if isinstance(name, str) else show(name)
    dotted = join_key(path, name)
    why = "is given to an unknown key"
    below = list(leaf_keys(value, dotted)) if isinstance(value, Mapping) and value else [(dotted, value)]
    advices = [advice_on(key, root) for key, _ in below]
    if any(advices):
        errors = []
        for (key, one), advice in zip(below, advices, strict=True):
            guess = nearest_key(key.rpartition(".")[2], section, root, path)
            fix = advice or (f"did you mean {guess}?" if guess else _LEAVE)
            errors.append(ConfigError(shortened(key), one, why, fix))
        return errors
    guess = nearest_key(name, section, root, path)
    known = join_names(key.path.rsplit(".", 1)[-1] for key in section_keys(section, path))
    advice = f"did you mean {guess}?" if guess else f"the keys {f'of {path} ' if path else ''}are {known}"
    return [ConfigError(shortened(dotted), value, why, advice)]


def _coerce(annotation: Any, value: Any, key: Key) -> Any:
    """Returns `value` as `annotation`, or raises ConfigError.

    Only an int for a float and a list for a tuple are converted.
    """
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        arm = _arm_for(args, value)
        return _refuse(value, key) if arm is None else _coerce(arm, value, key)
    if origin is Literal:
        return value if isinstance(value, str) and value in args else _refuse(value, key)
    if origin is tuple and isinstance(value, list | tuple):
        return _coerce_tuple(args, value, key)
    if origin is dict and isinstance(value, Mapping):
        return {_coerce(args[0], k, key): _coerce_entry(args[1], k, v, key) for k, v in value.items()}
    if annotation is float and type(value) in (int, float):
        return float(_in_bounds(value, key))
    if annotation is int and type(value) is int:
        return _in_bounds(value, key)
    if annotation in (str, bool, type(None)) and type(value) is annotation:
        return value
    return _refuse(value, key)


def _coerce_entry(annotation: Any, name: Any, value: Any, key: Key) -> Any:
    """Returns the value of a mapping's entry as `annotation`; a mistake names the entry."""
    if annotation is Any:
        return value
    return _coerce(annotation, value, dataclasses.replace(key, path=f"{key.path}.{name}", annotation=annotation))


def _arm_for(arms: tuple[Any, ...], value: Any) -> Any:
    """Returns the arm of a union with the value's basic type; None if there is none."""
    for arm in arms:
        base = str if typing.get_origin(arm) is Literal else typing.get_origin(arm) or arm
        if type(value) is base or (base, type(value)) in ((float, int), (tuple, list)):
            return arm
    return None


def _coerce_tuple(args: tuple[Any, ...], value: Sequence[Any], key: Key) -> tuple[Any, ...]:
    if args[-1] is not Ellipsis and len(value) != len(args):
        fix = f"give {accepted_values(key.annotation)}"
        raise ConfigError(key.path, list(value), f"is a list of {len(value)}", fix)
    element = dataclasses.replace(key, annotation=args[0])
    items = tuple(_coerce(args[0], item, element) for item in value)
    if args[-1] is Ellipsis and len(set(items)) != len(items):
        raise ConfigError(key.path, list(value), "is a list with an entry twice", "give each once")
    return items


def _in_bounds(value: float, key: Key) -> float:
    low, above, high = (key.bounds[name] for name in ("minimum", "above", "maximum"))
    fits = (low is None or value >= low) and (above is None or value > above) and (high is None or value <= high)
    if not fits:  # as NaN never does
        raise ConfigError(key.path, value, "is out of range", f"give {accepted_values(key.annotation, key.bounds)}")
    return value


def _refuse(value: Any, key: Key) -> typing.NoReturn:
    choices = [c for c in _choices(key.annotation) if isinstance(value, str)]
    what = "not one of the choices" if choices else value_kind(value)
    texts = () if typing.get_origin(key.annotation) is dict else typing.get_args(key.annotation)
    if str in (key.annotation, *texts) and not isinstance(value, str):
        what += " (quote it to make it text)"
    close = difflib.get_close_matches(value, choices, n=1) if choices else []
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        key.path, value, f"is {what}{hint}", f"give {accepted_values(key.annotation, key.stated)}"
    ) from None


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [c for arm in typing.get_args(annotation) if arm is not Ellipsis for c in _choices(arm)]
