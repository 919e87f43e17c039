"""Loading, overriding and dumping a config."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import subprocess
import sys
import typing
from collections.abc import Mapping

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.config import yaml_text
from mrl.config.command import roots
from mrl.config.keys import walk_keys
from mrl.config.load import RATES, dump_config, from_dict, load_config, to_dict
from mrl.config.ppo import PPOConfig
from mrl.config.rewards import label_of
from mrl.config.schema import SFTConfig
from mrl.errors import MAX_MISTAKES, ConfigError
from tests.config.refused import BASES, dotted

BASE = {"output_dir": "run", "model": {"path": "m"}, "data": {"train": "d"}, "train": {"global_batch_size": 8}}

PPO_BASE = {
    "output_dir": "run", "actor": {"model": {"path": "m"}}, "rewards": {"functions": [{"name": "gsm8k"}]},
    "algorithm": {"name": "ppo"}, "data": {"train": "d"}, "train": {"global_batch_size": 8},
}  # fmt: skip
ROOTS = pytest.mark.parametrize(("root", "raw"), [(SFTConfig, BASE), (PPOConfig, PPO_BASE)], ids=["sft", "ppo"])


def base(**sections: object) -> dict:
    """BASE with sections changed; a dict is merged into its section."""
    return merged(BASE, sections)


def merged(raw: dict, changes: dict) -> dict:
    """`raw` with `changes`; where both hold a mapping, merged in turn."""
    both = {
        k: merged(raw[k], v) if isinstance(v, dict) and isinstance(raw.get(k), dict) else v for k, v in changes.items()
    }
    return {**raw, **both}


def write(tmp_path, text: str) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    return str(path)


MINIMAL = "output_dir: run\nmodel: {path: m}\ndata: {train: d}\ntrain: {global_batch_size: 8}\n"


def test_a_minimal_file_takes_the_defaults(tmp_path):
    config = load_config(write(tmp_path, MINIMAL))
    assert config == from_dict(BASE)
    assert (config.optimizer.lr, config.engine.parallel.tp, config.data.columns) == (1e-5, 1, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.seed = 1


def test_overrides_are_yaml_and_the_last_wins(tmp_path):
    overrides = [
        "train.steps=10", "train.steps=20", "optimizer.lr=1e-4", "data.columns={question: prompt}",
        "data.columns.answer=completion", "optimizer.betas=[0.8, 1e-1]", "engine.offload=[optimizer]",
        "log.wandb.project=null", "data.packing=false", "output_dir=a=b",
    ]  # fmt: skip
    config = load_config(write(tmp_path, MINIMAL), overrides)
    assert config.train.steps == 20
    assert config.optimizer.lr == 1e-4
    assert config.data.columns == {"question": "prompt", "answer": "completion"}
    assert config.optimizer.betas == (0.8, 0.1)
    assert config.engine.offload == ("optimizer",)
    assert config.log.wandb.project is None
    assert config.data.packing is False
    assert config.output_dir == "a=b"


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-5", 1e-5), ("1E5", 1e5), ("-2e+3", -2e3), (".5e1", 5.0), ("1.5e-3", 1.5e-3), ("3", 3.0), ("1_000.5", 1000.5)],
)
def test_numbers_as_people_write_them(text, value):
    assert float(yaml_text.parse(text, "test")) == value
    assert isinstance(yaml_text.parse(text, "test"), int | float)


@pytest.mark.parametrize("text", ["1e5m", "e5", "v1e5", "'1e5'"])
def test_text_that_only_looks_like_a_number(text):
    assert isinstance(yaml_text.parse(text, "test"), str)


def test_a_merged_mapping_may_be_merged_again():
    text = "a: &a {x: 1}\nb: &b {<<: *a, x: 2}\nc: {<<: *b}"
    assert yaml_text.parse(text, "test")["c"] == {"x": 2}


def test_an_empty_section_is_the_defaults(tmp_path):
    assert load_config(write(tmp_path, MINIMAL + "optimizer:\nlog:\n")) == from_dict(BASE)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("engine={parallel: {tp: 2}", "engine: the override is not valid YAML: "),
        ("engine={parallel: {tp: 1, tp: 2}}", "engine: the override is not valid YAML: the key 'tp' is given twice"),
        ("optimizer.betas=[0.9]", "optimizer.betas: value [0.9] is a list of 1; give a list of 2 numbers"),
    ],
)
def test_a_wrong_override_is_said_to_be_one(tmp_path, override, says):
    with pytest.raises(ConfigError) as error:
        load_config(write(tmp_path, MINIMAL), [override])
    assert str(error.value).startswith(says)


def test_a_config_may_be_json(tmp_path):
    several = merged(BASE, {"data": {"train": [{"path": "a"}, {"path": "b"}]}})
    (tmp_path / "a.json").write_text("\n" + json.dumps(several, indent=2))
    assert load_config(tmp_path / "a.json") == from_dict(several)


def test_merge_keys_may_be_overridden(tmp_path):
    text = (
        "output_dir: run\nmodel: {path: m}\ndata: {train: d}\ntrain: {<<: {global_batch_size: 4, steps: 5}, steps: 6}\n"
    )
    assert load_config(write(tmp_path, text)).train.steps == 6


def test_whole_numbers_are_accepted_for_numbers_and_not_the_reverse():
    lr = from_dict(base(optimizer={"lr": 1})).optimizer.lr
    assert (lr, type(lr)) == (1.0, float)
    with pytest.raises(ConfigError, match=r"^train.steps: value 1.0 is a number; give a whole number of at least 1"):
        from_dict(base(train={"steps": 1.0}))
    for lr in (10**400, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="out of range"):
            from_dict(base(optimizer={"lr": lr}))


def values_of(annotation, bounds) -> st.SearchStrategy:
    """Values that a key of this type accepts."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    low = bounds["minimum"] if bounds["minimum"] is not None else bounds["above"]
    if annotation is type(None):
        return st.none()
    if origin is typing.Literal:
        return st.sampled_from(args)
    text = st.text(st.characters(codec="utf-8"))
    if annotation == Mapping[str, str]:  # data.turns
        return st.fixed_dictionaries({role: text for role in ("user", "assistant")})
    if origin is tuple and dataclasses.is_dataclass(typing.get_args(args[0])[:1] and typing.get_args(args[0])[0]):
        return st.sampled_from(
            [[{"name": "math", "weight": 0.5}], [{"name": "code"}, {"function": "a/b.py:f", "label": "1e5"}]]
        )
    if origin is Mapping or (origin is tuple and dataclasses.is_dataclass(args[0])):  # sources of rows
        own = {"columns": {"a": "b"}, "system": "1e5", "chat_template": "null"}
        kind = args[-1] if origin is Mapping else args[0]
        source = {"path": "yes"} | {name: value for name, value in own.items() if name in kind.__dataclass_fields__}
        one, two = (source | ({} if origin is Mapping else {"name": name, "weight": 0.5}) for name in ("1", "2"))
        return st.sampled_from([{"1": one, "b": "x"}] if origin is Mapping else [["a", "b.jsonl"], [one, two]])
    if origin is tuple and args[-1] is Ellipsis:
        return st.lists(values_of(args[0], bounds), unique=True)
    if origin is tuple:
        return st.lists(st.floats(0, 0.99), min_size=2, max_size=2)
    if origin is dict:
        return st.dictionaries(text, text, max_size=3)
    if args:
        return st.one_of([values_of(arm, bounds) for arm in args])
    if annotation is int:
        return st.integers(int(low), int(bounds["maximum"]))
    if annotation is float:
        return st.floats(low, bounds["maximum"], exclude_min=bounds["above"] is not None)
    return {bool: st.booleans(), str: text}[annotation]


