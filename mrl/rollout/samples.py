"""Writes and reads rollouts as JSONL for people: a file per rollout, an object per trajectory, keys in reading order.

`samples/step_00000012.jsonl` has the samples for step 12, `eval_00000012.jsonl` those of held-out prompts after it.
`baseline_00000012.jsonl` has the greedy completions that remax compares with.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
import os
import pathlib
import re
import zlib
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

from mrl.errors import DataError
from mrl.rollout.base import SERIES_NAMES, Limit, Series, Trajectory

COMPRESSED = ".gz"
FIX = "give a file that `mrl ppo` wrote"
REPLAYED = ("tokens", "mask", "log_probs")
"""Keys that a replay needs, a number per token."""
TOKENS = (*REPLAYED, "advantages")
"""Keys that `log.samples.tokens: false` leaves out."""

STEP_FILE = re.compile(r"step_(\d{8,})\.jsonl(?:\.gz)?")
_NAME = re.compile(rf"({'|'.join(SERIES_NAMES)})_(\d{{8,}})\.jsonl(?:\.gz)?")


@dataclasses.dataclass(frozen=True)
class SavedSample:
    """A line of a file. Fields without a comment are as in Trajectory; unknown ones are null."""

    step: int
    row: str  # file and line of the prompt
    index: int
    sample: int
    reward: float | None  # in all
    rewards: dict[str, float]  # the functions', by label
    environment: float | None  # the environment's reward
    prompt: str | list[dict[str, Any]]
    completion: str  # the policy's text
    finished: bool
    turns: int
    response_length: int
    advantage: float | None  # the mean over its tokens
    tokens: list[int]
    mask: list[int]
    log_probs: list[float]
    conversation: Sequence[Mapping[str, Any]] | None = None
    cut_by: Limit | None = None
    advantages: Sequence[float] | None = None  # per token, 0 if mask is 0; null if each has `advantage`
    weights: int | None = None

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that the policy sampled."""
        return self.mask.index(1)


def _plain_path(folder: str, step: int, series: Series) -> str:
    return os.path.join(folder, f"{series}_{step:08d}.jsonl")


def samples_path(folder: str, step: int, series: Series) -> str:
    """Returns the path of a file: of the compressed one if it is there alone."""
    path = _plain_path(folder, step, series)
    return f"{path}{COMPRESSED}" if os.path.exists(f"{path}{COMPRESSED}") and not os.path.exists(path) else path


