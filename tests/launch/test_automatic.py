"""`auto` of engine.micro_batch.tokens and rollout.cache_tokens: chosen by the plan on a GPU, kept by a resume, else the default."""

from __future__ import annotations

import pytest
import yaml

from mrl.commands import ppo, sft
from mrl.config.checks import micro_batch_tokens
from mrl.config.load import load_config
from mrl.config.ppo import RolloutConfig
from mrl.config.schema import MicroBatchConfig
from mrl.launch import automatic, start
from tests.check.works import make_configs

SFT, PPO = sft.SFT(), ppo.PPO()
AUTO = ("engine.micro_batch.size=null", "engine.micro_batch.tokens=auto")


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with configs of a tiny model."""
    folder = tmp_path_factory.mktemp("auto")
    make_configs(folder)
    return folder


@pytest.fixture(autouse=True)
def _there(place, monkeypatch):
    monkeypatch.chdir(place)


@pytest.mark.parametrize("most", [0, 7, 8, 9, 31, 32, 99])
def test_largest_is_the_last_that_fits(most):
    values = list(range(8, 40, 8))
    assert automatic.largest(values, lambda value: value <= most) == max((v for v in values if v <= most), default=None)


def test_without_a_gpu_auto_is_the_default():
    assert micro_batch_tokens(MicroBatchConfig(tokens="auto"), 8) == micro_batch_tokens(MicroBatchConfig(), 8) == 4096
    assert RolloutConfig(cache_tokens="auto").cache_size == RolloutConfig().cache_tokens
    assert MicroBatchConfig(tokens=48).set_tokens == 48
    config = load_config("sft.yaml", [*AUTO], SFT.root)
    given: list[str] = []
    assert start._choose_auto(SFT, config, "sft.yaml", given, 1, False) == (given, [])


def chosen(line: str, fits) -> tuple[list[str], list[str]]:
    command, file = (PPO, "ppo.yaml") if "rollout" in line else (SFT, "sft.yaml")
    config = load_config(file, line.split(), command.root)
    return automatic.choose(command, config, [], fits)


def test_tokens_are_a_multiple_of_the_longest_sequence_and_at_most_32768():
    longest, _ = SFT.longest(load_config("sft.yaml", [], SFT.root))
    overrides, lines = chosen(" ".join(AUTO), lambda more: True)
    assert overrides == [f"engine.micro_batch.tokens={32768 // longest * longest}"] and "10%" in lines[0]
    overrides, _ = chosen(" ".join(AUTO), lambda more: int(more[-1].partition("=")[2]) <= 3 * longest)
    assert overrides == [f"engine.micro_batch.tokens={3 * longest}"]


@pytest.mark.parametrize("known", [False, None])
def test_what_is_not_known_to_fit_is_not_chosen(known):
    overrides, lines = chosen(" ".join(AUTO), lambda more: known)
    assert overrides == [] and lines == [
        "engine.micro_batch.tokens: auto is the default, because no larger one is known to fit"
    ]


def test_the_cache_is_no_larger_than_a_step_can_fill():
    overrides, _ = chosen("rollout.cache_tokens=auto", lambda more: True)
    assert overrides == ["rollout.cache_tokens=65536"]


def test_a_run_keeps_the_number_of_its_config_yaml(tmp_path):
    given = [f"output_dir={tmp_path}", *AUTO]
    config = load_config("sft.yaml", given, SFT.root)
    assert automatic.kept(SFT, config, given) == given
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"engine": {"micro_batch": {"tokens": 96}}}))
    again = automatic.kept(SFT, config, given)
    assert load_config("sft.yaml", again, SFT.root).engine.micro_batch.tokens == 96


@pytest.mark.slow
def test_more_memory_gives_more_tokens(monkeypatch):
    """By real plans: the number fits a GPU of so much memory, less the margin, and one sequence more does not."""
    from mrl.launch import planning
    from mrl.plan.gpus import gpu_here

    given = [*AUTO, "train.global_batch_size=2048", "engine.backend=megatron", "engine.device=auto"]
    config = load_config("sft.yaml", given, SFT.root)
    longest, _ = SFT.longest(config)
    found = []
    for mib in (4800, 5600):
        monkeypatch.setattr(start, "_gpus", lambda mib=mib: [("NVIDIA H100", mib << 20, (9, 0))])
        overrides, (line,) = start._choose_auto(SFT, config, "sft.yaml", given, 1, False)
        tokens = int(overrides[-1].partition("=")[2])
        assert f"{tokens:,}" in line
        card = gpu_here("NVIDIA H100", int((mib << 20) * 0.9), None, (9, 0))
        found.append(tokens)
        if len(found) == 2:
            break
        fits = {}
        for more in (tokens, tokens + longest):
            of = load_config("sft.yaml", [*given, f"engine.micro_batch.tokens={more}"], SFT.root)
            fits[more] = planning.verdict(SFT, of, 1, card)[0]
        assert list(fits.values()) == [True, False], fits
    assert found[0] < found[1]
