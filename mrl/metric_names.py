"""The metrics that a run writes, with what each means."""

from __future__ import annotations

import re

SFT_METRICS: dict[str, str] = {
    "step": "optimizer steps made, from 1; 0 is the evaluation before training",
    "train/loss": (
        "the loss that the step minimizes, before the step: mean negative log-likelihood of the mini-batch's trained "
        "tokens. For `mrl ppo` it is `actor/loss`, for `mrl dpo`, `mrl rm` and with a teacher their loss"
    ),
    "train/mtp_loss": (
        "mean negative log-likelihood of later tokens by the MTP layers, over layers and all trained tokens (for "
        "`mrl dpo` those of chosen answers), before the step. It leaves out `model.mtp.loss_weight`; absent without "
        "`model.mtp`"
    ),
    "train/grad_norm": (
        "global L2 norm of the gradient before clipping, without MTP layers if `model.mtp.detach` is set"
    ),
    "train/lr": "learning rate of the step",
    "train/tokens": (
        "trained tokens since the start of the run: the sum of the loss mask with its weights. For `mrl dpo` tokens "
        "of answers without the weights of rows, for `mrl rm` scores that were read"
    ),
    "perf/step_s": "seconds of the step, without evaluation and saving",
    "perf/tokens_per_s": "tokens of the mini-batch per second over all ranks, trained or not, without padding",
    "perf/mfu": "model FLOPs of the step over the dense bf16 peak of the GPUs; absent if that is not known",
    "perf/save_held_s": (
        "seconds that the last save before the step stopped training; in the background those of the copy"
    ),
    "perf/save_write_s": "seconds of writing a save in the background, if it ended since the last step",
    "perf/memory_gb": "peak memory of a rank so far, the largest over ranks: of the GPU, or without one of the process",
    "eval/loss": (
        "mean negative log-likelihood of the evaluation set's trained tokens, after the step. For `mrl dpo`, `mrl "
        "rm` and with a teacher their loss on this set"
    ),
}
"""Name -> meaning of what `mrl sft` writes."""

