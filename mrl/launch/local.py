"""Starts and supervises the processes of a run on this machine, through torch elastic.

Three things hold whatever happens:

- No process is left when the launcher is gone.
- All ranks end within seconds of the first failure, and its error alone is shown.
- SIGTERM and SIGUSR1 reach every rank, so that it saves and stops.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous import registry as rendezvous_registry

from mrl.config.command import Config
from mrl.config.load import to_dict
from mrl.errors import Stopped, UserError, unwritable
from mrl.launch.environment import loopback
from mrl.launch.worker import Outcome, Task, log_path, read_outcomes, warnings_in
from mrl.trainers.signals import APART_S

GRACE_S = 5.0
"""How long the other ranks may clean up after one failed, or all of them after Ctrl-C, before they are killed."""

POLL_S = 0.1

C = TypeVar("C")


class RankFailed(Exception):
    """A rank ended by a fault of ours or was killed; the message is its traceback or says what killed it."""


def run_here(target: Callable[[C, str], object], config: C, command_line: str, *, log_dir: Path | None = None) -> None:
    """Runs `target(config, command_line)` as the only rank, in this process. It has nobody to meet, and so no port.

    log_dir: where Python warnings go; None drops them.
    """
    dropped = warnings.catch_warnings(action="ignore")
    with _environment(_unless_set(loopback())), dropped if log_dir is None else warnings_in(log_path(log_dir, rank=0)):
        target(config, command_line)


def launch(
    target: str, config: Any, command_line: str, nproc: int, *, log_dir: Path | None = None, quiet: bool = False
) -> None:
    """Runs `target` (`module:function`) in `nproc` processes, as `function(config, command_line)`, and waits for them.

    - config: of a training command, or any frozen dataclass of keys in a module
    - log_dir: for the output of ranks above 0 and of libraries; None is a temporary one, kept if a rank failed
    - quiet: rank 0 does not print its progress of loading

    Raises UserError or Stopped where the ranks did, RankFailed with the first failing rank's error, and
    KeyboardInterrupt after Ctrl-C. No process is left in any case. Call it in the main thread.
    """
    with tempfile.TemporaryDirectory(prefix="mrl_launch_") as name, _logs(log_dir) as logs:
        folder = Path(name)
        root = f"{type(config).__module__}:{type(config).__qualname__}"
        task = Task(target, root, to_dict(config), command_line, quiet, str(logs), os.getpid())
        (folder / "task.json").write_text(json.dumps(dataclasses.asdict(task)), encoding="utf-8")
        group = _ProcessGroup(nproc, folder)
        with _environment(_worker_variables()):
            result = group.run()
        _raise_first_failure(
            read_outcomes(folder), result, logs, group.forwarded, resumes=hasattr(config, "checkpoint")
        )


def logs_of(config: Config) -> Path:
    """Returns the folder of a run's logs, which is there then."""
    log_dir = Path(config.output_dir).absolute() / "logs"
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable(config.output_dir, log_dir, error) from None
    return log_dir


@contextlib.contextmanager
def _logs(log_dir: Path | None) -> Iterator[Path]:
    """Yields the folder of the logs: the given one, or a temporary one, which stays if a rank failed."""
    if log_dir is not None:
        yield log_dir
        return
    made = Path(tempfile.mkdtemp(prefix="mrl_logs_"))
    try:
        yield made
    except RankFailed:
        raise
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    shutil.rmtree(made, ignore_errors=True)


