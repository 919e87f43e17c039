"""Userbuffers by transformer-engine's own Python, on fake CUDA tensors: which modules are given them, and by whom they are
shared in a process."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.cuda import (  # before mrl: fake.py says what torch is here
    fake,
    models,
    te_attention,
    te_fp8,
    te_kernels,
    update,
)
from tests.cuda.cases import Case

import torch  # isort: skip

from mrl.config.schema import MicroBatchConfig, RoleConfig
from mrl.engine.megatron import generate
from mrl.engine.megatron.engine import MegatronEngine
from mrl.engine.requests import GenerateRequest
from mrl.engine.sampling import SamplingParams
from mrl.errors import ConfigError
from mrl.mcore_models import layer_spec, userbuffers


def _begin(case: Case) -> RoleConfig:
    te_fp8._be((9, 0))
    te_attention._be((9, 0), False, ())
    torch.distributed.is_backend_available = lambda name: True  # nccl, by which they are made
    layer_spec.te_refusal = lambda *_, **__: None
    te_kernels.install()
    fake.join_world(case.rank, case.world)
    return update.config_of(case, models.write(case.model, Path(tempfile.mkdtemp()), case.layers, **case.changes))


class _Reached(Exception):
    """Decoding begins."""


def modules(case: Case) -> dict[str, tuple[str, list[str], list[str]]]:
    """Returns of each linear module of transformer-engine in the layers: the name of its buffers, what it does through
    them, and what in decoding."""
    config = _begin(case)
    with fake.Fake():
        engine = MegatronEngine(config)
        engine.init_model()
        layers = engine.model.chunks[0].decoder.layers

        def used() -> dict[str, list[str]]:
            linears = {name: m for name, m in layers.named_modules() if hasattr(m, "ub_name")}
            return {
                name: [flag for flag in userbuffers.FLAGS if getattr(m, flag, False)] for name, m in linears.items()
            }

        training, decoding = used(), {}

        def runner(*_: Any, **__: Any) -> None:
            decoding.update(used())
            raise _Reached

        generate._Runner = runner
        with contextlib.suppress(_Reached):
            engine.generate([GenerateRequest([3, 4], 2, sampling=SamplingParams())])
        assert decoding and used() == training
        names = {name: m.ub_name for name, m in layers.named_modules() if hasattr(m, "ub_name")}
        return {name: (names[name], training[name], decoding[name]) for name in names}


def shared(case: Case) -> list[str]:
    """Returns what comes of engines in one process, one after the other: the first, one of the same sizes that does not
    train, one without the key, and one of more tokens. Of each the line of its refusal, or whether the buffers are those of
    before."""
    from transformer_engine.pytorch.module import base

    first = _begin(case)
    plain = dataclasses.replace(first, engine=dataclasses.replace(first.engine, megatron={}))
    larger = dataclasses.replace(first.engine, micro_batch=MicroBatchConfig(tokens=2 * update.TOKENS))
    found, before = [], None
    with fake.Fake():
        for config in (
            first,
            dataclasses.replace(first, optimizer=None),
            plain,
            dataclasses.replace(first, engine=larger),
        ):
            try:
                MegatronEngine(config).init_model()
                found.append("the same" if base._ub_communicators is before else "new")
            except ConfigError as error:
                found.append(str(error))
            before = base._ub_communicators
    return found


def refused(case: Case) -> list[str]:
    """Returns what is said in turn: where the tensor-parallel ranks are not of one machine, where transformer-engine has
    none on a machine, and twice where torch lacks the backend by which ranks are to meet."""
    import transformer_engine_torch as tex

    config, found = _begin(case), []
    torch.distributed.is_backend_available = lambda name: name != "gloo"
    by_gloo = config.engine.megatron | {"tp_comm_bootstrap_backend": "gloo"}
    with fake.Fake():
        for here, multicast, given in (
            (3, True, {}), (4, False, {}), (4, True, {"megatron": by_gloo}), (4, True, {"megatron": by_gloo}),
        ):  # fmt: skip
            os.environ["LOCAL_WORLD_SIZE"] = str(here)
            tex.device_supports_multicast = lambda possible=multicast: possible
            try:
                MegatronEngine(
                    dataclasses.replace(config, engine=dataclasses.replace(config.engine, **given))
                ).init_model()
            except ConfigError as error:
                found.append(str(error))
    return found
