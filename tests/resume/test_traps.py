"""Traps of resuming that other trainers fell into, by number.

23 (schedule stepped twice, or with another length): in test_changes.py, test_layouts.py and tests/trainers/test_sft.py.
32 (position lost): in test_layouts.py and tests/trainers/test_sft.py.
26 (a save while parameters are still being gathered): `overlap_param_gather` is never on, so there is no hook to disable
and a step returns with its parameters gathered; the test says both.
33 (experts of other ranks not saved): also bit by bit in test_layouts.py.
34 (every rank writes tokenizer and config; no gradient norm on a skipped step): files here, the norm in
tests/trainers/test_sft.py and, on both engines, in the contract's "a step that is not finite changes nothing".
"""

import pytest
import torch
from safetensors.torch import load_file

from tests.engine.harness import run_case
from tests.engine.tiny import FAMILIES
from tests.resume import runs

DP2 = runs.Layout(2, "plain")


def stop_and_finish(inputs, folder, layout, at=3, **changes):
    config = runs.make_config(inputs, folder, layout, **changes)
    runs.stop_after(config, layout.world, at)
    stopped = runs.newest(folder)
    before = runs.sharded_tensors(stopped), runs.small_state(stopped)
    runs.finish(config, layout.world)
    return config, *before


def test_traps_25_and_26_step_counts_are_restored_and_saved_parameters_are_the_optimizers(inputs, tmp_path):
    """Trap 25: a count of 0 after a load would make AdamW's first correction divide by 1 - beta, twenty times too small."""
    config, saved, small = stop_and_finish(inputs, tmp_path, DP2, at=4)
    assert small["engine.pt.optimizer_steps"] == 4
    last = runs.newest(tmp_path)
    counts, schedule_step, overlap = run_case(2, "tests.resume.cases:step_counts", config=config, checkpoint=str(last))
    assert (counts, schedule_step, overlap) == ({runs.STEPS}, runs.STEPS, False)
    for name, tensor in saved.items():
        if name.startswith("optimizer.master."):
            assert torch.equal(tensor, saved[name.removeprefix("optimizer.master.")]), name


@pytest.mark.slow
def test_trap_33_every_expert_of_every_rank_is_saved(inputs, tmp_path):
    """Four experts over two ranks: each has weights and moments of its own in the checkpoint, and none is as it began."""
    layout = runs.Layout(2, "plain moe", parallel={"ep": 2})
    stop_and_finish(inputs, tmp_path, layout)
    experts = FAMILIES["qwen3_moe"][1]["num_experts"]
    trained, untrained = runs.exported(tmp_path), load_file(inputs / "plain moe" / "model.safetensors")
    names = [n for n in untrained if ".mlp.experts." in n]
    assert len(names) == 2 * experts * 3
    assert all(not torch.equal(trained[name], untrained[name]) for name in names)
    saved = runs.sharded_tensors(runs.newest(tmp_path))
    moments = {n: t for n, t in saved.items() if "exp_avg_sq" in n and "experts" in n}
    assert sum(t.numel() for t in moments.values()) == sum(untrained[n].numel() for n in names)
    assert all(t.flatten(1).any(1).all() for t in moments.values() if t.ndim > 1 and t.shape[0] == experts)


def test_trap_34_only_the_main_process_writes_what_is_shared(inputs, tmp_path):
    layout = runs.Layout(2, "plain", parallel={"tp": 2})
    config = runs.make_config(inputs, tmp_path, layout, train={"steps": 2}, optimizer={"warmup_steps": 1})
    ended, message, _ = runs.train(config, 2, happening="only_main_writes")
    assert ended == "done", message
    assert {"config.json", "tokenizer.json", "model.safetensors"} <= {p.name for p in (tmp_path / "hf").iterdir()}
