"""Keys of verl, and ours for them."""

from __future__ import annotations

from mrl.config.foreign_rows import (
    BY_HAND,
    DTYPE,
    FREQ,
    FUNCTION,
    INHERITED,
    JINJA,
    KWARGS,
    MICRO,
    NEEDLESS,
    NOT_PPO,
    OFF,
    ONE_SIZE,
    PARALLEL,
    PPO,
    PROMPTS,
    RECOMPUTE,
    ROLLOUTS,
    ROW,
    SFT,
    SHARE,
    TOKENS,
    TOKENS_OF_CP,
    Row,
    Trainer,
    offload,
    row,
    rows_with,
    same_values,
    unsupported_rows,
)

MODEL, ACTOR = "actor_rollout_ref.model", "actor_rollout_ref.actor"
ROLLOUT, N = "actor_rollout_ref.rollout", "actor_rollout_ref.rollout.n"
KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
SCHEDULE = same_values("constant cosine")
BACKEND = {"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}
GROUP = "ranks of a shard group there; the number of groups here"
ESTIMATORS = same_values("grpo remax rloo gspo") | {
    "gae": "ppo", "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
}  # fmt: skip
AGGREGATION = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "fixed_length",
}  # fmt: skip


def _lora(theirs: str, ours: str, *, flat: str, nested: str) -> list[Row]:
    """Returns the rows of a model's adapters; verl has them twice. flat, nested: the names in each place."""
    names = {"lora_alpha": "alpha", "target_modules": "target_modules", "exclude_modules": "exclude_modules"}
    return [
        row(f"{theirs}.lora_rank", f"{ours}.lora.rank", values=OFF),
        *(row(f"{theirs}.{name}", f"{ours}.lora.{names[name]}", when=f"{theirs}.lora_rank") for name in flat.split()),
        row(f"{theirs}.lora.rank", f"{ours}.lora.rank", values=OFF),
        *(row(f"{theirs}.lora.{name}", f"{ours}.lora.{name}", when=f"{theirs}.lora.rank") for name in nested.split()),
    ]


def _role(theirs: str, ours: str) -> list[Row]:
    """Returns the rows of a role that trains: the actor, or the critic."""
    optim, optimizer, engine = f"{theirs}.optim", f"{ours}.optimizer", f"{ours}.engine"
    size, tokens, dynamic = f"{engine}.micro_batch.size", f"{engine}.micro_batch.tokens", f"{theirs}.use_dynamic_bsz"
    lengths = "ours is dynamic if micro_batch.tokens is set"
    return [
        row(f"{optim}.lr", f"{optimizer}.lr"),
        row(f"{optim}.weight_decay", f"{optimizer}.weight_decay", default=0.01),
        row(f"{optim}.betas", f"{optimizer}.betas", default=[0.9, 0.999]),
        row(f"{optim}.lr_warmup_steps", f"{optimizer}.warmup_steps", values=FREQ),
        row(f"{optim}.lr_warmup_steps_ratio", f"{optimizer}.warmup_steps", SHARE, values={0: None} | BY_HAND),
        row(f"{optim}.lr_scheduler_type", f"{optimizer}.schedule", values=SCHEDULE, default="constant"),
        row(f"{optim}.warmup_style", f"{optimizer}.schedule", values=SCHEDULE),
        row(f"{optim}.lr_decay_style", f"{optimizer}.schedule", values=SCHEDULE | {"linear": "linear", "WSD": "wsd"}),
        row(f"{optim}.lr_decay_steps", f"{optimizer}.decay_steps"),
        row(f"{optim}.min_lr", f"{optimizer}.min_lr"),
        row(f"{optim}.clip_grad", f"{optimizer}.clip_grad"),
        row(f"{theirs}.grad_clip", f"{optimizer}.clip_grad"),
        row(f"{optim}.optimizer", f"{optimizer}.name", values={"AdamW": "adamw", "adam": "adamw", "muon": "muon"}),
        *unsupported_rows(f"{optim}.", "optimizer_impl total_training_steps min_lr_ratio num_cycles zero_indexed_step "
              "override_optimizer_config lr_warmup_init"),
        row(f"{theirs}.strategy", f"{engine}.backend", values=BACKEND, default="fsdp"),
        row(f"{theirs}.ppo_micro_batch_size_per_gpu", size, MICRO, when=f"not {dynamic}"),
        row(f"{theirs}.ppo_max_token_len_per_gpu", tokens, TOKENS_OF_CP, when=dynamic),
        row(dynamic, tokens, lengths, values={True: None, False: None}),
        row(f"{theirs}.ppo_micro_batch_size", size, "counts all devices together there"),
        row(f"{theirs}.ulysses_sequence_parallel_size", f"{engine}.parallel.cp"),
        *(row(f"{theirs}.megatron.{name}", f"{engine}.parallel.{ours_}") for name, ours_ in PARALLEL),
        *_fsdp(f"{theirs}.fsdp_config", engine),
        *_fsdp(f"{theirs}.fsdp", engine),
        *unsupported_rows(f"{theirs}.", "shuffle data_loader_seed rollout_n calculate_entropy use_fused_kernels "
              "use_remove_padding"),
    ]  # fmt: skip


