"""Jobs as Slurm's own commands describe them: sbatch, squeue, scontrol and scancel; accounting is not needed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.errors import ConfigError

END_STATES = (
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
)
RECORDS = "jobs.jsonl"
"""In a run's slurm/: one object a submitted job."""

_FIELD = re.compile(r" (?=[A-Z][A-Za-z/:]*=)")
_WHOLE = re.compile(r"(?:^| )((?:StdOut|StdErr|StdIn|WorkDir|Command|JobName|Comment)=.*)$")
"""What the user writes ends its line, and may look like more fields."""


def call(*command: str) -> str:
    """Returns what a command of Slurm prints. Raises ConfigError where it refuses, with all it says, or is not here.

    SBATCH_* variables of the caller's shell are left out: sbatch puts them over the script's #SBATCH lines.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith("SBATCH_")}
    try:
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environ)
    except FileNotFoundError:
        raise ConfigError(
            command[0],
            why="is not on the PATH",
            fix="run this on a machine with Slurm's commands, or use `mrl slurm render`",
        ) from None
    if done.returncode:
        raise SlurmError(
            f"{command[0]}: {done.stderr.strip() or done.stdout.strip() or f'exit code {done.returncode}'}"
        )
    return done.stdout


class SlurmError(ConfigError):
    """A command of Slurm refused."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A job, or a task of an array, that Slurm knows."""

    id: str
    fields: Mapping[str, str]  # of `scontrol show job`

    @property
    def state(self) -> str:
        return self.fields.get("JobState", "UNKNOWN")

    @property
    def ended(self) -> bool:
        return self.state in END_STATES

    @property
    def slurm_dir(self) -> pathlib.Path | None:
        """The run's folder of scripts and logs; None where the job is not of `mrl slurm`."""
        return next((folder for folder in self._folders if (folder / RECORDS).is_file()), None)

    def is_of(self, slurm_dir: pathlib.Path) -> bool:
        """Returns whether the job writes to that folder. A record of its id is not enough:

        - A copy of the folder has the record too.
        - Slurm may have given the id to another job since.
        """
        for folder in self._folders:
            with contextlib.suppress(OSError):
                if folder.samefile(slurm_dir):
                    return True
        return False

    @property
    def _folders(self) -> list[pathlib.Path]:
        """The folders of its log and of its script. A template of the user may put the log elsewhere."""
        log = self.fields.get("StdOut", "")
        names = (log, log.replace("%%", "%"), self.fields.get("Command", ""))  # Slurm shows the log's pattern
        return [pathlib.Path(name).parent for name in names if name.startswith("/")]


def known(job_id: str) -> list[Job]:
    """Returns the job, or the tasks of the array, as Slurm knows them; none where it does not any more."""
    try:
        text = call("scontrol", "show", "job", job_id)
    except SlurmError as error:
        if "Invalid job id" in str(error):
            return []
        raise
    jobs = [_parse(part) for part in re.split(r"^(?=JobId=)", text, flags=re.MULTILINE) if part.startswith("JobId=")]
    jobs = [job for job in jobs if job.fields.get("HetJobOffset", "0") == "0"]  # the other parts end with the first
    return sorted(jobs, key=_task_number)


def known_of(slurm_dir: pathlib.Path, job_id: str) -> list[Job]:
    """Returns the job, or the tasks of the array, without those of another folder; none if Slurm forgot them."""
    return [job for job in known(job_id) if job.is_of(slurm_dir)]


def _task_number(job: Job) -> int:
    """Returns the first number of a task. Slurm shows tasks that have not begun as a range, `4-7`, in one job."""
    match = re.match(r"\d+", job.fields.get("ArrayTaskId", ""))
    return int(match[0]) if match else 0


def _parse(text: str) -> Job:
    fields: dict[str, str] = {}
    for line in text.splitlines():
        whole = _WHOLE.search(line)
        fields |= _fields(line[: whole.start()] if whole else line)
        if whole:
            name, _, value = whole[1].partition("=")
            fields[name] = value
    if fields.get("ArrayTaskId"):
        return Job(f"{fields['ArrayJobId']}_{fields['ArrayTaskId']}", fields)
    return Job(fields["JobId"], fields)


