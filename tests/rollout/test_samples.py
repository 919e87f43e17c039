"""Saved rollouts: written whole, read back as they were, and replayed."""

import dataclasses
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from mrl.config.ppo_checks import check_rollout
from mrl.errors import ConfigError, DataError
from mrl.rollout.recorded import RecordedRollouts
from mrl.rollout.samples import bound, read_samples, write_samples
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.rollout.environments import Says, config, make_prompts, make_rollouts, write_environments

TOKENIZER = make_tokenizer()
ROWS = [{"prompt": "hello"}, {"prompt": [{"role": "user", "content": 'the "quick"\n é\u2028fox'}], "last": "dog"}]


@pytest.fixture
def prompts():
    return make_prompts(ROWS, TOKENIZER)


def sampled(prompts, *says, series="step", **keys):
    return make_rollouts(Says(TOKENIZER, *says), **keys).sample(prompts, step=12, samples=2, series=series)


@pytest.fixture
def saved(tmp_path, prompts):
    """(folder, trajectories): a rollout before step 12."""
    trajectories = sampled(prompts, "lazy é dog")
    folder = str(tmp_path / "samples")
    numbers = [0.1 * i for i in range(4)]
    write_samples(
        folder, 12, trajectories, rewards=numbers, parts={"gsm8k": [0.0, 0.25, 0.5, 1.0]}, advantages=[-x for x in numbers],
        token_advantages=[None, None, None, [0.5 * m for m in trajectories[3].mask]],
    )  # fmt: skip
    return folder, trajectories


def replayed(folder, prompts, *, step=12, samples=2, series="step", **keys):
    return RecordedRollouts(config(path=folder, **keys)).sample(prompts, step=step, samples=samples, series=series)


def test_a_line_is_what_a_person_wants_to_know_first(saved):
    folder, trajectories = saved
    assert os.listdir(folder) == ["step_00000012.jsonl"]
    with open(f"{folder}/step_00000012.jsonl", encoding="utf-8") as file:
        lines = file.read().split("\n")
    t = trajectories[3]
    assert lines[4] == "" and '"completion": "lazy é dog"' in lines[3]
    assert list(json.loads(lines[3]).items()) == [
        ("step", 12), ("row", "train.jsonl:2"), ("index", 1), ("sample", 1), ("reward", 0.1 * 3), ("rewards", {"gsm8k": 1.0}),
        ("environment", None), ("prompt", ROWS[1]["prompt"]), ("completion", "lazy é dog"), ("finished", True), ("turns", 1),
        ("response_length", t.response_length), ("advantage", -0.1 * 3), ("tokens", t.tokens), ("mask", t.mask),
        ("log_probs", t.log_probs), ("conversation", None), ("cut_by", None),
        ("advantages", [0.5 * m for m in t.mask]), ("weights", None),
    ]  # fmt: skip


def test_a_replay_gives_what_was_saved(saved, prompts):
    folder, trajectories = saved
    assert replayed(folder, prompts) == trajectories
    assert replayed(folder, prompts[1:], samples=1) == [trajectories[2]]
    recorded = RecordedRollouts(config(path=folder))
    assert not recorded.exact and recorded.sample(prompts, step=12, samples=2) == trajectories  # and again
    recorded.close()


def test_samples_of_older_weights_are_not_replayed_without_a_correction(saved, prompts):
    folder, trajectories = saved
    write_samples(folder, 12, [dataclasses.replace(t, weights=9) for t in trajectories])
    with pytest.raises(ConfigError, match="^algorithm.correction: value null is needed: .* weights after step 9"):
        RecordedRollouts(config(path=folder), corrects=False)
    assert replayed(folder, prompts)[0].weights == 9
    write_samples(folder, 12, [dataclasses.replace(t, weights=11) for t in trajectories])
    assert RecordedRollouts(config(path=folder), corrects=False).sample(prompts, step=12, samples=2)[0].weights == 11


