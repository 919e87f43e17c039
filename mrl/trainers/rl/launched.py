"""Rollouts that servers sample while the trainer trains: `rollout.async_level`.

At level n the rollout of iteration i is sampled whole, in order, with the weights after iteration i - 1 - n (those of
the start while that is negative), and is never dropped. So its noise, its prompts and its weights follow from its
number, and nothing depends on when it arrives.

One thread of the main process samples and scores. It makes no collective call. `LaunchedRollouts` is called on every
rank, by the thread that trains.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.data.prompts import Prompt, PromptSource
from mrl.rewards.scorer import Scores
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Trajectory
from mrl.rollout.kept import trajectory_from_state, trajectory_state
from mrl.rollout.servers import ServerSampler
from mrl.trainers.rl.collect import Collector, ScoredRollout

REPORT_S = 60.0
"""How often a wait for a rollout says what it waits for."""


@dataclasses.dataclass(frozen=True)
class LaunchedRollout:
    """A rollout that is whole."""

    rollout: ScoredRollout
    iteration: int  # that trains on it, from 0
    made: int  # optimizer steps behind its weights
    counts: list[int]  # prompts of each call of `PromptSource.take`
    metrics: Mapping[str, float]  # of the source after it
    ended_s: float  # when it was whole, by time.perf_counter


@dataclasses.dataclass
class _Launch:
    iteration: int
    made: int
    position: Mapping[str, Any]  # of the source before its prompts
    future: concurrent.futures.Future[LaunchedRollout] = dataclasses.field(default_factory=concurrent.futures.Future)


class LaunchedRollouts:
    """Samples rollouts ahead of training, in the order of their iterations.

    make_collector: is given what takes prompts, on the main process. sampler: of servers. steps: optimizer steps of an
    iteration. say: shows a line to the user.
    """

    def __init__(
        self,
        source: PromptSource,
        make_collector: Callable[[Callable[[int], list[Prompt]]], Collector],
        *,
        sampler: ServerSampler,
        steps: int,
        dispatch: WorkerDispatch,
        say: Callable[[str], None],
    ) -> None:
        self._source, self._sampler, self._steps, self._say = source, sampler, steps, say
        self._is_main, self._on_main = dispatch.is_main, dispatch.on_main
        self._collector = make_collector(self._take_prompts) if self._is_main else None
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "rollouts")
        self._launched: collections.deque[_Launch] = collections.deque()  # on the main process
        self._iterations: collections.deque[int] = collections.deque()  # of these, on every rank
        self._counts: list[int] = []
        self._idle_since_s: float | None = None
        self._idle_s = self._wait_s = self._save_wait_s = 0.0

    def _take_prompts(self, count: int) -> list[Prompt]:
        prompts = self._source.take(count)
        self._counts.append(count)
        return prompts

    # ------------------------------------------------------------------------------------------------ launch and take

    @property
    def in_flight(self) -> bool:
        """Whether a rollout is launched that is not trained on, so that servers need its weights."""
        return bool(self._iterations)

    def is_launched(self, iteration: int) -> bool:
        return iteration in self._iterations

    def launch(self, iteration: int, made: int) -> None:
        """Begins to sample the rollout of an iteration, with the weights after `made` steps, which the servers have."""
        assert not self._iterations or iteration == self._iterations[-1] + 1, "rollouts are launched in order"
        self._iterations.append(iteration)
        if self._is_main:
            if self._idle_since_s is not None:
                self._idle_s += time.perf_counter() - self._idle_since_s
            # Nothing else is launched that could move the source meanwhile.
            launch = _Launch(iteration, made, self._source.state_dict())
            launch.future = self._pool.submit(self._collect, iteration, made)
            self._launched.append(launch)

    def _collect(self, iteration: int, made: int) -> LaunchedRollout:
        assert self._collector is not None, "another process than the main one does not sample"
        self._counts = []
        prompts = self._take_prompts(self._collector.prompts)
        rollout = self._collector.collect(prompts, iteration * self._steps + 1, made)
        return LaunchedRollout(rollout, iteration, made, self._counts, self._source.metrics, time.perf_counter())

    def wait(self, iteration: int) -> LaunchedRollout:
        """Returns the rollout of an iteration when it is whole; it stays launched until `trained`.

        Raises the UserError that ended it.
        """
        assert self._iterations[0] == iteration, f"iteration {iteration} is not the next one"
        return self._on_main(self._wait)

    def _wait(self) -> LaunchedRollout:
        began_s, future = time.perf_counter(), self._launched[0].future
        while not future.done():
            concurrent.futures.wait([future], REPORT_S)
            if not future.done():
                waited_s = time.perf_counter() - began_s
                self._say(f"the next rollout is not whole after {waited_s:.0f} s: {self._sampler.fleet.waits_for()}")
        self._wait_s += time.perf_counter() - began_s
        launched = future.result()
        self._idle_since_s = launched.ended_s
        return launched

    def trained(self) -> None:
        """Drops the oldest rollout: what training needs of it is kept elsewhere from now on."""
        self._iterations.popleft()
        if self._is_main:
            self._launched.popleft()

    def take_metrics(self, launched: LaunchedRollout) -> dict[str, float]:
        """Returns metrics of a rollout, with seconds since the last call: of the trainer's waits, for saves too, and of
        the servers' between two rollouts."""
        row = {"perf/rollout_wait_s": self._wait_s, "perf/servers_idle_s": self._idle_s}
        row["rollout/weights_step"] = launched.made
        row["rollout/staleness"] = launched.iteration - launched.made / self._steps
        if self._is_main:
            row["rollout/probe_gap"] = self._sampler.fleet.probe_gap
        if self._save_wait_s:
            row["perf/save_wait_s"] = self._save_wait_s
        self._wait_s = self._idle_s = self._save_wait_s = 0.0
        return {**launched.metrics, **row}

    # --------------------------------------------------------------------------------------------------- checkpoints

    def position(self) -> Mapping[str, Any]:
        """Returns the source's position for a checkpoint: before the first launched rollout that an error has ended.

        Waits until all are whole.
        """
        began_s = time.perf_counter()
        concurrent.futures.wait([launch.future for launch in self._launched])
        self._save_wait_s += time.perf_counter() - began_s
        for launch in self._launched:
            if launch.future.exception() is not None:
                return launch.position
        return self._source.state_dict()

    def state_dict(self) -> list[dict[str, Any]]:
        """Returns the launched rollouts that are whole, on the main process; none on other ranks.

        Waits for them. The first that an error has ended, and those after it, are not among them.
        """
        states: list[dict[str, Any]] = []
        for launch in self._launched:
            if launch.future.exception() is not None:
                break
            whole = launch.future.result()
            states.append(
                {
                    "iteration": whole.iteration, "made": whole.made, "position": dict(launch.position),
                    "counts": whole.counts, "metrics": dict(whole.metrics), "rollout": _rollout_state(whole.rollout),
                }
            )  # fmt: skip
        return states

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes the rollouts of a checkpoint, and reads their prompts again. The source stands behind them then."""
        self._iterations.extend(state["iteration"] for state in states)
        self._on_main(lambda: self._load(states))

    def _load(self, states: Sequence[Mapping[str, Any]]) -> None:
        for state in states:
            self._source.load_state_dict(state["position"])
            prompts = [prompt for count in state["counts"] for prompt in self._source.take(count)]
            rollout = _rollout_from_state(state["rollout"], {prompt.index: prompt for prompt in prompts})
            whole = LaunchedRollout(
                rollout, state["iteration"], state["made"], state["counts"], state["metrics"], time.perf_counter()
            )
            launch = _Launch(whole.iteration, whole.made, state["position"])
            launch.future.set_result(whole)
            self._launched.append(launch)

    def close(self) -> None:
        """Ends the thread, and the requests that it waits for."""
        while any(not launch.future.done() for launch in self._launched):
            self._sampler.fleet.abort()
            concurrent.futures.wait([launch.future for launch in self._launched], 0.1)
        self._pool.shutdown()


Samples = tuple[list[Trajectory], Scores]


def _rollout_state(rollout: ScoredRollout) -> dict[str, Any]:
    """Returns plain data and tensors. Rows of prompts are not in it: they are read again."""
    state = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    trained = (state.pop("trajectories"), state.pop("scores"))
    parts = {"trained": trained, "rejected": state.pop("rejected"), "greedy": state.pop("greedy")}
    return state | {name: _samples_state(samples) for name, samples in parts.items()}


def _samples_state(samples: Samples) -> dict[str, Any]:
    trajectories, scores = samples
    return {
        "trajectories": [trajectory_state(t) | {"index": t.prompt.index} for t in trajectories],
        "scores": {"totals": scores.totals, "parts": dict(scores.parts), "faults": scores.faults},
    }


def _rollout_from_state(state: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> ScoredRollout:
    fields = dict(state)
    trajectories, scores = _samples_from_state(fields.pop("trained"), prompts)
    for name in ("rejected", "greedy"):
        fields[name] = _samples_from_state(fields[name], prompts)
    return ScoredRollout(trajectories=trajectories, scores=scores, **fields)


def _samples_from_state(state: Mapping[str, Any], prompts: Mapping[int, Prompt]) -> Samples:
    trajectories = [
        trajectory_from_state({n: v for n, v in each.items() if n != "index"}, prompts[each["index"]])
        for each in state["trajectories"]
    ]
    return trajectories, Scores(**state["scores"])
