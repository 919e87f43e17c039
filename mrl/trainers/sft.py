"""Training on rows, from a checked config to an exported model: supervised fine-tuning, and what a `Task` says
otherwise.

Every rank runs this program. What is not here: ranks, dtypes, process groups and micro-batches (the engine's), how the
loss is divided (docs/loss.md), where rows come from (mrl.data). What is short here is so because it is somewhere else
with a test of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl import metrics
from mrl.algorithms.distill import metric_denominators
from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.config.checks import check_batch, check_schedule
from mrl.config.load import to_dict
from mrl.config.resume import check_resume
from mrl.config.schema import RoleConfig, SFTConfig
from mrl.config.stream_checks import streamed_keys
from mrl.config.urls import without_signatures
from mrl.converters.hf_config import read_hf_config, vocab_size_of
from mrl.converters.hub import check_same_model, model_fingerprint, model_folder
from mrl.data.batches import BatchSource, batch_of, eval_batches, steps_for_epochs
from mrl.data.dataset import Part, RowDataset, SFTDataset
from mrl.data.mixture import MixedDataset, eval_rows, notes_of_rows, train_rows
from mrl.data.stream import Report, count_usable, may_leave_out
from mrl.data.tokenizer import load_tokenizer
from mrl.data.vision import load_vision
from mrl.engine.base import PLAIN_CTX, BaseEngine, Ctx
from mrl.engine.collective import OnMainInThread, error_of_all, is_main
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError, ServerError, Stopped
from mrl.mcore_models.platform import device_type
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import (
    Progress,
    already_done,
    check_outside,
    ended_by_rows,
    export,
    is_due,
    load_newest,
    log_without_evaluation,
    saved_before,
    say_all,
    say_done,
    say_left_out,
    say_mtp_layers,
    say_other_choices,
    say_other_ends,
    stop_error,
)
from mrl.trainers.console import Console, open_console
from mrl.trainers.evaluation import Evaluation
from mrl.trainers.mixture_length import length_of_mixture
from mrl.trainers.opening import say_choices, say_length, say_model
from mrl.trainers.run_directory import RunDirectory, StartState, choose_start, copy_missed, is_own
from mrl.trainers.run_lock import RunLock
from mrl.trainers.saves import CheckpointSaver, check_background
from mrl.trainers.signals import StopSignal
from mrl.trainers.step_guard import StepGuard
from mrl.trainers.task import FrozenModel, HFConfig, Task, engine_of_groups, saved_state
from mrl.trainers.teacher import Teachers
from mrl.trainers.throughput import Throughput, memory_gb
from mrl.words import pluralize


@dataclasses.dataclass(frozen=True)
class Trainer:
    """Everything that the loop uses, made once by `run`."""

    task: Task[Any]
    total_steps: int
    source: BatchSource[Any]
    evaluation: Evaluation | None  # None without data.eval
    engine: BaseEngine
    directory: RunDirectory
    console: Console
    stop: StopSignal
    saves: CheckpointSaver
    chat_template: str | None  # the text of data.chat_template, which the export gets too
    ends: EndTokens  # of completions: those that the export names

    @property
    def config(self) -> Any:
        """The config of the task's command."""
        return self.task.config

    @property
    def sets(self) -> list[RowDataset[Any]]:
        """data.train, and data.eval where there is one."""
        return [self.source.dataset, *([] if self.evaluation is None else self.evaluation.sets.values())]


