"""YAML and dotted overrides to a frozen, checked `SFTConfig`, and back.

Every mistake is a `ConfigError` of one line: `dotted.key: value VALUE is ...; what would work`.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import pathlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mrl.config import yaml_text
from mrl.config.checks import check_config
from mrl.config.keys import Key, expected, kind, nearest, section_keys, show, walk
from mrl.config.schema import SFTConfig
from mrl.errors import ConfigError


def load_config(path: str | pathlib.Path, overrides: Sequence[str] = ()) -> SFTConfig:
    """The config in the YAML file `path` with `overrides` (`dotted.key=VALUE`, VALUE in YAML) over it, checked."""
    raw = read_yaml(path)
    for override in overrides:
        apply_override(raw, override)
    return from_dict(raw)


def read_yaml(path: str | pathlib.Path) -> dict[str, Any]:
    """The mapping in a YAML file, not checked against the schema."""
    path = pathlib.Path(path)
    if not path.exists():
        raise ConfigError(f"{path}: the config file does not exist; give the path of a YAML file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise ConfigError(f"{path}: the config file cannot be read: {reason}; give a YAML file") from None
    raw = yaml_text.parse(text, str(path))
    if raw is None:
        return {}
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: the config file holds {kind(raw)}; give a mapping such as `output_dir: runs/demo`")
    return raw


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Puts `dotted.key=VALUE` into `raw`, in place; sections on the way are made."""
    dotted, equals, text = override.partition("=")
    names = dotted.split(".")
    if not equals or not all(names):
        raise ConfigError(f"{override}: is not an override; write KEY=VALUE, as in train.steps=10")
    if not text.strip():
        raise ConfigError(f"{dotted}: the override has no value; write {dotted}=null for none")
    value = yaml_text.parse(text, dotted, dotted)
    node = raw
    for depth, name in enumerate(names[:-1], start=1):
        if node.get(name) is None:
            node[name] = {}
        if not isinstance(node[name], dict):
            section = ".".join(names[:depth])
            raise ConfigError(
                f"{section}: value {show(node[name])} is {kind(node[name])}; {dotted} needs a mapping here"
            )
        node = node[name]
    node[names[-1]] = value


def from_dict(raw: Mapping[str, Any]) -> SFTConfig:
    """A checked config from plain data, as YAML gives it."""
    config = build_section(SFTConfig, raw, "", SFTConfig)
    check_config(config)
    return config


def to_dict(config: Any) -> dict[str, Any]:
    """Plain data of a config with every key resolved, defaults included; tuples become lists."""
    plain = lambda v: list(v) if isinstance(v, tuple) else v  # noqa: E731
    return dataclasses.asdict(config, dict_factory=lambda items: {k: plain(v) for k, v in items})


def dump_config(config: SFTConfig) -> str:
    """YAML of the resolved config; loading it gives an equal config."""
    return yaml_text.dump(to_dict(config))


def build_section(section: type, raw: Any, path: str, root: type) -> Any:
    """The dataclass `section` from plain data written at the dotted `path`; the nearest key is looked for in `root`."""
    raw = {} if raw is None else raw
    keys = {key.path.rsplit(".", 1)[-1]: key for key in section_keys(section, path)}
    if not isinstance(raw, Mapping):
        names = ", ".join(keys)
        raise ConfigError(f"{path}: value {show(raw)} is {kind(raw)}; give a mapping with any of the keys {names}")
    for name in raw:
        if name not in keys:
            raise _unknown(name, raw[name], section, path, root)
    values = {}
    for name, key in keys.items():
        if dataclasses.is_dataclass(key.annotation):
            values[name] = build_section(key.annotation, raw.get(name), key.path, root)
        elif name in raw:
            values[name] = _coerce(key.annotation, raw[name], key)
        elif key.required:
            raise ConfigError(
                f"{key.path}: is missing and has no default; give {expected(key.annotation)} ({key.help})"
            )
    return section(**values)


