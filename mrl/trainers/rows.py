"""Makes the run of `mrl sft`, `mrl dpo` and `mrl rm`: one model trains on rows.

A `Task` says what differs between the commands: its rows, its batches and its loss. Their loop is one.
"""

from __future__ import annotations

import abc
import contextlib
import copy
import dataclasses
import functools
import itertools
import math
import operator
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, Literal, Protocol, Self, TypeVar

from transformers import PreTrainedTokenizerBase

from mrl.batch import Batch
from mrl.config.checks import check_schedule, micro_batch_tokens, streamed_keys
from mrl.config.command import RowsRunConfig, command_of
from mrl.config.load import to_dict
from mrl.config.resume import check_resume, expand_nulls
from mrl.config.schema import EngineConfig, ModelConfig, MTPConfig, OptimizerConfig, RoleConfig
from mrl.data.batches import BatchSource
from mrl.data.dataset import Part, RowDataset
from mrl.data.mixture import notes_of_rows
from mrl.data.stream import Report
from mrl.data.streamed import Exchange, one_process_exchange
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.base import PLAIN_CTX, BaseEngine, Ctx, LossFn
from mrl.engine.collective import OnMainInThread
from mrl.engine.registry import build_engine
from mrl.errors import DataError, ServerError, TrainingError
from mrl.ops.devices import device_type
from mrl.roles.dispatch import MODEL, WorkerDispatch
from mrl.roles.frozen import FrozenModel
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import (
    CheckpointSaver,
    check_background,
    last_good,
    load_newest,
    say_all,
    say_left_out,
    say_mtp_layers,
)
from mrl.trainers.console import Console
from mrl.trainers.opening import length_of, say_choices, say_length, say_model
from mrl.trainers.run_directory import StartState
from mrl.trainers.step_guard import StepGuard
from mrl.trainers.throughput import Throughput
from mrl.trainers.trainer import Trainer, console_of
from mrl.weights.hf_config import read_hf_config
from mrl.weights.hub import check_same_model, model_fingerprint, model_folder

C = TypeVar("C", bound=RowsRunConfig)
HFConfig = dict[str, Any]


class RowsTask(Protocol):
    """Gives the rows of a command for `mrl data show`. A `Task` is one. With sources in data.train it has a Task's
    `of_data` and `source`, too."""

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> RowDataset[Any]:
        """Returns the rows of data.train or data.eval."""


def role_config(
    config: Any,
    folder: str,
    *,
    longest: int,
    model: ModelConfig | None = None,
    engine: EngineConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    mtp: MTPConfig | None = None,
    head: Literal["lm", "value"] = "lm",
) -> RoleConfig:
    """Returns what an engine of a run on rows is built from.

    folder: of the model. longest: most tokens of a group of sequences; a micro-batch holds groups whole. model, engine:
    None for those that train.
    """
    engine = engine or config.engine
    tokens = micro_batch_tokens(engine.micro_batch, longest)
    return RoleConfig(
        model=dataclasses.replace(model or config.model, path=folder),
        engine=dataclasses.replace(engine, micro_batch=dataclasses.replace(engine.micro_batch, tokens=tokens)),
        optimizer=optimizer,
        seed=config.seed,
        head=head,
        packing=config.data.packing,
        mtp=mtp,
    )