class SFTTask(Task[SFTConfig]):
    """Supervised fine-tuning."""

    def __init__(self, config: SFTConfig) -> None:
        super().__init__(config)
        self.loss_fn = sft_loss
        self.teachers = None if config.teacher is None else Teachers(config)
        self.means = {} if self.teachers is None else metric_denominators(self.teachers.names)

    def role(self, folder: str) -> RoleConfig:
        return role_config(self.config, folder)

    def dataset(self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part) -> SFTDataset:
        vision = load_vision(folder, hf_config)
        if self.teachers is not None and part == "train":
            if vision is not None:
                why = "is set, and model.path is a model that reads images, which is not distilled"
                raise ConfigError("teacher", why=why, fix="leave it out, or give a model of text alone")
            self.teachers.check(tokenizer, hf_config)
        others = None if self.config.teacher is None else list(self.config.teacher.others)
        return SFTDataset(
            self.config.data, tokenizer, part=part, vocab_size=vocab_size_of(hf_config), vision=vision, teachers=others,
            exchange=self.exchange,
        )  # fmt: skip

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        return batch_of(rows)

    def eval_batches(self, dataset: RowDataset[Any], report: Report | None) -> Iterator[Batch]:
        return eval_batches(dataset, self.config.train.global_batch_size, report)

    def begin(
        self, engine: BaseEngine, sets: Sequence[RowDataset[Any]], place: pathlib.Path, console: Console,
        stop: StopSignal,
    ) -> None:  # fmt: skip
        if self.teachers is not None:
            self.loss_fn = self.teachers.loss_fn
            every = lambda: itertools.chain.from_iterable(self.eval_batches(rows, None) for rows in sets)  # noqa: E731
            self.teachers.begin(engine, every, place, console, stop)
        super().begin(engine, sets, place, console, stop)

    def frozen_models(self, folder: str) -> Mapping[str, FrozenModel]:
        return {} if self.teachers is None else self.teachers.frozen_models

    def prepare(self, engine: BaseEngine, batch: Batch) -> tuple[Batch, Ctx]:
        return (batch, {}) if self.teachers is None else self.teachers.prepare(batch)


def run(config: SFTConfig, command_line: str = "") -> None:
    """Trains as `run_task` does."""
    run_task(SFTTask(config), command_line)


def run_task(task: Task[Any], command_line: str = "") -> None:
    """Trains, or goes on training, until `train.steps` or `train.epochs` are done, and exports the model.

    Called on every rank. Raises UserError for what the user can put right, and Stopped after a signal asked the run to
    stop and a checkpoint was saved.
    """
    log = task.config.log
    metrics.check_packages(log)
    with contextlib.closing(open_console(log.console, enabled=is_main(), every=log.every)) as console:
        _run(task, command_line, console)


def _run(task: Task[Any], command_line: str, console: Console) -> None:
    config = task.config
    console.doing("reading the model's folder and the data")
    folder = model_folder(config.model.path, weights=config.model.init == "pretrained")
    hf_config = read_hf_config(folder)  # first: a wrong config.json fails the tokenizer too
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.chat_template)
    if streamed_keys(config.data):
        task.exchange = OnMainInThread(device_type(config.engine.device))

    def open_rows(part: Part, data: Any) -> RowDataset[Any]:
        of_data = task if data is config.data else task.of_data(data)
        return of_data.dataset(tokenizer, folder, hf_config, part)

    train_set = train_rows(config.data, functools.partial(open_rows, "train"))
    eval_sets = eval_rows(config.data, functools.partial(open_rows, "eval"))
    encoders = train_set.encoders()
    ends = EndTokens.of(folder, tokenizer, encoders) if encoders else EndTokens((), ())
    say_all(console, ends.notes(tokenizer, "the export's generation_config.json gets it, too"))
    say_all(console, notes_of_rows(train_set, eval_sets))
    engine = build_engine(task.role(folder))
    check_background(config.checkpoint.background, {"engine.backend": engine})
    directory = RunDirectory(pathlib.Path(config.output_dir))
    lock = RunLock(directory.path)
    total_steps = length_of(config, train_set, console)
    engine.set_total_steps(total_steps)
    source = task.source(train_set)
    says = "the run saves and stops at the end of the step at hand" if console.shows else None
    with StopSignal(says) as stop:
        template = tokenizer.chat_template if config.data.chat_template is not None else None
        evaluation = Evaluation(task, eval_sets, engine, directory, console, stop) if eval_sets else None
        trainer = Trainer(
            task, total_steps, source, evaluation, engine, directory, console, stop, CheckpointSaver(engine.device),
            template, ends,
        )  # fmt: skip
        try:
            engine.on_main(lock.acquire)
            engine.on_main(lambda: check_outside(config))
            start = engine.on_main(lambda: choose_start(directory, config))
            wanted = config.checkpoint.export_hf
            lora = config.model.lora
            if already_done(engine, directory, console, start, total_steps=total_steps, export_hf=wanted, lora=lora):
                engine.on_main(lambda: copy_missed(directory, start, config.checkpoint))
            else:
                train(trainer, start, command_line)
        finally:
            source.close()
            lock.release()


