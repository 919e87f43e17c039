"""`rollout.backend: auto`: when it is vLLM, what a dry run may say of it, and that a resume and all ranks have one choice."""

from __future__ import annotations

import pathlib

import pytest
import torch
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.commands.ppo import COMMAND
from mrl.config.load import from_dict, load_config
from mrl.config.ppo import PPOConfig, RolloutConfig
from mrl.engine import atomic_checkpoint, collective
from mrl.errors import ConfigError
from mrl.launch import backend, preflight, start
from mrl.launch.environment import JoinedWorld
from mrl.ops import devices
from mrl.rollout import vllm_start
from mrl.trainers.run_directory import RunDirectory
from tests.bad_input.mistakes import PPO_CONFIG, Workspace
from tests.engine.harness import run_case
from tests.resume.kills import are_gone

AUTO = "rollout.backend=auto"
ANY = "actor.engine.device=auto"
INVARIANT = "actor.engine={device: auto, batch_invariant: true, micro_batch: {size: 1}}"


@pytest.fixture
def folder(tmp_path, monkeypatch) -> pathlib.Path:
    Workspace(tmp_path).make()
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


@pytest.fixture
def on_gpu(monkeypatch) -> None:
    monkeypatch.setattr(devices, "has_gpu", lambda: True)


def install(monkeypatch, folder: pathlib.Path, version: str | None) -> None:
    """Puts a package vllm of a version where Python looks first. None: without metadata."""
    (folder / "site" / "vllm").mkdir(parents=True)
    (folder / "site" / "vllm" / "__init__.py").write_text("raise ImportError('libcudart.so.13 is not there')\n")
    if version is not None:
        metadata = folder / "site" / f"vllm-{version}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(folder / "site"))


def why_of(*overrides: str, world_size: int = 1, fixed: bool = False) -> tuple[str | None, bool]:
    config = load_config("ppo.yaml", [AUTO, *overrides], PPOConfig)
    parts = preflight.check_files(COMMAND, config, there=False)
    return backend.why_native(COMMAND, config, parts, world_size, fixed=fixed)


@pytest.mark.parametrize(
    "overrides, world_size, words",
    [
        (("actor.engine.device=cpu",), 1, "the actor is on the CPU"),
        ((INVARIANT,), 1, "actor.engine.batch_invariant: value true does not reach rollout.backend vllm"),
        ((ANY, "rollout.ranks=1", "rollout.async_level=1"), 2, "rollout.ranks: value 1"),
    ],
)  # fmt: skip
def test_keys_decide_on_any_machine(folder, on_gpu, overrides, world_size, words):
    why, everywhere = why_of(*overrides, world_size=world_size)
    assert why is not None and why.startswith(words) and everywhere


@pytest.mark.parametrize("fixed", [False, True])
def test_so_do_the_processes_if_the_user_has_said_how_many(folder, on_gpu, fixed):
    why, everywhere = why_of(ANY, "rollout.server.tp=2", world_size=3, fixed=fixed)
    assert why is not None and "tp: value 2 does not divide the number of processes, 3" in why and everywhere == fixed


@pytest.mark.parametrize(
    "ran, version, words",
    [
        ((), "0.32.0", "no version of vLLM has run to its end on a GPU yet; rollout.backend=vllm takes it"),
        (("0.32.0",), "0.26.0", "the vLLM here, 0.26.0, has not run to its end on a GPU yet"),
        (("0.32.0",), "none", "needs vLLM beside mrl, and it is not installed"),
        (("0.32.0",), "0.32.0+cu130", "cannot be imported (ImportError: libcudart.so.13 is not there)"),
    ],
)
def test_so_does_what_is_installed_on_this_one(folder, on_gpu, monkeypatch, ran, version, words):
    if version != "none":
        install(monkeypatch, folder, version)
    monkeypatch.setattr(vllm_start, "RAN_ON_GPUS", ran)
    why, everywhere = why_of(ANY)
    assert why is not None and words in why and not everywhere


@pytest.mark.parametrize("version", ["0.1.dev1+gabc1234", None])
def test_an_unknown_version_is_one_line(folder, monkeypatch, version):
    install(monkeypatch, folder, version)
    line = vllm_start.check_version(vllm_start.installed())
    assert line is not None and line.endswith(f"the one here is {version or 'of an unknown version'}")


def test_without_a_gpu_it_is_native(folder, monkeypatch):
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    assert why_of(ANY) == ("torch sees no GPU", False)


def test_servers_are_named():
    for keys in ("{urls: ['http://a:1']}", "{sleep: true}"):
        with pytest.raises(
            ConfigError, match=r"rollout.backend auto, which asks no servers; set rollout.backend to vllm"
        ):
            COMMAND.check(config_of(server=yaml.safe_load(keys)))


def config_of(**rollout) -> PPOConfig:
    return from_dict({**PPO_CONFIG, "rollout": {**PPO_CONFIG["rollout"], "backend": "auto", **rollout}}, PPOConfig)