class Task(abc.ABC, Generic[C]):
    """The rows of a command, the batches that they make, and the loss on them."""

    loss_fn: LossFn
    denominator = "tokens"
    """Of `Batch.denominators`, what the loss is divided by."""
    means: Mapping[str, str] = {}
    """Metric that `loss_fn` gives -> the denominator whose mean it is."""

    def __init__(self, config: C) -> None:
        self.config = config
        self.exchange: Exchange = one_process_exchange  # by which ranks get rows of data.train that are streamed

    def of_data(self, data: Any) -> Self:
        """Returns the same task on another section `data`."""
        made = copy.copy(self)
        made.config = dataclasses.replace(self.config, data=data)  # type: ignore[type-var]
        return made

    @abc.abstractmethod
    def role(self, folder: str) -> RoleConfig:
        """Returns the role that trains. folder: what `model.path` stands for."""

    @abc.abstractmethod
    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> RowDataset[Any]:
        """Returns the rows of data.train or data.eval."""

    @abc.abstractmethod
    def batch_of(self, rows: Sequence[Any]) -> Batch:
        """Returns the global mini-batch of some rows."""

    def source(self, dataset: RowDataset[Any]) -> BatchSource[Any]:
        """Returns the endless batches of data.train."""
        config = self.config
        return BatchSource(
            dataset, global_batch_size=config.train.global_batch_size, seed=config.seed, shuffle=config.data.shuffle,
            batch_of=self.batch_of,
        )  # fmt: skip

    @abc.abstractmethod
    def eval_batches(self, dataset: RowDataset[Any], report: Report | None) -> Iterator[Batch]:
        """Yields all usable rows of data.eval once. report: of rows left out, is filled on the way."""

    def begin(self, trainer: Trainer, sets: Sequence[RowDataset[Any]]) -> None:
        """Called once, when the model has been built and before a checkpoint is loaded. Collective.

        sets: data.train, and data.eval if there is one. Raises Stopped after a signal.
        """
        return  # most tasks need nothing

    def frozen_models(self, folder: str) -> Mapping[str, FrozenModel]:
        """Returns the key of each model beside the one that trains -> what a resume has to find there again.

        folder: of the model that trains.
        """
        return {}

    def prepare(self, dispatch: WorkerDispatch, batch: Batch) -> tuple[Batch, Ctx]:
        """Returns a global mini-batch with all that the loss needs, and the loss's own ctx. Collective; outside of the
        engine's modes."""
        return batch, {}

    def means_of(self, batch: Batch, ctx: Ctx) -> dict[str, float]:
        """Returns the metrics of a step on a prepared batch, but those that are means of nothing.

        ctx: of `prepare`, with "metrics" as an engine gives them.
        """
        found = ctx["metrics"]
        means = {name: found[name] for name, count in self.means.items() if name in found and batch.denominators[count]}
        return means | ({"train/mtp_loss": found["mtp_loss"]} if "mtp_loss" in found else {})  # not of an evaluation

    def after_export(self, path: str) -> None:
        """Adds to the exported model in the folder `path`. Called on the main process."""
        return  # most tasks add nothing


