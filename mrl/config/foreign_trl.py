"""Keys of TRL, and ours for them."""

from __future__ import annotations

from mrl.config.foreign_rows import (
    BY_HAND,
    FREQ,
    FUNCTION,
    KWARGS,
    NEEDLESS,
    NOT_PPO,
    ONE_SIZE,
    PPO,
    RECOMPUTE,
    SFT,
    SHARE,
    Trainer,
    offload,
    row,
    same_values,
    unsupported_rows,
)

LOSS_ON = {True: "assistant", False: "all"}

_ROWS = [
    row("model_name_or_path", "model.path"),
    row("dataset_name", "data.train"),
    row("dataset_config", "data.train", "give it with the id: ID:CONFIG", values=BY_HAND),
    row("dataset_train_split", "data.split", values={"train": None}),
    row("dataset_test_split", "data.eval", "give the id, of which test is taken, else validation; or a file",
        values=BY_HAND),
    row("dataset_streaming", "data.stream", of=NOT_PPO),
    row("dataset_text_field", "data.columns", "a mapping here: {their name: text}", values={"text": None} | BY_HAND),
    row("learning_rate", "optimizer.lr"),
    row("lr_scheduler_type", "optimizer.schedule", default="linear",
        values=same_values("linear cosine constant")
        | {"constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}),
    row("warmup_steps", "optimizer.warmup_steps"),
    row("warmup_ratio", "optimizer.warmup_steps", SHARE, values={0: None} | BY_HAND),
    row("weight_decay", "optimizer.weight_decay"),
    row("adam_beta1", "optimizer.betas", "a list of both here", values=BY_HAND),
    row("adam_beta2", "optimizer.betas", "a list of both here; 0.999 by default there", values=BY_HAND),
    row("adam_epsilon", "optimizer.eps"),
    row("max_grad_norm", "optimizer.clip_grad"),
    row("optim", "optimizer.name",
        values=same_values("adamw muon") | {"adamw_torch": "adamw", "adamw_torch_fused": "adamw"}),
    row("num_train_epochs", "train.epochs", default=3, when="not max_steps"),
    row("max_steps", "train.steps", values=FREQ),
    row("per_device_train_batch_size", "engine.micro_batch.size train.global_batch_size",
        "counts one device; multiply by gradient_accumulation_steps and by the processes", values=BY_HAND),
    row("gradient_accumulation_steps", "train.global_batch_size",
        "multiply per_device_train_batch_size by it and by the processes", values=BY_HAND),
    row("per_device_eval_batch_size", "engine.micro_batch.size", ONE_SIZE, values=NEEDLESS),
    row("gradient_checkpointing", "engine.recompute", values=RECOMPUTE, default=True),
    row("activation_checkpointing", "engine.recompute", values=RECOMPUTE),
    row("activation_offloading", "engine.offload", "a list here: [activations]", values=offload("activations")),
    row("torch_compile", "engine.fsdp.compile"),
    row("bf16", "model.dtype", values={True: "bfloat16", False: None}),
    row("fp16", "model.dtype", "bfloat16 or float32 here", values={False: None, True: KeyError}),
    row("dtype", "model.dtype", values=same_values("bfloat16 float32") | {"auto": None}),
    row("torch_dtype", "model.dtype", values=same_values("bfloat16 float32") | {"auto": None}),
    row("attn_implementation", "engine.attention",
        values={"flash_attention_2": "flash", "sdpa": None, "eager": "unfused"}),
    row("trust_remote_code", "model.trust_remote_code"),
    row("use_peft", "model.lora", values={True: {}, False: None}),
    row("lora_r", "model.lora.rank", when="use_peft"),
    row("lora_alpha", "model.lora.alpha", when="use_peft"),
    row("lora_dropout", "model.lora.dropout", when="use_peft", default=0.05),
    row("lora_target_modules", "model.lora.target_modules", when="use_peft"),
    row("use_rslora", "model.lora.rslora", when="use_peft"),
    row("router_aux_loss_coef", "engine.moe.aux_loss"),
    row("use_cpu", "engine.device", values={True: "cpu", False: None}),
    row("deepspeed", "engine.backend", "fsdp shards weights as ZeRO-3 does; engine.offload has its offload",
        values=BY_HAND),
    row("fsdp", "engine.backend", "give fsdp", values=BY_HAND),
    row("fsdp_config", "engine.fsdp", values=BY_HAND),
    row("parallelism_config", "engine.parallel", values=BY_HAND),
    row("logging_steps", "log.every"),
    row("report_to", "log.wandb.project", "a project turns wandb on here; log.tensorboard",
        values={"none": None} | BY_HAND),
    row("project", "log.wandb.project"),
    row("run_name", "log.wandb.name"),
    row("disable_tqdm", "log.console", values={True: "plain", False: None}),
    row("save_steps", "checkpoint.every"),
    row("save_strategy", "checkpoint.every", "counts steps here", values={"steps": None, "no": None} | BY_HAND),
    row("save_total_limit", "checkpoint.keep"),
    row("resume_from_checkpoint", "checkpoint.resume", values={True: "auto", False: "never"}),
    row("metric_for_best_model", "checkpoint.best", of=PPO),
    row("eval_steps", "train.eval_every"),
    row("eval_strategy", "train.eval_every", "counts steps here", values={"steps": None, "no": None} | BY_HAND),
    row("data_seed", "seed", "one seed for both here"),
    row("chat_template_path", "data.chat_template"),
    row("chat_template", "data.chat_template", "a Jinja file here", values=BY_HAND),
    row("max_length", "data.max_length", of=NOT_PPO, default=1024),
    row("max_seq_length", "data.max_length", of=NOT_PPO),
    row("max_prompt_length", "data.max_prompt_length", of=PPO),
    row("truncation_mode", "data.truncation", values={"keep_start": "right", "keep_end": "left"}, default="keep_start",
        of=SFT),
    row("shuffle_dataset", "data.shuffle"),
    row("packing", "data.packing", "here rows are end to end in a micro-batch; none is split or mixed", of=NOT_PPO,
        values={True: True, False: None}),
    row("assistant_only_loss", "data.loss_on", "assistant is the default here", values=LOSS_ON, of=SFT),
    row("completion_only_loss", "data.loss_on", values=LOSS_ON, of=SFT),
    row("loss_type", "loss.name", values={"sigmoid": "dpo"} | same_values("ipo kto"), of=("dpo",)),
    row("loss_type", "algorithm.aggregation", "it sets the denominator", of=PPO, default="dapo",
        values={"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "fixed_length"}),
    row("beta", "loss.beta", of=("dpo",), default=0.1),
    row("beta", "algorithm.kl_coef", of=PPO, values={0: None, "*": ...}),
    row("beta", "algorithm.kl_in", "0 there is no KL", of=PPO, values={0: "none", "*": "loss"}, default=0.0),
    row("label_smoothing", "loss.label_smoothing"),
    row("rpo_alpha", "loss.sft_weight"),
    row("desirable_weight", "loss.desirable_weight"),
    row("undesirable_weight", "loss.undesirable_weight"),
    row("precompute_ref_log_probs", "reference.cache"),
    row("ref_model", "reference.model.path"),
    row("center_rewards_coefficient", "loss.centering"),
    row("num_generations", "rollout.samples_per_prompt", default=8),
    row("num_generations_eval", "train.eval_samples"),
    row("max_completion_length", "rollout.max_new_tokens", default=512),
    row("generation_batch_size", "train.global_batch_size", "counts sequences in both"),
    row("steps_per_generation", "algorithm.mini_batch_size", "ours is the size, global_batch_size / steps",
        values=BY_HAND),
    row("num_iterations", "algorithm.epochs"),
    row("temperature", "rollout.temperature"),
    row("top_p", "rollout.top_p"),
    row("top_k", "rollout.top_k", values={-1: 0, "*": ...}),
    row("min_p", "rollout.min_p"),
    row("use_vllm", "rollout.backend", values={True: "vllm", False: None}),
    row("vllm_mode", "rollout.server.urls", "no url is an engine in the trainer here",
        values={"colocate": None, "server": KeyError}),
    row("vllm_server_base_url", "rollout.server.urls", "a list here", values=BY_HAND),
    row("vllm_server_timeout", "rollout.server.timeout_s", when="use_vllm"),
    row("vllm_gpu_memory_utilization", "rollout.server.memory_fraction", when="use_vllm"),
    row("vllm_tensor_parallel_size", "rollout.server.tp", when="use_vllm"),
    row("vllm_enable_sleep_mode", "rollout.server.sleep", when="use_vllm"),
    row("epsilon", "algorithm.clip_low algorithm.clip_high"),
    row("epsilon_high", "algorithm.clip_high"),
    row("delta", "algorithm.dual_clip"),
    row("importance_sampling_level", "algorithm.ratio", values=same_values("token sequence")),
    row("scale_rewards", "algorithm.advantage",
        values={"group": None, True: None, "none": "group_mean", False: "group_mean"}),
    row("reward_weights", "rewards.functions", "a weight at each function here", values=BY_HAND),
    row("reward_funcs", "rewards.functions", FUNCTION, values=BY_HAND),
    row("reward_model_path", "reward.model.path"),
    row("reward_model_name_or_path", "reward.model.path"),
    row("entropy_coef", "algorithm.entropy_coef"),
    row("vllm_importance_sampling_correction", "algorithm.correction", values={True: KeyError, False: "none"}),
    row("vllm_importance_sampling_clip_max", "algorithm.correction_cap"),
    row("max_tool_calling_iterations", "rollout.max_turns"),
    row("log_completions", "log.table", "samples of a rollout that the console shows", values=NEEDLESS),
    row("num_completions_to_print", "log.table"),
    row("sync_ref_model", "reference.update_every", "steps here", of=PPO, values={False: None, True: KeyError}),
    row("ref_model_sync_steps", "reference.update_every", of=PPO, when="sync_ref_model"),
    *unsupported_rows("", "chat_template_kwargs", KWARGS),
    *unsupported_rows("", "do_train do_eval do_predict", "a command trains; data.eval is evaluated"),
    *unsupported_rows("", """
        push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision
        log_completions_hub_repo""", "checkpoint.export_hf writes a folder that can be uploaded"),
    *unsupported_rows("", """
        load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage use_dora""",
        "no quantized base, no DoRA"),
    *unsupported_rows("", """
        lr_scheduler_kwargs optim_args optim_target_modules average_tokens_across_devices label_smoothing_factor
        bf16_full_eval fp16_full_eval tf32 activation_checkpointing_kwargs gradient_checkpointing_kwargs
        torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache
        neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_first_step
        log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen overwrite_output_dir log_level
        log_level_replica trackio_space_id trackio_bucket_id trackio_static_space_id eval_delay prediction_loss_only
        eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics
        batch_eval_metrics save_only_model save_on_each_node enable_jit_checkpoint load_best_model_at_end
        metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint
        full_determinism accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory
        dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context
        dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name
        ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend
        ddp_timeout debug skip_memory_metrics local_rank model_init_kwargs dataset_kwargs dataset_num_proc
        eos_token pad_token packing_strategy padding_free pad_to_multiple_of eval_packing disable_dropout
        precompute_ref_batch_size loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting
        discopop_tau ref_model_mixup_alpha cast_lm_head_to_fp32 ds3_gather_for_generation generation_kwargs
        repetition_penalty cache_implementation vllm_model_impl
        vllm_structured_outputs_regex vllm_server_host vllm_server_port vllm_group_port vllm_max_model_length
        sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg
        multi_objective_aggregation mask_truncated_completions top_entropy_quantile use_adaptive_entropy
        entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target vllm_importance_sampling_mode
        vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_multimodal
        log_unique_prompts use_transformers_continuous_batching transformers_continuous_batching_config
        use_transformers_paged vllm_importance_sampling_cap model_revision lora_target_parameters
        lora_modules_to_save lora_task_type ignore_bias_buffers save_safetensors group_by_length"""),
]  # fmt: skip

TRL = Trainer(
    "TRL",
    "trl 1.16.0 (PyPI), SFTConfig, DPOConfig, KTOConfig, GRPOConfig, RewardConfig, ModelConfig, ScriptArguments, over "
    "transformers 5.24.0's TrainingArguments",
    (),
    (),
    tuple(_ROWS),
)
