"""Value heads and the reward model: the numbers of transformers' sequence classifiers, from and to their folders."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForSequenceClassification

from tests.data.kit import make_tokenizer
from tests.engine.harness import run_case
from tests.roles.kit import roles
from tests.roles.value_cases import MESSAGES, OTHER_TEMPLATE, TRAJECTORIES, trajectory

SAMPLE_0 = "reward.model: train.jsonl:1, sample 0"
FAMILIES = {"llama": {}, "qwen2 tied": {"tied": True}}


def run(case: str, configs, world_size: int = 1, **kwargs):
    return run_case(world_size, f"tests.roles.value_cases:{case}", configs=configs, **kwargs)


@pytest.mark.parametrize("name", FAMILIES)
def test_values_are_those_of_sequence_classifiers(models, name):
    folder = models(name.split()[0], head="value", **FAMILIES[name])
    run("last_values_are_the_classifiers", roles(folder, critic="dp", reward="fsdp"))
    two = {"critic": "tp2", "reward": "pp2"}
    run("last_values_are_the_classifiers", roles(folder, **two), 2)


@pytest.mark.parametrize("name", FAMILIES)
def test_trap_11_and_12_critics_of_tied_models(models, tmp_path, name):
    """A critic on tied embeddings is untied in the model and in what it exports (12), and two stages do not wait for each
    other over an embedding that they do not share (11)."""
    configs = roles(models(name.split()[0], **FAMILIES[name]), critic="pp2", options={"head": "value"})
    configs["critic2"] = roles(models(name.split()[0], **FAMILIES[name]), critic="fsdp")["critic"]
    run("a_critic_comes_back", configs, 2, path=str(tmp_path))
    for role in configs:
        assert json.loads((tmp_path / role / "config.json").read_text())["tie_word_embeddings"] is False
        assert "lm_head.weight" not in load_file(tmp_path / role / "model.safetensors")


def test_trap_29_value_heads_from_scratch_are_one(models):
    """What ranks draw for dropout differs: tests/engine/test_traps_megatron.py, and `random_numbers_go_on` for FSDP."""
    configs = {layout: roles(models(), critic=layout)["critic"] for layout in ("tp2", "pp2", "dp", "fsdp")}
    heads = run("value_heads_from_scratch", configs, 2)
    assert all(head == heads[0] for head in heads) and len(set(heads[0][0])) > 10


def test_a_folder_without_one_value_is_refused(models, tmp_path):
    frozen = {"reward": "dp"}
    message = "1 missing (score.weight), a value that nobody trains comes from a sequence classifier"
    run("refuses_model", roles(models(), **frozen), message=message)
    model = AutoModelForSequenceClassification.from_pretrained(models(head="value"))
    model.config.num_labels, model.score.weight = 3, torch.nn.Parameter(torch.randn(3, 32))
    model.save_pretrained(tmp_path)
    three = roles(str(tmp_path), critic="dp", reward="fsdp")
    run(
        "refuses_model",
        three,
        message="score.weight gives 3 labels and a value is one number; use a sequence classifier",
    )


def reward(models, layout="dp", **fields):
    return roles(models(head="value", vocab=512, **fields), reward=layout)


@pytest.mark.parametrize(("world_size", "layout"), [(1, "dp"), (2, "pp2"), (2, "fsdp")])
def test_the_policys_tokens_are_read_as_they_are(models, world_size, layout):
    """Where tokenizer and template are the actor's; an answer that was cut short gets the end token."""
    template = make_tokenizer().chat_template
    found, read, expected = run(
        "scores", reward(models, layout), world_size, template=template, eos="<|im_end|>", trajectories=TRAJECTORIES
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    end = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    assert read == [t.tokens if t.finished else [*t.tokens, end] for t in TRAJECTORIES]


def test_another_template_renders_the_conversation_again(models):
    tokenizer = make_tokenizer(OTHER_TEMPLATE)
    text = trajectory(3, "answer", content="Question: hello")
    found, read, expected = run(
        "scores", reward(models), template=OTHER_TEMPLATE, eos="</s>", trajectories=[*TRAJECTORIES, text]
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert [tokenizer.decode(ids) for ids in read] == [
        *(f"[user] {MESSAGES[0]['content']}</s>[assistant] {t.text}</s>" for t in TRAJECTORIES),
        "[user] Question: hello</s>[assistant] answer</s>",
    ]


def test_plain_text_is_joined_where_there_is_no_template(models):
    text = trajectory(0, " The answer is 4.", content="Question: What is 2 + 2?")
    found, read, expected = run("scores", reward(models), template=None, eos="</s>", trajectories=[text])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert make_tokenizer().decode(read[0]) == "Question: What is 2 + 2? The answer is 4.</s>"


@pytest.mark.parametrize(
    ("template", "of", "message"),
    [
        (OTHER_TEMPLATE, trajectory(1, "the " * 200), "ConfigError: reward.model: train.jsonl:1, sample 1: has "),
        (OTHER_TEMPLATE, trajectory(2, "x\n\ny", turns=2), "ConfigError: reward.model: train.jsonl:1, sample 2: has 2 turns"),
        (None, TRAJECTORIES[0], f"ConfigError: {SAMPLE_0}: the prompt is a conversation"),
        ("{{ raise_exception('no') }}", TRAJECTORIES[0], f"DataError: {SAMPLE_0}: the chat template cannot render"),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_one_line(models, template, of, message):
    error = run("scoring_error", reward(models), template=template, trajectories=[of])
    assert error.startswith(message) and "\n" not in error


def test_a_score_that_is_no_number_is_an_error(models, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(models(head="value", vocab=512), folder)
    weights = load_file(folder / "model.safetensors")
    weights["score.weight"][0, 0] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    error = run(
        "scoring_error", roles(str(folder), reward="dp"), template=OTHER_TEMPLATE, trajectories=TRAJECTORIES[:1]
    )
    assert error.startswith(f"RewardError: {SAMPLE_0}: the score is nan; ")