class RowsTrainer(Trainer):
    """Trains one model on rows."""

    role = MODEL
    saves_before = ServerError  # a teacher's

    source: BatchSource[Any]
    evaluation: Evaluation | None

    def __init__(self, task: Task[Any], console: Console, closing: contextlib.ExitStack) -> None:
        super().__init__(task.config, console, closing)
        self.task = task
        self.fingerprints: Mapping[str, dict[str, str]] = {}  # key -> what tells a frozen model from others
        config = self.config
        console.doing("reading the model's folder and the data")
        folder = model_folder(config.model.path, weights=config.model.init == "pretrained")
        hf_config = read_hf_config(folder)  # first: a wrong config.json fails the tokenizer too
        self.tokenizer = load_tokenizer(folder, config.model.trust_remote_code, config.data.chat_template)
        if streamed_keys(config.data):
            task.exchange = OnMainInThread(device_type(config.engine.device))
        train_set, eval_sets = self.open_rows(task, folder, hf_config)
        encoders = train_set.encoders()
        self.ends = EndTokens.of(folder, self.tokenizer, encoders) if encoders else EndTokens((), ())
        say_all(console, self.ends.notes(self.tokenizer, "the export's generation_config.json gets it, too"))
        say_all(console, notes_of_rows(train_set, eval_sets))
        engine = build_engine(task.role(folder))
        check_background(config.checkpoint.background, {"engine.backend": engine})
        self.dispatch = WorkerDispatch({MODEL: engine}, offload_idle=False)
        self.total_steps = length_of(
            config, train_set, console, rows=config.train.global_batch_size,
            check=functools.partial(check_schedule, config.optimizer),
        )  # fmt: skip
        engine.set_total_steps(self.total_steps)
        self.saves = CheckpointSaver(engine.device)
        self.watch_signals("step")
        self.source = task.source(train_set)
        self.lock()  # released last: closing a streamed source may wait for its reader
        closing.callback(self.source.close)
        self.evaluation = Evaluation(self, task, eval_sets) if eval_sets else None

    @property
    def engine(self) -> BaseEngine:
        """The engine of the model."""
        return self.dispatch.engines[MODEL]

    @property
    def model(self) -> ModelConfig:
        section: ModelConfig = self.config.model
        return section

    @property
    def where(self) -> str:
        return f"after step {self.progress.step} of {self.total_steps}"

    def next_error(self) -> DataError | None:
        return self.source.next_error(lambda: self.stop.requested)

    def write_model(self, path: str) -> None:
        super().write_model(path)
        self.dispatch.on_main(lambda: self.task.after_export(path))

    # -- the start ----------------------------------------------------------------------------------------------------

    def build(self, start: StartState) -> StartState:
        dispatch, console, task, engine = self.dispatch, self.console, self.task, self.engine
        say_choices(console, {"": engine})  # first: a run that ends for want of memory has said what it was made of
        console.doing("building the model")
        dispatch.init_model()
        say_model(console, "model", engine)
        rows = None if self.source.dataset.is_streamed else len(self.source.dataset)
        batch = self.config.train.global_batch_size
        say_length(console, steps=self.total_steps, batch=batch, noun="row", rows=rows, per_epoch=(rows or 0) / batch)
        folder = engine.config.model.path
        if start.checkpoint is not None and any(one.is_cached for one in task.frozen_models(folder).values()):
            start = self.check_before_cache(start)
        sets = [self.source.dataset, *([] if self.evaluation is None else self.evaluation.sets.values())]
        task.begin(self, sets)
        without_mtp = {"model.path": folder} if engine.config.mtp is None else {}
        read = {key: one.folder for key, one in task.frozen_models(folder).items() if one.is_read}
        say_mtp_layers(dispatch, console, without_mtp | read)
        self.fingerprints = self.fingerprints_now()
        return start

    def fingerprints_now(self) -> dict[str, dict[str, str]]:
        """Returns, by key, what tells the frozen models from others."""
        frozen = self.task.frozen_models(self.engine.config.model.path)
        return self.dispatch.on_main(lambda: {key: one.fingerprint() for key, one in frozen.items()})

    def check_before_cache(self, start: StartState) -> StartState:
        """Raises what a resume will raise if config, models or data are not the checkpoint's. Returns the start.

        The task may take hours for a cache, and write it over the one of the run. So an unreadable checkpoint is passed
        over, or ends the run, before that.
        """
        engine, dispatch = self.engine, self.dispatch

        def state_of(folder: str) -> dict[str, Any]:
            state = dispatch.on_main(lambda: engine.saved_state(folder))
            # where the state cannot be read alone, a load of all says what is wrong
            return dispatch.load_checkpoint(folder) if state is None else state

        start, state = load_newest(dispatch, self.directory, self.config, self.console, start, state_of)
        if state:  # an import has none
            check_resume(state["config"], to_dict(self.config))
            self.fingerprints = self.fingerprints_now()
            self.check_models(state)
            self.source.load_state_dict(state["data"])
        return start

    def restore(self, start: StartState) -> None:
        super().restore(start)
        self.progress.trained.clear()  # the layout or the precision may be another: the first step is watched again
        if self.progress.logged < self.total_steps:
            self.console.doing("reading the first rows")  # a bad one is an error before anything is written
            self.source.prefetch()
            if self.evaluation is not None:
                self.evaluation.read_rows()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def own_state(self) -> dict[str, Any]:
        return {"model": model_fingerprint(self.engine.config.model.path), "models": dict(self.fingerprints)}

    def check_models(self, state: Mapping[str, Any]) -> None:
        before, now = state["config"]["model"]["path"], self.config.model.path
        found = model_fingerprint(self.engine.config.model.path)
        check_same_model(state.get("model"), found, before=before, now=now)
        both = expand_nulls(state["config"], to_dict(self.config), command_of(type(self.config)))
        for key, found in self.fingerprints.items():
            before, now = (str(functools.reduce(operator.getitem, key.split("."), plain)) for plain in both)
            # older versions saved no "models"
            check_same_model(state.get("models", {}).get(key), found, before=before, now=now, key=key)


def run_task(task: Task[Any], command_line: str = "") -> None:
    """Trains, or goes on training, until `train.steps` or `train.epochs` are done, and exports the model.

    Called on every rank. Raises UserError for what the user can put right, and Stopped after a signal asked the run to
    stop and a checkpoint was saved.
    """
    with console_of(task.config) as console, contextlib.ExitStack() as closing:
        RowsTrainer(task, console, closing).run(loop, command_line)


