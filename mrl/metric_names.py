"""The metrics that a run writes, with what each means."""

from __future__ import annotations

import re

SFT_METRICS: dict[str, str] = {
    "step": "optimizer steps made, from 1; 0 is the evaluation before training",
    "train/loss": (
        "mean negative log-likelihood of the global mini-batch's trained tokens, before the step; of `mrl ppo`, "
        "`actor/loss`; of `mrl dpo` and `mrl rm`, their loss; with a teacher, what is minimized"
    ),
    "train/mtp_loss": (
        "mean negative log-likelihood that MTP layers give the trained tokens further on, over layers and, as "
        "`train/loss`, all trained tokens (of `mrl dpo` those of chosen answers); without `model.mtp.loss_weight`, "
        "before the step; absent without `model.mtp`"
    ),
    "train/grad_norm": (
        "global L2 norm of the gradient before clipping, without that of MTP layers where `model.mtp.detach` is set"
    ),
    "train/lr": "learning rate that the step was made with",
    "train/tokens": (
        "trained tokens (sum of the loss mask, weights included; of `mrl dpo` tokens of answers, "
        "whatever their rows weigh; of `mrl rm`, scores that were read) since the start of the run"
    ),
    "perf/step_s": "seconds the step took, without evaluation and saving",
    "perf/tokens_per_s": "tokens in the global mini-batch, trained or not, without padding, per second over all ranks",
    "perf/mfu": "model FLOPs of the step over what the GPUs' dense bf16 peak allows; absent where that is not known",
    "perf/save_held_s": (
        "seconds that the last save before the step held training up; of one in the background, those of the copy"
    ),
    "perf/save_write_s": "seconds that writing a save in the background took, where it has ended since the last step",
    "perf/memory_gb": (
        "peak memory of a rank so far, the largest over ranks: of the GPU, or the process where there is none"
    ),
    "eval/loss": (
        "mean negative log-likelihood of the evaluation set's trained tokens, or of `mrl dpo`, `mrl rm` and with a "
        "teacher the loss there, after the step"
    ),
}
"""Name -> meaning of what `mrl sft` writes."""