def run(monkeypatch, *overrides: str) -> tuple[RolloutConfig | None, list[str], int]:
    """The keys that the trainer gets, lines, and the exit code."""
    seen: list[PPOConfig] = []
    monkeypatch.setattr(start, "trainer_of", lambda command: lambda config, line: seen.append(config))
    made = CliRunner().invoke(cli.main, ["ppo", "ppo.yaml", AUTO, *overrides])
    return (seen[0].rollout if seen else None), (made.stdout + made.stderr).splitlines(), made.exit_code


def test_a_run_says_what_it_chose_and_reads_the_keys_of_that(folder, monkeypatch):
    rollout, lines, _ = run(monkeypatch, "rollout.server.memory_fraction=0.8", "rollout.prefill_tokens=99")
    assert rollout is not None and (rollout.backend, rollout.prefill_tokens) == ("native", 99)
    assert rollout.server == RolloutConfig().server
    assert "rollout.backend: native (auto; the actor is on the CPU)" in lines
    monkeypatch.setattr(backend, "why_native", lambda *_, **__: (None, False))
    rollout, lines, _ = run(monkeypatch, "rollout.server.memory_fraction=0.8", "rollout.prefill_tokens=99")
    assert rollout is not None and (rollout.backend, rollout.server.memory_fraction) == ("vllm", 0.8)
    assert rollout.prefill_tokens == RolloutConfig().prefill_tokens


@pytest.mark.parametrize("at", ["run", "elsewhere"])
def test_a_resume_keeps_it(folder, monkeypatch, at):
    """Also if it is not here: another sampler would go on with other samples."""
    saved = load_config("ppo.yaml", ["rollout.backend=vllm", f"output_dir={at}"], PPOConfig)
    RunDirectory(pathlib.Path(at)).prepare(saved, "mrl")
    with atomic_checkpoint.writing(f"{at}/checkpoints", 1, backend="megatron") as path:
        pathlib.Path(path, "weights").write_text("w")
    resume = [] if at == "run" else [f"checkpoint.resume={at}/checkpoints"]
    rollout, lines, code = run(monkeypatch, *resume)
    assert rollout is None and code == 2 and "it is not installed; install it here" in lines[-1]
    install(monkeypatch, folder, "0.32.0")
    rollout, lines, _ = run(monkeypatch, *resume)
    assert rollout is not None and rollout.backend == "vllm"
    file = folder / at / "config.yaml"
    assert f"rollout.backend: vllm (auto; {file} has it)" in lines
    again = CliRunner().invoke(cli.main, ["ppo", "ppo.yaml", AUTO, *resume, "--dry-run"])
    assert yaml.safe_load(again.stdout)["rollout"]["backend"] == "vllm", again.output


def test_a_dry_run_says_what_is_known(folder, monkeypatch):
    def said(*overrides: str) -> str:
        made = CliRunner().invoke(cli.main, ["ppo", "ppo.yaml", AUTO, *overrides, "--dry-run"])
        assert yaml.safe_load(made.stdout)["rollout"]["backend"] == "auto", made.output
        (line,) = [line for line in made.stdout.splitlines() if line.startswith("# rollout.backend:")]
        return line

    assert said() == "# rollout.backend: auto is native (the actor is on the CPU)"
    monkeypatch.setattr(devices, "has_gpu", lambda: False)
    here = "on this machine; a run chooses where it starts"
    assert said(ANY) == f"# rollout.backend: auto would be native, because torch sees no GPU, {here}"


def test_all_ranks_have_the_choice_of_the_first():
    assert run_case(2, "tests.launch.test_backend:chosen_by_ranks") == ["vllm", "vllm"]


def chosen_by_ranks() -> list[str]:
    """Only the first one's machine has vLLM."""
    with pytest.MonkeyPatch.context() as patch:
        why = None if torch.distributed.get_rank() == 0 else "vLLM is not installed"
        patch.setattr(backend, "why_native", lambda *_, **__: (why, False))
        joined = JoinedWorld("torchrun", torch.distributed.get_rank(), 2, {})
        config, _ = backend.choose(COMMAND, config_of(), [], 2, joined)
    return list(collective.all_ranks().gather(config.rollout.backend))


def test_a_question_that_takes_too_long_ends(folder, monkeypatch):
    """With the processes that vLLM has started."""
    install(monkeypatch, folder, "0.32.0")
    hang = """
import pathlib, subprocess, time
child = subprocess.Popen(["sleep", "60"])
pathlib.Path(__file__).with_name("child").write_text(str(child.pid))
time.sleep(60)
"""
    (folder / "site" / "vllm" / "__init__.py").write_text(hang)
    monkeypatch.setattr(backend, "ASK_S", 5)
    assert backend.ask_vllm({}, gpu=True) == "vLLM does not say within 5 s whether it takes the model"
    assert are_gone([int((folder / "site" / "vllm" / "child").read_text())])
