"""SIGKILL to the real command at seeded moments: what is started again, with the same command, is the run that was not killed.

The moments are those of tests/resume/kills.py: in the start-up, a step, a save before and after its marker, a rename, a
deletion or the export; to everyone, the launcher or one rank. Saved after every third step, most of them leave an
iteration broken off, with its rollout written and steps to be made again.
"""

import pytest

from tests.resume import runs
from tests.resume.kills import kill_at, moments
from tests.resume.rl import rl_runs


def run_of(folder, inputs, name):
    folder.mkdir(parents=True, exist_ok=True)
    return runs.Run(
        folder,
        rl_runs.make_config(inputs, folder / "run", name, train={"steps": 16}),
        rl_runs.RUNS[name][0],
        command="ppo",
    )


@pytest.mark.nightly
@pytest.mark.parametrize(("name", "count"), [("ppo", 3), ("grpo", 3), ("opd", 3)])
def test_a_run_killed_at_seeded_moments(inputs, tmp_path, name, count):
    whole, run = (run_of(tmp_path / part, inputs, name) for part in ("whole", "killed"))
    rl_runs.finish(whole.config, whole.world)  # in waiting processes, which start faster than the command
    ends = []
    for moment in moments(f"kill rl {name}", count):
        ends.append(kill_at(run, moment))
        print(f"{name}: {moment}: {ends[-1]}")
    assert "missed" not in ends, ends
    run.to_the_end()
    runs.assert_same_run(run.output, whole.output)
    leftovers = [path for path in run.output.rglob("*") if path.name.startswith(".tmp") or path.suffix == ".tmp"]
    assert not leftovers, leftovers
