"""Runs of the whole RL trainer on tiny inputs, and what is seen of them: the machinery of test_ppo_keys_reach.py.

A run is made and kept as for `mrl sft` (reach.py). Beside its files and what it prints, the limits that generation is given,
the processes that score, and the moves of roles between device and host are noted inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import datasets

from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.base import BaseEngine
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.engine.megatron.engine import MegatronEngine
from mrl.errors import UserError
from mrl.rewards.scorer import Scorer
from mrl.roles.dispatch import WorkerDispatch
from mrl.trainers import ppo
from mrl.trainers.rl import show
from tests.config.reach import DEFAULT, Run, Terminal, surroundings
from tests.engine import tiny
from tests.resume.rl import rl_runs
from tests.trainers.cases import before
from tests.trainers.tiny_runs import load_example

Look = Callable[[Run], Any]

BASE = {
    "output_dir": "{run}/demo", "seed": 3, "actor.model.path": "{inputs}/plain", "actor.model.dtype": "float32",
    "actor.engine.device": "cpu", "actor.optimizer.lr": 1e-2, "actor.optimizer.schedule": "constant",
    "algorithm.name": "grpo", "rollout.samples_per_prompt": 2, "rollout.max_new_tokens": 6,
    "rewards": {"functions": [{"function": "{inputs}/rewards.py:digits"}], "workers": 1},
    "data.train": "{inputs}/train.jsonl", "data.max_prompt_length": 24, "train.steps": 1,
    "train.global_batch_size": 4, "checkpoint.export_hf": False, "log.console": "plain",
}  # fmt: skip
"""The run that rows change. {inputs} is the folder that `make` filled, {run} one that each run has for itself."""

ENVIRONMENT = '''
import time


class Nod:
    """Says yes and never ends."""

    def reset(self, row):
        pass

    def step(self, text):
        return "0", 1.0, False


class Sleepy(Nod):
    def step(self, text):
        time.sleep(1.5)
        return super().step(text)
'''
MORE_REWARDS = """
import time


def broken(prompt, completion, row):
    raise ValueError("always")


def slow(prompt, completion, row):
    time.sleep(1.5)
    return float(len(completion))


CALLS = []


def busy(prompt, completion, row):  # fails the first two times
    CALLS.append(1)
    if len(CALLS) <= 2:
        raise ConnectionError
    return len(completion)


def fewer(prompt, completion, row):
    return -sum(c.isdigit() for c in completion) / 8
