"""Whether a run may use its output_dir: looked at before PyTorch is loaded, and by the run itself under its lock."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Callable, Mapping
from types import MappingProxyType

from mrl import metrics
from mrl.config.command import RowsRunConfig
from mrl.config.load import read_yaml, to_dict
from mrl.config.resume import check_resume, with_limits_of
from mrl.engine import atomic_checkpoint
from mrl.errors import CheckpointError, ConfigError, Shown, quoted, shortened
from mrl.weights.adapter_folder import CONFIG as ADAPTER_CONFIG
from mrl.words import pluralize

CONTINUE_FIX = "raise train.steps or train.epochs to train on, or give another output_dir"
FILES = ("config.yaml", "metrics.jsonl")
RESULTS = ("checkpoints", "hf", "samples", "wandb", "tb", "failed", "pending")


@dataclasses.dataclass(frozen=True)
class ResumePoint:
    """The checkpoint that a run resumes from."""

    message: str  # says so to the user
    is_complete: bool = False  # steps, export and log: there is nothing to do


def check(config: RowsRunConfig, lora_export: str | None) -> ResumePoint | None:
    """Raises a UserError where the run would refuse what is saved in output_dir. Returns what it goes on with. Nothing
    is downloaded.

    lora_export: `export` of the adapters; None if none train.
    """
    path = pathlib.Path(config.output_dir)
    own = find_start(path, config)
    if own is None:
        return None
    step, steps = atomic_checkpoint.validate(own).step, config.train.steps
    exported = is_exported(path / "hf", lora_export)
    if steps is not None and step >= steps and same_folder(os.path.dirname(own), str(path / "checkpoints")):
        if (exported or not config.checkpoint.export_hf) and last_is_logged(path, step):
            return ResumePoint(f"{complete_line(path, step, steps)}; {CONTINUE_FIX}", is_complete=True)
        return ResumePoint(complete_line(path, step, steps))
    return ResumePoint(f"resuming from {own}, after step {step}")


def find_start(
    path: pathlib.Path,
    config: RowsRunConfig,
    damaged: Mapping[str, str] = MappingProxyType({}),
    fetch: Callable[[str, str], str | None] | None = None,
) -> str | None:
    """Returns the checkpoint that a run in `path` starts from, by `checkpoint.resume`; None at the beginning. Raises a
    UserError where the run would overwrite another one's files.

    damaged: folders that were chosen before and found damaged when they were to be loaded, and the error of each. One
    of them is chosen again only where it was fetched again. fetch: downloads the newest checkpoint at a URL into a
    folder; without it None is returned in place of that.
    """
    refuse_foreign(path)
    resume, checkpoints = config.checkpoint.resume, str(path / "checkpoints")
    if resume == "never":
        refuse_used(path)
        return None
    own = atomic_checkpoint.find_checkpoint(checkpoints, but=damaged)
    if own is not None:
        check_same_run(path, config, own)
        return own
    if resume != "auto" and "://" not in resume:
        own = atomic_checkpoint.find_checkpoint(resume, but=damaged)
        if own is None:
            raise no_checkpoint(resume, [*atomic_checkpoint.damage(resume), *damaged.values()])
        return own
    url = config.checkpoint.remote if resume == "auto" else resume
    if url is not None and fetch is None:
        return None
    own = None if url is None or fetch is None else fetch(url, checkpoints)
    if own is None and resume != "auto":
        raise no_checkpoint(resume, [])
    if own is None:
        refuse_damaged(path, damaged)
    return own


def complete_line(path: pathlib.Path, step: int, steps: int) -> str:
    """Returns the line on a run that has made all its steps."""
    made = f"{step} of {pluralize(steps, 'step')} {'is' if step == 1 else 'are'} made"
    if step > steps:
        made = f"it has made {pluralize(step, 'step')}, and this config asks for {steps}"
    return f"the run in {path} is complete: {made}"


def is_exported(hf: pathlib.Path, lora_export: str | None) -> bool:
    """Returns whether a run has left the export that its config names. lora_export: of adapters; None if none train."""
    return hf.exists() and (lora_export is None or (hf / ADAPTER_CONFIG).exists() == (lora_export == "adapter"))


def last_is_logged(path: pathlib.Path, step: int) -> bool:
    """Returns whether the log has the line of `step`, the last one made. A run with data.eval needs its evaluation
    there."""
    last = metrics.last_line(path / "metrics.jsonl")
    if last is None or last["step"] != step:
        return last is None or last["step"] != step - 1
    before = read_yaml(path / "config.yaml") if (path / "config.yaml").exists() else {}
    return (before.get("data") or {}).get("eval") is None or any(name.startswith("eval/") for name in last)


def files_of_run(path: pathlib.Path) -> list[str]:
    """Returns names of what a run of mrl has left in `path`."""
    return [name for name in (*FILES, *RESULTS) if (path / name).exists()]


def refuse_used(path: pathlib.Path) -> None:
    """Raises ConfigError if a run without a resume would overwrite another one's files."""
    if names := files_of_run(path):
        raise ConfigError(
            "checkpoint.resume",
            "never",
            f"would overwrite the run in {path} ({', '.join(names)})",
            "give another output_dir, remove that one, or set checkpoint.resume to auto",
        )


