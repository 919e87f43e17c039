"""Reads trajectories in place of sampling them.

`RecordedRollouts` replays saved rollouts (mrl/rollout/samples.py). `KeptRollouts` keeps rollouts on disk while they are
scored: a run that fails or is killed then resumes with the same samples.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import os
import pathlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.config.ppo import RolloutConfig
from mrl.data.prompts import Prompt
from mrl.errors import CheckpointError, ConfigError, DataError, unwritable
from mrl.rollout.base import Trajectory, TrajectoryRequest, TrajectorySource
from mrl.rollout.rollouts import OnMain
from mrl.rollout.samples import STEP_FILE, SavedSample, first_weights, read_samples, samples_path
from mrl.weights.pt_file import read_pt, write_pt


class RecordedRollouts(TrajectorySource):
    """Gives the trajectories in the folder rollout.path. Raises ConfigError if there is none.

    Log-probs are those in the file: of the weights that sampled, whatever these were. corrects: whether the loss
    corrects for the sampler's probabilities, which samples of older weights need.
    """

    def __init__(self, config: RolloutConfig, *, on_main: OnMain = lambda fn: fn(), corrects: bool = True) -> None:
        if config.path is None:
            raise ConfigError(
                "rollout.path", None, "leaves rollout.backend recorded nothing to replay", "give a folder of samples"
            )
        self._config, self._folder, self._on_main = config, os.path.expanduser(config.path), on_main
        self._corrects = corrects
        self._path: str | None = None  # the file that the next round reads on
        self._unused: dict[tuple[int, int], collections.deque[tuple[int, SavedSample]]] = {}
        on_main(self._check_folder)

    def close(self) -> None:
        """Does nothing: there is nothing to end."""

    def answer(self, prompts: Sequence[Prompt], asked: TrajectoryRequest) -> list[Trajectory]:
        """Returns the saved samples of that step and series; `greedy` was decided when they were saved.

        In later rounds of dynamic sampling, a prompt that comes again gets its next samples. Raises DataError if the
        file, a prompt of it or a sample of a prompt is missing, or is of another prompt.
        """
        path = samples_path(self._folder, asked.step, asked.series)
        if asked.round == 0 or path != self._path:
            records = self._on_main(lambda: self._read(path, asked.step))
            self._path, self._unused = path, {}
            for line, record in enumerate(records, start=1):
                self._unused.setdefault((record.index, record.sample), collections.deque()).append((line, record))
        trajectories = []
        for prompt in prompts:
            for sample in range(asked.samples):
                unused = self._unused.get((prompt.index, sample))
                if not unused:
                    why = (
                        f"has no sample {sample} of {prompt.where} (index {prompt.index}), as often as the prompt comes"
                    )
                    fix = (
                        "replay with the data, seed, batch size and rollout.samples_per_prompt of the run that saved it"
                    )
                    raise DataError(path, why=why, fix=fix)
                line, record = unused.popleft()
                trajectories.append(self._trajectory(record, prompt, f"{path}:{line}"))
        return trajectories

    def _check_folder(self) -> None:
        if not os.path.isdir(self._folder):
            raise ConfigError(
                "rollout.path", why=f"{self._config.path}: there is no such folder", fix="give the samples/ of a run"
            )
        for name in [] if self._corrects else os.listdir(self._folder):
            match = STEP_FILE.fullmatch(name)
            path = os.path.join(self._folder, name)
            if match is not None and first_weights(path) not in (None, int(match[1]) - 1):
                why = f"is needed: {path} has samples of the weights after step {first_weights(path)}"
                raise ConfigError("algorithm.correction", None, why, "set it to truncate")

    def _read(self, path: str, step: int) -> list[SavedSample]:
        if not os.path.exists(path):
            name = os.path.basename(path)
            others = sorted(f for f in os.listdir(self._folder) if f.startswith(name.split("_")[0] + "_"))
            raise DataError(
                "rollout.path",
                why=f"{self._config.path}: has no {name}, which is needed before step {step}; it has "
                + (f"{len(others)} from {others[0]} to {others[-1]}" if others else "none of that kind"),
            )
        records = read_samples(path)
        for line, record in enumerate(records, start=1):
            if record.step != step:
                why = f"step is {record.step} and not {step}"
                raise DataError(f"{path}:{line}", why=why, fix="give each file its own name back")
        return records

    def _trajectory(self, record: SavedSample, prompt: Prompt, where: str) -> Trajectory:
        given = record.tokens[: record.prompt_length]
        same = record.prompt == json.loads(json.dumps(prompt.content))
        if not same and record.environment is not None:  # its reset gave another prompt
            prompt = dataclasses.replace(prompt, content=record.prompt, tokens=given, truncated=False)
        elif not same or given != prompt.tokens:
            raise DataError(
                where,
                why=f"the prompt is not that of {prompt.where}, or has other tokens now",
                fix="use the data, tokenizer, chat template, data.system and data.max_prompt_length of the run that "
                "saved it",
            )
        new = len(record.tokens) - len(given)
        if new > self._config.max_new_tokens:
            raise DataError(
                where,
                why=f"has {new} tokens after the prompt, and rollout.max_new_tokens is {self._config.max_new_tokens}",
                fix=f"set it to at least {new}",
            )
        return Trajectory(
            prompt=prompt,
            sample=record.sample,
            tokens=record.tokens,
            mask=record.mask,
            log_probs=record.log_probs,
            text=record.completion,
            finished=record.finished,
            turns=record.turns,
            reward=record.environment,
            conversation=record.conversation,
            cut_by=record.cut_by,
            weights=record.weights,
        )


_PROMPT_FIELDS = ("content", "tokens", "truncated")  # an environment's reset may have replaced them


def trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    """Returns plain data of a trajectory, and of its prompt what an environment may have replaced."""
    prompt = {name: getattr(trajectory.prompt, name) for name in _PROMPT_FIELDS}
    return vars(trajectory) | {"prompt": prompt}


def trajectory_from_state(state: Mapping[str, Any], prompt: Prompt) -> Trajectory:
    """Returns the trajectory of `trajectory_state`. prompt: as it was read."""
    return Trajectory(**(dict(state) | {"prompt": dataclasses.replace(prompt, **state["prompt"])}))


_WRITING = threading.Lock()
"""Rollouts that are sampled at the same time write into one folder."""


class KeptRollouts(TrajectorySource):
    """Keeps another source's trajectories in files of `folder`, until rollouts of later weights come.

    A file is read instead of sampling again if the same is asked for with the same weights and origin. The weights are
    the same after as many steps of the same run, or before the first step.

    origin: plain data that samples depend on, besides steps made and prompts. Its "environment" is None if there is
    none. say: shows a line to the user. ahead: by how many iterations of `steps` optimizer steps rollouts are later
    than those that their weights are trained on next.
    """

    def __init__(
        self,
        source: TrajectorySource,
        folder: pathlib.Path,
        *,
        origin: Mapping[str, Any],
        on_main: OnMain,
        say: Callable[[str], None],
        ahead: int = 0,
        steps: int = 1,
    ) -> None:
        self._ahead, self._steps = ahead, steps
        self._source, self._folder, self._on_main, self._say = source, folder, on_main, say
        self._origin = json.dumps(origin, sort_keys=True, default=str)
        self._rows_count = origin["environment"] is not None
        self._run_id: str | None = None

    @property
    def exact(self) -> bool:
        """Returns `Sampler.exact`."""
        return self._source.exact

    def begin(self, run_id: str, made: int) -> None:
        """Begins a run. Files of later weights go: they will not be trained to the same bits again."""
        self._run_id = run_id
        self._on_main(lambda: self._remove_others(made, self._ahead))
        self._source.begin(run_id, made)

    def answer(self, prompts: Sequence[Prompt], asked: TrajectoryRequest) -> list[Trajectory]:
        """Samples as `TrajectorySource.sample` does, or reads a file."""
        step, series, made = asked.step, asked.series, asked.made
        if made is None:
            made = step if series == "eval" else step - 1
        key = {  # its order is in the names of files
            "made": made, "step": step, "series": series, "round": asked.round, "greedy": asked.greedy,
            "samples": asked.samples, "prompts": self._digest(prompts), "run": self._run_id if made else "",
            "origin": self._origin,
        }  # fmt: skip
        path = self._folder / f"{series}_{step:08d}_{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}.pt"
        found = self._on_main(lambda: self._read(path, key, prompts))
        self.earlier_s = 0.0
        if found is not None:
            trajectories, self.earlier_s = found
            self._say(
                f"{series} {step}: {len(trajectories):,} samples are those in {path}, which were not scored to the end"
            )
            return trajectories
        began_s = time.perf_counter()
        trajectories = self._source.answer(prompts, dataclasses.replace(asked, made=made))
        seconds = time.perf_counter() - began_s
        self._on_main(lambda: self._write(path, key, trajectories, seconds))
        return trajectories

    def forget(self) -> None:
        """Removes all files."""
        self._on_main(lambda: self._remove(()))

    def close(self) -> None:
        self._source.close()

    def _digest(self, prompts: Sequence[Prompt]) -> str:
        """Returns a digest of the prompts' tokens, and of their rows if an environment gets them.

        Otherwise rows are for rewards alone: an answer may be corrected in the data, and the samples are scored by it.
        """
        given = [(prompt.index, prompt.tokens, prompt.row if self._rows_count else None) for prompt in prompts]
        return hashlib.sha256(json.dumps(given, sort_keys=True, default=str).encode()).hexdigest()

    def _read(
        self, path: pathlib.Path, asked: Mapping[str, Any], prompts: Sequence[Prompt]
    ) -> tuple[list[Trajectory], float] | None:
        """Returns the trajectories in a file, and the seconds of sampling them; None if there is no such file."""
        if not path.exists():
            return None
        try:
            kept = read_pt(path, fields=("asked", "trajectories", "seconds"))
            if kept["asked"] != asked:
                return None
            given = [prompt for prompt in prompts for _ in range(asked["samples"])]
            states = zip(kept["trajectories"], given, strict=True)
            return [trajectory_from_state(state, prompt) for state, prompt in states], kept["seconds"]
        except (CheckpointError, KeyError, TypeError, ValueError) as error:
            why = error.why if isinstance(error, CheckpointError) else f"cannot be read ({type(error).__name__})"
            self._say(f"{path}: {why}, and is sampled again")
            return None

    def _write(
        self, path: pathlib.Path, asked: Mapping[str, Any], trajectories: Sequence[Trajectory], seconds: float
    ) -> None:
        """Writes a file whole or not at all, and removes files of other weights."""
        rows = [trajectory_state(trajectory) for trajectory in trajectories]
        with _WRITING:
            # Later rollouts may be on their way, and an evaluation.
            self._remove_others(asked["made"], 2 * self._ahead, evals=not self._ahead or asked["series"] == "eval")
            try:
                write_pt(path, {"asked": dict(asked), "trajectories": rows, "seconds": seconds})
            except OSError as error:
                raise unwritable(str(self._folder.parent), path, error) from error

    def _remove_others(self, made: int, ahead: int, evals: bool = True) -> None:
        """Removes files but those of the iteration after `made` steps and of so many after it. evals: also those of
        evaluations of other weights."""
        kept = [f"eval_{made:08d}_" if evals else "eval_"]
        for iteration in range(ahead + 1):
            step = made + 1 + iteration * self._steps
            kept += [f"step_{step:08d}_", f"baseline_{step:08d}_"]
        self._remove(tuple(kept))

    def _remove(self, kept: tuple[str, ...]) -> None:
        """Removes all files but those whose name begins with one of `kept`."""
        for file in self._folder.glob("*_*.*"):
            if not file.name.startswith(kept):
                file.unlink()
        if self._folder.exists() and not self._folder.is_symlink() and not any(self._folder.iterdir()):
            self._folder.rmdir()