def _unknown(name: Any, value: Any, section: type, path: str, root: type) -> ConfigError:
    dotted = f"{path}.{name}" if path else str(name)
    guess = nearest(str(name), section, root, path)
    if isinstance(value, Mapping) and len(value) == 1:  # `trian.steps=10`: the section is what is not known
        (below, value), *_ = value.items()
        dotted = f"{dotted}.{below}"
        if f"{guess}.{below}" in {key.path for key in walk(root)}:
            guess = f"{guess}.{below}"
    known = ", ".join(key.path.rsplit(".", 1)[-1] for key in section_keys(section, path))
    advice = f"did you mean {guess}?" if guess else f"the keys {f'of {path} ' if path else ''}are {known}"
    return ConfigError(f"{dotted}: value {show(value)} is given to an unknown key; {advice}")


def _coerce(annotation: Any, value: Any, key: Key) -> Any:
    """`value` as `annotation`, or a ConfigError. Only an int for a float and a list for a tuple are converted."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return _coerce(_arm_for(args, value), value, key) if _arm_for(args, value) else _refuse(value, key)
    if origin is Literal:
        return value if isinstance(value, str) and value in args else _refuse(value, key)
    if origin is tuple and isinstance(value, list | tuple):
        return _coerce_tuple(args, value, key)
    if origin is dict and isinstance(value, Mapping):
        return {_coerce(args[0], k, key): _coerce(args[1], v, key) for k, v in value.items()}
    if annotation is float and type(value) in (int, float):
        return _in_bounds(_float(value), value, key)
    if annotation is int and type(value) is int:
        return _in_bounds(value, value, key)
    if annotation in (bool, str, type(None)) and type(value) is annotation:
        return value
    return _refuse(value, key)


def _arm_for(arms: tuple[Any, ...], value: Any) -> Any:
    """The arm of a union whose basic type the value has; None where there is none."""
    for arm in arms:
        base = str if typing.get_origin(arm) is Literal else arm
        if type(value) is base or (base is float and type(value) is int):
            return arm
    return None


def _coerce_tuple(args: tuple[Any, ...], value: Sequence[Any], key: Key) -> tuple[Any, ...]:
    if args[-1] is not Ellipsis and len(value) != len(args):
        _refuse(value, key)
    element = Key(key.path, args[0], key.default, key.help, key.bounds)
    items = tuple(_coerce(args[0], item, element) for item in value)
    if args[-1] is Ellipsis and len(set(items)) != len(items):
        raise ConfigError(f"{key.path}: value {show(list(value))} is a list with an entry twice; give each once")
    return items


def _float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:
        return math.inf


def _in_bounds(value: float, written: Any, key: Key) -> float:
    low, above, high = (key.bounds[name] for name in ("minimum", "above", "maximum"))
    outside = (low is not None and value < low) or (above is not None and value <= above)
    if outside or (high is not None and value > high) or not math.isfinite(value):
        reason = "out of range" if math.isfinite(value) else "not finite"
        raise ConfigError(f"{key.path}: value {show(written)} is {reason}; give {expected(key.annotation, key.bounds)}")
    return value


def _refuse(value: Any, key: Key) -> typing.NoReturn:
    choices = [c for c in _choices(key.annotation) if isinstance(value, str)]
    close = difflib.get_close_matches(str(value), choices, n=1)
    what = "not one of the choices" if choices else kind(value)
    if isinstance(value, bool | int | float) and str in (key.annotation, *typing.get_args(key.annotation)):
        what += " (quote it to make it text)"
    hint = f" (did you mean {close[0]}?)" if close else ""
    raise ConfigError(
        f"{key.path}: value {show(value)} is {what}{hint}; give {expected(key.annotation, key.bounds)}"
    ) from None


def _choices(annotation: Any) -> list[str]:
    if typing.get_origin(annotation) is Literal:
        return list(typing.get_args(annotation))
    return [c for arm in typing.get_args(annotation) if arm is not Ellipsis for c in _choices(arm)]
