"""Engines that installed packages register: how they are found, what is said where they are wrong, what a config may ask of
them; and `mrl sft` with one, which is installed here as pip does it (tests/engine/external)."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from mrl.config.backends import check_supported
from mrl.config.checks import check_backend
from mrl.config.schema import EngineConfig, FSDPConfig, ModelConfig, ParallelConfig, RoleConfig
from mrl.convert.sources import open_checkpoint
from mrl.engine.fsdp.engine import FSDPEngine
from mrl.engine.registry import engine_class
from mrl.errors import CheckpointError, ConfigError
from tests.engine import contract, layouts, suite, tiny
from tests.engine.harness import run_case
from tests.forks import forks
from tests.resume import runs

MODEL = ModelConfig(path="somewhere")


@pytest.fixture(scope="module", autouse=True)
def installed() -> str:
    return layouts.install()


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    return runs.make_inputs(tmp_path_factory.mktemp("inputs"))


# -- names -------------------------------------------------------------------------------------------------------------


def package(folder: pathlib.Path, name: str, entries: str, code: str = "") -> None:
    """An installed package as the import system sees it: a module, and metadata beside it."""
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[mrl.engines]\n{entries}\n")
    (folder / f"{name}.py").write_text(code)


@pytest.fixture
def site(tmp_path, monkeypatch) -> pathlib.Path:
    """A folder that packages are imported from."""
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_the_engine_of_a_package_is_found():
    found = engine_class("plain")
    assert (found.__module__, found.__name__, found.backend) == ("mrl_plain.engine", "PlainEngine", "plain")
    assert engine_class("fsdp") is FSDPEngine


@pytest.mark.parametrize("written", ["plian"])
def test_a_name_that_nobody_registers(written):
    with pytest.raises(ConfigError) as error:
        check_backend(MODEL, EngineConfig(backend=written), "critic")
    assert str(error.value) == (
        f'critic.engine.backend: value "{written}" is no engine; give one of megatron, fsdp, plain, or install a '
        "package that registers it under mrl.engines"
    )


def test_two_packages_with_one_name(site):
    package(site, "second", "plain = second:Engine")
    with pytest.raises(ConfigError) as error:
        engine_class("plain")
    assert str(error.value) == (
        'engine.backend: value "plain" is registered by 2 packages, mrl-plain 0.1 and second 1.0; uninstall all but one'
    )


# -- what a config may ask ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("backend", "change", "message"),
    [
        ("fsdp", {"parallel": ParallelConfig(tp=2)}, "engine.parallel.tp: value 2 is not supported by backend fsdp"),
        ("megatron", {"fsdp": FSDPConfig(replicate=2)}, "engine.fsdp.replicate: value 2 is not supported by backend megatron"),
        ("plain", {"parallel": ParallelConfig(tp=2)}, "engine.parallel.tp: value 2 is not supported by backend plain; "),
        ("plain", {"options": {"bucket": 1}}, "engine.options.bucket: value 1 is for an option that backend plain does not have; its"),
        ("plain", {"options": {"bucket_mb": "1"}}, 'engine.options.bucket_mb: value "1" is no size'),
    ],
)  # fmt: skip
def test_engines_refuse_what_they_cannot_do(tmp_path, backend, change, message):
    config = tiny.role(str(tmp_path), backend=backend)
    with pytest.raises(ConfigError) as error:
        engine_class(backend)(dataclasses.replace(config, engine=dataclasses.replace(config.engine, **change)))
    assert str(error.value).startswith(message)


def test_what_an_engine_says_it_supports():
    """A section, a choice of a key, an entry of a list, an option; anything else that is set is refused."""

    def asks(*supports: str, **engine: Any) -> str:
        try:
            check_supported("x", supports, MODEL, EngineConfig(backend="x", **engine))
        except ConfigError as error:
            return str(error)
        return "nothing"

    two = ParallelConfig(tp=2, pp=2)
    assert asks("engine.parallel", parallel=two) == asks("engine.parallel.tp", "engine.parallel.pp", parallel=two)
    assert asks("engine.parallel.tp", parallel=two).startswith("engine.parallel.pp: value 2 is not supported")
    assert asks(parallel=ParallelConfig(sp=False, etp=1)) == "nothing"
    assert asks("engine.recompute.full", recompute="full") == "nothing"
    assert asks("engine.recompute.full", recompute="selective") == (
        'engine.recompute: value "selective" is not supported by backend x; give full, or leave it out'
    )
    offload = {"offload": ("parameters", "optimizer")}
    assert asks("engine.offload", **offload) == "nothing"
    assert asks("engine.offload.parameters", "engine.offload.gradients", **offload) == (
        'engine.offload: value "optimizer" is not supported by backend x; give parameters or gradients, or leave it out'
    )
    assert asks("engine.options.a", options={"a": [1, {}]}) == "nothing"
    assert (
        asks(options={"a": 1})
        == "engine.options.a: value 1 is for an option that backend x does not have; it has none: leave it out"
    )


def reductions(config: RoleConfig) -> int:
    """How often a step adds gradients up over the ranks."""
    engine, found, original = contract.make_engine(config), [], dist.all_reduce
    contract.gradients(engine, engine.shard_data(tiny.uneven_batch()))
    engine.optimizer_zero_grad()
    noted = lambda tensor, *args, **kwargs: found.append(tensor.numel()) or original(tensor, *args, **kwargs)  # noqa: E731
    with mock.patch.object(dist, "all_reduce", noted):
        engine.optimizer_step()
    return len(found)


def test_options_reach_the_engine(tmp_path):
    model = tiny.make_model(str(tmp_path), "llama")
    counts = []
    for options in ({}, {"bucket_mb": 0.01}):
        world_size, config = layouts.world_and_role("external dp2", model, options=options)
        counts.append(run_case(world_size, "tests.engine.test_registry:reductions", config=config))
    assert counts[0] == 1 and counts[1] > 5, counts


def test_the_suite_is_asked_for_an_engine_and_its_layouts(capsys):
    assert suite.degrees("4:tp=2,pp=2") == ("tp2 pp2 on 4", (4, {"tp": 2, "pp": 2}))
    with pytest.raises(SystemExit) as end:
        suite.main(["plian"])
    assert end.value.code == 2 and "is no engine; give one of megatron, fsdp, plain" in capsys.readouterr().err


# -- commands ----------------------------------------------------------------------------------------------------------


def plain_config(inputs: pathlib.Path, output_dir: pathlib.Path, **changes: Any) -> dict[str, Any]:
    layout = runs.Layout(2, "dense", layouts.available("plain"))
    return runs.make_config(inputs, output_dir, layout, **{"train": {"steps": 4, "eval_every": None}, **changes})


def test_a_run_resumes_bitwise_and_says_who_can_read_its_checkpoints(inputs, tmp_path):
    """Dropout is on. A run that a signal stops in step 2 and that goes on is the run that was not stopped."""
    whole, stopped = (plain_config(inputs, tmp_path / name) for name in ("whole", "stopped"))
    runs.finish(whole, 2)
    runs.stop_after(stopped, 2, 2)
    runs.finish(stopped, 2)
    runs.assert_same_steps(*(pathlib.Path(c["output_dir"]) for c in (whole, stopped)))
    a, b = (runs.exported(tmp_path / name) for name in ("whole", "stopped"))
    runs.assert_same_state(a, b, "export")
    assert json.loads((runs.newest(tmp_path / "whole") / "COMPLETE").read_text())["backend"] == "plain"

    saved = str(runs.newest(tmp_path / "whole"))
    changed = plain_config(inputs, tmp_path / "whole", engine={"backend": "fsdp"}, train={"steps": 5})
    ended, message, _ = runs.train(changed, 2)
    assert ended == "ConfigError" and message.startswith('engine.backend: value "fsdp" is not the "plain" that the')
    elsewhere = plain_config(inputs, tmp_path / "new", engine={"backend": "fsdp"}, checkpoint={"resume": saved})
    ended, message, _ = runs.train(elsewhere, 2)
    assert ended in ("ConfigError", "CheckpointError") and "plain" in message, message
    with pytest.raises(
        CheckpointError, match="was saved by the engine 'plain' of another package, whose files only that"
    ):
        open_checkpoint(tmp_path / "whole")


def command(installed: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE")}
    env |= {"PYTHONPATH": f"{runs.REPO}{os.pathsep}{installed}", "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, *args], env=env, capture_output=True, text=True)


@pytest.mark.slow
def test_a_dry_run_asks_the_engine(inputs, tmp_path, installed):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(plain_config(inputs, tmp_path / "run", engine={"backend": "plain"})))  # JSON is YAML
    out, errors = tmp_path / "out", tmp_path / "errors"

    def dry_run(*words: str) -> int:
        environ = os.environ | {"PYTHONPATH": installed}
        sft = ["sft", str(path), "--nproc", "2", "--dry-run", *words]
        return forks().start(tmp_path, out, environ, sft, errors).wait(120)

    assert dry_run("engine.options.bucket_mb=2") == 0, errors.read_text()
    said = out.read_text()
    assert "backend: plain" in said and "bucket_mb: 2" in said and "# layout: dp2" in said
    assert dry_run("engine.options.buckets=2") == 2 and out.read_text() == said
    assert errors.read_text() == (
        "mrl: engine.options.buckets: value 2 is for an option that backend plain does not have; its options are bucket_mb\n"
    )


@pytest.mark.slow
def test_serve_refuses_an_engine_that_holds_one_model(inputs, tmp_path, installed):
    path = tmp_path / "serve.yaml"
    engine = {"backend": "plain", "device": "cpu"}
    path.write_text(
        json.dumps(
            {
                "output_dir": "run",
                "model": {"path": str(inputs / "dense")},
                "engine": engine,
                "serve": {"max_length": 64},
            }
        )
    )
    environ, log = os.environ | {"PYTHONPATH": installed}, tmp_path / "log"
    started = forks().start(tmp_path, log, environ, ["serve", str(path), "--port", "0"])
    assert started.wait(120) == 2 and log.read_text().endswith(
        'mrl: engine.backend: value "plain" holds one model, and mrl serve has several; give megatron or fsdp\n'
    )


def test_reading_a_config_imports_no_engine(inputs, tmp_path, installed):
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(plain_config(inputs, tmp_path / "run")))
    code = (
        f"import sys\nfrom mrl.config.load import load_config\nassert load_config({str(path)!r}).engine.backend == 'plain'\n"
        "print([name for name in ('torch', 'mrl_plain', 'mrl.engine') if name in sys.modules])"
    )
    assert command(installed, "-c", code).stdout == "[]\n"


@pytest.mark.nightly
def test_what_engines_of_mrl_take_is_known_without_what_runs_them(installed):
    code = (
        "import sys\nfrom mrl.engine.registry import checks_of\n"
        "print(*(checks_of(name).backend for name in ('megatron', 'fsdp', 'plain')))\n"
        "print([name for name in ('megatron', 'mrl.engine.megatron.engine', 'mrl.engine.fsdp.engine') if name in sys.modules])"
    )
    assert command(installed, "-c", code).stdout == "megatron fsdp plain\n[]\n"
