"""What goes wrong in the middle of a run: what was done is kept, the fault is named, and once it is mended the run is the same."""

import json
import pathlib
import shutil

import pytest
import torch

from tests.resume import runs
from tests.resume.rl import rl_runs


@pytest.fixture
def own(inputs, tmp_path):
    """A folder with files of its own, which a test may damage."""
    for name in ("train.jsonl", "rewards.py"):
        shutil.copy(inputs / name, tmp_path / name)
    return tmp_path


def config_of(inputs, own, output, **changes):
    functions = [{"function": f"{own}/rewards.py:digits"}]
    data = {"train": str(own / "train.jsonl")}
    return rl_runs.make_config(inputs, own / output, "grpo", rewards={"functions": functions}, data=data, **changes)


def row_of_the_second_rollout(output):
    """The index of a row that the rollout before step 5 has and the one before step 1 has not."""
    rows = [
        {json.loads(line)["index"] for line in lines}
        for name, lines in runs.rollouts(output).items()
        if name in ("step_00000001.jsonl", "step_00000005.jsonl")
    ]
    return min(rows[1] - rows[0])


@pytest.mark.slow
def test_a_reward_function_that_raises_saves_first_and_goes_on_when_it_is_mended(inputs, own, unharmed):
    index = row_of_the_second_rollout(unharmed("grpo"))
    (own / "faults.txt").write_text(json.loads((own / "train.jsonl").read_text().splitlines()[index])["id"])
    config = config_of(inputs, own, "run", checkpoint={"every": None})
    ended, message, _ = rl_runs.train(config, 1)
    assert ended == "RewardError" and "\n" not in message, (ended, message)
    for words in (
        f"rewards.functions[0].function: {own}/rewards.py:digits", f"row {own}/train.jsonl:{index + 1}: raised ", "ValueError", "the judge is ill",
        f"steps 1 to 4 are saved in {own}/run/checkpoints/step_00000004",
    ):  # fmt: skip
        assert words in message, message
    report = own / "run" / "failed" / "reward_step_5.txt"
    assert f"its traceback and the completion are in {report}; steps" in message
    assert all(
        words in report.read_text() for words in ("the judge is ill", 'rewards.py", line 10, in digits', "completion:")
    )
    (kept,) = (own / "run" / "pending").iterdir()
    written = kept.stat().st_mtime_ns
    again = rl_runs.train(config, 1)
    assert again[:2] == (ended, message), "until it is mended it says the same"
    assert f"step 5: 8 samples are those in {kept}, which were not scored to the end" in again[2]
    assert kept.stat().st_mtime_ns == written, "what was sampled is not sampled again"
    (own / "faults.txt").unlink()
    assert f"step 5: 8 samples are those in {kept}" in rl_runs.finish(config, 1)
    assert not (own / "run" / "pending").exists()
    assert_same(own / "run", unharmed("grpo"), moved=(own, inputs))


@pytest.mark.slow
def test_a_row_that_cannot_be_read_likewise_where_it_is_skipped_then(inputs, own, unharmed):
    """Other data under a saved position is refused (trap 32), so what may be put right is `data.on_bad_row`."""
    number = row_of_the_second_rollout(unharmed("grpo"))
    good = (own / "train.jsonl").read_text().splitlines()
    bad = json.dumps({"prompt": 7, **{k: v for k, v in json.loads(good[number]).items() if k != "prompt"}})
    (own / "train.jsonl").write_text("".join(f"{line}\n" for line in [*good[:number], bad, *good[number + 1 :]]))
    config = config_of(inputs, own, "run", checkpoint={"every": None})
    ended, message, _ = rl_runs.train(config, 1)
    assert (
        ended == "DataError"
        and message.startswith(f"{own}/train.jsonl:{number + 1}: prompt is 7")
        and "\n" not in message
    ), (ended, message)
    assert f"; steps 1 to 4 are saved in {own}/run/checkpoints/step_00000004" in message
    skips = {"data": {**config["data"], "on_bad_row": "skip"}}
    assert "data.train: rows skipped: 1" in rl_runs.finish({**config, **skips}, 1)
    rl_runs.finish({**config, **skips, "output_dir": str(own / "once")}, 1)
    assert_same(own / "run", own / "once", moved=("", ""))


