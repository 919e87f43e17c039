"""`checkpoint.background`: what a thread writes while training goes on is what a save that waits writes.

The disk is slow: a thread sleeps before its first byte, and further steps change every parameter meanwhile.
"""

import contextlib
import errno
import os
import threading
import time

import pytest

from mrl import metrics
from mrl.engine import atomic_checkpoint
from tests.engine.harness import run_case
from tests.resume import runs
from tests.tiers import in_tiers, nightly_but

SLOW_S = 1.0


def slow_train(config):
    """The trainer, in a rank, with a disk that is slow for threads."""
    from mrl.config.load import from_dict
    from mrl.trainers import sft

    own = atomic_checkpoint.writing

    @contextlib.contextmanager
    def slow(*args, **kwargs):
        with own(*args, **kwargs) as folder:
            if threading.current_thread() is not threading.main_thread():
                time.sleep(SLOW_S)
            yield folder

    atomic_checkpoint.writing = slow
    try:
        sft.run(from_dict(config))
    finally:
        atomic_checkpoint.writing = own


@pytest.mark.parametrize("name", in_tiers([], ["tp2"], ["dp2", "tp2", "pp2 tied", "fsdp dp2"]))
def test_training_on_does_not_leak_into_a_checkpoint(inputs, tmp_path, name):
    layout, outputs = runs.LAYOUTS[name], []
    for background in (False, True):
        output = tmp_path / str(background)
        saves = {"every": 4, "keep": None, "background": background}
        config = runs.make_config(inputs, output, layout, checkpoint=saves)
        run_case(layout.world, "tests.resume.test_background:slow_train", config=config)
        outputs.append(output)
    runs.assert_same_result(*outputs)
    for step in (4, 8):
        folders = [output / "checkpoints" / atomic_checkpoint.step_name(step) for output in outputs]
        runs.assert_same_state(*map(runs.sharded_tensors, folders), f"tensors of step {step}")
        if layout.backend == "megatron":
            files = [{p.name: p.read_bytes() for p in (f / "mcore").iterdir()} for f in folders]
            assert files[0] == files[1]
    written = [row for row in metrics.read(outputs[1] / "metrics.jsonl") if "perf/save_write_s" in row]
    held = {row["step"]: row["perf/save_held_s"] for row in metrics.read(outputs[1] / "metrics.jsonl")
            if "perf/save_held_s" in row}  # fmt: skip
    assert 0 < held[5] < SLOW_S, f"the save of step 4 waited: {held}, {written}"
    assert all(SLOW_S < row["perf/save_write_s"] < 100 * SLOW_S for row in written), written


def train_on_a_full_disk(config, full_from):
    """What the trainer says in each rank, where no thread of the last one can write from its so manieth save on."""
    from mrl.config.load import from_dict
    from mrl.errors import CheckpointError
    from mrl.trainers import sft

    own, saves = os.fsync, set()

    def fsync(file):
        thread = threading.current_thread()
        if thread is not threading.main_thread() and int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
            saves.add(next(t for t in threading.enumerate() if t.name == "mrl-checkpoint"))
            if len(saves) >= full_from:
                raise OSError(errno.ENOSPC, "No space left on device")
        own(file)

    os.fsync = fsync
    try:
        sft.run(from_dict(config))
    except CheckpointError as error:
        return str(error)
    finally:
        os.fsync = own
    return "nothing"


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["fsdp dp2"], ["dp2", "fsdp dp2"]))
def test_a_full_disk_ends_the_run_on_all_ranks_with_what_was_saved(inputs, unharmed, tmp_path, name):
    layout = runs.LAYOUTS[name]
    config = runs.make_config(inputs, tmp_path / "run", layout, checkpoint={"every": 3, "background": True})
    said = run_case(layout.world, "tests.resume.test_background:train_on_a_full_disk", config=config, full_from=2)
    assert said.endswith("written (No space left on device); give it room, and run the same command again")
    assert "\n" not in said
    assert [step for step, _ in atomic_checkpoint.steps_of(str(tmp_path / "run" / "checkpoints"))] == [3]
    runs.finish(config, layout.world)
    runs.assert_same_result(tmp_path / "run", unharmed(name))
