"""`auto` in real runs on CPUs: chosen once for a GPU that MRL_PLAN_GPU names, kept by a resume, the same on all ranks.

The numbers themselves are those of tests/plan/test_automatic.py.
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import shutil
import socket
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import yaml

from mrl.commands.ppo import PPO
from mrl.commands.sft import SFT
from mrl.config.load import load_config, read_yaml
from mrl.config.ppo import PPOConfig
from mrl.engine import atomic_checkpoint
from mrl.errors import ConfigError, UserError
from mrl.launch import automatic, planning, preflight, start
from mrl.launch.environment import JoinedWorld
from mrl.rollout import vllm_start
from mrl.trainers.run_directory import RunDirectory
from mrl.trainers.run_lock import RunLock
from tests.config.test_load import merged
from tests.forks import forks
from tests.launch import gpu_queries
from tests.resume.kills import are_gone
from tests.tiers import nightly_but
from tests.trainers import tiny_runs
from tests.trainers.rl import tiny_policies
from tests.trainers.tiny_runs import REPO

SMALL = "GB=4.7734"  # 0.9 of it, less 4 GiB, are 1.0 MiB: some sequences of an update fit, and sampling does not
ROLES = ("critic", "reference", "reward")
LONGEST = 40


def run(words: list[str], folder: pathlib.Path, **variables: str) -> str:
    """Runs `mrl`. Returns what it printed."""
    log = folder / "log"
    log.write_text("")
    code = forks().start(folder, log, os.environ | {"PYTHONPATH": str(REPO)} | variables, words).wait(300)
    assert code == 0, log.read_text()
    return log.read_text()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    tiny_policies.make_inputs(folder)
    return folder


def auto_engine(backend: str) -> dict:
    return {"backend": backend, "device": "cpu", "micro_batch": {"tokens": "auto"}}


def ppo(inputs: pathlib.Path, folder: pathlib.Path, backend: str, sections: str) -> pathlib.Path:
    """Writes a config of all roles, whose engine is the actor's or its own."""
    config = tiny_policies.make_config(
        inputs, folder / "run", "ppo", reward={"model": {"path": str(inputs / "scorer")}}, rollout={"cache_tokens": "auto", "backend": "auto"},
        algorithm={"kl_in": "loss", "kl_coef": 0.01},
    )  # fmt: skip
    config["actor"]["engine"] = auto_engine(backend)
    if sections == "own":
        config = merged(config, {role: {"engine": auto_engine(backend)} for role in ROLES})
    file = folder / "ppo.yaml"
    file.write_text(yaml.safe_dump(config))
    return file


def numbers(folder: pathlib.Path, keys: list[str]) -> dict[str, int]:
    saved = read_yaml(folder / "run" / "config.yaml")
    return {key: automatic.value_at(saved, key) for key in keys}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "sections"), nightly_but([("megatron", "inherited")], [("megatron", "inherited"), ("fsdp", "own")])
)
def test_a_run_chooses_once_and_its_resumes_keep_the_numbers(inputs, tmp_path, backend, sections):
    file = ppo(inputs, tmp_path, backend, sections)
    config = load_config(file, root=PPO.root)
    keys = automatic.auto_keys(config)
    own = ROLES if sections == "own" else ()
    assert keys == [*(f"{role}.engine.micro_batch.tokens" for role in ("actor", *own)), "rollout.cache_tokens"]

    said = run(["ppo", str(file)], tmp_path, MRL_PLAN_GPU=SMALL)
    assert "rollout.backend: auto is native, because the actor is on a CPU" in said
    chosen = numbers(tmp_path, keys)
    saved = read_yaml(tmp_path / "run" / "config.yaml")
    assert [saved[role]["engine"] is None for role in ROLES] == [sections == "inherited"] * 3
    fits = {key: backend == "megatron" and "micro_batch" in key for key in keys}
    for key, number in chosen.items():
        most = 480 if key.startswith(("actor", "critic")) else 32768  # forward passes alone take less
        assert LONGEST < number <= most if fits[key] else number == (65536 if "cache" in key else 4096), chosen
        assert f"{key}: auto is {'' if fits[key] else 'the default, '}{number:,}, " in said

    elsewhere = [f"output_dir={tmp_path / 'new'}", f"checkpoint.resume={tmp_path / 'run' / 'checkpoints'}"]
    kept, _ = automatic.with_saved(PPO(), load_config(file, elsewhere, PPO.root))
    assert {key: automatic.value_at(automatic.to_dict(kept), key) for key in keys} == chosen
    longer = [*elsewhere, "rollout.max_new_tokens=100000"]
    assert automatic.with_saved(PPO(), load_config(file, longer, PPO.root))[1] == [], "numbers for shorter sequences"
    (tmp_path / "new").mkdir()
    shutil.copy(tmp_path / "run" / "config.yaml", tmp_path / "new")
    assert automatic.with_saved(PPO(), load_config(file, elsewhere[:1], PPO.root))[1] == [], "no checkpoint is resumed"

    said = run(["ppo", str(file), "train.steps=4", f"{keys[0]}=80"], tmp_path, MRL_PLAN_GPU="h200")
    assert numbers(tmp_path, keys) == chosen | {keys[0]: 80} and "after step 2" in said
    assert f"changed since the checkpoint: {keys[0]}: {chosen[keys[0]]} at the save, 80 now" in said
    assert all(f"{key}: auto is {chosen[key]:,}, as in " in said for key in keys[1:])
    assert not any(f"changed since the checkpoint: {key}" in said for key in (*keys[1:], "rollout.backend"))
    assert "rollout.backend: auto is native, as in " in said


