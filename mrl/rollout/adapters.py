"""Sends an actor's adapters to inference servers that hold its base: all servers get the new ones, or none samples.

Each set of adapters gets a new name, and requests name it, so nothing is overwritten: a server without that adapter
answers no request. The adapters go as files in peft's form, in a folder that trainer and servers share. If one server
cannot load them, all drop the new name and keep the old one.

The same name again (`load_inplace`) would not do. vLLM 0.32.0 keeps that word with the adapter, and then reads the
files again for every step of sampling (lora/worker_manager.py, `add_adapter`). On the main process alone.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mrl.config.schema import LoraConfig
from mrl.engine.lora.folder import adapters, write_adapter_files
from mrl.engine.lora.identity import weights_fingerprint
from mrl.engine.lora.shapes import PREFIX as IN_PEFT
from mrl.errors import ConfigError, ServerError, one_line
from mrl.rollout.handover import WeightFolders, WeightSync, pause
from mrl.rollout.server import LAST_WORDS_S, Server, ServerGroup
from mrl.weights.families import family_of
from mrl.weights.hf_config import VISION_LANGUAGE, read_hf_config

KEY = "rollout.server.lora"
TARGETS = "actor.model.lora.target_modules"
PREFIX = "mrl-ppo-"
"""The beginning of adapters' names; a server's weights have the name of its newest adapter."""

STARTED_ADAPTER = "default"
"""Servers' name for the weights of their start."""

PROBE_IDS = tuple(range(12))
"""Tokens that every model has, and not one alone: of a padding token's zeros every adapter makes zeros."""

MIN_LOGPROB_CHANGE = 0.02
"""Nats a token by which a trial's adapters must change log-probs; they are as large as weights. Runs of a GPU's kernels
on one model differ by less."""


@dataclasses.dataclass(frozen=True)
class AdapterTraining:
    """An actor that trains adapters alone."""

    model: str  # folder of its base
    lora: LoraConfig


def check_adapter_training(actor: AdapterTraining) -> None:
    """Raises ConfigError for adapters that no server takes here. Reads config.json alone."""
    kind = read_hf_config(actor.model)["model_type"]
    if kind in VISION_LANGUAGE:
        raise ConfigError(KEY, "adapter", f"is not for models with images ({kind})", "set it to merged")
    for name, shape in adapters(actor.model, actor.lora, "lm").items():
        if shape.parameter is not None:
            what = "experts" if shape.experts else "routers"
            raise ConfigError(
                TARGETS,
                actor.lora.target_modules,
                f"takes in {name}, and {KEY} adapter is not for adapters of {what}",
                f"name linear layers outside of experts alone, or set {KEY} to merged",
            )


