"""Checks of the keys of `mrl rm` against each other: pure arithmetic, before any process starts."""

from __future__ import annotations

from mrl.config.checks import check_groups, check_prompt_end, check_train, check_trained, formats_of
from mrl.config.rm import FORMAT_OF, RMConfig
from mrl.config.stream_checks import check_stream
from mrl.errors import ConfigError


def check_rm(config: RMConfig) -> None:
    """Raises ConfigError where keys of `config` contradict each other or one would be left unread."""
    check_train(config.train, config.data)
    check_stream(config.data, config.train)
    check_prompt_end(config.data, FORMAT_OF[config.loss.name])
    _check_loss(config)
    check_groups(config, config.engine)
    check_trained(config)


def _check_loss(config: RMConfig) -> None:
    loss, data = config.loss, config.data
    if loss.centering is not None and not loss.is_paired:
        why = f"is not read by loss {loss.name}, whose labels say where scores lie"
        raise ConfigError("loss.centering", loss.centering, why, "leave it out; it is of bradley_terry")
    wanted = FORMAT_OF[loss.name]
    for key, format in formats_of(data).items():
        if format not in (None, "auto", wanted):
            name = next(name for name, of_loss in FORMAT_OF.items() if of_loss == format)
            why = f"is no form of row for loss.name {loss.name}"
            raise ConfigError(key, format, why, f"set loss.name to {name}, or {key} to {wanted}")
    if data.step_separator != "\n" and loss.name != "steps":
        why = f"is not used by loss.name {loss.name}, whose answers have no steps"
        raise ConfigError("data.step_separator", data.step_separator, why, "leave it out")
