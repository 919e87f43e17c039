"""`mrl eval`: the numbers of `mrl ppo`'s own evaluation, tasks, comparisons, and what a result says."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from statistics import fmean

import pytest
import yaml

from mrl import metrics
from mrl.config.rewards import FunctionReward, RewardsConfig
from mrl.data.prompts import Prompt
from mrl.inference import results
from mrl.inference.statistics import binary_difference, interval, mcnemar, sign_flips, student, wilson
from mrl.inference.tasks import merged, read_task
from mrl.rewards.scorer import Scores
from mrl.rollout.base import Trajectory
from tests.data.tiny_tokenizers import write_jsonl
from tests.engine.harness import run_case
from tests.inference.cases import line_of, mrl, refusal
from tests.trainers.rl import tiny_policies

REPO = pathlib.Path(__file__).parents[2]
REWARD = '''
print("what a user's file says when it is imported is no result")

def even(prompt, completion, row):
    """1 where the completion has an even number of characters: random models are right about half of the time."""
    return float(len(completion) % 2 == 0)

def broken(prompt, completion, row):
    raise ValueError("a judge that is down")
'''
ROWS = 12
ASK = ("--max-new-tokens", "8")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> pathlib.Path:
    """Models, rows, a reward whose values differ; `run`, whose evaluations are greedy, `sampled`, whose are of 3 samples."""
    folder = tmp_path_factory.mktemp("inputs")
    tiny_policies.make_inputs(folder)
    (folder / "reward.py").write_text(REWARD)
    rows = [tiny_policies.prompt([i] * (1 + i % 3)) for i in range(ROWS)]
    write_jsonl(folder / "rows.jsonl", rows)
    write_jsonl(folder / "questions.jsonl", [{"question": row["prompt"], "answer": row["answer"]} for row in rows])
    # the second is what is learned: of the first alone all values would be 1
    even = {"function": f"{folder}/reward.py:even", "weight": 0.25}
    rewards = {"functions": [even, {"name": "length", "maximum": 4, "slack": 20}]}
    (folder / "as_run.yaml").write_text(yaml.safe_dump({"data": str(folder / "rows.jsonl"), "rewards": rewards}))
    for name, algorithm, samples in (("run", "ppo", 1), ("sampled", "grpo", 3)):
        config = tiny_policies.make_config(
            folder, folder / name, algorithm, rewards=rewards,
            data={"eval": str(folder / "rows.jsonl")}, train={"eval_every": 1, "eval_samples": samples},
            log={"console": "none"}, checkpoint={"every": 2},
        )  # fmt: skip
        assert run_case(1, "tests.trainers.rl.cases:train", config=config)[0] == "done"
    return folder


def evaluate(
    inputs, model, task="rows.jsonl", *arguments: object, world: int = 1, reward: str | None = "reward.py:even"
):
    """The result of `mrl eval MODEL TASK --json` in the folder of the inputs."""
    given = [*ASK, *(["--reward", reward] if reward else []), "--json", "rewards.workers=1"]
    done = mrl("eval", model, task, *given, *arguments, cwd=inputs, world=world)
    assert done.code == 0, done.err
    return json.loads(done.out)


def logged(run: pathlib.Path, step: int) -> dict[str, float]:
    (row,) = [row for row in metrics.read(run / "metrics.jsonl") if row["step"] == step]
    return {name: value for name, value in row.items() if name.startswith("eval/")}


@pytest.mark.parametrize(
    ("keys", "world"), [((), 1), pytest.param(("engine.parallel.tp=2",), 2, marks=pytest.mark.nightly)]
)
def test_the_accuracy_is_that_of_the_run(inputs, keys, world):
    """To the bit."""
    expected = logged(inputs / "run", 2)
    assert 0 < expected["eval/accuracy"] < 1
    found = evaluate(inputs, "run", "as_run.yaml", *keys, world=world, reward=None)
    assert {name: found["metrics"][name] for name in expected} == expected
    assert found["measures"]["accuracy"]["value"] == pytest.approx(expected["eval/accuracy"], abs=1e-12)
    assert found["length"] == expected["eval/response_length"] and found["samples"] == 1


def test_the_actor_of_a_checkpoint_is_that_of_the_export(inputs):
    """Beside a critic."""
    asked = ("--prompt", "12+30=", "--greedy", "--max-new-tokens", "8")
    saved, exported = (mrl("generate", inputs / "run" / place, *asked) for place in ("checkpoints", "hf"))
    assert saved.code == 0 and "fsdp checkpoint of step 2, actor" in saved.err, saved
    assert saved.out == exported.out != ""


def test_pass_at_k_is_that_of_the_run(inputs):
    expected = logged(inputs / "sampled", 0)
    found = evaluate(inputs, "model", "as_run.yaml", "--samples", 3, "--temperature", "0.8", reward=None)
    assert {name: found["metrics"][name] for name in expected} == expected
    measures = found["measures"]
    assert measures["pass@3"]["value"] == pytest.approx(expected["eval/accuracy"], abs=1e-12)
    assert measures["pass@1"]["value"] == pytest.approx(
        fmean(v for row in found["rows"] for v in row["values"]), abs=1e-12
    )
    assert measures["pass@1"]["value"] < measures["pass@2"]["value"] < measures["pass@3"]["value"]
    for measure in measures.values():
        assert 0 <= measure["low"] < measure["value"] < measure["high"] <= 1


def test_what_a_result_says(inputs, tmp_path):
    """The file and the table; a task file says the same as options."""
    out = tmp_path / "result.json"
    done = mrl(
        "eval", "run", "questions.jsonl", *ASK, "--reward", "reward.py:even", "--out", out, "--limit", 6,
        "data.columns={question: prompt}", cwd=inputs,
    )  # fmt: skip
    assert done.code == 0, done.err
    found = json.loads(out.read_text())
    right = sum(row["values"][0] for row in found["rows"])
    low, high = wilson(right / 6, 6)
    assert done.out.splitlines()[:3] == [
        "questions: 6 prompts, reward even, greedy, seed 0",
        "run (float32)",
        f"accuracy   {right / 6:.1%} [{low:.1%}, {high:.1%}]",
    ]
    assert [row["where"] for row in found["rows"]] == [f"questions.jsonl:{i + 1}" for i in range(6)]
    assert all(len(row["completions"]) == len(row["tokens"]) == len(row["finished"]) == 1 for row in found["rows"])
    assert found["truncated"] == pytest.approx(fmean(not row["finished"][0] for row in found["rows"]), abs=1e-12)
    assert found["seed"] == 0 and found["versions"]["mrl"] and found["config"]["rollout"]["max_new_tokens"] == 8
    assert found["config"]["data"]["columns"] == {"question": "prompt"} and found["data"][0]["rows"] == ROWS
    rows = {"eval": "questions.jsonl", "columns": {"question": "prompt"}}
    task = {"name": "sums", "data": rows, "reward": "reward.py:even", "max_new_tokens": 8, "limit": 6}
    (inputs / "task.yaml").write_text(yaml.safe_dump(task))
    same = json.loads(mrl("eval", "run", "task.yaml", "--json", cwd=inputs).out)
    assert (same["task"], same["rows"]) == ("sums", found["rows"])
    over = merged(read_task(str(inputs / "task.yaml")), {"rollout": {"samples_per_prompt": 2}}, "gsm8k")
    assert over["rollout"] == {"max_new_tokens": 8, "samples_per_prompt": 2}, "options over the task"
    assert over["rewards"] == {"functions": [{"name": "gsm8k"}]} and over["data"]["eval"] == "questions.jsonl"


def test_two_models_are_compared_in_pairs(inputs):
    """By McNemar's test on the prompts that one of them answers."""
    base, found = evaluate(inputs, "model"), evaluate(inputs, "run", "rows.jsonl", "--against", "model")
    first, second = ([row["values"][0] for row in result["rows"]] for result in (found, base))
    measure = found["comparison"]["measures"]["pass@1"]
    assert measure["difference"] == pytest.approx(fmean(first) - fmean(second), abs=1e-12)
    assert measure["p"] == mcnemar(first, second) and measure["test"] == "McNemar's exact test"
    assert measure["low"] <= measure["difference"] <= measure["high"] and first != second
    assert results.compare(found, base)["measures"] == found["comparison"]["measures"], "as against its result"
    text = results.table(found, base, found["comparison"])
    assert (
        "A: run (float32)\nB: model (float32)\n" in text
        and f"of {ROWS} prompts that both have, A is better on " in text
    )
    assert max(map(len, text.splitlines())) <= 100


