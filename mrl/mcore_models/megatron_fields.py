"""Reads the fields of megatron-core's own configuration that `engine.megatron` may set by name.

Their names and types come from the source of the installed megatron-core, without importing it. A config is checked
before any process starts, also on a machine that cannot compute. A field that mrl sets itself is refused, with the key
to use instead.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib.metadata
import importlib.util
import pathlib
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mrl.config.keys import accepted_values, arms_of, join_names
from mrl.config.megatron_speed import MOMENTS
from mrl.errors import ConfigError, one_line

KEY = "engine.megatron"

Kind = Literal["transformer", "ddp", "optimizer"]

_CLASSES: Mapping[Kind, tuple[tuple[str, str], ...]] = {
    "transformer": (
        ("model_parallel_config.py", "ModelParallelConfig"),
        ("transformer/transformer_config.py", "TransformerConfig"),
    ),
    "ddp": (("distributed/distributed_data_parallel_config.py", "DistributedDataParallelConfig"),),
    "optimizer": (("optimizer/optimizer_config.py", "OptimizerConfig"),),
}
"""The sources of each kind's fields: file of megatron/core and class. A later class replaces fields of the same
name."""

TRANSFORMER_ENGINE_FIELDS = frozenset("""
    gradient_accumulation_fusion apply_rope_fusion fused_residual_rmsnorm moe_permute_fusion moe_router_fusion
    symmetric_ar_type moe_enable_deepep moe_flex_dispatcher_backend moe_token_dispatcher_type moe_deepep_num_sms
    moe_flex_dispatcher_num_sms disable_parameter_transpose_cache fp8 fp8_recipe
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 tp_only_amax_red
    tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_bootstrap_backend
""".split())  # fmt: skip  # noqa: SIM905
"""Fields for kernels of transformer-engine, or of packages like it. A plan leaves them out, because its layers are the
local spec's."""

DType = Literal["float32", "bfloat16", "float16", "uint8"]
"""A dtype of torch, which `engine.megatron` has by its name."""


@dataclasses.dataclass(frozen=True)
class Field:
    """A field that at least one of megatron's classes has."""

    kinds: tuple[Kind, ...]
    annotation: Any  # None where YAML has no value of its type, such as a function


def _by_field(table: Mapping[str, str]) -> dict[str, str]:
    """Returns field -> words, from words -> fields with spaces between."""
    return {name: words for words, names in table.items() for name in names.split()}


