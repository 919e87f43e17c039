"""Names that other trainers or commands have for our keys, in our own sections: an unknown one is told ours.

mrl/config/foreign_*.py have the keys of whole configs of verl, NeMo-RL and TRL.
"""

from __future__ import annotations

from collections.abc import Mapping

ALIASES: Mapping[str, tuple[str, ...]] = {
    # TRL's GRPOConfig.
    "algorithm.beta": ("algorithm.kl_coef",),
    "algorithm.epsilon": ("algorithm.clip_low", "algorithm.clip_high"),
    "algorithm.epsilon_high": ("algorithm.clip_high",),
    "algorithm.num_generations": ("rollout.samples_per_prompt",),
    "rollout.num_generations": ("rollout.samples_per_prompt",),
    # TRL's DPOConfig and RewardConfig.
    "loss.type": ("loss.name",),
    "loss.loss_type": ("loss.name",),
    "loss.rpo_alpha": ("loss.sft_weight",),
    "loss.precompute_ref_log_probs": ("reference.cache",),
    "ref_model.path": ("reference.model.path",),
    "loss.center_rewards_coefficient": ("loss.centering",),
    # NeMo-RL's distillation.
    "algorithm.topk_logits_k": ("algorithm.distill.top_k",),
    "algorithm.distill.topk_logits_k": ("algorithm.distill.top_k",),
    "teacher.alpha": ("teacher.weight",),
    "algorithm.distill.weight": ("algorithm.kl_coef",),
    # The teacher of `mrl sft`, which in `mrl ppo` is the reference.
    "teacher.model": ("reference.model.path",),
    "teacher.model.path": ("reference.model.path",),
    "teacher.engine": ("reference.engine",),
    "teacher.server": ("reference.server",),
    "teacher.others": ("reference.others",),
    "teacher.top_k": ("algorithm.distill.top_k",),
    "teacher.loss": ("algorithm.distill.loss",),
    # peft's LoraConfig.
    **{
        f"{model}.{theirs}": (f"{model}.{ours}",)
        for model in ("model.lora", "actor.model.lora", "critic.model.lora")
        for theirs, ours in (
            ("r", "rank"),
            ("lora_alpha", "alpha"),
            ("lora_dropout", "dropout"),
            ("use_rslora", "rslora"),
        )
    },
    # axolotl's roles_to_train, ms-swift's and LLaMA-Factory's loss_scale, interleave_probs.
    "data.train_on": ("data.loss_on",),
    "data.roles_to_train": ("data.loss_on",),
    "data.loss_scale": ("data.loss_on",),
    "data.interleave_probs": ("data.train",),
    "data.weights": ("data.train",),
    "data.probabilities": ("data.train",),
    # verl's actor_rollout_ref.rollout.
    "rollout.n": ("rollout.samples_per_prompt",),
    # The names that Megatron and vLLM have for tp.
    "actor.ppo_mini_batch_size": ("algorithm.mini_batch_size",),
    "train.micro_batch_size": ("engine.micro_batch.size",),
    **{
        f"{engine}{parallel}{theirs}": (f"{engine}parallel.tp",)
        for engine in ("engine.", "actor.engine.")
        for parallel in ("", "parallel.")
        for theirs in ("tensor_model_parallel_size", "tensor_parallel_size")
    },
}
"""Dotted key that is none -> the keys that do what is meant. Used where the command has these keys, or in `mrl ppo`
has them in the section `actor`."""

VALUES: Mapping[tuple[str, str], str] = {("loss.name", "sigmoid"): "dpo"}
"""(key, a choice that it has elsewhere: TRL's `loss_type`) -> the choice that is meant."""

NO_EQUIVALENT: Mapping[str, str] = {
    f"{role}model.mtp": "leave it out: MTP layers train with a language model that trains, and no other has them"
    for role in ("", "critic.", "reference.", "reward.", "teacher.")
}
"""Dotted key that another command or section has and nothing here stands for -> what to do."""
