"""A run of `mrl ppo` that is stopped, in any phase of an iteration, and started again is the run that was not stopped.

Each chain stops one run again and again, and then lets it end: the signal's message says where in the iteration it came,
and metrics, rollouts, exported weights and everything in the last checkpoint (both roles, optimizers, RNG, KL controller,
position in the data, reference; traps 23, 25, 32) are equal bit by bit to those of a run that nothing happened to.
"""

import re

import pytest

from tests.resume import runs
from tests.resume.rl import rl_runs
from tests.tiers import in_tiers, nightly_but

MADE = (
    r"within iteration {}, whose rollout is made, after {} of its 4 steps \(step {} of 8\), saved in \S+step_{:08d}; "
)
BETWEEN = r"at the start of iteration {} \(step {} of 8\), saved in \S+step_{:08d}; "
BEFORE = r"at the start of iteration 1 \(step 0 of 8\), before it began; "
END = r"after the last iteration \(step 8 of 8\), saved in \S+step_00000008; "

# (place, step, which rank the signal comes to), where the run says that it was
CHAINS = {
    "ppo": [
        ("rollout", 1, 0, MADE.format(1, 0, 0, 0)),
        ("step", 2, 1, MADE.format(1, 2, 2, 2)),
        ("step", 4, 0, BETWEEN.format(2, 4, 4)),
        ("step", 8, 0, END),
    ],
    "grpo": [
        ("start", 0, 0, BEFORE),
        ("evaluation", 0, 0, BEFORE),
        ("rewards", 1, 0, MADE.format(1, 0, 0, 0)),
        ("step", 1, 0, MADE.format(1, 1, 1, 1)),
        ("save", 3, 0, BETWEEN.format(2, 4, 4)),
        ("forwards", 5, 0, MADE.format(2, 0, 4, 4)),
        ("start", 0, 0, r"within iteration 2, .* \(step 4 of 8\), which the next start goes on from; "),
        ("step", 7, 0, MADE.format(2, 3, 7, 7)),
        ("evaluation", 8, 0, END),
    ],
    "dapo": [
        ("rollout", 1, 0, MADE.format(1, 0, 0, 0)),
        ("step", 3, 1, MADE.format(1, 3, 3, 3)),
        ("evaluation", 6, 1, MADE.format(2, 2, 6, 6)),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", in_tiers([], ["ppo"], ["ppo", "grpo", "dapo"]))
def test_stopped_in_any_phase_it_goes_on_bitwise(inputs, unharmed, tmp_path, name):
    """Nothing but the signals saves before the end: what the run goes on from is what a signal saved (but where it comes in a save)."""
    world = rl_runs.RUNS[name][0]
    every = 3 if any(place == "save" for place, *_ in CHAINS[name]) else None
    config = rl_runs.make_config(inputs, tmp_path / "run", name, checkpoint={"every": every})
    for place, step, rank, says in CHAINS[name]:
        ended, message, _ = rl_runs.train(config, world, happening="signals", place=place, step=step, rank=rank)
        assert ended == "stopped" and re.match(f"stopped by SIGTERM {says}run the same", message), (
            place,
            step,
            message,
        )
    rl_runs.finish(config, world)
    runs.assert_same_result(tmp_path / "run", unharmed(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["grpo"], ["grpo", "ppo"]))
def test_a_run_that_broke_off_goes_on_from_the_middle_of_an_iteration(inputs, unharmed, tmp_path, name):
    """Saved after steps 3 and 6 of iterations of 4: what came after is made again, to the same lines and rollouts."""
    world, output = rl_runs.RUNS[name][0], tmp_path / "run"
    config = rl_runs.make_config(inputs, output, name)
    for place, step, made in (("step", 6, 5), ("save", 8, 8)):
        ended, message, _ = rl_runs.train(config, world, happening="crash", place=place, step=step)
        assert (ended, message) == ("Crash", f"{place} of step {step}")
        assert [row["step"] for row in runs.steps(output)][-1] == made
        assert runs.newest(output).name == f"step_{step // 4 * 3:08d}", "in the middle of an iteration"
        rewound = output / "samples" / "step_00000005.jsonl"  # sampled after the first checkpoint, before the second
        if step == 6:
            rewound.write_text("")
    said = rl_runs.finish(config, world)
    assert "resuming from" in said and "after step 6" in said
    runs.assert_same_run(output, unharmed(name))


@pytest.mark.slow
def test_a_run_that_broke_off_before_its_first_save_begins_again(inputs, unharmed, tmp_path):
    """Its evaluation before training, too, whose line is there once."""
    config = rl_runs.make_config(inputs, tmp_path / "run", "grpo")
    assert rl_runs.train(config, 1, happening="crash", place="step", step=2)[0] == "Crash"
    assert [row["step"] for row in runs.steps(tmp_path / "run")] == [0, 1]
    rl_runs.finish(config, 1)
    runs.assert_same_run(tmp_path / "run", unharmed("grpo"))