SET_BY_MRL: Mapping[str, str] = _by_field({
    "the model's config.json has it": """
        num_layers hidden_size num_attention_heads num_query_groups ffn_hidden_size kv_channels softmax_scale
        softmax_type layernorm_epsilon layernorm_zero_centered_gamma add_bias_linear add_qkv_bias
        gated_linear_unit glu_linear_offset activation_func activation_func_clamp_value num_moe_experts
        rotary_interleaved window_size window_attn_skip_freq normalization qk_layernorm qk_l2_norm
        attention_output_gate multi_latent_attention no_rope_freq moe_shared_expert_intermediate_size
        moe_shared_expert_gate moe_layer_freq moe_ffn_hidden_size moe_router_topk moe_router_num_groups
        moe_router_group_topk moe_router_pre_softmax moe_router_dtype moe_router_topk_scaling_factor
        moe_router_score_function moe_router_enable_expert_bias moe_router_bias_update_rate
        moe_router_topk_limited_devices moe_apply_probs_on_input moe_latent_size mrope_section init_method_std
        embedding_init_method_std attention_dropout hidden_dropout apply_residual_connection_post_layernorm
        test_mode heterogeneous_block_specs is_hybrid_model experimental_attention_variant linear_attention_freq
        linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads
        linear_value_head_dim""",
    "set engine.batch_invariant": "batch_invariant_mode",
    "set engine.parallel.tp": "tensor_model_parallel_size",
    "set engine.parallel.pp": "pipeline_model_parallel_size pipeline_model_parallel_layout",
    "set engine.parallel.vpp": "virtual_pipeline_model_parallel_size",
    "set engine.parallel.cp": """
        context_parallel_size hierarchical_context_parallel_sizes hybrid_context_parallel
        max_seqlen_per_dp_cp_rank""",
    "set engine.parallel.ep": "expert_model_parallel_size",
    "set engine.parallel.etp": "expert_tensor_parallel_size",
    "set engine.parallel.sp": "sequence_parallel",
    "mrl divides the layers evenly by engine.parallel.pp": """
        num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage
        account_for_embedding_in_pipeline_split account_for_loss_in_pipeline_split""",
    "set model.dtype": "params_dtype pipeline_dtype bf16 fp16 enable_autocast autocast_dtype fp32_residual_connection",
    "set model.init": "perform_initialization use_cpu_initialization init_model_with_meta_device",
    "set engine.recompute": """
        recompute_granularity recompute_method recompute_num_layers distribute_saved_activations
        moe_layer_recompute num_microbatches_with_partial_activation_checkpoints""",
    "set engine.recompute_modules": "recompute_modules",
    "set engine.moe.aux_loss": "moe_aux_loss_coeff moe_router_load_balancing_type moe_router_quantile_balancing_ema",
    "set model.mtp": "mtp_num_layers mtp_loss_scaling_factor",
    "set engine.moe.z_loss": "moe_z_loss_coeff",
    "set engine.layer_spec": "transformer_impl",
    "set engine.moe.grouped_mm or engine.layer_spec": "moe_grouped_gemm moe_use_legacy_grouped_gemm",
    "set engine.attention": "attention_backend flash_attention_version",
    "mrl chooses it by the model and engine.parallel (docs/gpu-keys.md)": "cp_comm_type",
    "set optimizer.lr": "lr decoupled_lr",
    "set optimizer.min_lr": "min_lr decoupled_min_lr",
    "set optimizer.betas": "adam_beta1 adam_beta2",
    "set optimizer.eps": "adam_eps",
    "set optimizer.weight_decay": "weight_decay",
    "set optimizer.clip_grad": "clip_grad",
    "set engine.offload": """
        cpu_offloading cpu_offloading_num_layers cpu_offloading_activations cpu_offloading_weights
        cpu_offloading_double_buffering cpu_offloading_retain_pinned_cpu_buffers""",
    "set engine.offload to [activations]": """
        fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
        delay_offload_until_cuda_graph delta_offload_bytes_across_pp_ranks activation_offload_fraction
        fine_grained_offloading_max_inflight_offloads""",
    "all of the optimizer is on the host with optimizer_cpu_offload": """
        optimizer_offload_fraction use_torch_optimizer_for_cpu_offload overlap_cpu_optimizer_d2h_h2d
        pin_cpu_grads pin_cpu_params""",
    "set optimizer.name": """
        optimizer lion_beta1 lion_beta2 soap_shampoo_beta soap_precondition_frequency soap_use_kl_shampoo""",
    "the optimizer is AdamW, or Muon with AdamW (optimizer.name)": """
        decoupled_weight_decay sgd_momentum muon_scalar_optimizer adaptive_muon_beta2 adaptive_muon_eps
        adaptive_muon_moment2_method""",
    "set optimizer.muon.momentum": "muon_momentum",
    "set optimizer.muon.use_nesterov": "muon_use_nesterov muon_nesterov",
    "set optimizer.muon.num_ns_steps": "muon_num_ns_steps",
    "set optimizer.muon.scale_mode": "muon_scale_mode",
    "set optimizer.muon.extra_scale_factor": "muon_extra_scale_factor",
    "set optimizer.muon.dtype": "muon_fp32_matmul_prec",
    "matrices are those of Hugging Face's files, and whole (docs/muon.md)": "muon_split_qkv muon_tp_mode",
    "the coefficients are Jordan's": "muon_coefficient_type",
    "mrl divides the loss itself (docs/loss.md)": """
        calculate_per_token_loss gradient_reduce_div_fusion average_in_collective""",
    "gradients are summed in fp32 always": """
        grad_reduce_in_fp32 main_grads_dtype param_name_patterns_for_fp32_local_accumulation""",
    "the distributed optimizer is always on": """
        use_distributed_optimizer use_layer_wise_distributed_optimizer num_distributed_optimizer_instances""",
    "set engine.backend to fsdp": """
        use_megatron_fsdp use_custom_fsdp data_parallel_sharding_strategy outer_dp_sharding_strategy
        preserve_fp32_weights suggested_communication_unit_size fsdp_all_gather_in_start_param_sync
        fsdp_db_use_persist_buf_on_alloc_fail fsdp_double_buffer fsdp_manual_registration
        megatron_fsdp_cuda_graph_mode megatron_fsdp_enable_fine_grained_param_gather
        megatron_fsdp_grad_comm_dtype megatron_fsdp_main_grads_dtype megatron_fsdp_main_params_dtype
        megatron_fsdp_max_pool_double_buffer megatron_fsdp_use_decoupled_grad""",
    "mrl sets it by engine.parallel.pp": "variable_seq_lengths batch_p2p_comm batch_p2p_sync overlap_p2p_comm",
    "mrl computes log-probs itself": "cross_entropy_loss_fusion cross_entropy_fusion_impl",
    "set apply_rope_fusion": "fused_single_qkv_rope",
    "set overlap_param_gather": "overlap_param_gather_with_optimizer_step align_param_gather",
    "set bucket_size": "num_buckets",
    "attention and norms are mrl's own or transformer-engine's (engine.layer_spec)": """
        masked_softmax_fusion attention_softmax_in_fp32 apply_query_key_layer_scaling persist_layer_norm
        memory_efficient_layer_norm""",
    "mrl samples by its own decoder (docs/decoding.md)": """
        flash_decode inference_rng_tracker inference_sampling_seed inference_fuse_tp_communication
        inference_disable_triton_nvls_kernels inference_grouped_gemm_backend
        inference_moe_disable_fused_quant_kernels inference_moe_token_dispatcher_type
        use_inference_optimized_layers mlp_chunks_for_prefill nccl_all_reduce_for_prefill
        moe_pad_experts_for_cuda_graph_inference""",
    "checkpoints are mrl's own, for every layout": "hetereogenous_dist_checkpoint",
})  # fmt: skip
"""Field -> what to do instead."""