def _fsdp(theirs: str, engine: str) -> list[Row]:
    return [
        row(f"{theirs}.param_offload", f"{engine}.offload", "a list here: [parameters]", values=offload("parameters")),
        row(f"{theirs}.optimizer_offload", f"{engine}.offload", "a list here: [optimizer]",
            values=offload("optimizer")),
        row(f"{theirs}.reshard_after_forward", f"{engine}.fsdp.reshard_after_forward"),
        row(f"{theirs}.fsdp_size", f"{engine}.fsdp.replicate", GROUP, values={-1: None} | BY_HAND),
        row(f"{theirs}.ulysses_sequence_parallel_size", f"{engine}.parallel.cp"),
        row(f"{theirs}.use_torch_compile", f"{engine}.fsdp.compile", values=NEEDLESS),
    ]  # fmt: skip


_DATA = [
    row("algorithm.adv_estimator", "algorithm.name", values=ESTIMATORS, default="gae"),
    row("data.train_files", "data.train"),
    row("data.val_files", "data.eval"),
    row("data.train_batch_size", "train.global_batch_size", PROMPTS, times=N, of=PPO, default=1024),
    row("data.train_batch_size", "train.global_batch_size", ROW, of=NOT_PPO),
    row("data.max_prompt_length", "data.max_prompt_length", default=512),
    row("data.max_response_length", "rollout.max_new_tokens", default=512),
    row("data.max_length", "data.max_length", of=NOT_PPO, default=1024),
    row("data.truncation", "data.truncation", values=same_values("error left right")),
    row("data.filter_overlong_prompts", "data.truncation", "drop skips longer rows",
        values={True: "drop", False: None}),
    row("data.prompt_key", "data.columns", "a mapping here: {their name: prompt}", values={"prompt": None} | BY_HAND),
    row("data.messages_key", "data.columns", "a mapping here: {their name: messages}",
        values={"messages": None} | BY_HAND),
    row("data.reward_fn_key", "rewards.functions", "a function reads any field of a row by its name", values=NEEDLESS),
    row("data.seed", "seed"),
    row("data.micro_batch_size_per_gpu", "engine.micro_batch.size", MICRO, when="not data.use_dynamic_bsz"),
    row("data.max_token_len_per_gpu", "engine.micro_batch.tokens", TOKENS),
    row("data.use_dynamic_bsz", "engine.micro_batch.tokens", values={True: None, False: None}),
    *unsupported_rows("data.", "apply_chat_template_kwargs", KWARGS),
    *unsupported_rows("data.", """
        tokenizer use_shm train_max_samples val_max_samples gen_batch_size val_batch_size tool_config_path
        function_tool_path return_raw_input_ids return_raw_chat return_full_prompt dataloader_num_workers
        image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key audio_key
        trust_remote_code return_multi_modal_inputs mm_processor_kwargs custom_cls.path custom_cls.name tools_key
        enable_thinking_key enable_thinking_default pad_mode balance_dp_token num_workers ignore_input_ids_mismatch
        custom_cls datagen sampler"""),
]  # fmt: skip

