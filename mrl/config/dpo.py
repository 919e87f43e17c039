"""The keys of `mrl dpo`: those of `mrl sft`, preference rows, a loss on them, and a reference policy."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mrl.config.answers import AnswerLossConfig, AnswerRowsConfig, AnswersConfig
from mrl.config.preference_losses import NO_REFERENCE, ROWS, SINGLE_ROW_LOSSES
from mrl.config.rows import EVAL_HELP, TRAIN_HELP
from mrl.config.schema import REQUIRED, EngineConfig, ModelConfig, PolicyModelConfig, RoleModelConfig, key
from mrl.config.sources import PreferenceShare, PreferenceSource, eval_of, train_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(AnswerLossConfig):
    """A loss and its numbers; null takes that of its row in mrl/config/preference_losses.py."""

    name: Literal["dpo", "ipo", "kto", "orpo", "simpo"] = key("dpo", "the loss (docs/dpo.md)")
    beta: float | None = key(
        None,
        "strength of the pull to the reference: the factor of log-ratios. For orpo the weight of its odds ratio, for "
        "simpo the factor of mean log-probs. null is 0.1, for simpo 2",
        above=0,
        maximum=1000,
    )
    label_smoothing: float | None = key(
        None, "for dpo: the assumed share of pairs with wrong labels (cDPO). null is 0", minimum=0, maximum=0.499
    )
    reference_free: bool | None = key(None, "for dpo: take the reference's log-ratio as 0. null is false")
    length_normalized: bool | None = key(
        None, "for dpo and ipo: use the mean log-prob of an answer's tokens, not the sum. null is false"
    )
    gamma: float | None = key(None, "for simpo: the target margin of a pair. null is 1", minimum=0, maximum=1000)
    desirable_weight: float | None = key(None, "for kto: weight of good answers. null is 1", minimum=0)
    undesirable_weight: float | None = key(None, "for kto: weight of bad answers. null is 1", minimum=0)
    sft_weight: float | None = key(
        None,
        "weight of an added loss: the mean negative log-likelihood of chosen answers' tokens. null is 0, for orpo 1",
        minimum=0,
    )

    def value(self, name: str) -> float | bool:
        """Returns the value of a key that this loss reads, null resolved."""
        own = getattr(self, name)
        return ROWS[self.name][name] if own is None else own

    @property
    def resolved(self) -> dict[str, Any]:
        """Returns every key that this loss reads, null resolved."""
        return {name: self.value(name) for name in ROWS[self.name]}

    @property
    def needs_reference(self) -> bool:
        return self.name not in NO_REFERENCE and not (self.name == "dpo" and self.value("reference_free"))

    @property
    def is_paired(self) -> bool:
        return self.name not in SINGLE_ROW_LOSSES


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceReferenceConfig:
    model: RoleModelConfig = key(
        RoleModelConfig,
        "the reference policy of the log-ratios. Default with model.lora: the model without its adapters",
    )
    engine: EngineConfig | None = key(None, "its engine and layout; null is the model's", may_change=True)
    cache: bool = key(
        False,
        "compute its log-probs of all rows before the first step and keep them in output_dir/reference. It then "
        "takes no memory while training",
        may_change=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PreferenceDataConfig(AnswerRowsConfig):
    train: str | tuple[PreferenceShare, ...] = key(REQUIRED, TRAIN_HELP, moves=True, parse=train_of(PreferenceShare))
    eval: str | Mapping[str, PreferenceSource] | None = key(
        None, EVAL_HELP, may_change=True, parse=eval_of(PreferenceSource)
    )
    format: Literal["auto", "preference", "unpaired"] = key(
        "auto",
        "form of a row: preference (prompt, chosen, rejected; or chosen and rejected as whole conversations), or for "
        "kto unpaired (prompt, completion, label: true if good). auto detects it from the first row's fields",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOConfig(AnswersConfig):
    model: PolicyModelConfig = key(REQUIRED, "the policy that is trained")
    loss: LossConfig = key(LossConfig, "the loss on preferences")
    reference: PreferenceReferenceConfig = key(PreferenceReferenceConfig, "the policy that is compared with")
    data: PreferenceDataConfig = key(REQUIRED, "the data")

    @property
    def formats_of_train(self) -> set[str]:
        """The forms that rows of data.train are said to have, auto among them."""
        shares = () if isinstance(self.data.train, str) else self.data.train
        return {share.format or self.data.format for share in shares} or {self.data.format}

    @property
    def sequences_of_row(self) -> int:
        """Returns the most sequences of a row of data.train. A row of kto has one, unless its form says otherwise."""
        pairs = self.loss.is_paired or "preference" in self.formats_of_train
        return 2 if pairs else 1

    @property
    def reference_has_own_model(self) -> bool:
        """Whether the reference is an engine of its own: not the model without its adapters."""
        return self.loss.needs_reference and (self.model.lora is None or not self.reference_is_start)

    @property
    def reference_is_start(self) -> bool:
        """Whether the reference is what the model is before its first step, in the same engine."""
        own = self.reference
        return own.engine is None and own.model.path is None and own.model.dtype in (None, self.model.dtype)

    @property
    def reference_model(self) -> ModelConfig:
        """The reference's model, null resolved. One of another path has weights."""
        own, model = self.reference.model, dataclasses.replace(self.model, lora=None, mtp=None)
        if own.path is None:
            return dataclasses.replace(model, dtype=own.dtype or model.dtype)
        return dataclasses.replace(model, path=own.path, init="pretrained", dtype=own.dtype or model.dtype)
