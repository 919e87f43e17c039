"""The SFT trainer end to end on a tiny model: what it writes, what its numbers mean, resuming, stopping, failing.

Expected numbers come from Hugging Face on one process, or from a run that nothing happened to.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from mrl.data.stream import row_order
from mrl.metric_names import SFT_METRICS
from mrl.metrics import read
from tests.engine.harness import run_case
from tests.tiers import in_tiers, nightly_but
from tests.trainers import tiny_runs
from tests.trainers.tiny_runs import read_rows

CASE = "tests.trainers.cases:train"


def train(config: dict, world: int = 1, **details) -> tuple[str, str]:
    """How it ended, and the message."""
    return run_case(world, CASE, config=config, **details)[:2]


def printed(config: dict) -> str:
    """What a run that ends well says."""
    kind, message, said = run_case(1, CASE, config=config)
    assert (kind, message) == ("done", "")
    return said


def weights(output_dir: pathlib.Path) -> dict[str, torch.Tensor]:
    """Copies: load_file maps the file, which a test may change."""
    return {n: t.clone() for n, t in load_file(output_dir / "hf" / "model.safetensors").items()}


def assert_same_run(a: pathlib.Path, b: pathlib.Path) -> None:
    """Bitwise: metrics but for timings, and exported weights."""
    assert tiny_runs.steps(a) == tiny_runs.steps(b)
    ours, theirs = weights(a), weights(b)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def hf_loss(inputs: pathlib.Path, rows: list[dict], model: Any = None) -> tuple[float, int]:
    """Mean negative log-likelihood of the assistant tokens of chat rows in the untrained model or another one, and their
    number."""
    if model is None:
        model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    total, count = 0.0, 0
    for row in rows:
        encoded = tokenizer.apply_chat_template(row["messages"], return_dict=True, return_assistant_tokens_mask=True)
        ids = torch.tensor([encoded["input_ids"]])
        mask = torch.tensor(encoded["assistant_masks"][1:], dtype=torch.bool)
        with torch.no_grad():
            log_probs = model(ids).logits[0, :-1].log_softmax(-1)
        total -= float(log_probs.gather(1, ids[0, 1:, None])[:, 0][mask].double().sum())
        count += int(mask.sum())
    return total / count, count


def run_id(checkpoint: pathlib.Path) -> str:
    """The id by which wandb knows the run that saved a checkpoint of one process."""
    found = [torch.load(path, weights_only=True) for path in checkpoint.glob("*.pt")]
    (state,) = [content["state"] for content in found if "state" in content]
    return state["progress"]["run_id"]


@pytest.fixture(scope="module")
def whole_run(inputs, tmp_path_factory) -> pathlib.Path:
    """Eight steps that nothing happens to: more than three epochs of ten rows."""
    output_dir = tmp_path_factory.mktemp("whole") / "run"
    ended = train(tiny_runs.make_config(inputs, output_dir, checkpoint={"every": 3}))
    assert ended == ("done", "")
    return output_dir


# ------------------------------------------------------------------------------------------------- what a run leaves


def test_a_run_leaves_what_the_design_names(inputs, whole_run):
    names = {path.name for path in whole_run.iterdir()}
    assert names == {"config.yaml", "metrics.jsonl", "checkpoints", "hf"}
    assert sorted(p.name for p in (whole_run / "checkpoints").iterdir()) == ["latest", "step_00000006", "step_00000008"]
    model = AutoModelForCausalLM.from_pretrained(whole_run / "hf")
    tokenizer = AutoTokenizer.from_pretrained(whole_run / "hf")
    assert model.config.vocab_size == len(tokenizer)


def test_metrics_have_one_line_a_step_under_the_documented_names(inputs, whole_run):
    rows = read(whole_run / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, 9))
    # a CPU has no known peak; no save is in the background; the model has no MTP layers
    never = {"perf/mfu", "eval/loss", "perf/save_write_s", "train/mtp_loss"}
    always = set(SFT_METRICS) - never - {"perf/save_held_s"}
    assert all(set(row) - {"perf/save_held_s"} == always for row in rows)
    assert [row["step"] for row in rows if "perf/save_held_s" in row] == [4, 7], "the steps after saves"
    assert all(row["perf/step_s"] > 0 and row["perf/tokens_per_s"] > 0 and row["perf/memory_gb"] > 0 for row in rows)


@pytest.mark.parametrize("world, packing", [(1, False), (2, True)])
def test_trap_6_logged_loss_is_the_token_mean_of_the_global_batch(inputs, tmp_path, world, packing):
    """Not a mean of micro-batch or rank means: rows are uneven, micro-batches hold two, ranks one or two of them."""
    config = tiny_runs.make_config(inputs, tmp_path, train={"steps": 1}, data={"packing": packing}, checkpoint={"export_hf": False})  # fmt: skip
    config["optimizer"]["warmup_steps"] = 0
    assert train(config, world) == ("done", "")
    rows = read_rows(inputs / "train.jsonl")
    expected, tokens = hf_loss(inputs, [rows[i] for i in row_order(0, 0, len(rows))[: tiny_runs.BATCH]])
    (step,) = tiny_runs.steps(tmp_path)
    assert step["train/loss"] == pytest.approx(expected, rel=1e-6)
    assert step["train/tokens"] == tokens


def test_trained_tokens_accumulate(inputs, whole_run):
    lengths = [len(row["messages"][1]["content"]) + 1 for row in read_rows(inputs / "train.jsonl")]  # and <|im_end|>
    order = [i for epoch in range(4) for i in row_order(0, epoch, len(lengths))]
    expected = [sum(lengths[i] for i in order[: tiny_runs.BATCH * step]) for step in range(1, 9)]
    assert [row["train/tokens"] for row in tiny_runs.steps(whole_run)] == expected


# --------------------------------------------------------------------------------------------------------- evaluation


def test_eval_loss_is_the_token_mean_of_the_whole_set(inputs, tmp_path):
    """Seven rows in batches of four: a mean of batch means would weigh the last three rows too much."""
    config = tiny_runs.make_config(
        inputs, tmp_path, data={"eval": str(inputs / "eval.jsonl")}, train={"steps": 1}, checkpoint={"export_hf": True}
    )  # fmt: skip
    config["optimizer"] = {"lr": 1e-30, "schedule": "constant"}  # the evaluated model is the untrained one
    assert train(config, 2) == ("done", "")
    expected, _ = hf_loss(inputs, read_rows(inputs / "eval.jsonl"))
    assert tiny_runs.steps(tmp_path)[0]["eval/loss"] == pytest.approx(expected, rel=1e-6)


def test_trap_18_evaluation_changes_nothing_and_trap_27_is_logged_only_where_it_happened(inputs, whole_run, tmp_path):
    config = tiny_runs.make_config(inputs, tmp_path, data={"eval": str(inputs / "eval.jsonl")}, train={"eval_every": 3})
    assert train(config) == ("done", "")
    rows = tiny_runs.steps(tmp_path)
    assert [row["step"] for row in rows if "eval/loss" in row] == [0, 3, 6, 8]
    assert rows[0].keys() == {"step", "eval/loss"}, "before training"
    assert [{k: v for k, v in row.items() if k != "eval/loss"} for row in rows[1:]] == tiny_runs.steps(whole_run)
    assert all(torch.equal(a, b) for a, b in zip(weights(tmp_path).values(), weights(whole_run).values(), strict=True))


# ------------------------------------------------------------------------------------------------------- stop, resume


def test_traps_23_and_32_a_stopped_run_goes_on_bitwise(inputs, whole_run, tmp_path):
    """LR, position in the data (in the second epoch), optimizer and token count are those of the run that never stopped."""
    config = tiny_runs.make_config(inputs, tmp_path, checkpoint={"every": 3})
    kind, message = train(config, happening="signals", step=5, name="SIGUSR1")
    assert kind == "stopped"
    assert "SIGUSR1" in message and "after step 5 of 8" in message and "step_00000005" in message
    assert len(tiny_runs.steps(tmp_path)) == 5 and not (tmp_path / "hf").exists()
    assert train(config) == ("done", "")
    assert_same_run(whole_run, tmp_path)


def test_a_signal_to_one_rank_stops_all_and_more_of_them_do_not_end_the_save(inputs, tmp_path):
    kind, message = train(tiny_runs.make_config(inputs, tmp_path), 2, happening="signals", step=2, rank=1, again=True)
    assert kind == "stopped" and "after step 2 of 8" in message
    assert (tmp_path / "checkpoints" / "step_00000002" / "COMPLETE").exists()


@pytest.mark.parametrize("world, step", nightly_but([(1, 3)], [(1, 3), (2, 8)]))
def test_a_signal_inside_an_evaluation_does_not_wait_for_its_end(inputs, tmp_path, world, step):
    """The step is saved and in the log, without its evaluation, which the next start makes first. Step 8 is the last."""
    data = {"eval": str(inputs / "eval.jsonl")}
    make = lambda name: tiny_runs.make_config(inputs, tmp_path / name, data=data, train={"eval_every": 3}, checkpoint={"export_hf": step != 8})  # noqa: E731  # fmt: skip
    assert train(make("whole"), world) == ("done", "")
    kind, message = train(make("run"), world, happening="signal_in_evaluation", step=step)
    assert kind == "stopped" and f"after step {step} of 8, saved in" in message
    without = {name: value for name, value in tiny_runs.steps(tmp_path / "whole")[step].items() if name != "eval/loss"}
    assert tiny_runs.steps(tmp_path / "run") == [*tiny_runs.steps(tmp_path / "whole")[:step], without]
    assert train(make("run"), world) == ("done", "")
    assert tiny_runs.steps(tmp_path / "run") == tiny_runs.steps(tmp_path / "whole")
    if step != 8:
        assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_signal_before_the_first_step_stops_the_run_there(inputs, whole_run, tmp_path):
    config = tiny_runs.make_config(inputs, tmp_path, checkpoint={"every": 3})
    kind, message = train(config, happening="signal_at_start")
    assert kind == "stopped" and message.startswith("stopped by SIGTERM after step 0 of 8, before it began; ")
    assert not (tmp_path / "checkpoints").exists()
    assert train(config) == ("done", "")
    assert_same_run(tmp_path, whole_run)


def test_a_complete_run_says_so_and_makes_a_missing_export(inputs, tmp_path):
    config = tiny_runs.make_config(inputs, tmp_path, train={"steps": 2})
    assert train(config) == ("done", "")
    exported = weights(tmp_path)
    assert "is complete: 2 of 2 steps are made" in printed(config)
    os.rename(tmp_path / "hf", tmp_path / ".tmp-hf")  # killed inside the export
    (tmp_path / ".tmp-hf" / "model.safetensors").write_bytes(b"half")
    assert "exporting" in printed(config)
    assert all(torch.equal(value, exported[name]) for name, value in weights(tmp_path).items())
    assert len(tiny_runs.steps(tmp_path)) == 2


def test_resume_from_a_checkpoint_of_another_run(inputs, whole_run, tmp_path):
    checkpoint = whole_run / "checkpoints" / "step_00000006"
    config = tiny_runs.make_config(inputs, tmp_path, checkpoint={"resume": str(checkpoint), "every": 1})
    assert train(config, happening="signals", step=7)[0] == "stopped"
    mine = run_id(tmp_path / "checkpoints" / "step_00000007")
    assert mine != run_id(checkpoint), "wandb's page is the other run's"
    assert train(config) == ("done", "")  # the same command goes on from this run's own checkpoint
    assert run_id(tmp_path / "checkpoints" / "step_00000008") == mine
    assert tiny_runs.steps(tmp_path) == tiny_runs.steps(whole_run)[6:]
    assert all(torch.equal(value, weights(whole_run)[name]) for name, value in weights(tmp_path).items())
    kind, message = train(config | {"checkpoint": {"resume": str(whole_run / "checkpoints" / "step_00000008")}})
    assert kind == "ConfigError" and message.startswith("checkpoint.resume: ") and "another output_dir" in message


def test_data_and_model_may_move_and_are_compared(inputs, whole_run, tmp_path):
    rows, model, output_dir = tmp_path / "rows.jsonl", tmp_path / "model", tmp_path / "run"
    config = tiny_runs.make_config(inputs, output_dir, checkpoint={"every": 3})
    assert train(config, happening="signals", step=5)[0] == "stopped"
    shutil.copy(inputs / "train.jsonl", rows)
    shutil.copytree(inputs / "model", model)
    config["model"]["path"], config["data"]["train"] = str(model), str(rows)

    settings = json.loads((model / "config.json").read_text())
    rope = settings["rope_parameters"]
    (model / "config.json").write_text(json.dumps(settings | {"rope_parameters": rope | {"rope_theta": 5.0}}))
    kind, message = train(config)
    assert (
        kind == "CheckpointError"
        and " is another model: rope_theta is 10000.0 in the checkpoint and 5.0 in config.json" in message
    )
    (model / "config.json").write_text(json.dumps(settings | {"transformers_version": "5.0"}))

    (model / "chat_template.jinja").write_text("another {{ messages }}")
    kind, message = train(config)
    assert kind != "done" and len(tiny_runs.steps(output_dir)) == 5
    shutil.copy(inputs / "model" / "chat_template.jinja", model)

    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[1:], lines[0]]))
    kind, message = train(config)
    assert kind == "CheckpointError" and message.startswith(f"data.train: {rows} has ")
    rows.write_text("".join(lines))

    said = printed(config)
    for note in (
        f'model.path: "{inputs / "model"}" at the save',
        f'data.train: "{inputs / "train.jsonl"}" at the save',
    ):
        assert f"changed since the checkpoint: {note}" in said
    assert_same_run(whole_run, output_dir)


# ------------------------------------------------------------------------------------------------------------ failures


def test_a_loss_that_is_not_finite_stops_with_step_batch_and_last_checkpoint(inputs, tmp_path):
    config = tiny_runs.make_config(inputs, tmp_path, checkpoint={"every": 2})
    kind, message = train(config, 2, happening="nan_loss", step=4)
    assert kind == "TrainingError"
    assert message.startswith("step 4: the loss is nan") and "step_00000002" in message
    saved = torch.load(tmp_path / "failed" / "step_4.pt", weights_only=True)
    assert saved["step"] == 4 and int(saved["lengths"].sum()) == saved["tokens"].numel()
    assert len(saved["rows"]) == tiny_runs.BATCH and all("train.jsonl:" in row for row in saved["rows"])
    assert [row["step"] for row in tiny_runs.steps(tmp_path)] == [1, 2, 3]
    assert (tmp_path / "checkpoints" / "latest").read_text() == "step_00000002\n"  # no save of what came after


def test_an_evaluation_that_is_not_finite_stops_with_the_step(inputs, tmp_path):
    config = tiny_runs.make_config(
        inputs, tmp_path, data={"eval": str(inputs / "eval.jsonl")}, train={"eval_every": 3}, checkpoint={"every": 1}
    )
    kind, message = train(config, happening="nan_loss", step=3, part="eval")
    assert kind == "TrainingError"
    assert message.startswith("step 3: the loss on data.eval is nan") and "step_00000002" in message
    assert [row["step"] for row in tiny_runs.steps(tmp_path)] == [0, 1, 2]


def test_a_bad_row_in_the_middle_of_a_run_saves_the_steps_before_it(inputs, tmp_path):
    """Ten rows in batches of four: row 10 is in the third. Skipped, it leaves the run that always skipped it."""
    rows = (inputs / "train.jsonl").read_text().splitlines()
    rows[9] = '{"messages": [{"role": "user", "content": "1+1="}]}'
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    data = {"train": str(tmp_path / "rows.jsonl"), "shuffle": False}
    config = tiny_runs.make_config(inputs, tmp_path / "run", data=data)
    kind, message = train(config)
    assert kind == "DataError" and message.startswith(f"{tmp_path}/rows.jsonl:10: has nothing to train on")
    assert "step_00000002: with data.on_bad_row=skip the same command goes on from there" in message
    assert [row["step"] for row in tiny_runs.steps(tmp_path / "run")] == [1, 2]
    config["data"]["on_bad_row"] = "skip"
    assert train(config) == ("done", "")
    once = tiny_runs.make_config(inputs, tmp_path / "once", data=data | {"on_bad_row": "skip"})
    assert train(once) == ("done", "")
    assert_same_run(tmp_path / "run", tmp_path / "once")
    short = tiny_runs.make_config(inputs, tmp_path / "short", data=data, train={"steps": 2})
    assert train(short) == ("done", ""), "what comes after the last step is nobody's fault"


@pytest.mark.parametrize("change", nightly_but([{"max_length": 200}], [{"max_length": 200}, {"truncation": "drop"}]))
def test_after_a_row_that_is_too_long_the_run_resumes_as_if_it_had_begun_so(inputs, tmp_path, change):
    rows = read_rows(inputs / "train.jsonl")
    rows[9] = tiny_runs.chat([1] * 50)
    tiny_runs.write_rows(tmp_path / "rows.jsonl", rows)
    data = {"train": str(tmp_path / "rows.jsonl"), "shuffle": False}
    config = tiny_runs.make_config(inputs, tmp_path / "run", data=data)
    kind, message = train(config)
    assert kind == "DataError" and "raise data.max_length, or set data.truncation to right, left or drop" in message
    saved = tmp_path / "run" / "checkpoints" / "step_00000002"
    assert message.endswith(f"saved in {saved}: if that is put right, the same command goes on from there"), message
    config["data"] |= change
    assert train(config) == ("done", "")
    once = tiny_runs.make_config(inputs, tmp_path / "once", data=data | change)
    assert train(once) == ("done", "")
    assert_same_run(tmp_path / "run", tmp_path / "once")


def test_trap_34_a_skipped_step_has_a_gradient_norm_and_stops_the_run(inputs, tmp_path):
    kind, message = train(tiny_runs.make_config(inputs, tmp_path), happening="step_changes", what="skip")
    assert kind == "TrainingError"
    assert message.startswith("step 1: the gradient norm is inf (a gradient is not finite)")
    assert "no good checkpoint had been saved" in message


@pytest.mark.parametrize("what, named", [("nothing", "model.embed_tokens.weight"), ("q_norm", "q_norm.weight")])
def test_a_first_step_that_leaves_a_parameter_as_it_was_is_refused(inputs, tmp_path, what, named):
    """Trap 24: an optimizer that forgot the dense parameters would train on in silence."""
    kind, message = train(tiny_runs.make_config(inputs, tmp_path), happening="step_changes", what=what)
    assert kind == "TrainingError"
    assert named in message and "did not change it" in message
    assert not (tmp_path / "checkpoints").exists()


# -- weights of rows and messages: the loss and gradient of torch on transformers' model -------------------------------


LAYOUTS = {
    "fsdp": (1, {"backend": "fsdp"}),
    "megatron dp2": (2, {"backend": "megatron"}),
    "megatron cp2": (2, {"backend": "megatron", "parallel": {"cp": 2}}),
    "megatron pp2": (2, {"backend": "megatron", "parallel": {"pp": 2}}),
}  # fmt: skip


def weighted_rows() -> list[dict[str, Any]]:
    """Conversations of two answers, some with weights."""
    talks = [tiny_runs.chat([i] * (1 + i % 3))["messages"] + tiny_runs.chat([i + 40])["messages"] for i in range(4)]
    talks[1][1]["weight"], talks[1][3]["weight"] = 0, 0.25
    talks[2][3]["weight"] = 1.5
    return [{"messages": talk} | ({"weight": weight} if weight != 1 else {}) for talk, weight in
            zip(talks, (2, 1, 0.5, 0), strict=True)]  # fmt: skip


def first_step(
    inputs: pathlib.Path, place: pathlib.Path, made: list[dict], world: int, engine: dict
) -> tuple[float, float]:
    """Loss and gradient norm of the first step, all rows in its batch."""
    place.mkdir()
    config = tiny_runs.make_config(
        inputs, place / "run", data={"train": tiny_runs.write_rows(place / "rows.jsonl", made)}, engine=engine, optimizer={"warmup_steps": 0},
        train={"steps": 1, "global_batch_size": len(made)}, checkpoint={"export_hf": False},
    )  # fmt: skip
    assert run_case(world, "tests.trainers.cases:train", config=config)[:2] == ("done", "")
    (row,) = read(place / "run" / "metrics.jsonl")
    return row["train/loss"], row["train/grad_norm"]


def weighted_loss_by_hand(inputs: pathlib.Path, made: list[dict]) -> tuple[float, float]:
    """sum w nll / sum w and the norm of its gradient, by torch alone; answers are found by the template's own marks."""
    model = AutoModelForCausalLM.from_pretrained(inputs / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(inputs / "model")
    total, count = torch.zeros((), dtype=torch.float64), 0.0
    for row in made:
        talk = [{"role": m["role"], "content": m["content"]} for m in row["messages"]]
        found = tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True)
        ids, marks, answers = found["input_ids"], found["assistant_masks"], iter(row["messages"][1::2])
        nll = -model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
        weight = 0.0
        for i, mark in enumerate(marks):
            if mark and not marks[i - 1]:
                weight = next(answers).get("weight", 1) * row.get("weight", 1)
            if mark:
                total, count = total + weight * nll[i - 1, ids[i]], count + weight
    loss = total / count
    loss.backward()
    return loss.item(), float(torch.stack([p.grad.double().norm() for p in model.parameters()]).norm())


@pytest.mark.parametrize("layout", in_tiers(["fsdp", "megatron dp2"], ["megatron cp2"], LAYOUTS))
def test_the_loss_is_the_weighted_sum_over_the_weights(inputs, tmp_path, layout):
    made, (world, engine) = weighted_rows(), LAYOUTS[layout]
    expected = weighted_loss_by_hand(inputs, made)
    assert first_step(inputs, tmp_path / "weighted", made, world, engine) == pytest.approx(expected, rel=1e-5)
