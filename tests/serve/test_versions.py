"""Clients of other versions, each installed for the test, and the oldest that is refused."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.nightly
SCRIPT = pathlib.Path(__file__).with_name("client_script.py")


def run(server, model, packages=None):
    environment = os.environ | ({} if packages is None else {"PYTHONPATH": str(packages)})
    line = [sys.executable, str(SCRIPT), server.url, model]
    return subprocess.run(line, env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.parametrize("version", ["0.29.1", "0.33.1", "0.36.0", "0.24.1"])
def test_a_client_of_another_version(one, version, tmp_path):
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*pip, f"tinker=={version}"], check=True, capture_output=True)
    done = run(one, one.model, tmp_path)
    if version == "0.24.1":
        assert done.returncode == 1 and "tinker 0.24.1 is too old for this server: pip install -U" in done.stderr
        return
    newest = json.loads(run(one, one.model).stdout)
    old = json.loads(done.stdout) if done.returncode == 0 else pytest.fail(done.stderr)
    assert old["version"] == version != newest["version"] and old["found"] == newest["found"]
    first, second = newest["found"][1], newest["found"][-1]
    assert first == second, "what went on from the save is what went on"
