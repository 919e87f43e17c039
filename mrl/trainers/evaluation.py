"""The loss on data.eval while a run on rows trains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from mrl.batch import Batch
from mrl.data.dataset import RowDataset
from mrl.data.stream import Report
from mrl.engine.base import PLAIN_CTX
from mrl.errors import TrainingError
from mrl.roles.role_checkpoints import MODEL
from mrl.trainers.common import last_good, say_left_out
from mrl.trainers.task import Task
from mrl.trainers.trainer import Trainer


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
