"""Makes the run of a config, from its checkpoint or its start to the exported model.

Every rank runs this program. A command adds its models, its data (`RowsTrainer`, `PPOTrainer`) and a loop of steps. Not
here: ranks, micro-batches and devices, which are the engines' behind `WorkerDispatch`.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import os
import pathlib
import signal
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from transformers import PreTrainedTokenizerBase

from mrl import metrics
from mrl.config.load import to_dict
from mrl.config.resume import check_resume
from mrl.config.schema import ModelConfig
from mrl.config.urls import without_signatures
from mrl.data.dataset import Part, RowDataset
from mrl.data.mixture import eval_rows, train_rows
from mrl.data.stream import RowStream
from mrl.engine import saving
from mrl.engine.atomic_checkpoint import step_name
from mrl.engine.collective import error_of_all, is_main
from mrl.engine.lora.folder import name_base
from mrl.errors import DataError, Stopped, UserError
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import (
    CheckpointSaver,
    Progress,
    already_done,
    check_outside,
    ended_by_rows,
    is_due,
    load_newest,
    say_all,
    say_left_out,
    say_other_choices,
    say_other_ends,
)
from mrl.trainers.console import Console, open_console
from mrl.trainers.run_directory import RunDirectory, StartState, choose_start, copy_missed, is_own
from mrl.trainers.run_lock import RunLock
from mrl.trainers.signals import StopSignal
from mrl.trainers.throughput import memory_gb
from mrl.weights.adapter_folder import is_adapter
from mrl.weights.tokenizer_files import add_end_tokens, write_chat_template
from mrl.words import pluralize


@contextlib.contextmanager
def console_of(config: Any) -> Iterator[Console]:
    """Gives the console of a run, which is closed afterwards. Raises UserError where a package of `log` is missing."""
    metrics.check_packages(config.log)
    console = open_console(config.log.console, enabled=is_main(), every=config.log.every)
    with contextlib.closing(console):
        yield console


class Trainer(abc.ABC):
    """Holds everything that a run uses, and makes the run. Parts come from the config, one after the other."""

    role: ClassVar[str]  # whose model is exported
    saves_before: ClassVar[type[UserError]]  # errors before which the steps that were made are saved

    dispatch: WorkerDispatch
    total_steps: int
    source: RowStream[Any]  # of data.train
    evaluation: Any  # an `Evaluation` of rows or prompts; None without data.eval
    stop: StopSignal
    saves: CheckpointSaver
    tokenizer: PreTrainedTokenizerBase  # the model's, with data.chat_template
    ends: EndTokens  # of completions: those that the export names
    log: metrics.MetricsLog

    def __init__(self, config: Any, console: Console, closing: contextlib.ExitStack) -> None:
        """closing: ends the parts of the run."""
        # Parts refer to the trainer. Its models would stay until the garbage collector comes.
        closing.callback(vars(self).clear)
        self.config, self.console, self.closing = config, console, closing
        self.directory = RunDirectory(pathlib.Path(config.output_dir))
        self.progress = Progress()

    def open_rows(
        self, task: Any, folder: str, hf_config: Mapping[str, Any]
    ) -> tuple[RowDataset[Any], dict[str, RowDataset[Any]]]:
        """Returns the rows of data.train, and those of data.eval by name.

        task: makes a data set, as a `RowsTask`. folder, hf_config: of the model.
        """
        whole = self.config.data

        def open_part(part: Part, data: Any) -> RowDataset[Any]:
            one = task if data is whole else task.of_data(data)
            made: RowDataset[Any] = one.dataset(self.tokenizer, folder, hf_config, part)
            return made

        train_set = train_rows(whole, functools.partial(open_part, "train"))
        return train_set, eval_rows(whole, functools.partial(open_part, "eval"))

    def lock(self) -> None:
        """Takes the run's directory, before anything of another run there could be touched. Collective."""
        lock = RunLock(self.directory.path)
        self.closing.callback(lock.release)
        self.dispatch.on_main(lock.acquire)

    def watch_signals(self, unit: str) -> None:
        """Lets signals stop the run at the end of a `unit`."""
        says = f"the run saves and stops at the end of the {unit} at hand" if self.console.shows else None
        self.stop = self.closing.enter_context(StopSignal(says))

    # -- what a command adds ------------------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def model(self) -> ModelConfig:
        """The section of the model that is exported."""

    @abc.abstractmethod
    def build(self, start: StartState) -> StartState:
        """Builds the models and says what they are. Returns the start of the run."""

    @abc.abstractmethod
    def own_state(self) -> dict[str, Any]:
        """Returns the command's own part of a checkpoint."""

    @abc.abstractmethod
    def check_models(self, state: Mapping[str, Any]) -> None:
        """Raises ConfigError where a model of the run is not the checkpoint's. state: the trainer's in it."""

    @property
    @abc.abstractmethod
    def where(self) -> str:
        """The place of the run, in words."""

    def next_error(self) -> DataError | None:
        """Returns the error that the next rows will raise on this rank."""
        return None

    def is_best(self, row: Mapping[str, float]) -> bool:
        """Returns whether the step has the best value yet of the metric in `checkpoint.best`."""
        return False

    def write_model(self, path: str) -> None:
        """Writes the model of `role` to the folder `path`. Collective."""
        self.dispatch.save_hf_model(self.role, path)

    # -- the run ------------------------------------------------------------------------------------------------------

    def run(self, loop: Callable[[Self], None], command_line: str) -> None:
        """Trains, or goes on training, until all steps are made, and exports the model.

        Called on every rank. loop: makes the steps that are left. Raises UserError where the user can put something
        right, and Stopped after a signal and a save.
        """
        config, dispatch, directory = self.config, self.dispatch, self.directory
        dispatch.on_main(lambda: check_outside(config))
        start = dispatch.on_main(lambda: choose_start(directory, config))
        if already_done(
            dispatch, directory, self.console, start, total_steps=self.total_steps,
            export_hf=config.checkpoint.export_hf, lora=self.model.lora,
        ):  # fmt: skip
            dispatch.on_main(lambda: copy_missed(directory, start, config.checkpoint))
        else:
            self.train(start, loop, command_line)

    def train(self, start: StartState, loop: Callable[[Self], None], command_line: str) -> None:
        """Goes from building the models to exporting one."""
        config, dispatch, console = self.config, self.dispatch, self.console
        if start.checkpoint is not None:
            dispatch.keep_choices(start.checkpoint)
        start = self.build(start)
        self.restore(start)
        console.doing("opening the logs")
        dispatch.on_main(lambda: self.directory.prepare(config, command_line, self.notes()))
        self.log = metrics.open_metrics(
            self.directory.path,
            config.log,
            step=-1 if self.begins else self.progress.logged,  # a start that was lost may have made the line of step 0
            config=to_dict(config),
            run_id=self.progress.run_id,
            enabled=dispatch.is_main,
        )
        try:
            say_all(console, self.log.notes)
            console.start(self.progress.logged, self.total_steps)
            self.make_steps(loop)
        finally:
            console.doing("closing the logs")
            self.log.close()
            console.close()
            say_left_out(console, "train", self.source.counts)
        self.stop.says = None  # the run ends by itself now
        if config.checkpoint.export_hf:
            self.export()
        made = f"{pluralize(self.progress.step, 'step')}, {pluralize(round(self.progress.tokens), 'trained token')}"
        console.say(f"done: {made}; everything is in {self.directory.path}")

    def notes(self) -> list[str]:
        """Returns lines on the run for config.yaml."""
        chosen = [f"{name}: {value}" for name, value in self.dispatch.chosen.items()]
        return [f"length: {self.total_steps} steps", *chosen]

    @property
    def begins(self) -> bool:
        """Whether nothing is done yet, so that the line of step 0 is made."""
        return self.progress.step == 0

    @property
    def stop_requested(self) -> bool:
        """Whether a signal came to any rank. Collective."""
        return any(self.dispatch.max_over_ranks(self.stop.requested))

    def make_steps(self, loop: Callable[[Self], None]) -> None:
        """Evaluates before the first step if that is due, and makes all steps. The last one is saved."""
        with self.saves.ended(self.console):
            if self.stop_requested:
                raise self.stopped(None)
            if self.begins and self.evaluation is not None and self.config.train.eval_every is not None:
                self.evaluate_before()
            if self.progress.unlogged:  # a signal or an error came in the evaluation after this step
                self.finish_step(self.progress.unlogged)
            loop(self)

    def evaluate(self, step: int) -> dict[str, float] | None:
        """Returns metrics of the model after `step`; None where a signal came first."""
        measured: dict[str, float] | None = self.evaluation.run(step)
        return measured

    def evaluate_before(self) -> None:
        """Evaluates the model before training, and writes the line of step 0."""
        self.console.doing("evaluating before training")
        row = self.evaluate(0)
        if row is None:
            raise self.stopped(None)
        self.log.write(0, row)
        self.console.step(0, row)

    def finish_step(self, row: dict[str, float]) -> None:
        """Evaluates, logs and saves after a step, as far as they are due. row: the metrics of the step."""
        config, dispatch, progress, step = self.config, self.dispatch, self.progress, self.progress.step
        if self.evaluation is not None and is_due(config.train.eval_every, step, self.total_steps):
            progress.unlogged = row  # a save within the evaluation holds the row, and the next start evaluates again
            with self.saved_before_errors():
                metrics_of_eval = self.evaluate(step)
            if metrics_of_eval is None:
                self.log_without_evaluation()
                raise self.stopped(self.save())
            row |= metrics_of_eval

        bad_row = self.next_error() if step < self.total_steps else None
        stop_requested, any_bad_row, row["perf/memory_gb"] = dispatch.max_over_ranks(
            self.stop.requested, bad_row is not None, memory_gb(dispatch.device)
        )
        self.log.write(step, row)
        progress.unlogged = None
        self.console.step(step, row)
        say_all(self.console, self.take_notes())

        is_best = self.is_best(row)
        if stop_requested or any_bad_row or is_best or is_due(config.checkpoint.every, step, self.total_steps):
            self.log.sync()
            going_on = not stop_requested and not any_bad_row and step < self.total_steps
            saved = self.save(is_best=is_best, in_background=going_on and config.checkpoint.background)
            if stop_requested:
                raise self.stopped(saved)
            if any_bad_row:
                raise ended_by_rows(error_of_all(bad_row), step, saved)

    # -- saves --------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saved_before_errors(self) -> Iterator[None]:
        """Saves the steps that were made before an error of `saves_before` leaves, and names the checkpoint in it.

        The rows that were taken inside come again after a resume.
        """
        position = self.position_before_rows()
        try:
            yield
        except self.saves_before as error:
            if not self.progress.step:
                raise
            self.log_without_evaluation()
            saved = self.save(position=position)
            raise error.going_on(f"steps 1 to {self.progress.step} are saved in {saved}") from error

    def take_notes(self) -> list[str]:
        """Returns lines on rows that were left out since the last call."""
        return self.source.take_notes()

    def position_before_rows(self) -> Mapping[str, Any] | None:
        """Returns the position of data.train now, for a save after an error; None if that save finds it out itself."""
        return self.source.state_dict()

    def state_to_come(self, position: Mapping[str, Any] | None, *, holds: bool) -> Callable[[], dict[str, Any]]:
        """Returns what gives the part of a checkpoint that may have to be waited for, in any thread.

        data: the position of data.train behind the rows that the checkpoint holds or that were trained on. position: of
        data.train; None for its position now. holds: whether training waits for it.
        """
        found = self.source.state_dict() if position is None else position
        return lambda: {"data": found}

    def log_without_evaluation(self) -> None:
        """Writes the line of a step whose evaluation was broken off, before a save; the next start writes it anew, with
        the evaluation."""
        dispatch, progress = self.dispatch, self.progress
        if progress.unlogged:
            (memory,) = dispatch.max_over_ranks(memory_gb(dispatch.device))
            self.log.write(progress.step, {**progress.unlogged, "perf/memory_gb": memory})
        self.log.sync()

    def stopped(self, saved: str | None, where: str | None = None) -> Stopped:
        """Returns the end of a run that a signal, to whichever rank, has stopped.

        saved: the checkpoint; None if none was due. where: in words; None is the place between steps.
        """
        (number,) = self.dispatch.max_over_ranks(self.stop.number)
        state = "which the next start goes on from" if self.progress.step else "before it began"
        if saved:
            state = f"saved in {saved}"
        name = signal.Signals(int(number)).name
        return Stopped(f"stopped by {name} {where or self.where}, {state}; run the same command again to go on")

    def save(
        self, *, is_best: bool = False, in_background: bool = False, position: Mapping[str, Any] | None = None
    ) -> str:
        """Saves everything that the next step depends on. Returns the checkpoint's folder.

        is_best: it gets that name when it is whole. in_background: it is copied now, and whole later. position: of the
        source; None for its position now.
        """
        config, dispatch, directory, progress = self.config, self.dispatch, self.directory, self.progress
        if progress.step == self.total_steps:
            dispatch.on_main(directory.forget_export)
        if not os.path.exists(directory.config):  # without an error: a rank alone must not raise here
            self.console.say(
                f"{directory.config} is gone: if the folder was removed, its log is lost; put the file back"
            )
        self.console.doing("saving a checkpoint")
        state = {
            "progress": progress.state_dict(),
            **self.own_state(),
            "config": without_signatures(to_dict(config)),
            "chosen": dispatch.chosen,
            "end_tokens": dataclasses.asdict(self.ends),
        }
        to_come = self.state_to_come(position, holds=not in_background)
        root, remote, keep = str(directory.checkpoints), config.checkpoint.remote, config.checkpoint.keep
        name = step_name(progress.step)
        protect = () if progress.best_step is None else (step_name(progress.best_step),)

        def name_best() -> None:
            if is_best:
                directory.name_best(name, remote)

        def begin() -> str:
            saving.save_in_background(
                self.saves.saver, root, progress.step, dispatch.stage_checkpoint(state, to_come),
                backend=dispatch.checkpoint_backend, remote=remote, keep=keep, protect=protect, then=name_best,
            )  # fmt: skip
            return f"{root}/{name}"

        if in_background:
            return self.saves.save(begin)
        state |= to_come()
        saved = self.saves.save(
            lambda: dispatch.save_checkpoint(
                root, global_step=progress.step, state=state, remote=remote, keep=keep, protect=protect
            )
        )
        dispatch.on_main(name_best)
        return saved

    def restore(self, start: StartState) -> None:
        """Puts roles and data where the checkpoint of `start` left them. A run without one gets a new id."""
        config, dispatch, console = self.config, self.dispatch, self.console
        start, state = load_newest(dispatch, self.directory, config, console, start, dispatch.load_checkpoint)
        if state is None:
            self.progress = Progress(run_id=dispatch.on_main(metrics.new_run_id))
            return
        for note in check_resume(state["config"], to_dict(config)):
            console.say(f"changed since the checkpoint: {note}")
        say_other_choices(console, state.get("chosen", {}), dispatch.chosen)
        say_other_ends(console, state, self.ends)
        self.check_models(state)
        self.progress = Progress(**state["progress"])
        if not is_own(self.directory, start, state["config"], config.checkpoint):
            self.progress.run_id = dispatch.on_main(metrics.new_run_id)  # another run's page is not ours to write on
            self.progress.best = self.progress.best_step = None  # nor are its checkpoints here
        self.load_state(state)

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Puts everything but roles and `progress` where the checkpoint's `state` left it."""
        self.source.load_state_dict(state["data"])
        say_all(self.console, self.take_notes())

    # -- the end ------------------------------------------------------------------------------------------------------

    def export(self) -> None:
        """Writes output_dir/hf, at once or not at all."""
        dispatch, directory, console = self.dispatch, self.directory, self.console
        template, path = self.tokenizer.chat_template, self.model.path
        folder = dispatch.engines[self.role].config.model.path  # what the model started from
        if is_adapter(pathlib.Path(path).expanduser()):
            path = folder  # adapters are over what was merged
        console.doing("exporting the model")
        self.write_model(str(directory.partial_hf))
        adapter = self.model.lora is not None and self.model.lora.export == "adapter"
        if adapter:
            dispatch.on_main(lambda: name_base(directory.partial_hf, path))
        if self.config.data.chat_template is not None:
            dispatch.on_main(lambda: write_chat_template(directory.partial_hf, template))
        dispatch.on_main(lambda: add_end_tokens(directory.partial_hf, folder, self.ends.own, self.ends.added))
        dispatch.on_main(directory.publish_export)
        if adapter:
            console.say(f"adapter: {directory.hf} (over {path})")
        else:
            console.say(f"model: {directory.hf} (loadable with transformers)")
