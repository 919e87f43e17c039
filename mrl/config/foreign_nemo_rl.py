"""Keys of NeMo-RL, and ours for them."""

from __future__ import annotations

from mrl.config.foreign_rows import DTYPE, FREQ, MICRO, NOT_PPO, PARALLEL, PPO, PROMPTS, ROW, Row, Trainer, none, row

_COMMON = [
    row("policy.model_name", "model.path"),
    row("policy.train_global_batch_size", "algorithm.mini_batch_size", "counts sequences of an optimizer step", of=PPO),
    row("policy.train_global_batch_size", "train.global_batch_size", ROW, of=NOT_PPO),
    row("policy.train_micro_batch_size", "engine.micro_batch.size", MICRO, when="not policy.sequence_packing.enabled"),
    row("policy.sequence_packing.enabled", "data.packing"),
    row("policy.sequence_packing.train_mb_tokens", "engine.micro_batch.tokens", "tokens of a micro-batch on each device", when="policy.sequence_packing.enabled"),
    row("policy.max_total_sequence_length", "data.max_length", of=NOT_PPO),
    row("policy.max_total_sequence_length", "data.max_prompt_length rollout.max_new_tokens", "prompt and answer together there; ours are two", of=PPO, values={"*": KeyError}),
    row("policy.precision", "model.dtype", values={**DTYPE, "float16": KeyError}),
    row("policy.max_grad_norm", "optimizer.clip_grad"),
    row("policy.tokenizer.name", "model.path", "the model's own tokenizer here", values={"*": None}),
    row("policy.tokenizer.chat_template", "data.chat_template", "a Jinja file here", values={"*": KeyError}),
    row("policy.tokenizer.chat_template_kwargs", "data.chat_template", "a row's chat_template_kwargs here", values={"*": KeyError}),
    row("policy.optimizer.name", "optimizer.name", values={"torch.optim.AdamW": "adamw"}),
    row("policy.optimizer.kwargs.lr", "optimizer.lr", when="not policy.megatron_cfg.enabled"),
    row("policy.optimizer.kwargs.weight_decay", "optimizer.weight_decay", when="not policy.megatron_cfg.enabled"),
    row("policy.optimizer.kwargs.betas", "optimizer.betas", when="not policy.megatron_cfg.enabled"),
    row("policy.optimizer.kwargs.eps", "optimizer.eps", when="not policy.megatron_cfg.enabled"),
    *none("policy.optimizer.kwargs.", "foreach fused"),
    row("policy.scheduler", "optimizer.schedule", "a list of torch's schedulers there", values={"*": KeyError}),
    row("policy.megatron_cfg.enabled", "engine.backend", values={True: "megatron", False: None}),
    row("policy.dtensor_cfg.enabled", "engine.backend", values={True: "fsdp", False: None}),
    row("policy.dtensor_cfg.tensor_parallel_size", "engine.parallel.tp", "of backend megatron alone here", when="policy.dtensor_cfg.enabled", values={1: None, "*": KeyError}),
    row("policy.dtensor_cfg.context_parallel_size", "engine.parallel.cp", when="policy.dtensor_cfg.enabled"),
    row("policy.dtensor_cfg.activation_checkpointing", "engine.recompute", values={True: "full", False: "none"}, when="policy.dtensor_cfg.enabled"),
    row("policy.dtensor_cfg.sequence_parallel", "engine.parallel.sp", when="policy.dtensor_cfg.enabled", values={False: None, True: KeyError}),
    row("policy.dtensor_cfg.cpu_offload", "engine.offload", "a list here", when="policy.dtensor_cfg.enabled", values={False: None, True: ["parameters", "gradients", "optimizer"]}),
    row("policy.megatron_cfg.activation_checkpointing", "engine.recompute", values={True: "full", False: "none"}, when="policy.megatron_cfg.enabled"),
    *(row(f"policy.megatron_cfg.{name}", f"engine.parallel.{ours}", when="policy.megatron_cfg.enabled") for name, ours in PARALLEL),
    *(row(f"policy.megatron_cfg.optimizer.{name}", f"optimizer.{ours}", when="policy.megatron_cfg.enabled") for name, ours in (
        ("lr", "lr"), ("min_lr", "min_lr"), ("weight_decay", "weight_decay"), ("adam_eps", "eps"), ("clip_grad", "clip_grad"))),
    *(row(f"policy.megatron_cfg.optimizer.{name}", "optimizer.betas", "a list of both here", when="policy.megatron_cfg.enabled", values={"*": KeyError}) for name in ("adam_beta1", "adam_beta2")),
    row("policy.megatron_cfg.scheduler.lr_decay_style", "optimizer.schedule", when="policy.megatron_cfg.enabled"),
    row("policy.megatron_cfg.scheduler.lr_warmup_iters", "optimizer.warmup_steps", when="policy.megatron_cfg.enabled"),
    row("policy.megatron_cfg.scheduler.lr_decay_iters", "optimizer.decay_steps", "with the warm-up there", when="policy.megatron_cfg.enabled", values={"*": KeyError}),
    row("policy.dtensor_cfg.lora_cfg.dim", "model.lora.rank", when="policy.dtensor_cfg.lora_cfg.enabled"),
    row("policy.megatron_cfg.peft.dim", "model.lora.rank", when="policy.megatron_cfg.peft.enabled"),
    *(row(f"policy.{lora}.{name}", f"model.lora.{name}", when=f"policy.{lora}.enabled") for lora in ("dtensor_cfg.lora_cfg", "megatron_cfg.peft") for name in ("alpha", "dropout")),
    row("policy.generation.backend", "rollout.backend", values={"vllm": "vllm", "sglang": "sglang", "megatron": "native", "hf": "native"}),
    row("policy.generation.max_new_tokens", "rollout.max_new_tokens", "prompt and answer together there", values={"*": KeyError}),
    row("policy.generation.temperature", "rollout.temperature"),
    row("policy.generation.top_p", "rollout.top_p"),
    row("policy.generation.top_k", "rollout.top_k"),
    row("policy.generation.stop_token_ids", "rollout.stop_tokens"),
    row("policy.generation.stop_strings", "rollout.stop"),
    row("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.server.tp"),
    row("policy.generation.vllm_cfg.gpu_memory_utilization", "rollout.server.memory_fraction"),
    row("policy.logprob_batch_size", "engine.micro_batch.size", "one size for both here", values={"*": None}),
    row("policy.generation_batch_size", "rollout.cache_tokens", "tokens here", values={"*": None}),
    row("teacher.model_name", "reference.model.path"),
    row("loss_fn.reference_policy_kl_penalty", "algorithm.kl_coef", of=PPO),
    row("loss_fn.ratio_clip_min", "algorithm.clip_low"),
    row("loss_fn.ratio_clip_max", "algorithm.clip_high"),
    row("loss_fn.ratio_clip_c", "algorithm.dual_clip"),
    row("loss_fn.token_level_loss", "algorithm.aggregation", values={True: "token_mean", False: "sequence_mean"}),
    row("loss_fn.sequence_level_importance_ratios", "algorithm.ratio", values={True: "sequence", False: "token"}),
    row("loss_fn.use_importance_sampling_correction", "algorithm.correction", values={True: "truncate", False: "none"}),
    row("loss_fn.kl_type", "algorithm.distill.loss", values={"forward": "forward_kl", "reverse": "reverse_kl", "mixed": KeyError}),
    *none("loss_fn.", "use_on_policy_kl_approximation mixed_kl_weight zero_outside_topk"),
    row("checkpointing.checkpoint_dir", "output_dir", "checkpoints are in output_dir/checkpoints here"),
    row("checkpointing.save_period", "checkpoint.every", "counts rollouts there; ours counts optimizer steps", of=PPO, values={"*": KeyError}),
    row("checkpointing.save_period", "checkpoint.every", of=NOT_PPO),
    row("checkpointing.keep_top_k", "checkpoint.keep", "the best there, the newest here"),
    row("checkpointing.metric_name", "checkpoint.best", of=PPO, values={"*": KeyError}),
    *none("checkpointing.", "enabled higher_is_better checkpoint_must_save_by model_save_format save_consolidated save_optimizer metric_name"),
    row("data.max_input_seq_length", "data.max_length", of=NOT_PPO),
    row("data.max_input_seq_length", "data.max_prompt_length", of=PPO),
    row("data.dataset_name", "data.train", "a file, folder or hub id here", values={"*": KeyError}),
    row("data.train.dataset_name", "data.train", "a file, folder or hub id here", values={"*": KeyError}),
    row("data.train.data_path", "data.train"),
    row("data.train.split", "data.split", values={"train": None}),
    row("data.validation.dataset_name", "data.eval", "a file, folder or hub id here", values={"*": KeyError}),
    row("data.validation.data_path", "data.eval"),
    row("data.train_data_path", "data.train"),
    row("data.val_data_path", "data.eval"),
    *(row(f"data{of}.{key}", "data.columns", "a mapping here: {their name: ours}", values={"*": KeyError}) for of in ("", ".train", ".validation") for key in ("input_key", "output_key", "prompt_key", "chosen_key", "rejected_key", "chat_key")),
    row("data.system_prompt_file", "data.system", "the text itself here", values={"*": KeyError}),
    *none("data.", "prompt_file num_workers add_bos add_eos add_generation_prompt validation.split validation.repeat default.prompt_file default.system_prompt_file default.processor default.env_name"),
    row("logger.log_dir", "output_dir", "logs are in output_dir here", values={"*": None}),
    row("logger.wandb_enabled", "log.wandb.project", "a project turns wandb on here", values={True: None, False: None}),
    row("logger.wandb.project", "log.wandb.project", when="logger.wandb_enabled"),
    row("logger.wandb.name", "log.wandb.name", when="logger.wandb_enabled"),
    row("logger.tensorboard_enabled", "log.tensorboard"),
    *none("cluster.", "gpus_per_node num_nodes", "a run has a process for each GPU, or as many as --nproc"),
]  # fmt: skip


