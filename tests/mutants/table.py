"""The mutants of losses, batches, engines, checkpoints and plans; those of models are in table_of_models.py, of the commands
that inspect a model in table_of_commands.py, of `mrl serve` in table_of_serve.py."""

from __future__ import annotations

from tests.mutants.mutant import of as _of
from tests.mutants.table_of_commands import OF_COMMANDS
from tests.mutants.table_of_data import OF_DATA
from tests.mutants.table_of_metrics import OF_METRICS
from tests.mutants.table_of_models import OF_DELTA_NETS, OF_MODELS
from tests.mutants.table_of_rollouts import OF_ROLLOUTS
from tests.mutants.table_of_serve import OF_SERVE

LOSSES = (
    *_of(
        "algorithms/losses.py",
        "algorithms/test_losses.py",
        ("return (loss_T * weights_T).sum()", "return (loss_T * weights_T).mean()"),
        ("loss_T = loss_T + self.kl_coef * kl_T", "loss_T = loss_T - self.kl_coef * kl_T"),
        ("loss_T = loss_T - self.entropy_coef *", "loss_T = loss_T + self.entropy_coef *"),
    ),
    *_of(
        "algorithms/policy.py",
        "algorithms/test_policy.py",
        (
            "kept_T = ratio_T.clamp(1 - clip.low, 1 + clip.high) * advantages_T",
            "kept_T = ratio_T.clamp(1 - clip.high, 1 + clip.low) * advantages_T",
        ),
        ("torch.minimum(surrogate_T, kept_T), kept_T <", "torch.maximum(surrogate_T, kept_T), kept_T <"),
        (
            "torch.where(advantages_T < 0, torch.maximum(objective_T, bound_T), objective_T)",
            "torch.maximum(objective_T, bound_T)",
        ),
    ),
    *_of(
        "algorithms/losses.py",
        "algorithms/test_losses.py::test_traps_5_and_7_sum_over_any_split_is_the_aggregate",
        ('"sequence_mean": "sequences", "fixed_length": "sequences"', '"sequence_mean": "tokens", "fixed_length": "sequences"'),
        ("return mask_T / totals_T.masked_fill(mask_T == 0, 1.0)", "return mask_T / totals_T.mean()"),
        ("return mask_T / fixed_length", "return mask_T / (fixed_length + 1)"),
    ),
    *_of(
        "algorithms/losses.py",
        ("algorithms/test_losses.py::test_value_loss", "algorithms/test_losses.py::test_explained_variance"),
        ("torch.maximum(plain_T, clipped_T) / 2", "torch.minimum(plain_T, clipped_T) / 2"),
        ("near_T = old_values_T + (values_T - old_values_T)", "near_T = values_T + (values_T - old_values_T)"),
        ("(error_squared - error**2) / variance", "error_squared / variance"),
    ),
    *_of("algorithms/sft.py", "algorithms/test_sft.py", ("return (nll_T * mask_T).sum(), ctx", "return nll_T.sum(), ctx")),
    *_of(
        "algorithms/policy.py",
        "algorithms/test_policy.py",
        ("ratio_T.clamp(max=correction.cap)", "ratio_T.clamp(min=correction.cap)"),
        (" | (ratio_T < correction.floor)", ""),
        (".detach().masked_fill(mask_T == 0, 0.0)", ".masked_fill(mask_T == 0, 0.0)"),
    ),
)  # fmt: skip

KL = (
    *_of(
        "algorithms/kl.py",
        "algorithms/test_kl.py",
        ("torch.expm1(-clamped_log_ratio(d_T)) + clamped_log_ratio(d_T)", "torch.expm1(clamped_log_ratio(d_T)) - clamped_log_ratio(d_T)"),
        ("d_T.square() / 2", "d_T.square()"),
        ("-0.2), 0.2)\n", "-0.2), 2.0)\n"),
    ),
    *_of(
        "algorithms/policy.py",
        ("algorithms/test_policy.py", "algorithms/test_kl.py"),
        ("log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)", "log_ratio"),
    ),
    *_of(
        "trainers/rl/updates.py",
        "trainers/rl/test_algorithms.py::test_kl_target_steers_the_coefficient",
        ("dataclasses.replace(loss_fn, kl_coef=trainer.kl.coef)", "dataclasses.replace(loss_fn, kl_coef=recipe.kl_coef)"),
        ("trainer.kl.update(experience.sequence_kl)", "trainer.kl.update(0.0)"),
    ),
)  # fmt: skip