def test_faults_of_a_reward(inputs):
    stopped = mrl("eval", "run", "rows.jsonl", *ASK, "--reward", "reward.py:broken", "rewards.workers=1", cwd=inputs)
    assert stopped.code == 2 and "a judge that is down" in stopped.err
    found = evaluate(inputs, "run", "rows.jsonl", "rewards.on_error=zero", reward="reward.py:broken")
    assert found["faults"] == ROWS and found["measures"]["accuracy"]["value"] == 0


def result(values, samples=1, reward="even", **fields):
    """What `mrl eval --out` writes, as far as comparisons and tables read it."""
    rows = [{"row": str(i), "values": list(v)} for i, v in enumerate(values)]
    config = {
        "seed": 0,
        "rollout": {"samples_per_prompt": samples},
        "data": {},
        "rewards": {"functions": [{"name": reward}]},
    }
    about = {"mrl_eval": 1, "task": "rows", "model": {"given": "m", "dtype": "float32"}, "seed": 0, "temperature": 1.0}
    return {
        **about, "rows": rows, "samples": samples, "reward": reward, "config": config, "length": 1.0, "truncated": 0.0,
        "faults": 0, "measures": results.measures_of(rows), "left_out": {"skipped": 0, "dropped": 0}, **fields,
    }  # fmt: skip


