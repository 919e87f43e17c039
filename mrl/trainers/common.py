"""The parts of a run around its loop: saves, going on from a checkpoint, stopping, naming the last good state."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from mrl import metrics
from mrl.config.command import RowsRunConfig
from mrl.config.schema import LoraConfig
from mrl.data.remote import SourceError
from mrl.engine import atomic_checkpoint, checkpoint_remote
from mrl.engine.background import BackgroundSaver
from mrl.engine.base import BaseEngine
from mrl.engine.guards import Problem
from mrl.engine.stored_weights import mtp_tensors_of_folder
from mrl.errors import ConfigError, DamagedCheckpoint, DataError, UserError
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.stops import EndTokens
from mrl.trainers import used_folder
from mrl.trainers.console import Console
from mrl.trainers.run_directory import RunDirectory, StartState, choose_start, copy_missed
from mrl.weights.families import family_of
from mrl.weights.hf_config import read_hf_config
from mrl.words import shorten_list


@dataclasses.dataclass
class Progress:
    """The progress of a run, which a checkpoint holds."""

    step: int = (
        0  # optimizer steps made; in `mrl ppo` mini-batches, of which the critic's warm-up trains the critic alone
    )
    tokens: float = 0.0  # trained tokens, of the actor with roles
    run_id: str = ""  # of wandb
    unlogged: dict[str, float] | None = None
    """Metrics of the last step while its evaluation has yet to be done.

    Its line in the log, if there is one, is without that, and the next start writes the line anew.
    """

    # what `mrl ppo` alone sets
    best: float | None = None  # the best value yet of checkpoint.best
    best_step: int | None = None  # the step that it came after
    moved: list[str] = dataclasses.field(default_factory=list)  # roles that have made a step with a gradient
    trained: list[str] = dataclasses.field(default_factory=list)  # roles whose every parameter has been seen to train
    exact: bool = False  # whether the training forward was found to give the old log-probs to the bit
    pending: dict[str, float] = dataclasses.field(default_factory=dict)  # metrics of a rollout that has no step yet

    def state_dict(self) -> dict[str, Any]:
        """Returns the fields as plain data."""
        return dataclasses.asdict(self)

    @property
    def logged(self) -> int:
        """Steps in the log whose lines are whole."""
        return self.step - bool(self.unlogged)


def is_due(every: int | None, step: int, last_step: int) -> bool:
    """Returns whether what comes every so many steps, and after the last one, comes after `step`."""
    return step == last_step or (every is not None and step % every == 0)


def already_done(
    dispatch: WorkerDispatch, directory: RunDirectory, console: Console, start: StartState, *, total_steps: int,
    export_hf: bool, lora: LoraConfig | None,
) -> bool:  # fmt: skip
    """Returns whether the run that `start` goes on with has made all its steps and left all its files; says what it
    found.

    lora: whose `export` says what kind of files.
    """
    if start.step < total_steps or not dispatch.on_main(lambda: used_folder.last_is_logged(directory.path, start.step)):
        console.say(start.message)
        return False
    done = used_folder.complete_line(directory.path, start.step, total_steps)
    kind = None if lora is None else lora.export
    if export_hf and not dispatch.on_main(lambda: used_folder.is_exported(directory.hf, kind)):
        console.say(f"{done}, but not its export; exporting")
        return False
    console.say(f"{done}; {used_folder.CONTINUE_FIX}")
    return True


def load_newest(
    dispatch: WorkerDispatch,
    directory: RunDirectory,
    config: RowsRunConfig,
    console: Console,
    start: StartState,
    load: Callable[[str], dict[str, Any]],
) -> tuple[StartState, dict[str, Any] | None]:
    """Loads the checkpoint of `start`.

    Returns where the run starts indeed, and the trainer's state; None at the beginning.

    A checkpoint that turns out to be damaged is passed over for an older one, as `choose_start` would have done.
    """
    damaged: dict[str, str] = {}
    state = None
    console.doing("loading the checkpoint")
    while start.checkpoint is not None and state is None:
        try:
            state = load(start.checkpoint)
        except DamagedCheckpoint as error:
            if start.checkpoint in damaged:
                raise
            damaged[start.checkpoint] = str(error)
            start = dispatch.on_main(lambda: choose_start(directory, config, damaged))
            console.say(f"passed over {error}")
            console.say(start.message)
    if state is not None:
        dispatch.on_main(lambda: copy_missed(directory, start, config.checkpoint))
    return start, state


def say_other_choices(console: Console, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    """Says which choices of engines differ from those at the save. before: empty in a checkpoint of an older mrl."""
    for name in sorted(before.keys() & now.keys()):
        if before[name] != now[name]:
            console.say(f"changed since the checkpoint: trained under {name} {before[name]}, now {now[name]}")


def say_other_ends(console: Console, state: Mapping[str, Any], ends: EndTokens) -> None:
    """Says which end tokens of a chat template differ from those at the save."""
    before, now = (list(added) or "none" for added in (state.get("end_tokens", {}).get("added", ()), ends.added))
    if before != now:
        console.say(f"changed since the checkpoint: end tokens of the chat template were {before}, now {now}")


def check_outside(config: RowsRunConfig) -> None:
    """Checks what the main process will need outside of this run: an account, a remote folder that can be written."""
    metrics.check_login(config.log)
    if config.checkpoint.remote is not None:
        checkpoint_remote.probe(config.checkpoint.remote)


def mtp_tensors_of(folder: str) -> list[str]:
    """Returns tensors of a model's folder that no engine loads: those of MTP layers."""
    hf_config = read_hf_config(folder)
    family = family_of(hf_config["model_type"])  # without a table, what is left over in the folder is refused
    return [] if family is None else mtp_tensors_of_folder(folder, family, hf_config)