def _counts() -> list[Row]:
    """Returns the rows that name the parts of a run of each algorithm alike."""
    rows: list[Row] = []
    for name in ("grpo", "distillation"):
        samples = f"{name}.num_generations_per_prompt"
        rows += [
            row(f"{name}.num_prompts_per_step", "train.global_batch_size", PROMPTS, times=samples),
            row(samples, "rollout.samples_per_prompt"),
            row(f"{name}.max_num_steps", "train.steps", "counts rollouts there; ours counts optimizer steps", values={"*": KeyError}),
            row(f"{name}.val_period", "train.eval_every", "counts rollouts there; ours counts optimizer steps", values={"*": KeyError}),
            row(f"{name}.max_rollout_turns", "rollout.max_turns"),
            row(f"{name}.max_val_samples", "train.eval_prompts"),
        ]  # fmt: skip
    for name in ("sft", "dpo", "rm"):
        rows += [
            row(f"{name}.max_num_steps", "train.steps", values=FREQ),
            row(f"{name}.val_period", "train.eval_every"),
            row(f"{name}.val_batches", "train.eval_batches", values=FREQ),
            *none(f"{name}.", "val_global_batch_size val_micro_batch_size"),
        ]
    for name in ("grpo", "distillation", "sft", "dpo", "rm"):
        rows += [
            row(f"{name}.max_num_epochs", "train.epochs", "the shorter of both counts there; ours takes one of them", when=f"not {name}.max_num_steps"),
            row(f"{name}.seed", "seed"),
            *none(f"{name}.", "val_at_start val_at_end val_batch_size"),
        ]  # fmt: skip
    return rows


