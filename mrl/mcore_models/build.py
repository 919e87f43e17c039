"""Builds a TransformerConfig and this rank's chunks of GPTModel from an HF config and a layout.

Call `cpu_stand_in.prepare()` before this module is imported. megatron's parallel_state must hold the layout's groups
before `build_chunks` is called.
"""

from __future__ import annotations

import importlib.util
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NoReturn

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import RowParallelLinear
from megatron.core.tensor_parallel import layers as tensor_parallel_layers
from torch import Tensor

from mrl import patches
from mrl.errors import ConfigError
from mrl.mcore_models import dispatch, layers, megatron_fields, megatron_needs, platform
from mrl.mcore_models.attention import CacheLayout, PackedLayout
from mrl.mcore_models.config import Config, LatentConfig, config_class
from mrl.mcore_models.head import LanguageHead, MTPLayerInputs, ValueHead, mtp_block_spec
from mrl.mcore_models.layout import check_layout, recompute_modules
from mrl.mcore_models.te_limits import cp_comm_type
from mrl.ops import devices
from mrl.parallel import ParallelDims, stage_layers
from mrl.weights.families import fields_of
from mrl.weights.rules import ChunkPlan

patches.check(__name__)  # the methods that Model overrides
logging.getLogger(GPTModel.__module__).setLevel(logging.ERROR)  # 0.19 warns at every build: HybridModel comes after it

_BIAS = re.compile(r"\.bias\d*$")  # of a grouped linear, one for each expert


class Model(GPTModel):
    """Is megatron's GPTModel with our layouts, head and rotary embedding. No other module names GPTModel."""

    mtp_inputs: Sequence[MTPLayerInputs] = ()
    """The inputs of each MTP layer in the forward at hand, set before it; without any, MTP layers are left out."""
    detaches_mtp: bool = False
    """Whether the gradient of their loss stays within them. The head's own part is in the `project` of `mtp_inputs`."""

    def forward(self, tokens: Tensor, layout: PackedLayout | CacheLayout, padding: Tensor | None = None) -> Tensor:
        """Runs the chunk on tokens [T], which count on the first stage only.

        padding: [T] bool, True where no token is; None for no padding. Returns hidden states [T (/tp), 1, H] for the
        next stage, or the head's output [1, T, K] on the last one.
        """
        assert layout.positions is not None
        self.rotary_pos_emb.positions = layout.positions
        if padding is not None and self.config.sequence_parallel and not self.pre_process:
            # GPTModel._preprocess scatters the mask on the first stage alone (models/gpt/gpt_model.py, 0.16.1 and
            # 0.19.2). Later stages get their part from here; routers would count other tokens otherwise.
            padding = padding.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
        return super().forward(
            input_ids=tokens[None], position_ids=layout.positions[None], attention_mask=None, packed_seq_params=layout,
            padding_mask=None if padding is None else padding[None],
        )  # fmt: skip

    def _postprocess(self, hidden_states: Tensor, **rest: Any) -> Tensor:
        """Returns the head's output [1, T, K] for hidden states, with more columns for those of MTP layers."""
        if not self.mtp_process:
            return super()._postprocess(hidden_states, **rest)
        weight = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
        columns = [self.output_layer(hidden_states, weight=weight)[0]]
        if self.detaches_mtp:
            # they ask for a gradient: megatron's recomputation gives parameters none if no input asks for one
            hidden_states = hidden_states.detach().requires_grad_(torch.is_grad_enabled())
        for layer, inputs in zip(self.mtp.layers, self.mtp_inputs, strict=False):
            padding = inputs.padding
            if self.config.sequence_parallel:
                padding = padding.chunk(self.pg_collection.tp.size())[self.pg_collection.tp.rank()]
            embedded = self.embedding(input_ids=inputs.tokens[None], position_ids=rest["position_ids"])
            if self.detaches_mtp:
                embedded = embedded.detach()
            hidden_states = layer(
                hidden_states, embedded, rest["rotary_pos_emb"], rest["packed_seq_params"], padding[None]
            )
            self.output_layer.project = inputs.project
            columns.append(self.output_layer(hidden_states, weight=weight)[0])
        return torch.cat(columns, dim=-1).transpose(0, 1).contiguous()

    def _set_attention_backend(self) -> None:
        """Leaves NVTE_FLASH_ATTN, NVTE_FUSED_ATTN and NVTE_UNFUSED_ATTN as they are. te_limits.py reads them, and the
        engine sets them if engine.attention says so.

        megatron's own (0.16.1 and 0.19.2, models/common/language_module) asserts that all are 1 or unset, and advises
        an argument of its own trainer.
        """