def test_rows_are_paired_by_what_is_in_them():
    """Wherever they stand; equal rows one by one; of k samples each, as far as both have them."""
    first, second = result([[1.0, 0.0]] * 3, 2), result([[0.0], [1.0], [1.0], [0.0]])
    first["rows"][2]["row"] = "0"
    second["rows"].reverse()
    found = results.compare(first, second)
    assert found["prompts"] == 2 and list(found["measures"]) == ["pass@1"]
    assert found["measures"]["pass@1"]["difference"] == pytest.approx(0.5 - 0.5)
    assert (found["measures"]["pass@1"]["only_first"], found["measures"]["pass@1"]["only_second"]) == (1, 1)
    assert "another rollout.samples_per_prompt: 2 and 1" in results.table(first, second, found)
    alike = result([[1.0, 1.0], [0.0, 0.0]], 2), result([[0.0, 0.0]] * 2, 2)
    tests = {measure["test"] for measure in results.compare(*alike)["measures"].values()}
    assert tests == {"paired permutation of signs"}, "McNemar's test is of greedy answers, not of samples that agree"


def test_what_became_of_a_prompt_is_of_its_own_samples():
    """Lengths of what was sampled, not of prompts; values are those of accuracy, which need not be the totals."""
    masks = [[[1, 1, 1], [1]], [[1, 0, 1, 1, 1], [1, 1]]]  # of the tokens after prompts of four and of seven
    prompts = [Prompt(i, f"rows.jsonl:{i + 1}", {"answer": i}, "", list(range(n))) for i, n in enumerate((4, 7))]
    trajectories = [
        Trajectory(
            prompt,
            i,
            [0] * (len(prompt.tokens) + len(mask)),
            [0] * len(prompt.tokens) + mask,
            [],
            f"{prompt.index}{i}",
            i == 0,
        )
        for prompt, of in zip(prompts, masks, strict=True)
        for i, mask in enumerate(of)
    ]
    trajectories[1] = dataclasses.replace(trajectories[1], finished=True)
    scores = Scores((9.0, 8.0, 7.0, 6.0), {"a": (1.0, 0.0, 0.25, 0.5), "b": (4.0, 3.0, 2.0, 1.0)})
    rows = results.rows_of(trajectories, scores, scores.parts["a"], 2)
    assert [{name: value for name, value in row.items() if name != "row"} for row in rows] == [
        {"where": "rows.jsonl:1", "values": [1.0, 0.0], "rewards": {"a": [1.0, 0.0], "b": [4.0, 3.0]}, "tokens": [3, 1],
         "finished": [True, True], "completions": ["00", "01"]},
        {"where": "rows.jsonl:2", "values": [0.25, 0.5], "rewards": {"a": [0.25, 0.5], "b": [2.0, 1.0]}, "tokens": [4, 2],
         "finished": [True, False], "completions": ["10", "11"]},
    ]  # fmt: skip
    assert [row["row"] for row in rows] == [results.row_key({"answer": i}) for i in (0, 1)] and rows[0]["row"] != rows[
        1
    ]["row"]
    assert results.totals_of(rows) == {"length": 10 / 4, "truncated": 1 / 4}
    measures = results.measures_of(rows)
    assert {name: measure["value"] for name, measure in measures.items()} == {"pass@1": 1.75 / 4, "pass@2": 1.5 / 2}
    assert measures["pass@1"] == {"value": 1.75 / 4, **dict(zip(("low", "high"), interval([0.5, 0.375]), strict=True))}