class _ProcessGroup:
    """The worker processes and what the launcher does to them from signal handlers and the watching thread."""

    def __init__(self, nproc: int, folder: Path) -> None:
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
        self.folder = folder
        self.forwarded: int | None = None
        self._forwarded_s = 0.0
        self.agent = _make_agent(nproc, folder)
        self.finished = threading.Event()

    def run(self) -> RunResult | None:
        """Returns the agent's result; None where the agent was told to end by a signal."""
        watcher = threading.Thread(target=self._end_all_after_failure, daemon=True)
        try:
            with _signal_handlers(
                {signal.SIGTERM: self._forward, signal.SIGUSR1: self._forward, signal.SIGINT: self._interrupt}
            ):
                watcher.start()
                return self.agent.run()
        except SignalException:
            return None
        finally:
            self.finished.set()
            self._kill_all()
            self.agent.get_worker_group().spec.rdzv_handler.shutdown()

    def pids(self) -> list[int]:
        """Returns process ids of the workers; none before they are started. Each leads a process group of its own."""
        return [worker.id for worker in self.agent.get_worker_group().workers if isinstance(worker.id, int)]

    def _forward(self, signum: int, frame: object) -> None:
        """Sends a stop signal to every rank, and another one if it comes later than schedulers repeat themselves."""
        now_s = time.monotonic()
        if self.forwarded is not None and now_s - self._forwarded_s < APART_S:
            return
        pids = self.pids()
        if not pids:
            raise SystemExit(128 + signum)
        if self.forwarded is None:
            self.forwarded, self._forwarded_s = signum, now_s
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)

    def _interrupt(self, signum: int, frame: object) -> None:
        """Sends Ctrl-C to the ranks, and gives them a moment to clean up."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline and any(map(_is_running, self.pids())):
            time.sleep(POLL_S)
        self._kill_all()
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a killed progress bar leaves the cursor hidden
        raise KeyboardInterrupt

    def _end_all_after_failure(self) -> None:
        """Kills all ranks after one failed and a grace period, because they wait for it in vain."""
        while not self.finished.wait(POLL_S):
            ended = [rank for rank, pid in enumerate(self.pids()) if not _is_running(pid)]
            # read after looking at the processes: one that ends in between has written its outcome before
            outcomes = {outcome.rank: outcome.kind for outcome in read_outcomes(self.folder)}
            if any(rank not in outcomes for rank in ended) or any(
                kind in ("user", "fault") for kind in outcomes.values()
            ):
                self.finished.wait(GRACE_S)
                self._kill_all()
                return

    def _kill_all(self) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _make_agent(nproc: int, folder: Path) -> LocalElasticAgent:
    rendezvous = RendezvousParameters(
        backend="c10d",
        endpoint="localhost:0",
        run_id=uuid.uuid4().hex,
        min_nodes=1,
        max_nodes=1,
        local_addr="127.0.0.1",
    )
    here = "" in sys.path or os.getcwd() in sys.path
    spec = WorkerSpec(
        role="mrl",
        local_world_size=nproc,
        entrypoint=sys.executable,
        args=(*(() if here else ("-P",)), "-u", "-m", "mrl.launch.worker", str(folder)),
        rdzv_handler=rendezvous_registry.get_rendezvous_handler(rendezvous),
        max_restarts=0,
        monitor_interval=POLL_S,
        local_addr="127.0.0.1",
    )
    return LocalElasticAgent(spec, logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")))


def _raise_first_failure(
    outcomes: list[Outcome], result: RunResult | None, log_dir: Path, forwarded: int | None, *, resumes: bool
) -> None:
    """Raises what ended the run, if it was not the end of its work. resumes: it trains, and so saves checkpoints.

    A UserError is shown first, then a killed rank, then a traceback. This is because the ranks left behind fail too, on
    broken connections.
    """
    for outcome in outcomes:
        if outcome.kind == "user":
            raise UserError(outcome.text)
    killed = _killed_ranks(result)
    stopped = any(outcome.kind == "stopped" for outcome in outcomes)
    if forwarded is not None and forwarded in killed.values() and not stopped:
        raise SystemExit(128 + forwarded)  # it came before training began: there is nothing to save
    for rank, signum in killed.items():
        if signum == signal.SIGTERM:
            continue  # how torch elastic ends the ranks that are left
        name = signal.Signals(signum).name
        memory = " (out of memory?)" if signum == signal.SIGKILL else ""
        advice = "; the same command goes on from the last checkpoint, if there is one" if resumes else ""
        raise RankFailed(f"rank {rank} was killed by {name}{memory}{advice}; its log is {log_path(log_dir, rank)}")
    for outcome in outcomes:
        if outcome.kind == "fault":
            raise RankFailed(
                f"rank {outcome.rank} failed, the others were stopped; logs are in {log_dir}\n{outcome.text}"
            )
    if any(outcome.kind == "interrupted" for outcome in outcomes):
        raise KeyboardInterrupt
    if result is None or result.is_failed():
        codes = {} if result is None else {rank: failure.exitcode for rank, failure in result.failures.items()}
        raise RankFailed(f"the processes ended without saying why (exit codes by rank: {codes}); logs are in {log_dir}")
    for outcome in outcomes:
        if outcome.kind == "stopped":
            raise Stopped(outcome.text)


def _killed_ranks(result: RunResult | None) -> dict[int, int]:
    """Returns rank -> signal of the ranks that a signal ended first. Later ones get our own SIGKILL."""
    if result is None or not result.failures:
        return {}
    first = min(failure.timestamp for failure in result.failures.values())
    return {
        rank: -failure.exitcode
        for rank, failure in sorted(result.failures.items())
        if failure.exitcode < 0 and failure.timestamp <= first + 1
    }


def _worker_variables() -> dict[str, str]:
    """Returns defaults for the processes' environment. Variables of the user stay."""
    # Only SIGQUIT is left to torch: the handlers here do better, and SIGHUP must stay ignored under nohup.
    return _unless_set({"OMP_NUM_THREADS": "1"} | loopback()) | {"TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}


def _unless_set(defaults: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in defaults.items() if name not in os.environ}


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def _signal_handlers(handlers: Mapping[int, Callable[[int, object], None]]) -> Iterator[None]:
    before = {signum: signal.signal(signum, handler) for signum, handler in handlers.items()}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