def test_a_resume_keeps_the_numbers_of_a_config_that_a_run_wrote(inputs, tmp_path):
    file, command = ppo(inputs, tmp_path, "megatron", "own"), PPO()
    config = load_config(file, ["rollout.backend=native"], PPO.root)
    keys = automatic.auto_keys(config)
    chosen = {key: 1000 + i for i, key in enumerate(keys)}
    run_folder = tmp_path / "run"
    RunDirectory(run_folder).prepare(automatic.replaced(config, chosen), "mrl")
    assert automatic.with_saved(command, config) == (config, []), "no checkpoint is resumed"
    with atomic_checkpoint.writing(str(run_folder / "checkpoints"), 2, backend="megatron") as path:
        pathlib.Path(path, "weights").write_text("w")
    kept, lines = automatic.with_saved(command, config)
    assert {key: automatic.value_at(automatic.to_dict(kept), key) for key in keys} == chosen
    assert lines == [f"{key}: auto is {n:,}, as in {run_folder / 'config.yaml'}" for key, n in chosen.items()]
    longer = load_config(file, ["rollout.max_new_tokens=100000"], PPO.root)
    assert automatic.with_saved(command, longer)[1] == [], "numbers for shorter sequences"


def of_backend(inputs: pathlib.Path, folder: pathlib.Path, *words: str) -> PPOConfig:
    file = ppo(inputs, folder, "megatron", "inherited")
    return load_config(file, ["actor.engine.device=auto", "rollout.backend=auto", *words], PPO.root)


@pytest.mark.parametrize(
    ("words", "version", "gpus", "name", "why"),
    [
        (["actor.engine.device=cpu"], "0.32.0", 8, "native", "because the actor is on a CPU"),
        ([], None, 8, "native", "because vLLM is not installed beside mrl"),
        ([], "0.33.1", 8, "native", "because mrl is tested with vLLM 0.26 to 0.32, and the one here is 0.33.1"),
        ([], "0.32.0", 0, "native", "because torch sees no GPU"),
        (
            ["rollout.temperature=0.7", "rollout.top_k=20"],
            "0.32.0",
            8,
            "native",
            "because rollout.temperature: value 0.7 with",
        ),
        (["actor.engine.batch_invariant=true"], "0.32.0", 8, "native", "because actor.engine.batch_invariant: "),
        (["rollout.ranks=2", "rollout.async_level=1"], "0.32.0", 8, "native", "because rollout.ranks: "),
        ([], "0.32.0", 8, "vllm", "as all that it needs is here"),
    ],
)
def test_what_samples_is_chosen_by_what_is_here(inputs, tmp_path, monkeypatch, words, version, gpus, name, why):
    """Keys that the other one alone reads have their defaults then; without the choice they would be refused."""
    monkeypatch.setattr(vllm_start, "installed", lambda: version)
    config = of_backend(inputs, tmp_path, "rollout.server.tp=2", "rollout.cache_tokens=5000", *words)
    made, [line] = automatic.with_backend(PPO(), config, lambda: gpus > 0)
    assert line.startswith(f"rollout.backend: auto is {name}, {why}"), line
    rollout = made.rollout
    read = (rollout.backend, rollout.cache_tokens, rollout.server.tp)
    assert read == {"native": ("native", 5000, rollout.ranks or 1), "vllm": ("vllm", 65536, 2)}[name]
    assert automatic.with_backend(PPO(), made, lambda: False) == (made, []), "it is chosen once"