class AdapterWeightSync(WeightSync):
    """Sends adapters to inspected servers. Constructing it tries each kind of module that the actor adapts.

    text: token ids to score in that trial. in_use: gives the names of adapters that requests still name; None if
    servers are idle at each sync. Raises ConfigError if a server does not take the adapters, and ServerError if it has
    other weights than at its start.
    """

    name, why = "adapters", "alone, as files"

    def __init__(
        self,
        servers: ServerGroup,
        weights_dir: str,
        actor: AdapterTraining,
        text: Sequence[int] = PROBE_IDS,
        in_use: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self.servers, self._actor, self._in_use = servers, actor, in_use
        self._loaded: dict[str, pathlib.Path] = {}  # the folders of adapters that servers keep
        check_adapter_training(actor)
        self._shapes = adapters(actor.model, actor.lora, "lm")
        self._family = family_of(read_hf_config(actor.model)["model_type"])
        servers.map(self._check_start)
        pause(self.servers)  # ends requests of a killed run, before its files go
        try:
            servers.map(self._forget_others)
            self._folders = WeightFolders(weights_dir, bucket_mb=1)
        finally:
            servers.outcomes(lambda s: s.resume())
        self._try_each_kind(text)

    def _check_start(self, server: Server) -> None:
        """Refuses a server that cannot do it, as its answers and its files show."""
        if not server.adapters_on:
            why = f"needs servers that take adapters, and {server.http.url} was started without"
            raise ConfigError(KEY, "adapter", why, f"start it with {server.how_to_adapt}, or set it to merged")
        has = server.version()
        if has != STARTED_ADAPTER and not has.startswith(PREFIX):
            raise server.http.error(
                f"has a run's weights ({has!r}) in place of those of actor.model.path, and {KEY} adapter needs them; "
                "start it again"
            )
        if not _same_base(server.path, self._actor.model):
            raise server.http.error(
                f"serves {server.path} with other weights than those of actor.model.path, and {KEY} adapter needs the "
                "same; start it with that model"
            )

    def admit(self, server: Server) -> None:
        self._check_start(server)
        names = server.adapter_names()
        for name, folder in self._loaded.items():
            if name not in names:
                server.load_adapter(name, str(folder))

    def _forget_others(self, server: Server, but: Collection[str] = ()) -> None:
        """Drops a server's adapters of earlier weight syncs, also those of an earlier run: their files go next."""
        for name in server.adapter_names():
            if name.startswith(PREFIX) and name not in but:
                server.unload_adapter(name)

    def _try_each_kind(self, text: Sequence[int]) -> None:
        """Loads large adapters of one kind of module after the other into all servers; each must change the log-probs.

        vLLM 0.32.0 skips a module that it cannot adapt, with a warning in its log or none at all.
        """
        generator = torch.Generator().manual_seed(0)
        bases = self.servers.map(lambda s: s.score(text))
        for kind in sorted({name.rpartition(".")[2] for name in self._shapes}):
            tensors = {}
            for shape in (s for n, s in self._shapes.items() if n.rpartition(".")[2] == kind):
                tensors[shape.a_name] = torch.randn(shape.a_shape, generator=generator) / math.sqrt(shape.in_features)
                tensors[shape.b_name] = torch.randn(shape.b_shape, generator=generator) / shape.scale
            name, folder = self._written(tensors)
            try:
                found = self.servers.map(functools.partial(_scored, name=name, folder=folder, text=text))
            except ServerError as error:
                if error.status is None:
                    raise
                raise self._refused(kind, one_line(error, 240)) from error
            finally:
                self._drop(name)
            for server, base, scores in zip(self.servers, bases, found, strict=True):
                if sum(abs(a - b) for a, b in zip(base, scores, strict=True)) < MIN_LOGPROB_CHANGE * len(base):
                    raise self._refused(kind, f"{server.http.url} takes them, and its log-probs are those of the base")

    def _refused(self, kind: str, why: str) -> ConfigError:
        fix = f"name other modules in {TARGETS}, or set it to merged"
        return ConfigError(KEY, "adapter", f"cannot be with the adapters of {kind} ({why})", fix)

    def send(self, weights: Iterator[tuple[str, Tensor]]) -> str:
        """Sends adapters, as `BaseEngine.adapter_weights` gives them. The weights get the adapter's name."""
        return self._load(*self._written(dict(weights)))

    def _load(self, name: str, folder: pathlib.Path) -> str:
        """Loads new adapters into all servers, and drops those that nothing names. Running requests go on if in_use
        says what they name."""
        if self._in_use is None:
            pause(self.servers)
        try:
            try:
                self.servers.map(lambda s: s.load_adapter(name, str(folder)))
            except ServerError as failed:
                self._drop(name)
                raise ServerError(f"{failed}; no server samples with the new adapters") from failed
            self.servers.map(lambda s: s.set_version(name))  # from now on nobody asks for the old ones
            needed = {name} if self._in_use is None else {name, *self._in_use()}
            self.servers.map(functools.partial(self._forget_others, but=needed))
        finally:
            if self._in_use is None:
                self.servers.outcomes(lambda s: s.resume())
        self._loaded = {each: path for each, path in [*self._loaded.items(), (name, folder)] if each in needed}
        self._folders.keep_only(*self._loaded.values())
        return name

    def _written(self, tensors: Mapping[str, Tensor]) -> tuple[str, pathlib.Path]:
        """Returns a new name, and a new folder with the adapters. Raises ServerError where it cannot be written."""
        folder = self._folders.new()
        try:
            named = {self._name_for(name): tensor for name, tensor in tensors.items()}
            write_adapter_files(folder, self._actor.lora, self._actor.model, named)
        except OSError as error:
            self._folders.keep_only(*self._loaded.values())
            raise self._folders.unwritable(error) from error
        return PREFIX + folder.name, folder

    def _name_for(self, name: str) -> str:
        """Returns the name of an adapter's tensor in the class that config.json names. peft's is the text part's."""
        return name if self._family is None else IN_PEFT + self._family.in_files(name.removeprefix(IN_PEFT))

    def _drop(self, name: str) -> None:
        """Drops the adapter `name` from the servers that have it, and removes its files."""
        self.servers.outcomes(lambda s: s.unload_adapter(name))
        self._folders.keep_only(*self._loaded.values())

    def close(self) -> None:
        """Drops all adapters from the servers, and removes their files."""
        self.servers.call_within(LAST_WORDS_S, self._forget_others)
        self._folders.keep_only()


def _scored(server: Server, *, name: str, folder: pathlib.Path, text: Sequence[int]) -> list[float]:
    server.load_adapter(name, str(folder))
    return server.score(text, adapter=name)


def _same_base(served: str, model: str) -> bool:
    """Returns whether two folders have the same weights, by a sample of them; True where one cannot be read here."""
    folders = [pathlib.Path(served).expanduser(), pathlib.Path(model)]
    if not all(any(folder.glob("*.safetensors")) for folder in folders) or folders[0].samefile(folders[1]):
        return True
    return weights_fingerprint(str(folders[0])) == weights_fingerprint(str(folders[1]))
