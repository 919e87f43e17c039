"""Numbers and texts that no one means, and keys that no command has: each is refused in one line, all of a parse at once."""

from __future__ import annotations

import json
import math
import typing

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.config.build import build_section
from mrl.config.command import roots
from mrl.config.keys import MAX_VALUES, numbers_in, section_keys, walk_keys
from mrl.config.load import apply_override, from_dict, load_config
from mrl.config.rewards import NAMED, FunctionReward
from mrl.config.sources import SFTShare
from mrl.errors import MAX_LINE, MAX_MISTAKES, ConfigError
from mrl.launch.slurm.options import SlurmConfig
from tests.bad_input.mistakes import Workspace, dry_run
from tests.config.refused import BASES, FILES, put

EXTREMES = [0, -1, 2**63 - 1, -(10**22), 0.0, 5e-324, 1e300, -math.inf, math.nan]
REQUIRED_BESIDE = {"teacher.": ("teacher.model.path", "t")} | {
    f"{role}.server.": (f"{role}.server.url", "http://h:1") for role in ("teacher", "reference")
}
"""Of sections that may be null: what has to be there where one is -> a key and its value."""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("workspace"))
    made.make()
    return made


def numeric(section: type) -> list:
    """The numeric keys, each once: of `mrl ppo` an engine's and an optimizer's are the actor's."""
    keys = reversed(list(walk_keys(section)))
    return list({(k.path.rsplit(".", 1)[-1], k.help): k for k in keys if numbers_in(k.annotation)}.values())


def refusal(build, *arguments) -> str:
    try:
        build(*arguments)
    except ConfigError as error:
        return str(error)
    return ""


def outside(key, value) -> bool:
    """Whether the key's bounds, or its type, do not allow the value."""
    low, above, high = (key.bounds[name] for name in ("minimum", "above", "maximum"))
    fits = (low is None or value >= low) and (above is None or value > above) and value <= high
    return not fits or (isinstance(value, float) and float not in numbers_in(key.annotation))


def as_written(key, value):
    return [value] * 2 if typing.get_origin(key.annotation) is tuple else value


def of_command_alone(command: str) -> list:
    """The numeric keys that no command before this one has with the same bounds."""
    stated = lambda key: (key.path, key.help, str(key.annotation), str(key.bounds))  # noqa: E731
    before = list(roots())[: list(roots()).index(command)]
    seen = {stated(key) for name in before for key in numeric(roots()[name])}
    return [key for key in numeric(roots()[command]) if stated(key) not in seen]


@pytest.mark.slow
@pytest.mark.parametrize("command", roots())
def test_each_numeric_key_at_the_extremes_of_its_type(command):
    for key in of_command_alone(command):
        assert key.bounds["maximum"] <= max(MAX_VALUES[int], 2**32 - 1), key.path
        assert key.bounds["minimum"] is not None or key.bounds["above"] is not None, key.path
        for value in [*EXTREMES, key.bounds["maximum"]]:
            plain = json.loads(json.dumps(BASES[command]))
            for section, needed in REQUIRED_BESIDE.items():
                if key.path.startswith(section):
                    put(plain, *needed)
            put(plain, key.path, as_written(key, value))
            message = refusal(from_dict, plain, roots()[command])
            assert len(message) <= MAX_LINE and "\n" not in message, key.path
            if outside(key, value):
                assert message.startswith(f"{key.path}: value "), f"{key.path}={value}: {message}"


@pytest.mark.parametrize("section", [*NAMED.values(), FunctionReward, SFTShare, SlurmConfig])
def test_each_numeric_key_of_rewards_sources_and_jobs_at_the_extremes_of_its_type(section):
    required = {key.path: "a.py:f" for key in section_keys(section) if key.required}
    for key in numeric(section):
        for value in (value for value in EXTREMES if outside(key, value)):
            plain = dict(required)
            put(plain, key.path, value)
            message = refusal(build_section, section, plain, "", section)
            assert message.startswith(f"{key.path}: value ") and len(message) <= MAX_LINE, message


LISTED = [
    f"engine.parallel.tp={2**63 - 1}", f"engine.fsdp.replicate={2**63 - 1}", f"train.global_batch_size={10**18}",
    f"engine.micro_batch.tokens={10**22}", "optimizer.lr=1e300", "checkpoint.every=1e300",
    "engine.parallel=[2, 2]", "train=text", "output_dir=model/config.json", "checkpoint.resume=" + "b" * 5000,
    f"{'k' * 5000}=1", f"model.path={'x' * 10_000}",
]  # fmt: skip
LISTED_PPO = [
    "rewards.timeout_s=1e300", "rollout.cache_tokens=1e22", "algorithm=3", "algorithm.nothing=1",
    "checkpoint.best=nothing", "algorithm={name: grpo, mini_batch_size: 7}", "train={steps: 2, global_batch_size: 9999991}",
]  # fmt: skip


@pytest.mark.parametrize(("command", "overrides"), [("sft", LISTED), ("ppo", LISTED_PPO)])
def test_what_is_out_of_bounds_is_refused_with_one_line(workspace, command, overrides):
    before = workspace.snapshot()
    for override in overrides:
        code, _, said = dry_run(workspace, override, command=command, config=FILES[command])
        assert code == 2 and said.count("\n") == 1 and len(said) < MAX_LINE + 10, f"{override[:200]}: {said}"
        assert said.startswith("mrl: " + override.split("=")[0][:9]), said
    assert workspace.snapshot() == before


@pytest.mark.nightly
@pytest.mark.parametrize("command", roots())
def test_a_dry_run_at_both_bounds_of_each_numeric_key(workspace, command):
    for key in numeric(roots()[command]):
        for value in {key.bounds["minimum"] if key.bounds["above"] is None else 5e-324, key.bounds["maximum"]}:
            given = yaml.safe_dump(as_written(key, value), default_flow_style=True).split("\n")[0]
            code, _, said = dry_run(workspace, f"{key.path}={given}", command=command, config=FILES[command])
            assert code in (0, 2) and len(said.splitlines()) <= 2, f"{key.path}={given}: {said}"


# -- all mistakes of one parse are in one error --

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
