"""The state and the log of a job, and how to end it. From Slurm's own commands and the run's files."""

from __future__ import annotations

import contextlib
import json
import pathlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mrl import metrics
from mrl.errors import ConfigError
from mrl.launch.slurm import jobs
from mrl.launch.slurm.checks import in_words, step_seconds
from mrl.weights.json_file import parse_json

POLL_S = 1.0
LEDGER = "ledger.jsonl"
STATUS_METRICS = ("train/loss", "reward/mean", "eval/loss", "eval/accuracy", "perf/tokens_per_s")
"""Metrics in a line of `status`, where the run has them."""


def status(target: jobs.Target) -> list[str]:
    """Returns a line for each job or task of an array, and what its run has done so far."""
    if not target.jobs:
        lines = [f"job {target.job_id}  {_why_absent(target.job_id)}", *_last_note(target, target.job_id)]
        return [*lines, *_progress(target.run_dir, running=False)]
    lines = []
    for job in target.jobs:
        lines += [
            _state(job),
            *_last_note(target, job.id),
            *_progress(run_dir_of(target, job), running=job.state == "RUNNING"),
        ]
    return lines


def run_dir_of(target: jobs.Target, job: jobs.Job) -> pathlib.Path:
    """Returns the output_dir of a job, or of a task of an array."""
    task = job.fields.get("ArrayTaskId")
    return target.run_dir if task is None else target.run_dir / f"task_{task}"


def _state(job: jobs.Job) -> str:
    fields = job.fields
    state = job.state if fields.get("Reason", "None") == "None" else f"{job.state} ({fields['Reason']})"
    if job.ended and fields.get("ExitCode", "0:0") != "0:0":
        state += f" with exit code {fields['ExitCode'].partition(':')[0]}"
    line = f"job {job.id}  {state}  {fields.get('RunTime', '?')} of {fields.get('TimeLimit', '?')}"
    line += f"  restarts {fields.get('Restarts', '0')}"
    if job.state == "PENDING" and fields.get("EligibleTime", "Unknown") not in ("Unknown", fields.get("SubmitTime")):
        line += f"  not before {fields['EligibleTime']}"
    return line + (f"  on {fields['NodeList']}" if fields.get("NodeList", "(null)") not in ("", "(null)") else "")


def _last_note(target: jobs.Target, job_id: str) -> list[str]:
    """Returns what the job's script said last."""
    path = target.slurm_dir / f"{job_id}.history"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [f"  {lines[-1]}"] if lines else []


def _progress(run_dir: pathlib.Path, *, running: bool) -> list[str]:
    """Returns the last line of metrics.jsonl, and how long the steps that are left take at the pace of the newest."""
    if _serves(run_dir / "config.yaml"):
        return [f"  {run_dir}: {_served(run_dir / LEDGER)}"]
    path = run_dir / "metrics.jsonl"
    if not path.exists() or metrics.last_line(path) is None:
        return [f"  {run_dir}: no step yet"]
    row = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
    steps = _length(run_dir / "config.yaml")
    done = f"step {row['step']:.0f}" + (f" of {steps}" if steps else "")
    shown = [f"{name} {row[name]:.4g}" for name in STATUS_METRICS if name in row]
    line = f"  {run_dir}: {', '.join([done, *shown])}"
    step_s = step_seconds(run_dir) if running and steps else None
    if steps and step_s is not None:
        line += f"; about {in_words((steps - row['step']) * step_s)} left"
    return [line]


def _serves(config: pathlib.Path) -> bool:
    """Returns whether a run is that of `mrl serve`."""
    return config.exists() and re.search(r"^serve:", config.read_text(encoding="utf-8"), re.MULTILINE) is not None


def _served(ledger: pathlib.Path) -> str:
    """Returns what a server has done, by its ledger."""
    events: dict[str, list[dict[str, Any]]] = {}
    for line in ledger.read_text(encoding="utf-8").splitlines() if ledger.exists() else ():
        with contextlib.suppress(ValueError, LookupError, TypeError):  # as of a line that broke off
            event = parse_json(line)
            events.setdefault(event["event"], []).append(event)
    models, saves = len(events.get("model", ())), events.get("saved", [])
    if not models and not saves:
        return "serves; no model yet"
    last = f", the last at {time.strftime('%F %T', time.localtime(saves[-1]['time']))}" if saves else ""
    return f"serves; {models} models so far, {len(saves)} saves{last}"


def _length(config: pathlib.Path) -> int | None:
    """Returns steps of a run, also where train.epochs sets them: its trainer notes them at the head of config.yaml."""
    if not config.exists():
        return None
    match = re.search(r"^# length: (\d+) steps$", config.read_text(encoding="utf-8"), re.MULTILINE)
    return int(match[1]) if match else None


