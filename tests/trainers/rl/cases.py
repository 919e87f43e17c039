"""What the ranks of a test world run: `mrl ppo`'s trainer, with things happening to it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

from mrl.config.load import from_dict
from mrl.config.ppo import PPOConfig
from mrl.trainers import ppo
from tests.trainers.cases import ended


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """Runs the trainer. Returns how it ended ("done", "stopped" or the error's class), its message, and what it printed."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return ended(lambda: ppo.run(from_dict(config, PPOConfig), "mrl ppo config.yaml"))


@contextlib.contextmanager
def critic_is_exported() -> Iterator[None]:
    """The run leaves its critic in output_dir/critic, as it leaves its actor in output_dir/hf."""

    def export(trainer: Any, *_: Any) -> None:
        trainer.dispatch.save_hf_model("critic", str(trainer.directory.path / "critic"))

    with after(ppo, "loop", export):
        yield


@contextlib.contextmanager
def after(owner: Any, name: str, then: Callable[..., Any]) -> Iterator[None]:
    """Calls `then` with the same arguments after each call of `owner.name`."""
    original = getattr(owner, name)

    def both(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        then(*args, **kwargs)
        return result

    with mock.patch.object(owner, name, both):
        yield


HAPPENINGS: dict[str, Callable[..., contextlib.AbstractContextManager[None]]] = {
    "critic_is_exported": critic_is_exported,
}
