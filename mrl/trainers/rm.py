"""Training of reward models: `mrl sft`'s loop with a value head, rows that say how good answers are, a loss on scores.

Every rank runs this program. The losses are in mrl/algorithms/scores.py, rows and the token at which a score is read in
mrl/data/scored.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from mrl.algorithms.scores import DENOMINATOR, METRICS, ScoreLoss
from mrl.batch import Batch
from mrl.config.rm import RMConfig
from mrl.config.schema import RoleConfig
from mrl.data.batches import in_order
from mrl.data.dataset import Part, RowDataset
from mrl.data.mixture import MixedDataset
from mrl.data.scored import ScoredDataset, padding, scored_batch
from mrl.data.stream import Report
from mrl.roles.dispatch import MODEL
from mrl.trainers.rows import HFConfig, Task, role_config, run_task
from mrl.trainers.trainer import Trainer
from mrl.weights.hf_config import read_hf_config, vocab_size_of
from mrl.weights.tokenizer_files import write_pad_token


def run(config: RMConfig, command_line: str = "") -> None:
    """Trains a reward model as `run_task` does."""
    run_task(RMTask(config), command_line)


class RMTask(Task[RMConfig]):
    """Training of a reward model."""

    denominator = DENOMINATOR

    def __init__(self, config: RMConfig) -> None:
        super().__init__(config)
        self.loss_fn = ScoreLoss(config.loss.name, config.loss.resolved_centering)
        self.means = dict.fromkeys(METRICS[config.loss.name], DENOMINATOR)
        self.padding: tuple[int, str]  # set by `begin`: the token and its text

    def role(self, folder: str) -> RoleConfig:
        config = self.config
        longest, _ = config.longest_group
        return role_config(config, folder, longest=longest, optimizer=config.optimizer, head="value")

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> ScoredDataset:
        config = self.config
        return ScoredDataset(
            config.data, tokenizer, part=part, vocab_size=vocab_size_of(hf_config), loss=config.loss.name,
            pad_token_id=padding(hf_config, tokenizer), exchange=self.exchange,
        )  # fmt: skip

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        return scored_batch(rows, group=self.config.group)

    def eval_batches(self, dataset: RowDataset[Any], report: Report | None) -> Iterator[Batch]:
        assert isinstance(dataset, ScoredDataset | MixedDataset)
        size = self.config.train.global_batch_size
        for _, rows in in_order(dataset, size, report, weighs=lambda row: row.weight):
            yield self.batch_of(rows)

    def begin(self, trainer: Trainer, sets: Sequence[RowDataset[Any]]) -> None:
        rows = sets[0].sources[0] if isinstance(sets[0], MixedDataset) else sets[0]
        assert isinstance(rows, ScoredDataset)
        self.padding = token, text = rows.padding
        trainer.console.say(f"scores are read at the last token before the padding, which is {text!r} ({token})")
        kind = read_hf_config(trainer.dispatch.engines[MODEL].config.model.path)["model_type"]
        if kind not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
            trainer.console.say(
                f"transformers has no sequence classifier of model_type {kind}: what is exported loads in mrl alone, "
                "as model.path here and as reward.model.path"
            )

    def after_export(self, path: str) -> None:
        """Names the padding that scores were read by, in config.json and in the tokenizer."""
        write_pad_token(path, *self.padding)