def _write_whole(path: pathlib.Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(content)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_samples(
    folder: str,
    step: int,
    trajectories: Sequence[Trajectory],
    *,
    series: Series = "step",
    rewards: Sequence[float] | None = None,
    parts: Mapping[str, Sequence[float]] | None = None,
    advantages: Sequence[float | None] | None = None,
    token_advantages: Sequence[Sequence[float] | None] | None = None,
    tokens: bool = True,
    compress: bool = False,
) -> str:
    """Writes the file of a rollout, whole or not at all, and returns its path. Call it on one process.

    - step: the next one; for an evaluation the one before it
    - rewards, advantages: one per trajectory. parts: rewards by label of a reward function
    - token_advantages: a trajectory's by token, None if each token has the trajectory's
    - tokens: False leaves out TOKENS
    """
    lines = []
    for i, t in enumerate(trajectories):
        sample = SavedSample(
            step=step,
            row=t.prompt.where,
            index=t.prompt.index,
            sample=t.sample,
            reward=None if rewards is None else rewards[i],
            rewards={label: values[i] for label, values in (parts or {}).items()},
            environment=t.reward,
            prompt=t.prompt.content,
            completion=t.text,
            finished=t.finished,
            turns=t.turns,
            response_length=t.response_length,
            advantage=None if advantages is None else advantages[i],
            tokens=t.tokens,
            mask=t.mask,
            log_probs=t.log_probs,
            conversation=t.conversation,
            cut_by=t.cut_by,
            advantages=None if token_advantages is None else token_advantages[i],
            weights=t.weights,
        )
        fields = {name: value for name, value in vars(sample).items() if tokens or name not in TOKENS}
        lines.append(json.dumps(fields, ensure_ascii=False) + "\n")
    content = "".join(lines).encode("utf-8", "backslashreplace")  # half of a UTF-16 pair, as JSON writes it
    path = _plain_path(folder, step, series)
    other = path + COMPRESSED
    if compress:
        path, other, content = other, path, gzip.compress(content, mtime=0)  # equal samples are equal bytes
    _write_whole(pathlib.Path(path), content)
    pathlib.Path(other).unlink(missing_ok=True)  # of a run that was started again with another config
    return path


def bound(folder: str, *, keep: int | None, max_mb: int | None) -> None:
    """Removes the oldest files of a folder of samples.

    Each series keeps its newest `keep` files, and all together at most `max_mb` (10^6 bytes each). The newest file
    stays whatever its size. Files of other names are left alone.
    """
    found = []
    for entry in os.scandir(folder):
        match = _NAME.fullmatch(entry.name)
        if match is not None:
            found.append((int(match[2]), match[1], entry))
    found.sort(key=lambda file: file[:2])
    gone = []
    if keep is not None:
        for series in SERIES_NAMES:
            gone += [file for file in found if file[1] == series][:-keep]
    left = [file for file in found if file not in gone]
    size = sum(file[2].stat().st_size for file in left)
    while max_mb is not None and size > max_mb * 1e6 and len(left) > 1:
        gone.append(left.pop(0))
        size -= gone[-1][2].stat().st_size
    for _, _, entry in gone:
        os.remove(entry.path)


def _opened(path: str) -> IO[bytes]:
    return cast(IO[bytes], gzip.open(path)) if path.endswith(COMPRESSED) else open(path, "rb")  # noqa: SIM115


def read_samples(path: str) -> list[SavedSample]:
    """Returns the trajectories of a file, in order. Raises DataError with file and line for a wrong one."""
    try:
        with _opened(path) as file:
            lines = file.read().decode().split("\n")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(path, why=f"cannot be read ({error})", fix=FIX) from None
    if lines.pop() or not lines:
        raise DataError(f"{path}:{len(lines) + 1}", why="is no whole line", fix="copy the file again")
    samples = []
    for number, line in enumerate(lines, start=1):
        try:
            samples.append(_sample(line))
        except (ValueError, TypeError, AttributeError) as error:
            raise DataError(f"{path}:{number}", why=str(error), fix=FIX) from None
    return samples


def first_weights(path: str) -> int | None:
    """Returns `weights` of a file's first line, which all its lines share; None if there is none."""
    try:
        with _opened(path) as file:
            return json.loads(file.readline()).get("weights")
    except (OSError, EOFError, ValueError, AttributeError, zlib.error):  # `read_samples` says what is wrong
        return None


def _sample(line: str) -> SavedSample:
    """Returns the sample of a line. Raises ValueError or TypeError: "what is wrong"."""
    fields = json.loads(line)
    if not fields.keys() & set(REPLAYED):
        raise ValueError("has no tokens: log.samples.tokens was false, and a replay needs them")
    sample = SavedSample(**fields)
    whole = (sample.step, sample.index, sample.sample, sample.turns, sample.weights or 0, *sample.tokens, *sample.mask)
    numbers = [sample.reward, sample.environment, sample.advantage, *sample.rewards.values()]
    if not (
        all(type(x) is int and x >= 0 for x in whole)
        and all(
            x is None or type(x) in (int, float) and math.isfinite(x) for x in (*numbers, *(sample.advantages or ()))
        )
        and isinstance(sample.prompt, str | list)
        and isinstance(sample.conversation, list | None)
        and isinstance(sample.completion, str)
        and isinstance(sample.finished, bool)
    ):
        raise ValueError("has a value of a wrong type, or a number that is negative or not finite")
    if not len(sample.tokens) == len(sample.mask) == len(sample.log_probs):
        raise ValueError("has tokens, mask and log_probs of unlike lengths")
    if set(sample.mask) != {0, 1} or sample.mask[0] or sum(sample.mask) != sample.response_length:
        raise ValueError("has a mask that does not fit response_length, or begins with 1")
    if not all(math.isfinite(p) and (m or p == 0) for p, m in zip(sample.log_probs, sample.mask, strict=True)):
        raise ValueError("has a log-prob that is not finite, or is not 0 where mask is 0")
    return sample