def test_a_difference_is_of_the_first_less_the_second():
    """Of greedy answers the first model's three against one; of numbers a share of the prompts, each by its own."""
    first, second = result([[1.0]] * 4 + [[0.0]] * 3), result([[0.0]] * 3 + [[1.0]] * 2 + [[0.0]] * 2)
    measure = results.compare(first, second)["measures"]["pass@1"]
    assert (measure["only_first"], measure["only_second"]) == (3, 1) and measure["p"] == mcnemar(
        *([1, 1, 1, 0], [0, 0, 0, 1])
    )
    assert measure["difference"] == pytest.approx(2 / 7) and measure["test"] == "McNemar's exact test"
    assert (measure["low"], measure["high"]) == binary_difference(3, 1, 7)
    values = [[0.5, 1.0], [0.0, 0.5], [1.0, 1.0]], [[0.0, 0.0], [0.25, 0.75], [0.0, 3.0]]
    found = results.compare(*(result(of, 2) for of in values))["measures"]
    gaps = {"pass@1": [0.75, -0.25, -0.5], "pass@2": [1.0, -0.25, -2.0]}
    for name, of in gaps.items():
        assert found[name]["difference"] == pytest.approx(fmean(of)) and found[name]["p"] == sign_flips(of)
        assert (found[name]["low"], found[name]["high"]) == pytest.approx(student(of)), "not cut: the second has a 3"
        assert (found[name]["only_first"], found[name]["only_second"]) == (1, 2)