def test_a_resume_keeps_what_samples_whatever_is_installed_now(inputs, tmp_path, monkeypatch):
    monkeypatch.setattr(vllm_start, "installed", lambda: "0.32.0")
    config = of_backend(inputs, tmp_path, "rollout.cache_tokens=5000")
    made, _ = automatic.with_backend(PPO(), config, lambda: True)
    RunDirectory(tmp_path / "run").prepare(made, "mrl")
    monkeypatch.setattr(vllm_start, "installed", lambda: None)
    assert automatic.with_backend(PPO(), config, lambda: True)[0].rollout.backend == "native", (
        "no checkpoint is resumed"
    )
    with atomic_checkpoint.writing(str(tmp_path / "run" / "checkpoints"), 1, backend="megatron") as path:
        pathlib.Path(path, "weights").write_text("w")
    kept, lines = automatic.with_backend(PPO(), config, lambda: True)
    assert kept == made and lines == [f"rollout.backend: auto is vllm, as in {tmp_path / 'run' / 'config.yaml'}"]
    moved = [
        f"output_dir={tmp_path / 'new'}",
        f"checkpoint.resume={tmp_path / 'run' / 'checkpoints'}",
        "rollout.ranks=2",
    ]
    elsewhere = of_backend(inputs, tmp_path, *moved, "rollout.async_level=1")
    assert automatic.with_backend(PPO(), elsewhere, lambda: True)[0].rollout.backend == "native", (
        "ranks are of it alone"
    )
    assert "after step 1" in str(preflight.check_used(PPO(), kept)), "no changed key"


def meeting(monkeypatch, configs: list, given: PPOConfig) -> dict:
    """What each of two ranks of another launcher has of `auto`."""
    store, found = dist.HashStore(), {}
    monkeypatch.setattr(dist, "rendezvous", lambda *_, **__: iter([(store, 0, 2)]))

    def join(rank: int) -> None:
        joined = JoinedWorld("torchrun", rank, 2, {})
        try:
            found[rank] = start._auto_of_rank_0(PPO(), configs[rank], given, [automatic.BACKEND], 2, joined)[0]
        except UserError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=join, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    return found


@pytest.mark.parametrize(("first", "second"), [("native", "vllm"), ("vllm", "native")])
def test_ranks_sample_as_the_first_one_chose(inputs, tmp_path, monkeypatch, first, second):
    """Whatever each saw, with its keys of what samples."""
    words = ("rollout.server.tp=2", "rollout.cache_tokens=5000", "actor.engine.micro_batch.tokens=64")
    given = of_backend(inputs, tmp_path, *words)
    configs = [automatic.sampled_by(given, name) for name in (first, second)]
    assert configs[0] != configs[1]
    assert meeting(monkeypatch, configs, given) == {0: configs[0], 1: configs[0]}


@pytest.mark.parametrize("key", ["urls=[http://h:1]", "concurrency=3"])
def test_keys_of_servers_do_not_go_with_auto(inputs, tmp_path, key):
    with pytest.raises(
        ConfigError,
        match=rf"^rollout.server.{key.partition('=')[0]}: .* by rollout.backend auto, which never uses servers; set that",
    ):
        of_backend(inputs, tmp_path, f"rollout.server.{key}")


@pytest.fixture(scope="module")
def sft(tmp_path_factory):
    """A config of two stages, and its folder."""
    folder = tmp_path_factory.mktemp("sft")
    tiny_runs.make_inputs(folder)
    engine = auto_engine("megatron") | {"parallel": {"pp": 2}}
    config = tiny_runs.make_config(folder, folder / "run", train={"steps": 2}) | {"engine": engine}
    return tiny_runs.write_config(folder / "sft.yaml", config)


