"""`mrl plan --calibrate`: a stage that is timed alone has the shapes of a run, and a run of one process takes as long."""

from __future__ import annotations

import json
import multiprocessing
import random
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import pytest

from mrl import metrics
from mrl.config.schema import EngineConfig, ModelConfig, RoleConfig
from mrl.errors import UserError
from mrl.parallel import ParallelDims
from mrl.plan import calibrating
from tests.cuda.cases import Case
from tests.cuda.test_engine import DENSE, MOE, NARROW
from tests.engine import harness
from tests.plan import timed
from tests.tiers import in_tiers
from tests.trainers import tiny_runs

SMALL = NARROW | {"hidden_size": 64, "intermediate_size": 128}
FEW = SMALL | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CASES = [
    Case(DENSE, world=2, pp=2, vpp=2, lengths=(48, 16), changes=SMALL),
    Case(DENSE, world=4, tp=2, cp=2, lengths=(48, 16), changes=SMALL),
    Case(MOE, world=4, tp=2, pp=2, ep=2, etp=1, lengths=(48, 16), changes=FEW),
]


@pytest.fixture(scope="module")
def process():
    """A process in no world."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.mark.parametrize("case", in_tiers([], [CASES[0], CASES[2]], CASES), ids=str)
def test_a_rank_alone_has_the_shapes_of_a_run(process, case):
    alone = process.submit(timed.alone, case)
    [real] = harness.run_world(case.world, [harness.Case("tests.plan.timed:real", {"case": case})])
    for rank, (expected, found) in enumerate(zip(real.get(), alone.result(), strict=True)):
        assert len(expected) > 20 and found == expected, f"rank {rank}"


def test_experts_get_as_many_tokens_while_they_are_timed(process):
    """Random weights would choose some experts for most tokens. 256 of 1,024 tokens each, within six deviations."""
    case = Case(MOE, lengths=(512, 512), changes=FEW)
    layers = process.submit(timed.tokens_of_experts, case).result()
    assert layers and all(len(counts) == 8 and sum(counts) == 2 * 1024 for counts in layers)
    assert all(abs(count - 256) < 6 * 256**0.5 for counts in layers for count in counts), layers


TOKENS, ROWS = 128, 16
LIKE = 2.0
"""A run and its calibration differ by less, on a machine that does other work too."""


def inputs(folder, layers):
    """A config whose rows are as long as it allows, as a plan assumes."""
    example = tiny_runs.load_example("arithmetic/make_data.py")
    tokenizer = example.make_tokenizer()
    tokenizer.save_pretrained(folder / "model")
    config = example.make_config(tokenizer)
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = 256, 768, layers
    config.layer_types = ["full_attention"] * layers
    config.save_pretrained(folder / "model")
    draw = random.Random(0)
    rows = [{"input_ids": [draw.randrange(len(tokenizer)) for _ in range(TOKENS)]} for _ in range(ROWS)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tiny_runs.make_config(
        folder, folder / "run", model={"init": "random"}, engine={"backend": "megatron"}, data={"max_length": TOKENS},
        train={"steps": 8, "global_batch_size": 8}, checkpoint={"export_hf": False, "resume": "never"},
    )  # fmt: skip


@pytest.mark.nightly
def test_runs_of_one_process_take_as_long(planner, tmp_path):
    """Of two depths, and in the same order. Other work on the machine may spoil a measurement, but not four in turn."""
    configs = {}
    for layers in (2, 8):
        (tmp_path / f"{layers}").mkdir()
        configs[layers] = inputs(tmp_path / f"{layers}", layers)
        tiny_runs.write_config(tmp_path / f"{layers}.yaml", configs[layers])
    attempts = []
    for attempt in range(4):
        real, said = {}, {}
        for layers, config in configs.items():
            config["output_dir"] = str(tmp_path / f"{layers}-{attempt}")
            assert harness.run_case(1, "tests.trainers.cases:train", config=config)[:2] == ("done", "")
            real[layers] = median(
                row["perf/step_s"] for row in metrics.read(Path(config["output_dir"]) / "metrics.jsonl")[2:]
            )
            words = ["plan", f"{layers}.yaml", "-n", "1", "--calibrate", "--json"]
            done = planner.call("tests.plan.planned:command", words, str(tmp_path))
            assert done.exit_code == 0, done.stderr
            [one] = json.loads(done.stdout)["calibration"].values()
            said[layers] = one["measured"]["seconds_without_collectives"]
        attempts.append((real, said))
        like = all(1 / LIKE < said[layers] / real[layers] < LIKE for layers in configs)
        if like and real[2] < real[8] and said[2] < said[8]:
            return
    raise AssertionError(attempts)


def test_times_of_stages_make_a_step(planner):
    """Two stages with two chunks each, two micro-batches: the schedule by hand, and what collectives add."""
    times = {0: ((1, 2), (2, 4), 9), 1: ((1, 2), (2, 4), 7)}
    [one], lines = planner.call("tests.plan.planned:calibrated", CASES[0], times)
    # The second stage: forward of chunk 0 until 3; chunk 1 forward 4-6, backward -10, forward -12, backward -16; chunk 0
    # backward -18, and from 20, when the first stage is back from chunk 1, -22. The first stage ends two later.
    assert one.measured.alone.pipeline_s == 24
    assert one.measured.alone.optimizer_s == 9 and one.measured.alone.seconds == 24 + 9
    assert one.measured.whole.seconds > one.measured.alone.seconds
    assert one.efficiency == pytest.approx(0.5 * one.estimated.alone.pipeline_s / 24)
    beside = planner.call("tests.plan.planned:calibrated", CASES[0], times, 4)
    assert beside == ([one], lines), "ranks that do not train change nothing"


def test_a_stage_that_is_ended_is_a_line(planner):
    with pytest.raises(
        AssertionError, match="UserError: --calibrate: stage 0 found too little memory here, or failed: killed; divide"
    ):
        planner.call("tests.plan.planned:calibrated", CASES[0], {})


@pytest.mark.parametrize(
    ("device", "needed", "message"),
    [
        ("cuda", 0, 'engine.device: value "cuda" needs a GPU'),
        ("cpu", 2**60, "--calibrate: stage 1 needs 1073741824.00 GiB, and .* GiB are free here; divide the model more"),
    ],
)
def test_what_this_machine_lacks(device, needed, message):
    config = RoleConfig(model=ModelConfig(path="none"), engine=EngineConfig(device=device), optimizer=None)
    with pytest.raises(UserError, match=message):
        calibrating.time_here(config, ParallelDims(4, pp=2), 2, (8,), "none", needed)
