"""A model that is ready to be asked: its engine over all ranks, its tokenizer, its sampler."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator

from transformers import PreTrainedTokenizerBase

from mrl.config.checks import micro_batch_tokens
from mrl.config.inference import InferenceConfig, PlaceConfig
from mrl.config.schema import RoleConfig
from mrl.data.tokenizer import load_tokenizer
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError
from mrl.inference.places import renew, weights_of
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Sampler
from mrl.rollout.rollouts import Rollouts
from mrl.rollout.stops import EndTokens
from mrl.trainers.common import say_all
from mrl.trainers.console import Console
from mrl.trainers.rl.samplers import SyncedSampler, make_sampler
from mrl.weights.families import FAMILIES
from mrl.weights.hf_config import read_hf_config, vocab_size_of


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model with its weights, on every rank."""

    dispatch: WorkerDispatch  # its one role is the actor
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int | None
    end_tokens: tuple[int, ...]  # ids that end a completion
    sampler: Sampler
    rollouts: Rollouts
    place: PlaceConfig  # of its weights


@contextlib.contextmanager
def load_model(config: InferenceConfig, place: PlaceConfig, console: Console) -> Iterator[LoadedModel]:
    """Gives the model of `place` with its weights, ready to sample, and ends all of it afterwards. Collective."""
    console.doing(f"reading {place.given}")
    model, engine = config.model, config.engine
    vocab_size = vocab_size_of(read_hf_config(place.folder))
    tokenizer = load_tokenizer(place.tokenizer, model.trust_remote_code, config.data.chat_template)
    if place.chat_template is not None and config.data.chat_template is None:
        tokenizer.chat_template = place.chat_template
    tokens = micro_batch_tokens(engine.micro_batch, config.max_length)
    actor = build_engine(
        RoleConfig(
            model=dataclasses.replace(model, path=place.folder),
            engine=dataclasses.replace(engine, micro_batch=dataclasses.replace(engine.micro_batch, tokens=tokens)),
            optimizer=None,
            seed=config.seed,
            packing=config.data.packing,
        )
    )
    beside = config.rollout.backend != "native"
    dispatch = WorkerDispatch({"actor": actor}, offload_idle=beside and actor.device.type == "cuda")
    with contextlib.ExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory(prefix="mrl_weights_"))
        sampler = make_sampler(  # before there are weights: vLLM measures the memory that is free when it starts
            config.rollout, dispatch, tokenizer, folder=place.folder, dtype=model.dtype, max_length=config.max_length,
            output_dir=folder, progress=console.generated,
        )  # fmt: skip
        ends.callback(sampler.close)
        end_with = EndTokens.of(place.folder, tokenizer)
        say_all(console, end_with.notes(tokenizer, "completions end there, too"))
        rollouts = Rollouts(
            sampler, tokenizer, config.rollout, seed=config.seed, end_tokens=end_with.ids, system=config.data.system,
            max_prompt_length=config.data.max_prompt_length, on_main=dispatch.on_main,
        )  # fmt: skip
        ends.callback(rollouts.close)
        console.doing("reading the weights")
        place = dispatch.on_main(lambda: renew(place))
        _init(actor, place)
        ends.enter_context(SyncedSampler(sampler, dispatch)(0))
        yield LoadedModel(dispatch, tokenizer, vocab_size, end_with.ids, sampler, rollouts, place)


def _init(engine: BaseEngine, place: PlaceConfig) -> None:
    kind = read_hf_config(place.folder)["model_type"]
    if place.source is not None and engine.backend == "fsdp" and kind not in FAMILIES:
        raise ConfigError(
            "engine.backend", "fsdp", f"reads a {kind!r} model from a Hugging Face folder, and MODEL is {place.what}",
            "leave it out, or make a folder of it with `mrl convert export`",
        )  # fmt: skip
    with weights_of(place) as source:
        if source is None:
            engine.init_model()
        else:
            engine.init_model(source.reader)
