"""The teachers of `mrl sft`: their likeliest tokens after each place, by engines, servers, or what these gave before.

Dimensions: `T` tokens of a batch end to end, `N` of them that train, `K` ids of each, the teacher's likeliest first.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from mrl.algorithms.distill import TEACHER, DistillLoss, teacher_numbers, tokens_denominator
from mrl.algorithms.ragged import to_tokens
from mrl.batch import Batch
from mrl.config.roles import rewrite_error_keys
from mrl.config.schema import OneTeacherConfig, RoleConfig, SFTConfig
from mrl.data.tokenizer import check_same_vocabulary, load_tokenizer
from mrl.engine.base import Ctx
from mrl.engine.registry import build_engine
from mrl.errors import ConfigError, quoted
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.frozen import Ask, FrozenModel, TeacherServer, ask_role, ask_server
from mrl.trainers.caches import RowCache, Said, fill, with_precision
from mrl.trainers.opening import say_choices
from mrl.trainers.rows import role_config
from mrl.trainers.trainer import Trainer
from mrl.weights.hf_config import read_hf_config, vocab_size_of
from mrl.weights.hub import model_fingerprint, model_folder


class Teacher:
    """One of the teachers of a run, from the check of its vocabulary to what it says of batches.

    key: of its section.
    """

    def __init__(self, config: SFTConfig, key: str = "teacher") -> None:
        assert config.teacher is not None, "no teacher"
        self.config, self.keys, self.key, self.own = config, config.teacher, key, config.teacher.by_key[key]
        self.folder = ""
        self.tokenizer: PreTrainedTokenizerBase  # its own, which `check` reads
        self.vocab_size = self.own_vocab_size = 0  # rows of the student's output layer, and of the teacher's
        self.top: Callable[[Batch], Said]  # as `top_by`, on every rank; collective

    @property
    def ids_per_token(self) -> int:
        return min(self.keys.top_k or self.own_vocab_size, self.own_vocab_size)

    @property
    def gives_full_distribution(self) -> bool:
        """Whether what it says is of the whole vocabulary, and of nothing more."""
        return self.ids_per_token == self.own_vocab_size == self.vocab_size

    def _rewrite_error_keys(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context; errors about `engine.x` or `model.x` name the teacher's own key in it."""
        return rewrite_error_keys(self.key, has_engine=self.own.engine is not None, of="model")

    def check(self, tokenizer: PreTrainedTokenizerBase, hf_config: dict[str, Any]) -> None:
        """Raises ConfigError where its vocabulary is not the student's. tokenizer, hf_config: the student's."""
        path, server, key = self.own.model.path, self.own.server, f"{self.key}.model.path"
        with self._rewrite_error_keys():
            self.folder = model_folder(path, weights=server is None)
            self.tokenizer = own = load_tokenizer(self.folder, self.config.model.trust_remote_code)
            own_config = read_hf_config(self.folder)
        check_same_vocabulary(tokenizer.get_vocab(), own.get_vocab(), path, key, "model.path")
        self.vocab_size = known_vocab_size("model.path", self.config.model.path, hf_config)
        self.own_vocab_size = known_vocab_size(key, path, own_config)

    # -- before the first step ----------------------------------------------------------------------------------------

    def begin(self, trainer: Trainer, rows: Callable[[], Iterator[Batch]], place: pathlib.Path) -> None:
        """Builds the teacher, or computes what it says of all rows. Collective.

        rows: yields all rows that it teaches, in batches. place: the folder of its cache.
        """
        if not self.keys.cache:
            self.top = self._asked(trainer)
            return
        own = rows()
        head = next(own, None)
        if head is None:  # and `top` is never called
            trainer.console.say(f"{self.key}: no row learns from it, so it is not asked")
            return
        cache = RowCache(place, self._made_by(trainer.dispatch), ("ids", "log_probs"), per_token=True)
        every, what = itertools.chain([head], own), f"the log-probs of {self.key}"
        fill(cache, every, lambda: self._asked(trainer), trainer, name=self.key, what=what)
        self.top = cache.of

    def _made_by(self, dispatch: WorkerDispatch) -> dict[str, Any]:
        """Returns what the log-probs depend on, beside the rows."""
        keys, server = self.keys, self.own.server
        by: dict[str, Any] = {"ids": self.ids_per_token, "temperature": keys.temperature}
        if server is not None:
            asked = TeacherServer(server, f"{self.key}.server")
            about = dispatch.on_main(lambda: {"server": asked.name, "model": model_fingerprint(self.folder)})
            return by | about
        by |= {
            "model": dispatch.on_main(FrozenModel(self.folder).fingerprint),
            "dtype": self.config.teacher_model(self.own.model).dtype,
        }
        return by | with_precision(self.own.engine or self.config.engine)

    def _asked(self, trainer: Trainer) -> Callable[[Batch], Said]:
        """Returns what asks the teacher itself, which is built now."""
        dispatch, console = trainer.dispatch, trainer.console
        ctx = {"temperature": self.keys.temperature, "top": self.ids_per_token}
        if self.own.server is not None:
            server = TeacherServer(self.own.server, f"{self.key}.server")
            name = dispatch.on_main(lambda: server.name)  # which the main process keeps: it alone asks
            dispatch.on_main(lambda: server.check_tokenizer(self.tokenizer))
            console.say(f"{self.key}: {name} at {server.http.url}")
            return functools.partial(top_by, ask_server(dispatch, server), ctx)
        console.doing("building the teacher")
        with self._rewrite_error_keys():
            teacher = build_engine(role_of(self.config, self.own, self.folder))
            say_choices(console, {self.key: teacher})
            teacher.init_model()
        dispatch.engines[self.key] = teacher
        return functools.partial(top_by, ask_role(dispatch, self.key), ctx)