def length_of(config: Any, train_set: RowDataset[Any], console: Console) -> int:
    """Returns steps of the run. Where `train.epochs` sets them and rows may be left out, those that are left are
    counted first.

    The counting is a pass over the rows: every rank makes it and finds the same, and so does a run that is resumed.
    """
    if train_set.is_streamed:
        return config.train.steps
    rows, batch = len(train_set), config.train.global_batch_size
    check_batch(batch, batch, rows)
    if isinstance(train_set, MixedDataset):
        check = functools.partial(check_schedule, config.optimizer)
        return length_of_mixture(config, train_set, console, rows=batch, check=check)
    if config.train.steps is not None:
        return config.train.steps
    epochs = 1.0 if config.train.epochs is None else config.train.epochs
    usable = rows
    counts: Mapping[str, int] = {}
    if may_leave_out(config.data):
        console.say(
            f"data.train: counting which of its {pluralize(rows, 'row')} can be used, for the length of the run"
        )
        usable, counts = count_usable(train_set)
    steps = steps_for_epochs(epochs, usable, batch)
    length = f"the {pluralize(steps, 'step')} of {pluralize(epochs, 'epoch')}"
    if usable < rows:
        left_out = ", ".join(f"{what}: {number}" for what, number in counts.items() if number)
        console.say(
            f"data.train: {usable} of its {pluralize(rows, 'row')} can be used ({left_out}), which makes {length}"
        )
    check_schedule(config.optimizer, steps, length)
    return steps


def role_config(config: SFTConfig, model_path: str) -> RoleConfig:
    """Returns the one role of supervised fine-tuning. model_path: the folder that `model.path` stands for."""
    return RoleConfig(
        model=dataclasses.replace(config.model, path=model_path),
        engine=engine_of_groups(config.engine, config.data.max_length),
        optimizer=config.optimizer,
        seed=config.seed,
        packing=config.data.packing,
        mtp=config.model.mtp,
    )


def train(trainer: Trainer, start: StartState, command_line: str) -> None:
    """From building the model to exporting it."""
    config, engine, directory, console = trainer.config, trainer.engine, trainer.directory, trainer.console
    say_choices(console, {"": engine})  # first: a run that ends for want of memory has said what it was to be built of
    console.doing("building the model")
    engine.init_model()
    say_model(console, "model", engine)
    rows = None if trainer.source.dataset.is_streamed else len(trainer.source.dataset)
    batch = config.train.global_batch_size
    say_length(console, steps=trainer.total_steps, batch=batch, noun="row", rows=rows, per_epoch=(rows or 0) / batch)
    task = trainer.task
    if start.checkpoint is not None and task.has_cache(engine):
        start, state = load_newest(engine, directory, config, console, start, functools.partial(saved_state, engine))
        task.refuse_other_run(engine, trainer.source, state)
    task.begin(engine, trainer.sets, directory.path, console, trainer.stop)
    frozen = task.frozen_models(engine.config.model.path)
    without_mtp = {"model.path": engine.config.model.path} if engine.config.mtp is None else {}
    say_mtp_layers(engine, console, without_mtp | {k: one.folder for k, one in frozen.items() if one.is_read})
    task.fingerprints = engine.on_main(lambda: task.fingerprints_now(engine))
    progress = restore(trainer, start)
    if progress.logged < trainer.total_steps:
        console.doing("reading the first rows")  # a bad one is an error before anything is written
        trainer.source.prefetch()
        if trainer.evaluation is not None:
            trainer.evaluation.read_rows()
    console.doing("opening the logs")
    notes = [f"length: {trainer.total_steps} steps", *(f"{name}: {value}" for name, value in engine.chosen.items())]
    engine.on_main(lambda: directory.prepare(config, command_line, notes))
    log = metrics.open_metrics(
        directory.path,
        config.log,
        step=progress.logged if progress.step else -1,  # a start that was lost may have made the line of step 0
        config=to_dict(config),
        run_id=progress.run_id,
        enabled=engine.is_main,
    )
    try:
        say_all(console, log.notes)
        console.start(progress.logged, trainer.total_steps)
        with trainer.saves.ended(console):
            loop(trainer, progress, log)
    finally:
        console.doing("closing the logs")
        log.close()
        console.close()
        say_left_out(console, "train", trainer.source.counts)
    trainer.stop.says = None  # the run ends by itself now
    if config.checkpoint.export_hf:
        folder, mtp = engine.config.model.path, engine.config.mtp is not None
        template, ends, model = trainer.chat_template, trainer.ends, config.model
        write = functools.partial(trainer.task.export, engine)
        export(
            engine, directory, console, write, folder=folder, chat_template=template, model=model, mtp=mtp, ends=ends
        )
    say_done(engine, console, directory, steps=progress.step, tokens=progress.tokens)