def _fields(line: str) -> dict[str, str]:
    """Parses NAME=VALUE NAME=VALUE ..."""
    return dict(part.lstrip(" ").split("=", 1) for part in _FIELD.split(line) if "=" in part)


def mine() -> list[Job]:
    """Returns the user's jobs in the queue that `mrl slurm submit` has put there."""
    ids = call("squeue", "--me", "--noheader", "--format=%A").split()
    return [job for job_id in dict.fromkeys(ids) for job in known(job_id) if job.slurm_dir is not None]


def records(slurm_dir: pathlib.Path) -> list[dict[str, Any]]:
    """Returns the submitted jobs of a run, oldest first. A last line that was cut is skipped."""
    path = slurm_dir / RECORDS
    if not path.exists():
        return []
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").split("\n")[:-1], 1):
        record = None
        with contextlib.suppress(ValueError):
            record = json.loads(line)
        if not (isinstance(record, dict) and isinstance(record.get("job"), str)):
            raise ConfigError(f"{path}:{number}", why="is no record of a job", fix="delete that line")
        found.append(record)
    return found


def add_record(slurm_dir: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Adds a record, and replaces a last line that was cut."""
    path = slurm_dir / RECORDS
    whole = path.read_bytes().rpartition(b"\n")[:2] if path.exists() else ()
    with open(path, "ab") as out:
        out.truncate(sum(map(len, whole)))
        out.write(json.dumps(record).encode() + b"\n")


def in_queue(slurm_dir: pathlib.Path) -> list[Job]:
    """Returns the jobs of a run that have not ended."""
    return [job for record in records(slurm_dir) for job in known_of(slurm_dir, record["job"]) if not job.ended]


@dataclasses.dataclass(frozen=True)
class Target:
    """The job that `status`, `logs` and `cancel` are about."""

    slurm_dir: pathlib.Path  # the run's
    job_id: str
    jobs: Sequence[Job]
    """The job as Slurm knows it, the tasks of an array each; empty where it has forgotten it, or has another folder's
    of that id.
    """

    @property
    def run_dir(self) -> pathlib.Path:
        return self.slurm_dir.parent


def targets(what: str | None) -> list[Target]:
    """Returns the newest job of a run's folder, or the job of an id.

    None returns those of this folder, or else all of the user's jobs in the queue. Raises ConfigError if there is none.
    """
    if what is None:
        if (pathlib.Path("slurm") / RECORDS).is_file():
            return [_newest(pathlib.Path.cwd() / "slurm")]
        jobs_by_id = {job.fields.get("ArrayJobId", job.id): job for job in mine()}
        folders = {job_id: job.slurm_dir for job_id, job in jobs_by_id.items()}
        return [Target(folder, job_id, known(job_id)) for job_id, folder in folders.items() if folder is not None]
    if re.fullmatch(r"\d+(_\d+)?", what) and not os.path.isdir(what):
        return [_of_id(what)]
    folder = pathlib.Path(what).expanduser().absolute()
    if not (folder / "slurm" / RECORDS).is_file():
        raise ConfigError(
            what, why="no job was submitted for it by `mrl slurm submit`", fix="give another output_dir, or a job's id"
        )
    return [_newest(folder / "slurm")]


def _newest(slurm_dir: pathlib.Path) -> Target:
    submitted = records(slurm_dir)
    if not submitted:
        raise ConfigError(slurm_dir / RECORDS, why="has no record of a job", fix="give a job's id")
    job_id = submitted[-1]["job"]
    return Target(slurm_dir, job_id, known_of(slurm_dir, job_id))


def _of_id(job_id: str) -> Target:
    jobs = known(job_id)
    if not jobs:
        raise ConfigError(job_id, why="Slurm knows no such job, or no longer", fix="give the output_dir of its run")
    if jobs[0].slurm_dir is None:
        raise ConfigError(
            job_id, why="is a job, but none that `mrl slurm submit` has submitted", fix="use squeue and scancel"
        )
    return Target(jobs[0].slurm_dir, job_id, jobs)
