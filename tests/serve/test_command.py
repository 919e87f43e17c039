"""`mrl serve` as a command: its keys, its examples, its start and its end."""

import json
import os
import re
import resource
import shlex
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest
import yaml

from mrl.commands.serve import check_positions
from mrl.config.command import record
from mrl.config.load import from_dict
from mrl.config.serve import ServeConfig
from mrl.engine.collective import join_processes
from mrl.errors import ConfigError
from mrl.serve.app import MAX_FILES, raise_file_limit
from mrl.serve.ledger import layout_of, refuse_other_layout
from mrl.serve.server import client_address
from tests.forks import forks
from tests.serve.serving import Serving, ask, serving

BASE = {"model": {"path": "m", "lora": {"rank": 4}}}
EXAMPLES = [line.strip() for line in record("serve").examples.strip().splitlines()]


@pytest.mark.parametrize(
    ("key", "serve", "lora", "says"),
    [
        (None, {"host": "0.0.0.0"}, {}, r'serve.host: value "0.0.0.0" is reached by others.*set MRL_SERVE_KEY to tml-'),
        (None, {"host": "127.0.0.2"}, {}, None),
        ("tml-short", {}, {}, "MRL_SERVE_KEY: has 9 characters, which can be guessed; give at least 16"),
        ("long-enough-but-not-tml", {}, {}, "MRL_SERVE_KEY: does not begin with tml-"),
        ("tml-long-enough-to-keep", {"host": "::"}, {}, None),
        (None, {"cache_tokens": 100}, {}, "serve.cache_tokens: value 100 is less than the 4096 tokens of serve.max_length"),
        (None, {}, {"dropout": 0.1}, "model.lora.dropout: value 0.1 would make what a model trains depend on the turns"),
    ],
)  # fmt: skip
def test_keys_against_each_other(monkeypatch, key, serve, lora, says):
    monkeypatch.delenv("MRL_SERVE_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("MRL_SERVE_KEY", key)
    raw = {"model": {"path": "m", "lora": {"rank": 4, **lora}}, "serve": serve}
    if says is None:
        assert from_dict(raw, ServeConfig).model.lora.rank == 4
        return
    with pytest.raises(ConfigError, match=says) as refused:
        from_dict(raw, ServeConfig)
    assert key is None or key not in str(refused.value), "the key is not shown"


@pytest.mark.parametrize(("model_config", "says"), [
    ({"max_position_embeddings": 4096}, None),
    ({"max_position_embeddings": 2048}, "serve.max_length: value 4096 is above the model's 2048 positions; give at most 2048"),
    ({"text_config": {"max_position_embeddings": 1024}, "max_position_embeddings": 9999}, "above the model's 1024 positions"),
    ({}, None),
])  # fmt: skip
def test_sequences_fit_the_model(model_config, says):
    config = from_dict(BASE, ServeConfig)
    if says is None:
        check_positions(config, model_config)
        return
    with pytest.raises(ConfigError, match=says):
        check_positions(config, model_config)


def test_the_address_that_clients_are_told():
    here = socket.gethostname()
    told = {"127.0.0.1": "127.0.0.1", "0.0.0.0": here, "::": here, "::1": "[::1]", "node7": "node7"}
    assert {host: client_address(host) for host in told} == told


def test_more_files_than_many_systems_begin_with():
    before, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
        raise_file_limit()
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (min(hard, MAX_FILES) if hard > 0 else MAX_FILES, hard)
        raise_file_limit()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (before, hard))


def test_what_another_layout_suspended_is_not_gone_on_with(tmp_path):
    """It says what was, and what would work; nothing is read of it, and nothing removed."""
    join_processes("cpu")
    first = from_dict({**BASE, "output_dir": str(tmp_path)}, ServeConfig)
    refuse_other_layout(first)
    (tmp_path / "suspended").mkdir()
    refuse_other_layout(first)
    (tmp_path / "suspended" / "desk.json").write_text(
        json.dumps({"layout": layout_of(first), "desk": {"numbers": {}, "results": []}, "lost": {}})
    )
    moved = {**BASE, "output_dir": str(tmp_path), "serve": {"max_length": 99}, "log": {"console": "plain"}}
    refuse_other_layout(from_dict(moved, ServeConfig))
    for more, says in (
        ({"engine": {"parallel": {"tp": 2}}}, r"engine\.parallel\.tp=1, now 2"),
        ({"engine": {"backend": "fsdp"}}, r"engine\.backend=\S*megatron\S*, now \S*fsdp\S*"),
        ({"model": {"path": "m", "lora": {"rank": 8}}}, r"model\.lora\.rank=4, now 8"),
    ):
        with pytest.raises(ConfigError, match=f"models that were suspended with {says}; start it as it was"):
            refuse_other_layout(from_dict({**BASE, "output_dir": str(tmp_path), **more}, ServeConfig))
    assert (tmp_path / "suspended" / "desk.json").exists()


