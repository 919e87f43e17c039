"""Keys of verl, NeMo-RL and TRL, and ours for them: the one table that messages, `mrl config translate` and
docs/coming-from.md are made of.

`python -m mrl.config.foreign > docs/coming-from.md` brings the page up to date; a test compares them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Row:
    """One key of another trainer."""

    theirs: str
    ours: tuple[str, ...] = ()  # () where nothing here stands for it; `actor.` is put before it where ours is a role's
    note: str = ""  # the change of unit or meaning
    values: Mapping[Any, Any] = dataclasses.field(default_factory=dict)
    """Theirs -> ours, "*" for any other: None where nothing needs to be written, KeyError where it cannot be told, ...
    where the value is kept. Without entries it is kept."""
    times: str = ""  # their key of a number that the value is multiplied with, as prompts are with samples
    when: str = ""  # their key that has to be true, or, after `not `, false, for this one to mean anything
    default: Any = None  # theirs where the file has none, written out where ours differs
    of: tuple[str, ...] = ()  # commands of ours that it is for; () for all


@dataclasses.dataclass(frozen=True)
class Trainer:
    name: str
    source: str  # what was read for it, with the version
    sections: tuple[str, ...]  # top-level keys that only its configs have
    begins: tuple[str, ...]  # beginnings of dotted keys in sections that ours have too, which only its configs have
    rows: tuple[Row, ...]


def _row(theirs: str, ours: str = "", note: str = "", **more: Any) -> Row:
    return Row(theirs, tuple(ours.split()), note, **more)


def _none(prefix: str, names: str, note: str = "") -> list[Row]:
    """Returns rows of keys that nothing here stands for."""
    return [Row(f"{prefix}{name}", note=note) for name in names.split()]


_N = "actor_rollout_ref.rollout.n"
_PROMPTS = "counts prompts there; ours counts sequences: times the samples of a prompt"
_ROW = "counts rows in both"
_DEVICE = "counts on each device there"
_FREQ = {-1: None, "*": ...}
_OFF = {0: None, -1: None, "*": ...}
_MICRO = "sequences of a micro-batch on each device"
_KL = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
_PPO, _SFT, _NOT_PPO = ("ppo",), ("sft",), ("sft", "dpo", "rm")
_ESTIMATORS = {
    "gae": "ppo", "grpo": "grpo", "reinforce_plus_plus": "reinforce_pp", "remax": "remax", "rloo": "rloo",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline", "gspo": "gspo",
}  # fmt: skip
_AGGREGATION = {
    "token-mean": "token_mean", "seq-mean-token-mean": "sequence_mean", "seq-mean-token-sum-norm": "fixed_length",
}  # fmt: skip
_DTYPE = {"fp32": "float32", "bf16": "bfloat16", "float32": "float32", "bfloat16": "bfloat16"}
_PARALLEL = (
    ("tensor_model_parallel_size", "tp"), ("pipeline_model_parallel_size", "pp"), ("context_parallel_size", "cp"),
    ("expert_model_parallel_size", "ep"), ("expert_tensor_parallel_size", "etp"),
    ("virtual_pipeline_model_parallel_size", "vpp"), ("sequence_parallel", "sp"),
)  # fmt: skip


def _verl_role(theirs: str, ours: str) -> list[Row]:
    """Returns the rows of a role that trains: the actor, or the critic."""
    optim, engine = f"{theirs}.optim", f"{ours}.engine"
    return [
        _row(f"{optim}.lr", f"{ours}.optimizer.lr"),
        _row(f"{optim}.weight_decay", f"{ours}.optimizer.weight_decay", default=0.01),
        _row(f"{optim}.betas", f"{ours}.optimizer.betas", default=[0.9, 0.999]),
        _row(f"{optim}.lr_warmup_steps", f"{ours}.optimizer.warmup_steps", values=_FREQ),
        _row(f"{optim}.lr_warmup_steps_ratio", f"{ours}.optimizer.warmup_steps", "a share of the run there; ours counts steps", values={0: None, "*": KeyError}),
        _row(f"{optim}.lr_scheduler_type", f"{ours}.optimizer.schedule", values={"constant": "constant", "cosine": "cosine"}, default="constant"),
        _row(f"{optim}.warmup_style", f"{ours}.optimizer.schedule", values={"constant": "constant", "cosine": "cosine"}),
        _row(f"{optim}.lr_decay_style", f"{ours}.optimizer.schedule", values={"constant": "constant", "cosine": "cosine", "linear": "linear", "WSD": "wsd"}),
        _row(f"{optim}.lr_decay_steps", f"{ours}.optimizer.decay_steps"),
        _row(f"{optim}.min_lr", f"{ours}.optimizer.min_lr"),
        _row(f"{optim}.clip_grad", f"{ours}.optimizer.clip_grad"),
        _row(f"{theirs}.grad_clip", f"{ours}.optimizer.clip_grad"),
        _row(f"{optim}.optimizer", f"{ours}.optimizer.name", values={"AdamW": "adamw", "adam": "adamw", "muon": "muon"}),
        *_none(f"{optim}.", "optimizer_impl total_training_steps min_lr_ratio num_cycles zero_indexed_step override_optimizer_config lr_warmup_init"),
        _row(f"{theirs}.strategy", f"{engine}.backend", values={"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}, default="fsdp"),
        _row(f"{theirs}.ppo_micro_batch_size_per_gpu", f"{engine}.micro_batch.size", _MICRO, when=f"not {theirs}.use_dynamic_bsz"),
        _row(f"{theirs}.ppo_max_token_len_per_gpu", f"{engine}.micro_batch.tokens", "tokens of a micro-batch on each device", when=f"{theirs}.use_dynamic_bsz"),
        _row(f"{theirs}.use_dynamic_bsz", f"{engine}.micro_batch.tokens", "ours is dynamic where micro_batch.tokens is set", values={True: None, False: None}),
        _row(f"{theirs}.ppo_micro_batch_size", f"{engine}.micro_batch.size", "counts all devices together there"),
        _row(f"{theirs}.ulysses_sequence_parallel_size", f"{engine}.parallel.cp"),
        *(_row(f"{theirs}.megatron.{name}", f"{engine}.parallel.{ours_}") for name, ours_ in _PARALLEL),
        *(_row(f"{theirs}.{fsdp}.{name}", key, note, **more) for fsdp in ("fsdp_config", "fsdp") for name, key, note, more in (
            ("param_offload", f"{engine}.offload", "a list there: [parameters]", {"values": {False: None, True: ["parameters"]}}),
            ("optimizer_offload", f"{engine}.offload", "a list there: [optimizer]", {"values": {False: None, True: ["optimizer"]}}),
            ("reshard_after_forward", f"{engine}.fsdp.reshard_after_forward", "", {}),
            ("fsdp_size", f"{engine}.fsdp.replicate", "ranks of a shard group there; ours counts the groups", {"values": {-1: None, "*": KeyError}}),
            ("ulysses_sequence_parallel_size", f"{engine}.parallel.cp", "", {}),
            ("use_torch_compile", f"{engine}.fsdp.compile", "", {"values": {"*": None}}),
        )),
        *_none(f"{theirs}.", "shuffle data_loader_seed rollout_n calculate_entropy use_fused_kernels use_remove_padding"),
    ]  # fmt: skip


VERL = Trainer(
    "verl",
    "verl 0.9.1 (PyPI), verl/trainer/config/_generated_ppo_trainer.yaml, optim/megatron.yaml, engine/megatron.yaml, sft_trainer_engine.yaml",
    ("actor_rollout_ref", "custom_reward_function", "reward_model", "ray_kwargs", "global_profiler", "transfer_queue", "trainer", "sandbox_fusion", "skip", "optim"),
    ("critic.fsdp", "critic.megatron", "critic.optim", "critic.checkpoint", "critic.profiler", "critic.nccl_timeout", "critic.model.mtp", "critic.model.lora.", "model.mtp.speculative", "model.lora.freeze_", "model.fused_kernel_options", "critic.model.fused_kernel_options", "model.tiled_mlp", "critic.model.tiled_mlp", "engine.qat", "engine.turbo_config", "reward.reward_manager", "reward.reward_model", "reward.sandbox_fusion", "checkpoint.save_contents", "checkpoint.load_contents", "engine.entropy_", "engine.pad_to_length", "engine.use_", "engine.wrap_policy"),
    (
        _row("algorithm.adv_estimator", "algorithm.name", values=_ESTIMATORS, default="gae"),
        _row("data.train_files", "data.train"),
        _row("data.val_files", "data.eval"),
        _row("data.train_batch_size", "train.global_batch_size", _PROMPTS, times=_N, of=_PPO, default=1024),
        _row("data.train_batch_size", "train.global_batch_size", _ROW, of=_NOT_PPO),
        _row("data.max_prompt_length", "data.max_prompt_length", default=512),
        _row("data.max_response_length", "rollout.max_new_tokens", default=512),
        _row("data.max_length", "data.max_length", of=_NOT_PPO, default=1024),
        _row("data.truncation", "data.truncation", values={"error": "error", "left": "left", "right": "right"}),
        _row("data.filter_overlong_prompts", "data.truncation", "drop leaves out longer ones", values={True: "drop", False: None}),
        _row("data.prompt_key", "data.columns", "a mapping here: {their name: prompt}", values={"prompt": None, "*": KeyError}),
        _row("data.messages_key", "data.columns", "a mapping here: {their name: messages}", values={"messages": None, "*": KeyError}),
        _row("data.reward_fn_key", "rewards.functions", "a function reads any field of a row by its name", values={"*": None}),
        _row("data.seed", "seed"),
        _row("data.micro_batch_size_per_gpu", "engine.micro_batch.size", _MICRO, when="not data.use_dynamic_bsz"),
        _row("data.max_token_len_per_gpu", "engine.micro_batch.tokens", "tokens of a micro-batch on each device"),
        _row("data.use_dynamic_bsz", "engine.micro_batch.tokens", values={True: None, False: None}),
        _row("data.apply_chat_template_kwargs", "data.chat_template", "a row's chat_template_kwargs here", values={"*": KeyError}),
        *_none("data.", "tokenizer use_shm train_max_samples val_max_samples gen_batch_size val_batch_size tool_config_path function_tool_path return_raw_input_ids return_raw_chat return_full_prompt dataloader_num_workers image_patch_size validation_shuffle filter_overlong_prompts_workers image_key video_key audio_key trust_remote_code return_multi_modal_inputs mm_processor_kwargs custom_cls.path custom_cls.name tools_key enable_thinking_key enable_thinking_default pad_mode balance_dp_token num_workers ignore_input_ids_mismatch custom_cls datagen sampler"),
        _row("actor_rollout_ref.model.path", "actor.model.path"),
        _row("actor_rollout_ref.model.trust_remote_code", "actor.model.trust_remote_code"),
        _row("actor_rollout_ref.model.custom_chat_template", "data.chat_template", "a Jinja file here", values={"*": KeyError}),
        _row("actor_rollout_ref.model.enable_gradient_checkpointing", "actor.engine.recompute", values={True: "full", False: "none"}, default=True),
        _row("actor_rollout_ref.model.enable_activation_offload", "actor.engine.offload", "a list here: [activations]", values={False: None, True: ["activations"]}),
        _row("actor_rollout_ref.model.use_remove_padding", "data.packing", default=True),
        _row("actor_rollout_ref.model.lora_rank", "actor.model.lora.rank", values=_OFF),
        _row("actor_rollout_ref.model.lora_alpha", "actor.model.lora.alpha", when="actor_rollout_ref.model.lora_rank"),
        _row("actor_rollout_ref.model.target_modules", "actor.model.lora.target_modules", when="actor_rollout_ref.model.lora_rank"),
        _row("actor_rollout_ref.model.exclude_modules", "actor.model.lora.exclude_modules", when="actor_rollout_ref.model.lora_rank"),
        _row("actor_rollout_ref.model.lora.rank", "actor.model.lora.rank", values=_OFF),
        *(_row(f"actor_rollout_ref.model.lora.{name}", f"actor.model.lora.{name}", when="actor_rollout_ref.model.lora.rank") for name in ("alpha", "dropout")),
        *_verl_role("actor_rollout_ref.actor", "actor"),
        _row("actor_rollout_ref.actor.ppo_mini_batch_size", "algorithm.mini_batch_size", _PROMPTS, times=_N, default=256),
        _row("actor_rollout_ref.actor.ppo_epochs", "algorithm.epochs"),
        _row("actor_rollout_ref.actor.clip_ratio", "algorithm.clip_low algorithm.clip_high"),
        _row("actor_rollout_ref.actor.clip_ratio_low", "algorithm.clip_low", default=0.2),
        _row("actor_rollout_ref.actor.clip_ratio_high", "algorithm.clip_high", default=0.2),
        _row("actor_rollout_ref.actor.clip_ratio_c", "algorithm.dual_clip", default=3.0),
        _row("actor_rollout_ref.actor.loss_agg_mode", "algorithm.aggregation", values=_AGGREGATION, default="token-mean"),
        _row("actor_rollout_ref.actor.entropy_coeff", "algorithm.entropy_coef", default=0),
        _row("actor_rollout_ref.actor.policy_loss.loss_mode", "algorithm.ratio", values={"vanilla": "token", "gspo": "sequence"}),
        _row("algorithm.use_kl_in_reward", "algorithm.kl_in", values={True: "reward", False: "none"}, default=False),
        _row("algorithm.kl_penalty", "algorithm.kl_estimator", values=_KL, when="algorithm.use_kl_in_reward"),
        _row("algorithm.kl_ctrl.kl_coef", "algorithm.kl_coef", when="algorithm.use_kl_in_reward", default=0.001),
        _row("algorithm.kl_ctrl.target_kl", "algorithm.kl_target", when="algorithm.use_kl_in_reward", note="only with kl_ctrl.type adaptive there", values={"*": KeyError}),
        *_none("algorithm.kl_ctrl.", "type horizon", "algorithm.kl_target steers the coefficient here, 0 keeps it"),
        _row("actor_rollout_ref.actor.use_kl_loss", "algorithm.kl_in", values={True: "loss", False: None}),
        _row("actor_rollout_ref.actor.kl_loss_coef", "algorithm.kl_coef", when="actor_rollout_ref.actor.use_kl_loss", default=0.001),
        _row("actor_rollout_ref.actor.kl_loss_type", "algorithm.kl_estimator", values=_KL, when="actor_rollout_ref.actor.use_kl_loss", default="low_var_kl"),
        _row("algorithm.gamma", "algorithm.gamma", values={1: None, "*": ...}),
        _row("algorithm.lam", "algorithm.lam", values={1: None, "*": ...}),
        _row("algorithm.norm_adv_by_std_in_grpo", "algorithm.advantage", "false is algorithm.name dr_grpo's advantage", values={True: None, False: "group_mean"}),
        _row("algorithm.filter_groups.enable", "algorithm.dynamic_sampling"),
        _row("algorithm.filter_groups.max_num_gen_batches", "algorithm.max_sampling_rounds", values=_OFF),
        _row("algorithm.rollout_correction.rollout_is", "algorithm.correction_level", values={"token": "token", "sequence": "sequence"}),
        _row("algorithm.rollout_correction.rollout_is_threshold", "algorithm.correction_cap", when="algorithm.rollout_correction.rollout_is"),
        *_none("algorithm.", "filter_groups.metric filter_groups.max_inflight_gen_batches use_pf_ppo pf_ppo.reweight_method pf_ppo.weight_pow rollout_correction.rollout_rs rollout_correction.rollout_rs_threshold rollout_correction.bypass_mode rollout_correction.loss_type rollout_correction.rollout_is_batch_normalize"),
        _row(_N, "rollout.samples_per_prompt", default=1),
        _row("actor_rollout_ref.rollout.name", "rollout.backend", values={"vllm": "vllm", "sglang": "sglang", "hf": "native"}, note="native samples with the actor's own engine; vllm and sglang are servers, or engines in the trainer"),
        *(_row(f"actor_rollout_ref.rollout.{name}", f"rollout.{name}") for name in ("temperature", "top_p")),
        _row("actor_rollout_ref.rollout.top_k", "rollout.top_k", "-1 there, 0 here, is all tokens", values={-1: 0, "*": ...}),
        _row("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.server.tp"),
        _row("actor_rollout_ref.rollout.gpu_memory_utilization", "rollout.server.memory_fraction"),
        _row("actor_rollout_ref.rollout.val_kwargs.n", "train.eval_samples"),
        _row("actor_rollout_ref.rollout.multi_turn.max_assistant_turns", "rollout.max_turns"),
        _row("actor_rollout_ref.rollout.multi_turn.enable", "rollout.environment", "path.py:Class of an environment here", values={False: None, True: KeyError}),
        _row("actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu", "actor.engine.micro_batch.size", "one size for both here", values={"*": None}),
        _row("actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu", "reference.engine.micro_batch.size", "the actor's unless reference.engine is set", values={"*": None}),
        _row("critic.model.path", "critic.model.path"),
        *_verl_role("critic", "critic"),
        _row("critic.model.lora_rank", "critic.model.lora.rank", values=_OFF),
        _row("critic.model.lora_alpha", "critic.model.lora.alpha", when="critic.model.lora_rank"),
        _row("critic.model.lora.rank", "critic.model.lora.rank", values=_OFF),
        *(_row(f"critic.model.lora.{name}", f"critic.model.lora.{name}", when="critic.model.lora.rank") for name in ("alpha", "dropout", "target_modules", "exclude_modules")),
        _row("critic.ppo_mini_batch_size", "algorithm.mini_batch_size", _PROMPTS + "; actor and critic have one here", values={"*": None}),
        _row("critic.ppo_epochs", "algorithm.epochs", "actor and critic have one here", values={"*": None}),
        _row("critic.cliprange_value", "algorithm.value_clip"),
        *_none("critic.", "enable forward_max_token_len_per_gpu forward_micro_batch_size forward_micro_batch_size_per_gpu loss_agg_mode loss_scale_factor"),
        _row("reward_model.model.path", "reward.model.path"),
        _row("reward.reward_model.model_path", "reward.model.path"),
        _row("custom_reward_function.path", "rewards.functions", "{function: path.py:name} here", values={"*": KeyError}),
        _row("custom_reward_function.name", "rewards.functions", "{function: path.py:name} here", values={"*": KeyError}),
        _row("reward.custom_reward_function.path", "rewards.functions", "{function: path.py:name} here", values={"*": KeyError}),
        _row("reward.custom_reward_function.name", "rewards.functions", "{function: path.py:name} here", values={"compute_score": None, "*": KeyError}),
        _row("reward.num_workers", "rewards.workers"),
        _row("trainer.total_epochs", "train.epochs", default=30),
        _row("trainer.total_training_steps", "train.steps", "counts rollouts there; ours counts optimizer steps", values={"*": KeyError}, of=_PPO),
        _row("trainer.total_training_steps", "train.steps", of=_NOT_PPO),
        _row("trainer.save_freq", "checkpoint.every", "counts rollouts there; ours counts optimizer steps", values={-1: None, "*": KeyError}, of=_PPO),
        _row("trainer.save_freq", "checkpoint.every", values=_FREQ, of=_NOT_PPO),
        _row("trainer.test_freq", "train.eval_every", "counts rollouts there; ours counts optimizer steps", values={-1: None, "*": KeyError}, of=_PPO),
        _row("trainer.test_freq", "train.eval_every", values=_FREQ, of=_NOT_PPO),
        _row("trainer.default_local_dir", "output_dir"),
        _row("trainer.critic_warmup", "algorithm.critic_warmup", values={0: 0, "*": KeyError}, note="counts rollouts there; ours counts optimizer steps"),
        _row("trainer.project_name", "log.wandb.project"),
        _row("trainer.experiment_name", "log.wandb.name"),
        _row("trainer.resume_mode", "checkpoint.resume", values={"auto": "auto", "disable": "never"}),
        _row("trainer.resume_from_path", "checkpoint.resume"),
        _row("trainer.max_actor_ckpt_to_keep", "checkpoint.keep"),
        _row("trainer.max_ckpt_to_keep", "checkpoint.keep"),
        _row("trainer.seed", "seed"),
        _row("trainer.device", "engine.device", values={"cuda": None, "cpu": "cpu"}),
        _row("trainer.rollout_data_dir", "log.samples.every", "samples are in output_dir/samples here", values={"*": None}),
        *_none("trainer.", "n_gpus_per_node nnodes", "a run has a process for each GPU, or as many as --nproc"),
        *(row for model in ("actor_rollout_ref.model.", "critic.model.", "model.") for row in _none(model, "hf_config_path tokenizer_path use_shm external_lib override_config lora_adapter_path use_liger use_fused_kernels")),
        *_none("critic.model.", "trust_remote_code custom_chat_template enable_gradient_checkpointing enable_activation_offload use_remove_padding", "the actor's serves for the critic"),
        *_none("critic.model.", "target_modules exclude_modules", "give critic.model.lora.target_modules with our names"),
        *_none("engine.", "offload_policy forward_prefetch model_dtype use_orig_params seed forward_only full_determinism"),
        *(_row(f"model.{name}", ours, of=_NOT_PPO, **more) for name, ours, more in (
            ("custom_chat_template", "data.chat_template", {"note": "a Jinja file here", "values": {"*": KeyError}}),
            ("enable_gradient_checkpointing", "engine.recompute", {"values": {True: "full", False: "none"}, "default": True}),
            ("enable_activation_offload", "engine.offload", {"values": {False: None, True: ["activations"]}}),
            ("use_remove_padding", "data.packing", {}),
            ("lora_rank", "model.lora.rank", {"values": _OFF}),
            ("lora_alpha", "model.lora.alpha", {"when": "model.lora_rank"}),
            ("target_modules", "model.lora.target_modules", {"when": "model.lora_rank"}),
            ("exclude_modules", "model.lora.exclude_modules", {"when": "model.lora_rank"}),
        )),
        _row("model.lora.rank", "model.lora.rank", values=_OFF, of=_NOT_PPO),
        *(_row(f"model.lora.{name}", f"model.lora.{name}", when="model.lora.rank", of=_NOT_PPO) for name in ("alpha", "dropout", "target_modules", "exclude_modules")),
        *_none("model.lora.", "type merge dropout_position lora_A_init_method lora_B_init_method a2a_experimental dtype adapter_path"),
        *_none("model.mtp.", "enable enable_train enable_rollout detach_encoder mtp_loss_scaling_factor method num_speculative_tokens", "model.mtp: {} trains MTP layers here"),
        _row("engine.strategy", "engine.backend", values={"fsdp": "fsdp", "fsdp2": "fsdp", "megatron": "megatron"}, of=_NOT_PPO),
        _row("engine.ulysses_sequence_parallel_size", "engine.parallel.cp", of=_NOT_PPO),
        _row("engine.reshard_after_forward", "engine.fsdp.reshard_after_forward", of=_NOT_PPO),
        _row("engine.param_offload", "engine.offload", "a list here: [parameters]", values={False: None, True: ["parameters"]}, of=_NOT_PPO),
        _row("engine.optimizer_offload", "engine.offload", "a list here: [optimizer]", values={False: None, True: ["optimizer"]}, of=_NOT_PPO),
        _row("engine.dtype", "model.dtype", values=_DTYPE, of=_NOT_PPO),
        _row("engine.fsdp_size", "engine.fsdp.replicate", "ranks of a shard group there; ours counts the groups", values={-1: None, "*": KeyError}, of=_NOT_PPO),
        _row("model.partial_pretrain", "model.path", of=_SFT),
        _row("model.path", "model.path", of=_SFT),
        _row("optim.lr", "optimizer.lr", of=_NOT_PPO),
        _row("optim.weight_decay", "optimizer.weight_decay", of=_NOT_PPO),
        _row("optim.betas", "optimizer.betas", of=_NOT_PPO),
        _row("optim.clip_grad", "optimizer.clip_grad", of=_NOT_PPO),
        _row("optim.lr_warmup_steps", "optimizer.warmup_steps", values=_FREQ, of=_NOT_PPO),
        _row("optim.lr_scheduler_type", "optimizer.schedule", values={"constant": "constant", "cosine": "cosine"}, of=_NOT_PPO),
    ),
)  # fmt: skip


def _nemo_rows() -> list[Row]:
    """Returns the rows that NeMo-RL's algorithms have in common, and those of each."""
    rows = [
        _row("policy.model_name", "model.path"),
        _row("policy.train_global_batch_size", "algorithm.mini_batch_size", "counts sequences of an optimizer step", of=_PPO),
        _row("policy.train_global_batch_size", "train.global_batch_size", _ROW, of=_NOT_PPO),
        _row("policy.train_micro_batch_size", "engine.micro_batch.size", _MICRO, when="not policy.sequence_packing.enabled"),
        _row("policy.sequence_packing.enabled", "data.packing"),
        _row("policy.sequence_packing.train_mb_tokens", "engine.micro_batch.tokens", "tokens of a micro-batch on each device", when="policy.sequence_packing.enabled"),
        _row("policy.max_total_sequence_length", "data.max_length", of=_NOT_PPO),
        _row("policy.max_total_sequence_length", "data.max_prompt_length rollout.max_new_tokens", "prompt and answer together there; ours are two", of=_PPO, values={"*": KeyError}),
        _row("policy.precision", "model.dtype", values={**_DTYPE, "float16": KeyError}),
        _row("policy.max_grad_norm", "optimizer.clip_grad"),
        _row("policy.tokenizer.name", "model.path", "the model's own tokenizer here", values={"*": None}),
        _row("policy.tokenizer.chat_template", "data.chat_template", "a Jinja file here", values={"*": KeyError}),
        _row("policy.tokenizer.chat_template_kwargs", "data.chat_template", "a row's chat_template_kwargs here", values={"*": KeyError}),
        _row("policy.optimizer.name", "optimizer.name", values={"torch.optim.AdamW": "adamw"}),
        _row("policy.optimizer.kwargs.lr", "optimizer.lr", when="not policy.megatron_cfg.enabled"),
        _row("policy.optimizer.kwargs.weight_decay", "optimizer.weight_decay", when="not policy.megatron_cfg.enabled"),
        _row("policy.optimizer.kwargs.betas", "optimizer.betas", when="not policy.megatron_cfg.enabled"),
        _row("policy.optimizer.kwargs.eps", "optimizer.eps", when="not policy.megatron_cfg.enabled"),
        *_none("policy.optimizer.kwargs.", "foreach fused"),
        _row("policy.scheduler", "optimizer.schedule", "a list of torch's schedulers there", values={"*": KeyError}),
        _row("policy.megatron_cfg.enabled", "engine.backend", values={True: "megatron", False: None}),
        _row("policy.dtensor_cfg.enabled", "engine.backend", values={True: "fsdp", False: None}),
        _row("policy.dtensor_cfg.tensor_parallel_size", "engine.parallel.tp", "of backend megatron alone here", when="policy.dtensor_cfg.enabled", values={1: None, "*": KeyError}),
        _row("policy.dtensor_cfg.context_parallel_size", "engine.parallel.cp", when="policy.dtensor_cfg.enabled"),
        _row("policy.dtensor_cfg.activation_checkpointing", "engine.recompute", values={True: "full", False: "none"}, when="policy.dtensor_cfg.enabled"),
        _row("policy.dtensor_cfg.sequence_parallel", "engine.parallel.sp", when="policy.dtensor_cfg.enabled", values={False: None, True: KeyError}),
        _row("policy.dtensor_cfg.cpu_offload", "engine.offload", "a list here", when="policy.dtensor_cfg.enabled", values={False: None, True: ["parameters", "gradients", "optimizer"]}),
        _row("policy.megatron_cfg.activation_checkpointing", "engine.recompute", values={True: "full", False: "none"}, when="policy.megatron_cfg.enabled"),
        *(_row(f"policy.megatron_cfg.{name}", f"engine.parallel.{ours}", when="policy.megatron_cfg.enabled") for name, ours in _PARALLEL),
        *(_row(f"policy.megatron_cfg.optimizer.{name}", f"optimizer.{ours}", when="policy.megatron_cfg.enabled") for name, ours in (
            ("lr", "lr"), ("min_lr", "min_lr"), ("weight_decay", "weight_decay"), ("adam_eps", "eps"), ("clip_grad", "clip_grad"))),
        *(_row(f"policy.megatron_cfg.optimizer.{name}", "optimizer.betas", "a list of both here", when="policy.megatron_cfg.enabled", values={"*": KeyError}) for name in ("adam_beta1", "adam_beta2")),
        _row("policy.megatron_cfg.scheduler.lr_decay_style", "optimizer.schedule", when="policy.megatron_cfg.enabled"),
        _row("policy.megatron_cfg.scheduler.lr_warmup_iters", "optimizer.warmup_steps", when="policy.megatron_cfg.enabled"),
        _row("policy.megatron_cfg.scheduler.lr_decay_iters", "optimizer.decay_steps", "with the warm-up there", when="policy.megatron_cfg.enabled", values={"*": KeyError}),
        _row("policy.dtensor_cfg.lora_cfg.dim", "model.lora.rank", when="policy.dtensor_cfg.lora_cfg.enabled"),
        _row("policy.megatron_cfg.peft.dim", "model.lora.rank", when="policy.megatron_cfg.peft.enabled"),
        *(_row(f"policy.{lora}.{name}", f"model.lora.{name}", when=f"policy.{lora}.enabled") for lora in ("dtensor_cfg.lora_cfg", "megatron_cfg.peft") for name in ("alpha", "dropout")),
        _row("policy.generation.backend", "rollout.backend", values={"vllm": "vllm", "sglang": "sglang", "megatron": "native", "hf": "native"}),
        _row("policy.generation.max_new_tokens", "rollout.max_new_tokens", "prompt and answer together there", values={"*": KeyError}),
        _row("policy.generation.temperature", "rollout.temperature"),
        _row("policy.generation.top_p", "rollout.top_p"),
        _row("policy.generation.top_k", "rollout.top_k"),
        _row("policy.generation.stop_token_ids", "rollout.stop_tokens"),
        _row("policy.generation.stop_strings", "rollout.stop"),
        _row("policy.generation.vllm_cfg.tensor_parallel_size", "rollout.server.tp"),
        _row("policy.generation.vllm_cfg.gpu_memory_utilization", "rollout.server.memory_fraction"),
        _row("policy.logprob_batch_size", "engine.micro_batch.size", "one size for both here", values={"*": None}),
        _row("policy.generation_batch_size", "rollout.cache_tokens", "tokens here", values={"*": None}),
        _row("teacher.model_name", "reference.model.path"),
        _row("loss_fn.reference_policy_kl_penalty", "algorithm.kl_coef", of=_PPO),
        _row("loss_fn.ratio_clip_min", "algorithm.clip_low"),
        _row("loss_fn.ratio_clip_max", "algorithm.clip_high"),
        _row("loss_fn.ratio_clip_c", "algorithm.dual_clip"),
        _row("loss_fn.token_level_loss", "algorithm.aggregation", values={True: "token_mean", False: "sequence_mean"}),
        _row("loss_fn.sequence_level_importance_ratios", "algorithm.ratio", values={True: "sequence", False: "token"}),
        _row("loss_fn.use_importance_sampling_correction", "algorithm.correction", values={True: "truncate", False: "none"}),
        _row("loss_fn.kl_type", "algorithm.distill.loss", values={"forward": "forward_kl", "reverse": "reverse_kl", "mixed": KeyError}),
        *_none("loss_fn.", "use_on_policy_kl_approximation mixed_kl_weight zero_outside_topk"),
        _row("checkpointing.checkpoint_dir", "output_dir", "checkpoints are in output_dir/checkpoints here"),
        _row("checkpointing.save_period", "checkpoint.every", "counts rollouts there; ours counts optimizer steps", of=_PPO, values={"*": KeyError}),
        _row("checkpointing.save_period", "checkpoint.every", of=_NOT_PPO),
        _row("checkpointing.keep_top_k", "checkpoint.keep", "the best there, the newest here"),
        _row("checkpointing.metric_name", "checkpoint.best", of=_PPO, values={"*": KeyError}),
        *_none("checkpointing.", "enabled higher_is_better checkpoint_must_save_by model_save_format save_consolidated save_optimizer metric_name"),
        _row("data.max_input_seq_length", "data.max_length", of=_NOT_PPO),
        _row("data.max_input_seq_length", "data.max_prompt_length", of=_PPO),
        _row("data.dataset_name", "data.train", "a file, folder or hub id here", values={"*": KeyError}),
        _row("data.train.dataset_name", "data.train", "a file, folder or hub id here", values={"*": KeyError}),
        _row("data.train.data_path", "data.train"),
        _row("data.train.split", "data.split", values={"train": None}),
        _row("data.validation.dataset_name", "data.eval", "a file, folder or hub id here", values={"*": KeyError}),
        _row("data.validation.data_path", "data.eval"),
        _row("data.train_data_path", "data.train"),
        _row("data.val_data_path", "data.eval"),
        *(_row(f"data{of}.{key}", "data.columns", "a mapping here: {their name: ours}", values={"*": KeyError}) for of in ("", ".train", ".validation") for key in ("input_key", "output_key", "prompt_key", "chosen_key", "rejected_key", "chat_key")),
        _row("data.system_prompt_file", "data.system", "the text itself here", values={"*": KeyError}),
        *_none("data.", "prompt_file num_workers add_bos add_eos add_generation_prompt validation.split validation.repeat default.prompt_file default.system_prompt_file default.processor default.env_name"),
        _row("logger.log_dir", "output_dir", "logs are in output_dir here", values={"*": None}),
        _row("logger.wandb_enabled", "log.wandb.project", "a project turns wandb on here", values={True: None, False: None}),
        _row("logger.wandb.project", "log.wandb.project", when="logger.wandb_enabled"),
        _row("logger.wandb.name", "log.wandb.name", when="logger.wandb_enabled"),
        _row("logger.tensorboard_enabled", "log.tensorboard"),
        *_none("cluster.", "gpus_per_node num_nodes", "a run has a process for each GPU, or as many as --nproc"),
    ]  # fmt: skip
    for name in ("grpo", "distillation"):
        samples = f"{name}.num_generations_per_prompt"
        rows += [
            _row(f"{name}.num_prompts_per_step", "train.global_batch_size", _PROMPTS, times=samples),
            _row(samples, "rollout.samples_per_prompt"),
            _row(f"{name}.max_num_steps", "train.steps", "counts rollouts there; ours counts optimizer steps", values={"*": KeyError}),
            _row(f"{name}.val_period", "train.eval_every", "counts rollouts there; ours counts optimizer steps", values={"*": KeyError}),
            _row(f"{name}.max_rollout_turns", "rollout.max_turns"),
            _row(f"{name}.max_val_samples", "train.eval_prompts"),
        ]  # fmt: skip
    for name in ("sft", "dpo", "rm"):
        rows += [
            _row(f"{name}.max_num_steps", "train.steps", values=_FREQ),
            _row(f"{name}.val_period", "train.eval_every"),
            _row(f"{name}.val_batches", "train.eval_batches", values=_FREQ),
            *_none(f"{name}.", "val_global_batch_size val_micro_batch_size"),
        ]
    for name in ("grpo", "distillation", "sft", "dpo", "rm"):
        rows += [
            _row(f"{name}.max_num_epochs", "train.epochs", "the shorter of both counts there; ours takes one of them", when=f"not {name}.max_num_steps"),
            _row(f"{name}.seed", "seed"),
            *_none(f"{name}.", "val_at_start val_at_end val_batch_size"),
        ]  # fmt: skip
    return [
        *rows,
        _row("grpo.normalize_rewards", "algorithm.advantage", values={True: None, False: "group_mean"}),
        _row("grpo.use_leave_one_out_baseline", "algorithm.advantage", values={True: "rloo", False: None}),
        _row("grpo.use_dynamic_sampling", "algorithm.dynamic_sampling"),
        *_none("grpo.", "overlong_filtering async_grpo.enabled async_grpo.max_trajectory_age_steps"),
        _row("distillation.topk_logits_k", "algorithm.distill.top_k"),
        _row("dpo.reference_policy_kl_penalty", "loss.beta"),
        _row("dpo.preference_average_log_probs", "loss.length_normalized"),
        _row("dpo.sft_loss_weight", "loss.sft_weight"),
        _row("dpo.preference_loss", "loss.name", values={"dpo": "dpo", "ipo": "ipo"}),
        *_none("dpo.", "preference_loss_weight sft_average_log_probs gt_reward_scale"),
    ]