@ROOTS
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_what_is_dumped_loads_back_equal(root, raw, data):
    """Any accepted value of any key, text that YAML could take for something else among them."""
    key = data.draw(st.sampled_from(list(walk_keys(root))))
    raw = copy.deepcopy(raw)
    node = raw
    *parents, name = key.path.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[name] = data.draw(values_of(key.annotation, key.bounds))
    try:
        config = from_dict(raw, root)
    except ConfigError as error:  # it does not fit the other keys
        assert len(str(error).split("\n")) == min(1 + len(error.others), MAX_MISTAKES + 1)  # a line for each mistake
        return
    assert from_dict(yaml_text.parse(dump_config(config), "dump"), root) == config


@pytest.mark.parametrize("text", ["1e5", "1e-5", "null", "yes", "3", "2020-01-01", "a: b", "# c", "[x", "é", "", "0x1", "1:30", "~", "\x85", " a\n", "\u2028"])  # fmt: skip
def test_text_keeps_being_text(text):
    config = from_dict(base(data={"eval": text}))
    assert from_dict(yaml_text.parse(dump_config(config), "dump")).data.eval == text


@pytest.mark.parametrize("null", ["critic", "reference", "reward"])
def test_a_section_that_is_null_stays_null(null, tmp_path):
    """Absent, null and the section itself are told apart, in the file, in overrides and in what is dumped."""
    text = yaml_text.dump(merged(PPO_BASE, {"reward": {"model": {"path": "judge"}}}))
    absent, empty, given = (
        load_config(write(tmp_path, text), overrides, PPOConfig)
        for overrides in ([], [f"{null}.engine=null"], [f"{null}.engine.parallel.tp=2"])
    )
    own = lambda config: getattr(config, null).engine  # noqa: E731
    assert absent == empty and own(absent) is None
    assert own(given).parallel.tp == 2 and own(given).backend == "megatron"
    for config in (absent, given):
        assert from_dict(yaml_text.parse(dump_config(config), "dump"), PPOConfig) == config