REFUSED_FIELDS: Mapping[str, str] = _by_field({
    "MTP layers are those of the model, whose loss trains all of it": """
        mtp_use_repeated_layer mtp_detach_heads mtp_hybrid_override_pattern mtp_standalone""",
    "there is no training in FP4": "fp4 fp4_param fp4_param_gather fp4_recipe fp4_quantizer_factory",
    "parameters stay bfloat16 beside FP8, for checkpoints and exports": """
        fp8_param fp8_param_gather keep_fp8_transpose_cache reuse_grad_buf_for_mxfp8_param_ag""",
    "there is no delayed recipe of FP8, whose scales come from earlier steps": """
        fp8_margin fp8_interval fp8_amax_history_len fp8_amax_compute_algo fp8_wgrad""",
    "attention and the head are not in FP8": "fp8_dot_product_attention fp8_multi_head_attention fp8_output_proj",
    "recipes of FP8 are transformer-engine's own": "fp8_quantizer_factory",
    "what each expert gets is padded after it has been routed": """
        moe_router_padding_for_fp8 moe_router_padding_for_quantization""",
    "its graphs take no packed rows; engine.cuda_graphs is for them": """
        enable_cuda_graph external_cuda_graph optimizer_cuda_graph cuda_graph_impl cuda_graph_modules
        cuda_graph_scope cuda_graph_retain_backward_graph cuda_graph_use_single_mempool cuda_graph_warmup_steps""",
    "masters are fp32": "main_params_dtype store_param_remainders",
    "transformer-engine no longer reads it, where tp_comm_overlap_ag and tp_comm_overlap_rs are": """
        tp_comm_split_ag tp_comm_split_rs tp_comm_atomic_ag tp_comm_atomic_rs""",
    "it needs a schedule that is made of other parts of a layer": """
        delay_wgrad_compute overlap_moe_expert_parallel_comm overlap_dispatch_backward_with_experts_wgrad
        ep_overlap_early_attn_memory_release high_priority_a2a_comm_stream""",
    "parameters would have other names": """
        use_transformer_engine_op_fuser moe_single_grouped_weight moe_single_grouped_bias
        use_grouped_gemm_for_dense_mlp use_grouped_gemm_for_shared_expert""",
    "it needs use_transformer_engine_op_fuser, with which parameters would have other names": """
        moe_expert_rank_capacity_factor moe_ncclep_static_shape moe_ncclep_zero_copy moe_paged_stash
        moe_paged_stash_page_size moe_paged_stash_buffer_size_factor_cpu moe_paged_stash_buffer_size_factor_cuda""",
    "rows of weights would be in another order": "moe_mlp_glu_interleave_size moe_shared_expert_glu_interleave_size",
    "weights would be in other shards": """
        gtp_weight_remat_size expert_gtp_weight_remat_size tensor_parallel_num_weight_shards
        expert_tensor_parallel_num_weight_shards""",
    "the output layer is mrl's own": "defer_embedding_wgrad_compute wgrad_deferral_limit",
    # `_scale_logits` would multiply what the output layer returns, which is log-probs here
    "a model is what its config.json says, and there is no muP": """
        use_mup mup_width_mult mup_base_hidden_size mup_embedding_mult mup_output_mult mup_base_head_dim
        mup_attn_scale_power""",
    "nothing clips the logits of attention, nor writes them down": """
        qk_clip qk_clip_alpha qk_clip_threshold log_max_attention_logit""",
    "no family of models here has such layers": """
        mamba_head_dim mamba_num_groups mamba_num_heads mamba_state_dim mamba_training_ssm_states_dtype
        use_mamba_mem_eff_path dsa_indexer_head_dim dsa_indexer_k_norm_epsilon dsa_indexer_k_norm_fp32
        dsa_indexer_loss_coeff dsa_indexer_n_heads dsa_indexer_rope_interleaved dsa_indexer_rotate_activation
        dsa_indexer_scoring_relu dsa_indexer_skip_topk_offset dsa_indexer_topk dsa_indexer_topk_freq
        dsa_indexer_use_sparse_loss dsa_kernel_backend use_kitchen use_kitchen_attention
        kitchen_attention_backend use_te_activation_func use_fused_weighted_squared_relu""",
    # a constant scale would divide gradients of a loss that nothing has multiplied
    "there is no training in fp16, whose loss is scaled": """
        loss_scale initial_loss_scale min_loss_scale loss_scale_window hysteresis""",
    "a step is skipped where its norm is not finite, and at no other": "grad_norm_skip_threshold",
    "nothing would read it": """
        log_num_zeros_in_grad moe_per_layer_logging moe_enable_routing_replay moe_token_dropping moe_extended_tp
        barrier_with_L1_time async_tensor_model_parallel_allreduce use_te_rng_tracker
        pipeline_model_parallel_comm_backend""",
    "experts are exchanged by all-to-all or DeepEP": """
        moe_hybridep_num_sms moe_hybridep_num_blocks_permute moe_hybridep_num_blocks_unpermute
        moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
        moe_permute_fusion_into_hybridep""",
    "gradients have no buffers that NCCL knows": "nccl_ub disable_symmetric_registration",
    "what a run was given is in its config.yaml": "config_logger_dir",
    "torch has no ring_exchange": "use_ring_exchange_p2p",
    "router losses would count padding": "mlp_chunks_for_training",
})  # fmt: skip
"""Field of something that mrl does not have -> why it cannot be: a model would break, or train wrong in silence."""