def refuse_damaged(path: pathlib.Path, damaged: Mapping[str, str]) -> None:
    """Checkpoints of which none is whole: a start from the beginning would overwrite them and metrics.jsonl."""
    checkpoints = path / "checkpoints"
    if found := [*atomic_checkpoint.damage(str(checkpoints)), *damaged.values()]:
        raise CheckpointError(
            f"{'; '.join(found)}; no checkpoint in {checkpoints} is whole: put one back, remove that folder to "
            "start from the beginning, or give another output_dir"
        )


def check_rights(folder: pathlib.Path) -> None:
    """Raises ConfigError where this user may not read a checkpoint: an older one would be gone on from."""
    for step in sorted((folder / "checkpoints").glob("step_*")):
        for path, right in ((step, os.R_OK | os.X_OK), (step / atomic_checkpoint.MARKER, os.R_OK)):
            if path.exists() and not os.access(path, right):
                why = f"has {path.relative_to(folder)} that this user may not read"
                fix = "give this user the right, move it away, or give another output_dir"
                raise ConfigError("output_dir", quoted(str(folder)), why, fix)


def refuse_foreign(path: pathlib.Path) -> None:
    """Raises ConfigError for a folder that this user may not read, or whose config.yaml or checkpoints are not ours."""
    check_rights(path)
    if os.path.lexists(path / "checkpoints") and not (path / "checkpoints").is_dir():
        why = "has checkpoints that is no folder, or a link to one that is not there"
        raise ConfigError("output_dir", quoted(str(path)), why, "put that folder back, or give another output_dir")
    config = path / "config.yaml"
    if config.exists() and not config.read_text(encoding="utf-8", errors="replace").startswith("# Written by mrl"):
        raise ConfigError(
            "output_dir",
            quoted(str(path)),
            "holds a config.yaml that mrl did not write and would overwrite",
            "give a folder of its own, as in runs/demo",
        )


def check_same_run(path: pathlib.Path, config: RowsRunConfig, newest: str) -> None:
    """Refuses another run's directory: another config than its config.yaml, or a start from another checkpoint."""
    file, now = path / "config.yaml", to_dict(config)
    before = read_yaml(file) if file.exists() else now
    if file.exists() and _is_older(pathlib.Path(newest) / atomic_checkpoint.MARKER, file):
        # A start that has saved nothing wrote the file. The run compares the limits with those of the checkpoint.
        before = with_limits_of(before, now, type(config))
    check_resume(before, now)
    resume = config.checkpoint.resume
    began_from = before.get("checkpoint", {}).get("resume")
    if resume not in ("auto", began_from) and not same_folder(resume, newest):
        raise ConfigError(
            "checkpoint.resume",
            quoted(resume),
            f"is not the newest checkpoint of the run in {path}, which is {newest}",
            "give another output_dir to start from it, or set checkpoint.resume to auto to go on with that run",
        )


def _is_older(one: pathlib.Path, other: pathlib.Path) -> bool:
    return one.stat().st_mtime < other.stat().st_mtime


def no_checkpoint(resume: str, wrong: list[str]) -> CheckpointError:
    why = "is no folder"
    if "://" in resume or os.path.isdir(resume):
        why = "holds no whole checkpoint" + "".join(f" ({what})" for what in wrong)
    fix = f"give auto, never, or a folder such as runs/demo/checkpoints/{atomic_checkpoint.step_name(100)}"
    return CheckpointError("checkpoint.resume", Shown(repr(shortened(resume, 200))), why, fix)


def same_folder(a: str, b: str) -> bool:
    return os.path.realpath(a) == os.path.realpath(b)
