"""Runs that save in the background, killed by SIGKILL at 20 seeded moments: each of ten points of a save, on both backends.

The points are before the folder is made, within a data file, between the files and COMPLETE, between COMPLETE and the
folder's name, within the deletion of the checkpoint before, and after all of it; training is one or two steps further on
each time, and one rank or all are killed. After each kill the checkpoints that are whole are those that the point says,
and hold what a run without kills and without threads saved at that step; in the end the run is that run, bit by bit.
test_kill.py kills through the command line.
"""

import json

import pytest

from mrl.engine import atomic_checkpoint
from tests.engine.harness import Case, run_world
from tests.resume import runs
from tests.resume.background_kills import EVERY, STEPS, Kill, draw

COUNTS = {
    "megatron": {"tp2": 3, "dp2": 3, "pp2 tied": 2, "ep2": 2},
    "fsdp": {"fsdp dp2": 4, "fsdp cp2": 3, "lora fsdp dp2": 3},
}
WORLDS = {name: layout.world for name, layout in runs.LAYOUTS.items()}
DRAWN = {name: kills for b, counts in COUNTS.items() for name, kills in draw(f"save {b}", counts, WORLDS).items()}
QUICK = {  # one within a file, one between the files and COMPLETE
    "tp2": [Kill("later tensor", 6, 2, 2, rank=1, everyone=False)],
    "fsdp dp2": [Kill("marker", 6, 1, 0, rank=0, everyone=True)],
}


@pytest.fixture(scope="module")
def undisturbed(inputs, tmp_path_factory):
    """Name of a layout -> the folder of a run that waits for its saves and keeps all of them."""
    made = {}

    def of(name):
        if name not in made:
            layout, output = runs.LAYOUTS[name], tmp_path_factory.mktemp("undisturbed") / "run"
            runs.finish(config_of(inputs, output, name, background=False, keep=None), layout.world)
            made[name] = output
        return made[name]

    return of


def config_of(inputs, output, name, **checkpoint):
    return runs.make_config(
        inputs, output, runs.LAYOUTS[name], train={"steps": STEPS}, checkpoint={"every": EVERY, **checkpoint}
    )


def kill_and_compare(inputs, expected, folder, name, kills):
    """The kills one after another in one run, then to the end."""
    world, output = WORLDS[name], folder / "run"
    config = config_of(inputs, output, name, background=True, keep=1)
    leaves: list[int] = []
    for number, kill in enumerate(kills):
        killed = folder / f"killed{number}"
        case = {"config": config, "kill": kill, "killed": str(killed)}
        (ended,) = run_world(world, [Case("tests.resume.background_kills:train_until", case)])
        assert killed.exists(), f"{name}: {kill} did not come: {ended.error}"
        assert json.loads(killed.read_text())["step"] >= kill.save + kill.steps, kill
        leaves = kill.leaves(leaves)
        whole = atomic_checkpoint.steps_of(str(output / "checkpoints"))
        assert sorted(step for step, _ in whole) == leaves, kill
        for step, path in whole:
            saved = [type(expected)(path), expected / "checkpoints" / atomic_checkpoint.step_name(step)]
            runs.assert_same_state(*map(runs.sharded_tensors, saved), f"{kill}: tensors of step {step}")
            runs.assert_same_state(*map(runs.small_state, saved), f"{kill}: state of step {step}")
        print(f"{name}: {kill}: leaves {leaves}")
    said = runs.finish(config, world)
    assert "resuming from" in said or not leaves
    runs.assert_same_result(output, expected)
    left = sorted(path.name for path in (output / "checkpoints").iterdir())
    assert left == ["latest", atomic_checkpoint.step_name(STEPS)]


@pytest.mark.slow
@pytest.mark.parametrize("name", QUICK)
def test_a_run_that_is_killed_while_it_saves_in_the_background(inputs, undisturbed, tmp_path, name):
    kill_and_compare(inputs, undisturbed(name), tmp_path, name, QUICK[name])


@pytest.mark.nightly
@pytest.mark.parametrize("name", DRAWN)
def test_a_run_that_saves_in_the_background_is_killed_at_each_point(inputs, undisturbed, tmp_path, name):
    kill_and_compare(inputs, undisturbed(name), tmp_path, name, DRAWN[name])