@functools.cache
def fields() -> Mapping[str, Field]:
    """Returns the fields of the installed megatron-core, by name."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        raise ConfigError(KEY, why="is for megatron-core, which is not installed", fix="install it, or leave it out")
    found: dict[str, Field] = {}
    for kind, classes in _CLASSES.items():
        for file, name in classes:
            source = pathlib.Path(spec.origin).parent.joinpath(file).read_text(encoding="utf-8")
            for field, annotation in _fields_of_class(source, name):
                kinds = found[field].kinds if field in found else ()
                found[field] = Field(tuple(dict.fromkeys((*kinds, kind))), annotation)
    return found


def _fields_of_class(source: str, name: str) -> Iterator[tuple[str, Any]]:
    """Yields the name and the type of each field of a class."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef) or node.name != name:
            continue
        for line in node.body:
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and line.target.id[0] != "_":
                annotation = _type_of(line.annotation)
                if annotation is not None and isinstance(line.value, ast.Constant) and line.value.value is None:
                    annotation = annotation | None
                yield line.target.id, annotation


_NAMES: Mapping[str, Any] = {
    "bool": bool, "int": int, "float": float, "str": str, "Optional": typing.Optional, "Union": typing.Union,
    "Literal": Literal, "torch": types.SimpleNamespace(dtype=DType),
}  # fmt: skip
"""Names in the types of fields that YAML has values of."""