def test_a_comparison_is_printed_as_the_docs_have_it():
    """The sample in docs/eval.md was printed by the command above it. Its values again, from its counts: which prompts
    either model was right on, and all that follows from them."""
    sample = (REPO / "docs/eval.md").read_text().partition("    $ mrl eval runs/arithmetic-grpo ")[2]
    lines = [line.removeprefix("    ") for line in sample.partition("\n\n")[0].splitlines()[1:]]
    first_right, second_right, only_first, only_second = 840, 472, 391, 23
    both = first_right - only_first
    assert both == second_right - only_second
    pairs = [(1.0, 1.0)] * both + [(1.0, 0.0)] * only_first + [(0.0, 1.0)] * only_second
    pairs += [(0.0, 0.0)] * (1000 - len(pairs))
    left_out = {"skipped": 0, "dropped": 0, "truncated": 0}
    shown = [
        result(
            [[pair[i]] for pair in pairs], reward="exact_match", task="eval", length=length, left_out=left_out,
            model={"given": f"runs/arithmetic-{name}", "dtype": "float32"},
        )
        for i, (name, length) in enumerate((("grpo", 3.5), ("half", 3.4)))
    ]  # fmt: skip
    assert results.table(*shown, results.compare(*shown)).splitlines() == lines


def test_rewards_that_are_no_shares_are_no_percent():
    """Beyond 0 and 1, of either model: numbers as they are."""
    third, other = result([[-2.0], [3.0], [0.5]]), result([[0.0], [1.0], [1.0]])
    line = "mean reward  0.5 [-5.71, 6.71]"
    assert results.table(third, None, None).splitlines()[2] == line
    both = results.table(third, other, results.compare(third, other)).splitlines()
    assert (
        " ".join(both[4].split()) == "mean reward 0.5 [-5.71, 6.71] 0.6667 [0.2077, 0.9385] -0.1667 [-5.186, +4.853] 1"
    )
    several = results.table(result([[2.0, 4.0], [0.0, 1.0]], 2), None, None).splitlines()
    assert several[2].startswith("mean reward  1.75 ") and several[3].startswith("best of 2    2.5 ")
    assert results.table(other, None, None).splitlines()[2].startswith("accuracy   66.7% [")


def test_what_two_results_do_not_share_is_said():
    """Rows of one alone, of which accuracies are not; rows that were left out; the reward's file; the dtype."""
    first = result([[1.0], [0.0], [0.0], [0.0]], left_out={"skipped": 1, "dropped": 2, "truncated": 4}, reward_file="a")
    second = result([[1.0]], reward_file="b")
    first["config"]["model"], second["config"]["model"] = {"dtype": "float32"}, {"dtype": "bfloat16"}
    lines = results.table(first, second, results.compare(first, second)).splitlines()
    cells = {line.split("  ")[0]: line.split() for line in lines}
    assert cells["accuracy"][1] == "100.0%", "of the one row that both have, not of four"
    assert cells["left out"] == ["left", "out", "3", "rows", "0", "rows"]
    assert "B has 1 of the 4 rows of A, and 1 in all: accuracies are of the rows that both have" in lines
    assert lines[-2:] == [
        'A and B have another model.dtype: "float32" and "bfloat16"',
        'A and B have another file of the reward: "a" and "b"',
    ]
    same = results.table(second, second, results.compare(second, second))
    assert "of the rows that both have" not in same and "have another" not in same


def test_a_reward_of_ones_own_is_known_by_its_file(tmp_path):
    rewards = RewardsConfig(functions=(FunctionReward(function=f"{tmp_path}/reward.py:score"),))
    hashes = []
    for text in ("", "# changed\n"):
        (tmp_path / "reward.py").write_text(text)
        hashes.append(results.reward_file(rewards))
    assert None not in hashes and len(set(hashes)) == 2


