"""The default learning rates, by command and by whether adapters train."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from mrl.config.keys import join_key, value_at
from mrl.errors import ConfigError

# Adapters take ten times the rate of all weights: Schulman 2025, "LoRA Without Regret" (Thinking Machines Lab).
_TEN = "ten times that of all weights, as Schulman 2025 (LoRA Without Regret)"
_SFT = "Ouyang 2022, appendix C.1, rounded"
_DPO = "TRL 1.16.0, DPOConfig"
_GRPO = "TRL 1.16.0, GRPOConfig, and verl 0.9.1, actor.optim"
_CRITIC = "verl 0.9.1, critic.optim"
RATES: Mapping[tuple[str, str, bool], tuple[float, str]] = {
    ("sft", "", False): (1e-5, _SFT),
    ("sft", "", True): (1e-4, _TEN),
    ("dpo", "", False): (1e-6, _DPO),
    ("dpo", "", True): (1e-5, _TEN),
    ("rm", "", False): (1e-5, "as mrl sft"),
    ("rm", "", True): (1e-4, "as mrl sft; TRL 1.16.0, RewardConfig"),
    ("ppo", "actor", False): (1e-6, _GRPO),
    ("ppo", "actor", True): (1e-5, _TEN),
    ("ppo", "critic", False): (1e-5, _CRITIC),
    ("ppo", "critic", True): (1e-4, _TEN),
}
"""(command, role, whether adapters train) -> the peak learning rate, and where it is from."""


def fill_rates(raw: Mapping[str, Any], command: str) -> dict[str, Any]:
    """Returns the config as plain data with a rate for each optimizer that has none.

    The rate is that of the resumed run, else the table's.
    """
    made = dict(raw)
    for role in (role for of, role, adapters in RATES if of == command and not adapters):
        sections = [role, "optimizer"] if role else ["optimizer"]
        if value_at(raw, join_key(role, "optimizer.lr")) is not None or not _may_hold(raw, role):
            continue
        is_used = role != "critic" or "critic" in raw  # that of an algorithm without one is another run's
        saved = value_at(_saved(raw), join_key(role, "optimizer.lr")) if is_used else None
        own, _ = RATES[command, role, value_at(raw, join_key(role, "model.lora")) is not None]
        node = made
        for name in sections:
            node[name] = dict(node.get(name) or {})
            node = node[name]
        node["lr"] = own if saved is None else saved
    return made


def _may_hold(raw: Any, role: str) -> bool:
    """Returns whether each section is a mapping or absent: what is anything else has a message of its own."""
    return all(isinstance(value_at(raw, path), Mapping | None) for path in (role, join_key(role, "optimizer")))


def _saved(raw: Mapping[str, Any]) -> Any:
    """Returns the config of the resumed run, as it was written; None if there is none to read."""
    from mrl.config.yaml_text import parse  # PyYAML, which a help does not need

    resume, output_dir = value_at(raw, "checkpoint.resume"), raw.get("output_dir")
    folders = [output_dir] if isinstance(output_dir, str) and output_dir else []
    if isinstance(resume, str) and resume not in ("auto", "never"):
        folders += [resume, os.path.dirname(resume), os.path.dirname(os.path.dirname(resume))]
    for folder in folders if resume != "never" else ():
        try:
            with open(os.path.join(folder, "config.yaml"), encoding="utf-8") as file:
                return parse(file.read(), folder)
        except (OSError, ValueError, ConfigError):  # the run has more words for it
            continue
    return None
