"""What is looked at before a run: what its roles share, the version of vLLM inside the trainer, and its first rows."""

from __future__ import annotations

import pathlib

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.config.command import Part, record
from mrl.config.load import load_config
from mrl.config.schema import EngineConfig, ModelConfig
from mrl.errors import ConfigError
from mrl.launch import planning, preflight, start
from mrl.rollout import vllm_start
from tests.bad_input.mistakes import PPO_CONFIG, Workspace, set_model, set_other_model
from tests.data.tiny_tokenizers import turns, write_jsonl
from tests.trainers import tiny_runs


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    Workspace(tmp_path).make()
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def dry_run_of_ppo(*words: str):
    return CliRunner().invoke(cli.main, ["ppo", "ppo.yaml", *words, "--dry-run"])


# ------------------------------------------------------------------------------------------------- what the roles share


def test_roles_share_the_kernel_of_attention(folder):
    """Their processes are one, and so is the environment that transformer-engine reads."""
    fused = ["actor.engine={device: auto, attention: fused}", "actor.model.dtype=bfloat16"]
    refused = dry_run_of_ppo(*fused, "reference.engine.device=auto")
    assert refused.exit_code == 2 and (
        'reference.engine.attention: value "auto" does not go with actor.engine.attention fused: ' in refused.stderr
    ), refused.output
    fused = EngineConfig(attention="fused")
    preflight._check_attention([Part(role, ModelConfig(path="m"), fused) for role in ("actor", "reference")])


def test_a_model_of_fewer_positions_is_said_once(folder):
    """Its rotary embedding computes on, whatever the length."""
    set_model(max_position_embeddings=128)(Workspace(folder))
    given = ["data.max_prompt_length=100", "rollout.max_new_tokens=29"]
    why = "the model is made for 128 positions; sequences have up to {} tokens (data.max_prompt_length 100 + "
    said = dry_run_of_ppo(*given).stdout
    assert said.count(why.format(129)) == 1 and f"# actor.model.path: {why.format(129)}" in said, said
    assert "make that 128, or stretch the positions (rope_scaling of config.json)" in said
    assert "is made for" not in dry_run_of_ppo(given[0], "rollout.max_new_tokens=28").stdout
    set_other_model("other", max_position_embeddings=64)(Workspace(folder))
    said = dry_run_of_ppo(given[0], "rollout.max_new_tokens=28", "reference.model.path=other").stdout
    assert said.count("is made for") == 1 and "# reference.model.path: the model is made for 64 positions" in said


@pytest.mark.parametrize("kinds", [None, [], ["Qwen3ForSequenceClassification"], ["InternLM2ForRewardModel"]])
def test_what_may_score(folder, kinds):
    set_other_model("judge", architectures=kinds)(Workspace(folder))
    assert dry_run_of_ppo("reward.model.path=judge").exit_code == 0


def test_an_adapter_over_a_language_model_may_score(folder):
    set_other_model("base", architectures=["Qwen3ForCausalLM"])(Workspace(folder))
    (folder / "judge").mkdir()
    (folder / "judge" / "adapter_config.json").write_text('{"base_model_name_or_path": "./base"}')
    assert dry_run_of_ppo("reward.model.path=judge").exit_code == 0
    config = load_config("ppo.yaml", ["reward.model.path=judge"], record("ppo").root)
    parts, _ = planning.read_parts(record("ppo"), config, 1)
    assert "reward" in [part.role for part in parts], "a plan takes it too"


def test_graphs_are_of_the_models_that_train(folder, monkeypatch):
    monkeypatch.setattr(start, "_gpus", list)  # a test before may have loaded megatron, and torch then counts one
    graphs = "actor.engine={device: cuda, layer_spec: local, cuda_graphs: true, micro_batch: {tokens: 4096, pad: true}}"
    given = [graphs, "train.offload_idle=never", "reference.model.dtype=float32", "actor.model.dtype=bfloat16"]
    done = dry_run_of_ppo(*given)
    assert done.exit_code == 0 and done.stdout.count("engine.cuda_graphs: a GPU") == 1, done.output
    done = dry_run_of_ppo(*given, "actor.model.dtype=float32")
    assert done.exit_code == 2 and "mrl: actor.engine.cuda_graphs: value true needs attention in one" in done.stderr


