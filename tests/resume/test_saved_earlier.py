"""Run directories that an earlier mrl left (saved/: fine-tuning at tp2, and PPO with a critic on FSDP; both after step 2 of 4)
are read as what they hold, bit by bit, and go on as they did there.

`after.jsonl` is what the earlier mrl wrote for steps 3 and 4, on another machine: instructions of another CPU round sums
otherwise (fp32, 6e-8 a sum), which two steps of AdamW leave below 1e-4.
"""

import pathlib
import shutil

import pytest

from mrl import metrics
from mrl.config.load import read_yaml
from mrl.engine.lora.identity import fingerprint
from mrl.weights.families import family_for
from mrl.weights.hf_config import read_hf_config
from tests.engine.harness import run_case
from tests.resume import runs

SAVED = pathlib.Path(__file__).parent / "saved"


@pytest.fixture
def folder(tmp_path):
    """A copy that a run may write into."""
    return shutil.copytree(SAVED, tmp_path / "saved")


def assert_goes_on(output):
    """Steps 1 and 2 stand as they were, and 3 and 4 have the earlier numbers."""
    rows = runs.steps(output)
    assert rows[:2] == runs.steps(SAVED / output.name)
    for row, before in zip(rows[2:], metrics.read(SAVED / output.name / "after.jsonl"), strict=True):
        numbers = {name: value for name, value in before.items() if name in row}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)
        assert {"step", "train/loss", "train/grad_norm"} <= numbers.keys() or "actor/grad_norm" in numbers


def test_fine_tuning(folder):
    config = read_yaml(folder / "sft" / "config.yaml")
    config["model"]["path"], config["data"]["train"] = str(folder / "model"), str(folder / "rows.jsonl")
    saved = runs.newest(folder / "sft")
    again = run_case(2, "tests.resume.cases:resave", config=config | {"output_dir": str(folder)}, checkpoint=str(saved))
    runs.assert_same_state(runs.sharded_tensors(saved), runs.sharded_tensors(pathlib.Path(again)), "tensors")
    runs.assert_same_state(runs.small_state(saved), runs.small_state(pathlib.Path(again)), "state")
    runs.finish(config | {"output_dir": str(folder / "sft")}, 2)
    assert_goes_on(folder / "sft")


def test_reinforcement_learning_is_read_bit_by_bit(folder):
    config = dict(read_yaml(folder / "ppo" / "config.yaml"), output_dir=str(folder / "again"))
    config["reference"] = {**config.get("reference", {}), "update_every": 2}  # one that never changes is saved no more
    saved = runs.newest(folder / "ppo")
    case = "tests.resume.rl.cases:resave"
    again = pathlib.Path(run_case(2, case, config=config, checkpoint=str(saved), folder=str(folder)))
    runs.assert_same_state(runs.sharded_tensors(saved), runs.sharded_tensors(again), "tensors")
    runs.assert_same_state(runs.small_state(saved), runs.small_state(again), "state")


def test_the_base_of_saved_adapters_is_known():
    """By a sum over its config and some of its tensors that is in every checkpoint of adapters."""
    model = str(SAVED / "model")
    config = read_hf_config(model)
    assert fingerprint(model, family_for(config), config, "lm") == "665f4188f962f813"


@pytest.mark.slow
def test_reinforcement_learning(folder):
    """By its config.yaml, from the folder that its paths are of."""
    ended = run_case(
        2, "tests.resume.rl.cases:train", config=read_yaml(folder / "ppo" / "config.yaml"), folder=str(folder)
    )
    assert ended[0] == "done", ended
    assert_goes_on(folder / "ppo")
    assert runs.rollouts(folder / "ppo").items() >= runs.rollouts(SAVED / "ppo").items()