class Teachers:
    """All teachers of a run: each says what it does of the rows that name it."""

    def __init__(self, config: SFTConfig) -> None:
        assert config.teacher is not None, "no teacher"
        self.config, self.keys = config, config.teacher
        self.each = [Teacher(config, key) for key in config.teacher.by_key]
        names = [one.key.removeprefix("teacher.others.") for one in self.each]
        self.names = tuple(names) if len(names) > 1 else ()  # in metrics

    def check(self, tokenizer: PreTrainedTokenizerBase, hf_config: dict[str, Any]) -> None:
        """Calls `Teacher.check` of all."""
        for one in self.each:
            one.check(tokenizer, hf_config)

    @property
    def frozen_models(self) -> dict[str, FrozenModel]:
        """Their models by key."""
        cached = self.keys.cache
        return {
            f"{one.key}.model.path": FrozenModel(one.folder, is_read=one.own.server is None, is_cached=cached)
            for one in self.each
        }

    @property
    def loss_fn(self) -> DistillLoss:
        keys, tail = self.keys, not all(one.gives_full_distribution for one in self.each)
        return DistillLoss(
            kind=keys.loss, beta=keys.resolved_beta, temperature=keys.temperature, weight=keys.weight, tail=tail,
            names=self.names,
        )  # fmt: skip

    def begin(self, trainer: Trainer, rows: Callable[[], Iterator[Batch]]) -> None:
        """Calls `Teacher.begin` of all."""
        names = ["", *self.keys.others]
        for number, (name, one) in enumerate(zip(names, self.each, strict=True)):
            one.begin(trainer, functools.partial(_rows_of, number, rows), trainer.directory.path / "teacher" / name)

    def prepare(self, batch: Batch) -> tuple[Batch, Ctx]:
        """Returns a global mini-batch with its teachers' ids as further labels, and what the student's forward is
        asked for. Collective."""
        count, trained = max(one.ids_per_token for one in self.each), batch.loss_mask != 0
        labels = torch.zeros(batch.num_tokens, 1 + count, dtype=torch.int64)
        labels[:, 0] = batch.labels
        log_probs = torch.zeros(batch.num_tokens, count)
        log_probs[trained] = -torch.inf  # of a teacher that says fewer ids than another
        of_T, counts = to_tokens(teacher_numbers(batch), batch.lengths), dict(batch.denominators)
        for number, name in enumerate(self.names):
            counts[tokens_denominator(name)] = float(batch.loss_mask[of_T == number].sum())
        for number, one in enumerate(self.each):
            own = _of_teacher(batch, number)
            if own is None:
                continue
            found, at = one.top(own), ((of_T == number) & trained).nonzero()[:, 0]
            ids, width = found["ids"], found["ids"].shape[1]
            here = ids < one.vocab_size  # of a teacher with more rows than the student
            labels[at, 1 : 1 + width] = (ids * here).long()
            log_probs[at, :width] = found["log_probs"].masked_fill(~here, -torch.inf)
        fields = {**batch.token_fields, TEACHER: log_probs}
        ctx = {"temperature": self.keys.temperature, "first_temperature": 1.0}
        return dataclasses.replace(batch, labels=labels, token_fields=fields, denominators=counts), ctx


def known_vocab_size(key: str, path: str, hf_config: Mapping[str, Any]) -> int:
    """Returns the rows of a model's embedding. Raises ConfigError where config.json has no number. path: of `key`."""
    size = vocab_size_of(hf_config)
    if size is None:
        why = "has no vocab_size in its config.json, which distillation compares"
        raise ConfigError(key, quoted(path), why, "give a model that has")
    return size


def _of_teacher(batch: Batch, number: int) -> Batch | None:
    """Returns the sequences of a teacher, in their order; None where it has none."""
    own = (teacher_numbers(batch) == number).nonzero()[:, 0].tolist()
    if len(own) == batch.num_sequences:
        return batch
    return batch.select(own) if own else None


def _rows_of(number: int, rows: Callable[[], Iterator[Batch]]) -> Iterator[Batch]:
    """Yields the rows of a teacher, in batches."""
    return (own for batch in rows() if (own := _of_teacher(batch, number)) is not None)


def role_of(config: SFTConfig, teacher: OneTeacherConfig, folder: str) -> RoleConfig:
    """Returns what a teacher's engine is built from. folder: what its model.path stands for."""
    return role_config(
        config, folder, longest=config.data.max_length, model=config.teacher_model(teacher.model), engine=teacher.engine
    )


def top_by(ask: Ask, ctx: Mapping[str, Any], batch: Batch) -> Said:
    """Returns ids [N, K] int32 and log_probs [N, K] fp32, largest first, of a global mini-batch, on every rank. ctx:
    temperature, and top."""
    found = ask(batch, dict(ctx))
    trained = batch.loss_mask.nonzero()[:, 0]
    return {"ids": found["top_tokens"][trained].int(), "log_probs": found["top_log_probs"][trained].float()}