def test_roles_share_the_buffers_of_tensor_parallel_communication(folder):
    """One role may have none; two have the same."""
    engine = "{{device: cpu, layer_spec: te, parallel: {{tp: 2}}, micro_batch: {{tokens: {}}}, megatron: {{tp_comm_overlap: true}}}}"
    actor = ["actor.model.dtype=bfloat16", f"actor.engine={engine.format(64)}"]
    said = dry_run_of_ppo(*actor, f"reference.engine={engine.format(64)}")
    assert said.exit_code == 0, said.output
    alone = "reference.engine={device: cpu, parallel: {tp: 2}}"
    assert dry_run_of_ppo(*actor, alone).exit_code == 0
    refused = dry_run_of_ppo(*actor, f"reference.engine={engine.format(80)}")
    assert (
        refused.exit_code == 2
        and (
            "reference.engine.megatron.tp_comm_overlap: value true asks for buffers of 80 places x 64 over 2 tensor-parallel "
            "ranks, and actor.engine.megatron.tp_comm_overlap for 64 places x 64 over 2 tensor-parallel ranks; give all models the same"
        )
        in refused.stderr
    ), refused.output
    short = dry_run_of_ppo(*actor, f"reference.engine={engine.format(20)}")
    assert short.exit_code == 2 and "reference.engine.micro_batch.tokens: value 20 is less than " in short.stderr


# ---------------------------------------------------------------------------------------------- vLLM inside the trainer


def install(monkeypatch, folder: pathlib.Path, version: str | None) -> None:
    """Puts a package vllm of a version where Python looks first. None: without metadata."""
    (folder / "site" / "vllm").mkdir(parents=True)
    (folder / "site" / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is not there')\n")
    if version is not None:
        metadata = folder / "site" / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder / "site"))


def run(monkeypatch, *overrides: str) -> tuple[bool, str, int]:
    """Whether the trainer is loaded, the last line, and the exit code."""
    loaded: list[object] = []
    monkeypatch.setattr(start, "trainer_of", lambda command: lambda config, line: loaded.append(config))
    made = CliRunner().invoke(cli.main, ["ppo", "ppo.yaml", "rollout.backend=vllm", *overrides])
    return bool(loaded), ["", *(made.stdout + made.stderr).splitlines()][-1], made.exit_code


@pytest.mark.parametrize(
    "version, words",
    [
        ("none", "needs vLLM beside mrl, and it is not installed; install it here, or start a server and give its url"),
        ("0.25.0", "is vLLM 0.25.0 here, and mrl needs 0.26 or newer; install 0.32, or set it to native"),
    ],
)
def test_a_run_without_it_ends_before_anything_is_loaded(folder, monkeypatch, version, words):
    if version != "none":
        install(monkeypatch, folder, version)
    loaded, line, code = run(monkeypatch)
    assert (loaded, code) == (False, 2) and line.endswith(words)


def test_a_run_with_it_or_with_servers_starts(folder, monkeypatch):
    assert run(monkeypatch, "rollout.server.urls=['http://a:1']")[0]
    install(monkeypatch, folder, "0.32.0")
    assert run(monkeypatch)[0]


@pytest.mark.parametrize("version", ["0.1.dev1+gabc1234", None])
def test_an_unknown_version_is_one_line(folder, monkeypatch, version):
    install(monkeypatch, folder, version)
    line = vllm_start.check_version()
    assert line is not None and line.endswith(f"the one here is {version or 'of an unknown version'}")


