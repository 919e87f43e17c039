"""How a reward function is called: the names of its parameters say what it is given and what it returns.

    prompt, completion, row, tokens, finish_reason, step          mrl's own: one sample, a number
    prompt, completions, row, tokens, finish_reasons, step        the samples of one prompt: a list of numbers
    prompts, completions, rows, tokens, finish_reasons, step      all samples of a rollout: a list of numbers
    data_source, solution_str, ground_truth, extra_info           verl's: one sample, a number or {"score": number}
    data_sources, solution_strs, ground_truths, extra_infos       verl's for a batch: a list of those
    prompts, completions, completion_ids, trainer_state, COLUMN   TRL's: a batch, a list of numbers or None

A function names what it needs of a line. A parameter with a default that is not in its line keeps the default.
`**kwargs` gets the rest of TRL's line with all columns of the data, and nothing elsewhere. Sources:
verl/workers/reward_manager/{naive,batch}.py; trl/trainer/grpo_trainer.py, `_calculate_rewards`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from mrl.errors import shortened
from mrl.rewards.text import Prompt, Row

Scope = Literal["sample", "group", "batch"]
_EMPTY = inspect.Parameter.empty


@dataclasses.dataclass(frozen=True)
class Sample:
    """A completion that is scored."""

    prompt: Prompt  # text or messages
    completion: str
    row: Row
    where: str = ""  # the row's file and line, `train.jsonl:17`, for errors
    tokens: Sequence[int] = ()  # the completion's, its end token among them
    finished: bool = True  # it ended by itself, and not at a limit
    turns: int = 1  # the policy's
    conversation: Sequence[Mapping[str, Any]] | None = None  # with an environment: the messages after the prompt
    group: int = 0  # samples of one prompt are neighbours, with one number

    @property
    def finish_reason(self) -> Literal["stop", "length"]:
        return "stop" if self.finished else "length"


@dataclasses.dataclass(frozen=True)
class Position:
    """The point of the run at which samples are scored."""

    step: int = 0  # the number in the name of their file in samples/
    made: int = 0  # optimizer steps made
    total: int = 0  # optimizer steps of the run


START = Position()


@dataclasses.dataclass(frozen=True)
class TrainerState:
    """The part of transformers.TrainerState that a run of mrl has."""

    global_step: int
    max_steps: int


class MissingFields(ValueError):
    """A row lacks what the function needs."""


class UnknownSignature(Exception):
    """The parameters of a function are those of no form; the text says what is wrong."""


Getter = Callable[[Sequence[Sample], Position], Any]


@dataclasses.dataclass(frozen=True)
class SignatureForm:
    """A line of the table above."""

    scope: Scope
    getters: Mapping[str, Getter]  # parameter -> its value
    columns: bool = False  # other parameters are columns of the data, and **kwargs gets all that is not named
    read: Callable[[Any], Any] = lambda value: value  # a returned value of one sample -> a number


def _score_of(value: Any) -> Any:
    """Returns the score of a value. verl's functions may return a mapping."""
    if isinstance(value, Mapping):
        if "score" not in value:
            raise ValueError(f"returned a mapping without score; it has {', '.join(map(str, value)) or 'nothing'}")
        return value["score"]
    return value


def _data_source(sample: Sample) -> Any:
    if "data_source" not in sample.row:
        raise MissingFields(
            "the row has no field 'data_source'; add it, rename one with data.columns, or give a default; "
            f"it has {', '.join(sample.row) or 'none'}"
        )
    return sample.row["data_source"]


def _ground_truth(sample: Sample) -> Any:
    nested = sample.row.get("reward_model")
    if isinstance(nested, Mapping) and "ground_truth" in nested:
        return nested["ground_truth"]
    if "ground_truth" not in sample.row:
        raise MissingFields(
            "the row has no ground_truth, nor reward_model.ground_truth; rename a field with data.columns, as "
            f"{{answer: ground_truth}}; it has {', '.join(sample.row) or 'none'}"
        )
    return sample.row["ground_truth"]


def _extra_info(sample: Sample) -> dict[str, Any]:
    return {**(sample.row.get("extra_info") or {}), "num_turns": sample.turns, "rollout_reward_scores": {}}


def _trl_completion(sample: Sample) -> str | list[Mapping[str, Any]]:
    """Returns the completion as text if the prompt is text, else as the messages after the prompt."""
    if isinstance(sample.prompt, str):
        return sample.completion
    if sample.conversation is not None:
        return list(sample.conversation)
    return [{"role": "assistant", "content": sample.completion}]


def _first(get: Callable[[Sample], Any]) -> Getter:
    return lambda samples, position: get(samples[0])


def _each(get: Callable[[Sample], Any]) -> Getter:
    return lambda samples, position: [get(sample) for sample in samples]


def _tokens(sample: Sample) -> list[int]:
    return list(sample.tokens)


_PROMPT = operator.attrgetter("prompt")
_COMPLETION = operator.attrgetter("completion")
_ROW = operator.attrgetter("row")
_REASON = operator.attrgetter("finish_reason")
_STEP: Mapping[str, Getter] = {"step": lambda samples, position: position.step}
_LIST_ARGUMENTS: Mapping[str, Getter] = {
    "completions": _each(_COMPLETION), "tokens": _each(_tokens), "finish_reasons": _each(_REASON), **_STEP,
}  # fmt: skip

