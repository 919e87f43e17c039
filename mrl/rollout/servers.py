"""Inference servers as a sampler: they share the requests, and take new weights all together or not at all.

The main process alone talks to them; every rank gets what it got, errors too. What differs between kinds of servers is
a `Server`: vllm.py and sglang.py have one each.

**New weights** (trap 31). They are written whole to a folder that the servers see. Then every server is paused, which
ends or refuses what it was sampling; every server loads the folder; only when all have done so does any of them go on.
Where one cannot, all load the folder before it again, and one that cannot even do that stays paused: no token is
sampled from weights that are partly new. Each set of weights has a name, and `sample` asks each server for it before
and after: one that was started again meanwhile has other weights, and is an error.
"""

from __future__ import annotations

import abc
import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine.base import Completion
from mrl.engine.collective import OnMain
from mrl.engine.sampling import SamplingParams, noise_key
from mrl.errors import ConfigError, ServerError, UserError
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.http import Http
from mrl.rollout.weights import Shapes, WeightFolders

T = TypeVar("T")
"""`BaseEngine.on_main`: calls a function on the main process and gives every rank what it returned or the UserError it
raised."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """A text that the servers are asked about after every hand-over of weights."""

    tokens: Sequence[int]  # ids of the text
    log_probs: Callable[[Sequence[int]], Sequence[float]]
    """Gives the log-probs of `tokens[1:]` at temperature 1 by the trainer's own weights; called on every rank."""
    tolerance: float = 0.1  # largest mean difference: servers round otherwise, most of all in bfloat16


class Server(abc.ABC):
    """One inference server, as a sampler uses it; methods raise ServerError.

    `path`: where its own weights came from.
    """

    path: str

    def __init__(self, http: Http) -> None:
        self.http = http

    @abc.abstractmethod
    def inspect(self, *, sleeps: bool) -> int | None:
        """Finds out what serves there and refuses what cannot work.

        Returns the longest sequence, None where the server does not say.
        """

    def refuse(self, sampling: SamplingParams) -> None:  # noqa: B027 (not every server refuses something)
        """Raises ConfigError for parameters whose raw log-probs this server does not give."""

    @abc.abstractmethod
    def complete(self, request: SampleRequest) -> Completion: ...

    @abc.abstractmethod
    def score(self, tokens: Sequence[int]) -> list[float]:
        """Returns log-probs of `tokens[1:]` at temperature 1."""

    @abc.abstractmethod
    def pause(self) -> None:
        """Nothing is sampled from when this returns until `resume`."""

    @abc.abstractmethod
    def load(self, path: str, version: str) -> None:
        """Takes the weights in the folder and forgets what it had computed with others. Only while it is paused."""

    @abc.abstractmethod
    def resume(self) -> None: ...

    @abc.abstractmethod
    def version(self) -> str:
        """Returns the version that `load` was given last."""

    @abc.abstractmethod
    def sleep(self) -> None: ...

    @abc.abstractmethod
    def wake(self) -> None: ...


