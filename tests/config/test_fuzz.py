"""Configs, overrides and rows that no one means: each ends in seconds with one line, or runs. See tests/config/fuzz.py."""

from __future__ import annotations

import json
import math
import pathlib
import subprocess
import sys
import time

import pytest
import yaml

from mrl.config.build import build_section
from mrl.config.command import roots
from mrl.config.keys import MAX_VALUES, numbers_in, section_keys, walk_keys
from mrl.config.load import from_dict
from mrl.config.rewards import NAMED, FunctionReward
from mrl.config.sources import SFTShare
from mrl.errors import MAX_LINE, ConfigError
from mrl.launch.slurm.options import SlurmConfig
from tests.bad_input.mistakes import Workspace
from tests.config import fuzz

EXTREMES = [0, -1, 2**63 - 1, -(10**22), 10**400, 0.0, 5e-324, 1e300, -math.inf, math.nan]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory) -> Workspace:
    made = Workspace(tmp_path_factory.mktemp("workspace"))
    made.make()
    return made


def numeric(section: type) -> list:
    """The numeric keys, each once: of `mrl ppo` an engine's and an optimizer's are the actor's."""
    keys = {
        (key.path.rsplit(".", 1)[-1], key.help): key
        for key in reversed(list(walk_keys(section)))
        if numbers_in(key.annotation)
    }
    return list(keys.values())


def refusal(build, *arguments) -> str | None:
    try:
        build(*arguments)
    except ConfigError as error:
        return str(error)
    return None


def outside(key, value) -> bool:
    """Whether the key's bounds, or its type, do not allow the value."""
    low, above, high = (key.bounds[name] for name in ("minimum", "above", "maximum"))
    fits = (low is None or value >= low) and (above is None or value > above) and value <= high
    return not fits or (isinstance(value, float) and float not in numbers_in(key.annotation))


def of_command_alone(command: str) -> list:
    """The numeric keys that no command before this one has with the same bounds."""
    stated = lambda key: (key.path, key.help, str(key.annotation), str(key.bounds))  # noqa: E731
    before = list(roots())[: list(roots()).index(command)]
    seen = {stated(key) for name in before for key in numeric(roots()[name])}
    return [key for key in numeric(roots()[command]) if stated(key) not in seen]


@pytest.mark.slow
@pytest.mark.parametrize("command", roots())
def test_each_numeric_key_at_the_extremes_of_its_type(command):
    root, base = roots()[command], fuzz.BASES[command]
    for key in of_command_alone(command):
        assert key.bounds["maximum"] <= max(MAX_VALUES[int], 2**32 - 1), key.path
        assert key.bounds["minimum"] is not None or key.bounds["above"] is not None, key.path
        for value in [*EXTREMES, key.bounds["maximum"]]:
            plain = json.loads(json.dumps(base))
            as_written = [value] * 2 if isinstance(key.default, tuple) and key.default else [value]
            for section, needed in fuzz.REQUIRED_BESIDE.items():
                if key.path.startswith(section):
                    fuzz.put(plain, *needed)
            fuzz.put(plain, key.path, as_written if fuzz.is_list(key) else value)
            message = refusal(from_dict, plain, root) or ""
            assert len(message) <= MAX_LINE and "\n" not in message, key.path
            if outside(key, value):
                assert message.startswith(f"{key.path}: value "), f"{key.path}={value}: {message}"


@pytest.mark.parametrize("section", [*NAMED.values(), FunctionReward, SFTShare, SlurmConfig])
def test_each_numeric_key_of_rewards_sources_and_jobs_at_the_extremes_of_its_type(section):
    required = {key.path: "a.py:f" for key in section_keys(section) if key.required}
    for key in numeric(section):
        for value in (value for value in EXTREMES if outside(key, value)):
            plain = dict(required)
            fuzz.put(plain, key.path, value)
            message = refusal(build_section, section, plain, "", section) or ""
            assert message.startswith(f"{key.path}: value ") and len(message) <= MAX_LINE, (
                f"{key.path}={value}: {message}"
            )


