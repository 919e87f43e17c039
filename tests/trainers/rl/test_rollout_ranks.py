"""Ranks that sample beside training (`rollout.ranks`), by the command in a fork: two worlds of one launch.

The oracle is transformers: each rollout's log-probs are those of the weights that the rule names (docs/async-rollouts.md).
"""

from __future__ import annotations

import multiprocessing
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM

from tests.engine import harness
from tests.forks import Forked, forks
from tests.trainers.rl import cases, tiny_policies
from tests.trainers.rl.test_launched import PER_ITERATION, export, made_of, make_config
from tests.trainers.tiny_runs import REPO, steps

MEGATRON = tiny_policies.engine("megatron") | {"layer_spec": "local"}


def start(inputs, output_dir, processes, **changes) -> Forked:
    rollout = {"async_level": 1, "ranks": 1}
    config = tiny_policies.merge(make_config(inputs, output_dir, rollout), changes)
    file = output_dir.with_suffix(".yaml")
    file.write_text(yaml.safe_dump(config))
    log = output_dir.parent / "log"
    log.write_text("")
    return forks().start(output_dir.parent, log, os.environ, ["ppo", str(file), "--nproc", str(processes)])


def ended(run: Forked, folder: pathlib.Path, code: int = 0) -> str:
    """What it printed."""
    found, output = run.wait(300), (folder / "log").read_text()
    assert found == code, output
    return output


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """The folder of an unbroken run: one rank trains, one samples."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    output = ended(start(inputs, folder, 2), folder.parent)
    assert "ranks of their own sample 1 rollout ahead" in output and "they get new weights as files" in output
    assert "handover" not in output, "a key of servers"
    assert "\nrollout: 1 process of its own, 1 model\n" in output
    return folder


@pytest.mark.slow
def test_each_rollout_has_the_weights_of_the_rule(inputs, whole, tmp_path):
    samples = tiny_policies.samples_of(whole)
    for iteration in range(4):
        made = max(0, iteration - 1) * PER_ITERATION
        weights = export(whole, made, tmp_path) if made else inputs / "model"
        model = AutoModelForCausalLM.from_pretrained(weights, dtype=torch.float32).eval()
        rows = samples[f"step_{iteration * PER_ITERATION + 1:08d}.jsonl"]
        assert len(rows) == tiny_policies.SEQUENCES and {row["weights"] for row in rows} == {made}
        for row in rows:
            tokens, new = row["tokens"], row["mask"].index(1)
            logits = model(torch.tensor([tokens])).logits[0].double() / 0.8
            expected = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].tolist()
            assert row["log_probs"][new:] == pytest.approx(expected[new - 1 :], abs=1e-5)
    staleness = [row["rollout/staleness"] for row in steps(whole) if "rollout/staleness" in row]
    assert staleness == [0, 1, 1, 1]
    assert not list((whole / "rollout_weights").glob("*")), "weights for the sampling ranks are gone"


@pytest.mark.slow
def test_a_run_that_stops_goes_on_to_the_same_bits(inputs, whole, tmp_path):
    run = start(inputs, tmp_path / "run", 2)
    metrics = tmp_path / "run" / "metrics.jsonl"
    while run.poll() is None and (not metrics.exists() or len(metrics.read_text().splitlines()) < 3):
        time.sleep(0.02)
    run.send_signal(signal.SIGTERM)
    ended(run, tmp_path, 75)
    ended(start(inputs, tmp_path / "run", 2), tmp_path)
    assert made_of(tmp_path / "run") == made_of(whole)


@pytest.mark.nightly
def test_after_a_resume_both_worlds_have_the_layers_of_the_checkpoint(inputs, tmp_path):
    """There `auto` alone is local. A sampling rank that cannot have them says so."""

    def run(steps_: int, spec: str, *, sampler_has_te: bool = True) -> dict[int, bool | str]:
        config = tiny_policies.make_config(
            inputs, tmp_path / "run", rollout={"async_level": 1, "ranks": 1}, train={"steps": steps_},
            actor={"engine": MEGATRON | {"layer_spec": spec}}, checkpoint={"export_hf": False},
        )  # fmt: skip
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(list(harness.PRELOAD))
        made, port = context.Queue(), harness._free_port()
        arguments = [(config, 0, port, True, made), (config, 1, port, sampler_has_te, made)]
        ranks = [context.Process(target=cases.te_modules_of_rank, args=each, daemon=True) for each in arguments]
        try:
            for rank in ranks:
                rank.start()
            return dict(made.get(timeout=120) for _ in range(1 + sampler_has_te))
        finally:
            for rank in ranks:
                rank.kill()

    assert run(2, "te") == {0: True, 1: True}
    assert run(4, "auto") == {0: True, 1: True}
    why = 'value "auto" is te on the ranks that train and local on those of rollout.ranks; set local, or install the same packages'
    assert run(6, "auto", sampler_has_te=False) == {1: f"actor.engine.layer_spec: {why} on all hosts"}


@pytest.mark.slow
def test_two_ranks_train_and_two_sample(inputs, whole, tmp_path):
    trained, sampled = MEGATRON | {"parallel": {"tp": 2}}, {"ranks": 2, "server": {"tp": 2}}
    ended(start(inputs, tmp_path / "run", 4, actor={"engine": trained}, rollout=sampled), tmp_path)
    (rows, samples), (expected, samples_of_one) = made_of(tmp_path / "run"), made_of(whole)
    for row, one in zip(rows, expected, strict=True):
        assert row == pytest.approx(one, rel=1e-3, abs=1e-4)
    for name, of_file in samples.items():
        assert [row["tokens"] for row in of_file] == [row["tokens"] for row in samples_of_one[name]]


@pytest.mark.slow
def test_a_degree_that_does_not_fit_is_one_line(inputs, tmp_path):
    """The model's heads do not divide."""
    changes = {"rollout": {"ranks": 3, "server": {"tp": 3}}, "actor": {"engine": MEGATRON}}
    output = ended(start(inputs, tmp_path / "run", 4, **changes), tmp_path, 2)
    assert "rollout.server.tp: value 3 does not divide the model's" in output.splitlines()[-1]


SPLIT = """
import torch.distributed as dist

from mrl.commands import say
from mrl.engine import collective
from mrl.launch.worker import leave

collective.split_world(2, "cpu")
say(f"is rank {dist.get_rank()} of its world")
collective.wait_for_all()
leave(0, failed=False)
"""


@pytest.mark.slow
def test_messages_name_ranks_by_their_number_among_all():
    """Under torchrun, where each rank prints a line of its own."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3", "--no-python"]
    run = subprocess.run([*torchrun, sys.executable, "-c", SPLIT], cwd=REPO, capture_output=True, text=True)
    said = sorted(line for line in run.stderr.splitlines() if line.startswith("mrl"))
    expected = {f"{name}is rank {own} of its world" for name, own in (("", 0), ("rank 1: ", 0), ("rank 2: ", 1))}
    assert set(said) == {f"mrl: {line}" for line in expected} and len(said) == 3, run.stderr
