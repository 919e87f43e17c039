"""The command line: what it imports, prints and exits with. The trainer is replaced by a function here."""

from __future__ import annotations

import importlib.metadata
import itertools
import os
import pathlib
import shlex
import signal
import subprocess
import sys

import click
import pytest
import yaml
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from mrl import __version__, cli
from mrl.config.load import dump_config, from_dict, load_config
from mrl.config.ppo import PPOConfig
from mrl.engine.megatron.checks import MegatronChecks
from mrl.errors import DataError, Stopped
from mrl.launch import local, start
from tests.bad_input.mistakes import Workspace
from tests.tiers import in_tiers

HEAVY = ("torch", "jinja2", "megatron", "transformers", "numpy", "wandb", "datasets", "yaml", "rich", "pyarrow",
         "matplotlib", "plotly")  # fmt: skip


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    made = Workspace(tmp_path)
    made.make()
    monkeypatch.chdir(tmp_path)
    for name in [n for n in os.environ if n.startswith("SLURM_") or n in ("RANK", "WORLD_SIZE")]:
        monkeypatch.delenv(name)
    return made


def invoke(*args: str):
    return CliRunner().invoke(cli.main, list(args))


def train_with(monkeypatch, function) -> None:
    monkeypatch.setattr(start, "trainer_of", lambda command: function)


HELP = ("--help", "--version", "sft --help", "ppo --help", "config", "config ppo", "slurm --help", "doctor --help",
        "slurm submit --help", "convert --help", "convert import --help", "report --help")  # fmt: skip


