"""What the ranks of a test world run: `mrl ppo`'s trainer, with things happening to it."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import gc
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mrl.algorithms.advantages import AdvantageInputs
from mrl.algorithms.recipes import Recipe
from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.engine.base import BaseEngine, Completion
from mrl.engine.sampling import SamplingKey
from mrl.errors import ConfigError, RewardError
from mrl.roles.dispatch import StepResult, WorkerDispatch
from mrl.roles.frozen import RewardModel
from mrl.rollout.base import SampleRequest
from mrl.rollout.fleet import Fleet, FleetSampler
from mrl.rollout.http import HttpClient
from mrl.rollout.native import EngineSampler
from mrl.rollout.vllm import VLLMServer
from mrl.trainers import ppo, signals
from mrl.trainers.rl import experience, updates
from mrl.trainers.rl.evaluation import Evaluation
from mrl.trainers.rl.launched import LaunchedRollouts
from mrl.trainers.rl.trainer import trainer_of
from tests.engine import te_like
from tests.trainers import cases
from tests.trainers.cases import before, outcome


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """Runs the trainer. Returns how it ended ("done", "stopped" or the error's class), its message, and what it printed."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return outcome(lambda: ppo.run(from_dict(config, PPOConfig), "mrl ppo config.yaml"))


def te_modules_of_rank(
    config: Mapping[str, Any], rank: int, port: int, has_te: bool, made: multiprocessing.Queue
) -> None:
    """Runs one of two launched ranks in a process of its own. Puts (rank, whether its layers are te's, or its error) into
    the queue."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "CUDA_VISIBLE_DEVICES": ""})
    torch.set_num_threads(1)
    with te_like.te_like() if has_te else contextlib.nullcontext():
        try:
            ppo.run(from_dict(config, PPOConfig), "mrl ppo config.yaml")
        except ConfigError as error:
            made.put((rank, str(error)))
        else:
            made.put((rank, te_like.NormAndColumn.made > 0))


def held_after(config: Mapping[str, Any]) -> list[str]:
    """Engines that a run of this process leaves to the garbage collector."""
    gc.collect()  # what earlier cases have left in this process
    gc.disable()
    try:
        ppo.run(from_dict(config, PPOConfig), "mrl ppo config.yaml")
        return [type(held).__name__ for held in gc.get_objects() if isinstance(held, BaseEngine)]
    finally:
        gc.enable()


def held_by_role(config: Mapping[str, Any]) -> dict[str, int]:
    """Elements of all parameters that each role's engine holds on this rank; a role without an engine is not there."""
    with trainer_of(from_dict(config, PPOConfig)) as trainer:
        trainer.dispatch.init_model()
        assert "reference" in trainer.folders, "the run has a reference"
        held: dict[str, int] = {}
        for role, engine in trainer.dispatch.engines.items():
            models = engine.model.chunks if engine.backend == "megatron" else [engine.model.module]
            held[role] = sum(parameter.numel() for model in models for parameter in model.parameters())
        return held


@contextlib.contextmanager
def critic_is_exported() -> Iterator[None]:
    """The run leaves its critic in output_dir/critic, as it leaves its actor in output_dir/hf."""

    def export(trainer: Any, *_: Any) -> None:
        trainer.dispatch.save_hf_model("critic", str(trainer.directory.path / "critic"))

    with after(ppo, "loop", export):
        yield


@contextlib.contextmanager
def sampler_is_off(temperature: float) -> Iterator[None]:
    """The sampler divides logits by another temperature than the trainer."""
    original = EngineSampler.sample

    def sample(sampler: EngineSampler, requests: Sequence[SampleRequest]) -> list[Completion]:
        params = [dataclasses.replace(request.sampling, temperature=temperature) for request in requests]
        return original(
            sampler, [dataclasses.replace(r, sampling=p) for r, p in zip(requests, params, strict=True)]
        )  # fmt: skip

    with mock.patch.object(EngineSampler, "sample", sample):
        yield


@contextlib.contextmanager
def role_has_other_weights(role: str, folder: str) -> Iterator[None]:
    """A role starts with the weights in `folder`, whatever its path says."""

    def load(dispatch: WorkerDispatch) -> None:
        dispatch.engines[role].load_hf(folder)

    with after(WorkerDispatch, "init_model", load):
        yield


@contextlib.contextmanager
def advantages_are_off(by: float) -> Iterator[None]:
    """Every token's advantage is too large."""
    original = experience.advantages

    def too_large(recipe: Recipe, rollout: AdvantageInputs) -> tuple[Tensor, Tensor | None]:
        advantages_T, returns_T = original(recipe, rollout)
        return advantages_T + by * (rollout.mask_T != 0), returns_T

    with mock.patch.object(experience, "advantages", too_large):
        yield


@contextlib.contextmanager
def step_changes(what: str, role: str | None = None) -> Iterator[None]:
    """As for SFT (tests/trainers/cases.py); role: the only one whose steps are wrong."""
    original = WorkerDispatch.optim_step

    def optim_step(dispatch: WorkerDispatch, name: str, **options: Any) -> StepResult:
        around = cases.step_changes(what) if role in (None, name) else contextlib.nullcontext()
        with around:
            return original(dispatch, name, **options)

    with mock.patch.object(WorkerDispatch, "optim_step", optim_step):
        yield


@contextlib.contextmanager
def steps_are_counted() -> Iterator[None]:
    """The run says at its end how many optimizer steps each role's engine made."""
    counts: collections.Counter[str] = collections.Counter()

    def note(dispatch: WorkerDispatch, role: str, *_: Any, **__: Any) -> None:
        counts[role] += 1

    def say(trainer: Any, *_: Any) -> None:
        print("counted:", json.dumps(counts))

    with before(WorkerDispatch, "optim_step", note), after(ppo, "loop", say):
        yield


@contextlib.contextmanager
def old_log_probs_come_first() -> Iterator[None]:
    """Every rollout gets a forward for its old log-probs, also one whose only step would give them."""
    with mock.patch.object(updates, "step_gives_old_log_probs", lambda *_: False):
        yield


@contextlib.contextmanager
def forwards_are_counted(stop_after: int | None = None) -> Iterator[None]:
    """The run says at its end how many rollouts got forwards of which role. stop_after: a signal comes once so many have."""
    counts: collections.Counter[str] = collections.Counter()

    def note(dispatch: WorkerDispatch, role: str, *_: Any, **__: Any) -> None:
        counts[role] += 1

    def stop(*_: Any, **__: Any) -> None:
        counts["rollouts"] += 1
        if counts["rollouts"] == stop_after:
            os.kill(os.getpid(), signal.SIGTERM)

    def say(trainer: Any, *_: Any) -> None:
        print("counted:", json.dumps(counts))

    with before(experience, "forward", note), after(ppo, "prepare", stop), after(ppo, "loop", say):
        yield


@contextlib.contextmanager
def signal_in_evaluation(step: int) -> Iterator[None]:
    """SIGTERM when the evaluation after `step` begins."""
    with before(Evaluation, "run", lambda _, at: at == step and os.kill(os.getpid(), signal.SIGTERM)):
        yield


@contextlib.contextmanager
def after(owner: Any, name: str, then: Callable[..., Any]) -> Iterator[None]:
    """Calls `then` with the same arguments after each call of `owner.name`."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    with mock.patch.object(owner, name, both):
        yield


@contextlib.contextmanager
def reward_model_fails(step: int) -> Iterator[None]:
    """The reward model gives no number, once, as the rollout after `step` steps is scored."""
    now = {"step": 0, "failed": False}

    def note(trainer: Any, *_: Any) -> None:
        now["step"] = trainer.progress.step

    def fail(*_: Any) -> None:
        if now["step"] == step and not now["failed"]:
            now["failed"] = True
            raise RewardError("reward.model.path: gives nan")

    with before(ppo, "take_launched", note), before(RewardModel, "score", fail):
        yield


def steps_take(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Each step takes so much longer."""
    return before(ppo, "one_step", lambda *_: time.sleep(seconds))


@contextlib.contextmanager
def killed_at(step: int, pid: int | None = None, name: str = "SIGKILL") -> Iterator[None]:
    """A signal to a process as `step` begins to train. pid: None is this process."""

    def at_step(trainer: Any, *_: Any) -> None:
        if trainer.progress.step + 1 == step and trainer.dispatch.is_main:
            os.kill(os.getpid() if pid is None else pid, getattr(signal, name))

    with before(ppo, "one_step", at_step):
        yield


@contextlib.contextmanager
def server_comes_back(step: int, pid: int, url: str, at: int) -> Iterator[None]:
    """A server's process ends as `step` begins to train. As step `at` does, the run waits for another one at its url."""

    def wait(trainer: Any, *_: Any) -> None:
        client = HttpClient(url, timeout_s=60)
        while trainer.progress.step + 1 == at and not client.is_reached():
            time.sleep(0.1)

    with killed_at(step, pid), before(ppo, "one_step", wait):
        yield


@contextlib.contextmanager
def hurried_at(step: int, pid: int) -> Iterator[None]:
    """The servers of process `pid` hang as `step` begins to train, and SIGTERM comes twice."""

    def at_step(trainer: Any, *_: Any) -> None:
        if trainer.progress.step + 1 == step and trainer.dispatch.is_main:
            os.kill(pid, signal.SIGSTOP)
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    with before(ppo, "one_step", at_step), mock.patch.object(signals, "APART_S", 0.2):
        yield


@contextlib.contextmanager
def server_ends_at_sync(step: int, pid: int) -> Iterator[None]:
    """The servers of process `pid` end as they are about to get the weights that `step` is the first to change."""
    now: set[bool] = set()

    def at_take(trainer: Any, *_: Any) -> None:
        if trainer.progress.step + 1 == step:
            now.add(True)

    def at_sync(*_: Any) -> None:
        if now:
            os.kill(pid, signal.SIGKILL)

    with before(ppo, "take_launched", at_take), before(Fleet, "send", at_sync):
        yield


@contextlib.contextmanager
def hurried_at_take(step: int) -> Iterator[None]:
    """The rollout that `step` is the first to train on gets no answers. SIGTERM comes twice as the trainer waits for it,
    once those after it are whole."""

    def hang(server: VLLMServer, request: SampleRequest, **_: Any) -> None:
        if request.key.step == step:
            server.http.post("/hang", tries=1)

    def hurry(launched: LaunchedRollouts) -> None:
        if launched._launched[0].iteration * launched._steps + 1 == step:
            for later in list(launched._launched)[1:]:
                later.future.result()
            os.kill(os.getpid(), signal.SIGTERM)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()

    take = before(VLLMServer, "complete", hang), before(LaunchedRollouts, "_wait", hurry)
    with take[0], take[1], mock.patch.object(signals, "APART_S", 0.2):
        yield


@contextlib.contextmanager
def weights_come_between_turns(first: int) -> Iterator[None]:
    """Later turns of a rollout wait until the servers have got weights since its launch. first: the step of the first
    rollout that is under way when they do."""
    came, heard = threading.Condition(), set[SamplingKey]()
    count, at_launch = collections.Counter[str](), dict[int, int]()

    def launch(launched: LaunchedRollouts, iteration: int, made: int) -> None:
        at_launch[iteration * launched._steps + 1] = count["came"]

    def sent(*_: Any) -> None:
        with came:
            count["came"] += 1
            came.notify_all()

    def wait(sampler: FleetSampler, requests: Sequence[SampleRequest]) -> None:
        step, keys = requests[0].key.step, {request.key for request in requests}
        if sampler is sampler._fleet.samplers[0] or step < first:  # of an evaluation; or taken before weights come
            return
        if keys & heard:
            with came:
                assert came.wait_for(lambda: count["came"] > at_launch[step], 60), "no weights have come"
        heard.update(keys)

    with before(LaunchedRollouts, "launch", launch), after(Fleet, "send", sent), before(FleetSampler, "sample", wait):
        yield


HAPPENINGS: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    each.__name__: each
    for each in (
        critic_is_exported, sampler_is_off, role_has_other_weights, advantages_are_off, steps_are_counted,
        old_log_probs_come_first, forwards_are_counted, signal_in_evaluation, step_changes,
        killed_at, hurried_at, hurried_at_take, server_ends_at_sync, server_comes_back, steps_take, reward_model_fails,
        weights_come_between_turns,
    )
}  # fmt: skip