# ----------------------------------------------------------------------------------------------------------- the log


def logs(target: jobs.Target, *, lines: int, follow: bool) -> Iterator[str]:
    """Yields text of the job's log: the first rank's error, then the last `lines` lines, and what is added.

    Ends at once, or where `follow` is on when the job has ended.
    """
    job_id = target.jobs[0].id if target.jobs else target.job_id
    if len(target.jobs) > 1:
        tasks = ", ".join(job.id for job in target.jobs)
        raise ConfigError(target.job_id, why="is an array, whose tasks have a log each", fix=f"give one of {tasks}")
    path = target.slurm_dir / f"{job_id}.log"
    while not path.exists():
        if not follow or _has_ended(target, job_id):
            raise ConfigError(path, why=f"does not exist: job {job_id} {_in_words(target, job_id)}")
        time.sleep(POLL_S)
    error = first_error(target.slurm_dir, job_id)
    if error is not None:
        yield error
    with open(path, encoding="utf-8", errors="replace") as log:
        yield "".join(log.readlines()[-lines:] if lines else [])
        while follow:
            ended = _has_ended(target, job_id)  # before the read: what was written last is read
            yield log.read()
            late = first_error(target.slurm_dir, job_id)
            if late is not None and late != error:
                yield late
                error = late
            if ended:
                return
            time.sleep(POLL_S)


def _has_ended(target: jobs.Target, job_id: str) -> bool:
    return all(job.ended for job in jobs.known_of(target.slurm_dir, job_id))


def _in_words(target: jobs.Target, job_id: str) -> str:
    found = jobs.known_of(target.slurm_dir, job_id)
    return f"is {found[0].state}" if found else _why_absent(job_id)


def _why_absent(job_id: str) -> str:
    """Returns why Slurm does not know a job as one of the folder that has its record."""
    found = jobs.known(job_id)
    if not found:
        return "ended (Slurm has forgotten it)"
    where = found[0].slurm_dir
    return f"is none of this folder (Slurm's job {job_id} is of {where.parent if where else 'another'})"


def first_error(slurm_dir: pathlib.Path, job_id: str) -> str | None:
    """Returns the error of the first failed rank in the newest start of a job; None if none failed."""
    starts = [int(path.parent.suffix[1:]) for path in slurm_dir.glob(f"{job_id}.*/began_at")]
    path = slurm_dir / f"{job_id}.{max(starts, default=0)}" / "first_end"
    if not path.exists():
        return None
    code, _, text = path.read_text(encoding="utf-8", errors="replace").partition("\n")
    if code in ("0", "75"):
        return None
    return f"first error (start {max(starts, default=0)}, exit code {code}), {text.rstrip()}\n\n"


# ---------------------------------------------------------------------------------------------------------- the end


def cancel(target: jobs.Target, *, save: bool, timeout_s: float, say: Callable[[str], None]) -> None:
    """Ends a job. save: the run saves first, and the job is ended where it has not ended itself in time."""
    left = [job for job in target.jobs if not job.ended]
    if not left:
        raise ConfigError(
            target.job_id,
            why=f"job {target.job_id} {_in_words(target, target.job_id)}",
            fix="there is nothing to cancel",
        )
    running = [job for job in left if job.state == "RUNNING"]
    if not save or not running:
        jobs.call("scancel", target.job_id)
        say(f"cancelled job {target.job_id}" + (": it was not running, there is nothing to save" if save else ""))
        return
    if len(running) < len(left):  # tasks of an array that would start in their place
        jobs.call("scancel", "--state=PENDING", target.job_id)
    for job in running:
        (target.slurm_dir / f"{job.id}.cancel").touch()
        jobs.call("scancel", "--batch", "--signal=USR1", job.id)
    say(f"job {target.job_id} is told to save and stop")
    if _wait_for_end(target, [job.id for job in running], timeout_s):
        for job in running:
            say(f"stopped job {job.id}: the newest checkpoint is {_newest(run_dir_of(target, job))}")
    else:
        say(f"job {target.job_id} has not stopped within {in_words(timeout_s)}: it is cancelled without")
    if not _has_ended(target, target.job_id):
        jobs.call("scancel", target.job_id)


def _wait_for_end(target: jobs.Target, job_ids: Sequence[str], timeout_s: float) -> bool:
    deadline = time.monotonic() + timeout_s
    while not all(_has_ended(target, job_id) for job_id in job_ids):
        if time.monotonic() > deadline:
            return False
        time.sleep(POLL_S)
    return True


def _newest(run_dir: pathlib.Path) -> str:
    path = run_dir / "checkpoints" / "latest"
    return path.read_text(encoding="utf-8").strip() if path.exists() else "none"
