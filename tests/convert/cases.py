"""What ranks do with checkpoints of `mrl convert`: cases of tests/engine/harness.py."""

from __future__ import annotations

import os
import re

import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mrl.config.schema import EngineConfig, ModelConfig, OptimizerConfig, ParallelConfig, RoleConfig
from mrl.engine.base import BaseEngine
from mrl.engine.registry import build_engine


def engine_of(
    path: str, *, backend: str = "megatron", dtype: str = "float32", trained: bool = False, parallel: dict | None = None
) -> BaseEngine:
    config = RoleConfig(
        model=ModelConfig(path=path, dtype=dtype),
        engine=EngineConfig(backend=backend, device="cpu", parallel=ParallelConfig(**(parallel or {}))),
        optimizer=OptimizerConfig() if trained else None,
    )
    engine = build_engine(config)
    engine.init_model()
    return engine


def starts_from_import(hf: str, imported: str, layouts: list[dict]) -> list[str]:
    """An engine that starts from the imported folder, and one that loads it as its checkpoint, have the HF weights. Returns
    what differs."""
    wrong = []
    for layout in layouts:
        started = engine_of(imported, **layout)
        wrong += _differences(started, hf, f"started {layout}")
        if layout.get("backend", "megatron") == "megatron":
            loaded = engine_of(hf, **layout)
            with torch.no_grad():
                for model in loaded.models:
                    for parameter in model.parameters():
                        parameter.zero_()
            loaded.load_checkpoint(imported)
            wrong += _differences(loaded, hf, f"loaded {layout}")
    return wrong


def _differences(engine: BaseEngine, hf: str, what: str) -> list[str]:
    streamed = dict(engine.hf_weights())
    if dist.get_rank():
        return []
    expected = load_folder(hf)
    if streamed.keys() != expected.keys():
        return [f"{what}: names {sorted(streamed.keys() ^ expected.keys())}"]
    return [f"{what}: {name}" for name in expected if not torch.equal(streamed[name], expected[name])]


def load_folder(folder: str) -> dict[str, torch.Tensor]:
    files = sorted(name for name in os.listdir(folder) if name.endswith(".safetensors"))
    return {k: v for name in files for k, v in load_file(os.path.join(folder, name)).items()}


def save_checkpoints(hf: str, out: str, layouts: dict[str, dict]) -> list[str]:
    """A checkpoint of every layout in `out/NAME`, of random weights that no file holds, which are in `out/NAME/weights.pt`."""
    for name, layout in layouts.items():
        engine = engine_of(hf, trained=True, **layout)
        root = os.path.join(out, name)
        engine.save_checkpoint(root, global_step=3)
        weights = dict(engine.hf_weights())
        if not dist.get_rank():
            torch.save(weights, os.path.join(root, "weights.pt"))
    return sorted(layouts)


def stored_keys(hf: str, out: str) -> tuple[list[str], list[str]]:
    """(keys of tensors, keys of objects) of what the Megatron engine saves without an optimizer."""
    from mrl.converters.torch_dist import TorchDistReader

    engine = engine_of(hf)
    folder = engine.save_checkpoint(out, global_step=1) or os.path.join(out, "step_00000001")
    reader = TorchDistReader(os.path.join(folder, "mcore"))
    objects = [key for key in reader.objects if not re.match("common_state", key)]
    return sorted(reader.tensors), sorted(objects)


def weights_and_export(config: RoleConfig, out: str) -> list[str]:
    """Names of the weights that an engine has, which are exported to `out`."""
    engine = build_engine(config)
    engine.init_model()
    engine.export_hf(out)
    return [name for name, _ in engine.hf_weights()]


def mtp_of_megatron(imported: str) -> dict[str, torch.Tensor]:
    """What megatron's own model with layers that predict further tokens loads of them, by its name there."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import gpt_layer_specs, gpt_model
    from megatron.core.transformer.enums import AttnMaskType

    from mrl.mcore_models import layers

    engine = engine_of(imported)
    (ours,) = engine.models
    with engine.state.installed():
        config = engine.model_config
        config.mtp_num_layers = engine.hf["num_nextn_predict_layers"]
        block = layers.block_spec(config, [0, 1])
        for layer in block.layer_specs:  # megatron looks for it before it builds such a layer
            layer.submodules.self_attention.params = {"attn_mask_type": AttnMaskType.causal}
        spec = gpt_layer_specs.get_gpt_mtp_block_spec(config, block, use_transformer_engine=False)
        model = gpt_model.GPTModel(
            config=config, transformer_layer_spec=block, vocab_size=ours.vocab_size, max_sequence_length=128,
            position_embedding_type="rope", mtp_block_spec=spec, pg_collection=ours.pg_collection,
        )  # fmt: skip
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        asked = model.sharded_state_dict(metadata={"singleton_local_shards": False, "non_homogeneous_layers": True})
        model.load_state_dict(dist_checkpointing.load(asked, os.path.join(imported, "mcore")))
    held = {name.replace("mtp_model_layer", "transformer_layer"): t for name, t in model.state_dict().items()}
    return {name: t.clone() for name, t in held.items() if name.startswith("mtp.") and isinstance(t, torch.Tensor)}
