"""MTP layers beside `mrl dpo` and `mrl rm`. A policy's train on chosen answers and leave the policy as it is without them, to
the bit; their loss is that of the paper's equations in plain torch (tests/engine/mtp.py) on these answers alone.

`mrl ppo` is in tests/trainers/rl/test_mtp.py, gradients in tests/engine/test_mtp.py.
"""

import json

import pytest
import torch
from transformers import AutoTokenizer

from mrl.batch import make_batch
from mrl.config.dpo import PreferenceDataConfig
from mrl.data.preferences import PreferenceDataset
from tests.convert.cases import load_folder
from tests.engine import mtp
from tests.engine.harness import run_case
from tests.tiers import in_tiers
from tests.trainers import test_dpo, tiny_runs

ROWS, STEPS = 4, 2
MEGATRON = {"backend": "megatron", "device": "cpu", "micro_batch": {"size": 2}}
LAYOUTS = {
    "pairs": ("dpo", 1, {}, {}),
    "simpo, pp2, padded": ("simpo", 2, {"parallel": {"pp": 2}}, {"packing": False}),
    "kto, dp2": ("kto", 2, {"micro_batch": {"size": 4}}, {}),
}


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """`model` with two MTP layers, and rows, one of which counts twice."""
    place = tmp_path_factory.mktemp("mtp")
    tokenizer = tiny_runs.load_example("arithmetic/make_data.py").make_tokenizer()
    mtp.make_model(str(place / "model"), "glm4_moe", layers=2, vocab=len(tokenizer))
    tokenizer.save_pretrained(place / "model")
    rows = [test_dpo.pair(3 + i) | {"weight": 1.0 + (i == 1)} for i in range(ROWS)]
    tiny_runs.write_rows(place / "train.jsonl", rows)
    return place


def run(places, output, command="dpo", *, loss="dpo", world=1, engine=None, data=None, mtp_section=None, more=None):
    config = tiny_runs.make_config(
        places, output, engine=MEGATRON | (engine or {}), data={"shuffle": False, **(data or {})}, loss={"name": loss},
        train={"steps": STEPS, "global_batch_size": ROWS}, optimizer={"warmup_steps": 0},
    )  # fmt: skip
    config |= more or {}
    if mtp_section is not None:
        config["model"] |= {"mtp": mtp_section}
    ended, message, said = run_case(world, f"tests.trainers.{command}_cases:train", config=config)
    assert ended == "done", message
    return said, tiny_runs.steps(output), load_folder(str(output / "hf"))


@pytest.mark.parametrize("case", in_tiers(["pairs"], ["simpo, pp2, padded"], LAYOUTS))
def test_they_learn_chosen_answers_and_the_policy_is_the_one_without_them(places, tmp_path, case):
    loss, world, engine, data = LAYOUTS[case]
    how = {"loss": loss, "world": world, "engine": engine, "data": data}
    said, rows, weights = run(places, tmp_path / "with", mtp_section={}, **how)
    other, others, without = run(places, tmp_path / "without", **how)
    losses = [row.pop("train/mtp_loss") for row in rows]
    assert losses[0] == pytest.approx(oracle(places, paired=loss != "kto"), rel=1e-6)
    if world > 1 and "parallel" not in engine:  # norms are sums over other parts of the parameters
        assert rows == [pytest.approx(row, rel=1e-5, abs=1e-7) for row in others]
    else:
        assert rows == others and len(rows) == STEPS
        assert all(torch.equal(weights[name], weight) for name, weight in without.items())
    start = load_folder(str(places / "model"))
    assert weights.keys() == start.keys() > without.keys()
    assert not torch.equal(weights["model.layers.3.eh_proj.weight"], start["model.layers.3.eh_proj.weight"])
    assert "\nmodel.path: " in other and "\nmodel.path: " not in said


def oracle(places, *, paired):
    """The loss of the MTP layers before the first step, of chosen answers by the weights of their rows."""
    data = PreferenceDataConfig(train=str(places / "train.jsonl"), max_length=64)
    dataset = PreferenceDataset(data, AutoTokenizer.from_pretrained(places / "model"), paired=paired)
    rows = [dataset.load(i) for i in range(ROWS)]
    chosen = [(a.ids, [row.weight * m for m in a.mask]) for row in rows for a in row.answers if a.is_chosen]
    batch = make_batch([ids for ids, _ in chosen], [mask for _, mask in chosen])
    return mtp.reference(str(places / "model"), batch, 1.0)[1]


def test_a_first_step_of_bad_answers_alone_teaches_them_nothing(places, tmp_path):
    rows = [{"prompt": f"{i}+1=", "completion": str(i + 1), "label": i >= ROWS} for i in range(2 * ROWS)]
    reference = {"reference": {"model": {"path": str(places / "model")}}}
    data = {"train": tiny_runs.write_rows(tmp_path / "labels.jsonl", rows)}
    said, steps, _ = run(places, tmp_path / "run", loss="kto", data=data, mtp_section={}, more=reference)
    assert steps[0]["train/mtp_loss"] == 0 < steps[1]["train/mtp_loss"]
    assert f"reference.model.path: {places / 'model'} has layers that predict" in said


def test_a_reward_model_has_none_and_says_so(places, tmp_path):
    said, _, weights = run(places, tmp_path, "rm", loss="bradley_terry")
    assert f"model.path: {places / 'model'} has layers that predict further tokens (MTP: model.layers.2." in said
    assert not any(name.startswith("model.layers.2.") for name in weights)
    assert json.loads((tmp_path / "hf/config.json").read_text())["num_nextn_predict_layers"] == 0