NEMO_RL = Trainer(
    "NeMo-RL",
    "NVIDIA-NeMo/RL, examples/configs: grpo_math_1B, distillation_math, sft, dpo and rm, at 7ea279abfb",
    ("policy", "grpo", "loss_fn", "checkpointing", "logger", "cluster", "env", "distillation", "dpo", "sft", "rm", "data_plane", "reward_penalties", "on_policy_distillation"),
    ("teacher.megatron_cfg", "teacher.dtensor_cfg", "teacher.generation", "teacher.optimizer", "teacher.dynamic_batching", "teacher.sequence_packing", "teacher.tokenizer", "teacher.train_", "teacher.logprob_", "teacher.max_total", "teacher.precision", "teacher.offload_optimizer", "teacher.make_sequence", "teacher.scheduler", "data.train.", "data.validation", "data.default", "data.use_multiple_dataloader"),
    tuple(_nemo_rows()),
)  # fmt: skip

_TRL_MICRO = "counts a device's; ours is the product with gradient_accumulation_steps and the processes"
TRL = Trainer(
    "TRL",
    "trl 1.16.0 (PyPI), SFTConfig, DPOConfig, KTOConfig, GRPOConfig, RewardConfig, ModelConfig, ScriptArguments, over transformers 5.24.0's TrainingArguments",
    (),
    (),
    (
        _row("model_name_or_path", "model.path"),
        _row("dataset_name", "data.train"),
        _row("dataset_config", "data.train", "give a source with it: [{path: ID, name: NAME}]", values={"*": KeyError}),
        _row("dataset_train_split", "data.split", values={"train": None}),
        _row("dataset_test_split", "data.eval", "give rows of their own", values={"*": KeyError}),
        _row("dataset_streaming", "data.stream", of=_NOT_PPO),
        _row("dataset_text_field", "data.columns", "a mapping here: {their name: text}", values={"text": None, "*": KeyError}),
        _row("learning_rate", "optimizer.lr"),
        _row("lr_scheduler_type", "optimizer.schedule", values={"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant", "warmup_stable_decay": "wsd"}, default="linear"),
        _row("warmup_steps", "optimizer.warmup_steps"),
        _row("warmup_ratio", "optimizer.warmup_steps", "a share of the run there; ours counts steps", values={0: None, "*": KeyError}),
        _row("weight_decay", "optimizer.weight_decay"),
        _row("adam_beta1", "optimizer.betas", "a list of both here", values={"*": KeyError}),
        _row("adam_beta2", "optimizer.betas", "a list of both here; 0.999 by default there", values={"*": KeyError}),
        _row("adam_epsilon", "optimizer.eps"),
        _row("max_grad_norm", "optimizer.clip_grad"),
        _row("optim", "optimizer.name", values={"adamw_torch": "adamw", "adamw_torch_fused": "adamw", "adamw": "adamw", "muon": "muon"}),
        _row("num_train_epochs", "train.epochs", default=3, when="not max_steps"),
        _row("max_steps", "train.steps", values=_FREQ),
        _row("per_device_train_batch_size", "engine.micro_batch.size train.global_batch_size", _TRL_MICRO, values={"*": KeyError}),
        _row("gradient_accumulation_steps", "train.global_batch_size", "multiplies per_device_train_batch_size and the processes", values={"*": KeyError}),
        _row("per_device_eval_batch_size", "engine.micro_batch.size", "one size for both here", values={"*": None}),
        _row("gradient_checkpointing", "engine.recompute", values={True: "full", False: "none"}, default=True),
        _row("activation_checkpointing", "engine.recompute", values={True: "full", False: "none"}),
        _row("activation_offloading", "engine.offload", "a list here: [activations]", values={False: None, True: ["activations"]}),
        _row("torch_compile", "engine.fsdp.compile"),
        _row("bf16", "model.dtype", values={True: "bfloat16", False: None}),
        _row("fp16", "model.dtype", "bfloat16 or float32 here", values={False: None, True: KeyError}),
        _row("dtype", "model.dtype", values={"bfloat16": "bfloat16", "float32": "float32", "auto": None}),
        _row("torch_dtype", "model.dtype", values={"bfloat16": "bfloat16", "float32": "float32", "auto": None}),
        _row("attn_implementation", "engine.attention", values={"flash_attention_2": "flash", "sdpa": None, "eager": "unfused"}),
        _row("trust_remote_code", "model.trust_remote_code"),
        _row("use_peft", "model.lora", values={True: {}, False: None}),
        _row("lora_r", "model.lora.rank", when="use_peft"),
        _row("lora_alpha", "model.lora.alpha", when="use_peft"),
        _row("lora_dropout", "model.lora.dropout", when="use_peft", default=0.05),
        _row("lora_target_modules", "model.lora.target_modules", when="use_peft"),
        _row("use_rslora", "model.lora.rslora", when="use_peft"),
        _row("router_aux_loss_coef", "engine.moe.aux_loss"),
        _row("use_cpu", "engine.device", values={True: "cpu", False: None}),
        _row("deepspeed", "engine.backend", "fsdp shards weights as ZeRO-3 does; engine.offload has its offload", values={"*": KeyError}),
        _row("fsdp", "engine.backend", "give fsdp", values={"*": KeyError}),
        _row("fsdp_config", "engine.fsdp", values={"*": KeyError}),
        _row("parallelism_config", "engine.parallel", values={"*": KeyError}),
        _row("logging_steps", "log.console", "every step has its line here", values={"*": None}),
        _row("report_to", "log.wandb.project", "a project turns wandb on here; log.tensorboard", values={"none": None, "*": KeyError}),
        _row("project", "log.wandb.project"),
        _row("run_name", "log.wandb.name"),
        _row("disable_tqdm", "log.console", values={True: "plain", False: None}),
        _row("save_steps", "checkpoint.every"),
        _row("save_strategy", "checkpoint.every", "counts steps here", values={"steps": None, "no": None, "*": KeyError}),
        _row("save_total_limit", "checkpoint.keep"),
        _row("resume_from_checkpoint", "checkpoint.resume", values={True: "auto", False: "never"}),
        _row("metric_for_best_model", "checkpoint.best", of=_PPO),
        _row("eval_steps", "train.eval_every"),
        _row("eval_strategy", "train.eval_every", "counts steps here", values={"steps": None, "no": None, "*": KeyError}),
        _row("data_seed", "seed", "one seed for both here"),
        _row("chat_template_path", "data.chat_template"),
        _row("max_length", "data.max_length", of=_NOT_PPO, default=1024),
        _row("max_seq_length", "data.max_length", of=_NOT_PPO),
        _row("max_prompt_length", "data.max_prompt_length", of=_PPO),
        _row("truncation_mode", "data.truncation", values={"keep_start": "right", "keep_end": "left"}, default="keep_start", of=_SFT),
        _row("shuffle_dataset", "data.shuffle"),
        _row("packing", "data.packing", "rows end to end in a micro-batch, none split or mixed, here", of=_NOT_PPO, values={True: True, False: None}),
        _row("assistant_only_loss", "data.loss_on", "assistant is the default here", values={True: "assistant", False: "all"}, of=_SFT),
        _row("completion_only_loss", "data.loss_on", values={True: "assistant", False: "all"}, of=_SFT),
        _row("loss_type", "loss.name", values={"sigmoid": "dpo", "ipo": "ipo", "kto": "kto"}, of=("dpo",)),
        _row("loss_type", "algorithm.aggregation", "of the denominator", values={"grpo": "sequence_mean", "bnpo": "token_mean", "dapo": "token_mean", "dr_grpo": "fixed_length"}, of=_PPO, default="dapo"),
        _row("beta", "loss.beta", of=("dpo",), default=0.1),
        _row("beta", "algorithm.kl_coef", of=_PPO, values={0: None, "*": ...}),
        _row("beta", "algorithm.kl_in", "0 there is no KL", of=_PPO, values={0: "none", "*": "loss"}, default=0.0),
        _row("label_smoothing", "loss.label_smoothing"),
        _row("rpo_alpha", "loss.sft_weight"),
        _row("desirable_weight", "loss.desirable_weight"),
        _row("undesirable_weight", "loss.undesirable_weight"),
        _row("precompute_ref_log_probs", "reference.cache"),
        _row("ref_model", "reference.model.path"),
        _row("center_rewards_coefficient", "loss.centering"),
        _row("num_generations", "rollout.samples_per_prompt", default=8),
        _row("num_generations_eval", "train.eval_samples"),
        _row("max_completion_length", "rollout.max_new_tokens", default=512),
        _row("generation_batch_size", "train.global_batch_size", "counts sequences in both"),
        _row("steps_per_generation", "algorithm.mini_batch_size", "ours is the size, global_batch_size / steps", values={"*": KeyError}),
        _row("num_iterations", "algorithm.epochs"),
        _row("temperature", "rollout.temperature"),
        _row("top_p", "rollout.top_p"),
        _row("top_k", "rollout.top_k", values={-1: 0, "*": ...}),
        _row("min_p", "rollout.min_p"),
        _row("use_vllm", "rollout.backend", values={True: "vllm", False: None}),
        _row("vllm_mode", "rollout.server.urls", "no url is an engine in the trainer here", values={"colocate": None, "server": KeyError}),
        _row("vllm_server_base_url", "rollout.server.urls", "a list here", values={"*": KeyError}),
        _row("vllm_server_timeout", "rollout.server.timeout_s", when="use_vllm"),
        _row("vllm_gpu_memory_utilization", "rollout.server.memory_fraction", when="use_vllm"),
        _row("vllm_tensor_parallel_size", "rollout.server.tp", when="use_vllm"),
        _row("vllm_enable_sleep_mode", "rollout.server.sleep", when="use_vllm"),
        _row("epsilon", "algorithm.clip_low algorithm.clip_high"),
        _row("epsilon_high", "algorithm.clip_high"),
        _row("delta", "algorithm.dual_clip"),
        _row("importance_sampling_level", "algorithm.ratio", values={"token": "token", "sequence": "sequence"}),
        _row("scale_rewards", "algorithm.advantage", values={"group": None, True: None, "none": "group_mean", False: "group_mean"}),
        _row("reward_weights", "rewards.functions", "a weight at each function here", values={"*": KeyError}),
        _row("reward_funcs", "rewards.functions", "{function: path.py:name} here", values={"*": KeyError}),
        _row("reward_model_path", "reward.model.path"),
        _row("reward_model_name_or_path", "reward.model.path"),
        _row("entropy_coef", "algorithm.entropy_coef"),
        _row("vllm_importance_sampling_correction", "algorithm.correction", values={True: KeyError, False: "none"}),
        _row("vllm_importance_sampling_clip_max", "algorithm.correction_cap"),
        _row("max_tool_calling_iterations", "rollout.max_turns"),
        _row("log_completions", "log.table", "samples a rollout on the console", values={"*": None}),
        _row("num_completions_to_print", "log.table"),
        _row("sync_ref_model", "reference.update_every", "steps here", of=_PPO, values={False: None, True: KeyError}),
        _row("ref_model_sync_steps", "reference.update_every", of=_PPO, when="sync_ref_model"),
        *_none("", "do_train do_eval do_predict", "a command trains; data.eval is evaluated"),
        *_none("", "push_to_hub hub_token hub_private_repo hub_model_id hub_strategy hub_always_push hub_revision log_completions_hub_repo", "checkpoint.export_hf writes a folder that can be uploaded"),
        *_none("", "load_in_8bit load_in_4bit bnb_4bit_quant_type use_bnb_nested_quant bnb_4bit_quant_storage use_dora", "no quantized base, no DoRA"),
        *_none("", "lr_scheduler_kwargs optim_args optim_target_modules average_tokens_across_devices label_smoothing_factor bf16_full_eval fp16_full_eval tf32 activation_checkpointing_kwargs gradient_checkpointing_kwargs torch_compile_backend torch_compile_mode use_liger_kernel liger_kernel_config use_cache neftune_noise_alpha torch_empty_cache_steps auto_find_batch_size logging_strategy logging_first_step log_on_each_node logging_nan_inf_filter include_num_input_tokens_seen log_level log_level_replica trackio_space_id trackio_bucket_id trackio_static_space_id eval_delay prediction_loss_only eval_on_start eval_do_concat_batches eval_use_gather_object eval_accumulation_steps include_for_metrics batch_eval_metrics save_only_model save_on_each_node enable_jit_checkpoint load_best_model_at_end metric_for_best_model greater_is_better ignore_data_skip restore_callback_states_from_checkpoint full_determinism accelerator_config dataloader_drop_last dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers dataloader_prefetch_factor dataloader_multiprocessing_context dataloader_in_order remove_unused_columns label_names train_sampling_strategy length_column_name ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_static_graph ddp_backend ddp_timeout debug skip_memory_metrics local_rank model_init_kwargs dataset_kwargs dataset_num_proc eos_token pad_token packing_strategy padding_free pad_to_multiple_of eval_packing disable_dropout precompute_ref_batch_size loss_weights ld_alpha f_divergence_type f_alpha_divergence_coef use_weighting discopop_tau ref_model_mixup_alpha cast_lm_head_to_fp32 ds3_gather_for_generation generation_kwargs chat_template_kwargs repetition_penalty cache_implementation vllm_model_impl vllm_structured_outputs_regex vllm_server_host vllm_server_port vllm_group_port vllm_max_model_length sapo_temperature_neg sapo_temperature_pos vespo_k_pos vespo_lambda_pos vespo_k_neg vespo_lambda_neg multi_objective_aggregation mask_truncated_completions top_entropy_quantile use_adaptive_entropy entropy_coef_min entropy_coef_max entropy_coef_delta entropy_target vllm_importance_sampling_mode vllm_importance_sampling_clip_min off_policy_mask_threshold use_bias_correction_kl log_multimodal log_unique_prompts use_transformers_continuous_batching transformers_continuous_batching_config use_transformers_paged vllm_importance_sampling_cap model_revision lora_target_parameters lora_modules_to_save lora_task_type ignore_bias_buffers save_safetensors group_by_length"),
    ),
)  # fmt: skip