def test_help_imports_nothing_heavy():
    code = (
        "import sys, mrl.cli\n"
        f"for words in {HELP}:\n"
        "    try: mrl.cli.main(words.split())\n"
        "    except SystemExit as end: assert end.code == 0, (words, end.code)\n"
        f"    assert not {{*{HEAVY}}} & sys.modules.keys(), (words, {{*{HEAVY}}} & sys.modules.keys())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


def test_version_and_help():
    assert invoke("--version").output == f"mrl, version {__version__}\n"
    assert importlib.metadata.version("mrl") == __version__
    assert invoke("-h").output == invoke("--help").output


def test_config_prints_a_section_or_what_has_a_text():
    rollout = invoke("config", "rollout").output
    assert rollout.startswith("rollout: how completions are sampled\n\n  rollout.backend  (default native; one of")
    assert invoke("config", "ppo", "rollout").output == rollout and "actor." not in rollout
    assert invoke("config", "algorithm.clip_low").output.count("(default") == 1
    assert invoke("config").output == invoke("config", "sft").output != invoke("config", "rm").output
    clip = invoke("config", "--grep", "clip").output
    assert "== mrl sft ==" in clip and "  optimizer.clip_grad  (" in clip and "  algorithm.clip_high  (" in clip
    assert invoke("config", "ppo", "critic", "--grep", "CLIP").output.count("(default") == 1
    for names, says in (
        (["rolout"], "has no section or key rolout; did you mean rollout?"),
        (["sft", "zzz"], "mrl sft has no section or key zzz; sections are output_dir, seed, model, "),
        (["sft", "--grep", "nowhere"], "with the text 'nowhere'"),
    ):
        refused = invoke("config", *names)
        assert (refused.exit_code, says in refused.stderr) == (2, True), refused.stderr


def test_a_config_of_the_other_command_is_told_its_own(workspace):
    for command, file, own in (("sft", "ppo.yaml", "ppo"), ("ppo", "config.yaml", "sft"), ("sft", "dpo.yaml", "dpo")):
        refused = invoke(command, file, "train.steps=3")
        line = f"mrl: {file}: has the sections of a config of mrl {own}; run mrl {own} {file}\n"
        assert (refused.exit_code, refused.stderr) == (2, line)
    assert "give one of dpo, ipo, kto" in invoke("dpo", "rm.yaml").stderr  # which has the same sections
    of_override = invoke("sft", "config.yaml", "actor.ppo_epochs=1")  # the file is none of another command
    assert 'actor: value {"ppo_epochs": 1} is given to an unknown key' in of_override.stderr


def commands(command, path="mrl"):
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{path} {name}")


@pytest.mark.parametrize("path", list(commands(cli.main)))
def test_every_help_ends_with_examples_that_are_of_it(path):
    name, *rest = path.split()
    _, _, examples = invoke(*rest, "--help").output.partition("\n  Examples:\n")
    lines = [line.strip() for line in examples.splitlines()]
    assert lines and any(f"{path} " in line or line == path for line in lines), examples
    for line in lines:
        words = shlex.split(line.partition("   ")[0].partition(" -m ")[2] or line.partition("   ")[0])
        command, arguments = cli.main, words[1:]
        while isinstance(command, click.Group):
            command, arguments = command.commands[arguments[0]], arguments[1:]
        arguments = list(itertools.takewhile(lambda word: word not in ("<", ">"), arguments))
        with command.make_context("mrl", arguments):
            pass


def complete(*words: str) -> list[str]:
    """What a shell would offer for the last word."""
    return [
        item.value
        for item in ShellComplete(cli.main, {}, "mrl", "_MRL_COMPLETE").get_completions(list(words[:-1]), words[-1])
    ]


def test_a_shell_completes_keys_and_choices():
    assert complete("ppo", "c.yaml", "rollout.tem") == ["rollout.temperature="]
    assert complete("sft", "c.yaml", "train.steps=3", "rollout.tem") == []
    assert complete("ppo", "c.yaml", "rollout.backend=v") == ["rollout.backend=vllm"]
    assert complete("slurm", "submit", "ppo", "c.yaml", "critic.engine.parallel.t") == ["critic.engine.parallel.tp="]
    assert complete("sft", "c.yaml", "data.packing=") == ["data.packing=true", "data.packing=false"]
    assert complete("check", "c.yaml", "rollout.tem") == ["rollout.temperature="]
    assert complete("sft", "c.yaml", "unknown=") == [] and "convert" in complete("c")


NO_GPU = (  # in float32
    "local (torch sees no GPU; with one, transformer-engine and flash-attn 2 it is local too: transformer-engine is not taken, as its "
    "attention in float32 is the unfused one, whose memory grows with the square of a row)"
)


def test_dry_run_prints_a_config_that_loads_and_the_layout(workspace):
    before = workspace.snapshot()
    result = invoke("sft", "config.yaml", "engine.parallel.tp=2", "--nproc", "4", "--dry-run")
    assert result.exit_code == 0, result.output
    assert from_dict(yaml.safe_load(result.stdout)) == load_config("config.yaml", ["engine.parallel.tp=2"])
    *comments, no_row = [line for line in result.stdout.splitlines() if line.startswith("# ")]
    assert no_row.startswith("# data: no row was read: model: the folder holds no tokenizer") and comments == [
        f"# engine.layer_spec: {NO_GPU}",
        "# layout: tp2+spxdp2 on 4 processes",
        "# micro-batch: up to 4096 tokens",
        "# length: 2 steps of 4 sequences a step",
    ]
    assert workspace.snapshot() == before


def test_dry_run_tells_te_by_rules_and_a_run_needs_a_gpu(workspace, monkeypatch):
    said = invoke("sft", "config.yaml", "engine.layer_spec=te", "--dry-run")
    assert said.exit_code == 0, said.output
    assert "# engine.layer_spec: te (as configured; torch sees no GPU, and a run needs one" in said.stdout
    refused = invoke("sft", "config.yaml", "engine.layer_spec=te", "--nproc", "1")
    assert refused.exit_code == 2 and 'engine.layer_spec: value "te" needs a GPU, and torch sees none' in refused.stderr
    kernel = invoke("sft", "config.yaml", "engine.attention=unfused", "--dry-run")
    assert kernel.exit_code == 0 and "# engine.layer_spec: te (" in kernel.stdout, kernel.output
    for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN", "NVTE_UNFUSED_ATTN"):
        monkeypatch.setenv(name, "0")
    refused = invoke("sft", "config.yaml", "engine.layer_spec=te", "--dry-run")
    assert refused.exit_code == 2 and "has no kernel for attention on any GPU with NVTE_FLASH_ATTN=0" in refused.stderr


def test_dry_run_of_ppo_prints_a_config_that_loads_and_each_role(workspace):
    """The processes are the fewest that all layouts fit on together: lcm(2, 3) of the roles that the algorithm needs."""
    overrides = ["algorithm.name=ppo", "actor.engine.parallel.tp=2", "critic.engine={backend: fsdp, device: cpu}"]
    overrides += ["reference.engine={device: cpu, parallel: {pp: 3}}", "algorithm.epochs=3", "train.steps=12"]
    overrides += ["reference.engine.micro_batch.size=2", "algorithm.mini_batch_size=8"]
    before = workspace.snapshot()
    result = invoke("ppo", "ppo.yaml", *overrides, "--dry-run")
    assert result.exit_code == 0, result.output
    assert from_dict(yaml.safe_load(result.stdout), PPOConfig) == load_config("ppo.yaml", overrides, PPOConfig)
    *comments, no_row = [line for line in result.stdout.splitlines() if line.startswith("# ")]
    assert no_row.startswith("# data: no row was read: ") and comments == [
        *(f"# {role}.engine.layer_spec: {NO_GPU}" for role in ("actor", "reference")),
        "# actor: megatron tp2+spxdp3 on 6 processes, micro-batches of up to 4096 tokens",
        "# critic: fsdp dp6 on 6 processes, micro-batches of up to 4096 tokens",
        "# reference: megatron pp3xdp2 on 6 processes, micro-batches of 2 sequences",
        "# algorithm: advantage=gae, objective=clip, ratio=token, aggregation=token_mean, whiten=true, gamma=1.0, lam=0.95, "
        "clip_low=0.2, clip_high=0.2, dual_clip=0.0, value_clip=0.2, kl_in=reward, kl_estimator=k1, kl_coef=0.02, "
        "kl_target=0.0, entropy_coef=0.0, correction=none, dynamic_sampling=false, overlong_fraction=0.0",
        "# iteration: 2 prompts x 4 samples, trained on in 3 steps of 8 sequences",
        "# length: 12 steps, 4 iterations",
    ]
    assert workspace.snapshot() == before
    epochs = invoke("ppo", "ppo.yaml", "train.steps=null", "--dry-run").stdout.splitlines()
    assert epochs[-5] == "# reference: megatron dp1 on 1 process, micro-batches of up to 4096 tokens"
    assert epochs[-3:-1] == [
        "# iteration: 2 prompts x 4 samples, trained on in 2 steps of 4 sequences",
        "# length: 1 epoch of the prompts, in whole iterations",
    ]


def test_a_dry_run_loads_the_code_that_the_run_would(workspace):
    (workspace.root / "mine.py").write_text("def good(prompt, completion, row):\n    return 1.0\n")
    reward = "rewards.functions=[{{function: 'mine.py:{}'}}]"
    assert invoke("ppo", "ppo.yaml", reward.format("good"), "--dry-run").exit_code == 0
    bad = invoke("ppo", "ppo.yaml", reward.format("bad"), "--dry-run")
    assert bad.exit_code == 2
    assert bad.stderr == (
        "mrl: rewards.functions[0].function: mine.py:bad: the file has no function bad; give the name of one\n"
    )
    world = invoke("ppo", "ppo.yaml", "rollout.environment=mine.py:World", "--dry-run")
    assert world.exit_code == 2 and "rollout.environment: mine.py:World: the file has no class World" in world.stderr


def test_ppo_takes_its_own_trainer(workspace, monkeypatch):
    seen, calls = [], []
    monkeypatch.setattr(start, "trainer_of", lambda command: lambda *given: seen.append((command.name, *given)))
    monkeypatch.setattr(local, "launch", lambda *args, **kept: calls.append((*args, kept)))
    assert invoke("ppo", "ppo.yaml").exit_code == 0
    assert invoke("ppo", "ppo.yaml", "--nproc", "2").exit_code == 0
    [(command, config, _)], [(target, launched, _, nproc, kept)] = seen, calls
    assert config == launched == load_config("ppo.yaml", root=PPOConfig)
    assert (command, target, nproc) == ("ppo", "mrl.trainers.ppo:run", 2)
    assert kept == {"log_dir": pathlib.Path("run/logs").absolute(), "quiet": False}


def test_one_role_on_the_cpu_keeps_all_off_the_gpu(workspace, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    args = ("actor.engine.device=auto", "reference.engine.device=cpu")
    assert invoke("ppo", "ppo.yaml", *args, "--dry-run").exit_code == 0
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""


def test_dry_run_counts_processes_by_the_layout(workspace):
    # cpu: where other tests of this process had megatron in it, torch counts a GPU
    engine = "engine={backend: fsdp, device: cpu, fsdp: {replicate: 2}}"
    assert "on 2 processes" in invoke("sft", "config.yaml", engine, "--dry-run").stdout


def test_an_engine_is_asked_about_the_sequences_of_the_run(workspace, monkeypatch):
    asked = []
    monkeypatch.setattr(
        MegatronChecks, "check_model", lambda engine, dims, hf_config, sequences: asked.append(sequences)
    )
    sft, ppo = ("sft", "config.yaml", "data.max_length=33"), ("ppo", "ppo.yaml", "data.packing=false")
    for args in (sft, (*sft, "data.packing=false"), ppo):
        assert invoke(*args, "--dry-run").exit_code == 0
    assert [(s.packed, s.generated) for s in asked] == [
        (True, False),
        (False, False),
        *[(False, True)] * (len(asked) - 2),
    ]
    assert len(asked) > 2 and {(s.longest, s.key) for s in asked[:2]} == {(33, "data.max_length")}


def test_the_trainer_gets_the_config_and_the_command_line(workspace, monkeypatch):
    seen = []
    train_with(monkeypatch, lambda config, command_line: seen.append((config, command_line, dict(os.environ))))
    monkeypatch.setattr(sys, "argv", ["/bin/mrl", "sft", "config.yaml", "data.columns={a: b}"])
    result = invoke("sft", "config.yaml", "data.columns={a: b}")
    assert result.exit_code == 0, result.output
    [(config, command_line, environ)] = seen
    assert dump_config(config) == dump_config(load_config("config.yaml", ["data.columns={a: b}"]))
    assert command_line == "mrl sft config.yaml 'data.columns={a: b}'"
    assert not {"RANK", "WORLD_SIZE", "MASTER_PORT"} & environ.keys(), "one process meets nobody, on no port"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (DataError("rows.jsonl:3: is not an object;\n give one"), 2, "mrl: rows.jsonl:3: is not an object; give one\n"),
        (PermissionError(13, "no", "a"), 2, "mrl: a: may not be read or written by this user; give it the right\n"),
        (Stopped("stopped at step 3"), 75, "mrl: stopped at step 3\n"),
        (KeyboardInterrupt(), 130, f"mrl: {cli.INTERRUPTED}\n"),
    ],
)
def test_exit_codes(workspace, monkeypatch, error, code, message):
    def fail(config, command_line):
        raise error

    train_with(monkeypatch, fail)
    result = invoke("sft", "config.yaml")
    assert (result.exit_code, result.stderr) == (code, message)


