"""Fields of megatron-core, by name, that make a run faster or smaller and change what it computes by rounding alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

ROUNDING = frozenset("""
    gradient_accumulation_fusion deallocate_pipeline_outputs overlap_p2p_comm_warmup_flush
    microbatch_group_size_per_vp_stage deterministic_mode bias_activation_fusion bias_dropout_fusion
    apply_rope_fusion fused_residual_rmsnorm moe_shared_expert_overlap moe_token_dispatcher_type moe_enable_deepep
    moe_flex_dispatcher_backend moe_permute_fusion moe_router_fusion moe_deepep_num_sms moe_flex_dispatcher_num_sms
    overlap_grad_reduce overlap_param_gather bucket_size pad_buckets_for_high_nccl_busbw
    reduce_scatter_with_fp32_accumulation symmetric_ar_type disable_bf16_reduced_precision_matmul
    disable_parameter_transpose_cache clone_scatter_output_in_embedding
    check_for_nan_in_grad check_for_large_grads optimizer_cpu_offload fp8 fp8_recipe
    first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 tp_only_amax_red
    tp_comm_overlap tp_comm_overlap_ag tp_comm_overlap_rs tp_comm_overlap_rs_dgrad tp_comm_overlap_disable_qkv
    tp_comm_overlap_disable_fc1 tp_comm_bulk_dgrad tp_comm_bulk_wgrad tp_comm_bootstrap_backend
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that a resumed run may change: the same sums in another order or by another kernel, as another layout has
them. A run that is resumed has any other as it was saved."""

REMOVED_FIELDS = frozenset("""
    nccl_ub disable_symmetric_registration config_logger_dir moe_hybridep_num_sms moe_hybridep_num_blocks_permute
    moe_hybridep_num_blocks_unpermute moe_hybridep_num_sms_preprocessing moe_hybridep_pad_uneven_dispatch_inputs
    moe_permute_fusion_into_hybridep
""".split())  # fmt: skip  # noqa: SIM905
"""Fields that were taken and are refused now: a run that was saved with them is resumed without."""

PRECISION = frozenset("""
    fp8 fp8_recipe first_last_layers_bf16 num_layers_at_start_in_bf16 num_layers_at_end_in_bf16 tp_only_amax_red
""".split())  # fmt: skip  # noqa: SIM905
"""Of `ROUNDING`, what makes rounding as coarse as fp8: numbers that are kept are of one choice of these alone."""

PRECISION_AWARE = "use_precision_aware_optimizer"
"""The field that lets AdamW's moments have dtypes of their own."""

MOMENTS = {"exp_avg": "exp_avg_dtype", "exp_avg_sq": "exp_avg_sq_dtype"}
"""AdamW's moments, and the field that has the dtype of each where `use_precision_aware_optimizer` is true."""

CPU_OFFLOAD_FIELD = "optimizer_cpu_offload"
"""The field that keeps masters and moments in host memory, where updates are made too."""


def precision_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those fields of `engine.megatron` that are of `PRECISION`."""
    return {name: value for name, value in given.items() if name in PRECISION}


def moment_bytes(given: Mapping[str, Any]) -> int:
    """Returns bytes of both moments of an element. given: `engine.megatron`."""
    return sum(2 if given.get(field) == "bfloat16" else 4 for field in MOMENTS.values())


def state_bytes(parameter_bytes: int, moments: int, *, on_host: bool) -> int:
    """Returns bytes of an element's master and both moments on the device. An fp32 weight is its own master."""
    return 0 if on_host else moments + (0 if parameter_bytes == 4 else 4)