def run_ranks(
    sft: pathlib.Path, folder: pathlib.Path, gpus: tuple[str, str] = ("GB=4.773", "GB=4.773")
) -> tuple[list[int], list[str]]:
    """Runs `mrl sft` as two ranks of another launcher. Returns the exit codes, and what they printed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank, gpu in enumerate(gpus):
        place = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        environment = os.environ | place | {"PYTHONPATH": str(REPO), "MRL_PLAN_GPU": gpu}
        ranks.append(
            forks().start(folder, folder / f"log{rank}", environment, ["sft", str(sft), f"output_dir={folder / 'run'}"])
        )
    return [rank.wait(300) for rank in ranks], [(folder / f"log{rank}").read_text() for rank in range(2)]


@pytest.mark.slow
def test_ranks_of_another_launcher_take_the_number_of_the_first(sft, tmp_path):
    """The second would choose 4,096. Its stage would then wait for other micro-batches than the first sends."""
    codes, said = run_ranks(sft, tmp_path, ("GB=4.773", "h200"))
    assert codes == [0, 0], said
    assert "auto is 64, the most tried that leaves 10% of a GPU free by mrl plan" in said[0]
    assert numbers(tmp_path, ["engine.micro_batch.tokens"]) == {"engine.micro_batch.tokens": 64}


@pytest.mark.nightly
def test_ranks_of_another_launcher_are_refused_a_folder_in_use(sft, tmp_path):
    lock = RunLock(tmp_path / "run")
    lock.acquire()
    codes, said = run_ranks(sft, tmp_path)
    lock.release()
    assert codes == [2, 2], said
    assert all("is in use by another run (process " in one for one in said), said


@pytest.mark.parametrize(
    ("query", "limit", "why"),
    [
        (gpu_queries.fail, 180, "RuntimeError: driver"),
        (gpu_queries.die, 180, "BrokenProcessPool: "),
        (gpu_queries.hang, 1, "TimeoutError: "),
    ],
)
def test_gpus_that_cannot_be_read_stop_no_run(sft, monkeypatch, query, limit, why):
    monkeypatch.setattr(planning, "LIMIT_S", limit)
    config = load_config(sft, ["engine.device=auto"], SFT.root)
    start_s = time.monotonic()
    made, [line] = planning.resolve_auto(SFT(), config, 2, query)
    assert made.engine.micro_batch.tokens == 4096 and f"is the default, 4,096, because {why}" in line
    assert time.monotonic() - start_s < 180, "the child is still waited for"


def test_a_process_that_plans_ends_with_its_parent(tmp_path):
    parent = multiprocessing.get_context("spawn").Process(
        target=planning._in_own_process, args=(gpu_queries.note_and_hang, str(tmp_path))
    )
    parent.start()
    noted = tmp_path / "pid"
    while not (noted.exists() and noted.read_text()):
        assert parent.is_alive()
        time.sleep(0.05)
    parent.kill()
    parent.join()
    assert are_gone([int(noted.read_text())])


def test_all_ranks_say_why_the_first_could_not_choose(inputs, tmp_path, monkeypatch):
    given = of_backend(inputs, tmp_path)
    config = automatic.sampled_by(given, "native")
    monkeypatch.setattr(planning, "resolve_auto", mock.Mock(side_effect=UserError("no such GPU")))
    found = meeting(monkeypatch, [config, config], given)
    assert found == {0: "no such GPU", 1: "rank 0 could not choose what is auto: no such GPU"}


def test_a_gpu_that_is_misspelt_stops_no_run(sft, monkeypatch):
    monkeypatch.setenv("MRL_PLAN_GPU", "h1000")
    made, [line] = planning.resolve_auto(SFT(), load_config(sft, root=SFT.root), 2, list)
    assert made.engine.micro_batch.tokens == 4096 and "is the default, 4,096, because MRL_PLAN_GPU" in line


def test_without_a_gpu_auto_is_the_default_and_shown_as_auto_before_a_run(sft, tmp_path):
    config = load_config(sft, root=SFT.root)
    made, lines = planning.resolve_auto(SFT(), config, 2, list)
    assert made.engine.micro_batch.tokens == 4096
    assert lines == ["engine.micro_batch.tokens: auto is the default, 4,096, because no GPU is used"]
    said = run(["sft", str(sft), "--dry-run"], tmp_path)
    assert "micro_batch: {tokens: auto, size: null, pad: false}" in said


def test_the_smallest_gpu_is_planned_for_and_ranks_may_share_it(sft, monkeypatch):
    planned, in_own_process = [], planning._in_own_process

    def record(function, *given, **options):
        if function is not planning._plan_numbers:
            return in_own_process(function, *given, **options)
        planned.append(given[-1].memory)
        return config, []

    monkeypatch.setattr(planning, "_in_own_process", record)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    config = load_config(sft, ["engine.device=auto"], SFT.root)
    _, [line] = planning.resolve_auto(SFT(), config, 2, gpu_queries.some_gpus)
    assert planned == [4_773_000_000] and "auto is chosen for 1/2 of a GPU" in line


def test_numbers_are_chosen_with_the_environment_of_the_run(sft, tmp_path, monkeypatch):
    """torch reads these variables when a process first uses a GPU."""
    seen: dict[str, str] = {}

    def choose(*_: object) -> None:
        seen.update(os.environ)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(start, "generation_of_gpus", lambda: 9)
    monkeypatch.setattr(planning, "resolve_auto", choose)
    with pytest.raises(KeyboardInterrupt):
        words = ["engine.device=auto", "engine.parallel.pp=1", "engine.parallel.tp=2", f"output_dir={tmp_path / 'run'}"]
        start.start(SFT(), config_path=str(sft), overrides=words, nproc=2, dry_run=False)
    assert seen["CUDA_DEVICE_MAX_CONNECTIONS"] == "1" and "PYTORCH_ALLOC_CONF" in seen
