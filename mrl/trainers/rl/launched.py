"""Rollouts that servers sample while the trainer trains: `rollout.async_level`.

At level n the rollout of iteration i is sampled whole, in order, with the weights after iteration i - 1 - n (those of
the start while that is negative), and is never dropped. So its noise, its prompts and its weights follow from its
number, and nothing depends on when it arrives.

A thread of the main process for each launched rollout samples and scores. It makes no collective call.
`LaunchedRollouts` is called on every rank, by the thread that trains.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import numbers
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.data.prompts import Prompt, PromptSource
from mrl.errors import RewardError, UserError, first_line
from mrl.rewards.scorer import Scores
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Trajectory
from mrl.rollout.fleet import Fleet, FleetSampler
from mrl.rollout.recorded import trajectory_from_state, trajectory_state
from mrl.rollout.servers import ServerSampler
from mrl.trainers.rl.collect import Collector, ScoredRollout


@dataclasses.dataclass(frozen=True)
class LaunchedRollout:
    """A rollout that is whole."""

    rollout: ScoredRollout
    iteration: int  # that trains on it, from 0
    made: int  # optimizer steps behind its weights
    metrics: Mapping[str, float]  # of the source after it
    notes: list[str]  # on rows that were left out
    after: Mapping[str, Any]  # the source's position behind its prompts


@dataclasses.dataclass
class _Launch:
    iteration: int
    made: int
    position: Mapping[str, Any]  # of the source before its prompts
    sampler: FleetSampler | None = None  # which holds its weights; None once it is whole
    future: concurrent.futures.Future[LaunchedRollout] = dataclasses.field(default_factory=concurrent.futures.Future)


class LaunchedRollouts:
    """Samples rollouts ahead of training, in the order of their iterations.

    make_collectors: is given what takes prompts, on the main process; returns one for each of `level` rollouts.
    samplers: of groups of servers, which take turns. level: rollouts that are launched at a time. steps: optimizer
    steps of an iteration. say: shows a line to the user. hurried: whether no wait for a rollout may last.
    """

    def __init__(
        self,
        source: PromptSource,
        make_collectors: Callable[[Callable[[int], list[Prompt]]], Sequence[Collector]],
        *,
        samplers: Sequence[ServerSampler],
        level: int,
        steps: int,
        dispatch: WorkerDispatch,
        say: Callable[[str], None],
        hurried: Callable[[], bool],
    ) -> None:
        self._source, self._steps, self._say, self._hurried = source, steps, say, hurried
        self._is_main, self._on_main = dispatch.is_main, dispatch.on_main
        self.level = level
        self._dropped: Mapping[str, Any] | None = None  # the source's position before what `drop` dropped
        self._fleets: list[Fleet] = []  # on the main process, as the next one
        self._collectors: list[tuple[FleetSampler, Collector]] = []  # of iterations 0, 1, ... modulo `level`
        if self._is_main:
            self._fleets = [sampler.fleet for sampler in samplers]
            by_group = zip(*(fleet.samplers[1:] for fleet in self._fleets), strict=True)
            ahead = [sampler for one_of_each_group in by_group for sampler in one_of_each_group]
            self._collectors = list(zip(ahead, make_collectors(self._take_prompts), strict=True))
        self._pool = concurrent.futures.ThreadPoolExecutor(level, "rollouts")
        self._launched: collections.deque[_Launch] = collections.deque()  # on the main process
        self._iterations: collections.deque[int] = collections.deque()  # of these, on every rank
        self._closing = False
        self._ended_s: float | None = None  # when the last rollout was whole
        self._idle_s = self._wait_s = self._save_wait_s = 0.0

    def _take_prompts(self, count: int) -> list[Prompt]:
        if self._closing:  # between two rounds of dynamic sampling
            raise concurrent.futures.CancelledError
        return self._source.take(count)

    # ------------------------------------------------------------------------------------------------ launch and take

    @property
    def in_flight(self) -> bool:
        """Whether a rollout is launched that is not trained on, so that servers need its weights."""
        return bool(self._iterations)

    def next_iteration(self, iteration: int) -> int:
        """Returns the first of `iteration` and those after it whose rollout is not launched."""
        return self._iterations[-1] + 1 if self._iterations else iteration

    def launch(self, iteration: int, made: int) -> None:
        """Begins to sample the rollout of an iteration, with the weights after `made` steps, which are the fleet's
        newest."""
        assert iteration == self.next_iteration(iteration), "rollouts are launched in order"
        self._iterations.append(iteration)
        if self._is_main:
            if self._ended_s is not None and all(launch.future.done() for launch in self._launched):
                self._idle_s += time.perf_counter() - self._ended_s
            sampler, collector = self._collectors[iteration % self.level]
            assert sampler.held is None, "it samples another rollout"
            sampler.hold()
            launch = _Launch(iteration, made, self._source.state_dict(), sampler)
            self._launched.append(launch)
            if self.level == 1:  # dynamic sampling takes prompts of later rounds, and no other rollout does meanwhile
                launch.future = self._pool.submit(self._collect, launch, collector)
                return
            try:
                prompts = self._take_prompts(collector.prompts)
            except BaseException as error:  # which comes out when the rollout is taken, on every rank
                launch.future.set_exception(error)
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
            else:
                launch.future = self._pool.submit(self._collect, launch, collector, prompts, self._of_source())

    def _of_source(self) -> tuple[Mapping[str, float], list[str], Mapping[str, Any]]:
        return self._source.metrics, self._source.take_notes(), self._source.state_dict()

    def _collect(
        self,
        launch: _Launch,
        collector: Collector,
        prompts: list[Prompt] | None = None,
        of_source: tuple[Mapping[str, float], list[str], Mapping[str, Any]] | None = None,
    ) -> LaunchedRollout:
        if prompts is None:
            prompts = self._take_prompts(collector.prompts)
        rollout = collector.collect(prompts, launch.iteration * self._steps + 1, launch.made)
        own = self._of_source() if of_source is None else of_source
        self._ended_s = time.perf_counter()
        return LaunchedRollout(rollout, launch.iteration, launch.made, *own)

    def wait(self, iteration: int) -> LaunchedRollout | None:
        """Returns the rollout of an iteration when it is whole; it stays launched until `trained`.

        Returns None if `hurried` gave it up. Raises the UserError that ended it.
        """
        assert self._iterations[0] == iteration, f"iteration {iteration} is not the next one"
        return self._on_main(self._wait)

    def _wait(self) -> LaunchedRollout | None:
        launch = self._launched[0]
        self._wait_s += self._wait_for([launch])
        if self._closing:
            return None
        try:
            launched = launch.future.result()
        except UserError:
            raise
        except Exception as error:  # on every rank, after a save, as any other end of a rollout
            traceback.print_exception(error)
            what = f"{type(error).__name__}: {first_line(error)}"
            raise RewardError(f"the rollout of iteration {launch.iteration + 1} ended by {what}") from error
        if launch.sampler is not None:
            launch.sampler.release()
            launch.sampler = None
        return launched

    def _wait_for(self, launches: Sequence[_Launch]) -> float:
        """Waits until all are whole or ended; ends them itself when `hurried`. Returns the seconds."""
        began_s, futures = time.perf_counter(), [launch.future for launch in launches]
        while concurrent.futures.wait(futures, 1.0).not_done:
            if self._hurried():
                self._say(f"another signal: the rollout of iteration {launches[0].iteration + 1} is given up")
                self._abort()
        return time.perf_counter() - began_s

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
            row["rollout/probe_gap"] = self._fleets[launched.iteration % len(self._fleets)].probe_gap
        if self._save_wait_s:
            row["perf/save_wait_s"] = self._save_wait_s
        self._wait_s = self._idle_s = self._save_wait_s = 0.0
        return {**launched.metrics, **row}

    # --------------------------------------------------------------------------------------------------- checkpoints

    def state_to_come(self, *, holds: bool) -> Callable[[], dict[str, Any]]:
        """Returns what waits until the rollouts of now are whole, and then gives their part of a checkpoint.

        It may be called in a thread of its own. On other ranks than the main one there are no rollouts. holds: whether
        training waits for it.

        - data: the source's position before the first rollout that an error has ended, else behind all
        - launched: the rollouts that are whole, up to that one
        """
        launches = list(self._launched)
        position = self._source.state_dict() if self._dropped is None else self._dropped

        def wait() -> dict[str, Any]:
            seconds = self._wait_for(launches)
            self._save_wait_s += seconds if holds else 0.0
            broken = [launch for launch in launches if launch.future.exception() is not None]
            if launches:
                data = broken[0].position if broken else launches[-1].future.result().after
            else:
                data = position
            whole = launches[: launches.index(broken[0])] if broken else launches
            return {"data": data, "launched": [_launch_state(launch) for launch in whole]}

        return wait

    def load_state_dict(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Takes the rollouts of a checkpoint. The source is behind them."""
        self._iterations.extend(state["iteration"] for state in states)
        for state in states if self._is_main else ():
            rollout = _rollout_from_state(state["rollout"])
            of_source = state["metrics"], state["notes"], state["after"]
            whole = LaunchedRollout(rollout, state["iteration"], state["made"], *of_source)
            launch = _Launch(whole.iteration, whole.made, state["position"])
            launch.future.set_result(whole)
            self._launched.append(launch)

    def drop(self) -> None:
        """Drops what is launched: the run ends without it."""
        if self._is_main:
            self._wait_for(self._launched)
            if self._launched:
                self._dropped = self._launched[0].position
        self._launched.clear()
        self._iterations.clear()

    def close(self) -> None:
        """Ends the thread, and the requests that it waits for. May be called twice."""
        self._abort()
        self._pool.shutdown()

    def _abort(self) -> None:
        self._closing = True
        futures = [launch.future for launch in list(self._launched)]
        while any(not future.done() for future in futures):
            for fleet in self._fleets:
                fleet.abort()
            concurrent.futures.wait(futures, 0.1)
            for fleet in self._fleets:
                fleet.allow()