OF_ROWS = ("rows.jsonl", "--reward", "gsm8k")
REFUSED = {
    "no reward": (("rows.jsonl",), "--reward: is missing, so that nothing says what is right; give gsm8k"),
    "a reward twice": ((*OF_ROWS, "rewards.functions=[{name: gsm8k}]"), "rewards.functions: is given by KEY=VALUE and by --reward; keep one of them"),
    "a temperature of one sample": ((*OF_ROWS, "--temperature", "0.5"), "has no effect with one sample of each prompt"),
    "no temperature of a task's samples": (("several.yaml", "--temperature", "0"), "--temperature: value 0 makes the 4 samples of a prompt equal; give one above 0, or --samples 1"),
    "no result": ((*OF_ROWS, "--against", "other.json"), "--against: value 'other.json' is no result"),
    "a result of another reward": ((*OF_ROWS, "--against", "earlier.json"), "--against: was scored by even, and this is by gsm8k; evaluate both by the same reward"),
    "a result of other rows": (("rows.jsonl", "--reward", "reward.py:even", "--against", "earlier.json"), "--against: has none of the rows of this task"),
    "a task without rows": (("bad.yaml",), "data: value null is null; give a file of rows"),
    "a task that trains": (("train.yaml",), 'data.train: value "rows.jsonl" has no effect in a task; name its rows in data.eval'),
    "an unknown key of a task": (("typo.yaml",), "did you mean max_new_tokens?"),
    "two rewards": (("both.yaml",), "reward: is given together with rewards; keep one of them"),
    "no such function": (("rows.jsonl", "--reward", "reward.py:odd"), "reward.py:odd: the file has no function odd"),
    "no answer in the row": (("bare.jsonl", "--reward", "gsm8k"), 'rewards.functions[0].field: value "answer" is the field that gsm8k reads, and it is missing or null in row bare.jsonl:1'),
    "an answer by another name": (("renamed.jsonl", "--reward", "gsm8k", "data.columns={reply: answer}", "--against", "other.json"), "--against: value 'other.json' is no result"),
    "a backend of training": ((*OF_ROWS, "rollout.backend=auto"), "is for `mrl ppo` alone"),
    "out over the rows": ((*OF_ROWS, "--out", "rows.jsonl"), "--out: is the file of the task"),
    "out over what is compared": ((*OF_ROWS, "--against", "earlier.json", "--out", "earlier.json"), "--out: is the file of --against"),
}  # fmt: skip
REFUSED_BY_RANKS = {
    "no answer in rows of a glob": (("bar*.jsonl", "--reward", "gsm8k"), 'rewards.functions[0].field: value "answer"'),
}  # fmt: skip


@pytest.fixture(scope="module")
def bad(inputs) -> pathlib.Path:
    (inputs / "other.json").write_text("{}")
    (inputs / "earlier.json").write_text(json.dumps(result([[1.0]])))
    write_jsonl(inputs / "bare.jsonl", [{"prompt": "1+1="}])
    write_jsonl(inputs / "renamed.jsonl", [{"prompt": "1+1=", "reply": "2"}])
    tasks = {
        "bad": {"reward": "gsm8k"},
        "typo": {"data": "rows.jsonl", "reward": "gsm8k", "max_tokens": 3},
        "both": {"data": "rows.jsonl", "reward": "gsm8k", "rewards": ["gsm8k"]},
        "several": {"data": "rows.jsonl", "reward": "gsm8k", "samples": 4},
        "train": {"data": {"eval": "rows.jsonl", "train": "rows.jsonl"}, "reward": "gsm8k"},
    }
    for name, task in tasks.items():
        (inputs / f"{name}.yaml").write_text(yaml.safe_dump(task))
    return inputs


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused_before_ranks_start(bad, name):
    arguments, says = REFUSED[name]
    assert says in refusal("eval", "model", *arguments, cwd=bad)


@pytest.mark.parametrize("name", REFUSED_BY_RANKS)
def test_is_refused_in_one_line(bad, name):
    arguments, says = REFUSED_BY_RANKS[name]
    assert says in line_of(mrl("eval", "model", *arguments, "rewards.workers=1", cwd=bad))


@pytest.mark.parametrize(
    ("words", "entry"),
    [
        ("gsm8k", {"name": "gsm8k"}),
        ("my.py:score", {"function": "my.py:score"}),
        ("{name: gsm8k, strict: true}", {"name": "gsm8k", "strict": True}),
    ],
)
def test_words_for_a_reward(words, entry):
    from mrl.inference.tasks import parse_reward

    assert parse_reward(words, "reward") == entry
