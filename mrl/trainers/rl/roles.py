"""The roles of `mrl ppo`: the folders of their models, their engines, and how a resume knows the models again.

`References` asks the reference, or the teachers of on-policy distillation, about a rollout's tokens.

Dimensions: `T` tokens of all sequences of the rollout end to end, `S` sequences, `K` ids of a teacher, likeliest first.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.algorithms.distill import TEACHER, TEACHER_IDS, TeacherDivergence, teacher_numbers
from mrl.algorithms.kl import kl_estimate, sequence_kl
from mrl.algorithms.ragged import to_tokens
from mrl.algorithms.recipes import Recipe
from mrl.batch import Batch
from mrl.config.ppo import PPOConfig
from mrl.config.recipes import OPD_NAMES
from mrl.config.roles import (
    engine_of,
    frozen_roles,
    is_served,
    model_of,
    reference_is_base,
    rewrite_role_error_keys,
    role_configs,
    section_of,
    teachers_of,
)
from mrl.convert.exporting import write_merged_copy
from mrl.data.tokenizer import check_same_vocabulary, load_tokenizer
from mrl.engine.base import BaseEngine
from mrl.engine.collective import join_processes, on_main
from mrl.engine.registry import build_engine
from mrl.ops.devices import device_type
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.frozen import Ask, FrozenModel, TeacherServer, ask_role, ask_server
from mrl.trainers.common import check_background
from mrl.trainers.teacher import known_vocab_size
from mrl.trainers.trainer import Trainer
from mrl.weights.adapter_folder import is_adapter
from mrl.weights.hf_config import read_hf_config
from mrl.weights.hub import model_fingerprint, model_folder


def role_folder(config: PPOConfig, role: str) -> str:
    """Returns the folder of a role's model. Adapters are merged into output_dir/merged first. Collective."""
    model = model_of(config, role)
    with rewrite_role_error_keys(config, role):
        adapter = pathlib.Path(model.path).expanduser()
        if is_adapter(adapter):
            join_processes(device_type(engine_of(config, role).device))  # one of them merges
            return on_main(lambda: write_merged_copy(adapter, pathlib.Path(config.output_dir, "merged")))
        return model_folder(model.path, weights=model.init == "pretrained" and not is_served(config, role))


def make_dispatch(config: PPOConfig, folders: Mapping[str, str], recipe: Recipe) -> WorkerDispatch:
    """Returns the roles with their engines. They have no models yet."""
    engines: dict[str, BaseEngine] = {}
    for role, role_config in role_configs(config, folders, recipe).items():
        with rewrite_role_error_keys(config, role):
            engines[role] = build_engine(role_config)
    by_key = {f"{role}.engine.backend": engine for role, engine in engines.items()}
    check_background(config.checkpoint.background, by_key)
    offload_idle = config.train.offload_idle == "always"
    if config.train.offload_idle == "auto":
        offload_idle = engines["actor"].device.type == "cuda"
    bases = {"reference": "actor"} if "reference" in folders and reference_is_base(config) else {}
    return WorkerDispatch(engines, offload_idle=offload_idle, constant=frozen_roles(config), bases=bases)