ADVANTAGES = (
    *_of(
        "algorithms/advantages.py",
        "algorithms/test_advantages.py",
        ("deltas_NS[n] + gamma * lam * following_S", "deltas_NS[n] + lam * following_S"),
        ("torch.zeros_like(values_NS[:1])]", "values_NS[-1:]]"),
        ("from_trained_columns(advantages_NS + values_NS,", "from_trained_columns(advantages_NS,"),
    ),
    *_of(
        "algorithms/advantages.py",
        "algorithms/test_advantages.py",
        ("rewards_T = rewards_T - kl_coef * kl_T", "rewards_T = rewards_T + kl_coef * kl_T"),
        ("(beyond_S / cache).clamp(0.0, 1.0)", "(beyond_S / cache).clamp(min=0.0)"),
        ("return (lowest < highest)[group_S]", "return (lowest <= highest)[group_S]"),
    ),
    *_of(
        "algorithms/ragged.py",
        "algorithms/test_advantages.py",
        ("torch.stack([part.max() for part in parts])", "torch.stack([part.min() for part in parts])"),
    ),
    *_of(
        "algorithms/ragged.py",
        "trainers/rl/test_algorithms.py::test_overlong_punishment_counts_observations_as_the_limit_does",
        ("part.cummax(0).values.sum()", "part.sum()"),
    ),
    *_of(
        "algorithms/recipes.py",
        ("trainers/rl/test_experience.py", "algorithms/test_recipes.py"),
        ("math.ceil(recipe.overlong_fraction", "math.floor(recipe.overlong_fraction"),
        ('kl_coef=recipe.kl_coef if recipe.kl_in in ("loss", "exact") else 0.0', "kl_coef=recipe.kl_coef"),
        ("(whiten(advantages_T, rollout.mask_T) if recipe.whiten else advantages_T)", "advantages_T"),
    ),
    *_of(
        "trainers/rl/experience.py",
        "trainers/rl/test_experience.py",
        ("kl_T=kl_T, kl_coef=kl.coef)", "kl_T=kl_T, kl_coef=recipe.kl_coef)"),
        ('values_T=fields["old_values"].double() if', 'values_T=fields["old_values"].double().roll(1) if'),
        ("order = range(count) if epoch == 0 else", "order = range(count) if epoch >= 0 else"),
    ),
)  # fmt: skip

BATCHES = (
    *_of(
        "batch.py",
        ("data/test_batches.py", "algorithms/test_losses.py", "trainers/rl/test_experience.py"),
        ("labels=flat([ids[1:] for ids in sequences]", "labels=flat([ids[:-1] for ids in sequences]"),
        ("loss_mask=flat([m[1:] for m in masks]", "loss_mask=flat([m[:-1] for m in masks]"),
    ),
    *_of(
        "engine/microbatch.py",
        "engine/test_microbatch.py",
        ("count = -(-len(lengths) // size)", "count = len(lengths) // size + 1"),
        ("(len(runs[-1]) + 1) * lengths[i] <= tokens", "len(runs[-1]) * lengths[i] <= tokens"),
    ),
    *_of(
        "engine/microbatch.py",
        "engine/test_microbatch.py",
        ("(free - lengths[i], -time, index)", "(free, -time, index)"),
        ("key=lambda i: -lengths[i])", "key=lambda i: lengths[i])"),
    ),
    *_of(
        "data/mixture.py",
        ("data/test_batches.py", "data/test_prompts.py"),
        ("at.position + 1 == len(self.dataset)", "at.position + 2 == len(self.dataset)"),
    ),
    *_of(
        "data/stream.py",
        ("data/test_batches.py", "data/test_prompts.py"),
        ("np.array([seed % 2**64, epoch]", "np.array([seed % 2**64, 0]"),
    ),
)  # fmt: skip

SCALING_AND_OPTIMIZER = (
    *_of(
        "engine/megatron/scaling.py",
        "engine/test_parity_megatron.py::test_row[llama, dp2, packed, size 2]",
        ("(micro_batches * dp / (denominator * share))", "(micro_batches / (denominator * share))"),
        ("(micro_batches * dp / (denominator * share))", "(dp / (denominator * share))"),
    ),
    *_of(
        "engine/fsdp/forward.py",
        "engine/test_fsdp_parity.py::test_equal_to_hugging_face[llama, dp2, packed, size 2, fsdp]",
        ("return loss_sum * (ranks / denominator)", "return loss_sum / denominator"),
    ),
    *_of(
        "engine/fsdp/optim.py",
        "engine/test_contract.py::test_contract[fsdp dp2-schedule_and_clipping]",
        ("limit / (norm + 1e-6)", "0.99 * limit / (norm + 1e-6)"),
        ("if limit and norm > limit:", "if not limit and norm > limit:"),
        (".double().square().sum()\n", ".double().sum()\n"),
    ),
    *_of(
        "engine/schedule.py",
        "engine/test_schedule.py",
        ("return peak * (step + 1) / warmup", "return peak * step / warmup"),
        ("min(max(step - start, 0) / decay, 1.0)", "max(step - start, 0) / decay"),
        ("low + (peak - low) * 0.5 * (1.0 + math", "(peak - low) * 0.5 * (1.0 + math"),
    ),
    *_of(
        "engine/guards.py",
        "engine/test_guards.py",
        ("splitmix.mix_in_place(places * splitmix.to_int64(splitmix.GAMMA) + words)", "splitmix.mix_in_place(words.long().clone())"),
        ("splitmix.mix_in_place(places * splitmix.to_int64(splitmix.GAMMA) + words)", "places * (words + 7 * places)"),
        ("differ = (low != high).tolist()", "differ = (low > high).tolist()"),
    ),
)  # fmt: skip