def test_a_failed_rank_is_shown_once(workspace, monkeypatch):
    def fail(*args, **kept):
        raise local.RankFailed("rank 1 failed\nTraceback ...\nZeroDivisionError")

    monkeypatch.setattr(local, "launch", fail)
    result = invoke("sft", "config.yaml", "--nproc", "2")
    assert (result.exit_code, result.stderr) == (1, "mrl: rank 1 failed\nTraceback ...\nZeroDivisionError\n")


def test_under_torchrun_it_joins(workspace, monkeypatch):
    place = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    seen = []
    train_with(monkeypatch, lambda config, command_line: seen.append({n: os.environ[n] for n in place}))
    assert invoke("sft", "config.yaml", "engine.parallel.tp=2").exit_code == 0
    assert seen == [place]
    refused = invoke("sft", "config.yaml", "--nproc", "2")
    assert (refused.exit_code, refused.stderr) == (2, "mrl: rank 1: --nproc: value 2 has no effect under torchrun; leave it out\n")  # fmt: skip
    assert "does not divide the 2 processes" in invoke("sft", "config.yaml", "engine.parallel.tp=4").stderr


def test_under_srun_it_joins(workspace, monkeypatch):
    slurm = {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "gpu[1-2]"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "x")  # so that what the command sets is undone
        monkeypatch.delenv(name)
    seen = []
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    train_with(monkeypatch, lambda config, command_line: seen.append([os.environ[n] for n in names]))
    result = invoke("sft", "config.yaml")
    assert result.exit_code == 0, result.output
    assert seen == [["0", "2", "0", "gpu1"]]


