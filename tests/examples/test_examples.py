"""The examples run as they stand: configs load, programs of the engines train, the arithmetic one trains at TP2."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM

from mrl.config.command import command_of_data
from mrl.config.load import load_config, read_yaml
from mrl.metrics import read
from tests.data.tiny_tokenizers import make_tokenizer
from tests.data.web import serving
from tests.engine import harness, tiny
from tests.trainers import tiny_runs

CONFIGS = sorted((tiny_runs.REPO / "examples").rglob("*.yaml"))
STREAMED = tiny_runs.REPO / "examples" / "arithmetic" / "streamed.yaml"
MIXTURE = tiny_runs.REPO / "examples" / "arithmetic" / "mixture.yaml"


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_configs_load(path):
    root = command_of_data(read_yaml(path)).root
    assert load_config(path, (), root).output_dir.startswith("runs/")


def test_arithmetic_problems_are_seeded_and_held_out(tmp_path):
    example = tiny_runs.load_example("arithmetic/make_data.py")
    for name in ("a", "b"):
        example.make(tmp_path / name, seed=3)
    rows = {name: (tmp_path / "a" / f"{name}.jsonl").read_text().splitlines() for name in ("train", "eval")}
    assert (tmp_path / "b" / "train.jsonl").read_text().splitlines() == rows["train"]
    assert len(rows["train"]) + len(rows["eval"]) == 100 * 100 and not set(rows["train"]) & set(rows["eval"])
    question, answer = json.loads(rows["eval"][0])["messages"]
    assert str(sum(map(int, question["content"].rstrip("=").split("+")))) == answer["content"]


def test_arithmetic_tokenizer_marks_the_answer():
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()
    chat = [{"role": "user", "content": "37+45="}, {"role": "assistant", "content": "82"}]
    encoded = tokenizer.apply_chat_template(chat, return_dict=True, return_assistant_tokens_mask=True)
    trained = [i for i, m in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if m]
    assert tokenizer.decode(trained) == "82<|im_end|>"
    prompt = tokenizer.apply_chat_template(chat[:1], add_generation_prompt=True, return_dict=True)["input_ids"]
    assert encoded["input_ids"][: len(prompt)] == prompt
    assert tokenizer.decode(encoded["input_ids"]) == (
        "<|im_start|>user\n37+45=<|im_end|>\n<|im_start|>assistant\n82<|im_end|>\n"
    )


def test_a_reward_model_of_arithmetic_trains_on_sums_and_wrong_ones_near_them(tmp_path):
    tiny_runs.load_example("arithmetic/make_data.py").make(tmp_path)
    make = tiny_runs.load_example("arithmetic/comparisons.py").make
    for name in ("train", "eval"):
        make(tmp_path / f"{name}.jsonl", tmp_path / f"{name}-pairs.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "train-pairs.jsonl").read_text().splitlines()]
    for row in rows:
        right, wrong = (int(row[name][0]["content"]) for name in ("chosen", "rejected"))
        assert right == sum(map(int, row["prompt"][0]["content"].rstrip("=").split("+"))) and 0 <= wrong != right
    config = read_yaml(tiny_runs.REPO / "examples" / "arithmetic" / "rm.yaml")
    config["output_dir"] = str(tmp_path / "run")
    config["model"] |= {"path": str(tmp_path / "model"), "init": "random"}
    config["data"] |= {name: str(tmp_path / f"{name}-pairs.jsonl") for name in ("train", "eval")}
    config["train"] |= {"steps": 2, "eval_every": None, "eval_batches": 1}
    config["optimizer"] |= {"warmup_steps": 1}
    assert harness.run_case(1, "tests.trainers.rm_cases:train", config=config)[:2] == ("done", "")
    assert 0 <= read(tmp_path / "run" / "metrics.jsonl")[-1]["eval/rewards/accuracy"] <= 1


@pytest.mark.slow
def test_preferences_of_arithmetic_train(tmp_path, monkeypatch):
    """With the pairs that the example's program makes of a model that knows nothing, and a cached reference."""
    tiny_runs.load_example("arithmetic/make_data.py").make(tmp_path)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path / "model")).save_pretrained(tmp_path / "model")
    few = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)[:16]
    (tmp_path / "few.jsonl").write_text("".join(few))
    monkeypatch.setitem(sys.modules, "evaluate", tiny_runs.load_example("arithmetic/evaluate.py"))
    files = [str(tmp_path / name) for name in ("model", "few.jsonl", "pairs.jsonl")]
    tiny_runs.load_example("arithmetic/preferences.py").make(*files)
    config = read_yaml(tiny_runs.REPO / "examples" / "arithmetic" / "dpo.yaml")
    config["output_dir"] = str(tmp_path / "run")
    config["model"] |= {"path": str(tmp_path / "model")}
    config["data"] |= {"train": str(tmp_path / "pairs.jsonl")}
    config["train"] |= {"steps": 4, "global_batch_size": 8}
    config["optimizer"] |= {"warmup_steps": 1}
    assert harness.run_case(1, "tests.trainers.dpo_cases:train", config=config)[:2] == ("done", "")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert abs(rows[0]["rewards/margin"]) < 1e-5 < rows[-1]["rewards/margin"]