CONVERSATION_METRICS: dict[str, str] = {
    "rollout/turns": (
        "mean number of turns of the policy in a conversation (written where `rollout.environment` is set, as the "
        "next four)"
    ),
    "rollout/tool_calls": "mean number of messages of role tool that the environment answered with in a conversation",
    "rollout/turn_length": "mean number of tokens that the policy sampled in a turn",
    "rollout/turn_length_max": "most tokens of a turn",
    "rollout/observation_length": (
        "mean number of tokens in a conversation that the environment said, the chat template's around them included"
    ),
}
PPO_METRICS: dict[str, str] = {
    "iteration": "the rollout that the step is trained on, from 1; what follows is of it, where it is not of the step",
    "reward/mean": (
        "mean over the rollout's sequences of what they are rewarded with: rewards times their weights, without "
        "KL and length penalties; it and the four below are absent where nothing is rewarded"
    ),
    "reward/std": "standard deviation of the same",
    "reward/min": "the smallest of them",
    "reward/max": "the largest of them",
    "reward/equal_groups": (
        "fraction of the groups of samples, of all that were sampled, whose rewards are all equal, so that group "
        "differences teach nothing; absent where a group is one sample"
    ),
    "reward/<label>/mean": "the same of one reward alone, before its weight",
    "reward/<label>/std": "and its standard deviation",
    "reward/faults": "calls of reward functions that failed and counted as 0 (`rewards.on_error: zero`)",
    "rollout/response_length": "mean number of tokens that the policy sampled of a sequence",
    "rollout/response_length_min": "tokens of the shortest of these responses",
    "rollout/response_length_max": "tokens of the longest of them",
    "rollout/response_length_finished": (
        "mean number of tokens of those that ended by themselves; absent where none did"
    ),
    "rollout/prompt_length": "mean number of tokens before the first that the policy sampled",
    "rollout/prompt_length_max": "tokens of the longest such prompt",
    "rollout/finished": "fraction of the sequences that ended by themselves, not at a length or turn limit",
    **CONVERSATION_METRICS,
    "rollout/tokens_per_s": "sampled tokens per second of sampling, over all ranks",
    "rollout/logprob_gap": (
        "mean over sampled tokens of the absolute difference of their log-probs, of sampler and trainer"
    ),
    "rollout/logprob_gap_max": "the largest of these differences",
    "rollout/prompts_rejected": "prompts whose group of samples was thrown away and another sampled (dynamic sampling)",
    "advantage/mean": "mean of the advantages over the rollout's trained tokens, as they enter the loss",
    "advantage/std": "standard deviation of the same",
    "actor/loss": (
        "the actor's whole loss on the mini-batch, aggregated as `algorithm.aggregation` says, before the step"
    ),
    "actor/kl": "mean over trained tokens of the KL from the reference to the policy (k3), in nats, before the step",
    "actor/sequence_kl": (
        "mean over the rollout's sequences of the sum of the KL from the reference to the policy (k1, of either "
        "sign) over their trained tokens; what kl_target is compared with"
    ),
    "actor/sequence_kl/<teacher>": "the same of the sequences of one of several teachers; absent where it has none",
    "actor/kl_coef": "coefficient that the KL was taken with",
    "actor/divergence": (
        "mean over trained tokens of the divergence that `algorithm.distill.loss` names, of the policy's next-token "
        "distribution from its teacher's, in nats, before the step; absent without `algorithm.distill`"
    ),
    "actor/teacher_tail": (
        "mean over trained tokens of the probability that the teacher gives to all others than its "
        "`algorithm.distill.top_k` likeliest; absent where these are the whole vocabulary"
    ),
    "actor/approx_kl": (
        "mean over trained tokens of the KL from the policy to the one that sampled (k3), before the step"
    ),
    "actor/entropy": (
        "mean over trained tokens of the entropy of the policy's next-token distribution, in nats, before the step"
    ),
    "actor/ratio": (
        "mean over trained tokens of how much likelier the policy makes them than the one that sampled, before the step"
    ),
    "actor/ratio_max": "largest such ratio of a trained token, or its inverse where that is larger",
    "actor/clip_fraction": "fraction of the trained tokens where clipping changed the loss or its gradient",
    "actor/clip_fraction_low": "the part of that fraction whose ratio is below 1",
    "actor/clip_fraction_high": "the part whose ratio is above 1",
    "actor/mtp_loss": (
        "mean negative log-likelihood that the actor's MTP layers give the trained tokens further on, over layers and "
        "all trained tokens, without `actor.model.mtp.loss_weight`, before the step; absent without `actor.model.mtp`"
    ),
    "actor/importance_weight": "mean over trained tokens of the weight that corrects for the sampler's probabilities",
    "actor/importance_limited": "fraction of the trained tokens where that weight was capped or set to 0",
    "critic/loss": "the critic's loss on the mini-batch, aggregated as the actor's, before the step",
    "critic/value": "mean over trained tokens of the critic's value, before the step",
    "critic/clip_fraction": "fraction of the trained tokens where `algorithm.value_clip` took the gradient away",
    "critic/explained_variance": (
        "1 - Var(return - value) / Var(return) over the mini-batch's trained tokens, before the step"
    ),
    "critic/grad_norm": "global L2 norm of the critic's gradient before clipping",
    "critic/lr": "learning rate that the critic's step was made with",
    "eval/accuracy": (
        "mean over held-out prompts of the first reward function's value (without functions, of the reward): of "
        "the greedy answer, or the best of `train.eval_samples`"
    ),
    "eval/binary": "1 where every value behind `eval/accuracy` is 0 or 1, so that it is a share of prompts; else 0",
    "eval/reward": "mean reward over all answers to held-out prompts; like the accuracy absent where there are none",
    "eval/faults": "calls of reward functions that failed on them and counted as 0",
    "eval/response_length": "mean number of tokens of these answers",
    "perf/rollout_s": "seconds of sampling",
    "perf/weights_s": (
        "seconds in which the sampler got new weights since the rollout before, for evaluations too, where it is "
        "another program: what roles hold is put away, weights are handed over, it is woken"
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
        "mean over chosen (or good) answers of the reward that the loss implies: beta times the log-ratio to the "
        "reference, or, of a loss without one, times the mean log-prob of a token; of `mrl rm`, of the score; before "
        "the step"
    ),
    "rewards/rejected": "the same of rejected (or bad) answers",
    "rewards/margin": "mean over pairs of the difference of both; of kto, over the rows that are pairs",
    "rewards/accuracy": "fraction of the pairs whose chosen answer has the higher reward",
    "logps/chosen": "mean over chosen answers of the log-prob of all their tokens together",
    "logps/rejected": "the same of rejected answers",
    "nll/chosen": "mean negative log-likelihood of the tokens of chosen answers",
    "reference/kl": (
        "of dpo and ipo, mean over answers of the reference's log-prob less the policy's, in nats: an estimate (k1) of "
        "the KL of the reference from the policy, as far as the answers are its own; before the step"
    ),
    "kto/kl": "kto's estimate of the KL from the reference, in nats, at least 0; a mean over batches on data.eval",
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
        "mean over trained tokens of the divergence that `teacher.loss` names, of the student's next-token "
        "distribution from the teacher's, in nats, before the step"
    ),
    "distill/divergence/<teacher>": (
        "the same over the tokens of the rows of one of several teachers; absent where the mini-batch has none"
    ),
    "distill/nll": "mean negative log-likelihood of the trained tokens, which `train/loss` is without a teacher",
    "distill/teacher_tail": (
        "mean over trained tokens of the probability that the teacher gives to all others than its `teacher.top_k` "
        "likeliest; absent where these are the whole vocabulary"
    ),
    **{
        f"eval/{name}": f"`{name}` on the evaluation set, after the step"
        for name in ("distill/divergence", "distill/divergence/<teacher>", "distill/nll", "distill/teacher_tail")
    },
}
"""Name -> meaning of what `mrl sft` writes beside `SFT_METRICS` where it has a teacher; train/loss and eval/loss are
then of the loss with its weights. <teacher>: of teacher.others, or teacher."""

SOURCE_METRICS: dict[str, str] = {
    "data/<source>/rows": "rows that the source of `data.train` has given since the start of the run",
    "data/<source>/tokens": "tokens of these rows, trained or not",
    "data/<source>/epochs": "passes over the rows of the source since the start of the run",
    "eval/<set>/<metric>": (
        "`eval/loss`, or of `mrl dpo` and with a teacher any `eval/<metric>`, of one of the sets of `data.eval`"
    ),
    "eval/<set>/accuracy": "of `mrl ppo`, `eval/accuracy` of one of the sets of `data.eval`",
    "eval/<set>/reward": "`eval/reward` of one of them",
    "eval/<set>/response_length": "`eval/response_length` of one of them",
}
"""Name -> meaning of what is written where `data.train` is a list of sources, and where `data.eval` is a mapping:
metrics without a set's name are of all sets together then."""


RM_METRICS: dict[str, str] = {
    "rewards/mean": "mean score of graded answers, before the step",
    "rewards/error": "mean over graded answers of the absolute difference of score and grade",
    "steps/accuracy": (
        "fraction of the labelled steps whose score has the sign of the label: above 0 where that is above 0.5"
    ),
    "steps/right": "fraction of the labelled steps whose score is above 0",
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
