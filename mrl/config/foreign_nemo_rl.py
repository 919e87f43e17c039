"""Keys of NeMo-RL, and ours for them."""

from __future__ import annotations

from mrl.config.foreign_rows import (
    BY_HAND,
    DTYPE,
    FREQ,
    INHERITED,
    JINJA,
    KWARGS,
    MICRO,
    NEEDLESS,
    NOT_PPO,
    ONE_SIZE,
    PARALLEL,
    PPO,
    PROMPTS,
    RECOMPUTE,
    ROLLOUTS,
    ROW,
    TOKENS,
    Row,
    Trainer,
    offload,
    row,
    rows_with,
    same_values,
    unsupported_rows,
)

MEGATRON, DTENSOR = "policy.megatron_cfg", "policy.dtensor_cfg"
PACKING = "policy.sequence_packing"
DATASET = "a file, folder or hub id here"

_POLICY = [
    row("policy.model_name", "model.path"),
    row("policy.train_global_batch_size", "algorithm.mini_batch_size", "counts sequences of an optimizer step", of=PPO),
    row("policy.train_global_batch_size", "train.global_batch_size", ROW, of=NOT_PPO),
    row("policy.train_micro_batch_size", "engine.micro_batch.size", MICRO, when=f"not {PACKING}.enabled"),
    row(f"{PACKING}.enabled", "data.packing"),
    row(f"{PACKING}.train_mb_tokens", "engine.micro_batch.tokens", TOKENS, when=f"{PACKING}.enabled"),
    row("policy.max_total_sequence_length", "data.max_length", of=NOT_PPO),
    row("policy.max_total_sequence_length", "data.max_prompt_length rollout.max_new_tokens",
        "prompt and answer together there; two keys here", of=PPO, values=BY_HAND),
    row("policy.precision", "model.dtype", values=DTYPE | {"float16": KeyError}),
    row("policy.max_grad_norm", "optimizer.clip_grad"),
    row("policy.tokenizer.name", "model.path", "the model's own tokenizer here", values=NEEDLESS),
    row("policy.tokenizer.chat_template", "data.chat_template", JINJA, values=BY_HAND),
    *unsupported_rows("policy.tokenizer.", "chat_template_kwargs", KWARGS),
    row("policy.optimizer.name", "optimizer.name", values={"torch.optim.AdamW": "adamw"}),
    *rows_with(
        (row(f"policy.optimizer.kwargs.{one}", f"optimizer.{one}") for one in ("lr", "weight_decay", "betas", "eps")),
        when=f"not {MEGATRON}.enabled",
    ),
    *unsupported_rows("policy.optimizer.kwargs.", "foreach fused"),
    row("policy.scheduler", "optimizer.schedule", "a list of torch's schedulers there", values=BY_HAND),
    row(f"{MEGATRON}.enabled", "engine.backend", values={True: "megatron", False: None}),
    row(f"{DTENSOR}.enabled", "engine.backend", values={True: "fsdp", False: None}),
    *rows_with(
        [
            row(f"{DTENSOR}.tensor_parallel_size", "engine.parallel.tp", "here for the megatron backend alone",
                values={1: None} | BY_HAND),
            row(f"{DTENSOR}.context_parallel_size", "engine.parallel.cp"),
            row(f"{DTENSOR}.activation_checkpointing", "engine.recompute", values=RECOMPUTE),
            row(f"{DTENSOR}.sequence_parallel", "engine.parallel.sp", values={False: None, True: KeyError}),
            row(f"{DTENSOR}.cpu_offload", "engine.offload", "a list here",
                values=offload("parameters", "gradients", "optimizer")),
        ],
        when=f"{DTENSOR}.enabled",
    ),
    *rows_with(
        [
            row(f"{MEGATRON}.activation_checkpointing", "engine.recompute", values=RECOMPUTE),
            *(row(f"{MEGATRON}.{name}", f"engine.parallel.{ours}") for name, ours in PARALLEL),
            *(row(f"{MEGATRON}.optimizer.{name}", f"optimizer.{name}") for name in ("lr", "min_lr", "weight_decay")),
            row(f"{MEGATRON}.optimizer.adam_eps", "optimizer.eps"),
            row(f"{MEGATRON}.optimizer.clip_grad", "optimizer.clip_grad"),
            row(f"{MEGATRON}.optimizer.adam_beta1", "optimizer.betas", "a list of both here", values=BY_HAND),
            row(f"{MEGATRON}.optimizer.adam_beta2", "optimizer.betas", "a list of both here", values=BY_HAND),
            row(f"{MEGATRON}.scheduler.lr_decay_style", "optimizer.schedule"),
            row(f"{MEGATRON}.scheduler.lr_warmup_iters", "optimizer.warmup_steps"),
            row(f"{MEGATRON}.scheduler.lr_decay_iters", "optimizer.decay_steps", "includes the warm-up there",
                values=BY_HAND),
        ],
        when=f"{MEGATRON}.enabled",
    ),
    row(f"{DTENSOR}.lora_cfg.dim", "model.lora.rank", when=f"{DTENSOR}.lora_cfg.enabled"),
    row(f"{MEGATRON}.peft.dim", "model.lora.rank", when=f"{MEGATRON}.peft.enabled"),
    *(
        row(f"{lora}.{name}", f"model.lora.{name}", when=f"{lora}.enabled")
        for lora in (f"{DTENSOR}.lora_cfg", f"{MEGATRON}.peft")
        for name in ("alpha", "dropout")
    ),
    row("policy.generation.backend", "rollout.backend",
        values=same_values("vllm sglang") | {"megatron": "native", "hf": "native"}),
    row("policy.generation.max_new_tokens", "rollout.max_new_tokens", "prompt and answer together there",
        values=BY_HAND),
    row("policy.generation.temperature", "rollout.temperature"),
    row("policy.generation.top_p", "rollout.top_p"),
    row("policy.generation.top_k", "rollout.top_k"),
    row("policy.generation.stop_token_ids", "rollout.stop_tokens"),
    row("policy.generation.stop_strings", "rollout.stop"),
    row("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.server.tp"),
    row("policy.generation.vllm_cfg.gpu_memory_utilization", "rollout.server.memory_fraction"),
    row("policy.logprob_batch_size", "engine.micro_batch.size", ONE_SIZE, values=NEEDLESS),
    row("policy.generation_batch_size", "rollout.cache_tokens", "tokens here", values=NEEDLESS),
]  # fmt: skip

