"""Value heads and the reward model: the numbers of transformers' sequence classifiers, from and to their folders."""

import json
import pathlib
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForSequenceClassification

from mrl.data.scored import scored_token
from mrl.weights.hf_config import normalize, pad_token_of
from tests.data.tiny_tokenizers import CHATML, WITH_TOOLS, make_tokenizer
from tests.engine.harness import run_case
from tests.roles.tiny_roles import roles
from tests.roles.value_cases import MESSAGES, OTHER_TEMPLATE, TRAJECTORIES, trajectory
from tests.tiers import nightly_but

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


@pytest.mark.slow
@pytest.mark.parametrize("name", nightly_but(["qwen2 tied"], FAMILIES))
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
    """It is zero. What ranks draw for dropout differs: tests/engine/test_traps_megatron.py, and `random_numbers_go_on` for FSDP."""
    configs = {layout: roles(models(), critic=layout)["critic"] for layout in ("tp2", "pp2", "dp", "fsdp")}
    heads = run("value_heads_from_scratch", configs, 2)
    assert all(head == heads[0] for head in heads) and set(heads[0][0]) == {0.0}


def test_a_folder_without_one_value_is_refused(models, tmp_path):
    frozen = {"reward": "dp"}
    run("refuses_model", roles(models(), **frozen), message="1 missing (score.weight)")
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


# Of <|im_end|> as the end of a turn: with and without white space after it, and twice.
TIGHT = CHATML.replace("<|im_end|>\n{%", "<|im_end|>{%")
TWICE = TIGHT + "{% if not add_generation_prompt %}<|im_end|>{% endif %}"
TEMPLATES = [CHATML, CHATML + "{# the same in another string #}", TIGHT, TWICE, OTHER_TEMPLATE]


@pytest.mark.slow
@pytest.mark.parametrize("layout", nightly_but(["pp2"], ["pp2", "fsdp"]))
def test_a_conversation_scores_as_in_transformers(models, tmp_path, layout):
    """Whatever string its template is, and whatever token pads: another one, the one that ends a turn, none."""
    configs = reward(models, layout)
    end = make_tokenizer().convert_tokens_to_ids("<|im_end|>")
    folders = [str(tmp_path / f"pad-{pad}") for pad in (0, end, None)]
    for folder, pad in zip(folders, (0, end, None), strict=True):
        shutil.copytree(configs["reward"].model.path, folder)
        config = json.loads((pathlib.Path(folder) / "config.json").read_text())
        (pathlib.Path(folder) / "config.json").write_text(json.dumps(config | {"pad_token_id": pad}))
    found = run("conversations_score_as_in_transformers", configs, 2, folders=folders, templates=TEMPLATES)
    apart = lambda a, b: min(abs(x - y) for x, y in zip(a, b, strict=True))  # noqa: E731
    chatml, same, tight, twice, other = range(5)
    for scores in found:
        assert scores[chatml] == scores[same]
    padded_by_zero, padded_by_end, unpadded = found
    assert padded_by_zero == unpadded
    for template in (tight, twice):  # the token before <|im_end|>, however often that stands there
        assert apart(padded_by_zero[template], padded_by_end[template]) > 0.01
    assert apart(padded_by_zero[tight], padded_by_zero[twice]) > 0.01
    assert padded_by_end[tight] == pytest.approx(padded_by_end[twice], abs=1e-6)
    for template in (chatml, other):
        assert padded_by_zero[template] == padded_by_end[template]


@pytest.mark.parametrize(
    ("ids", "pad", "place"),
    [
        ([5, 6, 7], None, 2), ([5, 6, 7], 7, 1), ([5, 7, 6, 7, 7], 7, 2), ([7, 7, 5, 6], 7, 3), ([7, 7], 7, 0), ([5], 0, 0),
    ],
)  # fmt: skip
def test_the_score_is_read_at_the_last_token_that_does_not_pad(ids, pad, place):
    assert scored_token(ids, pad) == place


@pytest.mark.parametrize("family", ["llama", "olmoe", "qwen2_vl", "gemma3"])
def test_the_padding_is_that_of_transformers_config_class(family):
    """Where config.json leaves pad_token_id out, some classes have one, and some have it in a part of theirs."""
    expected = AutoConfig.for_model(family).get_text_config().pad_token_id
    assert pad_token_of(normalize({"model_type": family})) == expected


def test_the_reward_models_own_template_renders_the_conversation(models):
    """With the row's tools and template arguments, data.system, and what an environment said between the turns."""
    tools = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    said = [
        {"role": "assistant", "content": "3"}, {"role": "tool", "content": "more"}, {"role": "assistant", "content": "4"},
        {"role": "user", "content": "right"},
    ]  # fmt: skip
    trajectories = [
        trajectory(0, "answer", content="Question: hello", end="<|im_end|>"),
        trajectory(1, "answer", row={"tools": tools, "chat_template_kwargs": {"loud": 1}}),
        trajectory(2, "3\n\n4", turns=2, conversation=said),
        trajectory(3, "the " * 200, truncated=True),
    ]
    found, read, expected = run(
        "scores", reward(models), template=WITH_TOOLS, eos="</s>", trajectories=trajectories, system="Be kind."
    )
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    tokenizer = make_tokenizer(WITH_TOOLS)
    system = {"role": "system", "content": "Be kind."}
    answer = {"role": "assistant", "content": "answer"}
    render = lambda messages, **more: tokenizer.apply_chat_template([system, *messages], tokenize=False, **more)  # noqa: E731
    assert [tokenizer.decode(ids) for ids in read[:3]] == [
        render([{"role": "user", "content": "Question: hello"}, answer]),
        render([*MESSAGES, answer], tools=tools, loud=1),
        render([*MESSAGES, *said[:3]]),
    ]
    assert len(read[3]) == 128 and tokenizer.decode(read[3]).endswith(" the the <|im_end|>\n")


def test_plain_text_is_joined_where_there_is_no_template(models):
    plain = trajectory(0, " The answer is 4.", content="Question: What is 2 + 2?")
    alpaca = trajectory(1, "4", content="Add.", row={"instruction": "Add."})
    found, read, expected = run("scores", reward(models), template=None, eos="</s>", trajectories=[plain, alpaca])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    decoded = [make_tokenizer().decode(ids) for ids in read]
    assert decoded[0] == "Question: What is 2 + 2? The answer is 4.</s>"
    assert decoded[1].startswith("Below is an instruction") and decoded[1].endswith("### Response:\n4</s>")


@pytest.mark.parametrize(
    ("template", "of", "message"),
    [
        (OTHER_TEMPLATE, trajectory(1, "the " * 200), "ConfigError: reward.model: train.jsonl:1, sample 1: has "),
        (OTHER_TEMPLATE, trajectory(2, "x\n\ny", turns=2), "ConfigError: reward.model: train.jsonl:1, sample 2: has 2 turns and was saved"),
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