def transformer_config(
    hf: Mapping[str, Any],
    dims: ParallelDims,
    *,
    dtype: torch.dtype,
    recompute: Literal["none", "selective", "full"] = "none",
    recompute_modules: Sequence[str] | None = None,
    aux_loss: float = 0.0,
    z_loss: float = 0.0,
    layer_spec: Literal["te", "local"] = "local",
    megatron_options: Mapping[str, Any] | None = None,
    mtp_layers: int = 0,
    saves_to_host: bool = False,
) -> Config | LatentConfig:
    """Returns megatron's configuration of the model in a layout. Raises ModelError or ConfigError if it cannot be
    built.

    megatron_options: `engine.megatron`, fields by name, those of megatron's other classes among them. saves_to_host:
    whether layers save their activations on the host.
    """
    fields = fields_of(dict(hf))
    check_layout(fields, dims)
    fields |= _layout_fields(fields["num_layers"], dims, mtp_layers)
    fields |= _recompute_fields(fields, recompute, recompute_modules, layer_spec)
    if "num_moe_experts" in fields:
        fields |= {
            "moe_router_load_balancing_type": "aux_loss" if aux_loss else "none",
            "moe_aux_loss_coeff": aux_loss,
            "moe_z_loss_coeff": z_loss or None,
            "moe_grouped_gemm": layer_spec == "te",
        }
    if layer_spec == "te" and dims.cp > 1:
        fields["cp_comm_type"] = cp_comm_type(fields, dims)
    fields |= {
        "layer_spec": layer_spec,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "init_method_std": hf.get("initializer_range") or 0.02,
    }
    megatron_needs.check(megatron_options or {}, fields, dims)
    megatron_needs.check_spec(megatron_options or {}, layer_spec, "as it was chosen", dtype)
    given = megatron_fields.fields_of_kind(megatron_options or {}, "transformer")
    try:
        config = config_class(fields)(**_fusions(fields, hf, given, saves_to_host) | fields | given)
    except (AssertionError, ImportError, TypeError, ValueError) as error:
        if not given:
            raise
        raise megatron_fields.megatron_refusal(given, error) from error
    scaling = hf.get("rope_scaling")
    if scaling is not None and scaling["rope_type"] == "yarn" and not config.multi_latent_attention:
        # `_yarn_get_concentration_factor_from_config` looks for these attributes, and takes 1 if there is none
        # (models/common/embeddings/yarn_rotary_pos_embedding.py). Attention scales by it, as `layers.rotary_scale`.
        config.yarn_rotary_scaling_factor = scaling["factor"]
        config.yarn_mscale, config.yarn_mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    return config


