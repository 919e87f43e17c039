"""Replays saved rollouts (mrl/rollout/samples.py), in place of `Rollouts`: nothing is sampled."""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Sequence

from mrl.config.ppo import RolloutConfig
from mrl.data.prompts import Prompt
from mrl.errors import ConfigError, DataError
from mrl.rollout.base import Trajectory, TrajectoryRequest, TrajectorySource
from mrl.rollout.rollouts import OnMain
from mrl.rollout.samples import STEP_FILE, SavedSample, first_weights, read_samples, samples_path


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
