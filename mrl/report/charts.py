"""The charts of a report: the metrics of each, and charts for metrics that none names."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from typing import Literal

Goal = Literal["low", "high"]

OTHER = "Other"


@dataclasses.dataclass(frozen=True)
class Chart:
    """Metrics that are drawn together."""

    key: str  # the name of its picture, without .png
    section: str
    title: str
    patterns: tuple[str, ...]  # names of metrics; * stands for a reward's label
    stacked: bool = False  # one over the other, as parts of a whole; a chart for each run
    names: tuple[str, ...] = ()  # those that the runs have

    def matches(self, name: str) -> bool:
        """Returns whether the metric is drawn here."""
        return _listed(name, self.patterns) is not None


def _chart(section: str, key: str, title: str, *patterns: str, stacked: bool = False) -> Chart:
    return Chart(key, section, title, patterns, stacked)


CHARTS: tuple[Chart, ...] = (
    _chart("Loss", "loss", "Loss", "train/loss", "actor/loss"),
    _chart("Loss", "eval_loss", "Loss on the evaluation set", "eval/loss"),
    _chart("Loss", "mtp_loss", "Loss of the MTP layers", "train/mtp_loss", "actor/mtp_loss"),
    _chart("Loss", "eval_set_losses", "Loss on each evaluation set", "eval/*/loss"),
    _chart("Data", "source_rows", "Rows of each source", "data/*/rows"),
    _chart("Data", "source_tokens", "Tokens of each source", "data/*/tokens"),
    _chart("Data", "source_epochs", "Passes over each source", "data/*/epochs"),
    _chart("Loss", "critic_loss", "Loss of the critic", "critic/loss"),
    _chart("Reward", "reward", "Reward", "reward/mean"),
    _chart("Reward", "reward_by_function", "Reward by function", "reward/*/mean"),
    _chart("Reward", "reward_std", "Standard deviation of rewards", "reward/std", "reward/*/std"),
    _chart("Reward", "accuracy", "Held-out prompts", "eval/accuracy", "eval/reward"),
    _chart("Reward", "reward_range", "Lowest and highest reward", "reward/min", "reward/max"),
    _chart("Reward", "equal_groups", "Groups with equal rewards", "reward/equal_groups"),
    _chart("Reward", "faults", "Faults of reward functions", "reward/faults", "eval/faults"),
    _chart("Distillation", "divergence", "Divergence from the teacher", "distill/divergence",
           "eval/distill/divergence", "distill/divergence/*", "eval/distill/divergence/*"),
    _chart("Distillation", "policy_divergence", "Divergence of the policy from the teacher", "actor/divergence"),
    _chart("Distillation", "distill_nll", "Negative log-likelihood", "distill/nll", "eval/distill/nll"),
    _chart("Distillation", "teacher_tail", "Probability beyond the teacher's likeliest", "distill/teacher_tail",
           "eval/distill/teacher_tail", "actor/teacher_tail"),
    _chart("Preferences", "preference_accuracy", "Pairs in the right order", "rewards/accuracy",
           "eval/rewards/accuracy"),
    _chart("Preferences", "preference_margin", "Margin of rewards", "rewards/margin", "eval/rewards/margin"),
    _chart("Preferences", "preference_rewards", "Rewards of answers", "rewards/chosen", "rewards/rejected",
           "eval/rewards/chosen", "eval/rewards/rejected"),
    _chart("Preferences", "preference_logps", "Log-probs of answers", "logps/chosen", "logps/rejected",
           "eval/logps/chosen", "eval/logps/rejected"),
    _chart("Preferences", "preference_nll", "Negative log-likelihood of chosen tokens", "nll/chosen",
           "eval/nll/chosen"),
    _chart("Preferences", "graded_rewards", "Scores of graded answers", "rewards/mean", "eval/rewards/mean"),
    _chart("Preferences", "graded_error", "Distance of scores from grades", "rewards/error", "eval/rewards/error"),
    _chart("Preferences", "steps", "Steps told right from wrong", "steps/accuracy", "eval/steps/accuracy",
           "steps/right", "eval/steps/right"),
    _chart("Reward", "set_accuracy", "Held-out prompts of each set", "eval/*/accuracy", "eval/*/reward"),
    _chart("Preferences", "kto_kl", "KL estimate", "kto/kl", "eval/kto/kl", "reference/kl", "eval/reference/kl"),
    _chart("Policy", "kl", "KL", "actor/kl", "actor/approx_kl"),
    _chart("Policy", "sequence_kl", "KL of sequences", "actor/sequence_kl",
           "actor/sequence_kl/*"),
    _chart("Policy", "kl_coef", "Coefficient of the KL", "actor/kl_coef"),
    _chart("Policy", "entropy", "Entropy", "actor/entropy"),
    _chart("Policy", "clip_fraction", "Clip fraction", "actor/clip_fraction", "actor/clip_fraction_low",
           "actor/clip_fraction_high", "critic/clip_fraction"),
    _chart("Policy", "ratio", "Ratio to the policy that sampled", "actor/ratio", "actor/ratio_max"),
    _chart(
        "Policy", "importance", "Correction for the sampler",
        "actor/importance_weight", "actor/importance_limited", "actor/effective_samples",
    ),  # fmt: skip
    _chart("Policy", "advantage", "Advantages", "advantage/mean", "advantage/std"),
    _chart("Policy", "value", "Value", "critic/value"),
    _chart("Policy", "explained_variance", "Explained variance", "critic/explained_variance"),
    _chart("Rollout", "response_length", "Response length (tokens)", "rollout/response_length",
           "rollout/response_length_min", "rollout/response_length_max", "rollout/response_length_finished",
           "eval/response_length", "eval/*/response_length"),
    _chart("Rollout", "prompt_length", "Prompt length (tokens)", "rollout/prompt_length", "rollout/prompt_length_max"),
    _chart("Rollout", "finished", "Finished by themselves", "rollout/finished"),
    _chart("Rollout", "logprob_gap", "Log-prob gap of sampler and trainer", "rollout/logprob_gap",
           "rollout/logprob_gap_max"),
    _chart("Rollout", "staleness", "Age of samples (iterations)", "rollout/staleness"),
    _chart("Rollout", "weights_step", "Step whose weights sampled", "rollout/weights_step"),
    _chart("Rollout", "probe_gap", "Probe of weight sync: log-prob difference", "rollout/probe_gap"),
    _chart("Rollout", "conversation", "Conversations", "rollout/turns", "rollout/tool_calls"),
    _chart("Rollout", "turn_length", "Length of turns (tokens)", "rollout/turn_length", "rollout/turn_length_max",
           "rollout/observation_length"),
    _chart("Rollout", "prompts_rejected", "Prompts rejected", "rollout/prompts_rejected"),
    _chart("Optimizer", "lr", "Learning rate", "train/lr", "critic/lr"),
    _chart("Optimizer", "grad_norm", "Gradient norm before clipping", "train/grad_norm", "critic/grad_norm"),
    _chart("Speed and memory", "throughput", "Tokens per second", "perf/tokens_per_s", "rollout/tokens_per_s"),
    _chart("Speed and memory", "phases", "Seconds by phase", "perf/weights_s", "perf/rollout_s", "perf/reward_s",
           "perf/log_probs_s", "perf/update_s", "perf/eval_s", stacked=True),
    _chart("Speed and memory", "waits", "Seconds of waits", "perf/rollout_wait_s", "perf/servers_idle_s",
           "perf/save_wait_s", "perf/reward_model_s"),
    _chart("Speed and memory", "step_s", "Seconds a step", "perf/step_s"),
    _chart("Speed and memory", "saves", "Seconds of saves", "perf/save_held_s", "perf/save_write_s"),
    _chart("Speed and memory", "mfu", "Model FLOPs utilization", "perf/mfu"),
    _chart("Speed and memory", "memory", "Peak memory of a rank (GB)", "perf/memory_gb"),
    _chart("Speed and memory", "progress", "Tokens trained", "train/tokens"),
    _chart("Speed and memory", "iteration", "Iteration", "iteration"),
)  # fmt: skip
"""In the order of the page. The first that fits a metric draws it."""

MAIN = (
    "train/loss", "eval/loss", "reward/mean", "reward/*/mean", "eval/accuracy", "rewards/accuracy",
    "eval/rewards/accuracy", "rewards/margin", "rewards/chosen", "rewards/rejected", "rewards/error", "steps/accuracy",
    "eval/steps/accuracy", "distill/divergence", "actor/divergence", "actor/kl", "actor/approx_kl", "actor/entropy",
    "actor/clip_fraction", "critic/loss", "critic/explained_variance", "rollout/response_length", "rollout/finished",
    "rollout/logprob_gap", "rollout/staleness", "train/grad_norm", "train/lr", "perf/step_s", "perf/rollout_wait_s",
    "perf/servers_idle_s", "perf/tokens_per_s", "perf/mfu",
    "perf/memory_gb",
)  # fmt: skip
"""The metrics that the terminal shows without --all."""

NOT_DRAWN = frozenset({"eval/binary"})
"""Metrics that only say how to read another one."""

GOALS: dict[str, Goal] = {
    "train/loss": "low", "eval/loss": "low", "critic/loss": "low", "reward/mean": "high", "reward/*/mean": "high",
    "rewards/accuracy": "high", "distill/divergence": "low", "eval/distill/divergence": "low",
    "distill/divergence/*": "low", "eval/distill/divergence/*": "low",
    "actor/divergence": "low",
    "rewards/error": "low", "eval/rewards/error": "low", "steps/accuracy": "high", "eval/steps/accuracy": "high",
    "eval/rewards/accuracy": "high", "rewards/margin": "high", "eval/rewards/margin": "high",
    "eval/accuracy": "high", "eval/reward": "high", "critic/explained_variance": "high", "perf/tokens_per_s": "high",
    "rollout/tokens_per_s": "high", "perf/mfu": "high", "perf/step_s": "low",
}  # fmt: skip
"""Metrics of which one value is better than another."""


def is_main(name: str) -> bool:
    """Returns whether the terminal shows the metric without being asked."""
    return _listed(name, MAIN) is not None


def goal_of(name: str, *, rl: bool) -> Goal | None:
    """Returns whether low or high values of a metric are better; None if that cannot be said.

    A policy's loss (rl) says nothing of how good it is.
    """
    pattern = _listed(name, GOALS)
    return None if pattern is None or (rl and name == "train/loss") else GOALS[pattern]


def _listed(name: str, patterns: Iterable[str]) -> str | None:
    return next((p for p in patterns if re.fullmatch(re.escape(p).replace(r"\*", ".+"), name)), None)


def in_order(names: Iterable[str]) -> list[str]:
    """Returns metrics, each once, in the order of the page."""
    found = set(names)
    charts = _ordered(CHARTS, found)

    def place(name: str) -> tuple[int, str]:
        return next((i for i, chart in enumerate(charts) if chart.matches(name)), len(charts)), name

    return sorted(found, key=place)


def _ordered(charts: Sequence[Chart], names: Iterable[str]) -> list[Chart]:
    """Returns the charts of a page. Rewards come first if a run has them, since its loss says little."""
    rewarded = any(name.startswith("reward/") for name in names)
    return sorted(charts, key=lambda chart: rewarded and chart.section != "Reward")


def charts_of(names: Iterable[str]) -> list[Chart]:
    """Returns the charts that draw the metrics, each once. A metric without a chart gets its own under Other."""
    left = sorted(set(names) - NOT_DRAWN)
    charts = []
    for chart in _ordered(CHARTS, left):
        here = [name for name in left if chart.matches(name)]
        left = [name for name in left if name not in here]
        if here:
            ordered = [name for pattern in chart.patterns for name in here if _listed(name, chart.patterns) == pattern]
            charts.append(dataclasses.replace(chart, names=tuple(ordered)))
    keys: set[str] = set()
    for name in left:
        key = "other_" + re.sub(r"[^A-Za-z0-9]+", "_", name).strip("_")[:80]
        while key in keys:
            key += "_"
        keys.add(key)
        charts.append(Chart(key, OTHER, name, (name,), names=(name,)))
    return charts