def test_a_crash_in_a_library_says_which_lines_called_it(workspace):
    code = (
        "import ctypes, sys\n"
        "from mrl import cli\n"
        "cli.main = lambda **_: ctypes.string_at(0)\n"
        "cli.command()\n"
    )  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == -signal.SIGSEGV and "Fatal Python error: Segmentation fault" in done.stderr
    assert "cli.py" in done.stderr and "in command" in done.stderr


@pytest.mark.nightly
def test_a_run_whose_output_nobody_reads_says_so(workspace):
    """As `mrl sft ... | head`: a pipe without a reader."""
    ours, theirs = os.pipe()
    os.close(ours)
    code = (
        "import sys\n"
        "from mrl import cli\n"
        "from mrl.launch import start\n"
        "from mrl.trainers import waits\n"
        "start.trainer_of = lambda command: lambda *_: waits.write_line('a step')\n"
        "sys.argv = ['mrl', 'sft', 'config.yaml']\n"
        "cli.command()\n"
    )
    with os.fdopen(theirs, "w") as pipe:
        done = subprocess.run([sys.executable, "-c", code], stdout=pipe, stderr=subprocess.PIPE, text=True)
    line = "mrl: standard output: was closed, as by `| head`; run the same command again, which goes on"
    assert done.returncode == 2 and line in done.stderr and "Traceback" not in done.stderr, done.stderr


