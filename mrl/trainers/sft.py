"""Supervised fine-tuning, from a checked config to an exported model.

Every rank runs this program. What is not here: ranks, dtypes, process groups and micro-batches (the engine's), how the
loss is divided (docs/loss.md), where rows come from (mrl.data). What is short here is so because it is somewhere else
with a test of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import pathlib
import time
from collections.abc import Mapping
from typing import Any

from mrl import metrics
from mrl.algorithms.sft import sft_loss
from mrl.batch import Batch
from mrl.config.checks import check_batch, check_schedule, resolve_engine_tokens
from mrl.config.load import to_dict
from mrl.config.resume import check_resume
from mrl.config.schema import RoleConfig, SFTConfig
from mrl.converters.families import FAMILIES
from mrl.converters.hf_config import read_hf_config, vocab_size_of
from mrl.converters.hub import check_same_model, model_fingerprint, model_folder
from mrl.data.batches import BatchSource, Report, count_usable, eval_batches, may_leave_out, steps_for_epochs
from mrl.data.dataset import SFTDataset
from mrl.data.tokenizer import load_tokenizer
from mrl.data.vision import load_vision
from mrl.engine import guards
from mrl.engine.base import BaseEngine
from mrl.engine.collective import is_main
from mrl.engine.lora.folder import adapters
from mrl.engine.registry import build_engine
from mrl.errors import DataError, Stopped, TrainingError
from mrl.trainers.common import (
    Progress,
    already_done,
    check_outside,
    export,
    last_good,
    load_newest,
    log_without_evaluation,
    problems_in_words,
    say_adapters,
    say_all,
    say_done,
    say_left_out,
    say_unread,
    stopped,
)
from mrl.trainers.console import Console, open_console
from mrl.trainers.run_directory import RunDirectory, Start, choose_start, copy_missed, is_own
from mrl.trainers.run_lock import RunLock
from mrl.trainers.signals import StopSignal
from mrl.trainers.throughput import adapter_weights, memory_gb, peak_flops, training_flops


@dataclasses.dataclass(frozen=True)
class Trainer:
    """What the loop uses, made once by `run`. chat_template: the text of data.chat_template, which the export gets too."""

    config: SFTConfig
    total_steps: int
    source: BatchSource
    eval_set: SFTDataset | None
    engine: BaseEngine
    directory: RunDirectory
    console: Console
    stop: StopSignal
    chat_template: str | None = None


def run(config: SFTConfig, command_line: str = "") -> None:
    """Trains, or goes on training, until `train.steps` or `train.epochs` are done, and exports the model.

    Called on every rank. Raises UserError for what the user can put right, and Stopped after a signal asked the run to
    stop and a checkpoint was saved.
    """
    metrics.check_packages(config.log)
    with contextlib.closing(open_console(config.log.console, enabled=is_main())) as console:
        _run(config, command_line, console)


def _run(config: SFTConfig, command_line: str, console: Console) -> None:
    console.doing("reading the model's folder and the data")
    folder = model_folder(config.model.path, weights=config.model.init == "pretrained")
    hf_config = read_hf_config(folder)  # first: a wrong config.json fails the tokenizer too
    tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.chat_template)
    about = {"vocab_size": vocab_size_of(hf_config), "vision": load_vision(folder, hf_config)}
    train_set = SFTDataset(config.data, tokenizer, **about)
    eval_set = None if config.data.eval is None else SFTDataset(config.data, tokenizer, part="eval", **about)
    engine = build_engine(role_config(config, folder))
    directory = RunDirectory(pathlib.Path(config.output_dir))
    lock = RunLock(directory.path)
    total_steps = length_of(config, train_set, console)
    engine.set_total_steps(total_steps)
    source = BatchSource(
        train_set, global_batch_size=config.train.global_batch_size, seed=config.seed, shuffle=config.data.shuffle
    )
    says = "the run saves and stops at the end of the step at hand" if console.shows else None
    with StopSignal(says) as stop:
        template = tokenizer.chat_template if config.data.chat_template is not None else None
        trainer = Trainer(config, total_steps, source, eval_set, engine, directory, console, stop, template)
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


def length_of(config: SFTConfig, train_set: SFTDataset, console: Console) -> int:
    """Steps of the run. Where `train.epochs` sets them and rows may be left out, those that are left are counted first.

    The counting is a pass over the rows: every rank makes it and finds the same, and so does a run that is resumed.
    """
    epochs, rows, batch = config.train.resolved_epochs, len(train_set), config.train.global_batch_size
    check_batch(batch, batch, rows)
    if epochs is None:
        return config.train.steps
    usable, counts = rows, {}
    if may_leave_out(config.data):
        console.say(f"data.train: counting which of its {rows} rows can be used, for the length of the run")
        usable, counts = count_usable(train_set)
    steps = steps_for_epochs(epochs, usable, batch)
    length = f"the {steps} steps of {epochs:g} epochs"
    if usable < rows:
        left_out = ", ".join(f"{what}: {number}" for what, number in counts.items() if number)
        console.say(f"data.train: {usable} of its {rows} rows can be used ({left_out}), which makes {length}")
    check_schedule(config.optimizer, steps, length)
    return steps


def role_config(config: SFTConfig, model_path: str) -> RoleConfig:
    """The one role of supervised fine-tuning. model_path: the folder that `model.path` stands for."""
    tokens = resolve_engine_tokens(config)
    micro_batch = dataclasses.replace(config.engine.micro_batch, tokens=tokens)
    return RoleConfig(
        model=dataclasses.replace(config.model, path=model_path),
        engine=dataclasses.replace(config.engine, micro_batch=micro_batch),
        optimizer=config.optimizer,
        seed=config.seed,
        packing=config.data.packing,
    )


def train(trainer: Trainer, start: Start, command_line: str) -> None:
    """From building the model to exporting it."""
    config, engine, directory, console = trainer.config, trainer.engine, trainer.directory, trainer.console
    console.doing("building the model")
    engine.init_model()
    say_unread(engine, console, {"model.path": engine.config.model.path})
    say_adapters(console, "model.lora", engine.config)
    engine.set_loss_fn(sft_loss)
    progress = restore(trainer, start)
    if progress.logged < trainer.total_steps:
        console.doing("reading the first rows")
        read_first_rows(trainer)
    console.doing("opening the logs")
    engine.on_main(lambda: directory.prepare(config, command_line, [f"length: {trainer.total_steps} steps"]))
    log = metrics.open_metrics(
        directory.path, config.log, step=progress.logged, config=to_dict(config), run_id=progress.run_id, enabled=engine.is_main
    )  # fmt: skip
    try:
        say_all(console, log.notes)
        console.start(progress.logged, trainer.total_steps)
        loop(trainer, progress, log)
    finally:
        console.doing("closing the logs")
        log.close()
        console.close()
        say_left_out(console, "train", trainer.source.counts)
    trainer.stop.says = None  # the run ends by itself now
    if config.checkpoint.export_hf:
        folder = engine.config.model.path
        template, model = trainer.chat_template, config.model
        export(engine, directory, console, engine.export_hf, folder=folder, chat_template=template, model=model)
    say_done(engine, console, directory, steps=progress.step, tokens=progress.tokens)


def read_first_rows(trainer: Trainer) -> None:
    """Reads the first batch and, whole, what is evaluated on: a bad row there is an error before anything is written."""
    trainer.source.peek()
    if trainer.eval_set is not None:
        batches = eval_batches(trainer.eval_set, trainer.config.train.global_batch_size)
        for _ in itertools.islice(batches, trainer.config.train.eval_batches):
            pass


def restore(trainer: Trainer, start: Start) -> Progress:
    """Puts engine and data where the checkpoint of `start` left them; a run of its own gets an id of its own."""
    engine, config, directory = trainer.engine, trainer.config, trainer.directory
    start, state = load_newest(engine, directory, config, trainer.console, start, engine.load_checkpoint)
    if state is None:
        return Progress(run_id=engine.on_main(metrics.new_run_id))
    for note in check_resume(state["config"], to_dict(config)):
        trainer.console.say(f"changed since the checkpoint: {note}")
    check_same_model(
        state.get("model"), engine.config.model.path, before=state["config"]["model"]["path"], now=config.model.path
    )
    trainer.source.load_state_dict(state["data"])
    progress = Progress(**state["progress"])
    if not is_own(trainer.directory, start, state["config"], config.checkpoint):
        progress.run_id = engine.on_main(metrics.new_run_id)  # another run's page is not ours to write on
    return progress


def loop(trainer: Trainer, progress: Progress, log: metrics.MetricsLog) -> None:
    """Step, evaluate, log, save; ends after the last step, which is saved, or raises Stopped."""
    config, engine, console, total_steps = trainer.config, trainer.engine, trainer.console, trainer.total_steps
    due = lambda every: progress.step == total_steps or (every is not None and progress.step % every == 0)  # noqa: E731
    flops, evaluation = FlopsMeter(trainer), Evaluation(trainer)
    guard = config.train.guards
    if any(engine.max_over_ranks(trainer.stop.requested)):
        raise stopped_after(trainer, progress, None)
    while progress.step < total_steps or progress.unlogged:
        if not progress.unlogged:
            progress.unlogged, guard = one_step(trainer, progress, flops, guard=guard)
        row = progress.unlogged
        if trainer.eval_set is not None and due(config.train.eval_every):
            if (loss := evaluation.run(progress.step)) is None:
                log_without_evaluation(engine, log, progress)
                raise stopped_after(trainer, progress, save(trainer, progress))
            row["eval/loss"] = loss
        bad_row = trainer.source.next_error() if progress.step < total_steps else None
        stop_requested, any_can_go_on, row["perf/memory_gb"] = engine.max_over_ranks(
            trainer.stop.requested, bad_row is None, memory_gb(engine.device)
        )
        log.write(progress.step, row)
        console.step(progress.step, row)
        progress.unlogged = None
        for note in trainer.source.take_notes():
            console.say(note)
        if stop_requested or not any_can_go_on or due(config.checkpoint.every):
            log.sync()
            saved = save(trainer, progress)
            if stop_requested:
                raise stopped_after(trainer, progress, saved)
            if not any_can_go_on:
                raise DataError(
                    f"{bad_row}; steps 1 to {progress.step} are saved in {saved}: with data.on_bad_row=skip the same command "
                    "goes on from there"
                )


def one_step(
    trainer: Trainer, progress: Progress, flops: "FlopsMeter", *, guard: bool
) -> tuple[dict[str, float], bool]:
    """The next batch and a step on it; `progress` has made it then. Returns its metrics, and whether to guard the next one."""
    began_s = time.perf_counter()
    trainer.console.doing(f"step {progress.step + 1}")
    batch = trainer.source.next()
    loss, grad_norm, lr, waits = train_step(trainer, progress, batch, guard=guard)
    progress.step += 1
    progress.tokens += batch.denominators["tokens"]
    step_s = time.perf_counter() - began_s
    row = {
        "train/loss": loss,
        "train/grad_norm": grad_norm,
        "train/lr": lr,
        "train/tokens": progress.tokens,
        "perf/step_s": step_s,
        "perf/tokens_per_s": batch.num_tokens / step_s,
        **flops.utilization(batch, step_s),
    }
    return row, waits


def stopped_after(trainer: Trainer, progress: Progress, saved: str | None) -> Stopped:
    """After a save, or before there was anything to save."""
    where = f"after step {progress.step} of {trainer.total_steps}"
    held = f"saved in {saved}" if saved else "which the next start goes on from" if progress.step else "before it began"
    return stopped(trainer.engine, trainer.stop, where=where, saved=held)


def train_step(trainer: Trainer, progress: Progress, batch: Batch, *, guard: bool) -> tuple[float, float, float, bool]:
    """One optimizer step on a global mini-batch. Returns its loss, gradient norm, learning rate, and whether guarding goes on.

    guard: check that the step did to the parameters what it should; of adapters, A is seen to train a step later. Raises TrainingError where it did not, and where
    loss or gradient norm are not finite; then nothing is saved but the batch.
    """
    engine = trainer.engine
    engine.optimizer_zero_grad()
    with engine.train_mode():
        _, loss, _ = engine.forward_backward_step(engine.shard_data(batch))
    if not math.isfinite(loss):
        raise failed_step(trainer, progress, batch, f"the loss is {loss}")
    before = engine.guard_before_step() if guard else None
    grad_norm = engine.optimizer_step()
    found = engine.guard_after_step(before) if guard else []
    problems = guards.faults(found)
    if grad_norm.skipped is not None or not math.isfinite(grad_norm):
        why = f"the gradient norm is {float(grad_norm)}" + (f" ({grad_norm.skipped})" if grad_norm.skipped else "")
        raise failed_step(trainer, progress, batch, "; ".join([why, *problems[:5]]))
    if problems:
        told = problems_in_words(problems)
        raise failed_step(trainer, progress, batch, f"the first step did not train the model as it should: {told}")
    return loss, float(grad_norm), engine.lr_scheduler_step(), bool(found)


def failed_step(trainer: Trainer, progress: Progress, batch: Batch, what: str) -> TrainingError:
    """Saves the batch, and says what happened in the step after `progress` and where the last good state is."""
    step, directory = progress.step + 1, trainer.directory
    rows = [trainer.source.dataset.where(row) for row in trainer.source.rows]
    kept = trainer.engine.on_main(lambda: directory.save_failed_batch(step, batch, rows))
    return TrainingError(
        f"step {step}: {what}; the batch is in {kept}; {last_good(trainer.engine, directory, progress.step)}"
    )


class Evaluation:
    """The loss on data.eval, as often as it is asked for."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.reported = False

    def run(self, step: int) -> float | None:
        """Mean loss per trained token after `step`: the sums of all batches, divided once. None where a signal came first.

        Raises TrainingError where it is not finite.
        """
        trainer, report = self.trainer, Report()
        trainer.console.doing("evaluating")
        loss_sum = tokens = 0.0
        batches = eval_batches(trainer.eval_set, trainer.config.train.global_batch_size, report)
        with trainer.engine.eval_mode():
            for batch in itertools.islice(batches, trainer.config.train.eval_batches):
                if any(trainer.engine.max_over_ranks(trainer.stop.requested)):
                    return None
                _, ctx = trainer.engine.forward_backward_step(trainer.engine.shard_data(batch), forward_only=True)
                loss_sum += ctx["loss"] * batch.denominators["tokens"]
                tokens += batch.denominators["tokens"]
                trainer.console.detail(f"{tokens:,.0f} tokens")
        if not self.reported:
            say_left_out(trainer.console, "eval", report.counts, report.notes)
        self.reported = True
        if not math.isfinite(loss_sum / tokens):
            good = last_good(trainer.engine, trainer.directory, step)
            raise TrainingError(f"step {step}: the loss on data.eval is {loss_sum / tokens}; {good}")
        return loss_sum / tokens


