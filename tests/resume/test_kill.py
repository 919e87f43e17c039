"""A run that is killed by SIGKILL, again and again, and started with the same command is the run that was not killed.

Through the real command line, at night, at 20 seeded moments over six layouts, and at 24 over three of gated delta nets. At least a
third of them are at a save. Equal: metrics but for timings, the exported files byte by byte, and everything in the last
checkpoint. That is parameters, master weights, moments and step count of AdamW (trap 25), schedule (trap 23), RNG of
every rank (the models have dropout), position in the data (trap 32), all experts on all ranks (trap 33). The processes
of a kill are gone before the next start. CI kills ranks without the command line: test_background_kills.py.
"""

import os

import pytest

from tests.resume import runs
from tests.resume.kills import kill_at, moments

SEEDED = {"tp1": 4, "tp2": 4, "pp2 tied": 3, "dp2": 3, "ep2": 3, "fsdp dp2": 3}
SEEDED |= {"delta tp2": 8, "delta cp2": 8, "delta fsdp dp2": 8}
IN_A_RUN = 4  # a moment takes up to two of a run's steps


def kill_and_compare(folder, inputs, unharmed, name, chosen, **changes):
    """The moments one after another in one run, then to the end."""
    run = runs.new_run(folder, inputs, runs.LAYOUTS[name], **changes)
    ends = []
    for moment in chosen:
        ends.append(kill_at(run, moment))
        print(f"{name}: {moment}: {ends[-1]}")
    assert "missed" not in ends, list(zip(chosen, ends, strict=True))
    kept = any(name.startswith("step_") for name in os.listdir(run.output / "checkpoints"))
    said = run.to_the_end()
    goes_on = ("resuming from", "but not its export; exporting", "is complete")  # killed as it ended
    assert any(words in said for words in goes_on) or not kept  # killed before each first save was whole
    runs.assert_same_run(run.output, unharmed(name))
    assert not (run.output / ".tmp-hf").exists()
    return ends


@pytest.mark.nightly
@pytest.mark.parametrize("name", SEEDED)
def test_a_run_killed_at_seeded_moments(inputs, unharmed, tmp_path, name):
    drawn = moments(f"kill {name}", SEEDED[name])
    for first in range(0, len(drawn), IN_A_RUN):
        kill_and_compare(tmp_path / f"from {first}", inputs, unharmed, name, drawn[first : first + IN_A_RUN])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["lora tp2", "lora ep2", "lora fsdp dp2"])
def test_a_killed_run_of_adapters(inputs, unharmed, tmp_path, name):
    """The checkpoint holds the adapters and their optimizer alone; the base is read again."""
    kill_and_compare(tmp_path, inputs, unharmed, name, moments(f"kill {name}", 2))