Samples = tuple[list[Trajectory], Scores]


def _launch_state(launch: _Launch) -> dict[str, Any]:
    """Returns what a checkpoint has of a rollout that is whole."""
    whole = launch.future.result()
    return {
        "iteration": launch.iteration,
        "made": launch.made,
        "position": dict(launch.position),
        "metrics": dict(whole.metrics),
        "notes": whole.notes,
        "rollout": _rollout_state(whole.rollout),
        "after": dict(whole.after),
    }


def _rollout_state(rollout: ScoredRollout) -> dict[str, Any]:
    """Returns plain data and tensors, rows of prompts included: the data may change before a resume."""
    state = dict(vars(rollout))
    trained = (state.pop("trajectories"), state.pop("scores"))
    parts = {"trained": trained, "rejected": state.pop("rejected"), "greedy": state.pop("greedy")}
    prompts = {t.prompt.index: t.prompt for trajectories, _ in parts.values() for t in trajectories}
    rows = [_plain(vars(prompt)) for prompt in prompts.values()]
    return state | {"prompts": rows} | {name: _samples_state(samples) for name, samples in parts.items()}


def _plain(value: Any) -> Any:
    """Returns what a checkpoint may hold: of a number of numpy its own, of a date and the like its text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    return bytes(value) if isinstance(value, bytes) else str(value)


def _samples_state(samples: Samples) -> dict[str, Any]:
    trajectories, scores = samples
    return {
        "trajectories": [_trajectory_state(t) for t in trajectories],
        "scores": {
            "totals": tuple(map(float, scores.totals)),
            "parts": {label: tuple(map(float, values)) for label, values in scores.parts.items()},
            "faults": tuple(map(str, scores.faults)),
        },
    }


def _trajectory_state(trajectory: Trajectory) -> dict[str, Any]:
    """Tokens and log-probs are a sampler's; what rows and environments put in may be of any kind."""
    state = trajectory_state(trajectory) | {"index": trajectory.prompt.index}
    return state | {name: _plain(state[name]) for name in ("prompt", "text", "reward", "conversation")}


def _rollout_from_state(state: Mapping[str, Any]) -> ScoredRollout:
    fields = dict(state)
    prompts = {row["index"]: Prompt(**row) for row in fields.pop("prompts")}
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
