"""Runs of the whole RL trainer on tiny inputs, and what is seen of them: the machinery of test_ppo_keys_reach.py.

A run is made and kept as for `mrl sft` (reach.py). Beside its files and what it prints, the limits that generation is given
and the moves of roles between device and host are noted inside.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gzip
import io
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.base import BaseEngine
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.engine.megatron.engine import MegatronEngine
from mrl.errors import UserError
from mrl.roles.dispatch import WorkerDispatch
from mrl.trainers import ppo
from mrl.trainers.rl import show
from tests.config.reach import DEFAULT, Run, Terminal, surroundings
from tests.resume.rl import rl_runs
from tests.trainers.cases import before

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

'''
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def make(folder: pathlib.Path) -> pathlib.Path:
    """The inputs of tests/resume/rl, other rows, an environment, and a chat template."""
    rl_runs.make_inputs(folder)
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()]
    others = "".join(json.dumps({**row, "prompt": "9+9="}) + "\n" for row in rows)
    (folder / "other.jsonl").write_text(others)
    (folder / "environment.py").write_text(ENVIRONMENT)
    (folder / "plain.jinja").write_text(TEMPLATE)
    return folder


@dataclasses.dataclass
class Seen:
    """limits: that generation was given. to_host: how often a role was put away. samples_mb: the bound of samples/."""

    limits: dict[str, int] = dataclasses.field(default_factory=dict)
    to_host: int = 0
    samples_mb: int | None = 0

    def note_generate(
        self, dispatch: WorkerDispatch, role: str, requests: Any, *, progress: Any, kept: Any = None, **limits: int
    ) -> None:
        self.limits = limits

    def note_bound(self, folder: str, *, keep: int | None, max_mb: int | None) -> None:
        self.samples_mb = max_mb

    def note_move(self, engine: BaseEngine, device: str, **_: Any) -> None:
        self.to_host += device == "host"


@contextlib.contextmanager
def watching(seen: Seen) -> Iterator[None]:
    with (
        before(WorkerDispatch, "generate", seen.note_generate),
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


def sample_files(run: Run) -> list[str]:
    """Kind and step of each file of samples."""
    names = [path.name.split(".")[0].split("_") for path in (run.folder / "samples").glob("*.jsonl*")]
    return sorted(f"{series}_{int(step)}" for series, step in names)


def samples_have_tokens(run: Run) -> bool:
    file = min((run.folder / "samples").iterdir())
    content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    return "tokens" in json.loads(content.splitlines()[0])


def suffixes(run: Run) -> list[str]:
    return sorted({path.suffix for path in (run.folder / "samples").iterdir()})


def shown(run: Run) -> int:
    """Lines with a sample."""
    return sum(line.startswith("  ") and " -> " in line for line in run.said.splitlines())