ENDINGS = {
    "done": ("None", 0),
    "stopped": ("(_ for _ in ()).throw(Stopped('saved'))", 75),
    "user": ("(_ for _ in ()).throw(DataError('bad'))", 2),
    "fault": ("1 / 0", 1),
    "interrupted": ("(_ for _ in ()).throw(KeyboardInterrupt())", 130),
}


@pytest.mark.parametrize(
    ("joined", "name"),
    in_tiers(
        [],
        [(True, "fault")],
        [*((True, name) for name in ENDINGS), (False, "fault"), (False, "interrupted")],
    ),
)
def test_a_joined_rank_leaves_without_taking_libraries_down(workspace, joined, name):
    """What the interpreter does last, here a module's own finalizer, is not done: it was seen to abort finished runs.

    Nor by a process that nothing joined, as it has loaded PyTorch; it leaves by `atexit` whatever its end was.
    """
    target, expected = ENDINGS[name]
    code = (
        "import atexit, os, sys\n"
        "from mrl import cli\n"
        "from mrl.launch import start\n"
        "from mrl.errors import DataError, Stopped\n"
        "class Late:\n"
        "    def __del__(self, write=os.write): write(1, b'taken down\\n')\n"
        "late = Late()\n"
        "atexit.register(lambda: print('atexit'))\n"
        f"start.trainer_of = lambda command: lambda *_: {target}\n"
        "sys.argv = ['mrl', 'sft', 'config.yaml']\n"
        "print('printed')\n"
        "cli.command()\n"
    )
    place = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29999"} if joined else {}
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | place, capture_output=True, text=True)
    assert done.returncode == expected, done.stderr
    assert done.stderr.count("Traceback") == (name == "fault"), done.stderr
    clean = not joined or expected in (0, 75)
    said = [line for line in done.stdout.splitlines() if not line.endswith(" s so far)")]  # on a slow machine
    assert said == ["printed", *["atexit"] * clean]
