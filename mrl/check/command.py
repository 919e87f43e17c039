"""Defines the part of a training command for `mrl check`, and a model of a config that trains.

`checked` of the command's record names it as "module:NAME".
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

from mrl.check.folder import CheckedModel
from mrl.check.layouts import Layout
from mrl.check.reference import Loss
from mrl.check.rows import Rows
from mrl.config.command import Config, Part
from mrl.config.schema import LoraConfig, MicroBatchConfig, OptimizerConfig, RoleConfig
from mrl.engine.base import LossFn

C = TypeVar("C", bound=Config)


@dataclasses.dataclass(frozen=True)
class Subject:
    """Is a model that trains."""

    part: Part
    config: RoleConfig  # as the run builds it
    loss_fn: LossFn  # as engines take it
    denominator: str  # of it, a count of the batch
    loss: Loss  # the same, as the reference takes it

    @property
    def name(self) -> str:
        return self.part.role or "model"

    @property
    def optimizer(self) -> OptimizerConfig:
        """Returns AdamW as configured, at its peak rate: a warm-up's first step may change nothing."""
        assert self.config.optimizer is not None
        return dataclasses.replace(
            self.config.optimizer, schedule="constant", warmup_steps=0, min_lr=0.0, decay_steps=None
        )

    @property
    def lora(self) -> LoraConfig | None:
        """Returns the adapters without dropout: two layouts draw other noise."""
        own = self.config.model.lora
        return own and dataclasses.replace(own, dropout=0.0)

    @property
    def has_router_losses(self) -> bool:
        return bool(self.config.engine.moe.aux_loss or self.config.engine.moe.z_loss)

    def on(self, layout: Layout, *, path: str, init: Any, dtype: Any, micro_batch: MicroBatchConfig) -> RoleConfig:
        """Returns the config of an engine for a layout. path, init: of the folder of the check."""
        config = self.config
        replicate = config.engine.fsdp.replicate
        if layout.processes % replicate or layout.processes == replicate:
            replicate = 1
        # userbuffers take neither fp32 nor micro-batches of other sizes
        megatron = {k: v for k, v in config.engine.megatron.items() if not k.startswith("tp_comm_")}
        return dataclasses.replace(
            config,
            mtp=None,  # of a model that is cut to a few layers there are no MTP layers left
            model=dataclasses.replace(config.model, path=path, init=init, dtype=dtype, lora=self.lora),
            engine=dataclasses.replace(
                config.engine, parallel=layout.parallel, micro_batch=micro_batch, megatron=megatron,
                cuda_graphs=False,
                fsdp=dataclasses.replace(config.engine.fsdp, replicate=replicate),
            ),
            optimizer=self.optimizer,
        )  # fmt: skip


class CommandCheck(abc.ABC, Generic[C]):
    """Checks a step of one training command."""

    @abc.abstractmethod
    def subjects(self, config: C, parts: Sequence[Part], folders: Mapping[str, str]) -> list[Subject]:
        """Returns the models that train, each with its loss.

        parts: models with an optimizer. folders: role -> folder of its model.path.
        """

    @abc.abstractmethod
    def rows(
        self, config: C, subject: Subject, model: CheckedModel, *, sequences: int, length: int, device: str
    ) -> Rows:
        """Returns the batch of the check; all models share it.

        subject, model: the first that trains. sequences: at most this many. length: tokens of one, at most. device: for
        running the model to make them.
        """
