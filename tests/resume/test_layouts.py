"""A checkpoint of one layout goes on in another; nothing of AdamW's state is lost or misplaced on the way.

Tolerance: a layout changes the order of fp32 sums only (relative 6e-8 each). The loss agrees within 1e-6 relative and
the gradient norm within 1e-5. Weights after twelve AdamW steps: an update divides a moment by the root of another, so
where a gradient is itself rounding noise the update is noise of size lr; per tensor that stays below 1e-4 relative L2
with eps 1e-6. RNG state belongs to a layout, so these models have no dropout.
"""

import pathlib

import pytest
import torch

from tests.engine.harness import run_case
from tests.engine.tiny import relative_l2
from tests.resume import runs
from tests.resume.runs import Layout

DENSE = {
    "tp2": Layout(2, "plain", parallel={"tp": 2}),
    "pp2": Layout(2, "plain", parallel={"pp": 2}),
    "dp2": Layout(2, "plain"),
    "tp1": Layout(1, "plain"),
    "pp2 dp2": Layout(4, "plain", parallel={"pp": 2}),
    "tp2 pp2 dp2": Layout(8, "plain", parallel={"tp": 2, "pp": 2}),
    "fsdp dp2": Layout(2, "plain", "fsdp"),
    "fsdp cp2": Layout(2, "plain", "fsdp", {"cp": 2}),
    "fsdp": Layout(1, "plain", "fsdp"),
}
MOE = {
    "ep2": Layout(2, "plain moe", parallel={"ep": 2}),
    "ep2 dp4": Layout(4, "plain moe", parallel={"ep": 2}),
    "tp1": Layout(1, "plain moe"),
}

DELTA = {
    "tp2": Layout(2, "plain delta", parallel={"tp": 2}),
    "pp2": Layout(2, "plain delta", parallel={"pp": 2}),
    "cp2": Layout(2, "plain delta", parallel={"cp": 2}),
    "tp1": Layout(1, "plain delta"),
}


@pytest.fixture(scope="module")
def whole(inputs, tmp_path_factory):
    """A layout -> the folder of a run that never left it."""
    made = {}

    def of(layout):
        key = (layout.model, layout.backend)
        if key not in made:
            config = runs.make_config(inputs, tmp_path_factory.mktemp("whole"), layout)
            runs.finish(config, layout.world)
            made[key] = pathlib.Path(config["output_dir"])
        return made[key]

    return of


@pytest.mark.parametrize(
    "chain",
    [
        [DENSE["tp2"], DENSE["pp2"], DENSE["dp2"], DENSE["tp1"]],
        pytest.param([MOE["ep2"], MOE["tp1"]], marks=pytest.mark.slow),
        pytest.param([DELTA["tp2"], DELTA["pp2"], DELTA["cp2"]], marks=pytest.mark.slow),
        pytest.param([DENSE["pp2 dp2"], DENSE["tp1"], DENSE["tp2"]], marks=pytest.mark.nightly),
        pytest.param([DENSE["fsdp dp2"], DENSE["fsdp cp2"], DENSE["fsdp"]], marks=pytest.mark.slow),
    ],
    ids=["tp2-pp2-dp2-tp1", "ep2-tp1", "delta tp2-pp2-cp2", "pp2dp2-tp1-tp2", "fsdp dp2-cp2-dp1"],
)
def test_goes_on_in_another_layout(inputs, whole, tmp_path, chain):
    """Traps 23 and 32: rates, tokens and rows are exactly those of the run that stayed in the last layout."""
    for leg, layout in enumerate(chain[:-1], start=1):
        runs.stop_after(runs.make_config(inputs, tmp_path, layout), layout.world, 3 * leg)
    said = runs.finish(runs.make_config(inputs, tmp_path, chain[-1]), chain[-1].world)
    assert f"after step {3 * (len(chain) - 1)}" in said
    stayed = whole(chain[-1])
    for ours, theirs in zip(runs.updates(tmp_path), runs.updates(stayed), strict=True):
        for name in ("step", "train/lr", "train/tokens"):
            assert ours[name] == theirs[name]
        for name, tolerance in (("train/loss", 1e-6), ("train/grad_norm", 1e-5), ("eval/loss", 1e-6)):
            if name in theirs:
                assert ours[name] == pytest.approx(theirs[name], rel=tolerance), (ours["step"], name)
    weights = runs.exported(stayed)
    for name, tensor in runs.exported(tmp_path).items():
        assert relative_l2(tensor, weights[name]) < 1e-4, name


