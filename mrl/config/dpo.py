"""The keys of `mrl dpo`: those of `mrl sft`, preference rows, a loss on them, and a reference policy. And their checks.

`ROWS` has the losses as plain data, so that names are known without torch: the keys of `loss` that each reads, with its
numbers. mrl/algorithms/preference.py has the equations and papers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from mrl.config.answers import AnswerLossConfig, AnswerRowsConfig, AnswersConfig
from mrl.config.checks import (
    check_backend,
    check_cache,
    check_groups,
    check_never_trains,
    check_prompt_end,
    check_stream,
    check_train,
    check_trained,
    formats_of,
    refuse_unread,
)
from mrl.config.schema import REQUIRED, EngineConfig, ModelConfig, PolicyModelConfig, RoleModelConfig, key
from mrl.config.sources import EVAL_HELP, TRAIN_HELP, PreferenceShare, PreferenceSource, eval_of, train_of
from mrl.errors import ConfigError

# A key that a row has is read by that loss, and the number is its value where the config has null. beta of dpo: TRL,
# trl/trainer/dpo_config.py, beta; ipo and kto have the same there. simpo: ms-swift's defaults, within what its paper
# tries. orpo: lambda 0.1 as in TRL, orpo_config.py, and the SFT term of weight 1 that its equation has.
ROWS: Mapping[str, Mapping[str, float | bool]] = {
    "dpo": dict(beta=0.1, label_smoothing=0.0, reference_free=False, length_normalized=False, sft_weight=0.0),
    "ipo": dict(beta=0.1, length_normalized=False, sft_weight=0.0),
    "kto": dict(beta=0.1, desirable_weight=1.0, undesirable_weight=1.0, sft_weight=0.0),
    "orpo": dict(beta=0.1, sft_weight=1.0),
    "simpo": dict(beta=2.0, gamma=1.0, sft_weight=0.0),
}

NO_REFERENCE = ("orpo", "simpo")
"""Losses of the policy alone; so is dpo where it is reference-free."""

SINGLE_ROW_LOSSES = ("kto",)
"""Losses of single answers, each good or bad; of a pair they take both answers apart."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossConfig(AnswerLossConfig):
    """A loss and its numbers; null takes that of its row in `ROWS`."""

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


def check_dpo(config: DPOConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    check_train(config.train, config.data)
    check_stream(config.data, config.train)
    check_prompt_end(config.data)
    _check_loss(config)
    _check_reference(config)
    check_groups(config, config.engine)
    check_trained(config)


def _check_loss(config: DPOConfig) -> None:
    loss, batch = config.loss, config.train.global_batch_size
    read = ROWS[loss.name]
    for name in ("beta", "label_smoothing", "reference_free", "length_normalized", "gamma", "desirable_weight",
                 "undesirable_weight", "sft_weight"):  # fmt: skip
        value = getattr(loss, name)
        if value is not None and name not in read:
            others = ", ".join(other for other, row in ROWS.items() if name in row)
            raise ConfigError(
                f"loss.{name}", value, f"is not read by loss {loss.name}", f"leave it out; it is of {others}"
            )
    if loss.name == "kto" and not (loss.value("desirable_weight") or loss.value("undesirable_weight")):
        why = "is 0 and loss.undesirable_weight too"
        raise ConfigError("loss.desirable_weight", 0, why, "give one of them above 0")
    if loss.name == "kto" and batch < 2:
        why = "leaves kto's KL no other row to take an answer from"
        raise ConfigError("train.global_batch_size", batch, why, "give at least 2")
    for given, format in formats_of(config.data).items():
        if loss.is_paired and format == "unpaired":
            why = f"has no pairs, which loss.name {loss.name} is of"
            raise ConfigError(given, "unpaired", why, f"set loss.name to kto, or {given} to preference")


def _check_reference(config: DPOConfig) -> None:
    loss, reference = config.loss, config.reference
    if not loss.needs_reference:
        why = f"by loss {loss.name}, which needs no reference"
        if loss.name == "dpo":
            why = "with loss.reference_free"
        refuse_unread(reference, "reference", why, "leave it out")
        return
    if reference.cache and not loss.is_paired:
        why = "cannot be true with kto, whose KL pairs prompts with other rows' answers in each batch"
        raise ConfigError("reference.cache", True, why, "set it to false")
    check_cache(config.data, "reference.cache", reference.cache)
    if reference.engine is not None:
        check_groups(config, reference.engine, "reference.engine")
        check_never_trains(reference.engine, "reference.engine", "the reference")
        check_backend(config.reference_model, reference.engine, "reference")