@pytest.mark.slow
def test_a_mixture_of_arithmetic_has_shares_and_a_loss_of_each_source(tmp_path):
    """From random weights; counting ends with its epochs, and the two sums go on in their shares."""
    for name in ("make_data", "sources"):
        tiny_runs.load_example(f"arithmetic/{name}.py").make(tmp_path)
    config = yaml.safe_load(MIXTURE.read_text().replace("runs/arithmetic-data", str(tmp_path)))
    config["output_dir"], steps, batch = str(tmp_path / "run"), 12, config["train"]["global_batch_size"]
    config["model"] |= {"path": str(tmp_path / "model"), "init": "random"}
    config["data"]["train"][2] |= {"epochs": 0.1}
    config["train"] |= {"steps": steps, "eval_every": steps // 2, "eval_batches": 1}
    config["optimizer"] |= {"warmup_steps": 1}
    assert harness.run_case(1, "tests.trainers.cases:train", config=config)[:2] == ("done", "")
    rows = read(tmp_path / "run" / "metrics.jsonl")
    middle, last = rows[steps // 2], rows[-1]
    given = {name: last[f"data/{name}/rows"] for name in ("sums", "three", "counting")}
    assert sum(given.values()) == steps * batch and given["counting"] == 69  # 0.1 of its 694 rows
    assert given["three"] / given["sums"] == pytest.approx(5 / 4, rel=0.01)
    for name in given:
        assert last[f"eval/{name}/loss"] < middle[f"eval/{name}/loss"] - 0.01, name


@pytest.mark.slow
def test_the_streamed_example_reads_its_rows_from_a_server(tmp_path):
    """From random weights."""
    for name in ("make_data", "sources"):
        tiny_runs.load_example(f"arithmetic/{name}.py").make(tmp_path)
    with serving(tmp_path) as site:
        text = STREAMED.read_text().replace("http://127.0.0.1:8000", site.root)
        config = yaml.safe_load(text.replace("runs/arithmetic-data", str(tmp_path)))
        config["output_dir"], batch = str(tmp_path / "run"), config["train"]["global_batch_size"]
        config["model"] |= {"path": str(tmp_path / "model"), "init": "random"}
        config["train"] |= {"steps": 4, "eval_every": 2, "eval_batches": 1}
        config["optimizer"] |= {"warmup_steps": 1}
        assert harness.run_case(1, "tests.trainers.cases:train", config=config)[:2] == ("done", "")
        assert {name for name, _ in site.asked} == {"three.jsonl"}
    rows = read(tmp_path / "run" / "metrics.jsonl")
    assert [rows[-1][f"data/{name}/rows"] for name in ("three", "sums")] == [4 * batch / 2] * 2
    assert rows[4]["eval/three/loss"] < rows[2]["eval/three/loss"] < rows[0]["eval/three/loss"]


def test_pairs_of_gsm8k_differ_in_a_number_or_are_of_another_problem(tmp_path):
    example, rows = tiny_runs.load_example("gsm8k/pairs.py"), tiny_runs.REPO / "examples" / "gsm8k" / "sample.jsonl"
    example.TRAIN, example.HELD_OUT = 16, 4
    example.main(str(rows), tmp_path)
    made = {name: read_rows(tmp_path / f"{name}.jsonl") for name in ("train", "number", "problem")}
    assert [len(made[name]) for name in made] == [16, 4, 4]
    assert not {row["prompt"] for row in made["train"]} & {row["prompt"] for row in made["number"]}
    right = {row["question"]: row["answer"].split("#### ")[1] for row in read_rows(rows)}
    for row in [*made["train"], *made["number"], *made["problem"]]:
        chosen, rejected = (row[name].split("#### ") for name in ("chosen", "rejected"))
        assert chosen[1] == right[row["prompt"]] and row["chosen"] != row["rejected"] and "<<" not in "".join(chosen)
    for row in made["number"]:
        chosen, rejected = row["chosen"], row["rejected"]
        assert re.sub(r"\d+", "", chosen) == re.sub(r"\d+", "", rejected)
        assert chosen.split("#### ")[1] != rejected.split("#### ")[1]


@pytest.mark.slow
def test_a_cut_of_a_model_learns_from_it_on_rows_and_on_what_it_samples(tmp_path):
    """Two steps of each of the two configs, one after the other; the model is a random one of three layers."""
    example, folder, teacher = tiny_runs.load_example("gsm8k/cut.py"), tmp_path / "cut", str(tmp_path / "teacher")
    rows = str(tiny_runs.REPO / "examples" / "gsm8k" / "sample.jsonl")
    with pytest.raises(SystemExit, match="has 48 rows, and 368 are needed"):
        example.main(teacher, rows, folder)
    tokenizer = make_tokenizer()
    tiny.make_model(teacher, "qwen3", layers=3, vocab=len(tokenizer))
    tokenizer.save_pretrained(teacher)
    example.TRAIN, example.EVAL, example.PROMPTS = slice(0, 8), slice(8, 12), slice(0, 16)
    example.main(teacher, rows, folder)
    student, layers = (AutoModelForCausalLM.from_pretrained(of).model.layers for of in (folder / "student", teacher))
    for ours, theirs in zip(student, (layers[0], layers[2]), strict=True):
        assert all(torch.equal(value, theirs.state_dict()[name]) for name, value in ours.state_dict().items())

    def config(name: str) -> dict[str, Any]:
        text = (tiny_runs.REPO / "examples" / "gsm8k" / f"{name}.yaml").read_text()
        return yaml.safe_load(
            text.replace("runs/cut", str(folder)).replace("HuggingFaceTB/SmolLM2-135M-Instruct", teacher)
        )

    distill, opd = config("distill"), config("opd")
    distill["data"]["max_length"], opd["data"]["max_prompt_length"] = 1024, 1024
    distill["train"] = {"steps": 2, "global_batch_size": 4, "eval_every": 1}
    opd["train"]["steps"] = 2
    for one in (distill["optimizer"], opd["actor"]["optimizer"]):
        one["warmup_steps"] = 1
    assert harness.run_case(1, "tests.trainers.cases:train", config=distill)[:2] == ("done", "")
    assert harness.run_case(1, "tests.trainers.rl.cases:train", config=opd)[:2] == ("done", "")
    _, first, last = read(folder / "distilled" / "metrics.jsonl")
    assert last["eval/distill/divergence"] < first["eval/distill/divergence"]
    assert "actor/sequence_kl" in read(folder / "on-policy" / "metrics.jsonl")[-1]


def read_rows(path: pathlib.Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


ENVIRONMENT = os.environ | {"PYTHONPATH": str(tiny_runs.REPO), "OMP_NUM_THREADS": "1"}


def learns(folder: pathlib.Path, *arguments: str, points: float = 30.0, **environment: str) -> str:
    """What a program of the example prints, whose last line on exact match has so many points more after than before."""
    if not (folder / "examples").exists():
        os.symlink(tiny_runs.REPO / "examples", folder / "examples")
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, timeout=1200,
        env=ENVIRONMENT | environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    line = [line for line in done.stdout.splitlines() if "exact match" in line and "before" in line][-1]
    before, after = (float(part.split()[-1]) for part in line.split("%")[:2])
    assert after - before >= points, line
    return done.stdout


@pytest.mark.nightly
def test_the_quickstart_learns_to_add(tmp_path):
    said = learns(tmp_path, "examples/arithmetic/quickstart.py")
    assert float(said.split("% before, ")[1].split("%")[0]) >= 80.0, said


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """The folder of a quickstart that ended where GRPO goes on, after 175 of its steps, and what it printed."""
    folder = tmp_path_factory.mktemp("quickstart")
    short = ["train.steps=175", "optimizer.decay_steps=450", "train.eval_every=null", "engine.parallel.tp=1"]
    return folder, learns(folder, "examples/arithmetic/quickstart.py", "--sft-only", *short)


@pytest.mark.slow
def test_the_quickstart_and_its_grpo_run(tmp_path):
    """A few steps of each; that they learn is the nightly tier's."""
    short = ["train.steps=8", "optimizer.warmup_steps=4", "train.eval_every=null", "engine.parallel.tp=1"]
    said = learns(tmp_path, "examples/arithmetic/quickstart.py", "--sft-only", *short, points=-100.0)
    assert "What to try next:" in said and "runs/arithmetic/hf" in said
    shutil.copytree(tmp_path / "runs/arithmetic/hf", tmp_path / "runs/arithmetic-half/hf")
    short = ["train.steps=2", "actor.optimizer.warmup_steps=1", "train.eval_every=null", "checkpoint.best=null"]
    learns(tmp_path, "examples/arithmetic/reinforce.py", "grpo", *short, points=-100.0)


@pytest.mark.nightly
def test_a_third_of_the_quickstart_and_20_steps_of_its_grpo_learn_to_add(half):
    folder, said = half
    short = ["train.steps=20", "train.eval_every=null", "checkpoint.best=null"]
    said = learns(folder, "examples/arithmetic/reinforce.py", "grpo", *short, points=10.0)
    assert "convert export" in said, "the run made its first steps again"


@pytest.mark.nightly
def test_the_loop_over_http_learns_to_add(half):
    """By the real client, from the model of the quickstart that the server has."""
    folder, _ = half
    shutil.copytree(folder / "runs/arithmetic/hf", folder / "runs/arithmetic-half/hf", dirs_exist_ok=True)
    command = [sys.executable, "-u", "-m", "mrl", "serve", "examples/arithmetic/serve.yaml", "--port", "0"]
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as server:
        try:
            urls = (re.search(r"TINKER_BASE_URL=(\S+)", line) for line in server.stdout)
            url = next(found[1] for found in urls if found is not None)
            reach = {"TINKER_BASE_URL": url, "TINKER_API_KEY": "tml-local", "TINKER_TELEMETRY": "0"}
            learns(folder, "examples/arithmetic/over_http.py", "20", points=10.0, **reach)
        finally:
            server.terminate()
    assert server.returncode == 75


@pytest.mark.nightly
def test_ppo_of_the_quickstart_learns_to_add_from_the_same_model(tmp_path):
    """Without the supervised run's checkpoint its first steps are made again."""
    assert "that of step 175 of the supervised run" in learns(tmp_path, "examples/arithmetic/reinforce.py", "ppo")


def test_next_commands_name_files_that_exist():
    text = (tiny_runs.REPO / "examples" / "arithmetic" / "quickstart.py").read_text()
    assert "examples/gsm8k/README.md" in text and pathlib.Path(tiny_runs.REPO, "examples/gsm8k/README.md").exists()