_RUN = [
    row("teacher.model_name", "reference.model.path"),
    row("loss_fn.reference_policy_kl_penalty", "algorithm.kl_coef", of=PPO),
    row("loss_fn.ratio_clip_min", "algorithm.clip_low"),
    row("loss_fn.ratio_clip_max", "algorithm.clip_high"),
    row("loss_fn.ratio_clip_c", "algorithm.dual_clip"),
    row("loss_fn.token_level_loss", "algorithm.aggregation", values={True: "token_mean", False: "sequence_mean"}),
    row("loss_fn.sequence_level_importance_ratios", "algorithm.ratio", values={True: "sequence", False: "token"}),
    row("loss_fn.use_importance_sampling_correction", "algorithm.correction", values={True: "truncate", False: "none"}),
    row("loss_fn.kl_type", "algorithm.distill.loss",
        values={"forward": "forward_kl", "reverse": "reverse_kl", "mixed": KeyError}),
    *unsupported_rows("loss_fn.", "use_on_policy_kl_approximation mixed_kl_weight zero_outside_topk"),
    row("checkpointing.checkpoint_dir", "output_dir", "checkpoints are in output_dir/checkpoints here"),
    row("checkpointing.save_period", "checkpoint.every", ROLLOUTS, of=PPO, values=BY_HAND),
    row("checkpointing.save_period", "checkpoint.every", of=NOT_PPO),
    row("checkpointing.keep_top_k", "checkpoint.keep", "the best there, the newest here"),
    row("checkpointing.metric_name", "checkpoint.best", of=PPO, values=BY_HAND),
    *unsupported_rows("checkpointing.", "enabled higher_is_better checkpoint_must_save_by model_save_format "
                      "save_consolidated save_optimizer metric_name"),
    row("data.max_input_seq_length", "data.max_length", of=NOT_PPO),
    row("data.max_input_seq_length", "data.max_prompt_length", of=PPO),
    row("data.dataset_name", "data.train", DATASET, values=BY_HAND),
    row("data.train.dataset_name", "data.train", DATASET, values=BY_HAND),
    row("data.train.data_path", "data.train"),
    row("data.train.split", "data.split", values={"train": None}),
    row("data.validation.dataset_name", "data.eval", DATASET, values=BY_HAND),
    row("data.validation.data_path", "data.eval"),
    row("data.train_data_path", "data.train"),
    row("data.val_data_path", "data.eval"),
    *(
        row(f"{data}.{key}", "data.columns", "a mapping here: {their name: ours}", values=BY_HAND)
        for data in ("data", "data.train", "data.validation")
        for key in ("input_key", "output_key", "prompt_key", "chosen_key", "rejected_key", "chat_key")
    ),
    row("data.system_prompt_file", "data.system", "the text itself here", values=BY_HAND),
    *unsupported_rows("data.", """
        prompt_file num_workers add_bos add_eos add_generation_prompt validation.split validation.repeat
        default.prompt_file default.system_prompt_file default.processor default.env_name"""),
    row("logger.log_dir", "output_dir", "logs are in output_dir here", values=NEEDLESS),
    row("logger.wandb_enabled", "log.wandb.project", "a project turns wandb on here", values={True: None, False: None}),
    row("logger.wandb.project", "log.wandb.project", when="logger.wandb_enabled"),
    row("logger.wandb.name", "log.wandb.name", when="logger.wandb_enabled"),
    row("logger.tensorboard_enabled", "log.tensorboard"),
    *unsupported_rows("cluster.", "gpus_per_node num_nodes", "a run has a process for each GPU, or as many as --nproc"),
]  # fmt: skip