def save(trainer: Trainer, progress: Progress) -> str:
    """Saves everything that the next step depends on. Returns the checkpoint's folder."""
    config, engine, directory = trainer.config, trainer.engine, trainer.directory
    if progress.step == trainer.total_steps:
        engine.on_main(directory.forget_export)
    trainer.console.doing("saving a checkpoint")
    state: Mapping[str, Any] = {
        "progress": dataclasses.asdict(progress),
        "data": trainer.source.state_dict(),
        "model": model_fingerprint(engine.config.model.path),
        "config": to_dict(config),
    }
    return engine.save_checkpoint(
        str(directory.checkpoints),
        config.checkpoint.remote,
        global_step=progress.step,
        max_ckpt_to_keep=config.checkpoint.keep,
        state=state,
    )


class FlopsMeter:
    """Model FLOPs utilization, where the peak of the device is known and mrl has a table of the model's family."""

    def __init__(self, trainer: Trainer) -> None:
        peak = peak_flops(trainer.engine.device)
        model, head = trainer.engine.config.model, trainer.engine.config.head
        self.hf = read_hf_config(model.path) if peak is not None else {}
        self.peak = peak * trainer.engine.world_size if self.hf.get("model_type") in FAMILIES else None
        self.adapters = None
        if self.peak is not None and model.lora is not None:
            self.adapters = adapter_weights(adapters(model.path, model.lora, head).values(), self.hf)

    def utilization(self, batch: Batch, step_s: float) -> dict[str, float]:
        """`perf/mfu` of a step, or nothing."""
        if self.peak is None:
            return {}
        labels = int((batch.loss_mask != 0).sum())
        flops = training_flops(self.hf, batch.lengths, labels, self.adapters)
        return {"perf/mfu": flops / (step_s * self.peak)}