def resaved(checkpoint, inputs, layout, folder):
    """The checkpoint read in a layout and saved again, without a step."""
    config = runs.make_config(inputs, folder, layout)
    return run_case(layout.world, "tests.resume.cases:resave", config=config, checkpoint=str(checkpoint))


@pytest.mark.parametrize(
    ("saved_in", "other"),
    [
        (DENSE["pp2 dp2"], DENSE["tp1"]),
        pytest.param(DELTA["tp2"], DELTA["pp2"], marks=pytest.mark.slow, id="delta tp2"),
        pytest.param(DENSE["tp2"], DENSE["pp2"], marks=pytest.mark.nightly, id="tp2"),
        pytest.param(MOE["ep2"], MOE["tp1"], marks=pytest.mark.slow, id="ep2"),
        pytest.param(MOE["ep2 dp4"], MOE["tp1"], marks=pytest.mark.nightly, id="ep2 dp4"),
        pytest.param(DENSE["tp2 pp2 dp2"], DENSE["tp1"], marks=pytest.mark.nightly, id="tp2 pp2 dp2"),
        (DENSE["fsdp cp2"], DENSE["fsdp dp2"]),
    ],
)
def test_optimizer_state_is_restored_bit_for_bit(inputs, tmp_path, saved_in, other):
    """Tied embeddings with a vocabulary of 131 over stages and replicas: megatron's own format misplaces state here.

    What a layout saved, another reads and saves again: not a bit changes. That the first save is right: master weights
    are the parameters, and moments those of one process within rounding. Trap 33: experts of every rank are in it.
    """
    config = runs.make_config(inputs, tmp_path / "run", saved_in)
    runs.stop_after(config, saved_in.world, 3)
    checkpoint = runs.newest(tmp_path / "run")
    saved = runs.sharded_tensors(checkpoint)
    again = resaved(checkpoint, inputs, other, tmp_path / "again")
    assert_same_but_for_padding(runs.sharded_tensors(pathlib.Path(again)), saved)
    alone = Layout(1, saved_in.model, saved_in.backend)
    runs.stop_after(runs.make_config(inputs, tmp_path / "alone", alone), 1, 3)
    expected = runs.sharded_tensors(runs.newest(tmp_path / "alone"))
    assert saved.keys() == expected.keys() and sum("exp_avg_sq" in name for name in saved) > 10
    for name, tensor in expected.items():
        assert relative_l2(unpadded(saved[name], tensor), tensor) < 1e-4, name
        if name.startswith("optimizer.master."):
            assert torch.equal(saved[name], saved[name.removeprefix("optimizer.master.")]), name


def unpadded(tensor, like):
    """Without the rows that tensor parallelism pads the vocabulary with."""
    return tensor[: like.shape[0]] if tensor.ndim else tensor


def assert_same_but_for_padding(ours, theirs):
    rows = {name: min(ours[name].shape[0], theirs[name].shape[0]) for name in theirs if theirs[name].ndim}
    cut = [{name: t[: rows[name]] if t.ndim else t for name, t in state.items()} for state in (ours, theirs)]
    runs.assert_same_state(*cut, "tensors of the checkpoint")


@pytest.mark.parametrize("layout", ["dp2", "fsdp dp2"])
def test_goes_on_from_the_checkpoint_of_another_device(inputs, tmp_path, layout):
    """The generators of a GPU mean nothing to a CPU, nor the other way round; the host's are the same everywhere."""
    config = runs.make_config(inputs, tmp_path / "run", DENSE[layout])
    runs.stop_after(config, 2, 2)
    saved = str(runs.newest(tmp_path / "run"))
    assert run_case(2, "tests.resume.cases:load_of_another_device", config=config, checkpoint=saved)