def _counts() -> list[Row]:
    """Returns the rows that name the parts of a run of each algorithm alike."""
    rows: list[Row] = []
    for name in ("grpo", "distillation"):
        samples = f"{name}.num_generations_per_prompt"
        rows += [
            row(f"{name}.num_prompts_per_step", "train.global_batch_size", PROMPTS, times=samples),
            row(samples, "rollout.samples_per_prompt"),
            row(f"{name}.max_num_steps", "train.steps", ROLLOUTS, values=BY_HAND),
            row(f"{name}.val_period", "train.eval_every", ROLLOUTS, values=FREQ | BY_HAND),
            row(f"{name}.max_rollout_turns", "rollout.max_turns"),
            row(f"{name}.max_val_samples", "train.eval_prompts"),
        ]  # fmt: skip
    for name in ("sft", "dpo", "rm"):
        rows += [
            row(f"{name}.max_num_steps", "train.steps", values=FREQ),
            row(f"{name}.val_period", "train.eval_every", values=FREQ),
            row(f"{name}.val_batches", "train.eval_batches", values=FREQ),
            *unsupported_rows(f"{name}.", "val_global_batch_size val_micro_batch_size"),
        ]
    for name in ("grpo", "distillation", "sft", "dpo", "rm"):
        rows += [
            row(f"{name}.max_num_epochs", "train.epochs", "the shorter of both counts there; give one of them here",
                when=f"not {name}.max_num_steps"),
            row(f"{name}.seed", "seed"),
            *unsupported_rows(f"{name}.", "val_at_start val_at_end val_batch_size"),
        ]  # fmt: skip
    return rows


_OWN = [
    row("grpo.normalize_rewards", "algorithm.advantage", values={True: None, False: "group_mean"}),
    row("grpo.use_leave_one_out_baseline", "algorithm.advantage", values={True: "rloo", False: None}),
    row("grpo.use_dynamic_sampling", "algorithm.dynamic_sampling"),
    *unsupported_rows("", "defaults", INHERITED),
    *unsupported_rows("grpo.", "overlong_filtering async_grpo.enabled async_grpo.max_trajectory_age_steps"),
    row("distillation.topk_logits_k", "algorithm.distill.top_k"),
    row("dpo.reference_policy_kl_penalty", "loss.beta"),
    row("dpo.preference_average_log_probs", "loss.length_normalized"),
    row("dpo.sft_loss_weight", "loss.sft_weight"),
    row("dpo.preference_loss", "loss.name", values=same_values("dpo ipo")),
    *unsupported_rows("dpo.", "preference_loss_weight sft_average_log_probs gt_reward_scale"),
]

NEMO_RL = Trainer(
    "NeMo-RL",
    "NVIDIA-NeMo/RL, examples/configs: grpo_math_1B, distillation_math, sft, dpo and rm, at 7ea279abfb",
    (
        "policy", "grpo", "loss_fn", "checkpointing", "logger", "cluster", "env", "distillation", "dpo", "sft", "rm",
        "data_plane", "reward_penalties", "on_policy_distillation",
    ),
    (
        "teacher.megatron_cfg", "teacher.dtensor_cfg", "teacher.generation", "teacher.optimizer",
        "teacher.dynamic_batching", "teacher.sequence_packing", "teacher.tokenizer", "teacher.train_",
        "teacher.logprob_", "teacher.max_total", "teacher.precision", "teacher.offload_optimizer",
        "teacher.make_sequence", "teacher.scheduler", "data.train.", "data.validation", "data.default",
        "data.use_multiple_dataloader",
    ),
    (*_POLICY, *_RUN, *_counts(), *_OWN),
)  # fmt: skip
