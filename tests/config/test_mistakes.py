"""All mistakes of one parse are in one error: unknown, missing and mistyped keys, in sections, lists and mappings."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.config.command import roots
from mrl.config.keys import walk_keys
from mrl.config.load import apply_override, from_dict, load_config
from mrl.errors import MAX_LINE, MAX_MISTAKES, ConfigError
from tests.config.bases import BASES

BROKEN = {
    "sft": (
        {"modle": {"path": "m"}, "seed": "x", "model": {"dtype": "bf16"}, "train": {"steps": "ten", "fo": 1}},
        ["modle", "seed", "model.path", "model.dtype", "data.train", "train.fo", "train.steps"],
    ),
    "ppo": (
        {
            "actor": {"model": {"path": 3}}, "algorithm": {"nme": "grpo"},
            "rewards": {"functions": [{"name": "gsm8k", "feild": 1}, {"name": "nothing"}], "timeout_s": "x"},
            "data": {"train": [{"path": "a", "weigth": 1}, {"weight": "much"}], "eval": {"a": {"path": 1}}},
        },
        [
            "actor.model.path", "algorithm.nme", "algorithm.name", "rewards.timeout_s", "rewards.functions[0].feild",
            "rewards.functions[1].name", "data.train[0].weigth", "data.train[1].path", "data.train[1].weight",
            "data.eval.a.path",
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("command", BROKEN)
def test_each_mistake_of_a_config_has_its_line(command, tmp_path):
    raw, keys = BROKEN[command]
    raw = {"output_dir": "run", **raw}
    with pytest.raises(ConfigError) as caught:
        from_dict(raw, roots()[command])
    error = caught.value
    assert {one.key for one in (error, *error.others)} >= set(keys)
    lines = str(error).splitlines()
    assert lines[0].startswith(f"{error.key}: ") and all("; " in line and len(line) <= MAX_LINE for line in lines)
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(raw))
    done = CliRunner().invoke(cli.main, [command, str(tmp_path / "c.yaml")])
    assert (done.exit_code, done.stderr) == (2, "".join(f"mrl: {line}\n" for line in lines))


@pytest.mark.parametrize("command", roots())
def test_every_key_that_is_mistyped_at_once_is_found(command):
    """A value that no key takes, in all of them, and none of them is lost; ten have a line."""
    root = roots()[command]
    raw: dict = {}
    keys = [key for key in walk_keys(root) if key.parse is None and key.annotation != dict[str, object]]
    for key in keys:
        apply_override(raw, f"{key.path}=2020-01-01")
    with pytest.raises(ConfigError) as caught:
        from_dict(raw, root)
    error = caught.value
    found = {one.key for one in (error, *error.others)}
    assert {key.path for key in keys} - found == set()
    lines = str(error).splitlines()
    assert len(lines) == MAX_MISTAKES + 1
    left = 1 + len(error.others) - MAX_MISTAKES
    assert lines[-1] == f"{left} more mistakes; correct these first (of verl, NeMo-RL, TRL: mrl config translate FILE)"


def test_one_mistake_is_one_line_and_two_overrides_are_two(tmp_path):
    with pytest.raises(ConfigError) as caught:
        from_dict({**BASES["sft"], "seed": "x"})
    assert caught.value.others == () and "\n" not in str(caught.value)
    (tmp_path / "c.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"^foo: is not an override.*\nbar: the override has no value"):
        load_config(tmp_path / "c.yaml", ["foo", "seed=1", "bar="])