def _fusions(
    fields: Mapping[str, Any], hf: Mapping[str, Any], given: Mapping[str, Any], saves_to_host: bool
) -> dict[str, bool]:
    """Returns which of megatron's fused kernels are used unless `engine.megatron` (given) names them.

    Layers of transformer-engine use its kernels. With megatron's own layers, apex's kernel adds gradients of weights
    for bfloat16 models only: nobody has seen what it does with fp32. The rotary kernel of transformer-engine has no
    factor on cosines and sines, so yarn leaves it out. Latent attention turns its channels itself.
    """
    te = fields["layer_spec"] == "te" and platform.without_transformer_engine() is None
    kernel = devices.has_gpu() and tensor_parallel_layers._grad_accum_fusion_available
    apex = fields["layer_spec"] == "local" and fields["bf16"] and kernel
    turned_here = bool(fields.get("multi_latent_attention")) or layers.rotary_scale(hf.get("rope_scaling")) != 1.0

    def refuse(name: str, why: str, fix: str) -> NoReturn:
        raise ConfigError(f"{megatron_fields.KEY}.{name}", given[name], why, fix)

    if given.get("apply_rope_fusion") and turned_here:
        why = "is for a model whose rotary embedding transformer-engine's kernel does not have"
        refuse("apply_rope_fusion", why, "leave it out")
    if given.get("gradient_accumulation_fusion") and saves_to_host:
        why = "needs the weights themselves in the backward pass, and with engine.offload activations it has aliases"
        refuse("gradient_accumulation_fusion", why, "leave out one of them")
    if given.get("gradient_accumulation_fusion") and not te and not tensor_parallel_layers._grad_accum_fusion_available:
        why = "needs apex's kernel fused_weight_gradient_mlp_cuda, or the layers of transformer-engine"
        fix = "install NVIDIA's apex as docs/gpu-install.md says, set engine.layer_spec to te, or leave it out"
        refuse("gradient_accumulation_fusion", why, fix)
    if given.get("moe_token_dispatcher_type") == "flex" and importlib.util.find_spec("deep_ep") is None:
        why = "needs DeepEP, which is not installed (docs/gpu-install.md)"
        refuse("moe_token_dispatcher_type", why, "leave it out: experts go by all-to-all")
    return {
        "bias_activation_fusion": True,  # on a CPU, elementwise.swiglu
        # a hook on saved tensors gets an alias of a weight, so the kernel's marks on the weight are lost
        "gradient_accumulation_fusion": (te or apex) and not saves_to_host,
        "apply_rope_fusion": te and not turned_here,
        "moe_permute_fusion": te and "num_moe_experts" in fields,
        # kernels of apex: transformer-engine's layers and mrl's norms and attention do not use them
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "bias_dropout_fusion": False,
    }


def _layout_fields(num_layers: int, dims: ParallelDims, mtp_layers: int) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
        "context_parallel_size": dims.cp,
        "expert_model_parallel_size": dims.ep,
        "expert_tensor_parallel_size": dims.etp,
        "sequence_parallel": dims.sp,
    }
    if mtp_layers:
        fields["mtp_num_layers"] = mtp_layers
    if dims.pp > 1:
        stages = [["decoder"] * len(stage) for stage in stage_layers(num_layers, dims.pp, dims.vpp)]
        stages[0].insert(0, "embedding")
        stages[-1] += ["mtp"] * mtp_layers + ["loss"]
        fields |= {
            "pipeline_model_parallel_layout": stages,
            "variable_seq_lengths": True,  # packed micro-batches differ in length
            # for dense models too: TransformerConfig refuses its default, allgather, with variable lengths
            "moe_token_dispatcher_type": "alltoall",
            # With two stages both neighbours are the same rank, and batched sends of interleaved chunks cross
            # (`_batched_p2p_ops`, pipeline_parallel/p2p_communication.py). Gradients are then wrong in silence: a norm
            # of 2 became 5000 in four steps. Separate sends (`_p2p_ops`) each keep their order and are right.
            "batch_p2p_comm": False,
            "overlap_p2p_comm": dims.vpp > 1,
        }
        if dims.vpp > 1:
            fields["virtual_pipeline_model_parallel_size"] = dims.vpp
    return fields