SAMPLE = SignatureForm(
    "sample",
    {
        "prompt": _first(_PROMPT), "completion": _first(_COMPLETION), "row": _first(_ROW), "tokens": _first(_tokens),
        "finish_reason": _first(_REASON), **_STEP,
    },
)  # fmt: skip
GROUP = SignatureForm("group", {"prompt": _first(_PROMPT), "row": _first(_ROW), **_LIST_ARGUMENTS})
BATCH = SignatureForm("batch", {"prompts": _each(_PROMPT), "rows": _each(_ROW), **_LIST_ARGUMENTS})
_VERL: Mapping[str, Callable[[Sample], Any]] = {
    "data_source": _data_source, "solution_str": _COMPLETION, "ground_truth": _ground_truth,
    "extra_info": _extra_info,
}  # fmt: skip
VERL = SignatureForm("sample", {name: _first(get) for name, get in _VERL.items()}, read=_score_of)
VERL_BATCH = SignatureForm("batch", {f"{name}s": _each(get) for name, get in _VERL.items()}, read=_score_of)
TRL = SignatureForm(
    "batch",
    {
        "prompts": _each(_PROMPT), "completions": _each(_trl_completion), "completion_ids": _each(_tokens),
        "trainer_state": lambda samples, position: TrainerState(position.made, position.total),
    },
    columns=True, read=lambda value: 0.0 if value is None else value,
)  # fmt: skip
_NO_COLUMNS = ("prompt", "completion", "completion_ids")
"""Fields of rows that TRL does not hand on."""


def form_of(names: Sequence[str]) -> SignatureForm:
    """Returns the form that a function with these parameters has. Raises UnknownSignature."""
    if "solution_str" in names:
        return VERL
    if "solution_strs" in names:
        return VERL_BATCH
    if "completion" in names:
        return SAMPLE
    if "completions" in names:
        if "rows" in names:
            return BATCH
        return GROUP if ("prompt" in names or "row" in names) and "prompts" not in names else TRL
    raise UnknownSignature("has no parameter for the completion")


class RewardCall:
    """A reward function with what its parameters name. Raises UnknownSignature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):  # a builtin
            raise UnknownSignature("has parameters that cannot be read") from None
        named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
        self.function = function
        self.form = form_of([p.name for p in named])
        self._rest = any(p.kind == p.VAR_KEYWORD for p in parameters) and self.form.columns
        known = [p for p in named if p.name in self.form.getters]
        others = [p for p in named if p.name not in self.form.getters]
        self._columns = others if self.form.columns else []
        unknown = [p.name for p in others if p.default is _EMPTY]
        if unknown and not self.form.columns:
            raise UnknownSignature(
                f"needs {' and '.join(unknown)}, which nothing is known for; give a default, or take of "
                f"{', '.join(self.form.getters)}"
            )
        if any(p.kind == p.POSITIONAL_ONLY for p in named):
            raise UnknownSignature("takes parameters by place alone; remove the /")
        self._known = known

    @property
    def scope(self) -> Scope:
        return self.form.scope

    @property
    def needs_tokens(self) -> bool:
        """Whether the function may look at token ids."""
        return self._rest or any(p.name in ("tokens", "completion_ids") for p in self._known)

    def arguments(self, samples: Sequence[Sample], position: Position) -> dict[str, Any]:
        """Returns the arguments by name.

        Raises ValueError if a field of a row is wrong, and MissingFields if one without a default is absent.
        """
        by_name: dict[str, Any] = {}
        for parameter in self._known:
            try:
                by_name[parameter.name] = self.form.getters[parameter.name](samples, position)
            except MissingFields:
                if parameter.default is _EMPTY:
                    raise
        if self.form.columns:
            self._add_columns(by_name, samples, position)
        return by_name

    def _add_columns(self, by_name: dict[str, Any], samples: Sequence[Sample], position: Position) -> None:
        """Adds TRL's keywords: those that the function names, and all for **kwargs."""
        fields = dict.fromkeys(name for s in samples for name in s.row if name not in _NO_COLUMNS)
        for parameter in self._columns:
            if parameter.name in fields:
                by_name[parameter.name] = [sample.row.get(parameter.name) for sample in samples]
            elif parameter.name in ("finish_reasons", "step"):
                by_name[parameter.name] = _LIST_ARGUMENTS[parameter.name](samples, position)
            elif parameter.default is _EMPTY:
                raise MissingFields(
                    f"the rows have no field {parameter.name!r}, which the function names; add it, rename one with "
                    f"data.columns, or give a default; they have {', '.join(fields) or 'none'}"
                )
        if self._rest:
            getters, named = self.form.getters, {p.name for p in self._known}
            by_name |= {n: [s.row.get(n) for s in samples] for n in fields if n not in by_name and n not in getters}
            by_name |= {n: get(samples, position) for n, get in getters.items() if n not in named}

    def values(self, returned: Any, count: int) -> tuple[float, ...]:
        """Returns the numbers of `count` samples in what the function returned. Raises ValueError: "returned ..."."""
        if self.form.scope == "sample":
            return (as_float(self.form.read(returned)),)
        given = returned.tolist() if hasattr(returned, "tolist") else returned
        if not isinstance(given, list | tuple):
            raise ValueError(
                f"returned {with_type(returned)}, which is no list of numbers, one for each of {count} completions"
            )
        if len(given) != count:
            raise ValueError(f"returned {len(given)} values for {count} completions")
        return tuple(as_float(self.form.read(value), f" as value {i}") for i, value in enumerate(given))


def as_float(value: Any, what: str = "") -> float:
    """Returns a reward as a float: bool, int, float, NumPy's or a tensor with one element. Else raises ValueError.

    what: follows the value in its text, as " as the reward".
    """
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise ValueError(f"returned {with_type(value)}{what}, which is no number")
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"returned {number}{what}, which is not finite")
    return number


def with_type(value: Any) -> str:
    """Returns a value, shortened, with the name of its type."""
    return f"{shortened(repr(value), 60)} ({type(value).__name__})"