CONVERSATION_METRICS: dict[str, str] = {
    "rollout/turns": (
        "mean number of turns of the policy in a conversation; it and the next four need `rollout.environment`"
    ),
    "rollout/tool_calls": "mean number of messages of role tool from the environment in a conversation",
    "rollout/turn_length": "mean number of sampled tokens in a turn",
    "rollout/turn_length_max": "most tokens of a turn",
    "rollout/observation_length": (
        "mean number of tokens from the environment in a conversation, with the chat template's around them"
    ),
}
PPO_METRICS: dict[str, str] = {
    "iteration": "the rollout that the step trains on, from 1",
    "reward/mean": (
        "mean reward of the rollout's sequences: rewards times their weights, without KL and length penalties. It "
        "and the four below are absent if nothing is rewarded"
    ),
    "reward/std": "standard deviation of that reward",
    "reward/min": "smallest of these rewards",
    "reward/max": "largest of these rewards",
    "reward/equal_groups": (
        "fraction of all sampled groups whose rewards are all equal; they teach nothing by group differences. Absent "
        "if a group is one sample"
    ),
    "reward/<label>/mean": "mean of one reward alone, before its weight",
    "reward/<label>/std": "standard deviation of one reward alone",
    "reward/faults": "calls of reward functions that failed and counted as 0 (`rewards.on_error: zero`)",
    "rollout/response_length": "mean number of sampled tokens of a sequence",
    "rollout/response_length_min": "sampled tokens of the shortest response",
    "rollout/response_length_max": "sampled tokens of the longest response",
    "rollout/response_length_finished": "mean number of sampled tokens of finished responses; absent if none finished",
    "rollout/prompt_length": "mean number of tokens before the first sampled one",
    "rollout/prompt_length_max": "tokens of the longest prompt",
    "rollout/finished": "fraction of sequences that ended by themselves, not at a length or turn limit",
    **CONVERSATION_METRICS,
    "rollout/tokens_per_s": "sampled tokens per second of sampling, over all ranks",
    "rollout/logprob_gap": (
        "mean over sampled tokens of the absolute difference of the sampler's and the trainer's log-prob"
    ),
    "rollout/logprob_gap_max": "largest of these differences",
    "rollout/weights_step": "the optimizer step whose weights sampled it, with rollout.async_level",
    "rollout/probe_gap": (
        "largest difference of a server's log-probs of a fixed text from the trainer's at the weight sync, with the "
        "same weights on both sides, per token"
    ),
    "rollout/staleness": "iterations from these weights to the ones that it trains first",
    "rollout/prompts_rejected": "prompts whose group was thrown away and another one sampled (dynamic sampling)",
    "advantage/mean": "mean of the advantages over the rollout's trained tokens, as they enter the loss",
    "advantage/std": "standard deviation of these advantages",
    "actor/loss": "the actor's whole loss on the mini-batch, aggregated by `algorithm.aggregation`, before the step",
    "actor/kl": (
        "mean over trained tokens of the KL of the policy from the reference (k3; the expectation is the policy's), in "
        "nats, before the step"
    ),
    "actor/sequence_kl": (
        "mean over sequences of the sum of their trained tokens' KL of the policy from the reference (k1, of either "
        "sign). `kl_target` is compared with it"
    ),
    "actor/sequence_kl/<teacher>": (
        "`actor/sequence_kl` of the sequences of one of several teachers; absent if it has none"
    ),
    "actor/kl_coef": "coefficient of the KL",
    "actor/divergence": (
        "mean over trained tokens of the divergence `algorithm.distill.loss` of the policy's next-token distribution "
        "from its teacher's, in nats, before the step; absent without `algorithm.distill`"
    ),
    "actor/teacher_tail": (
        "mean over trained tokens of the teacher's probability outside its `algorithm.distill.top_k` likeliest "
        "tokens; absent for the whole vocabulary"
    ),
    "actor/approx_kl": (
        "mean over trained tokens of the KL of the policy that sampled from the present one (k3), before the step"
    ),
    "actor/entropy": (
        "mean over trained tokens of the entropy of the policy's next-token distribution, in nats, before the step"
    ),
    "actor/ratio": (
        "mean over trained tokens of the policy's probability over that of the policy that sampled, before the step"
    ),
    "actor/ratio_max": "largest ratio of a trained token, or its inverse if that is larger",
    "actor/clip_fraction": "fraction of the trained tokens where clipping changed the loss or its gradient",
    "actor/clip_fraction_low": "part of that fraction with a ratio below 1",
    "actor/clip_fraction_high": "part of that fraction with a ratio above 1",
    "actor/mtp_loss": (
        "mean negative log-likelihood of later tokens by the actor's MTP layers, over layers and all trained tokens, "
        "before the step. It leaves out `actor.model.mtp.loss_weight`; absent without `actor.model.mtp`"
    ),
    "actor/importance_weight": (
        "mean over trained tokens of the importance weight, which corrects for the sampler's probabilities"
    ),
    "actor/importance_limited": "fraction of the trained tokens whose importance weight was capped or set to 0",
    "actor/effective_samples": (
        "effective sample size of the importance weights as a share of the trained tokens, (sum w)^2 / (n sum w^2): 1 "
        "where all are equal"
    ),
    "critic/loss": "the critic's loss on the mini-batch, aggregated as the actor's, before the step",
    "critic/value": "mean over trained tokens of the critic's value, before the step",
    "critic/clip_fraction": "fraction of the trained tokens where `algorithm.value_clip` took the gradient away",
    "critic/explained_variance": (
        "1 - Var(return - value) / Var(return) over the mini-batch's trained tokens, before the step"
    ),
    "critic/grad_norm": "global L2 norm of the critic's gradient before clipping",
    "critic/lr": "learning rate of the critic's step",
    "eval/accuracy": (
        "mean over held-out prompts of the first reward function's value, or without functions of the reward. It is "
        "of the greedy answer, or of the best of `train.eval_samples`"
    ),
    "eval/binary": "1 if all values behind `eval/accuracy` are 0 or 1, so that it is a share of prompts; else 0",
    "eval/reward": "mean reward of all answers to held-out prompts; it and `eval/accuracy` are absent without rewards",
    "eval/faults": "calls of reward functions that failed in the evaluation and counted as 0",
    "eval/response_length": "mean number of tokens of these answers",
    "perf/rollout_s": "seconds of sampling",
    "perf/rollout_wait_s": (
        "seconds that the trainer waited for a rollout that servers sample meanwhile (rollout.async_level); in "
        "perf/step_s in place of perf/rollout_s and perf/reward_s"
    ),
    "perf/reward_model_s": "seconds of the reward model, with rollout.async_level",
    "perf/save_wait_s": "seconds that saves waited for this rollout, if one did; perf/step_s does not count them",
    "perf/servers_idle_s": "seconds that servers waited, from the last reward of one rollout to the start of the next",
    "perf/weights_s": (
        "seconds of weight sync to a sampler that is another program, since the rollout before, with that of "
        "evaluations: offload the roles, send the weights, wake the sampler"
    ),
    "perf/reward_s": "seconds of scoring",
    "perf/log_probs_s": (
        "seconds of the forward passes before training: log-probs of actor and reference, values of the critic"
    ),
    "perf/update_s": "seconds of the step's forward and backward passes and updates, of all roles",
    "perf/eval_s": "seconds of evaluation",
}
"""Name -> meaning of what `mrl ppo` writes beside `SFT_METRICS`, of which it leaves out eval/loss. <label>: of a
reward, as `mrl.config.rewards.label_of` says. <teacher>: of reference.others, or reference."""

