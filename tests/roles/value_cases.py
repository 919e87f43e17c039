"""Cases for worlds of processes: value heads and the reward model against transformers' sequence classifiers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from mrl.data.prompts import Prompt
from mrl.engine.registry import build_engine
from mrl.errors import ModelError, UserError
from mrl.roles.frozen import RewardModel
from mrl.rollout.base import Trajectory
from tests.data.tiny_tokenizers import CHATML, make_tokenizer
from tests.engine import tiny
from tests.roles.cases import Configs, everyone, make_dispatch, reading, train

OTHER_TEMPLATE = "{% for m in messages %}[{{ m.role }}] {{ m.content }}</s>{% endfor %}"
MESSAGES = [{"role": "user", "content": "What is 2 + 2?"}]


def classifier_scores(folder: str, sequences: list[list[int]]) -> Tensor:
    """What transformers' sequence classifier says of each sequence, alone and without padding."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    with torch.no_grad():
        return torch.cat([model(input_ids=torch.tensor([ids])).logits[0] for ids in sequences])


def last_values_are_the_classifiers(configs: Configs) -> None:
    """The value of each sequence's last token is the logit of transformers' classifier; every role, on every rank."""
    batch = tiny.uneven_batch()
    sequences = [tokens.tolist() for tokens in batch.tokens.split(batch.lengths.tolist())]
    dispatch = make_dispatch(configs)
    for role, config in configs.items():
        expected = classifier_scores(config.model.path, sequences)
        values = dispatch.forward(role, batch)["values"][batch.lengths.cumsum(0) - 1]
        torch.testing.assert_close(values, expected, rtol=0, atol=1e-5)
        assert expected.std() > 0.1


def a_critic_comes_back(configs: Configs, path: str) -> None:
    """A critic made from a language model starts at zero, trains, and what it exports gives the same scores anywhere."""
    batch = tiny.uneven_batch()
    sequences = [tokens.tolist() for tokens in batch.tokens.split(batch.lengths.tolist())]
    dispatch = make_dispatch(configs)
    for role in configs:
        assert not dispatch.forward(role, batch)["values"].any()
    train(dispatch, 2)
    for role in configs:
        folder = f"{path}/{role}"
        values = dispatch.forward(role, batch)["values"]
        assert values.any()
        dispatch.save_hf_model(role, folder)
        expected = classifier_scores(folder, sequences)
        torch.testing.assert_close(values[batch.lengths.cumsum(0) - 1], expected, rtol=0, atol=1e-5)
        again = make_dispatch({name: frozen(reading(config, folder)) for name, config in configs.items()})
        for name in configs:
            torch.testing.assert_close(again.forward(name, batch)["values"], values, rtol=0, atol=1e-5)


def frozen(config: Any) -> Any:
    return dataclasses.replace(config, optimizer=None)


def value_heads_from_scratch(configs: Configs) -> list[list[float]]:
    """Trap 29: a value head that starts from random numbers is the same on every rank that holds it. Returns it, by role."""
    heads = []
    for config in configs.values():
        scratch = dataclasses.replace(config, model=dataclasses.replace(config.model, init="random"))
        engine = make_dispatch({"critic": scratch}).engines["critic"]
        held = None
        if engine.backend == "megatron":
            held = next(
                (p.tolist() for n, p in engine.model.chunks[-1].named_parameters() if "output_layer" in n), None
            )
        whole = dict(engine.hf_weights()).get("score.weight")
        of_ranks = everyone((held, None if whole is None else whole.tolist()))
        heads.append(of_ranks[0][1])
        assert all(theirs in (None, heads[-1]) for theirs, _ in of_ranks)
    return heads


def refuses_model(configs: Configs, message: str) -> None:
    """A folder that gives no value is refused when the role is built, in one line, on every rank."""
    for config in configs.values():
        engine = build_engine(config)
        with pytest.raises(ModelError) as caught:
            engine.init_model()
        assert message in str(caught.value) and "\n" not in str(caught.value), str(caught.value)


# -- the reward model --------------------------------------------------------------------------------------------------


def trajectory(
    sample: int,
    text: str,
    *,
    content: Any = MESSAGES,
    end: str = "",
    row: dict | None = None,
    truncated: bool = False,
    **fields: Any,
) -> Trajectory:
    """What a policy with ChatML says; end: what ends it, in its tokens but not in its text."""
    tokenizer = make_tokenizer(CHATML, eos="<|im_end|>")
    if isinstance(content, str):
        prompt = tokenizer(content)["input_ids"]
    else:
        prompt = tokenizer.apply_chat_template(content, add_generation_prompt=True, return_dict=True)["input_ids"]
    answer = tokenizer(text + end)["input_ids"]
    return Trajectory(
        Prompt(0, "train.jsonl:1", row or {}, content, prompt, truncated), sample, prompt + answer, [0] * len(prompt) + [1] * len(answer),
        [0.0] * (len(prompt) + len(answer)), text, bool(end), **fields,
    )  # fmt: skip


TRAJECTORIES = [
    trajectory(0, "The answer is 4.", end="<|im_end|>"),
    trajectory(1, "quick brown"),
    trajectory(2, "hello there! 2 + 2 is what? The lazy dog", end="<|im_end|>"),
]


def conversations_score_as_in_transformers(
    configs: Configs, folders: list[str], templates: list[str]
) -> list[list[list[float]]]:
    """By folder, by template: the scores of TRAJECTORIES, which are what transformers gives their messages, whatever pads."""
    found = []
    for folder in folders:
        dispatch = make_dispatch({"reward": reading(configs["reward"], folder)}, offload_idle=True)
        classifier = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
        found.append([])
        for template in templates:
            tokenizer = make_tokenizer(template, eos="<|im_end|>")
            talks = [[*t.prompt.content, {"role": "assistant", "content": t.text}] for t in TRAJECTORIES]
            encoded = [tokenizer.apply_chat_template(talk, return_tensors="pt", return_dict=True) for talk in talks]
            with torch.no_grad():
                expected = [classifier(**inputs).logits.item() for inputs in encoded]
            model = RewardModel(dispatch, tokenizer)
            found[-1].append(model.score(TRAJECTORIES))
            torch.testing.assert_close(found[-1][-1], expected, rtol=0, atol=1e-5)
            assert model.score([]) == []
    return found


def scores(
    configs: Configs, *, template: str | None, eos: str, trajectories: list[Trajectory], system: str | None = None
) -> tuple:
    """(scores, what was read of each trajectory, the classifier's scores of that)."""
    model = RewardModel(make_dispatch(configs), make_tokenizer(template, eos=eos), system=system)
    read = [model.tokens(t) for t in trajectories]
    return model.score(trajectories), read, classifier_scores(configs["reward"].model.path, read).tolist()


def scoring_error(configs: Configs, *, template: str | None, trajectories: list[Trajectory]) -> str:
    """The message of the error that `score` raises."""
    dispatch = make_dispatch(configs)
    model = RewardModel(dispatch, make_tokenizer(template))
    with pytest.raises(UserError) as caught:
        model.score(trajectories)
    return f"{caught.type.__name__}: {caught.value}"