LISTED = [
    *(f"engine.parallel.{name}={value}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp") for value in (2**31, 2**63 - 1)),
    f"engine.fsdp.replicate={2**63 - 1}", "model.lora.rank=1000000000000", f"train.global_batch_size={10**18}", "train.global_batch_size=1000000",
    f"engine.micro_batch.tokens={10**22}", f"data.max_length={10**20}", "optimizer.lr=1e300", "optimizer.weight_decay=1e30", "checkpoint.every=1e300",
    f"train.steps={10**400}", f"seed={'1' * 4301}", f"seed=0x{'f' * 5000}", "seed=1:" + "0:" * 3000 + "0", "model.path=\"a\\0b\"", 'output_dir="\\x1b[31m"', "output_dir=\x1b[31m",
    "data.columns=&a [*a]", "data.columns=&a {b: *a}", f"data.columns={'[' * 2000}{']' * 2000}", f"data.columns={'{a: ' * 90}1{'}' * 90}", "model.path=\0", "seed=!!int ''",
    f"model.path={'x' * 10_000}", f"data.train={'a/' * 3000}", f"{'k' * 5000}=1", f"train.{'a.' * 2000}b=1", "engine.parallel=[2, 2]", "train=text", "output_dir=model",
    "data.eval=/" + "a" * 300 + ".jsonl", "checkpoint.resume=" + "b" * 5000, "engine.backend=" + "c" * 5000, "train.nothing=1",
]  # fmt: skip
LISTED_PPO = [
    "train.epochs=1e300", "rewards.timeout_s=1e300", "rollout.environment_timeout_s=1e300", "rollout.server.timeout_s=1e300", "rollout.cache_tokens=1e22",
    f"rewards.workers={2**31 - 1}", "rewards.functions=&a [*a]", "rewards.functions=[{name: regex, pattern: '" + "(" * 2000 + "'}]", "checkpoint.best=nothing",
    "algorithm=3", "algorithm.nothing=1", "algorithm={name: grpo, mini_batch_size: 7, epochs: 2}", "train={steps: 2, global_batch_size: 9999991}",
]  # fmt: skip


@pytest.mark.parametrize(("command", "overrides"), [("sft", LISTED), ("ppo", LISTED_PPO)])
def test_what_is_out_of_bounds_is_refused_with_one_line_at_once(workspace, command, overrides):
    before = workspace.snapshot()
    for override in overrides:
        began_s = time.perf_counter()
        given = [override] if not override.startswith("train.epochs") else [override, "train.steps=null"]
        code, said, escaped = fuzz.dry_run(workspace, command, *given)
        assert fuzz.fault(code, said, escaped, time.perf_counter() - began_s) == "" and code == 2, (
            f"{override[:200]}: {said}{escaped!r}"
        )
        assert said.startswith("mrl: " + override.split("=")[0][:9]), said
    assert workspace.snapshot() == before


def test_values_are_shortened_and_controls_escaped(workspace):
    long = "begin" + "x" * 10_000 + "end"
    code, said, _ = fuzz.dry_run(workspace, "sft", f"model.path=./{long}")
    assert code == 2 and said.startswith("mrl: model.path: value './beginxx") and "xx...xx" in said
    assert said.endswith("xend' does not exist; give a Hugging Face model folder or a hub id\n") and len(said) < 300
    workspace.write("controls.yaml", b"output_dir: run\nseed: \x07\n")
    assert refusal(from_dict, {**fuzz.BASES["sft"], "seed": "\x1b[31m\u202e\u2028"}) == (
        'seed: value "\\u001b[31m\\u202e " is text; give a whole number of at least 0 and at most 4294967295'
    )


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", '{"model_type": "qwen3"}'), ("adapter_config.json", "{}"), ("model-00001-of-00002.safetensors", ""), ("model.gguf", ""),
    ],
)  # fmt: skip
def test_the_folder_of_a_model_is_no_output_dir(workspace, file, content):
    folder = f"of {file}"
    workspace.write(f"{folder}/{file}", content)
    code, said, _ = fuzz.dry_run(workspace, "sft", f"output_dir={folder}")
    assert (code, said.count("\n")) == (2, 1)
    assert said.startswith(f"mrl: output_dir: value '{folder}' is the folder of a model (it holds {file})")


def test_a_config_json_of_something_else_is_no_model(workspace):
    workspace.write("project/config.json", "{}")
    assert fuzz.dry_run(workspace, "sft", "output_dir=project") == (0, "", None)


def test_random_configs_and_rows(tmp_path):
    assert fuzz.fuzz(60, 0, tmp_path) == [], "make_case(0, NUMBER) is the case"


@pytest.mark.nightly
def test_very_many_random_configs_and_rows():
    """In a process of its own: one in which an engine was built has a stand-in for CUDA, which a dry run takes for a GPU."""
    line = [sys.executable, "-m", "tests.config.fuzz", "--count", "4000", "--seed", "1"]
    ran = subprocess.run(line, cwd=pathlib.Path(__file__).parents[2], capture_output=True, text=True)
    assert ran.returncode == 0, f"make_case(1, NUMBER) is the case: {ran.stdout[-4000:]}{ran.stderr[-2000:]}"


@pytest.mark.nightly
@pytest.mark.parametrize("command", roots())
def test_a_dry_run_at_both_bounds_of_each_numeric_key(workspace, command):
    for key in numeric(roots()[command]):
        for value in {key.bounds["minimum"] if key.bounds["above"] is None else 5e-324, key.bounds["maximum"]}:
            began_s = time.perf_counter()
            given = f"{key.path}={yaml.safe_dump([value] * 2 if fuzz.is_list(key) else value, default_flow_style=True).split(chr(10))[0]}"
            code, said, escaped = fuzz.dry_run(workspace, command, given)
            assert fuzz.fault(code, said, escaped, time.perf_counter() - began_s) == "", f"{given}: {said}"