def test_a_broken_one_is_named_with_its_error(folder, monkeypatch):
    install(monkeypatch, folder, "0.32.0+cu130")
    with pytest.raises(ConfigError, match=r"imported \(ImportError: libcudart.so.13 is not there\)"):
        vllm_start.import_vllm(gpu=True)


# ------------------------------------------------------------------------------------------------------- the first rows


GOOD = {"messages": turns("2+2=", "4")}
HH = {
    "chosen": "\n\nHuman: 1+1?\n\nAssistant: 2",
    "rejected": "\n\nHuman: 1+1?\n\nAssistant: 3",
}
ROWS = {
    "a wrong column": ("sft", [{"question": "1+1?", "answer": "2"}], "a.jsonl:1: the fields question, answer fit no"),
    "too long": ("sft", [GOOD, {"messages": turns("+" * 200, "4")}], "a.jsonl:2: the row has "),
    "hh": ("dpo", [HH], "a.jsonl:1: chosen is no list of messages, and there is no prompt"),
}  # fmt: skip


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first")
    tiny_runs.make_inputs(folder)
    return folder


def dry_run(folder, command, rows, *words, part="train"):
    """The dry run of a command on rows of data.train, or of data.eval beside good ones."""
    write_jsonl(folder / "a.jsonl", rows)
    write_jsonl(folder / "good.jsonl", [GOOD])
    data = {"train": "good.jsonl" if part == "eval" else "a.jsonl", "max_length": 64}
    config = tiny_runs.make_config(folder, folder / "none", data={})
    config["data"] = {name: str(folder / value) if name == "train" else value for name, value in data.items()}
    if part == "eval":
        config["data"]["eval"] = str(folder / "a.jsonl")
    if command != "sft":
        config["loss"] = {"name": {"dpo": "dpo", "rm": "bradley_terry"}[command]}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return CliRunner().invoke(cli.main, [command, str(folder / "config.yaml"), *words, "--dry-run"])


@pytest.mark.parametrize("name", ROWS)
def test_a_row_that_would_stop_the_run_stops_the_dry_run(inputs, name):
    command, rows, says = ROWS[name]
    done = dry_run(inputs, command, rows)
    assert done.exit_code == 2 and says in done.output.replace(f"{inputs}/", ""), done.output
    assert not (inputs / "none").exists()
    if command == "sft" and len(rows) > 1:
        assert dry_run(inputs, command, rows, part="eval").exit_code == 2
        policy = ["data.truncation=drop", "data.on_bad_row=skip"]
        assert dry_run(inputs, command, rows, *policy).exit_code == 0


def test_a_field_that_a_reward_reads_and_the_first_row_lacks(inputs, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1+1=", "answer": "2"}])
    config = {**PPO_CONFIG, "output_dir": str(tmp_path / "none"), "data": {"train": str(tmp_path / "a.jsonl")}}
    config["actor"] = {"model": {"path": str(inputs / "model"), "dtype": "float32"}, "engine": {"device": "cpu"}}
    (tmp_path / "ppo.yaml").write_text(yaml.safe_dump(config))
    words = ["ppo", str(tmp_path / "ppo.yaml"), "rewards.functions=[{name: exact_match, field: anwser}]", "--dry-run"]
    done = CliRunner().invoke(cli.main, words)
    says = 'rewards.functions[0].field: value "anwser" is the field that exact_match reads, and it is missing'
    assert done.exit_code == 2 and says in done.output and "has prompt, answer; name one of them" in done.output
    assert CliRunner().invoke(cli.main, [*words, "rewards.on_error=zero"]).exit_code == 0


def test_whole_texts_with_turns_pass(inputs):
    words = ['data.turns={user: "\\n\\nHuman:", assistant: "\\n\\nAssistant:"}']
    assert dry_run(inputs, "dpo", [HH], *words).exit_code == 0
    assert dry_run(inputs, "rm", [HH], "data.chat_template=none").exit_code == 0
