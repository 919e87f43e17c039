"""What the ranks of a test world run of `mrl rm`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.build import build_section
from mrl.config.load import from_dict
from mrl.config.rm import RMConfig
from mrl.config.schema import EngineConfig, ModelConfig, RoleConfig
from mrl.data.tokenizer import load_tokenizer
from mrl.roles.frozen import RewardModel
from mrl.trainers import rm
from tests.roles.cases import make_dispatch
from tests.roles.value_cases import trajectory
from tests.trainers.cases import HAPPENINGS, outcome


def train(config: Mapping[str, Any], *, happening: str | None = None, **details: Any) -> tuple[str, str, str]:
    """As `tests.trainers.cases.train`."""
    around = HAPPENINGS[happening](**details) if happening else contextlib.nullcontext()
    with around:
        return outcome(lambda: rm.run(from_dict(config, RMConfig), "mrl rm config.yaml"))


def scores_in_ppo(
    folder: str, asked: Sequence[Any], answers: Sequence[str], engine: Mapping[str, Any], system: str | None = None
) -> list[float]:
    """What the reward model of `mrl ppo` says of a policy's answers. asked: the prompts, texts or message lists."""
    model = ModelConfig(path=folder, dtype="float32")
    config = RoleConfig(
        model=model, engine=build_section(EngineConfig, engine, "", EngineConfig), optimizer=None, head="value"
    )
    reward_model = RewardModel(make_dispatch({"reward": config}), load_tokenizer(folder), system=system)
    said = enumerate(zip(asked, answers, strict=True))
    return reward_model.score([trajectory(i, answer, content=prompt) for i, (prompt, answer) in said])