def test_conversations_are_replayed_without_their_environment(tmp_path, prompts):
    path = write_environments(tmp_path)
    for name in ("Count", "Guess"):
        trajectories = sampled(prompts[:1], "fox", "dog", environment=f"{path}:{name}", max_turns=2)
        write_samples(str(tmp_path), 12, trajectories)
        assert trajectories[0].turns == 2 and trajectories[0].reward
        saved = read_samples(f"{tmp_path}/step_00000012.jsonl")[0]
        assert saved.conversation == trajectories[0].conversation and saved.cut_by == "turns"
        assert replayed(str(tmp_path), prompts[:1], environment="gone.py:Env") == trajectories


def test_a_prompt_that_comes_twice_and_other_series(tmp_path, prompts):
    twice = [prompts[0], prompts[0]]
    says = Says(TOKENIZER, "fox")
    one, two = make_rollouts(says).sample(prompts[:1], step=12, samples=1), sampled(prompts[:1], "dog")[:1]
    write_samples(str(tmp_path), 12, one + two)
    assert replayed(str(tmp_path), twice, samples=1) == one + two
    write_samples(str(tmp_path), 12, two, series="eval")
    assert sorted(os.listdir(tmp_path)) == ["eval_00000012.jsonl", "step_00000012.jsonl"]
    assert replayed(str(tmp_path), twice[:1], samples=1, series="eval") == two


def test_a_text_with_half_a_character_is_written_as_json_does(tmp_path, prompts):
    rows = [
        {"prompt": "hello", "reset": [{"role": "user", "content": "x", "name": "\ud83d"}], "answer": [None, 1, True]}
    ]
    path = write_environments(tmp_path)
    trajectories = sampled(make_prompts(rows, TOKENIZER), "fox", environment=f"{path}:Answers")
    write_samples(str(tmp_path), 12, trajectories)
    assert replayed(str(tmp_path), make_prompts(rows, TOKENIZER), environment="gone.py:Env") == trajectories


def test_a_file_is_whole_or_not_there(saved, prompts):
    folder, trajectories = saved
    file = Path(folder, "step_00000012.jsonl")
    before = file.read_text(encoding="utf-8")
    with pytest.raises(IndexError):
        write_samples(folder, 12, trajectories, rewards=[1.0])  # fails in the middle
    assert os.listdir(folder) == ["step_00000012.jsonl"] and file.read_text(encoding="utf-8") == before


def test_compressed_and_without_tokens(saved, prompts):
    folder, trajectories = saved
    write_samples(folder, 12, trajectories, compress=True)
    assert os.listdir(folder) == ["step_00000012.jsonl.gz"] and replayed(folder, prompts) == trajectories
    whole = Path(folder, "step_00000012.jsonl.gz")
    before = whole.read_bytes()
    write_samples(folder, 12, trajectories, compress=True)
    assert whole.read_bytes() == before
    whole.write_bytes(before[:-20])
    with pytest.raises(DataError, match=r"step_00000012.jsonl.gz: cannot be read \(.*give a file that"):
        replayed(folder, prompts)
    write_samples(folder, 12, trajectories, tokens=False)
    assert os.listdir(folder) == ["step_00000012.jsonl"]
    assert (
        not {"tokens", "mask", "log_probs", "advantages"}
        & json.loads(Path(folder, "step_00000012.jsonl").read_text().split("\n")[0]).keys()
    )
    with pytest.raises(
        DataError, match="12.jsonl:1: has no tokens: log.samples.tokens was false, and a replay needs them"
    ):
        replayed(folder, prompts)


def test_the_folder_is_bounded_from_the_oldest_file_on(tmp_path):
    def left(*, keep=None, max_mb=None):
        for step in (1, 2, 30):
            for series in ("step", "eval"):
                name = f"{series}_{step:08d}.jsonl"
                (tmp_path / (f"{name}.gz" if step == 2 else name)).write_bytes(bytes(300_000))
        bound(str(tmp_path), keep=keep, max_mb=max_mb)
        return sorted(path.name.split(".")[0].replace("0000000", "") for path in tmp_path.glob("*_*"))

    (tmp_path / "notes.jsonl").write_bytes(bytes(2_000_000))
    assert left() == ["eval_00000030", "eval_1", "eval_2", "step_00000030", "step_1", "step_2"]
    assert left(keep=1) == ["eval_00000030", "step_00000030"]
    assert left(keep=2) == ["eval_00000030", "eval_2", "step_00000030", "step_2"]
    assert left(max_mb=1) == ["eval_00000030", "step_00000030", "step_2"]
    (tmp_path / "step_00000040.jsonl").write_bytes(bytes(3_000_000))
    assert left(max_mb=1) == ["step_00000040"] and (tmp_path / "notes.jsonl").exists()


