"""Traps of resuming that other trainers fell into, by number.

23 (schedule stepped twice, or with another length): in test_changes.py, test_layouts.py and tests/trainers/test_sft.py.
32 (position lost): in test_layouts.py and tests/trainers/test_sft.py.
26 (a save while parameters are still being gathered): `overlap_param_gather` is never on, so there is no hook to disable
and a step returns with its parameters gathered; the test says both.
33 (experts of other ranks not saved): bit by bit in test_layouts.py.
34 (every rank writes tokenizer and config; no gradient norm on a skipped step): files here, the norm in
tests/trainers/test_sft.py and, on both engines, in the contract's "a step that is not finite changes nothing".
"""

import torch

from tests.engine.harness import run_case
from tests.resume import runs


def test_traps_25_and_26_step_counts_are_restored_and_saved_parameters_are_the_optimizers(inputs, tmp_path):
    """Trap 25: a count of 0 after a load would make AdamW's first correction divide by 1 - beta, twenty times too small."""
    config = runs.make_config(inputs, tmp_path, runs.Layout(2, "plain"))
    runs.stop_after(config, 2, 4)
    stopped = runs.newest(tmp_path)
    saved, small = runs.sharded_tensors(stopped), runs.small_state(stopped)
    runs.finish(config, 2)
    assert small["engine.pt.optimizer_steps"] == 4
    last = runs.newest(tmp_path)
    counts, schedule_step, overlap = run_case(2, "tests.resume.cases:step_counts", config=config, checkpoint=str(last))
    assert (counts, schedule_step, overlap) == ({runs.STEPS}, runs.STEPS, False)
    for name, tensor in saved.items():
        if name.startswith("optimizer.master."):
            assert torch.equal(tensor, saved[name.removeprefix("optimizer.master.")]), name


def test_trap_34_only_the_main_process_writes_what_is_shared(inputs, tmp_path):
    layout = runs.Layout(2, "plain", parallel={"tp": 2})
    config = runs.make_config(inputs, tmp_path, layout, train={"steps": 2}, optimizer={"warmup_steps": 1})
    ended, message, _ = runs.train(config, 2, happening="only_main_writes")
    assert ended == "done", message
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in (tmp_path / "hf").iterdir()}
