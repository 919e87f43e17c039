"""The small modules beside the trainer: console, signals, where a run starts."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import threading
import time
import types

import pytest

import mrl
from mrl.config.load import from_dict, load_config
from mrl.config.ppo import PPOConfig
from mrl.config.schema import SFTConfig
from mrl.engine import atomic_checkpoint, checkpoint_remote
from mrl.errors import CheckpointError, ConfigError
from mrl.trainers import console, waits
from mrl.trainers.common import say_left_out
from mrl.trainers.opening import say_length
from mrl.trainers.rl.show import is_due
from mrl.trainers.run_directory import RunDirectory, choose_start, is_own
from mrl.trainers.signals import STOP_SIGNALS, StopSignal
from tests.config.test_load import BASE, PPO_BASE

METRICS = {"train/loss": 1.23456, "train/lr": 1e-5, "perf/tokens_per_s": 12345.6, "perf/mfu": 0.421}


# ------------------------------------------------------------------------------------------------------------- console


def test_the_length_of_a_run_is_never_zero_epochs():
    said = []
    for steps in (1, 281, 9000):
        shows = types.SimpleNamespace(say=said.append)
        say_length(shows, steps=steps, batch=32, noun="sample", rows=9000, per_epoch=281)
    assert [line.partition("which are ")[2] for line in said] == ["0.00356 epochs", "1 epoch", "32 epochs"]


OF_RL = (
    "reward/mean", "eval/accuracy", "actor/kl", "actor/entropy", "actor/clip_fraction", "critic/explained_variance",
    "rollout/finished", "rollout/response_length", "perf/step_s",
)  # fmt: skip
LINES = [
    (METRICS | {"perf/step_s": 2.04}, "loss 1.2346  lr 1e-05  tok/s 12,346  mfu 42.1%  seconds 2.0"),
    (
        METRICS | dict.fromkeys(OF_RL, 0.25) | {"actor/ratio": 1.0},
        "reward 0.250  accuracy 0.25  loss 1.2346  kl 0.25  entropy 0.250  clip 25.0%  explained 0.25  finished 25%  "
        "length 0  lr 1e-05  tok/s 12,346  mfu 42.1%  seconds 0.2",
    ),
    ({"train/loss": 0.5, "rewards/margin": -0.0002}, "loss 0.5000  margin 0.000"),  # zero has no sign
]


@pytest.mark.parametrize("metrics, line", LINES)
def test_a_line_of_a_step_shows_what_the_run_is_about(capsys, metrics, line):
    plain = console.open_console("plain", enabled=True)
    plain.start(4, 10)
    plain.step(5, metrics)
    assert capsys.readouterr().out == f"step 5/10  {line}  eta 0:00:00\n"


def test_the_eta_is_that_of_measured_steps(monkeypatch):
    now_s = iter([100.0, 109.0, 111.0])
    monkeypatch.setattr(console.time, "monotonic", lambda: next(now_s))
    clock = console._Clock(2, 10)
    assert [clock.eta(step) for step in (2, 3, 4)] == ["-", "0:01:03", "0:00:33"]


def test_no_wait_is_without_a_word(capsys):
    watch = waits.WaitWatch(lambda line: None)
    watch.doing("evaluating")
    began_s = watch._began_s
    words = [watch.word(began_s + s) for s in (14, 15.5, 30, 31)]
    assert words == [None, "evaluating (16 s so far)", None, "evaluating (31 s so far)"]
    watch.detail("3 of 8 prompts")
    watch.reset()
    later_s = watch._silent_since_s
    assert watch.word(later_s + 14.9) is None and watch.word(later_s + 15.1).startswith("evaluating: 3 of 8 prompts (")
    watch.close(), watch.close()


def test_a_wait_outlives_an_output_that_nobody_reads(monkeypatch):
    monkeypatch.setattr(waits, "SILENCE_S", 0.0)
    written, uncaught, both = [], [], threading.Event()
    monkeypatch.setattr(threading, "excepthook", uncaught.append)

    def write(line):
        written.append(line)
        if len(written) == 2:
            both.set()
        raise BrokenPipeError

    watch = waits.WaitWatch(write)
    watch.doing("evaluating")
    assert both.wait(30) and not uncaught
    watch.close()


def test_a_console_says_its_waits_by_itself(capsys, monkeypatch):
    monkeypatch.setattr(waits, "SILENCE_S", 0.0)
    plain = console.open_console("plain", enabled=True)
    plain.doing("sampling")
    plain.generated(0, 0)  # fewer completions than replicas
    plain.generated(2, 8)
    seen = ""
    for _ in range(200):
        time.sleep(0.02)
        seen += capsys.readouterr().out
        if seen:
            break
    plain.close()
    assert seen.startswith("sampling: 25% of the completions are whole (0 s so far)\n")


def test_log_every_shows_the_first_step_the_last_and_evaluations(capsys):
    plain = console.open_console("plain", enabled=True, every=4)
    plain.start(2, 11)
    for step in range(3, 12):
        plain.step(step, {"train/loss": 1.0} | ({"eval/loss": 2.0} if step == 6 else {}))
    assert [line.split("/")[0] for line in capsys.readouterr().out.splitlines()] == [
        f"step {step}" for step in (3, 4, 6, 8, 11)
    ]


def test_the_table_comes_with_the_first_rollout_and_every_so_many_steps():
    due = lambda every, each: [s for s in range(1, 41, each) if is_due(s, every, each)]  # noqa: E731
    assert due(20, 1) == [1, 21] and due(10, 4) == [1, 13, 21, 33] and due(2, 4) == list(range(1, 41, 4))


def test_rows_left_out_are_counted_out_loud(capsys):
    plain = console.open_console("plain", enabled=True)
    say_left_out(plain, "train", {"skipped": 2, "dropped": 0, "truncated": 31})
    say_left_out(plain, "eval", {"skipped": 0, "dropped": 1, "truncated": 0}, ["dropped: e.jsonl:7: why"])
    say_left_out(plain, "train", {"skipped": 0, "dropped": 0, "truncated": 0})
    assert capsys.readouterr().out.splitlines() == [
        "data.train: rows skipped: 2, truncated: 31", "data.eval: rows dropped: 1", "dropped: e.jsonl:7: why",
    ]  # fmt: skip


def test_rich_falls_back_to_plain_without_a_terminal():
    assert type(console.open_console("rich", enabled=True)) is console.PlainConsole


@pytest.mark.parametrize("kind, enabled", [("none", True), ("rich", False), ("plain", False)])
def test_silence(capsys, kind, enabled):
    quiet = console.open_console(kind, enabled=enabled)
    quiet.say("x"), quiet.start(0, 2), quiet.step(1, METRICS), quiet.close()
    assert capsys.readouterr() == ("", "")


def test_the_live_console_keeps_a_line_per_step_above_a_bar_and_ends_twice(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "160")
    live = console.LiveConsole()
    live._terminal = console.RichTerminal(force_terminal=True, width=160, highlight=False)
    live.doing("building the models")
    live._bar.refresh()
    live.start(0, 2)
    live.say("a line [bold]as it is[/bold]")
    live.step(1, METRICS | {"eval/loss": 0.5})
    live.step(2, METRICS)
    live.doing("evaluating")
    live.detail("3 of 8 prompts")
    live._bar.refresh()
    live.close(), live.close()
    out = capsys.readouterr().out
    lines = [line.strip() for line in re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r", "\n", out).splitlines()]
    assert "building the models" in out and "evaluating 3 of 8 prompts" in out
    assert "a line [bold]as it is[/bold]" in lines
    kept = [line for line in lines if line.startswith("step ")]
    assert kept[0].startswith("step 1/2  loss 1.2346  eval 0.5000") and kept[1].startswith("step 2/2  loss 1.2346")


# ------------------------------------------------------------------------------------------------------------- signals


def test_the_first_signal_is_answered_at_once_and_a_gone_terminal_is_no_error(capfd):
    with StopSignal("it ends soon") as stop:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert capfd.readouterr() == ("received SIGUSR1: it ends soon\n", "")
    terminal = os.dup(1)
    os.close(1)
    try:
        with StopSignal("it ends soon") as stop:
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.requested
    finally:
        os.dup2(terminal, 1)
        os.close(terminal)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_signals_are_remembered_and_handlers_put_back(signum):
    before = signal.getsignal(signum)
    with StopSignal() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signum)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested and stop.name == signum.name
    assert signal.getsignal(signum) is before


# ------------------------------------------------------------------------------------------------- where a run starts


def config_of(output_dir: pathlib.Path, **section):
    return from_dict(BASE | {"output_dir": str(output_dir)} | section)


def make_checkpoint(root: pathlib.Path, step: int) -> str:
    with atomic_checkpoint.writing(str(root), step, backend="fsdp") as path:
        pathlib.Path(path, "weights").write_text("w")
    return str(root / atomic_checkpoint.step_name(step))


def start_of(output_dir: pathlib.Path, **section):
    return choose_start(RunDirectory(output_dir), config_of(output_dir, **section))


def test_a_checkpoint_that_a_kill_left_without_its_name_gets_it(tmp_path):
    """It may be the last one, so no later save does it."""
    run = RunDirectory(tmp_path)
    run.prepare(config_of(tmp_path), "mrl sft c.yaml", [])
    make_checkpoint(run.checkpoints, 3)
    last = pathlib.Path(make_checkpoint(run.checkpoints, 4))
    last.rename(last.with_name(f".tmp-{last.name}"))
    (run.checkpoints / "latest").write_text("step_00000003\n")
    assert start_of(tmp_path).checkpoint == str(last) and last.is_dir()
    assert (run.checkpoints / "latest").read_text() == "step_00000004\n"
    assert sorted(p.name for p in run.checkpoints.iterdir()) == ["latest", "step_00000003", "step_00000004"]


@pytest.mark.parametrize(("root", "raw", "command"), [(SFTConfig, BASE, "sft"), (PPOConfig, PPO_BASE, "ppo")])
def test_config_yaml_names_its_command_and_loads_again(tmp_path, root, raw, command):
    config = from_dict(raw | {"output_dir": str(tmp_path)}, root)
    run = RunDirectory(tmp_path)
    run.prepare(config, f"mrl {command} c.yaml", ["algorithm: clip_low=0.2"])
    assert "\n# algorithm: clip_low=0.2\n" in run.config.read_text()
    assert f"`mrl {command}` takes this file" in run.config.read_text().splitlines()[0]
    for word in ("mrl 0.", "python 3.", "torch 2.", "megatron-core ", "transformers ", "git:", f"mrl {command} c.yaml"):
        assert word in run.config.read_text().split("output_dir:")[0], word
    assert "betas:" in run.config.read_text(), "defaults are spelled out"
    assert load_config(run.config, root=root) == config
    make_checkpoint(run.checkpoints, 3)
    assert choose_start(run, config).step == 3


def test_the_run_of_another_command_is_not_gone_on_with(tmp_path):
    RunDirectory(tmp_path).prepare(config_of(tmp_path), "mrl sft c.yaml")
    make_checkpoint(RunDirectory(tmp_path).checkpoints, 3)
    config = from_dict(PPO_BASE | {"output_dir": str(tmp_path)}, PPOConfig)
    with pytest.raises(ConfigError, match="^output_dir: value .* is given to `mrl ppo`, .* of `mrl sft`; give another"):
        choose_start(RunDirectory(tmp_path), config)


def test_auto_takes_the_newest_whole_checkpoint_and_says_so(tmp_path):
    make_checkpoint(tmp_path / "checkpoints", 10)
    newest = make_checkpoint(tmp_path / "checkpoints", 20)
    start = start_of(tmp_path)
    assert (start.checkpoint, start.step) == (newest, 20)
    assert start.message == f"resuming from {newest}, after step 20"
    pathlib.Path(newest, "weights").write_text("damaged")
    assert start_of(tmp_path).step == 10


def test_a_checkpoint_that_a_load_found_damaged_is_passed_over(tmp_path):
    """As one that looks damaged from outside is. Starting anew would overwrite them. One that the config names is refused."""
    older, newest = (make_checkpoint(tmp_path / "checkpoints", step) for step in (10, 20))
    run, config = RunDirectory(tmp_path), config_of(tmp_path)
    assert choose_start(run, config, {newest: "bad"}).checkpoint == older
    with pytest.raises(CheckpointError, match=r"^bad 10; bad 20; no checkpoint in .* is whole"):
        choose_start(run, config, {older: "bad 10", newest: "bad 20"})
    named = config_of(tmp_path / "run2", checkpoint={"resume": newest})
    with pytest.raises(CheckpointError, match=r"^checkpoint\.resume: .* holds no whole checkpoint \(bad\)"):
        choose_start(RunDirectory(tmp_path / "run2"), named, {newest: "bad"})


def test_auto_takes_the_remote_copy_where_the_local_one_is_gone(tmp_path):
    remote = f"file://{tmp_path}/backup"
    checkpoint_remote.upload(make_checkpoint(tmp_path / "other", 7), remote)
    start = start_of(tmp_path / "run", checkpoint={"remote": remote})
    assert start.step == 7 and start.checkpoint.startswith(str(tmp_path / "run" / "checkpoints"))


def test_a_path_may_be_a_checkpoint_a_folder_of_them_or_a_url(tmp_path):
    path = make_checkpoint(tmp_path / "other", 7)
    for resume in (path, str(tmp_path / "other"), f"file://{tmp_path}/other"):
        assert start_of(tmp_path / "run", checkpoint={"resume": resume}).step == 7
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"^checkpoint\.resume: .*no whole checkpoint"):
        start_of(tmp_path / "run2", checkpoint={"resume": str(tmp_path / "empty")})


def test_a_checkpoint_fetched_from_another_run_is_not_our_own(tmp_path):
    """It lies in our folder, like those that we save after it and like copies of our own from checkpoint.remote."""
    make_checkpoint(tmp_path / "other", 7)
    run, url = RunDirectory(tmp_path / "run"), f"file://{tmp_path}/other"
    asked = config_of(run.path, checkpoint={"resume": url}).checkpoint
    for _ in range(2):  # a kill before the first save: the second time it is found in our folder
        start = start_of(run.path, checkpoint={"resume": url})
        assert not is_own(run, start, {"checkpoint": {"resume": "auto"}}, asked)
    assert is_own(run, start, {"checkpoint": {"resume": url}}, asked)
    ours = config_of(run.path, checkpoint={"remote": url}).checkpoint
    assert is_own(run, start, {"checkpoint": {"resume": "auto"}}, ours)
    copies = config_of(run.path, checkpoint={"remote": url, "resume": url}).checkpoint
    assert is_own(run, start, {"checkpoint": {"resume": "auto"}}, copies)
    elsewhere = start_of(tmp_path / "run2", checkpoint={"resume": str(tmp_path / "other")})
    assert not is_own(RunDirectory(tmp_path / "run2"), elsewhere, {"checkpoint": {"resume": "auto"}}, ours)


def test_an_older_checkpoint_of_the_same_run_is_refused(tmp_path):
    older = make_checkpoint(tmp_path / "checkpoints", 10)
    newest = make_checkpoint(tmp_path / "checkpoints", 20)
    RunDirectory(tmp_path).prepare(config_of(tmp_path), "mrl sft c.yaml")
    assert start_of(tmp_path, checkpoint={"resume": newest}).step == 20
    with pytest.raises(ConfigError, match=r"^checkpoint\.resume: .*step_00000020"):
        start_of(tmp_path, checkpoint={"resume": older})


def test_config_yaml_has_the_git_state(tmp_path, monkeypatch):
    """That of the working directory, and of mrl's own checkout; a wheel's folder may lie below somebody else's."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "site" / "mrl").mkdir(parents=True)
    monkeypatch.setattr(mrl, "__file__", str(tmp_path / "site" / "mrl" / "__init__.py"))
    RunDirectory(tmp_path).prepare(config_of(tmp_path), "mrl sft c.yaml train.steps=3")
    says = f"# git: not a git repository\n# git of mrl: none, version {mrl.__version__}\n# command: mrl sft c.yaml train.steps=3"
    assert says in (tmp_path / "config.yaml").read_text()
    identity = ["-c", "user.name=n", "-c", "user.email=e@e", "-c", "commit.gpgsign=false"]
    for command in (["init", "-q"], ["add", "config.yaml"], [*identity, "commit", "-qm", "x"]):
        subprocess.run(["git", *command], check=True)
    RunDirectory(tmp_path).prepare(config_of(tmp_path), "mrl sft c.yaml")
    RunDirectory(tmp_path).prepare(config_of(tmp_path), "mrl sft c.yaml")
    assert ", 1 files changed since\n" in (tmp_path / "config.yaml").read_text()