TRAINERS = (VERL, NEMO_RL, TRL)


def page() -> str:
    """Returns docs/coming-from.md."""
    lines = [_HEADER]
    for trainer in TRAINERS:
        lines += [
            f"## {trainer.name}",
            "",
            f"Read from {trainer.source}.",
            "",
            "| theirs | ours | what differs |",
            "|---|---|---|",
        ]
        for row in trainer.rows:
            if row.ours:
                notes = [row.note, _values_in_words(row), f"of {', '.join(row.of)}" if row.of else ""]
                ours = ", ".join(f"`{key}`" for key in row.ours)
                lines.append(f"| `{row.theirs}` | {ours} | {'; '.join(note for note in notes if note)} |")
        nowhere = ", ".join(f"`{row.theirs}`" for row in trainer.rows if not row.ours)
        lines += ["", f"Nothing here stands for {nowhere}.", ""]
    return "\n".join(lines)


_HEADER = """\
# Coming from verl, NeMo-RL or TRL

    mrl config translate FILE > ours.yaml     # what can be told, in our keys; the rest is listed, and the exit code is 2
    mrl config translate FILE --as dpo        # where it is not plain of which command the file is

A key of another trainer stays an error, which names ours. `model`, `engine` and `optimizer` of `mrl ppo` are in `actor`.
Numbers that a file leaves to the other trainer's defaults are written out where ours differ.
Made from `mrl/config/foreign.py` by `make docs`.
"""


def _values_in_words(row: Row) -> str:
    told = [
        f"{theirs} is {ours}" for theirs, ours in row.values.items() if isinstance(ours, str) and str(theirs) != ours
    ]
    return ", ".join(told).replace("True", "true").replace("False", "false")


if __name__ == "__main__":
    print(page(), end="")