DPO_METRICS: dict[str, str] = {
    "rewards/chosen": (
        "mean over chosen (or good) answers of the implied reward, before the step: beta times the log-ratio to the "
        "reference, or without a reference times the mean log-prob of a token. For `mrl rm` the mean score"
    ),
    "rewards/rejected": "the same of rejected (or bad) answers",
    "rewards/margin": "mean over pairs of `rewards/chosen` minus `rewards/rejected`; for kto over rows that are pairs",
    "rewards/accuracy": "fraction of pairs whose chosen answer has the higher reward",
    "logps/chosen": "mean over chosen answers of the sum of their tokens' log-probs",
    "logps/rejected": "the same of rejected answers",
    "nll/chosen": "mean negative log-likelihood of the tokens of chosen answers",
    "reference/kl": (
        "for dpo and ipo: mean over answers of the reference's log-prob minus the policy's, in nats, before the "
        "step. It estimates (k1) the KL of the reference from the policy if the answers are the reference's own"
    ),
    "kto/kl": "kto's estimate of the KL from the reference, in nats, at least 0; on data.eval a mean over batches",
    **{
        f"eval/{name}": f"`{name}` on the evaluation set, after the step"
        for name in (
            "rewards/chosen", "rewards/rejected", "rewards/margin", "rewards/accuracy", "logps/chosen",
            "logps/rejected", "nll/chosen", "reference/kl", "kto/kl",
        )
    },
}  # fmt: skip
"""Name -> meaning of what `mrl dpo` writes beside `SFT_METRICS`, whose losses are those of `loss.name` there."""

DISTILL_METRICS: dict[str, str] = {
    "distill/divergence": (
        "mean over trained tokens of the divergence `teacher.loss` of the student's next-token distribution from the "
        "teacher's, in nats, before the step"
    ),
    "distill/divergence/<teacher>": (
        "the same over the rows of one of several teachers; absent if the mini-batch has none"
    ),
    "distill/nll": "mean negative log-likelihood of the trained tokens, as `train/loss` without a teacher",
    "distill/teacher_tail": (
        "mean over trained tokens of the teacher's probability outside its `teacher.top_k` likeliest tokens; absent "
        "for the whole vocabulary"
    ),
    **{
        f"eval/{name}": f"`{name}` on the evaluation set, after the step"
        for name in ("distill/divergence", "distill/divergence/<teacher>", "distill/nll", "distill/teacher_tail")
    },
}
"""Name -> meaning of what `mrl sft` writes beside `SFT_METRICS` where it has a teacher; train/loss and eval/loss are
then of the loss with its weights. <teacher>: of teacher.others, or teacher."""

SOURCE_METRICS: dict[str, str] = {
    "data/<source>/rows": "rows from this source of `data.train` since the start of the run",
    "data/<source>/tokens": "tokens of these rows, trained or not",
    "data/<source>/epochs": "passes over the rows of this source since the start of the run",
    "eval/<set>/<metric>": (
        "a metric of one set of `data.eval`: `eval/loss`; for `mrl dpo` and with a teacher any `eval/<metric>`"
    ),
    "eval/<set>/accuracy": "for `mrl ppo`: `eval/accuracy` of one set of `data.eval`",
    "eval/<set>/reward": "`eval/reward` of one set",
    "eval/<set>/response_length": "`eval/response_length` of one set",
}
"""Name -> meaning of what is written where `data.train` is a list of sources, and where `data.eval` is a mapping:
metrics without a set's name are of all sets together then."""


RM_METRICS: dict[str, str] = {
    "rewards/mean": "mean score of graded answers, before the step",
    "rewards/error": "mean over graded answers of the absolute difference between score and grade",
    "steps/accuracy": "fraction of labelled steps whose score has the right sign: above 0 if the label is above 0.5",
    "steps/right": "fraction of labelled steps with a score above 0",
    **{
        f"eval/{name}": f"`{name}` on the evaluation set, after the step"
        for name in ("rewards/mean", "rewards/error", "steps/accuracy", "steps/right")
    },
}
"""Name -> meaning of what `mrl rm` writes beside `SFT_METRICS` and, of pairs, the `rewards/...` of `DPO_METRICS`."""

METRICS: dict[str, str] = SFT_METRICS | SOURCE_METRICS | PPO_METRICS | DPO_METRICS | RM_METRICS | DISTILL_METRICS
"""Name -> meaning, the same on every backend and layout."""

_WITH_LABEL = [re.compile(re.sub(r"<\w+>", ".+", name)) for name in METRICS if "<" in name]


def is_metric(name: str) -> bool:
    """Returns whether METRICS says what `name` means."""
    return name in METRICS or any(pattern.fullmatch(name) for pattern in _WITH_LABEL)
