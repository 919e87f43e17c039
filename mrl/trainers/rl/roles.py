"""The roles of `mrl ppo`: the folders of their models, their engines, and how a resume knows the models again."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping

from mrl.algorithms.recipes import Recipe
from mrl.config.ppo import PPOConfig
from mrl.config.roles import (
    engine_of,
    frozen_roles,
    is_served,
    model_of,
    reference_is_base,
    rewrite_role_error_keys,
    role_configs,
)
from mrl.convert.exporting import write_merged_copy
from mrl.engine.base import BaseEngine
from mrl.engine.collective import join_processes, on_main
from mrl.engine.registry import build_engine
from mrl.ops.devices import device_type
from mrl.roles.dispatch import WorkerDispatch
from mrl.roles.frozen import FrozenModel
from mrl.trainers.common import check_background
from mrl.weights.adapter_folder import is_adapter
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


def set_total_steps(dispatch: WorkerDispatch, total_steps: int, *, critic_warmup: int) -> None:
    """Gives the learning-rate schedules of the roles that train their lengths."""
    dispatch.engines["actor"].set_total_steps(total_steps - critic_warmup)
    if "critic" in dispatch.engines:
        dispatch.engines["critic"].set_total_steps(total_steps)


def role_fingerprints(config: PPOConfig, folders: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """Returns by role what tells its model from others; of a frozen one a sample of the weights, too."""
    frozen = frozen_roles(config)
    return {
        role: FrozenModel(folder, is_read=not is_served(config, role)).fingerprint()
        if role in frozen
        else model_fingerprint(folder)
        for role, folder in folders.items()
    }