CONVERTERS = (
    *_of(
        "weights/algebra.py",
        "weights/test_algebra.py",
        ("Span(source, 0, start + low - at, high - low)", "Span(source, 0, start, high - low)"),
        ("real = min(max(rows - start, 0), length)", "real = min(rows, length)"),
        ("return -(-vocab_size // unit) * unit", "return vocab_size // unit * unit"),
    ),
    *_of(
        "weights/quantized.py",
        "weights/test_quantized.py",
        ("[blocks & 15, blocks >> 4]", "[blocks >> 4, blocks & 15]"),
        ("(scales.int() - 127)", "(scales.int() - 128)"),
        ("of_blocks[top - low * block[0] :, left", "of_blocks[0:, left"),
    ),
    *_of(
        "weights/stacks.py",
        "weights/test_round_trip.py::test_stacked_experts_load_like_split_ones",
        ("first + start : first + stop", "start : stop"),
    ),
)  # fmt: skip

CHECKPOINTS = (
    *_of(
        "engine/atomic_checkpoint.py",
        (
            "engine/test_checkpoint.py::test_the_last_n_are_kept",
            "engine/test_checkpoint.py::test_order_is_of_time_not_of_steps",
            "engine/test_checkpoint.py::test_all_ranks_write_into_one_folder",
            "engine/test_checkpoint.py::test_a_damaged_or_foreign_checkpoint_is_refused_by_name",
            "engine/test_checkpoint.py::test_leftovers_of_a_kill_are_removed_by_the_next_save",
        ),
        ("in _whole(root)[:-keep]", "in _whole(root)[: -keep - 1]"),
        ("key=lambda item: (item[1].serial, item[0])", "key=lambda item: item[0]"),
        ('content=entry["size"] <= SMALL_BYTES', "content=False"),
    ),
)  # fmt: skip

ON_GPUS = (
    *_of(
        "ops/flash.py",
        "ops/test_flash.py::test_a_gpus_kernel_is_called_for_the_same_attention",
        ('else window - 1, "window_size_right"', 'else window, "window_size_right"'),
        ('"window_size_right": 0}', '"window_size_right": -1}'),
    ),
    *_of(
        "mcore_models/attention.py",
        "mcore_models/test_packed_layout.py::test_all_tokens_belong_to_a_sequence",
        ("cu_seqlens_q_padded=places,", "cu_seqlens_q_padded=places.clone(),"),
    ),
    *_of(
        "mcore_models/te_limits.py",
        "mcore_models/test_te_limits.py",
        ("not any(n % self.cp or n % 2 for n in", "not any(n % self.cp for n in"),
        ("number // 100 % 100", "number // 1000 % 10"),
        (' and "NVTE_FUSED_ATTN" not in gpu.switched_off', ""),
    ),
    *_of(
        "mcore_models/versions.py",
        "mcore_models/test_te_limits.py::test_which_flash_attn_a_transformer_engine_takes",
        ('included=since != "2.19"', "included=True"),
        ('("2.10", "2.8.3")', '("2.10", "2.8.3.post1")'),
    ),
    *_of(
        "ops/causal.py",
        "engine/test_fsdp_model.py::test_attentions_memory_grows_with_the_length",
        ("if torch.is_grad_enabled():", "if False:"),
    ),
    *_of(
        "mcore_models/layer_spec.py",
        (
            "mcore_models/test_layer_spec.py::test_auto_is_local_where_only_the_unfused_attention_is_left",
            "mcore_models/test_layer_spec.py::test_te_is_said_by_rules_where_no_gpu_is",
        ),
        ("if slow is not None:", "if False:"),
        ("absent == platform.NO_GPU and elsewhere):", "False):"),
    ),
    *_of(
        "mcore_models/layer_spec.py",
        "mcore_models/test_layer_spec.py",
        ('if wanted == "local":', 'if wanted == "local" and platform.without_transformer_engine():'),
        ("if platform.is_broken_package(absent):", "if False:"),
    ),
    *_of(
        "config/resume.py",
        "config/test_resume.py",
        ("before < after and not cuts_pairs", "before < after"),
        ("before < after and not", "not"),
    ),
    *_of(
        "trainers/used_folder.py",
        "launch/test_used_folder.py",
        ("before = with_limits_of(before, now, type(config))", "pass"),
        ("if file.exists() and _is_older(pathlib.Path(newest) / atomic_checkpoint.MARKER, file):", "if True:"),
    ),
    *_of(
        "launch/automatic.py",
        "launch/test_automatic.py::test_what_samples_is_chosen_by_what_is_here",
        ('if "cpu" in preflight.devices(command, config):', "if False:"),
        ('check_sampling(sampled_by(config, "vllm").rollout)', 'sampled_by(config, "vllm")'),
    ),
    *_of(
        "launch/start.py",
        "launch/test_automatic.py::test_ranks_sample_as_the_first_one_chose",
        ("config = automatic.sampled_by(given, backend)", "pass"),
    ),
    *_of(
        "trainers/used_folder.py",
        "trainers/test_loops.py",
        ('return last is None or last["step"] != step - 1', "return last is None"),
        ('return (before.get("data") or {}).get("eval") is None or', "return"),
    ),
    *_of(
        "trainers/common.py",
        "trainers/test_loops.py",
        ("if before[name] != now[name]:", "if False:"),
        ("return self.step - bool(self.unlogged)", "return self.step"),
    ),
    *_of(
        "ops/devices.py",
        "mcore_models/test_layer_spec.py::test_models_live_on_the_processs_own_gpu",
        ('torch.device("cuda", torch.cuda.current_device())', 'torch.device("cuda", 0)'),
    ),
    *_of(
        "mcore_models/layer_spec.py",
        "mcore_models/test_layer_spec.py::test_what_its_attention_has_for_a_dtype",
        ("gpu, dtype=dtype)\n    if refusal is not None:\n        return refusal", "gpu)\n    if refusal is not None:\n        return refusal"),
    ),
    *_of(
        "mcore_models/lora.py",
        "mcore_models/test_lora.py",
        ("return all(adapter.enabled for adapter in self)", "return True"),
        ("zip(self, x.split(list(splits)), strict=True)", "zip(reversed(list(self)), x.split(list(splits)), strict=True)"),
    ),
    *_of(
        "engine/torch_dist/boxes.py",
        "engine/test_torch_dist.py",
        ('yield block.to("cpu", copy=True, memory', 'yield block.to("cpu", memory'),
        ("_added(box.offsets, at), data, box.padded)", "_added(box.offsets, at), data)"),
    ),
)  # fmt: skip