_OWN = [
    row("grpo.normalize_rewards", "algorithm.advantage", values={True: None, False: "group_mean"}),
    row("grpo.use_leave_one_out_baseline", "algorithm.advantage", values={True: "rloo", False: None}),
    row("grpo.use_dynamic_sampling", "algorithm.dynamic_sampling"),
    *none("grpo.", "overlong_filtering async_grpo.enabled async_grpo.max_trajectory_age_steps"),
    row("distillation.topk_logits_k", "algorithm.distill.top_k"),
    row("dpo.reference_policy_kl_penalty", "loss.beta"),
    row("dpo.preference_average_log_probs", "loss.length_normalized"),
    row("dpo.sft_loss_weight", "loss.sft_weight"),
    row("dpo.preference_loss", "loss.name", values={"dpo": "dpo", "ipo": "ipo"}),
    *none("dpo.", "preference_loss_weight sft_average_log_probs gt_reward_scale"),
]

NEMO_RL = Trainer(
    "NeMo-RL",
    "NVIDIA-NeMo/RL, examples/configs: grpo_math_1B, distillation_math, sft, dpo and rm, at 7ea279abfb",
    ("policy", "grpo", "loss_fn", "checkpointing", "logger", "cluster", "env", "distillation", "dpo", "sft", "rm", "data_plane", "reward_penalties", "on_policy_distillation"),
    ("teacher.megatron_cfg", "teacher.dtensor_cfg", "teacher.generation", "teacher.optimizer", "teacher.dynamic_batching", "teacher.sequence_packing", "teacher.tokenizer", "teacher.train_", "teacher.logprob_", "teacher.max_total", "teacher.precision", "teacher.offload_optimizer", "teacher.make_sequence", "teacher.scheduler", "data.train.", "data.validation", "data.default", "data.use_multiple_dataloader"),
    (*_COMMON, *_counts(), *_OWN),
)  # fmt: skip