class AdapterServer(Server):
    """A server that was started with its own weights, and takes adapters beside them."""

    @abc.abstractmethod
    def complete(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        """adapter: the name of one that `load_adapter` gave; None is the model without."""

    @abc.abstractmethod
    def load_adapter(self, name: str, folder: str) -> None:
        """Takes the adapter of a folder in peft's form, which the server sees under the same path."""

    @abc.abstractmethod
    def unload_adapter(self, name: str) -> None: ...


def seed_of(request: SampleRequest) -> int:
    """63 bits that follow from the request's key and length, so that each sample and each turn has noise of its own."""
    return noise_key(request.key, len(request.tokens)) >> 1


@contextlib.contextmanager
def answers_of(server: Server, path: str) -> Iterator[None]:
    """Turns what goes wrong in reading an answer of `path` into a ServerError."""
    try:
        yield
    except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
        raise server.http.error(
            f"{path} answered otherwise than expected ({error!r}); see docs/rollout-servers.md for the versions that "
            "work"
        ) from error


def checked(server: Server, request: SampleRequest, completion: Completion) -> Completion:
    """Returns `completion` where it is what was asked for; ServerError where a server did something else in silence."""
    tokens, log_probs = completion.tokens, completion.log_probs
    what = None
    if not tokens or len(tokens) != len(log_probs) or len(tokens) > request.max_new_tokens:
        what = f"gave {len(tokens)} tokens and {len(log_probs)} log-probs for at most {request.max_new_tokens} tokens"
    elif not all(map(math.isfinite, log_probs)):
        what = "gave a log-prob that is not finite; its weights or its dtype may be at fault"
    elif not completion.finished and len(tokens) < request.max_new_tokens:
        what = (
            f"ended a completion after {len(tokens)} of {request.max_new_tokens} tokens; start it with room for "
            f"{len(request.tokens) + request.max_new_tokens} tokens and without limits of its own"
        )
    elif completion.finished and not request.stop and tokens[-1] not in request.stop_tokens:
        what = f"ended a completion at token {tokens[-1]}, which is none of {sorted(request.stop_tokens)}"
    if what is not None:
        raise server.http.error(what)
    return completion


class ServerSampler(Sampler):
    """Completions from the servers of `config.urls`, of the kind `server`.

    Collective as any sampler; constructing it is too.

    weights_dir: a folder of this run alone (`mrl.rollout.weights.weights_dir`). max_length: tokens of the longest
    sequence that will be asked for. Raises ConfigError or ServerError where a server is not there or not set up for it.
    """

    exact = False
    server: Callable[[Http], Server]

    def __init__(
        self,
        config: ServerConfig,
        *,
        is_main: bool,
        on_main: OnMain,
        weights_dir: str,
        max_length: int | None = None,
        probe: Probe | None = None,
    ) -> None:
        self._servers = [self.server(Http(url, timeout_s=config.timeout_s)) for url in config.urls]
        self._config, self._probe = config, probe
        self._is_main, self._on_main = is_main, on_main
        self._folders: WeightFolders | None = None
        self._shapes: Shapes = {}
        self._version: str | None = None
        self._loaded: dict[Server, tuple[str, str]] = {}
        self._asleep = self._updated = False
        on_main(lambda: self._start(weights_dir, max_length))

    def _start(self, weights_dir: str, max_length: int | None) -> None:
        for server, longest in zip(
            self._servers, self._each(lambda s: s.inspect(sleeps=self._config.sleep)), strict=True
        ):
            if max_length is not None and longest is not None and longest < max_length:
                raise ConfigError(
                    "rollout.server.urls",
                    why=(
                        f"{server.http.url} takes {longest} tokens and the longest sequence (data.max_prompt_length + "
                        f"rollout.max_new_tokens) has {max_length}"
                    ),
                    fix="start it for that many",
                )
            self._loaded[server] = (server.path, "as it was started")
        self._folders = WeightFolders(weights_dir, bucket_mb=self._config.bucket_mb)

    # --------------------------------------------------------------------------------------------------- completions

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Raises ServerError, or ConfigError for sampling parameters whose log-probs a server does not give."""
        assert self._updated, "update_weights comes before sample"
        self.wake()
        return self._on_main(lambda: self._sample(requests))

    def _sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        for sampling in {request.sampling for request in requests}:
            for server in self._servers:
                server.refuse(sampling)
        self._check_versions()
        todo = collections.deque(enumerate(requests))
        found: dict[int, Completion] = {}

        def work(server: Server) -> None:
            while True:
                try:
                    index, request = todo.popleft()
                except IndexError:
                    return
                found[index] = checked(server, request, server.complete(request))

        lines = min(self._config.concurrency, math.ceil(len(requests) / len(self._servers)))
        self._together([functools.partial(work, server) for _ in range(lines) for server in self._servers])
        self._check_versions()
        return [found[index] for index in range(len(requests))]

    def _check_versions(self) -> None:
        for server, version in zip(self._servers, self._each(lambda s: s.version()), strict=True):
            if version != self._version:
                raise server.http.error(
                    f"has the weights {version!r} and not {self._version!r} of this run: it was started again, or "
                    "another run uses it; run the same command again, with servers of its own"
                )

    def log_probs(self, tokens: Sequence[int]) -> list[list[float]]:
        """Returns log-probs of `tokens[1:]` at temperature 1, from each server. Collective."""
        return self._on_main(lambda: self._each(lambda s: s.score(tokens)))

    # ------------------------------------------------------------------------------------------------------- weights

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """All servers have the new weights when this returns.

        After an error (ServerError) those that can be reached have the old ones, or stay paused.
        """
        self.wake()
        written, error = None, None
        if self._is_main:
            assert self._folders is not None
            try:
                written = self._folders.write(weights)
            except UserError as caught:
                error = caught
        else:
            for _ in weights:
                pass
        self._on_main(lambda: self._hand_over(written, error))
        self._updated = True
        probe = self._probe
        if probe is not None:
            expected = list(probe.log_probs(probe.tokens))
            self._on_main(lambda: self._check_probe(probe, expected))

    def _hand_over(self, written: tuple[pathlib.Path, Shapes] | None, error: UserError | None) -> None:
        if error is not None:
            raise error
        assert written is not None and self._folders is not None
        folder, shapes = written
        assert shapes and self._shapes in ({}, shapes), "weights have other names or shapes than before"
        self._shapes = shapes
        new = (str(folder), folder.name)
        try:
            self._each(lambda s: s.pause())
        except ServerError as failed:
            self._outcomes(lambda s: s.resume())
            self._keep_loaded()
            raise failed
        try:
            self._each(lambda s: s.load(*new))
        except ServerError as failed:
            raise self._roll_back(failed) from failed
        self._each(lambda s: s.resume())
        self._loaded = dict.fromkeys(self._servers, new)
        self._version = folder.name
        self._folders.keep_only(folder)

    def _roll_back(self, failed: ServerError) -> ServerError:
        """Brings the old weights back everywhere. Returns the error to raise."""

        def back(server: Server) -> None:
            server.load(*self._loaded[server])
            server.resume()

        results = zip(self._servers, self._outcomes(back), strict=True)
        stuck = [server.http.url for server, result in results if isinstance(result, ServerError)]
        self._keep_loaded()
        after = f"; {', '.join(stuck)} cannot go back, take(s) no requests, and must be started again" if stuck else ""
        return ServerError(
            f"{failed}; no server samples from the new weights{after}; rollout.server.weights_dir must be one folder "
            "for all"
        )

    def _keep_loaded(self) -> None:
        """Removes all folders but the one that servers may have to load again."""
        assert self._folders is not None
        self._folders.keep_only(None if self._version is None else self._folders.root / self._version)

    def _check_probe(self, probe: Probe, expected: list[float]) -> None:
        for server, found in zip(self._servers, self._each(lambda s: s.score(probe.tokens)), strict=True):
            gap = sum(abs(a - b) for a, b in zip(expected, found, strict=True)) / len(expected)
            if not gap <= probe.tolerance:
                raise server.http.error(
                    f"gives log-probs that differ from the trainer's by {gap:.3g} per token (at most "
                    f"{probe.tolerance:g} is let pass); does it serve the model of actor.model.path?"
                )

    # ------------------------------------------------------------------------------------------------------ lifetime

    def sleep(self) -> None:
        if self._config.sleep and not self._asleep:
            self._on_main(lambda: self._each(lambda s: s.sleep()))
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._on_main(lambda: self._each(lambda s: s.wake()))
            self._asleep = False

    def close(self) -> None:
        """Removes the weights that were handed over. The servers go on: they were not started here."""
        if self._folders is not None:
            self._folders.keep_only(None)

    # --------------------------------------------------------------------------------------------------- all at once

    def _each(self, call: Callable[[Server], T]) -> list[T]:
        """Returns the results of `call` for each server, made at the same time, when all have ended. Raises the first
        error.
        """
        return [future.result() for future in self._futures(call)]

    def _outcomes(self, call: Callable[[Server], T]) -> list[T | ServerError]:
        """As `_each`, with a ServerError as the result of its server."""
        outcomes: list[T | ServerError] = []
        for future in self._futures(call):
            try:
                outcomes.append(future.result())
            except ServerError as error:
                outcomes.append(error)
        return outcomes

    def _futures(self, call: Callable[[Server], T]) -> list[concurrent.futures.Future[T]]:
        with concurrent.futures.ThreadPoolExecutor(len(self._servers)) as pool:
            return [pool.submit(call, server) for server in self._servers]

    def _together(self, calls: Sequence[Callable[[], None]]) -> None:
        """Makes all calls at the same time. At the first error the others are ended, and it is raised."""
        with concurrent.futures.ThreadPoolExecutor(len(calls) or 1) as pool:
            futures = [pool.submit(call) for call in calls]
            try:
                for future in concurrent.futures.as_completed(futures):
                    future.result()
            except BaseException:
                for server in self._servers:
                    server.http.hang_up()
                raise
            finally:
                concurrent.futures.wait(futures)
                for server in self._servers:
                    server.http.pick_up()
