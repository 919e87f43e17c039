"""Every example of the commands' help, run as it stands; and the commands as processes of their own."""

from __future__ import annotations

import json
import pathlib
import shlex
import sys

import pytest

from mrl.commands import eval as eval_command
from mrl.commands import generate as generate_command
from tests.data.tiny_tokenizers import write_jsonl
from tests.engine.harness import run_case
from tests.inference.cases import in_a_shell, mrl
from tests.trainers.rl import tiny_policies

EXAMPLES = [
    line.strip()
    for command in (generate_command.COMMAND, eval_command.COMMAND)
    for line in command.examples.strip().splitlines()
]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> pathlib.Path:
    """A folder with what the examples name: runs/demo, rows, a task, a reward, another model, an earlier result."""
    folder = tmp_path_factory.mktemp("site")
    tiny_policies.make_inputs(folder)
    (folder / "path" / "to").mkdir(parents=True)
    (folder / "other").rename(folder / "path" / "to" / "hf-model")
    config = tiny_policies.make_config(
        folder, folder / "runs" / "demo", actor={"engine": tiny_policies.engine("megatron")}, checkpoint={"every": 2},
        log={"console": "none"},
    )  # fmt: skip
    assert run_case(1, "tests.trainers.rl.cases:train", config=config)[0] == "done"
    write_jsonl(folder / "rows.jsonl", [tiny_policies.prompt([i]) for i in range(3)])
    (folder / "my_rewards.py").write_text("def score(prompt, completion, row):\n    return len(completion) % 2\n")
    (folder / "prompt.txt").write_text("12+30=\n")
    (folder / "task.yaml").write_text("data: rows.jsonl\nreward: exact_match\nmax_new_tokens: 8\n")
    earlier = mrl("eval", "path/to/hf-model", "task.yaml", "--out", "before.json", cwd=folder)
    assert earlier.code == 0, earlier.err
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("line", [line for line in EXAMPLES if "--nproc" not in line])
def test_an_example_of_the_help(site, line):
    """In the order of the help: one reads what another has written. A chat on a terminal is in test_chat.py."""
    command, _, stdin = line.partition(" < ")
    program, *arguments = shlex.split(command)
    assert program == "mrl"
    typed = "12+30=\n/quit\n" if "--chat" in arguments else ""
    done = mrl(*arguments, cwd=site, stdin=(site / stdin).read_text() if stdin else typed)
    assert done.code == 0, done.err
    assert done.out.count("> ") == 2 * ("--chat" in arguments), done.out
    if "--out" in arguments and arguments[0] == "generate":
        assert len((site / "completions.jsonl").read_text().splitlines()) == 3 * 4
    else:
        assert done.out.strip(), done.err


@pytest.mark.nightly
@pytest.mark.parametrize("line", [line for line in EXAMPLES if "--nproc" in line or " < " in line])
def test_an_example_in_processes_of_its_own(site, line):
    done = in_a_shell(line, site)
    assert done.returncode == 0, done.stderr
    alone = mrl("generate", "runs/demo", "--prompt", "12+30=", *(["--greedy"] if "--greedy" in line else []), cwd=site)
    assert done.stdout == alone.out, "on any number of processes it says the same"
    assert "runs/demo" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.nightly
def test_ranks_of_another_launcher(site):
    """Under torchrun; the result comes once."""
    torchrun = f'"{sys.executable}" -m torch.distributed.run --nproc_per_node 2 -m mrl'
    done = in_a_shell(f"{torchrun} eval runs/demo task.yaml --json engine.parallel.pp=2", site)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    alone = json.loads(mrl("eval", "runs/demo", "task.yaml", "--json", cwd=site).out)
    assert found["world_size"] == 2 and found["rows"] == alone["rows"] and found["measures"] == alone["measures"]


GENERATE = ("generate", "./model")
WRONG_ON_ONE_RANK = {
    "no text on stdin": (GENERATE, "mrl: mrl generate: has no prompt; give --prompt TEXT, "),
    "no folder of --out": ((*GENERATE, "--prompt", "x", "--out", "no/where"), "mrl: --out: value 'no/where' cannot"),
    "a folder as --out": ((*GENERATE, "--prompt", "x", "--out", "."), "mrl: --out: value '.' cannot"),
    "no model on the second node": ((*GENERATE, "--prompt", "x"), "mrl: rank 1: MODEL: value './model' does not exist"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG_ON_ONE_RANK)
def test_what_one_rank_of_another_launcher_finds_is_said_once_and_ends_all(folder, tmp_path, name):
    """The model is on the first node alone, so that ranks which do not hear of each other end with another line."""
    arguments, says = WRONG_ON_ONE_RANK[name]
    nodes = [tmp_path / "0", tmp_path / "1"]
    for node in nodes:
        node.mkdir()
    (nodes[0] / "model").symlink_to(folder("qwen3"))
    asked = {"arguments": list(arguments), "folders": [str(node) for node in nodes]}
    ends = run_case(2, "tests.inference.cases:on_all_ranks", timeout_s=60, **asked)
    assert [(end.code, end.out) for end in ends] == [(2, "")] * 2, ends
    lines = [line for end in ends for line in end.err.splitlines() if line.startswith("mrl: ")]
    assert len(lines) == 1 and lines[0].startswith(says), lines


def test_vllm_in_the_processes_gets_the_weights_of_the_model(site):
    """Of a stand-in for vLLM: what is asked of it, and that what it samples comes out. Real ones are in test_vllm.py."""
    out = run_case(1, "tests.inference.cases:with_stand_in_vllm", cwd=str(site))
    assert out["names"] and out["completion"], out


def test_keys_are_completed(site):
    from click.testing import CliRunner

    from mrl import cli

    environ = {"COMP_WORDS": "mrl generate x rollout.t", "COMP_CWORD": "3", "_MRL_COMPLETE": "bash_complete"}
    done = CliRunner().invoke(cli.main, prog_name="mrl", env=environ)
    assert "rollout.temperature=" in done.stdout and "rollout.top_k=" in done.stdout