# ------------------------------------------------------------------------------------------------------- what is missing


def test_an_empty_stop_is_refused():
    with pytest.raises(ConfigError, match='rollout.stop: value "" would end every completion at once'):
        check_rollout(SimpleNamespace(rollout=config(stop=("",))))


def test_a_folder_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="rollout.path: value null leaves rollout.backend recorded nothing to replay"):
        RecordedRollouts(config())
    with pytest.raises(ConfigError, match="rollout.path: .*none: there is no such folder; give the samples/ of a run"):
        RecordedRollouts(config(path=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"step": 13}, "rollout.path: {folder}: has no step_00000013.jsonl, which is needed before step 13; it has 1 from"),
        ({"series": "eval"}, "rollout.path: {folder}: has no eval_00000012.jsonl, which is needed before step 12; it has none"),
        ({"samples": 3}, "{folder}/step_00000012.jsonl: has no sample 2 of train.jsonl:1 (index 0), as often as"),
        ({"max_new_tokens": 3}, "{folder}/step_00000012.jsonl:1: has 7 tokens after the prompt, and rollout.max_new_tokens is 3"),
        ({"rows": [{"prompt": "other"}]}, "12.jsonl:1: the prompt is not that of train.jsonl:1, or has other tokens now"),
        ({"template": CHATML.replace("\n", " ")}, "12.jsonl:1: the prompt is not that of train.jsonl:1, or has other tokens"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(saved, keys, message):
    prompts = make_prompts(keys.pop("rows", ROWS), make_tokenizer(keys.pop("template", CHATML)))
    with pytest.raises(DataError) as error:
        replayed(saved[0], prompts, **keys)
    assert message.format(folder=saved[0]) in str(error.value)


def test_a_file_of_another_step(saved, prompts):
    os.rename(f"{saved[0]}/step_00000012.jsonl", f"{saved[0]}/step_00000007.jsonl")
    with pytest.raises(DataError, match="step_00000007.jsonl:1: step is 12 and not 7"):
        replayed(saved[0], prompts, step=7)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("{", "Expecting property name"), ("5", "no attribute 'keys'"), ({"note": 1}, "unexpected keyword argument 'note'"),
        ({"sample": None}, "missing 1 required positional argument: 'sample'"), ({"mask": [0, 1]}, "unlike lengths"),
        ({"response_length": 1}, "a mask that does not fit response_length"), ("log-prob of the prompt", "is not 0 where mask is 0"),
        ("not finite", "a log-prob that is not finite"), ({"tokens": ["x"]}, "a wrong type"), ({"reward": "high"}, "a wrong type"),
        ({"tokens": [], "mask": [], "log_probs": []}, "a mask that does not fit"),
    ],
)  # fmt: skip
def test_a_wrong_line_is_named(saved, change, message):
    path = Path(saved[0], "step_00000012.jsonl")
    lines = path.read_text(encoding="utf-8").split("\n")
    fields = json.loads(lines[1])
    match change:
        case "log-prob of the prompt":
            fields["log_probs"][0] = -1.0
        case "not finite":
            fields["log_probs"][-1] = float("nan")
        case dict():
            fields = {name: value for name, value in (fields | change).items() if value is not None or name != "sample"}
    lines[1] = change if change in ("{", "5") else json.dumps(fields)
    path.write_text("\n".join(lines), encoding="utf-8")
    with pytest.raises(DataError) as error:
        read_samples(str(path))
    assert f"{path}:2: " in str(error.value) and message in str(error.value), str(error.value)


@pytest.mark.parametrize("text", ["", '{"step": 1'])
def test_a_file_that_is_cut_off_or_empty(tmp_path, text):
    (tmp_path / "step_00000012.jsonl").write_text(text)
    with pytest.raises(DataError, match="12.jsonl:1: is no whole line; copy the file again"):
        read_samples(str(tmp_path / "step_00000012.jsonl"))