PLANS = (
    *_of(
        "plan/schedule.py",
        ("plan/test_schedule.py::test_the_bubble_is_the_known_formula",
         "plan/test_schedule.py::test_activations_of_1f1b_are_of_as_many_micro_batches_as_stages_follow",
         "plan/test_schedule.py::test_what_is_sent_is_waited_for",
            "plan/test_schedule.py::test_forward_passes_before_the_first_backward_pass"),
        ("(len(self.busy) * self.makespan)", "self.makespan"),
        ("(pp - stage - 1) * 2 + (vpp - 1) * pp", "(pp - stage - 1) + (vpp - 1) * pp"),
    ),
    *_of(
        "plan/memory.py",
        "plan/test_memory.py",
        ("figures.parameters + figures.buffers + _copies", "figures.parameters + _copies"),
        ("math.ceil(math.ceil(mine / each) / multiple) * multiple", "math.ceil(mine / each)"),
    ),
    *_of(
        "plan/cost.py",
        "plan/test_cost.py",
        ("size * (2 * share if op", "size * (share if op"),
        ("chunk.sent * micro_batches * (1 if forward_only else 2)", "chunk.sent * micro_batches"),
    ),
    *_of(
        "config/megatron_speed.py",
        "plan/test_memory.py",
        ("moments + (0 if parameter_bytes == 4 else 4)", "moments + 4"),
    ),
    *_of(
        "engine/megatron/meta.py",
        "plan/test_memory.py",
        ("* 2 * fields[\"kv_channels\"] * item", "* 2 * fields[\"kv_channels\"] * 2"),
        ("max(1, fields[\"num_query_groups\"] // dims.tp)", "fields[\"num_query_groups\"]"),
    ),
    *_of(
        "engine/fsdp/shapes.py",
        "plan/test_memory.py::test_shards_of_a_tensor_are_padded_to_the_same_rows",
        ("return -(-self.rows // ranks) * self.row", "return self.rows * self.row // ranks"),
    ),
)  # fmt: skip

MUTANTS = (
    *LOSSES, *KL, *ADVANTAGES, *BATCHES, *SCALING_AND_OPTIMIZER, *CONVERTERS, *CHECKPOINTS, *ON_GPUS, *PLANS,
    *OF_MODELS,
    *OF_DELTA_NETS,
    *OF_COMMANDS,
    *OF_DATA,
    *OF_METRICS,
    *OF_ROLLOUTS,
    *OF_SERVE,
)  # fmt: skip
