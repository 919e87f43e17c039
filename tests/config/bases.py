"""A config of each command, as plain data, and how a key of it is written."""

from __future__ import annotations

from typing import Any

from tests.bad_input.mistakes import CONFIG, DPO_CONFIG, PPO_CONFIG, RM_CONFIG, SERVE_CONFIG

FILES = {"sft": "config.yaml", "ppo": "ppo.yaml", "dpo": "dpo.yaml", "rm": "rm.yaml", "serve": "serve.yaml"}
BASES = {"sft": CONFIG, "ppo": PPO_CONFIG, "dpo": DPO_CONFIG, "rm": RM_CONFIG, "serve": SERVE_CONFIG}


def put(plain: dict[str, Any], path: str, value: Any) -> None:
    """Writes a key into plain data; sections on the way are made."""
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(plain.get(parent), dict):
            plain[parent] = {}
        plain = plain[parent]
    plain[name] = value
