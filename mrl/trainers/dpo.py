"""Preference training: `mrl sft`'s loop with rows of preferences, a loss on them, and a reference policy.

Every rank runs this program. The losses are in mrl/algorithms/preference.py, rows in mrl/data/preferences.py.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.algorithms.preference import (
    DENOMINATOR,
    METRIC_DENOMINATORS,
    LossSettings,
    PreferenceLoss,
    answer_log_probs,
    kl_estimate,
    with_reference,
)
from mrl.batch import Batch
from mrl.config.dpo import DPOConfig
from mrl.config.load import to_dict
from mrl.config.roles import rewrite_error_keys
from mrl.config.schema import RoleConfig
from mrl.data.batches import in_order
from mrl.data.dataset import Part, RowDataset
from mrl.data.mixture import MixedDataset
from mrl.data.preferences import (
    PreferenceDataset,
    batch_of,
    with_mtp_mask,
    with_other_answers,
)
from mrl.data.stream import Report
from mrl.data.tokenizer import check_same_vocabulary, load_tokenizer
from mrl.data.vision import load_vision
from mrl.engine.base import PLAIN_CTX, Ctx
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError, DataError
from mrl.roles.dispatch import MODEL, WorkerDispatch
from mrl.roles.frozen import FrozenModel
from mrl.trainers.caches import RowCache, Said, fill, with_precision
from mrl.trainers.console import Console
from mrl.trainers.opening import say_choices, say_model
from mrl.trainers.rows import HFConfig, Task, role_config, run_task
from mrl.trainers.trainer import Trainer
from mrl.weights.hf_config import read_hf_config, reads_images, vocab_size_of
from mrl.weights.hub import model_folder


def run(config: DPOConfig, command_line: str = "") -> None:
    """Trains on preferences as `run_task` does."""
    run_task(DPOTask(config), command_line)


class DPOTask(Task[DPOConfig]):
    """Training on preferences."""

    denominator = DENOMINATOR

    def __init__(self, config: DPOConfig) -> None:
        super().__init__(config)
        loss = config.loss
        self.loss_fn = PreferenceLoss(loss.name, LossSettings(**loss.resolved))
        absent = set() if loss.is_paired else {"rewards/accuracy"}  # kto's pairs may be in two micro-batches
        if not (loss.is_paired and loss.needs_reference):
            absent.add("reference/kl")
        self.means = {name: count for name, count in METRIC_DENOMINATORS.items() if name not in absent}
        if not loss.is_paired:
            self.means |= {"kto/kl": "sequences"}  # of a batch; `means_of` adds it
        self.reference_folder = ""  # set by `begin`; "" where the loss needs no reference
        self.cache: RowCache | None = None

    def role(self, folder: str) -> RoleConfig:
        config = self.config
        longest, _ = config.longest_group
        return role_config(config, folder, longest=longest, optimizer=config.optimizer, mtp=config.model.mtp)

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: HFConfig, part: Part
    ) -> PreferenceDataset:
        if part == "train":
            self._check_reference(tokenizer, hf_config)
        paired, vocab_size = self.config.loss.is_paired, vocab_size_of(hf_config)
        return PreferenceDataset(
            self.config.data, tokenizer, part=part, vocab_size=vocab_size, paired=paired,
            vision=load_vision(folder, hf_config), exchange=self.exchange,
        )  # fmt: skip

    def batch_of(self, rows: Sequence[Any]) -> Batch:
        return batch_of(rows, group=self.config.group)

    def eval_batches(self, dataset: RowDataset[Any], report: Report | None) -> Iterator[Batch]:
        assert isinstance(dataset, PreferenceDataset | MixedDataset)
        size, least = self.config.train.global_batch_size, 1 if self.config.loss.is_paired else 2
        for _, rows in in_order(dataset, size, report, weighs=lambda row: row.weight, least=least):
            if len(rows) < least:  # kto's, as the only one
                why = f"{dataset.path}: has one row that can be used, and kto's KL takes the answer to another"
                raise DataError(f"data.{dataset.part}", why=why, fix="give two rows at least")
            yield self.batch_of(rows)

    # -- the reference ------------------------------------------------------------------------------------------------

    def _check_reference(self, tokenizer: PreTrainedTokenizerBase, hf_config: HFConfig) -> None:
        """Raises ConfigError where it does not read rows as the model does: its log-probs would be of another text."""
        path = self.config.reference.model.path
        if path is None or not self.config.loss.needs_reference:
            return
        with self._reference_keys():
            folder = model_folder(path, weights=False)
            reads = reads_images(read_hf_config(folder))
            own = load_tokenizer(folder, self.config.model.trust_remote_code).get_vocab()
        if reads_images(hf_config) and not reads:
            why = "reads text alone, and model.path reads images"
            raise ConfigError("reference.model.path", path, why, "give a model that reads images")
        check_same_vocabulary(tokenizer.get_vocab(), own, path, "reference.model.path", "model.path", role="reference")

    def begin(self, trainer: Trainer, sets: Sequence[RowDataset[Any]]) -> None:
        config, dispatch = self.config, trainer.dispatch
        if not config.loss.needs_reference:
            return
        self.reference_folder = self._folder_of_reference(dispatch.engines[MODEL].config.model.path)
        if config.model.lora is not None and not config.reference_has_own_model:
            dispatch.bases["reference"] = MODEL
        if config.reference.cache:
            self._fill_cache(trainer, sets)
        elif config.reference_has_own_model:
            trainer.console.doing("building the reference")
            self._build_reference(dispatch, trainer.console)

    def frozen_models(self, folder: str) -> Mapping[str, FrozenModel]:
        if not self.config.loss.needs_reference:
            return {}
        is_cached = self.config.reference.cache
        return {"reference.model.path": FrozenModel(self._folder_of_reference(folder), is_cached=is_cached)}

    def _folder_of_reference(self, folder: str) -> str:
        """folder: of the model that trains."""
        path = self.config.reference.model.path
        with self._reference_keys():
            return folder if path is None else model_folder(path, weights=True)

    def _reference_keys(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context; errors about `engine.x` or `model.x` name the reference's own key in it."""
        return rewrite_error_keys("reference", has_engine=self.config.reference.engine is not None, of="model")

    def _build_reference(self, dispatch: WorkerDispatch, console: Console) -> None:
        config = self.config
        with self._reference_keys():
            longest, _ = config.longest_group
            role = role_config(
                config, self.reference_folder, longest=longest, model=config.reference_model,
                engine=config.reference.engine,
            )  # fmt: skip
            engine = build_engine(role)
            if config.reference.engine is not None:  # else it chooses as the policy's
                say_choices(console, {"reference": engine})
            engine.init_model()
            say_model(console, "reference", engine)
        dispatch.engines["reference"] = engine

    def _fill_cache(self, trainer: Trainer, sets: Sequence[RowDataset[Any]]) -> None:
        """Reads the log-probs of all rows, or computes those that are not known yet, before the first step."""
        config, dispatch, plain = self.config, trainer.dispatch, to_dict(self.config)
        made_by = {
            "model": dispatch.on_main(FrozenModel(self.reference_folder).fingerprint),
            "keys": {key: plain["model"].get(key) for key in ("init", "dtype")},
            "seed": config.seed,
            "reference": plain["reference"]["model"]["dtype"],
        } | with_precision(config.reference.engine or config.engine)
        place = trainer.directory.path / "reference"
        self.cache = RowCache(place, made_by, ("log_probs",), per_token=False)
        is_model = config.reference_is_start and config.model.lora is None

        def build() -> Callable[[Batch], Said]:
            if not config.reference_is_start:
                self._build_reference(dispatch, trainer.console)
            role = MODEL if is_model else "reference"
            return lambda batch: {"log_probs": answers_by(dispatch, role, batch)}

        every = itertools.chain.from_iterable(self.eval_batches(rows, None) for rows in sets)
        fill(self.cache, every, build, trainer, name="reference", what="the reference's log-probs")

    def _reference_of(self, dispatch: WorkerDispatch, batch: Batch) -> Tensor:
        return answers_by(dispatch, "reference", batch) if self.cache is None else self.cache.of(batch)["log_probs"]

    def means_of(self, batch: Batch, ctx: Ctx) -> dict[str, float]:
        return super().means_of(batch, ctx) | ({"kto/kl": ctx["kl"]} if "kl" in ctx else {})

    # -- a batch ------------------------------------------------------------------------------------------------------

    def prepare(self, dispatch: WorkerDispatch, batch: Batch) -> tuple[Batch, Ctx]:
        loss = self.config.loss
        ctx: Ctx = {}
        if self.config.model.mtp is not None:
            batch = with_mtp_mask(batch)
        if not loss.needs_reference:
            return batch, ctx
        if not loss.is_paired:
            others = with_other_answers(batch, self.config.data.max_length)
            ctx["kl"] = kl_estimate(answers_by(dispatch, MODEL, others), self._reference_of(dispatch, others))
        return with_reference(batch, self._reference_of(dispatch, batch)), ctx


def answers_by(dispatch: WorkerDispatch, role: str, batch: Batch) -> Tensor:
    """Returns [S] float64, on every rank: a role's log-probs of the answers of a global mini-batch, without dropout."""
    return answer_log_probs(batch, dispatch.forward(role, batch, PLAIN_CTX)["log_probs"])
