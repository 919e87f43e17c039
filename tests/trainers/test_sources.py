"""Training on a mixture of sources: one order on every layout, resumed bitwise, and a loss for each set of data.eval."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest

from mrl.metric_names import is_metric
from mrl.metrics import read
from tests.engine.harness import run_case
from tests.trainers import tiny_runs
from tests.trainers.rl.tiny_policies import metrics_of, samples_of
from tests.trainers.tiny_runs import assert_goes_on_to_the_bit, write_rows

CASE = "tests.trainers.cases:train"
STEPS = 6


@pytest.fixture(scope="module")
def data(inputs, tmp_path_factory) -> dict[str, Any]:
    """A section `data` of three sources in two forms, and two sets of evaluation rows."""
    folder = tmp_path_factory.mktemp("sources")
    pairs = write_rows(folder / "pairs.jsonl", [{"q": f"{i}+{i}=", "a": str(2 * i)} for i in range(5)])
    pairs_source = {"path": pairs, "columns": {"q": "prompt", "a": "completion"}}
    return {
        "train": [
            {"path": str(inputs / "train.jsonl"), "weight": 0.5}, {**pairs_source, "weight": 0.3, "epochs": 1},
            {"path": str(inputs / "eval.jsonl"), "weight": 0.2, "loss_on": ["user", "assistant"], "name": "more"},
        ],
        "eval": {"sums": str(inputs / "eval.jsonl"), "pairs": pairs_source},
        "max_length": 64,
    }  # fmt: skip


def config_of(inputs: pathlib.Path, place: pathlib.Path, data: dict[str, Any], **changes: Any) -> dict[str, Any]:
    config = tiny_runs.make_config(
        inputs, place, train={"steps": STEPS, "eval_every": 3}, checkpoint={"export_hf": False}, **changes
    )
    return config | {"data": data}


def run(world: int, config: dict, **details: Any) -> tuple[str, str, str]:
    return run_case(world, CASE, config=config, **details)


@pytest.mark.slow
def test_a_mixture_is_resumed_bitwise_and_one_on_every_number_of_replicas(inputs, data, tmp_path):
    assert_goes_on_to_the_bit(CASE, lambda folder: config_of(inputs, folder, data), tmp_path, step=4, world=2)
    live = tiny_runs.steps(tmp_path / "whole")
    last = live[-1]
    given = {name: last[f"data/{name}/rows"] for name in ("train", "pairs", "more")}
    assert sum(given.values()) == STEPS * tiny_runs.BATCH and given["pairs"] == 5 == 5 * last["data/pairs/epochs"]
    assert all(is_metric(name) for name in last)
    assert run(1, config_of(inputs, tmp_path / "alone", data))[:2] == ("done", "")
    for ours, theirs in zip(live, tiny_runs.steps(tmp_path / "alone"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
        assert all(ours[name] == theirs[name] for name in ours if name.startswith(("data/", "train/tokens")))


def test_a_set_of_evaluation_rows_has_the_loss_that_it_has_alone(inputs, data, tmp_path):
    def losses(name: str, evaluation: Any, **keys: Any) -> dict[str, float]:
        config = config_of(inputs, tmp_path / name, {**data, "eval": evaluation, **keys}, optimizer={"lr": 1e-30})
        assert run(1, config)[:2] == ("done", "")
        return {
            key: value for key, value in read(tmp_path / name / "metrics.jsonl")[-1].items() if key.startswith("eval/")
        }

    both = losses("both", data["eval"])
    assert both.keys() == {"eval/loss", "eval/sums/loss", "eval/pairs/loss"}
    assert losses("sums", data["eval"]["sums"]) == {"eval/loss": both["eval/sums/loss"]}
    plain = data | {"train": data["train"][1]["path"]}
    alone = {"path": data["eval"]["pairs"]["path"], "columns": data["eval"]["pairs"]["columns"]}
    config = config_of(inputs, tmp_path / "pairs", plain | {"eval": alone["path"], "columns": alone["columns"]},
                       optimizer={"lr": 1e-30})  # fmt: skip
    assert run(1, config)[:2] == ("done", "")
    pairs_loss = read(tmp_path / "pairs" / "metrics.jsonl")[-1]["eval/loss"]
    assert both["eval/pairs/loss"] == pytest.approx(pairs_loss, rel=1e-6)
    low, high = sorted((both["eval/sums/loss"], both["eval/pairs/loss"]))
    assert low < both["eval/loss"] < high


def test_what_a_resume_may_change_of_the_sources(inputs, data, tmp_path):
    config = config_of(inputs, tmp_path / "run", {**data, "eval": None})
    config["train"] = {"steps": 3, "global_batch_size": tiny_runs.BATCH}
    assert run(1, config)[:2] == ("done", "")
    longer = config | {"train": config["train"] | {"steps": 5}}
    heavier = [data["train"][0] | {"weight": 2.0}, *data["train"][1:]]
    kind, message, said = run(1, longer | {"data": {**data, "eval": None, "train": heavier}})
    assert (kind, message) == ("done", "")
    assert "data.train: weight of train was 0.5 and is 2.0: shares count from here" in said
    assert "changed since the checkpoint: data.train[0].weight: 0.5 at the save, 2.0 now" in said
    last = config | {"train": config["train"] | {"steps": 7}}
    for train, says in (
        (data["train"][0]["path"], "data.train: is one path and was a list of sources"),
        ([data["train"][0] | {"system": "x"}], 'data.train, source train, system: is "x" and was null'),
    ):
        kind, message, _ = run(1, last | {"data": {**data, "eval": None, "train": train}})
        assert kind == "CheckpointError" and message.startswith(says), message


def test_a_run_as_long_as_the_epochs_of_its_sources(inputs, data, tmp_path):
    shares = [{"path": str(inputs / "train.jsonl"), "epochs": 2}, {"path": str(inputs / "eval.jsonl"), "epochs": 1}]
    config = config_of(inputs, tmp_path / "run", {"train": shares, "max_length": 64})
    config["train"] = {"global_batch_size": tiny_runs.BATCH}
    kind, _, said = run(1, config)
    assert kind == "done" and "data.train: 17 rows can be used, which makes the 6 steps that the epochs of" in said
    last = tiny_runs.steps(tmp_path / "run")[-1]
    assert (last["step"], last["data/train/rows"] + last["data/eval/rows"]) == (6, 24)
    for keys, says in (({"steps": 7}, "train.steps: value 7 takes 28 rows"), ({"epochs": 2}, "train.epochs: value 2")):
        config = config | {"output_dir": str(tmp_path / "long"), "train": {"global_batch_size": 4, **keys}}
        kind, message, _ = run(1, config)
        assert kind == "ConfigError" and message.startswith(says), message
        assert "the sources of data.train have 27 within their epochs; give at most 6 steps" in message


def test_pairs_are_mixed_too_and_have_weights(inputs, tmp_path):
    """With log-probs of the reference that are computed once for all sources and sets."""
    pairs = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 20)} for i in range(6)]
    others = [{"q": f"{i}+2=", "good": str(i + 2), "bad": str(i + 30), "weight": 0.5} for i in range(6)]
    columns = {"q": "prompt", "good": "chosen", "bad": "rejected"}
    of_b = {"path": write_rows(tmp_path / "b.jsonl", others), "columns": columns}
    train = [{"path": write_rows(tmp_path / "a.jsonl", pairs), "weight": 1}, {**of_b, "weight": 2}]
    data = {"train": train, "eval": {"one": train[0]["path"], "two": of_b}, "max_length": 64}
    config = config_of(inputs, tmp_path / "run", data, reference={"cache": True}) | {"loss": {"name": "dpo"}}
    assert run_case(1, "tests.trainers.dpo_cases:train", config=config)[:2] == ("done", "")
    last = tiny_runs.steps(tmp_path / "run")[-1]
    assert (last["data/a/rows"], last["data/b/rows"]) == (8, 16) and all(is_metric(name) for name in last)
    for name in ("loss", "rewards/margin", "logps/chosen", "nll/chosen"):  # six rows of weight 1, six of weight 0.5
        one, two = last[f"eval/one/{name}"], last[f"eval/two/{name}"]
        of_one = 6 / 9 if name != "nll/chosen" else tokens_of(pairs) / (tokens_of(pairs) + tokens_of(others) / 2)
        assert last[f"eval/{name}"] == pytest.approx(of_one * one + (1 - of_one) * two, rel=1e-6), name


def tokens_of(rows: list[dict[str, str]]) -> int:
    """Tokens of the chosen answers, which a digit each and the end of the turn are."""
    return sum(len(row.get("chosen") or row["good"]) + 1 for row in rows)


@pytest.mark.slow
def test_a_reward_model_of_several_sources_is_resumed_bitwise(inputs, tmp_path):
    """The padding that scores are read by is known of rows that are opened source by source."""
    train = []
    for name, first, weight in (("a", 3, 1), ("b", 40, 3)):
        rows = [{"prompt": f"{i}+1=", "chosen": str(i + 1), "rejected": str(i + 20)} for i in range(first, first + 6)]
        train.append({"path": write_rows(tmp_path / f"{name}.jsonl", rows), "weight": weight})
    data = {"train": train, "eval": {"one": train[0]["path"], "two": train[1]["path"]}, "max_length": 64}

    def config(place: pathlib.Path) -> dict[str, Any]:
        made = config_of(inputs, place, data) | {"loss": {"name": "bradley_terry"}}
        return made | {"checkpoint": {"export_hf": True}}

    said = assert_goes_on_to_the_bit("tests.trainers.rm_cases:train", config, tmp_path, step=4)
    assert "scores are read at the last token before the padding" in said
    steps = tiny_runs.steps(tmp_path / "whole")
    assert all(is_metric(name) for name in steps[-1])
    assert (steps[-1]["data/a/rows"], steps[-1]["data/b/rows"]) == (6, 18)
    one, two = (steps[-1][f"eval/{name}/loss"] for name in ("one", "two"))
    assert steps[-1]["eval/loss"] == pytest.approx((one + two) / 2) and one != two
    assert (tmp_path / "stopped" / "hf" / "config.json").exists()


@pytest.mark.slow
def test_prompts_of_several_sources_are_sampled_and_resumed_bitwise(inputs, data, tmp_path):
    """Each prompt has the index of its row among those of all sources: completions are drawn by it."""
    train = [data["train"][0], {**data["train"][1], "epochs": None}]
    train[1]["columns"] = {"q": "prompt"}
    model = {"path": str(inputs / "model"), "dtype": "float32"}
    engine = {"backend": "fsdp", "device": "cpu", "micro_batch": {"size": 2}}

    def config(name: str) -> dict[str, Any]:
        return {
            "output_dir": str(tmp_path / name), "actor": {"model": model, "engine": engine},
            "rollout": {"samples_per_prompt": 2, "max_new_tokens": 4}, "algorithm": {"name": "grpo", "kl_in": "none"},
            "rewards": {"functions": [{"name": "length", "maximum": 2, "slack": 4}], "workers": 1},
            "data": {"train": train, "max_prompt_length": 40}, "train": {"steps": 4, "global_batch_size": 16},
            "checkpoint": {"export_hf": False}, "log": {"console": "plain"},
        }  # fmt: skip

    case = "tests.resume.rl.cases:train"
    assert run_case(1, case, config=config("live"))[:2] == ("done", "")
    assert run_case(1, case, config=config("stopped"), happening="signals", place="step", step=3)[0] == "stopped"
    assert run_case(1, case, config=config("stopped"))[:2] == ("done", "")
    live = metrics_of(tmp_path / "live")
    assert live == metrics_of(tmp_path / "stopped") and all(is_metric(name) for name in live[-1])
    assert (live[-1]["data/train/rows"], live[-1]["data/pairs/rows"]) == (20, 12)
    samples = [row for rows in samples_of(tmp_path / "live").values() for row in rows]
    first, second = ({row["index"] for row in samples if (row["index"] >= 10) == of} for of in (False, True))
    assert first == set(range(10)) and second == set(range(10, 15))
    texts = {row["index"]: str(row["prompt"]) for row in samples}
    assert len(set(texts.values())) == 15 and "3+3=" in texts[13]
