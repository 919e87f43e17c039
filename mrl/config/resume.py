"""What may differ between the config of a checkpoint and that of the run which resumes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mrl.config.keys import show, walk
from mrl.config.schema import SFTConfig
from mrl.errors import ConfigError

ABSENT = "(absent)"

MAY_CHANGE = (
    "output_dir", "model.path", "model.trust_remote_code", "engine.device", "engine.recompute", "engine.offload", "engine.parallel",
    "engine.micro_batch", "data.train", "data.eval", "data.on_bad_row", "train.steps", "train.epochs", "train.eval_every", "train.eval_batches",
    "train.guards", "checkpoint", "log",
)  # fmt: skip
"""Keys and sections that a resumed run may change: they keep the same model on the same data."""

MOVED = ("model.path", "data.train")
"""Those of them that name what must be the same wherever it lies now; the run compares its content with the checkpoint's."""

CHANGES_SCHEDULE = ("train.steps", "train.epochs")


def changed_keys(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (old value, new value) where two configs as plain data differ; ABSENT where one lacks the key."""
    before, after = _flat(old), _flat(new)
    keys = [*before, *(k for k in after if k not in before)]
    pairs = {key: (before.get(key, ABSENT), after.get(key, ABSENT)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def check_resume(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """A note for each key that differs and may. old, new: resolved configs as plain data (`to_dict`).

    Raises ConfigError naming every key whose change breaks the run. A key that `old` lacks, because an older version
    saved it, counts as its default.
    """
    defaults = {key.path: _plain(key.default) for key in walk(SFTConfig) if not key.required}
    differing = {
        key: (before, after)
        for key, (before, after) in changed_keys(old, new).items()
        if not (before == ABSENT and key in defaults and after == defaults[key])
    }
    breaking = {key: pair for key, pair in differing.items() if not _may_change(key)}
    if breaking:
        key, (before, after) = next(iter(breaking.items()))
        rest = "".join(f"; {k} was {show(b)} and is {show(a)}" for k, (b, a) in list(breaking.items())[1:])
        raise ConfigError(
            f"{key}: value {show(after)} is not the {show(before)} that the checkpoint was saved with{rest}; "
            "set the saved values again, or start anew with another output_dir"
        )
    return [_note(key, *pair) for key, pair in differing.items()]


def _note(key: str, before: Any, after: Any) -> str:
    effect = " (the learning-rate schedule follows the new length)" if key in CHANGES_SCHEDULE else ""
    return f"{key}: {show(before)} at the save, {show(after)} now{effect}"


def _may_change(key: str) -> bool:
    return any(key == allowed or key.startswith(allowed + ".") for allowed in MAY_CHANGE)


def _flat(data: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """Dotted key -> value; a mapping that is a key's value, such as data.columns, stays whole."""
    flat: dict[str, Any] = {}
    for name, value in data.items():
        dotted = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping) and dotted not in _WHOLE:
            flat |= _flat(value, dotted)
        else:
            flat[dotted] = _plain(value)
    return flat


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


_WHOLE = {key.path for key in walk(SFTConfig)}
