"""`mrl plan` as its user meets it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.commands.plan import EXAMPLES
from mrl.commands.ppo import PPO
from mrl.commands.sft import SFT
from mrl.commands.slurm import _refuse_what_does_not_fit
from mrl.config.command import record
from mrl.config.load import load_config
from mrl.launch.planning import verdict
from mrl.launch.slurm.options import SlurmConfig
from mrl.plan.gpus import gpu_of
from tests.cuda import models
from tests.engine.tiny_composite import make_composite

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 512,
}  # fmt: skip


EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("plans")
    models.write("Qwen/Qwen3-8B", path / "8b")
    models.write("deepseek-ai/DeepSeek-V3", path / "671b")
    models.write("Qwen/Qwen3-8B", path / "tiny", 2, **TINY)
    models.write("openai/gpt-oss-20b", path / "sinks", 2, **TINY, **models.fewer_experts("openai/gpt-oss-20b", 4))
    make_composite(str(path / "whole"), "qwen3_5")
    models.write("Qwen/Qwen3-30B-A3B", path / "experts", 2, **TINY, **EXPERTS)
    text = "output_dir: run\nmodel: {path: 8b}\ndata: {train: none.jsonl, max_length: 4096}\n"
    (path / "sft.yaml").write_text(text + "train: {steps: 10, global_batch_size: 256}\nengine: {parallel: {tp: 2}}\n")
    (path / "grpo.yaml").write_text(
        "output_dir: run\nactor: {model: {path: 8b}, engine: {parallel: {tp: 4}}}\nalgorithm: {name: ppo}\n"
        "data: {train: none.jsonl, max_prompt_length: 512}\nrollout: {max_new_tokens: 512, backend: native}\n"
        "rewards: {functions: [{name: gsm8k}]}\ntrain: {steps: 10, global_batch_size: 64}\n"
    )
    (path / "dpo.yaml").write_text(
        "output_dir: run\nmodel: {path: tiny}\nloss: {name: dpo}\ndata: {train: none.jsonl, max_length: 2048}\n"
        "train: {steps: 10, global_batch_size: 8}\nengine: {micro_batch: {size: 1}}\n"
    )
    return path


@pytest.fixture
def plan(planner, folder):
    """Runs `mrl plan` in a fork of a process that has imported everything."""
    return lambda *words: planner.call("tests.plan.planned:command", ["plan", *words], str(folder))


@pytest.fixture
def told(plan):
    """Returns what `mrl plan --json` says."""
    return lambda *words: json.loads(plan(*words, "--json").stdout)


def test_a_table_a_picture_and_a_verdict(plan):
    done = plan("sft.yaml", "engine.parallel={tp: 2, pp: 2, vpp: 2}", "-n", "16")
    assert done.exit_code == 0, done.stderr
    assert re.search(r"stage 1 +ranks 8-15 +layers 9-17 \| layers 27-35 \+ head", done.stdout)
    assert "tp2+spxpp2xvpp2xdp4, 8b, layers of te" in done.stdout
    assert "fits: " in done.stdout and "pp send over 2 ranks" in done.stdout
    assert all(len(line) < 140 for line in done.stdout.splitlines())


def test_what_does_not_fit_is_said_and_exits_with_2(plan):
    done = plan("sft.yaml", "-n", "2", "--gpu", "a100-40gb", "--json")
    told = json.loads(done.stdout)
    assert done.exit_code == 2 and not told["fits"]
    stage = told["roles"]["model"]["stages"][0]
    # 8.19e9 parameters over tp 2: two bytes each, four of gradients, twelve of the optimizer
    assert stage["gradient_bytes"] == 2 * stage["parameter_bytes"]
    assert max(stage["optimizer_bytes"]) == pytest.approx(6 * stage["parameter_bytes"], rel=1e-3)


def test_experts_are_multiplied_as_the_planned_gpu_does(told):
    def peak(gpu, value):
        words = ("model.path=experts", "engine={parallel: {}, layer_spec: local}", f"engine.moe.grouped_mm={value}")
        return told("sft.yaml", *words, "-n", "1", "--gpu", gpu)["roles"]["model"]["stages"][0]

    assert peak("h100-80gb", "auto") == peak("h100-80gb", "true") != peak("h100-80gb", "false")
    assert peak("a100-40gb", "auto") == peak("a100-40gb", "false")


def test_the_layer_spec_is_that_of_the_planned_gpu(told):
    """transformer-engine has attention sinks by cuDNN alone, which begins at Hopper: an A100 takes the local spec."""
    for gpu, spec in (("a100-80gb", "local"), ("h100-80gb", "te"), ("GB=80", "te")):
        found = told("sft.yaml", "model.path=sinks", "engine.parallel={}", "-n", "1", "--gpu", gpu)
        assert found["roles"]["model"]["layer_spec"] == spec, gpu


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_folder_of_text_and_more_is_planned_by_its_text_part(plan, backend):
    words = ["actor.model.path=whole", f"actor.engine={{backend: {backend}}}", "algorithm.name=grpo", "-n", "1"]
    done = plan("grpo.yaml", *words, "rollout.backend=vllm", "--gpu", "h100-80gb")
    assert done.exit_code == 0 and "mrl ppo on 1 x h100-80gb" in done.stdout, done


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["sft.yaml", "-n", "3"],
            "tp*pp*cp (2*1*1 = 2) does not divide the 3 processes; use a multiple of 2 processes, or smaller degrees",
        ),
        (["sft.yaml", "--efficiency", "2"], "Invalid value for '--efficiency'"),
        (["sft.yaml", "engine.backend=fsdp", "engine.parallel={}", "--suggest"], "has no layouts to search"),
        (["sft.yaml", "engine.backend=fsdp", "engine.parallel={}", "--calibrate"], "has no stages to time"),
        (
            ["grpo.yaml", "actor.engine.micro_batch={tokens: auto, pad: true}"],
            "mrl: actor.engine.micro_batch.pad: value",
        ),
        (["sft.yaml", "--suggest", "--calibrate"], "--calibrate: times one layout; leave --suggest out"),
        (
            ["sft.yaml", "model.path=tiny", "teacher={model: {path: tiny}, top_k: 8}", "--calibrate"],
            "--calibrate: does not time an update that learns from a teacher",
        ),
    ],
)
def test_bad_input_is_one_line(plan, words, message):
    done = plan(*words)
    assert done.exit_code == 2 and message in done.stderr and len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.nightly
def test_the_671b_model_on_16384_gpus(folder):
    """In less than 20 s of a core and 4 GiB; 11 s where Python has to compile what it imports."""
    script = (
        "import resource, subprocess, sys\n"
        "print('exit', subprocess.run([sys.executable, '-m', 'mrl', *sys.argv[1:]]).returncode)\n"
        "usage = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print('used', usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20, file=sys.stderr)"
    )
    words = ["plan", "sft.yaml", "model.path=671b", "train.global_batch_size=16384", "-n", "16384",
             "engine.parallel={pp: 16, ep: 64}", "engine.recompute=full"]  # fmt: skip
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=folder, capture_output=True, text=True)
    assert "stage 15  ranks 15360-16383  layers 58-60 + head" in done.stdout, done.stderr
    assert "\nfits: " in done.stdout and done.stdout.endswith("exit 0\n")
    seconds, gib = map(float, done.stderr.split("used ")[1].split())
    assert seconds < 20 and gib < 4


LINES = [line.strip() for line in EXAMPLES.strip().splitlines()]


@pytest.mark.nightly
@pytest.mark.parametrize("line", LINES)
def test_the_examples_of_the_help(plan, line):
    words = line.split()[2:]
    if "--suggest" in words:
        words += ["--gpu", "h200"]
    if "--calibrate" in words:
        words += ["model.path=tiny"]  # a stage of the other takes 35 GiB, which not every machine has
    done = plan(*words)
    assert done.exit_code in (0, 2) and done.stdout, f"{line}: {done.stderr}"
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_ranks_that_sample_beside_training_are_planned_on_gpus_of_their_own(plan, told):
    words = ["grpo.yaml", "algorithm.name=grpo", "rollout.ranks=4", "rollout.async_level=1", "rollout.server.tp=2"]
    done = plan(*words, "-n", "8")
    assert "mrl ppo on 8 x h100-80gb" in done.stdout and "tp4+sp, 8b" in done.stdout
    assert re.search(r"sampling ranks: tp2\+?s?p?xdp2, 8b[^\n]*\n  stage 0 +ranks 4-7 ", done.stdout), done.stdout
    assert "  sampling ranks sample up to 32,768 tokens meanwhile" in done.stdout
    rates = re.findall(r"[\d,]+ tokens/s a GPU", done.stdout)
    alone = plan("grpo.yaml", "algorithm.name=grpo", "-n", "4").stdout
    assert rates and rates == re.findall(r"[\d,]+ tokens/s a GPU", alone)
    kept = told(*words, "train.offload_idle=never", "-n", "8")["phases"]
    assert [one["idle"] > 0 for one in kept] == [one["phase"] != "sampling on other ranks" for one in kept]


def test_servers_that_sample_meanwhile_are_told_how_fast(plan, told):
    words = [
        "grpo.yaml", "actor.model.path=tiny", "actor.engine.parallel.tp=1", "algorithm.name=grpo", "rollout.backend=vllm",
        "rollout.server.urls=['http://a:1']", "rollout.async_level=1", "-n", "2",
    ]  # fmt: skip
    found = told(*words)
    assert found["served_tokens"] == 64 * 512
    rate = f"{64 * 512 / found['step_seconds']:,.0f} tokens/s"
    line = f"  servers sample up to 32,768 tokens meanwhile: neither side waits if all together sample {rate}"
    assert line in plan(*words).stdout.splitlines()
    assert "meanwhile" not in plan(*words, "rollout.async_level=0").stdout


def test_graphs_of_training_keep_the_activations_of_a_micro_batch(plan, told):
    words = ("sft.yaml", "model.path=tiny", "engine.parallel={}", "engine.micro_batch={tokens: 4096, pad: true}")
    assert "graphs of training, " in plan(*words, "engine.cuda_graphs=true", "-n", "1").stdout
    [without], [held] = (told(*words, f"engine.cuda_graphs={on}", "-n", "1")["phases"] for on in ("false", "true"))
    pool = held["parameters"] - without["parameters"]
    assert 0.5 * without["activations"] < pool <= without["activations"], "what is kept, and not a pass's peak"
    local, with_graphs = (
        told(*words, "engine.layer_spec=local", f"engine.cuda_graphs={on}", "-n", "1") for on in ("false", "true")
    )
    gradients = local["roles"]["model"]["stages"][0]["gradient_bytes"] // 2  # fp32 there, and bfloat16 in a capture
    pools = [of["phases"][0]["parameters"] for of in (local, with_graphs)]
    assert gradients < pools[1] - pools[0] <= gradients + local["phases"][0]["activations"]
    same = ("gradients", "optimizer", "activations")
    assert [held[name] for name in same] == [without[name] for name in same]


def test_ppo_has_its_phases(told):
    found = told("grpo.yaml", "-n", "8")
    phases = {one["phase"]: one for one in found["phases"]}
    assert list(phases) == [
        "sampling", "forward of the actor", "forward of the critic", "forward of the reference", "update of the actor",
        "update of the critic",
    ]  # fmt: skip
    heads, width, item = 8 // 4, 128, 2
    assert phases["sampling"]["cache"] == 65536 * 36 * heads * 2 * width * item
    # 64 sequences on dp 2, vocabulary over tp 4; beside their logits some hidden states of 4,096 prompt tokens
    logits = 4 * (64 // 2) * 151936 // 4
    assert 4096 * 4096 * 2 < phases["sampling"]["activations"] - logits < 2**30
    assert phases["forward of the reference"]["gradients"] == 0
    assert phases["update of the actor"]["optimizer"] > 0
    flops = found["model_flops_per_token"]
    assert flops["actor"] - flops["critic"] == pytest.approx(3 * 2 * 4096 * 151936), "its head has one output"


@pytest.mark.parametrize(
    ("name", "command", "words"),
    [
        ("sft.yaml", SFT, ["teacher={model: {path: 8b}, top_k: 32}"]),
        ("grpo.yaml", PPO, ["algorithm={name: opd, distill: {top_k: 32}}", "reference={model: {path: 8b}}"]),
    ],
)
def test_distillation_is_in_the_teachers_forward_and_the_students_update(folder, name, command, words):
    phases = command().phases(load_config(folder / name, words, command.root)).phases
    [teacher, student] = [phase for phase in phases if phase.distill is not None]
    assert (teacher.kind, teacher.distill.top_k) == ("forward", 32) and teacher.role in ("teacher", "reference")
    assert (student.kind, student.distill) == ("train", teacher.distill) and student.role in ("", "actor")


def test_ids_of_a_teacher_take_memory_of_the_whole_mini_batch(told):
    words = ("sft.yaml", "model.path=tiny", "engine={parallel: {pp: 2}, micro_batch: {size: 1}}", "-n", "2")
    words = (*words, "train.global_batch_size=16")
    both = [told(*words, f"teacher={{model: {{path: tiny}}, top_k: {k}}}") for k in (8, 16)]
    few, many = ({one["phase"]: one["activations"] for one in of["phases"] if not one["stage"]} for of in both)
    # of each id an int64 twice and the teacher's fp32 from the first pass on; all predictions, fp32, when all are done
    each = 16 * 4096 * 8
    assert many["update of the model"] - few["update of the model"] >= (8 + 8 + 4) * each
    assert many["forward of the teacher"] - few["forward of the teacher"] > 0


def test_a_forward_that_is_made_once_is_in_no_step(plan):
    for words, key in (
        (["dpo.yaml", "engine.micro_batch.size=2", "reference.cache=true"], "reference.cache"),
        (["sft.yaml", "model.path=tiny", "teacher={model: {path: tiny}, top_k: 8, cache: true}"], "teacher.cache"),
    ):
        done = plan(*words, "-n", "2", "--json")
        assert not done.stderr, done.stderr
        told = json.loads(done.stdout)
        assert [note for note in told["notes"] if key in note] and "forward" not in "".join(told["updates"]), words


@pytest.mark.slow
def test_kto_has_the_forwards_of_its_kl_and_rows_of_one_answer(plan, told):
    words = ("dpo.yaml", "loss.name=kto", "-n", "2")
    done = plan(*words)
    assert "update of the model: 4 micro-batches of 2,048 tokens" in done.stdout, done.stderr
    assert "with data.format=preference, for pairs" in done.stdout
    rows, paired = told(*words), told(*words, "data.format=preference")
    seconds = {name: one["seconds"] for name, one in rows["updates"].items()}
    others = seconds["forward of the reference on other answers"]
    assert seconds["forward of the model on other answers"] == others == seconds["forward of the reference"] > 0
    assert rows["step_seconds"] == sum(seconds.values()) and not paired["notes"]
    flops, of_pairs = (of["updates"]["update of the model"]["flops"] for of in (rows, paired))
    assert of_pairs == pytest.approx(2 * flops)


@pytest.mark.parametrize(
    ("words", "forward"),
    [
        ([], False),  # the update's own forward is that of the old log-probs
        (["train.guards=false"], True),  # nothing has found that both agree
        (["algorithm.mini_batch_size=32", "train.steps=2"], True),
    ],
)
def test_when_old_log_probs_have_a_forward_of_their_own(folder, words, forward):
    config = load_config(folder / "grpo.yaml", ["algorithm={name: grpo}", *words], PPO.root)
    assert ("forward of the actor" in [phase.name for phase in PPO().phases(config).phases]) is forward


def test_small_models_are_shown_in_small_units(plan):
    done = plan("sft.yaml", "model.path=tiny", "engine.parallel={pp: 2}", "-n", "2", "train.global_batch_size=1")
    assert done.exit_code == 0, done.stderr
    assert "MiB on the fullest rank" in done.stdout and "1 micro-batch of 4,096 tokens" in done.stdout
    assert not re.search(r"\b0\.00 (GiB|s)\b|\b0\.0 of|\(s\)|\b1 [a-z-]+s\b", done.stdout), done.stdout
    assert "causal attention at half the square" in done.stdout


@pytest.mark.slow
def test_what_backend_fsdp_takes_beside_its_state_is_said_to_be_unknown(plan, told):
    words = (
        "grpo.yaml", "actor.model.path=tiny", "actor.engine.parallel={}", "critic.engine={backend: fsdp}", "-n", "4"
    )  # fmt: skip

    def critic(found):
        return next(one for one in found["phases"] if one["phase"] == "update of the critic")

    found, done = told(*words), plan(*words)
    update = critic(found)
    assert update["activations"] is None and update["optimizer"] == 2 * update["gradients"] > 0
    assert found["fits"] is None and not found["activations_planned"] and "sampling" in found["untimed_phases"]
    assert re.search(r"update of the critic .* unknown ", done.stdout) and "may fit: " in done.stdout
    assert (
        "not in it, as its time is not estimated: sampling, forward of the critic, update of the critic" in done.stdout
    )
    alone = plan("dpo.yaml", "engine={backend: fsdp}", "-n", "2").stdout
    assert all("backend fsdp neither activations are planned" in out for out in (done.stdout, alone))
    assert "Activations are of a real" in done.stdout and "Activations are of a real" not in alone
    whole = critic(told(*words, "critic.engine.fsdp.defer_sync=true"))
    assert whole["gradients"] == pytest.approx(4 * update["gradients"], rel=0.01)  # of four ranks
    assert whole["parameters"] - update["parameters"] == whole["gradients"] / 2  # in bfloat16
    words = (*words, "critic.engine.fsdp.replicate=4")  # a rank holds the whole, and keeps it gathered
    alone, deferred = critic(told(*words)), critic(told(*words, "critic.engine.fsdp.defer_sync=true"))
    assert alone == deferred and alone["parameters"] - update["parameters"] > whole["gradients"]
    assert "weights gathered once a mini-batch, " in plan(*words).stdout


@pytest.mark.slow
def test_layouts_are_those_of_the_actor_and_of_who_shares_its_engine(plan, told):
    words = ("grpo.yaml", "actor.model.path=tiny", "-n", "2", "--suggest")
    assert "searched for actor.engine, which all parts share" in plan(*words).stdout
    done = plan(*words, "critic.engine={backend: fsdp}")
    assert "searched for actor.engine alone: critic.engine stayed" in done.stdout, done.stderr
    assert "times are without: sampling" in done.stdout
    seconds = [one["step_seconds"] for one in told(*words)["layouts"]]
    assert seconds == sorted(seconds)


def test_a_model_of_the_hub_needs_only_its_config(planner, folder, tmp_path):
    snapshot = tmp_path / "models--Some--Model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_bytes((folder / "tiny" / "config.json").read_bytes())
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    words = ["plan", "sft.yaml", "model.path=Some/Model", "engine.parallel={}", "-n", "2"]
    done = planner.call("tests.plan.planned:command", words, str(folder), hub=str(tmp_path))
    assert done.exit_code == 0 and "dp2, Some/Model" in done.stdout, done.stderr


@pytest.mark.slow
def test_rates_of_epochs_count_all_sequences(plan):
    """Twice the epochs are twice the time and twice the tokens: the rate stays."""
    words = ("grpo.yaml", "actor.model.path=tiny", "-n", "4", "algorithm.mini_batch_size=32", "train.steps=8")
    once, twice = (plan(*words, f"algorithm.epochs={n}").stdout for n in (1, 2))
    rates = [re.search(r"update of the actor:.*?([\d,]+) tokens/s", text, re.DOTALL)[1] for text in (once, twice)]
    assert rates[0] == rates[1]
    assert "4 optimizer steps of" in twice


@pytest.mark.parametrize(("gpus", "said"), [(8, "not planned: give --gpu NAME"), (0, "")])
def test_a_job_on_gpus_without_a_name_is_said_to_be_unplanned(capsys, gpus, said):
    _refuse_what_does_not_fit("sft", SimpleNamespace(options=SlurmConfig(gpus_per_node=gpus)))
    assert said in (told := capsys.readouterr().err) and bool(told) == bool(said)


def test_an_error_of_the_planner_is_no_verdict(planner):
    fits, line = planner.call("tests.plan.planned:verdict_where_the_planner_fails")
    assert fits is None and line.startswith("not planned: TypeError: ")


@pytest.mark.nightly
def test_a_verdict_comes_from_a_process_of_its_own(folder, monkeypatch):
    monkeypatch.chdir(folder)
    words = ["model.path=tiny", "engine.parallel={}", "train.global_batch_size=8"]
    config = load_config("sft.yaml", words, record("sft").root)
    fits, line = verdict(record("sft"), config, 8, gpu_of("h100-80gb"))
    assert fits and line.startswith("fits: ")


@pytest.mark.nightly
@pytest.mark.parametrize("words, code", [(["-n", "8"], 0), (["-n", "8", "engine.parallel.tp=3"], 2)])
def test_a_plan_leaves_its_process_as_it_was(tmp_path, words, code):
    """The next command in it still finds its GPUs: torch and the environment are untouched, after an error too."""
    models.write("Qwen/Qwen3-8B", tmp_path / "model")
    (tmp_path / "sft.yaml").write_text(
        f"output_dir: run\nmodel: {{path: {tmp_path / 'model'}}}\ndata: {{train: none.jsonl, max_length: 512}}\n"
        "train: {steps: 1, global_batch_size: 8}\n"
    )
    script = (
        "import os, sys, torch\n"
        "from click.testing import CliRunner\n"
        "from mrl.cli import main\n"
        "torch.cuda.device_count, before = (lambda: 4), dict(os.environ)\n"
        "if __name__ == '__main__':\n"
        "    done = CliRunner().invoke(main, ['plan', *sys.argv[1:]], prog_name='mrl')\n"
        "    assert torch.cuda.device_count() == 4 and dict(os.environ) == before\n"
        "    print(done.stdout, done.stderr, sep='')\n"
        "    sys.exit(done.exit_code)\n"
    )
    (tmp_path / "process.py").write_text(script)
    command = [sys.executable, str(tmp_path / "process.py"), str(tmp_path / "sft.yaml"), *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == code, done.stderr
    assert ("parameters" if code == 0 else "engine.parallel") in done.stdout
