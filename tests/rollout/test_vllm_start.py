"""What a real vLLM says before it starts, and as a server that ends at its start (nightly). See test_vllm.py for where it is."""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest

from tests.rollout.real_vllm import ENVIRONMENT, ROOT, VENV, RealServer, make_model

pytestmark = pytest.mark.nightly

ASKED = """
import json, sys
from mrl.config.ppo import ServerConfig
from mrl.rollout.vllm_local import engine_arguments
from mrl.rollout.vllm_start import import_vllm, last_words
for path, length, gpu in json.loads(sys.argv[1]):
    made = engine_arguments(
        ServerConfig(), path=path, dtype="float32", max_length=length, mode="raw_logprobs", gpu=False
    )
    why = None
    try:
        import_vllm(gpu)
        from vllm.engine.arg_utils import EngineArgs
        EngineArgs(**made).create_model_config()
    except Exception as error:
        why = last_words(error)
    print("ASKED", json.dumps(why))
"""


def asked(*models: tuple[str, int, bool]) -> list[str | None]:
    """Why vLLM takes none of the models, by its own checks."""
    ran = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", ASKED, json.dumps(models)], capture_output=True, text=True, cwd=ROOT,
        env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    lines = [line.removeprefix("ASKED ") for line in ran.stdout.splitlines() if line.startswith("ASKED ")]
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> pathlib.Path:
    return pathlib.Path(make_model(str(tmp_path_factory.mktemp("model") / "whole"), 0))


def test_its_own_words_say_why_it_does_not_take_a_model(model, tmp_path):
    alone = tmp_path / "config_alone"  # as of a hub id whose weights are not here yet
    alone.mkdir()
    shutil.copy(model / "config.json", alone)
    whole, by_config, long, other = asked((str(model), 77, False), (str(alone), 77, False), (str(model), 10**6, False), (str(model), 77, True))  # fmt: skip
    assert (whole, by_config) == (None, None)
    assert long is not None and long.startswith("ValidationError: User-specified max_model_len (1000000)")
    assert other is not None and "is a build for the CPU here, and the actor is on a GPU" in other


def test_the_last_words_of_a_server_name_the_cause(model, tmp_path):
    """As tests/slurm/test_render.py, of a real server."""
    broken, attempt = shutil.copytree(model, tmp_path / "broken"), tmp_path / "attempt"
    attempt.mkdir()
    os.truncate(next(broken.glob("*.safetensors")), 1000)
    server = RealServer(str(broken), attempt / "servers.log")
    try:
        server.process.wait(400)
    finally:
        server.kill()
    script = (ROOT / "tests" / "slurm" / "golden" / "hetero.sbatch").read_text()
    function = re.search(r"^last_words\(\) \{\n.*?^\}\n", script, re.DOTALL | re.MULTILINE)
    assert function is not None
    said = subprocess.run(
        ["bash", "-c", f'attempt_dir="$1"; {function[0]} last_words', "bash", str(attempt)], capture_output=True, text=True,
    )  # fmt: skip
    assert "SafetensorError" in said.stdout and said.stdout.count("\n") == 1, said