def test_a_fault_in_an_evaluation_saves_the_step_first(inputs, own, unharmed):
    """The step's row is there without its evaluation; the run that goes on evaluates it, and writes the row anew."""
    config = config_of(inputs, own, "run", checkpoint={"every": None})
    faults = str(own / "faults.txt")
    ended, message, _ = rl_runs.train(
        config, 1, happening="writes", place="evaluation", step=3, path=faults, text="eval50"
    )
    assert ended == "RewardError" and "the judge is ill" in message and "\n" not in message, (ended, message)
    assert message.endswith(f"steps 1 to 3 are saved in {own}/run/checkpoints/step_00000003")
    rows = runs.steps(own / "run")
    assert [row["step"] for row in rows] == [0, 1, 2, 3] and "eval/accuracy" not in rows[-1]
    (own / "faults.txt").unlink()
    rl_runs.finish(config, 1)
    assert_same(own / "run", unharmed("grpo"), moved=(own, inputs))


def test_a_run_that_ends_before_its_first_step_evaluates_the_start_again(inputs, own):
    """Step 0 has one line, also where a kill came after it was written. Nothing is saved."""
    config = config_of(inputs, own, "run")
    (own / "faults.txt").write_text(" ".join(f"train{i}" for i in range(10, 20)))
    for _ in range(2):
        ended, message, said = rl_runs.train(config, 1)
        assert ended == "RewardError" and "are saved" not in message
    assert "step 1: 8 samples are those in " in said
    other = rl_runs.train({**config, "seed": 4}, 1)
    assert other[0] == "RewardError" and "samples are those in" not in other[2], "other samples are asked for"
    assert [row["step"] for row in runs.steps(own / "run")] == [0]
    assert not list((own / "run").glob("checkpoints/step_*"))


@pytest.mark.parametrize(("role", "step"), [pytest.param("actor", 6, marks=pytest.mark.nightly), ("critic", 5)])
def test_a_loss_that_is_no_number_keeps_its_batch_and_saves_nothing(inputs, tmp_path, unharmed, role, step):
    config = rl_runs.make_config(inputs, tmp_path / "run", "ppo")
    ended, message, _ = rl_runs.train(config, 2, happening="nan_loss", role=role, step=step)
    failed = tmp_path / "run" / "failed" / f"step_{step}.pt"
    last = tmp_path / "run" / "checkpoints" / "step_00000003"
    assert ended == "TrainingError"
    assert message == (
        f"step {step}: the {role}'s loss is nan; the batch is in {failed}; the last good checkpoint is {last}"
    )
    kept = torch.load(failed, weights_only=True)
    assert kept["step"] == step and len(kept["lengths"]) == 4 and int(kept["lengths"].sum()) == len(kept["tokens"])
    assert [row["step"] for row in runs.steps(tmp_path / "run")] == list(range(step))
    if role == "actor":  # what was nan is one no more
        rl_runs.finish(config, 2)
        assert_same(tmp_path / "run", unharmed("ppo"), moved=("", ""))


def assert_same(output: pathlib.Path, unharmed: pathlib.Path, *, moved: tuple[object, object]) -> None:
    """The result. moved: the test's own folder of rows, which rollouts name, and the other run's."""
    assert runs.steps(output) == runs.steps(unharmed)
    ours = {name: [line.replace(*map(str, moved)) for line in lines] for name, lines in runs.rollouts(output).items()}
    assert ours == runs.rollouts(unharmed)
    runs.assert_same_state(runs.exported(output), runs.exported(unharmed), "export")
    tensors = [runs.sharded_tensors(runs.newest(o)) for o in (output, unharmed)]
    runs.assert_same_state(*tensors, "tensors of the checkpoint")