_ACTOR_ROWS = [
    row(f"{MODEL}.path", "actor.model.path"),
    row(f"{MODEL}.trust_remote_code", "actor.model.trust_remote_code"),
    row(f"{MODEL}.custom_chat_template", "data.chat_template", JINJA, values=BY_HAND),
    row(f"{MODEL}.enable_gradient_checkpointing", "actor.engine.recompute", values=RECOMPUTE, default=True),
    row(f"{MODEL}.enable_activation_offload", "actor.engine.offload", "a list here: [activations]",
        values=offload("activations")),
    row(f"{MODEL}.use_remove_padding", "data.packing", default=True),
    *_lora(MODEL, "actor.model", flat="lora_alpha target_modules exclude_modules", nested="alpha dropout"),
    *_role(ACTOR, "actor"),
    row(f"{ACTOR}.ppo_mini_batch_size", "algorithm.mini_batch_size", PROMPTS, times=N, default=256),
    row(f"{ACTOR}.ppo_epochs", "algorithm.epochs"),
    row(f"{ACTOR}.clip_ratio", "algorithm.clip_low algorithm.clip_high"),
    row(f"{ACTOR}.clip_ratio_low", "algorithm.clip_low", default=0.2),
    row(f"{ACTOR}.clip_ratio_high", "algorithm.clip_high", default=0.2),
    row(f"{ACTOR}.clip_ratio_c", "algorithm.dual_clip", default=3.0),
    row(f"{ACTOR}.loss_agg_mode", "algorithm.aggregation", values=AGGREGATION, default="token-mean"),
    row(f"{ACTOR}.entropy_coeff", "algorithm.entropy_coef", default=0),
    row(f"{ACTOR}.policy_loss.loss_mode", "algorithm.ratio", values={"vanilla": "token", "gspo": "sequence"}),
]  # fmt: skip