def loop(trainer: RowsTrainer) -> None:
    """Makes steps until all are made; the last one is saved. Raises Stopped after a signal."""
    dispatch, source, task, progress = trainer.dispatch, trainer.source, trainer.task, trainer.progress
    head = trainer.engine.config.head
    throughput = Throughput(trainer.engine)
    while progress.step < trainer.total_steps:
        began_s, step = time.perf_counter(), progress.step + 1
        trainer.console.doing(f"step {step}")
        with trainer.saved_before_errors():
            batch = source.next()
            made, ctx = task.prepare(dispatch, batch)

        guard = StepGuard(trainer, MODEL, batch, head=head, may_be_zero=False, rows=source.taken_from())
        dispatch.zero_grad(MODEL)
        _, loss, found = dispatch.forward_backward(
            MODEL, made, task.loss_fn, ctx=PLAIN_CTX | ctx | {"last": True}, denominator=task.denominator, gathers=False
        )
        guard.before_update(loss)
        result = dispatch.optim_step(MODEL, guard=guard.watches_parameters)
        guard.after_update(result)

        progress.step = step
        progress.tokens += batch.denominators["tokens"]
        row = {
            "train/loss": loss,
            "train/grad_norm": float(result.grad_norm),
            "train/lr": result.lr,
            "train/tokens": progress.tokens,
        }
        row |= source.metrics | trainer.saves.metrics() | task.means_of(made, ctx | {"metrics": found})
        row |= throughput.metrics(batch, step_s=time.perf_counter() - began_s)
        trainer.finish_step(row)


class Evaluation:
    """The loss on data.eval, as often as it is asked for. sets: by name, "" where there is one alone."""

    def __init__(
        self,
        trainer: Trainer,
        task: Task[Any],
        sets: Mapping[str, RowDataset[Any]],
    ) -> None:
        self.trainer, self.task, self.sets = trainer, task, sets
        self.reported = False

    def batches(self, name: str, report: Report | None = None) -> Iterator[Batch]:
        """Yields the batches of one evaluation on a set. report: of rows left out, is filled on the way."""
        every = self.task.eval_batches(self.sets[name], report)
        return itertools.islice(every, self.task.config.train.eval_batches)

    def read_rows(self) -> None:
        """Reads all that is evaluated on, and raises what is wrong with a row."""
        for name in self.sets:
            for _ in self.batches(name):
                pass

    def run(self, step: int) -> dict[str, float] | None:
        """Returns the mean loss after `step`, and the task's other means: the sums of all batches, divided once; of
        each set, and of all together.

        None where a signal came first.

        Raises TrainingError where the loss is not finite.
        """
        self.trainer.console.doing("evaluating")
        means = {"loss": self.task.denominator, **self.task.means}
        all_sums, all_counts = dict.fromkeys(means, 0.0), dict.fromkeys(means, 0.0)
        metrics: dict[str, float] = {}
        for name in self.sets:
            measured = self._measure(name, means)
            if measured is None:
                return None
            sums, counts = measured
            if name:
                metrics |= {f"eval/{name}/{mean}": sums[mean] / counts[mean] for mean in means if counts[mean]}
            for mean in means:
                all_sums[mean] += sums[mean]
                all_counts[mean] += counts[mean]
        self.reported = True
        metrics = {f"eval/{mean}": all_sums[mean] / all_counts[mean] for mean in means if all_counts[mean]} | metrics
        if not math.isfinite(metrics["eval/loss"]):
            good = last_good(self.trainer.dispatch, self.trainer.directory, step)
            raise TrainingError(f"step {step}: the loss on data.eval is {metrics['eval/loss']}; {good}")
        return metrics

    def _measure(self, of: str, means: Mapping[str, str]) -> tuple[dict[str, float], dict[str, float]] | None:
        """Returns the sums of the means on one set and what they are divided by; None where a signal came first."""
        trainer, task, report = self.trainer, self.task, Report()
        dispatch = trainer.dispatch
        sums, counts = dict.fromkeys(means, 0.0), dict.fromkeys(means, 0.0)
        tokens = 0.0
        for batch in self.batches(of, report):
            if trainer.stop_requested:
                return None
            made, ctx = task.prepare(dispatch, batch)
            loss, found = dispatch.evaluate(MODEL, made, task.loss_fn, PLAIN_CTX | ctx, task.denominator)
            metrics = {"loss": loss, **task.means_of(made, ctx | {"metrics": found})}
            for name, mean in ((name, metrics[name]) for name in means if name in metrics):
                sums[name] += mean * made.denominators[means[name]]
                counts[name] += made.denominators[means[name]]
            tokens += made.denominators["tokens"]
            self.trainer.console.detail(f"{of} {tokens:,.0f} tokens".lstrip())
        if not self.reported:
            say_left_out(trainer.console, f"eval.{of}".rstrip("."), report.counts, report.notes)
        return sums, counts
