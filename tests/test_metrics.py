"""metrics.jsonl and the sinks beside it."""

from __future__ import annotations

import http.server
import json
import os
import pathlib
import sys
import threading

import pytest

from mrl import metrics
from mrl.config.schema import LogConfig, WandbConfig
from mrl.errors import ConfigError
from mrl.metric_names import METRICS


def open_log(folder: pathlib.Path, log: LogConfig | None = None, *, step: int = 0, enabled: bool = True):
    config = {"seed": 0, "data": {"train": [{"path": "https://host/a.jsonl?signature=x"}]}}
    return metrics.open_metrics(
        folder, log or LogConfig(), step=step, config=config, run_id="abcd1234", enabled=enabled
    )  # fmt: skip


def test_the_docs_say_what_each_metric_means():
    text = (pathlib.Path(__file__).parents[1] / "docs" / "metrics.md").read_text(encoding="utf-8")
    for name, meaning in METRICS.items():
        assert f"| `{name}` | {meaning} |" in text, name


def test_one_flushed_line_a_step(tmp_path):
    log = open_log(tmp_path)
    log.write(1, {"train/loss": 0.1 + 0.2})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "train/loss": 0.30000000000000004}\n'
    log.write(2, {"train/loss": 1.0})
    log.sync()
    log.close()
    log.close()
    assert [row["step"] for row in metrics.read(tmp_path / "metrics.jsonl")] == [1, 2]


def test_a_name_without_a_meaning_is_refused(tmp_path):
    with pytest.raises(AssertionError, match="train/los"):
        open_log(tmp_path).write(1, {"train/los": 1.0})


def test_names_by_reward_are_known_by_their_form(tmp_path):
    names = ("reward/gsm8k/mean", "reward/my/format/std", "reward/mean", "iteration", "eval/accuracy")
    log = open_log(tmp_path)
    log.write(1, dict.fromkeys(names, 1.0))
    log.close()
    for name in ("reward/gsm8k", "reward//mean", "reward/gsm8k/max", "rewards/gsm8k/mean", "reward/gsm8k/mean/x"):
        assert not metrics.is_metric(name), name


def test_trap_27_nothing_stays_from_one_step_to_the_next(tmp_path):
    log = open_log(tmp_path)
    log.write(1, {"train/loss": 1.0, "eval/loss": 2.0})
    log.write(2, {"train/loss": 1.0})
    log.close()
    assert metrics.read(tmp_path / "metrics.jsonl")[1] == {"step": 2, "train/loss": 1.0}


