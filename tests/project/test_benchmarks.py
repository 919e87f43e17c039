"""What `make bench-gpu` measures is measured on a CPU: a fault in it is not found first on a GPU. What its scripts cannot do is
refused before anything runs, and what fails stands in the report beside the rest."""

from __future__ import annotations

import argparse
import importlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("MRL_TEST_VLLM_VENV", ROOT / ".venv-vllm"))
MODULES = ("checkpoint", "gpu", "gpu_options", "handover", "handover_server", "measure")


@pytest.fixture
def scripts(monkeypatch):
    """The modules of benchmarks/, which import each other by their bare names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return argparse.Namespace(**{name: importlib.import_module(name) for name in MODULES})


def run_gpu(page: Path, folder: Path, part: str, *more: str) -> str:
    """Runs a part of gpu.py on the CPU and returns its report."""
    options = ["--device", "cpu", "--small", "--rounds", "1", "--steps", "2", "--warmup", "1", "--only", part, *more]
    command = [sys.executable, "benchmarks/gpu.py", *options, "--folder", str(folder), "--result", str(page)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stderr
    return page.read_text(encoding="utf-8")


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["numbers", "training", "decoding", "checkpoint", "ppo"])
def test_each_part_runs_on_a_cpu(part, tmp_path):
    report = run_gpu(tmp_path / "page.md", tmp_path, part)
    rows = re.findall(r"^\| (?:mrl|native).*", report, re.MULTILINE)
    assert rows and "failed" not in report, report
    if part == "numbers":
        [error] = [row.split(" | ")[2] for row in rows if row.startswith("| mrl, local layers, float32")]
        assert float(error) < 1e-6


PATHS = ["gather alone", "broadcast, 8 MB", "ipc, 8 MB", "bare broadcast, 8 MB"]
BY_FILES = ["disk", "cp", "cp, fsync", "adapters"]


@pytest.mark.nightly
def test_the_hand_over_runs_on_a_cpu(tmp_path):
    found = f"no vLLM in {VENV}: run `make vllm-venv`, or set MRL_TEST_VLLM_VENV to a venv that has it"
    assert (VENV / "bin" / "python").exists(), found
    report = run_gpu(tmp_path / "page.md", tmp_path, "handover", "--vllm-venv", str(VENV))
    names = set(re.findall(r"^\| (.+?) \| \d+\.\d \| \d+\.\d\d \| ", report, re.MULTILINE))
    places = {f"{way}, {place}" for way in BY_FILES for place in (tmp_path, "/dev/shm")}
    left_out = (
        {f"{way}, /dev/shm" for way in BY_FILES} if "left out: disk, cp and adapters in /dev/shm" in report else set()
    )
    assert names == {*PATHS, *places} - left_out, report
    assert "failed" not in report, report
    assert not list(tmp_path.glob("mrl_benchmark_*"))


CPU = ["--device", "cpu"]
REFUSED = [
    ("gpu", [*CPU, "--steps", "4"], "--steps 4: training-dense needs 5 or more, as --warmup 4 of them does not count"),
    ("gpu", [*CPU, "--result", "/nonexistent/x.md"], "--result: there is no folder /nonexistent"),
    ("gpu", [*CPU, "--only", "nubmers"], "--only nubmers: the parts are numbers, "),
    ("gpu", [*CPU, "--only", "numbers", "--subjects", "mrl, fsdp, bfloat16"], "with 'transformers, float32'; add that"),
    ("handover", [*CPU, "--only", "brodcast"], "--only brodcast: it is in none of gather alone; disk, "),
    ("checkpoint", [*CPU, "--folder", "/nonexistent"], "--folder: there is no folder /nonexistent"),
]


@pytest.mark.parametrize(
    ("script", "options", "said"), REFUSED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_what_cannot_run_is_refused_in_a_line(script, options, said, scripts, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{script}.py", *options])
    with pytest.raises(SystemExit) as refused:
        getattr(scripts, script).main()
    assert refused.value.code == 2
    assert said in capsys.readouterr().err.splitlines()[-1]


def gpu_arguments(scripts, *more: str) -> argparse.Namespace:
    return scripts.gpu_options.parse([*CPU, "--small", *more])


def test_a_round_that_fails_loses_none_before(scripts, monkeypatch, tmp_path):
    turns = iter([{"wall": [1.0], "more": {}}, scripts.measure.Failed("worker:\nout of memory")])

    def run_worker(*_, **__):
        turn = next(turns)
        if isinstance(turn, BaseException):
            raise turn
        return [turn]

    monkeypatch.setattr(scripts.measure, "run_worker", run_worker)
    runs = scripts.gpu.take_turns(
        [scripts.gpu.REFERENCE], {"what": "training"}, tmp_path, gpu_arguments(scripts), rounds=2
    )
    [row] = runs.rows(2, lambda name, of: [str(len(of)), "speed"])
    assert row == "| transformers, float32 (round 2 failed: out of memory) | 1 | speed |"


def test_a_part_that_fails_stands_in_the_report(scripts, monkeypatch, tmp_path):
    def fails(folder, arguments):
        raise OSError(28, "No space left on device")

    def ended(folder, arguments):
        raise SystemExit(143)  # as SIGTERM does

    arguments = gpu_arguments(scripts)
    monkeypatch.setitem(scripts.gpu.PARTS, "ppo", fails)
    lines = scripts.gpu.whole_part("ppo", tmp_path, arguments)
    assert lines == ["## ppo", "", "failed: OSError: [Errno 28] No space left on device"]
    monkeypatch.setitem(scripts.gpu.PARTS, "ppo", ended)
    with pytest.raises(SystemExit, match="143"):
        scripts.gpu.whole_part("ppo", tmp_path, arguments)


def test_a_command_that_takes_too_long_is_interrupted(scripts):
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` has it ignored, by children too
    try:
        with pytest.raises(scripts.measure.Failed, match=r"longer than 0\.5 s"):
            scripts.measure.run_command(command, 0.5)
    finally:
        signal.signal(signal.SIGINT, before)
    with pytest.raises(scripts.measure.Failed, match="No such file"):
        scripts.measure.run_command(["cp", "/nonexistent/file", "."], None)


STARTS = """
import pathlib, sys
sys.path.insert(0, "benchmarks")
import handover_server, handover, measure
folder = pathlib.Path(sys.argv[1])
measure.end_on_sigterm()
options = handover.read_options(["--device", "cpu", "--folder", str(folder), "--vllm-venv", str(folder / "venv")])
with handover_server.serving(folder, options):
    pass
"""

WAITS = """import os, pathlib, signal, socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1]))) as server:
    server.accept()
    pathlib.Path("new").write_text(str(os.getpid()))
    os.rename("new", "pid")
    signal.pause()
"""


def test_sigterm_ends_the_server(tmp_path):
    """The server is a program here that has a session of its own. It writes down its id when it is asked, and waits."""
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!{sys.executable}\n{WAITS}")
    python.chmod(0o755)
    script = subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path)], cwd=ROOT)
    while not (tmp_path / "pid").exists():
        assert script.poll() is None
        time.sleep(0.05)
    pid = int((tmp_path / "pid").read_text())
    script.send_signal(signal.SIGTERM)
    assert script.wait(60) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