def role_fingerprints(config: PPOConfig, folders: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns by role what tells its model from others; of a frozen one a sample of the weights, too."""
    frozen = frozen_roles(config)
    return {
        role: FrozenModel(folder, is_read=not is_served(config, role)).fingerprint()
        if role in frozen
        else model_fingerprint(folder)
        for role, folder in folders.items()
    }


@dataclasses.dataclass(frozen=True)
class References:
    """The reference; or, of on-policy distillation, the teachers by the numbers that `TEACHER_OF` has of sequences.

    asked: how each is asked, by its role. ids: how many ids each is asked for, of algorithm.distill. The actor's output
    layer has `vocab_size` rows, and no id beyond them.
    """

    asked: Mapping[str, Ask]
    ids: tuple[int, ...] = ()
    distill: TeacherDivergence | None = None
    vocab_size: int = 0
    same_layout: bool | None = None
    """Whether the reference starts with the actor's weights and computes in the same layout; None: they are others."""

    @property
    def names(self) -> list[str]:
        """Each one's, for metrics."""
        return [role.removeprefix("reference.others.") for role in self.asked]

    def say(self, batch: Batch, *, size: int, temperature: float) -> dict[str, Tensor]:
        """Returns token fields: ref_log_probs of the sampled tokens and, of algorithm.distill, a teacher's ids and
        their log-probs; 0 where nothing trains. Whole vocabularies have log-probs alone, in the order of ids. size:
        sequences of a mini-batch, as in training."""
        trained_T, of_T = batch.loss_mask != 0, to_tokens(teacher_numbers(batch), batch.lengths)
        found = {"ref_log_probs": torch.zeros(batch.num_tokens)}
        if self.distill is not None:
            width = max(self.ids)
            if self.distill.tail:
                found[TEACHER_IDS] = torch.zeros(batch.num_tokens, width, dtype=torch.int32)
            found[TEACHER] = torch.zeros(batch.num_tokens, width)
            found[TEACHER][trained_T] = -torch.inf  # of a teacher that says fewer ids than another
        for number, ask in enumerate(self.asked.values()):
            own = (teacher_numbers(batch) == number).nonzero()[:, 0].tolist()
            if not own:
                continue
            ctx = {"temperature": temperature} | ({"top": self.ids[number]} if self.ids else {})
            parts = [ask(part, dict(ctx)) for part in mini_batches(batch.select(own), size)]
            predictions = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            here_T, trains = (of_T == number) & trained_T, trained_T[of_T == number]
            found["ref_log_probs"][here_T] = predictions["log_probs"][trains].float()
            if self.distill is not None:
                ids, log_probs = predictions["top_tokens"][trains], predictions["top_log_probs"][trains].float()
                if not self.distill.tail:
                    found[TEACHER][here_T] = torch.zeros_like(log_probs).scatter(1, ids, log_probs)
                    continue
                known, at = ids < self.vocab_size, here_T.nonzero()[:, 0]
                found[TEACHER_IDS][at, : ids.shape[1]] = (ids * known).int()
                found[TEACHER][at, : ids.shape[1]] = log_probs.masked_fill(~known, -torch.inf)
        return found

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Returns of each of several teachers the KL of its sequences, where a rollout has some."""
        if len(self.asked) < 2:
            return {}
        row = {}
        for number, name in enumerate(self.names):
            own = (teacher_numbers(batch) == number).nonzero()[:, 0].tolist()
            if own:
                row[f"actor/sequence_kl/{name}"] = kl_of_sequences(batch.select(own))
        return row


def mini_batches(batch: Batch, size: int) -> Iterator[Batch]:
    """Consecutive parts of `size` sequences, each with denominators of its own."""
    for start in range(0, batch.num_sequences, size):
        yield batch.select(range(start, min(start + size, batch.num_sequences))).with_denominators()


def kl_of_sequences(batch: Batch) -> float:
    """Returns nats per sequence, policy to reference, of sampled tokens."""
    fields = batch.token_fields
    kl_T = kl_estimate(fields["old_log_probs"].double(), fields["ref_log_probs"].double(), "k1")
    return sequence_kl(kl_T, batch.loss_mask, batch.lengths)


def with_ids(batch: Batch) -> Batch:
    """Returns a mini-batch with further labels: the ids of its teachers' log-probs."""
    fields = dict(batch.token_fields)
    ids = fields.pop(TEACHER_IDS, None)
    if ids is None:  # all, in their order
        ids = torch.arange(fields[TEACHER].shape[1]).expand(fields[TEACHER].shape)
    labels = torch.cat([batch.labels[:, None], ids.long()], dim=1)
    return dataclasses.replace(batch, labels=labels, token_fields=fields)


# -- once, at the start ------------------------------------------------------------------------------------------------


def check_vocabularies(config: PPOConfig, folders: Mapping[str, str], tokenizer: PreTrainedTokenizerBase) -> None:
    """Raises ConfigError where the actor and its reference, or a teacher, do not have the same tokens."""
    who = "teacher" if config.algorithm.name in OPD_NAMES else "reference"
    for role in teachers_of(config):
        if folders.get(role, folders["actor"]) == folders["actor"]:
            continue
        with rewrite_role_error_keys(config, role):
            own = load_tokenizer(folders[role], config.actor.model.trust_remote_code).get_vocab()
        path = model_of(config, role).path
        check_same_vocabulary(tokenizer.get_vocab(), own, path, f"{role}.model.path", "actor.model.path", role=who)


def references_of(trainer: Trainer, folders: Mapping[str, str], recipe: Recipe) -> References | None:
    """Returns them; None if the algorithm needs none. folders: of the roles."""
    config, dispatch = trainer.config, trainer.dispatch
    if not recipe.needs_reference:
        return None
    same_layout = _same_layout(config, folders)
    asked = {role: _asked(config, role, folders.get(role, folders["actor"]), dispatch) for role in teachers_of(config)}
    keys = config.algorithm.distill
    if keys is None:
        return References(asked, same_layout=same_layout)
    own, *others = (
        known_vocab_size(f"{role}.model.path", model_of(config, role).path, read_hf_config(folders[role]))
        for role in ("actor", *asked)
    )
    ids = tuple(min(keys.top_k or size, size) for size in others)
    tail = not all(count == size == own for count, size in zip(ids, others, strict=True))
    distill = TeacherDivergence(kind=keys.loss, beta=keys.resolved_beta, tail=tail)
    return References(asked, ids, distill, own, same_layout)


def _asked(config: PPOConfig, role: str, folder: str, dispatch: WorkerDispatch) -> Ask:
    if not is_served(config, role):
        return ask_role(dispatch, role)
    server = TeacherServer(section_of(config, role).server, f"{role}.server")
    tokenizer = load_tokenizer(folder, config.actor.model.trust_remote_code)
    dispatch.on_main(lambda: server.check_tokenizer(tokenizer))
    return ask_server(dispatch, server)


def _same_layout(config: PPOConfig, folders: Mapping[str, str]) -> bool | None:
    """Returns `References.same_layout`."""
    if "reference" not in folders or os.path.realpath(folders["reference"]) != os.path.realpath(folders["actor"]):
        return None
    if model_of(config, "reference").dtype != config.actor.model.dtype:
        return None
    return engine_of(config, "reference") == config.actor.engine
