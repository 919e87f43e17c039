"""Learning rates where the config gives none: by command and adapters, and kept by a resume."""

from __future__ import annotations

import json

import pytest
import yaml

from mrl.config.command import roots
from mrl.config.load import dump_config, from_dict, load_config
from mrl.config.rates import RATES
from tests.config.bases import BASES
from tests.config.test_load import merged


def base(command: str, role: str, adapters: bool, tmp_path) -> dict:
    raw = merged(json.loads(json.dumps(BASES[command])), {"output_dir": str(tmp_path / "run")})
    lora = {"model": {"lora": {"rank": 4}}}
    if adapters:  # over weights that other runs have, too
        raw.get("actor", raw)["model"]["init"] = "pretrained"
    if role == "critic":
        raw = merged(raw, {"algorithm": {"name": "ppo"}})
    return merged(raw, ({role: lora} if role else lora) if adapters else {})


def with_rate(raw: dict, role: str, lr: float) -> dict:
    optimizer = {"optimizer": {"lr": lr}}
    return merged(raw, {role: optimizer} if role else optimizer)


def rate(config, role: str) -> float:
    return (getattr(config, role) if role else config).optimizer.lr


@pytest.mark.parametrize(("command", "role", "adapters"), RATES)
def test_each_command_has_its_rate_and_writes_it(command, role, adapters, tmp_path):
    own, _ = RATES[command, role, adapters]
    raw = base(command, role, adapters, tmp_path)
    config = from_dict(raw, roots()[command])
    assert rate(config, role) == own
    written = from_dict(yaml.safe_load(dump_config(config)), roots()[command])
    assert written == config
    assert rate(from_dict(with_rate(raw, role, 0.5), roots()[command]), role) == 0.5


@pytest.mark.parametrize(
    ("command", "role", "resume"),
    [("dpo", "", "auto"), ("ppo", "actor", "never"), ("sft", "", "folder"), ("rm", "", "auto")],
)
def test_a_run_that_left_it_unset_resumes_with_its_own(command, role, resume, tmp_path):
    raw = base(command, role, False, tmp_path)
    older = from_dict(with_rate(raw, role, 3e-5), roots()[command])
    (tmp_path / "run" / "checkpoints" / "step_1").mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text(dump_config(older))
    if resume == "folder":
        raw |= {"output_dir": str(tmp_path / "next")}
    named = str(tmp_path / "run" / "checkpoints" / "step_1") if resume == "folder" else resume
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(merged(raw, {"checkpoint": {"resume": named}})))
    config = load_config(tmp_path / "c.yaml", (), roots()[command])
    assert rate(config, role) == (RATES[command, role, False][0] if resume == "never" else 3e-5)


@pytest.mark.parametrize("written", ["", "- 1\n", ": :\n"])
def test_a_config_yaml_of_something_else_changes_no_rate(written, tmp_path):
    raw = base("dpo", "", False, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(written)
    assert from_dict(raw, roots()["dpo"]).optimizer.lr == 1e-6