"""
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def make(folder: pathlib.Path) -> pathlib.Path:
    """Those of tests/resume/rl, a reward model, a model of other weights, rows in other forms and with faults, an environment, more rewards."""
    rl_runs.make_inputs(folder)
    tokenizer = load_example("arithmetic/make_data.py").make_tokenizer()
    tiny.make_model(str(folder / "judge"), "qwen3", vocab=len(tokenizer), head="value")
    tokenizer.save_pretrained(folder / "judge")
    tiny.make_model(str(folder / "teacher"), "qwen3", vocab=len(tokenizer), seed=5)
    tokenizer.save_pretrained(folder / "teacher")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    write = lambda name, lines: (folder / name).write_text("".join(f"{line}\n" for line in lines))  # noqa: E731
    write("other.jsonl", [json.dumps({**row, "prompt": "9+9="}) for row in rows])
    write(
        "renamed.jsonl", [json.dumps({"question": row["prompt"], "answer": row["answer"], "id": "x"}) for row in rows]
    )
    write("bad.jsonl", [json.dumps(rows[0]), "{", *(json.dumps(row) for row in rows[1:])])
    (folder / "environment.py").write_text(ENVIRONMENT)
    (folder / "more.py").write_text(MORE_REWARDS)
    (folder / "plain.jinja").write_text(TEMPLATE)
    splits = {"train": datasets.Dataset.from_list(rows[:5]), "more": datasets.Dataset.from_list(rows[5:])}
    datasets.DatasetDict(splits).save_to_disk(str(folder / "saved"))
    return folder


@dataclasses.dataclass
class Seen:
    """limits: that generation was given. generated: how often. scorers: processes of the reward pool. to_host: how often a role was put away. samples_mb: the bound of samples/."""

    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    generated: int = 0
    scorers: int = 0
    to_host: int = 0
    samples_mb: int | None = 0

    def note_generate(
        self, dispatch: WorkerDispatch, role: str, requests: Any, *, progress: Any, kept: Any = None, **limits: int
    ) -> None:
        self.limits, self.generated = limits, self.generated + 1

    def note_score(self, scorer: Scorer, *_: Any) -> None:
        self.scorers = len(scorer._pool.pids)

    def note_bound(self, folder: str, *, keep: int | None, max_mb: int | None) -> None:
        self.samples_mb = max_mb

    def note_move(self, engine: BaseEngine, device: str, **_: Any) -> None:
        self.to_host += device == "host"


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    with (
        before(WorkerDispatch, "generate", seen.note_generate),
        before(Scorer, "score", seen.note_score),
        before(show, "bound", seen.note_bound),
        before(MegatronEngine, "to", seen.note_move),
        before(FSDPEngine, "to", seen.note_move),
    ):
        yield


def case(config: dict[str, Any], environ: dict[str, str], terminal: bool, code_cache: str) -> tuple[Any, ...]:
    """As reach.case, of the RL trainer; of one process."""
    ended, seen, said = ("done", ""), Seen(), Terminal() if terminal else io.StringIO()
    with surroundings(environ, code_cache), watching(seen), contextlib.redirect_stdout(said):
        try:
            ppo.run(from_dict(config, PPOConfig), "mrl ppo config.yaml")
        except UserError as error:
            ended = (type(error).__name__, str(error))
    return *ended, said.getvalue(), [seen]


# -- looks -----------------------------------------------------------------------------------------------------------


def sampled(field: str, *, step: int = 1, series: str = "step", where: str = ".") -> Look:
    """A field of every sample of a rollout; None where it was not written. where: beside output_dir."""

    def look(run: Run) -> list[Any] | None:
        path = run.folder / where / "samples" / f"{series}_{step:08d}.jsonl"
        return [json.loads(line)[field] for line in path.read_text().splitlines()] if path.exists() else None

    return look


def same(look: Look, key: str, value: Any = DEFAULT) -> Look:
    """Whether `look` sees the same in the run with another value of the key."""
    return lambda run: look(run) == look(run.other(**{key: value}))


def metric_names(start: str) -> Look:
    """Metrics of any step whose name begins with `start`."""
    return lambda run: sorted({name for row in run.metrics for name in row if name.startswith(start)})


def samples_of_a_prompt_are_equal(run: Run) -> bool:
    texts = sampled("completion")(run)
    return texts[::2] == texts[1::2]


def best(run: Run) -> tuple[str | None, list[int]]:
    """The step that checkpoints/best names, and the steps of those that are there."""
    folder = run.folder / "checkpoints"
    named = int((folder / "best").read_text().strip().removeprefix("step_")) if (folder / "best").exists() else None
    return named, sorted(int(path.name.removeprefix("step_")) for path in folder.glob("step_*"))


def named_is_the_best(metric: str, sign: int) -> Look:
    """checkpoints/best names the step with the best value of the metric, and it is still there, whatever came after."""

    def look(run: Run) -> bool:
        values = {row["step"]: sign * row[metric] for row in run.metrics if row["step"] and metric in row}
        named, there = best(run)
        return named == max(values, key=values.get) and named in there

    return look


def sample_files(run: Run) -> list[str]:
    """Kind and step of each file of samples."""
    names = [path.name.split(".")[0].split("_") for path in (run.folder / "samples").glob("*.jsonl*")]
    return sorted(f"{series}_{int(step)}" for series, step in names)


def sample_keys(run: Run) -> set[str]:
    return set(json.loads((run.folder / "samples" / "step_00000001.jsonl").read_text().splitlines()[0]))


def suffixes(run: Run) -> list[str]:
    return sorted({path.suffix for path in (run.folder / "samples").iterdir()})


def shown(run: Run) -> int:
    """Lines with a sample."""
    return sum(line.startswith("  ") and " -> " in line for line in run.said.splitlines())
