"""Inference servers as a sampler on every rank: they take new weights all together or not at all.

The main process alone talks to them, through a `Fleet` (fleet.py). `ServerSampler` gives its answers and errors to
every rank. A `Server` is a kind of server: vllm.py, sglang.py and ranks.py have one each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine.base import Completion
from mrl.engine.collective import OnMain
from mrl.errors import UserError
from mrl.rollout.adapters import AdapterTraining
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.fleet import Fleet, Probe
from mrl.rollout.http import HttpClient
from mrl.rollout.server import Server


class ServerSampler(Sampler):
    """Completions from a `Fleet` of the kind `server`, on every rank.

    Collective as any sampler; constructing it is too. Arguments and errors are those of `Fleet`.
    """

    server: Callable[[HttpClient], Server]

    def __init__(
        self,
        config: ServerConfig,
        *,
        is_main: bool,
        on_main: OnMain,
        weights_dir: str,
        max_length: int | None = None,
        probe: Probe | None = None,
        device: torch.device = torch.device("cpu"),  # noqa: B008 (nothing changes it)
        adapted: AdapterTraining | None = None,
        ahead: int = 0,
        say: Callable[[str], None] = lambda line: None,
        vocab_size: int | None = None,
    ) -> None:
        self._config, self._probe, self._adapted = config, probe, adapted
        self._is_main, self._on_main = is_main, on_main
        self._fleet: Fleet | None = None
        self._asleep = self._updated = False

        def start() -> None:
            self._fleet = Fleet(
                self.server, config, weights_dir=weights_dir, max_length=max_length, device=device, adapted=adapted,
                ahead=ahead, say=say, vocab_size=vocab_size,
            )  # fmt: skip

        on_main(start)

    @property
    def fleet(self) -> Fleet:
        """The servers; on the main process alone."""
        assert self._fleet is not None, "another process than the main one does not talk to servers"
        return self._fleet

    @property
    def handover(self) -> str | None:
        """The name of the weight sync, also of one that `auto` chose; None on other processes than the main one."""
        return None if self._fleet is None else self._fleet.handover.name

    @property
    def notes(self) -> Sequence[str]:
        if self._fleet is None:
            return ()
        handover = self._fleet.handover
        why = f" ({handover.why})" if handover.why else ""
        return (f"rollout.server.handover: {handover.name}{why}",)

    @property
    def takes_adapters(self) -> bool:
        return self._adapted is not None

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions. Raises ServerError, or ConfigError for parameters whose log-probs a server does not
        give."""
        assert self._updated, "update_weights comes before sample"
        self.wake()
        return self._on_main(lambda: self.fleet.sample(requests))

    def log_probs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Returns log-probs of `tokens[1:]` at temperature 1, from each server. Collective."""
        return self._on_main(lambda: self.fleet.log_probs(tokens))

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Gives all servers the new weights.

        After an error (ServerError) those that can be reached have the old ones, or stay paused.
        """
        self._on_main(lambda: self.fleet.find_servers())
        self.wake()
        error: UserError | None = None
        if self._is_main:
            try:
                self.fleet.send(weights)
            except UserError as caught:
                error = caught
        else:
            for _ in weights:
                pass
        self._on_main(lambda: _raise(error))
        self._updated = True
        probe = self._probe
        if probe is not None:
            expected = list(probe.log_probs(probe.tokens))
            self._on_main(lambda: self.fleet.check_probe(probe, expected))

    def sleep(self) -> None:
        if self._config.sleep and not self._asleep:
            self._on_main(lambda: self.fleet.sleep())
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._on_main(lambda: self.fleet.wake())
            self._asleep = False

    def close(self) -> None:
        """Ends the fleet, as `Fleet.close`."""
        if self._fleet is not None:
            self._fleet.close()


def _raise(error: UserError | None) -> None:
    if error is not None:
        raise error