def test_null_rewards_and_rewards(tmp_path):
    with_environment = merged(PPO_BASE, {"rewards": None, "rollout": {"environment": "env.py:Env"}})
    assert from_dict(with_environment, PPOConfig).rewards is None
    assert from_dict({k: v for k, v in with_environment.items() if k != "rewards"}, PPOConfig).rewards is None
    config = load_config(write(tmp_path, yaml_text.dump(PPO_BASE)), ["rewards.workers=2"], PPOConfig)
    assert config.rewards.workers == 2 and label_of(config.rewards.functions[0]) == "gsm8k"
    assert from_dict(yaml_text.parse(dump_config(config), "dump"), PPOConfig) == config


@ROOTS
def test_plain_data_holds_every_key(root, raw):
    own = {role: {"engine": {}} for role in ("critic", "reference")}
    adapters = {"model": {"lora": {}}}
    if root is SFTConfig:
        of_engine, of_server = ({"teacher": {"model": {"path": "t"}, **kind}} for kind in (
            {"engine": {}}, {"server": {"url": "http://h:1"}, "top_k": 20}))  # fmt: skip
        full = merged(raw, adapters | of_engine)
        others = (of_server, {"model": {"mtp": {}}})
    else:
        full = merged(raw, own | {"reward": {"engine": {}, "model": {"path": "r"}}})
        full = merged(full, {"actor": adapters, "critic": adapters})
        opd = {
            "algorithm": {"name": "opd", "distill": {}},
            "reference": {"model": {"path": "t"}, "server": {"url": "http://h:1"}},
        }
        others = ({"actor": {"model": {"mtp": {}}}}, opd)
    beside = {path for of in others for path in dotted(to_dict(from_dict(merged(raw, of), root)))}
    beside = {path for path in beside if any(part in path for part in (".server.", ".mtp.", ".distill."))}
    null = {"teacher.server", "model.mtp", "actor.model.mtp", "reference.server", "algorithm.distill"}
    assert dotted(to_dict(from_dict(full, root))).keys() - null | beside == {key.path for key in walk_keys(root)}


@ROOTS
def test_every_key_says_what_it_means(root, raw):
    for key in walk_keys(root):
        assert key.help and "\n" not in key.help, key.path
        assert not key.help.endswith("."), key.path


@ROOTS
def test_defaults_are_within_their_bounds(root, raw):
    for key in walk_keys(root):
        if isinstance(key.default, int | float) and not isinstance(key.default, bool):
            assert math.isfinite(key.default), key.path
            assert key.default <= key.bounds["maximum"], key.path
            assert key.bounds["minimum"] is None or key.default >= key.bounds["minimum"], key.path
            assert key.bounds["above"] is None or key.default > key.bounds["above"], key.path


def test_the_config_imports_neither_torch_nor_megatron():
    modules = (
        "mrl.config.load, mrl.config.checks, mrl.config.docs, mrl.config.resume, mrl.parallel, mrl.launch.preflight"
    )
    code = (
        f"import sys, {modules}; print([m for m in ('torch', 'megatron', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize(("given", "every"), [(True, 1), (False, None), ({}, 1), (None, 1), ({"every": 3}, 3)])
def test_samples_may_be_true_or_false(given, every):
    made = from_dict(PPO_BASE | {"log": {"samples": given}}, PPOConfig)
    assert made.log.samples.every == every and from_dict(to_dict(made), PPOConfig) == made
    with pytest.raises(ConfigError, match=r"^log\.samples\.evry: .*did you mean log\.samples\.every\?"):
        from_dict(PPO_BASE | {"log": {"samples": {"evry": 1}}}, PPOConfig)


# -- learning rates where the config gives none: by command and adapters, and kept by a resume --


def base_of(command: str, role: str, adapters: bool, tmp_path) -> dict:
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
    raw = base_of(command, role, adapters, tmp_path)
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
    raw = base_of(command, role, False, tmp_path)
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
    raw = base_of("dpo", "", False, tmp_path)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(written)
    assert from_dict(raw, roots()["dpo"]).optimizer.lr == 1e-6
