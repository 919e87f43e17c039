"""Checks of the keys of `mrl dpo` against each other: pure arithmetic, before any process starts."""

from __future__ import annotations

from mrl.config.checks import (
    check_backend,
    check_groups,
    check_prompt_end,
    check_train,
    check_trained,
    formats_of,
    refuse_unread,
)
from mrl.config.dpo import DPOConfig
from mrl.config.ppo_checks import check_never_trains
from mrl.config.preference_losses import ROWS
from mrl.config.stream_checks import check_cache, check_stream
from mrl.errors import ConfigError


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
    for key, format in formats_of(config.data).items():
        if loss.is_paired and format == "unpaired":
            why = f"has no pairs, which loss.name {loss.name} is of"
            raise ConfigError(key, "unpaired", why, f"set loss.name to kto, or {key} to preference")


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