def _type_of(annotation: ast.expr) -> Any:
    """Returns the type of a field in megatron's source; None if YAML has no value of it."""
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        annotation = ast.parse(annotation.value, mode="eval").body
    try:
        return eval(compile(ast.Expression(annotation), KEY, "eval"), {"__builtins__": {}}, dict(_NAMES))
    except (AttributeError, NameError):
        return None


def check(given: Mapping[str, Any]) -> None:
    """Raises ConfigError for a field that the installed megatron-core lacks, a field set by mrl, and a value of another
    type."""
    for name, value in given.items():
        field, key = fields().get(name), f"{KEY}.{name}"
        if field is None:
            version = importlib.metadata.version("megatron-core")
            raise ConfigError(key, value, f"is for a field that megatron-core {version} does not have", "leave it out")
        if name in SET_BY_MRL:
            raise ConfigError(key, value, "is for a field that mrl sets itself", SET_BY_MRL[name])
        if name in REFUSED_FIELDS:
            raise ConfigError(key, value, f"is for what mrl does not have: {REFUSED_FIELDS[name]}", "leave it out")
        if field.annotation is None:
            raise ConfigError(key, value, "is for a field that takes a Python object", "leave it out")
        if not any(_is(value, arm) for arm in arms_of(field.annotation)):
            fix = f"give {accepted_values(field.annotation)}"
            raise ConfigError(key, value, "is of another type than megatron-core has", fix)
        if name in MOMENTS.values():
            _check_moment(key, value, aware=given.get("use_precision_aware_optimizer") is True)


def _is(value: Any, arm: Any) -> bool:
    if typing.get_origin(arm) is Literal:
        return value in typing.get_args(arm)
    return type(value) is arm or (arm is float and type(value) is int)


def _check_moment(key: str, value: Any, *, aware: bool) -> None:
    if value not in ("float32", "bfloat16"):  # others have factors beside them, which no checkpoint of ours holds
        raise ConfigError(key, value, "is no dtype that moments are kept in", "give float32 or bfloat16")
    if not aware:
        why, fix = f"is read with {KEY}.use_precision_aware_optimizer alone", "set that to true, or leave this out"
        raise ConfigError(key, value, why, fix)


def fields_of_kind(given: Mapping[str, Any], kind: Kind) -> dict[str, Any]:
    """Returns the fields of megatron's class of a kind, with dtypes of torch."""
    import torch

    made = {}
    for name, value in given.items():
        field = fields()[name]
        if kind in field.kinds:
            is_dtype = field.annotation is not None and DType in arms_of(field.annotation)
            made[name] = getattr(torch, value) if is_dtype and value is not None else value
    return made


def megatron_refusal(given: Mapping[str, Any], error: BaseException) -> ConfigError:
    """Returns megatron's own words on the fields, from making its configuration of them."""
    names = join_names(sorted(given))
    return ConfigError(KEY, why=f"sets {names}, and megatron-core refuses it: {one_line(error, 200)}",
                       fix="leave out what it names")  # fmt: skip
