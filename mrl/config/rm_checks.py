"""Checks of the keys of `mrl rm` against each other: pure arithmetic, before any process starts."""

from __future__ import annotations

from mrl.config.checks import (
    check_backend,
    check_log,
    check_lora,
    check_micro_batch,
    check_optimizer,
    check_schedule,
    check_train,
)
from mrl.config.rm import FORMAT_OF, RMConfig
from mrl.errors import ConfigError


def check_rm(config: RMConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    check_train(config.train, config.data.eval)
    _check_loss(config)
    _check_micro_batch(config)
    check_optimizer(config.optimizer)
    if config.train.steps is not None:
        check_schedule(config.optimizer, config.train.steps, f"train.steps {config.train.steps}")
    check_backend(config.model, config.engine)
    check_lora(config.model)
    check_log(config.log)


def _check_loss(config: RMConfig) -> None:
    loss, data = config.loss, config.data
    if loss.centering is not None and not loss.is_paired:
        why = f"is not read by loss {loss.name}, whose labels say where scores lie"
        raise ConfigError("loss.centering", loss.centering, why, "leave it out; it is of bradley_terry")
    wanted = FORMAT_OF[loss.name]
    if data.format not in ("auto", wanted):
        name = next(name for name, format in FORMAT_OF.items() if format == data.format)
        why = f"is no form of row for loss.name {loss.name}"
        raise ConfigError("data.format", data.format, why, f"set loss.name to {name}, or data.format to {wanted}")
    if data.step_separator != "\n" and loss.name != "steps":
        why = f"is not used by loss.name {loss.name}, whose answers have no steps"
        raise ConfigError("data.step_separator", data.step_separator, why, "leave it out")


def _check_micro_batch(config: RMConfig) -> None:
    """Micro-batches that hold whole groups of sequences."""
    size = config.engine.micro_batch.size
    if size is not None and size % config.group:
        why = "is odd, and a micro-batch of bradley_terry holds both sequences of a pair"
        raise ConfigError("engine.micro_batch.size", size, why, f"give {size + 1}")
    longest, key = config.longest_group
    check_micro_batch(config.engine.micro_batch, longest, key)