@pytest.mark.parametrize("tail", ["", '{"step": 4, "train/lo'])
def test_resume_keeps_whole_lines_up_to_the_checkpoint(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    lines = [json.dumps({"step": step, "train/loss": 0.1}) + "\n" for step in (1, 2, 3)]
    path.write_text("".join(lines) + tail)
    log = open_log(tmp_path, step=2)
    log.write(3, {"train/loss": 0.5})
    log.close()
    assert path.read_text() == "".join(lines[:2]) + '{"step": 3, "train/loss": 0.5}\n'
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_trap_34_other_processes_write_nothing(tmp_path):
    log = open_log(tmp_path, LogConfig(tensorboard=True, wandb=WandbConfig(project="p")), enabled=False)
    log.write(1, {"train/loss": 1.0})
    log.sync()
    log.close()
    assert list(tmp_path.iterdir()) == []


COLUMNS = ("prompt", "completion", "reward")


def show(log: metrics.MetricsLog) -> None:
    log.table(2, "samples", COLUMNS, [("2+2=", "4|\n", 1.0)])
    log.histograms(2, {"histogram/reward": [0.0, 1.0, 1.0], "histogram/none": []})


def test_tensorboard_shows_a_table_and_a_histogram(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = open_log(tmp_path, LogConfig(tensorboard=True))
    show(log)
    log.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload()
    [histogram], [text] = events.Histograms("histogram/reward"), events.Tensors("samples/text_summary")
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.sum) == (2, 3, 2)
    shown = text.tensor_proto.string_val[0].decode()
    assert shown.splitlines() == [
        "| prompt | completion | reward |",
        "| --- | --- | --- |",
        "| 2+2= | 4&#124;<br> | 1 |",
    ]
    assert log.has_sinks is False and events.Tags()["histograms"] == ["histogram/reward"]
    show(open_log(tmp_path))  # goes nowhere


def test_tensorboard_purges_the_steps_that_a_resumed_run_makes_again(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for start, values in ((0, {1: 1.0, 2: 2.0, 3: 3.0}), (1, {2: 20.0})):
        log = open_log(tmp_path, LogConfig(tensorboard=True), step=start)
        for step, value in values.items():
            log.write(step, {"train/loss": value})
        log.close()
    events = EventAccumulator(str(tmp_path / "tb")).Reload().Scalars("train/loss")
    assert [(e.step, e.value) for e in events] == [(1, 1.0), (2, 20.0)]


@pytest.mark.parametrize(
    "log, package", [(LogConfig(tensorboard=True), "tensorboard"), (LogConfig(wandb=WandbConfig(project="p")), "wandb")]
)
def test_a_package_that_is_not_there_is_named_with_the_key(monkeypatch, log, package):
    monkeypatch.setattr(metrics.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"^log\.{package}.*pip install"):
        metrics.check_packages(log)
    metrics.check_packages(LogConfig())


# --------------------------------------------------------------------------------------------------------------- wandb


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)


class Client:
    """Stands for the wandb package: remembers what it was asked."""

    def __init__(self, api_key: str | None = None, base_url: str = "https://api.wandb.example") -> None:
        self.settings = type("Settings", (), {"api_key": api_key, "base_url": base_url})
        self.setup = lambda: self


def test_auto_is_offline_without_an_account_and_asks_nobody(no_account, monkeypatch):
    monkeypatch.setattr(metrics.socket, "create_connection", lambda *a, **k: pytest.fail("looked at the network"))
    assert "nobody is logged in" in metrics._why_offline(Client())


@pytest.mark.parametrize("how", ["key", "netrc"])
def test_auto_is_online_with_an_account_and_a_server_that_answers(no_account, monkeypatch, tmp_path, how):
    asked = []
    monkeypatch.setattr(
        metrics.socket, "create_connection", lambda at, timeout: asked.append((at, timeout)) or Answer()
    )
    (tmp_path / "netrc").write_text("machine api.wandb.example login user password k\n" if how == "netrc" else "")
    assert metrics._why_offline(Client("k" if how == "key" else None)) is None
    assert asked == [(("api.wandb.example", 443), metrics.ONLINE_CHECK_S)]
    monkeypatch.setenv("WANDB_MODE", "offline")
    assert metrics._why_offline(Client("k")) == "WANDB_MODE is offline"


def test_online_without_an_account_is_refused_with_what_helps(no_account, monkeypatch, tmp_path):
    online = LogConfig(wandb=WandbConfig(project="p", mode="online"))
    monkeypatch.setitem(sys.modules, "wandb", Client())
    with pytest.raises(ConfigError, match=r'^log\.wandb\.mode: value "online" .*`wandb login`.* auto or offline'):
        metrics.check_login(online)
    for log in (LogConfig(), LogConfig(wandb=WandbConfig(project="p"))):
        metrics.check_login(log)
    monkeypatch.setitem(sys.modules, "wandb", Client("key"))
    metrics.check_login(online)
    monkeypatch.setitem(sys.modules, "wandb", Client())
    (tmp_path / "netrc").write_text("machine api.wandb.example login user password k\n")
    metrics.check_login(online)


def test_auto_is_offline_where_the_server_does_not_answer(no_account, monkeypatch):
    def refuse(*_, **__):
        raise OSError("no route")

    monkeypatch.setattr(metrics.socket, "create_connection", refuse)
    assert metrics._why_offline(Client("k")) == "api.wandb.example does not answer"


class Answer:
    def close(self) -> None: ...


@pytest.mark.slow
def test_wandb_offline_goes_on_under_the_same_id(no_account, tmp_path):
    for start in (0, 1):
        log = open_log(tmp_path / "demo" if start else make(tmp_path / "demo"), LogConfig(wandb=WandbConfig(project="p")), step=start)  # fmt: skip
        log.write(start + 1, {"train/loss": 1.0})
        show(log)
        log.close()
        [note] = log.notes
        assert (
            note.startswith("wandb: writes offline, because nobody is logged in") and f"`wandb sync {tmp_path}" in note
        )
    tables = (tmp_path / "demo" / "wandb").glob("offline-run-*/files/media/table/samples_*.json")
    assert [json.loads(p.read_text()) for p in tables] == 2 * [
        {"columns": list(COLUMNS), "data": [["2+2=", "4|\n", 1.0]]}
    ]
    runs = sorted(p.name for p in (tmp_path / "demo" / "wandb").iterdir() if p.name.startswith("offline-run-"))
    assert runs and all("-abcd1234" in name for name in runs)  # -1 in the same second
    written = b"".join(path.read_bytes() for path in (tmp_path / "demo" / "wandb").rglob("*") if path.is_file())
    assert b"host/a.jsonl?(hidden)" in written and b"signature" not in written


def make(folder: pathlib.Path) -> pathlib.Path:
    folder.mkdir()
    return folder


class Refusing(http.server.BaseHTTPRequestHandler):
    """Lets nobody in."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(401)
        self.end_headers()

    do_GET = do_POST

    def log_message(self, *_) -> None: ...


def test_an_account_that_wandb_refuses_is_one_line_and_offline_asks_nobody(tmp_path, monkeypatch):
    import wandb  # slow to import

    wandb.teardown()  # it keeps the first environment that it sees
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Refusing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    try:
        with pytest.raises(ConfigError, match=r"^log\.wandb.*401"):
            open_log(tmp_path, LogConfig(wandb=WandbConfig(project="p", mode="online")))
        wandb.teardown()
        log = open_log(tmp_path, LogConfig(wandb=WandbConfig(project="p", mode="offline")))
        assert [note.startswith("wandb: writes offline;") for note in log.notes] == [True]
        log.close()
    finally:
        wandb.teardown()
        server.shutdown()
        server.server_close()