def restore(trainer: Trainer, start: StartState) -> Progress:
    """Puts engine and data where the checkpoint of `start` left them; a run of its own gets an id of its own."""
    engine, config, directory = trainer.engine, trainer.config, trainer.directory
    start, state = load_newest(engine, directory, config, trainer.console, start, engine.load_checkpoint)
    if state is None:
        return Progress(run_id=engine.on_main(metrics.new_run_id))
    for note in check_resume(state["config"], to_dict(config)):
        trainer.console.say(f"changed since the checkpoint: {note}")
    say_other_choices(trainer.console, state.get("chosen", {}), engine.chosen)
    say_other_ends(trainer.console, state, trainer.ends, trainer.source.dataset.encoders())
    check_same_model(
        state.get("model"), model_fingerprint(engine.config.model.path), before=state["config"]["model"]["path"],
        now=config.model.path,
    )  # fmt: skip
    trainer.task.check_frozen(state)
    trainer.source.load_state_dict(state["data"])
    say_all(trainer.console, trainer.source.take_notes())
    progress = Progress(**state["progress"])
    if not is_own(trainer.directory, start, state["config"], config.checkpoint):
        progress.run_id = engine.on_main(metrics.new_run_id)  # another run's page is not ours to write on
    return progress


def loop(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> None:
    """Makes steps until all are made; the last one is saved. Raises Stopped after a signal."""
    config, engine, source = trainer.config, trainer.engine, trainer.source
    guard = StepGuard(engine, trainer.directory, watches_parameters=config.train.guards, rows=source.taken_from)
    throughput = Throughput(engine)
    if any(engine.max_over_ranks(trainer.stop.requested)):
        raise stopped_after(trainer, progress, None)
    if progress.step == 0 and trainer.evaluation is not None and config.train.eval_every is not None:
        evaluate_before(trainer, progress, log)
    if progress.unlogged:  # a signal came in the evaluation after this step
        finish_step(trainer, progress, log, progress.unlogged)
    while progress.step < trainer.total_steps:
        began_s = time.perf_counter()
        trainer.console.doing(f"step {progress.step + 1}")
        with saved_before_errors(trainer, progress, log):
            batch = source.next()
            made, ctx = trainer.task.prepare(engine, batch)

        engine.optimizer_zero_grad()
        with engine.train_mode():
            share = engine.shard_data(made)
            _, loss, ctx = engine.forward_backward_step(share, PLAIN_CTX | ctx | {"last": True})
        guard.before_update(progress.step + 1, batch, loss)
        grad_norm = engine.optimizer_step()
        guard.after_update(progress.step + 1, batch, grad_norm)
        lr = engine.lr_scheduler_step()

        progress.step += 1
        progress.tokens += batch.denominators["tokens"]
        row = {"train/loss": loss, "train/grad_norm": float(grad_norm), "train/lr": lr, "train/tokens": progress.tokens}
        row |= source.metrics | trainer.saves.metrics() | trainer.task.means_of(made, ctx)
        row |= throughput.metrics(batch, step_s=time.perf_counter() - began_s)
        finish_step(trainer, progress, log, row)


def evaluate_before(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> None:
    """Evaluates the model before training, and writes the line of step 0."""
    assert trainer.evaluation is not None, "nothing to evaluate on"
    found = trainer.evaluation.run(0)
    if found is None:
        raise stopped_after(trainer, progress, None)
    log.write(0, found)
    trainer.console.step(0, found)


def finish_step(trainer: Trainer, progress: Progress, log: metrics.MetricsLog, row: dict[str, float]) -> None:
    """Evaluates, logs and saves after a step, as far as they are due. row: the metrics of the step."""
    config, engine, step = trainer.config, trainer.engine, progress.step
    if trainer.evaluation is not None and is_due(config.train.eval_every, step, trainer.total_steps):
        progress.unlogged = row  # a save within the evaluation holds the row, and the next start evaluates again
        with saved_before_errors(trainer, progress, log):
            metrics_of_eval = trainer.evaluation.run(step)
        if metrics_of_eval is None:
            log_without_evaluation(engine, log, progress)
            raise stopped_after(trainer, progress, save(trainer, progress))
        row |= metrics_of_eval

    bad_row = trainer.source.next_error(lambda: trainer.stop.requested) if step < trainer.total_steps else None
    stop_requested, any_bad_row, row["perf/memory_gb"] = engine.max_over_ranks(
        trainer.stop.requested, bad_row is not None, memory_gb(engine.device)
    )
    log.write(step, row)
    progress.unlogged = None
    trainer.console.step(step, row)
    say_all(trainer.console, trainer.source.take_notes())

    if stop_requested or any_bad_row or is_due(config.checkpoint.every, step, trainer.total_steps):
        log.sync()
        going_on = not stop_requested and not any_bad_row and step < trainer.total_steps
        saved = save(trainer, progress, in_background=going_on and config.checkpoint.background)
        if stop_requested:
            raise stopped_after(trainer, progress, saved)
        if any_bad_row:
            raise ended_by_rows(error_of_all(bad_row), step, saved)


def saved_before_errors(
    trainer: Trainer, progress: Progress, log: metrics.MetricsLog
) -> contextlib.AbstractContextManager[None]:
    """`saved_before`, of errors of a server that the task asks."""
    saves = functools.partial(save, trainer, progress, position=trainer.source.state_dict())
    return saved_before(ServerError, trainer.engine, progress, log, saves)


def stopped_after(trainer: Trainer, progress: Progress, saved: str | None) -> Stopped:
    """Returns the end of a run that a signal has stopped. saved: the checkpoint; None where there was nothing to save
    yet."""
    where = f"after step {progress.step} of {trainer.total_steps}"
    return stop_error(trainer.engine, trainer.stop, where=where, step=progress.step, saved=saved)


def save(
    trainer: Trainer, progress: Progress, *, in_background: bool = False, position: Mapping[str, Any] | None = None
) -> str:
    """Saves everything that the next step depends on. Returns the checkpoint's folder.

    in_background: it is copied now, and whole later. position: that of the source, where it is not what it is now.
    """
    config, engine, directory = trainer.config, trainer.engine, trainer.directory
    if progress.step == trainer.total_steps:
        engine.on_main(directory.forget_export)
    trainer.console.doing("saving a checkpoint")
    state: Mapping[str, Any] = {
        "progress": dataclasses.asdict(progress),
        "data": trainer.source.state_dict() if position is None else position,
        "model": model_fingerprint(engine.config.model.path),
        "models": dict(trainer.task.fingerprints),
        "config": without_signatures(to_dict(config)),
        "chosen": engine.chosen,
        "end_tokens": dataclasses.asdict(trainer.ends),
    }
    root, remote = str(directory.checkpoints), config.checkpoint.remote
    step, keep = progress.step, config.checkpoint.keep
    if in_background:
        return trainer.saves.begin(
            root, step, lambda: engine.stage_state(state), backend=engine.backend, remote=remote, keep=keep
        )
    return trainer.saves.now(
        lambda: engine.save_checkpoint(root, remote, global_step=step, max_ckpt_to_keep=keep, state=state)
    )
