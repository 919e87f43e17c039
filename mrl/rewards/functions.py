"""Loads the function of a config entry, a named one or the user's, and puts its errors into words."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import inspect
import pathlib
import sys
import sysconfig
import traceback
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import mrl
from mrl.config.keys import join_names
from mrl.config.rewards import FunctionReward, NamedReward, Reward, RewardsConfig
from mrl.errors import ConfigError, one_line
from mrl.rewards.calls import START, RewardCall, Sample, UnknownSignature
from mrl.rewards.code import code
from mrl.rewards.text import Row, exact_match, gsm8k, length, math, regex, require_math_verify

# Each as f(prompt, completion, row, options), with the options of the same name in `mrl.config.rewards`.
NAMED_FUNCTIONS: Mapping[str, Callable[..., float]] = {
    "exact_match": exact_match,
    "regex": regex,
    "length": length,
    "gsm8k": gsm8k,
    "math": math,
    "code": code,
}


def load_reward(reward: Reward, key: str, first: Sequence[Sample] = ()) -> RewardCall:
    """Returns the function of a config entry that was written at `key`.

    Raises ConfigError naming the key, the file and the function. It also does if a row of `first` lacks a field that
    the function reads.
    """
    if isinstance(reward, FunctionReward):
        function = load_function(reward.function, f"{key}.function")
        for sample in first:
            try:
                function.arguments([sample], START)
            except ValueError as error:
                raise ConfigError(f"{key}.function", why=f"{reward.function}: row {sample.where}: {error}") from None
        return function
    if reward.name == "math":
        require_math_verify(f"{key}.name")
    for sample in first:
        _check_field(reward, f"{key}.field", sample)
    return RewardCall(functools.partial(NAMED_FUNCTIONS[reward.name], options=reward))


def check_rewards(config: RewardsConfig, first: Sequence[tuple[Row, str]]) -> None:
    """Raises ConfigError as a run does when it starts. first: rows with their file and line."""
    samples = [Sample("", "", *each) for each in first] if config.checks_first_rows else []
    for i, reward in enumerate(config.functions):
        load_reward(reward, f"rewards.functions[{i}]", samples)


def _check_field(reward: NamedReward, key: str, sample: Sample) -> None:
    """Raises ConfigError if the row lacks the field that the reward reads. Not all read one."""
    field = getattr(reward, "field", None)
    if field is None or sample.row.get(field) is not None:
        return
    why = f"is the field that {reward.name} reads, and it is missing or null in row {sample.where}, which has"
    advice = "name one of them, or add the field to the rows"
    raise ConfigError(key, field, f"{why} {join_names(sample.row) or 'none'}", advice)


def load_named(spec: str, key: str, *, kind: Literal["function", "class"]) -> Callable[..., Any]:
    """Returns the object that `path.py:name` names.

    The file's folder is put on the import path, so it may import its neighbours.
    """
    file, _, name = spec.rpartition(":")
    path = pathlib.Path(file)
    if not path.is_file():
        raise ConfigError(
            key, why=f"{spec}: the file {file} does not exist", fix="give path.py:name, from where mrl is started"
        )
    module = _load_module(path.resolve(), spec, key)
    function: Any = getattr(module, name, None)
    if not (callable(function) if kind == "function" else inspect.isclass(function)):
        raise ConfigError(key, why=f"{spec}: the file has no {kind} {name}", fix="give the name of one")
    return function


def load_function(spec: str, key: str) -> RewardCall:
    """Returns the reward function that `path.py:name` names. Raises ConfigError if its parameters fit no form."""
    function, name = load_named(spec, key, kind="function"), spec.rpartition(":")[2]
    try:
        return RewardCall(function)
    except UnknownSignature as error:
        shown: object = ""
        with contextlib.suppress(TypeError, ValueError):  # a builtin may have none
            shown = inspect.signature(function)
        raise ConfigError(
            key,
            why=f"{spec}: {name}{shown} {error}",
            fix=(
                f"write def {name}(prompt, completion, row), or give it the parameters of verl or of TRL "
                "(docs/rewards.md)"
            ),
        ) from None


def is_async(function: Callable[..., Any]) -> bool:
    """Returns whether a call gives a coroutine: async functions, and objects whose __call__ is one."""
    call = getattr(function, "__call__", None)  # noqa: B004
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)


def _load_module(path: pathlib.Path, written: str, key: str) -> ModuleType:
    """Returns the file as a module; several functions of one file share it."""
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(key, why=f"{written}: {path.name} is no Python file", fix="give path.py:name")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout may be a result, as of `mrl eval --json`
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        why = f"{written}: {describe(error, path)} while loading"
        raise ConfigError(key, why=why, fix=f"python {path} shows where") from None
    return module


def describe(error: BaseException, path: pathlib.Path | None = None) -> str:
    """Returns `ValueError: text (rewards.py:12)`: the error on one line with the innermost place in `path`.

    Without `path`, it is the innermost of the user's own lines. json/decoder.py:355 would say nothing about a reward
    function that parses a completion.
    """
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if (_is_users(f.filename) if path is None else pathlib.Path(f.filename) == path)]
    place = f" ({pathlib.Path(inside[-1].filename).name}:{inside[-1].lineno})" if inside else ""
    return one_line(f"{type(error).__name__}: {error}", 300) + place


_LIBRARIES = (
    str(pathlib.Path(mrl.__file__).parent),
    *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
)


def _is_users(file: str) -> bool:
    """Returns whether a file is neither Python's, nor a package's, nor ours."""
    return not file.startswith(("<", *_LIBRARIES))


def whole_traceback(error: BaseException) -> str:
    """Returns the traceback from the user's function on, at most its last 20,000 characters."""
    frames = error.__traceback__
    if frames is not None:  # the first frame is ours
        error = error.with_traceback(frames.tb_next or frames)
    return "".join(traceback.format_exception(error))[-20_000:]