def _recompute_fields(
    fields: Mapping[str, Any], recompute: str, modules: Sequence[str] | None, layer_spec: str
) -> dict[str, Any]:
    if recompute == "none":
        return {}
    if recompute == "selective":
        modules = recompute_modules(fields, modules, layer_spec=layer_spec)
        return {"recompute_granularity": "selective", "recompute_modules": modules}
    return {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


def build_chunks(
    config: Config | LatentConfig,
    hf: Mapping[str, Any],
    *,
    dims: ParallelDims,
    chunks: Sequence[ChunkPlan],
    padded_vocab: int,
    head: Literal["lm", "value"],
    detaches_mtp: bool,
) -> list[Model]:
    """Returns this rank's model chunks on the device, with weights as megatron initialises them. detaches_mtp: as of
    `Model`."""
    groups = ProcessGroupCollection.use_mpu_process_groups()
    turning = int(config.kv_channels * config.rotary_percent)
    inverse = layers.inverse_frequencies(turning, float(hf["rope_theta"]), hf.get("rope_scaling"))
    scale = layers.rotary_scale(hf.get("rope_scaling"))
    tied = bool(hf.get("tie_word_embeddings")) and head == "lm"
    models = []
    # Under `gradient_accumulation_fusion` GPTModel asks for apex's kernel (ColumnParallelLinear.__init__,
    # tensor_parallel/layers.py), even if all other linear layers are transformer-engine's and bring their own kernel.
    # Our head replaces it and uses none.
    with patches.replaced({f"{tensor_parallel_layers.__name__}:_grad_accum_fusion_available": True}):
        for v, chunk in enumerate(chunks):
            if dims.vpp > 1:
                parallel_state.set_virtual_pipeline_model_parallel_rank(v)
            model = Model(
                config=config, transformer_layer_spec=layers.block_spec(config, list(chunk.layers)),
                mtp_block_spec=mtp_block_spec(layers.mtp_parts(config), chunk.mtp) if chunk.mtp else None,
                vocab_size=padded_vocab, max_sequence_length=hf.get("max_position_embeddings") or 0,
                pre_process=chunk.has_embedding, post_process=chunk.has_output, position_embedding_type="rope",
                share_embeddings_and_output_weights=tied, pg_collection=groups, vp_stage=v if dims.vpp > 1 else None,
            )  # fmt: skip
            # GPTModel makes one itself and takes none (models/gpt/gpt_model.py); its own knows no positions
            model.rotary_pos_emb, model.detaches_mtp = layers.Rotary(inverse, groups.cp, scale, config), detaches_mtp
            of_mtp = [layer.transformer_layer for layer in model.mtp.layers] if chunk.mtp else []
            for layer in (*model.decoder.layers, *of_mtp):
                if config.multi_latent_attention:
                    layer.self_attention.turning = inverse.to(devices.device())
                    layer.self_attention.rotary_scale = scale
            if config.add_bias_linear:
                _experts_keep_their_sums(model)
            _mark_own_parts(model)
            dispatch.keep_sorted(model)
            if chunk.has_output and head == "lm":
                model.output_layer = LanguageHead.replacing(model.output_layer, config)
            elif chunk.has_output:
                model.output_layer = ValueHead(config, groups.tp)
            models.append(model.to(device=devices.device()))
    return models


def _experts_keep_their_sums(model: Model) -> None:
    """Keeps experts with biases from summing over tensor-parallel ranks: each lies on one rank (`check_layout`).

    megatron adds an expert's bias in place to the sum over that one rank (`output +=`, transformer/mlp.py, 0.16.1 and
    0.19.2). Over one rank the sum is its own input, and autograd refuses to change it.
    """
    for module in model.modules():
        if isinstance(module, RowParallelLinear) and module.is_expert:
            module.explicit_expert_comm = True


def _mark_own_parts(model: Model) -> None:
    """Marks parameters that tensor-parallel ranks have parts of, because megatron leaves these unmarked.

    Without the mark, the gradient's norm counts them on the first tensor-parallel rank only
    (`param_is_not_tensor_parallel_duplicate`, tensor_parallel/layers.py). They are:

        biases of experts    megatron also sums their gradients over the ranks of a sequence, though it has summed the
                             experts' replicas already
        grouped experts      transformer-engine 2.20.2 marks them only if they are one tensor; megatron-core 0.19 marks
                             them, 0.16 does not
        attention's sinks    those of transformer-engine, which are fp32 there whatever the model is
    """
    for name, parameter in model.named_parameters():
        if ".experts." in name:
            parameter.tensor_model_parallel = True
            if _BIAS.search(name):
                # finalize_model_grads sums marked gradients over tensor-parallel ranks
                parameter.sequence_parallel = False
        elif name.endswith(".softmax_offset"):
            parameter.tensor_model_parallel = True
            parameter.data = parameter.data.to(model.config.params_dtype)