_ALGORITHM = [
    row("algorithm.use_kl_in_reward", "algorithm.kl_in", values={True: "reward", False: "none"}, default=False),
    *rows_with(
        [
            row("algorithm.kl_penalty", "algorithm.kl_estimator", values=KL),
            row("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", default=0.001),
            row("algorithm.kl_ctrl.target_kl", "algorithm.kl_target",
                "there it counts with kl_ctrl.type adaptive; here if it is above 0", values=BY_HAND),
        ],
        when="algorithm.use_kl_in_reward",
    ),
    *unsupported_rows("algorithm.kl_ctrl.", "type horizon",
                      "set algorithm.kl_target to steer the coefficient; 0 keeps it"),
    row(f"{ACTOR}.use_kl_loss", "algorithm.kl_in", values={True: "loss", False: None}),
    *rows_with(
        [
            row(f"{ACTOR}.kl_loss_coef", "algorithm.kl_coef", default=0.001),
            row(f"{ACTOR}.kl_loss_type", "algorithm.kl_estimator", values=KL, default="low_var_kl"),
        ],
        when=f"{ACTOR}.use_kl_loss",
    ),
    row("algorithm.gamma", "algorithm.gamma", values={1: None, "*": ...}),
    row("algorithm.lam", "algorithm.lam", values={1: None, "*": ...}),
    row("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", "dr_grpo's advantage is group_mean",
        values={True: None, False: "group_mean"}),
    row("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
    row("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_sampling_rounds", values=OFF),
    row("algorithm.rollout_correction.rollout_is", "algorithm.correction",
        values={"token": "truncate", "sequence": "truncate"}),
    row("algorithm.rollout_correction.rollout_is", "algorithm.correction_level", values=same_values("token sequence")),
    row("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction_cap",
        when="algorithm.rollout_correction.rollout_is"),
    *unsupported_rows("algorithm.", """
        filter_groups.metric filter_groups.max_inflight_gen_batches use_pf_ppo pf_ppo.reweight_method
        pf_ppo.weight_pow rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold
        rollout_correction.bypass_mode rollout_correction.loss_type
        rollout_correction.rollout_is_batch_normalize"""),
]  # fmt: skip

_ROLLOUT = [
    row(N, "rollout.samples_per_prompt", default=1),
    row(f"{ROLLOUT}.name", "rollout.backend",
        "native samples with the actor's own engine; vllm and sglang are servers, or engines in the trainer",
        values=same_values("vllm sglang") | {"hf": "native"}),
    *(row(f"{ROLLOUT}.{name}", f"rollout.{name}") for name in ("temperature", "top_p")),
    row(f"{ROLLOUT}.top_k", "rollout.top_k", "-1 there, 0 here, is all tokens", values={-1: 0, "*": ...}),
    row(f"{ROLLOUT}.tensor_model_parallel_size", "rollout.server.tp"),
    row(f"{ROLLOUT}.gpu_memory_utilization", "rollout.server.memory_fraction"),
    row(f"{ROLLOUT}.val_kwargs.n", "train.eval_samples"),
    row(f"{ROLLOUT}.multi_turn.max_assistant_turns", "rollout.max_turns"),
    row(f"{ROLLOUT}.multi_turn.enable", "rollout.environment", "path.py:Class of an environment here",
        values={False: None, True: KeyError}),
    row(f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", "actor.engine.micro_batch.size", ONE_SIZE, values=NEEDLESS),
    row("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "reference.engine.micro_batch.size",
        "the actor's unless reference.engine is set", values=NEEDLESS),
]  # fmt: skip

_CRITIC_ROWS = [
    row("critic.model.path", "critic.model.path"),
    *_role("critic", "critic"),
    *_fsdp("critic.model.fsdp_config", "critic.engine"),
    *_lora("critic.model", "critic.model", flat="lora_alpha", nested="alpha dropout target_modules exclude_modules"),
    row("critic.ppo_mini_batch_size", "algorithm.mini_batch_size", PROMPTS + "; actor and critic have one here",
        values=NEEDLESS),
    row("critic.ppo_epochs", "algorithm.epochs", "actor and critic have one here", values=NEEDLESS),
    row("critic.cliprange_value", "algorithm.value_clip"),
    *unsupported_rows("", "defaults hydra", INHERITED),
    *unsupported_rows("critic.", "enable forward_max_token_len_per_gpu forward_micro_batch_size "
          "forward_micro_batch_size_per_gpu loss_agg_mode loss_scale_factor"),
]  # fmt: skip

_REWARDS = [
    row("reward_model.model.path", "reward.model.path"),
    row("reward.reward_model.model_path", "reward.model.path"),
    row("custom_reward_function.path", "rewards.functions", FUNCTION, values=BY_HAND),
    row("custom_reward_function.name", "rewards.functions", FUNCTION, values=BY_HAND),
    row("reward.custom_reward_function.path", "rewards.functions", FUNCTION, values=BY_HAND),
    row("reward.custom_reward_function.name", "rewards.functions", FUNCTION, values={"compute_score": None} | BY_HAND),
    row("reward.num_workers", "rewards.workers"),
]  # fmt: skip

_TRAINER = [
    row("trainer.total_epochs", "train.epochs", default=30),
    row("trainer.total_training_steps", "train.steps", ROLLOUTS, values=BY_HAND, of=PPO),
    row("trainer.total_training_steps", "train.steps", of=NOT_PPO),
    row("trainer.save_freq", "checkpoint.every", ROLLOUTS, values={-1: None} | BY_HAND, of=PPO),
    row("trainer.save_freq", "checkpoint.every", values=FREQ, of=NOT_PPO),
    row("trainer.test_freq", "train.eval_every", ROLLOUTS, values={-1: None} | BY_HAND, of=PPO),
    row("trainer.test_freq", "train.eval_every", values=FREQ, of=NOT_PPO),
    row("trainer.default_local_dir", "output_dir"),
    row("trainer.critic_warmup", "algorithm.critic_warmup", ROLLOUTS, values={0: 0} | BY_HAND),
    row("trainer.project_name", "log.wandb.project"),
    row("trainer.experiment_name", "log.wandb.name"),
    row("trainer.resume_mode", "checkpoint.resume", values={"auto": "auto", "disable": "never"}),
    row("trainer.resume_from_path", "checkpoint.resume"),
    row("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
    row("trainer.max_ckpt_to_keep", "checkpoint.keep"),
    row("trainer.seed", "seed"),
    row("trainer.device", "engine.device", values={"cuda": None, "cpu": "cpu"}),
    row("trainer.rollout_data_dir", "log.samples.every", "samples are in output_dir/samples here", values=NEEDLESS),
    *unsupported_rows("trainer.", "n_gpus_per_node nnodes", "a run has a process for each GPU, or as many as --nproc"),
]

_NOWHERE = """
    hf_config_path tokenizer_path use_shm external_lib override_config lora_adapter_path use_liger use_fused_kernels"""
_MODEL_ROWS = [
    *(row for model in (f"{MODEL}.", "critic.model.", "model.") for row in unsupported_rows(model, _NOWHERE)),
    *unsupported_rows("critic.model.", "trust_remote_code custom_chat_template enable_gradient_checkpointing "
          "enable_activation_offload use_remove_padding", "the critic uses the actor's"),
    *unsupported_rows("critic.model.", "target_modules exclude_modules",
          "give critic.model.lora.target_modules with our names"),
    *unsupported_rows("engine.", "offload_policy forward_prefetch model_dtype use_orig_params seed forward_only "
          "full_determinism"),
]  # fmt: skip

_SFT_ROWS = [
    *rows_with(
        [
            row("model.custom_chat_template", "data.chat_template", JINJA, values=BY_HAND),
            row("model.enable_gradient_checkpointing", "engine.recompute", values=RECOMPUTE, default=True),
            row("model.enable_activation_offload", "engine.offload", values=offload("activations")),
            row("model.use_remove_padding", "data.packing"),
            *_lora("model", "model", flat="lora_alpha target_modules exclude_modules",
                nested="alpha dropout target_modules exclude_modules"),
        ],
        of=NOT_PPO,
    ),
    *unsupported_rows("model.lora.", "type merge dropout_position lora_A_init_method lora_B_init_method "
                      "a2a_experimental dtype adapter_path"),
    *unsupported_rows("model.mtp.", "enable enable_train enable_rollout detach_encoder mtp_loss_scaling_factor method "
          "num_speculative_tokens", "model.mtp: {} trains MTP layers here"),
    *rows_with(
        [
            row("engine.strategy", "engine.backend", values=BACKEND),
            row("engine.ulysses_sequence_parallel_size", "engine.parallel.cp"),
            row("engine.reshard_after_forward", "engine.fsdp.reshard_after_forward"),
            row("engine.param_offload", "engine.offload", "a list here: [parameters]", values=offload("parameters")),
            row("engine.optimizer_offload", "engine.offload", "a list here: [optimizer]", values=offload("optimizer")),
            row("engine.dtype", "model.dtype", values=DTYPE),
            row("engine.fsdp_size", "engine.fsdp.replicate", GROUP, values={-1: None} | BY_HAND),
        ],
        of=NOT_PPO,
    ),
    row("model.partial_pretrain", "model.path", of=SFT),
    row("model.path", "model.path", of=SFT),
    *rows_with(
        [
            row("optim.lr", "optimizer.lr"),
            row("optim.weight_decay", "optimizer.weight_decay"),
            row("optim.betas", "optimizer.betas"),
            row("optim.clip_grad", "optimizer.clip_grad"),
            row("optim.lr_warmup_steps", "optimizer.warmup_steps", values=FREQ),
            row("optim.lr_scheduler_type", "optimizer.schedule", values=SCHEDULE),
        ],
        of=NOT_PPO,
    ),
]  # fmt: skip

VERL = Trainer(
    "verl",
    "verl 0.9.1 (PyPI), verl/trainer/config/_generated_ppo_trainer.yaml, optim/megatron.yaml, engine/megatron.yaml, "
    "sft_trainer_engine.yaml",
    (
        "actor_rollout_ref", "custom_reward_function", "reward_model", "ray_kwargs", "global_profiler",
        "transfer_queue", "trainer", "sandbox_fusion", "skip", "optim",
    ),
    (
        "critic.fsdp", "critic.megatron", "critic.optim", "critic.checkpoint", "critic.profiler", "critic.nccl_timeout",
        "critic.model.mtp", "critic.model.lora.", "model.mtp.speculative", "model.lora.freeze_",
        "model.fused_kernel_options", "critic.model.fused_kernel_options", "model.tiled_mlp",
        "critic.model.tiled_mlp", "engine.qat", "engine.turbo_config", "reward.reward_manager", "reward.reward_model",
        "reward.sandbox_fusion", "checkpoint.save_contents", "checkpoint.load_contents", "engine.entropy_",
        "engine.pad_to_length", "engine.use_", "engine.wrap_policy",
    ),
    (*_DATA, *_ACTOR_ROWS, *_ALGORITHM, *_ROLLOUT, *_CRITIC_ROWS, *_REWARDS, *_TRAINER, *_MODEL_ROWS, *_SFT_ROWS),
)  # fmt: skip