@pytest.mark.nightly
@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_of_the_help(example, model, tmp_path, monkeypatch):
    """Each as it stands; a server that it starts is ended by a signal."""
    monkeypatch.setenv("MRL_SERVE_KEY", "tml-the-key-of-tests")
    config = {"model": {"path": model, "dtype": "float32", "lora": {"rank": 4}}, "engine": {"device": "cpu"}}
    config |= {"serve": {"max_length": 128}, "log": {"console": "plain"}}
    (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
    line = [sys.executable, "-u", "-m", *shlex.split(example)]
    log = tmp_path / "log"
    with log.open("w") as file:
        process = subprocess.Popen(line, cwd=tmp_path, stdout=file, stderr=file)
    if "--dry-run" in example:
        assert process.wait(120) == 0, log.read_text()
        assert "# models: adapters of rank 1 to 4" in log.read_text() and "tml-" not in log.read_text()
        return
    deadline = time.monotonic() + 120
    while "TINKER_API_KEY=$MRL_SERVE_KEY" not in log.read_text():
        assert process.poll() is None and time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    everywhere = "0.0.0.0" in example
    assert f"http://{socket.gethostname() if everywhere else '127.0.0.1'}:" in log.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 75, log.read_text()
    assert "run the same command again to go on" in log.read_text()


@pytest.mark.slow
def test_the_run_directory(model, tmp_path):
    """It says what was run, is of one server at a time, which asks for its key."""
    with serving(tmp_path, model, key="tml-the-key-of-tests") as server:
        written = (tmp_path / "run" / "config.yaml").read_text()
        assert "tml-" not in written and re.search(r"# command: mrl serve serve.yaml --port 0", written)
        log = tmp_path / "again"
        again = forks().start(tmp_path, log, os.environ, ["serve", "serve.yaml", "--port", "0"])
        assert again.wait(60) == 2 and "is in use by another run" in log.read_text()
        for status, headers in (
            (401, {}), (401, {"x-api-key": "tml-another-key-of-16"}), (200, {"x-api-key": "tml-the-key-of-tests"}),
            (200, {"authorization": "Bearer tml-the-key-of-tests"}),
        ):  # fmt: skip
            assert ask(server, "/v1/models", method="GET", **headers)[0] == status


@pytest.mark.slow
def test_a_port_that_another_server_has(model, tmp_path):
    """It is refused before the model is read, though the other one does not answer yet."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        server = Serving(tmp_path, model)
        server.port = other.getsockname()[1]
        with pytest.raises(AssertionError, match=r"--port: value \d+ cannot be listened on at 127.0.0.1"):
            server.start()
        assert server.process.wait(60) == 2
        assert not (tmp_path / "run" / "config.yaml").exists(), "which is written once the model is read"


@pytest.mark.nightly
def test_ranks_that_wait_take_no_processor(model, tmp_path):
    with serving(tmp_path, model, "engine.parallel.tp=2", nproc=2) as server:
        server.train()
        launcher = psutil.Process(server.process.pid)
        processes = [launcher, *launcher.children(recursive=True)]
        assert len(processes) >= 3, "the launcher and two ranks"
        before = [sum(process.cpu_times()[:2]) for process in processes]
        time.sleep(10)
        said = server.log.read_text().partition("TINKER_API_KEY")[2]
        assert "so far" not in said, "it builds nothing any more"
        used = [sum(process.cpu_times()[:2]) - seconds for process, seconds in zip(processes, before, strict=True)]
        assert max(used) < 1.0, used  # of ten seconds; a client's heartbeat and looks at signals are in it