def say_mtp_layers(dispatch: WorkerDispatch, console: Console, folders: Mapping[str, str]) -> None:
    """Says which layers of the models stay out of the run. folders: by config key."""
    for key, folder in folders.items():
        if names := dispatch.on_main(functools.partial(mtp_tensors_of, folder)):
            layers = f"layers that predict further tokens (MTP: {shorten_list(names, 1)})"
            console.say(f"{key}: {folder} has {layers}; they are neither loaded nor trained nor exported")


def last_good(dispatch: WorkerDispatch, directory: RunDirectory, step: int) -> str:
    """Names, in words, the checkpoint to go on from when the state after `step` steps has failed: an earlier one is
    good."""

    def found() -> tuple[str | None, str | None]:
        whole = atomic_checkpoint.steps_of(str(directory.checkpoints))
        return next((p for s, p in reversed(whole) if s < step), None), next((p for s, p in whole if s == step), None)

    good, failed = dispatch.on_main(found)
    suspect = f"; {failed} holds the very state that failed" if failed else ""
    return (f"the last good checkpoint is {good}" if good else "no good checkpoint had been saved") + suspect


def say_all(console: Console, lines: Sequence[str]) -> None:
    for line in lines:
        console.say(line)


def ended_by_rows(error: UserError | None, step: int, saved: str | None) -> DataError:
    """Returns the end of a run with unreadable next rows, after the save of `step`. error: of the first rank with
    one."""
    how = "if that is put right, "
    if isinstance(error, SourceError):
        how = ""
    elif isinstance(error, DataError) and error.may_be_skipped:
        how = "with data.on_bad_row=skip "
    return DataError(f"{error}; steps 1 to {step} are saved in {saved}: {how}the same command goes on from there")


def say_left_out(console: Console, part: str, counts: Mapping[str, int], notes: Sequence[str] = ()) -> None:
    """Says how many rows of a data set were not used as they are, if any, and `notes` on some of them."""
    if any(counts.values()):
        console.say(f"data.{part}: rows " + ", ".join(f"{what}: {number}" for what, number in counts.items() if number))
    say_all(console, notes)


def problems_in_words(problems: Sequence[Problem]) -> str:
    """Returns the first of a step's problems (see engine/guards.py), and how many more there are."""
    more = len(problems[10:])
    return "; ".join(map(str, problems[:10])) + (f"; and {more} more" if more else "")


def check_background(wanted: bool, engines: Mapping[str, BaseEngine]) -> None:
    """Refuses `checkpoint.background` with an engine that cannot. engines: by the section of the config."""
    for key, engine in engines.items():
        if wanted and not engine.saves_in_background:
            raise ConfigError(
                "checkpoint.background",
                True,
                f"needs an engine that can copy its state, and {key} {engine.backend} has no stage_state",
                "set it to false",
            )


class CheckpointSaver:
    """Saves checkpoints. All methods but `ended` on its way out of an error are collective."""

    def __init__(self, device: torch.device) -> None:
        self.saver = BackgroundSaver(device)
        self._held_s: float | None = None
        self._written_s: float | None = None

    def save(self, write: Callable[[], str]) -> str:
        """Calls `write`, which saves a checkpoint or gives it to `saver` to be written. Returns its folder."""
        began_s = time.perf_counter()
        self.finish()  # one at a time: it bounds host memory, and saves end in order
        saved = write()
        self._held_s = time.perf_counter() - began_s
        return saved

    def finish(self) -> None:
        """Waits for the save under way, if any, and raises what went wrong with it."""
        self._written_s = self.saver.finish() or self._written_s

    def metrics(self) -> dict[str, float]:
        """Returns how long the save before this step held training up, and how long one that has ended was written.
        Raises what went wrong with it."""
        seconds = {"perf/save_held_s": self._held_s, "perf/save_write_s": self.saver.poll() or self._written_s}
        self._held_s = self._written_s = None
        return {name: value for name, value in seconds.items() if value is not None}

    @contextlib.contextmanager
    def ended(self, console: Console) -> Iterator[None]:
        """On the way out the save under way has ended: with an error of its own, or beside the one inside."""
        try:
            yield
        except BaseException as error:
            failed = self.saver.wait()
            if failed is not None and failed is not error:
                console.say(f"and the checkpoint that was being written failed: {failed}")
            raise
        self.finish()
