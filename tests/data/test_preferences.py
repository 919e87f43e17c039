"""Preference rows in every form they come in, the prompt that both answers share, and what is said of a bad row."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from mrl.algorithms.preference import LOSSES, REFERENCE, LossSettings, PreferenceLoss
from mrl.config.dpo import DPOConfig, PreferenceDataConfig
from mrl.data.batches import in_order
from mrl.data.dataset import RejectedRow
from mrl.data.preferences import PreferenceDataset, batch_of, with_other_answers
from mrl.errors import DataError
from mrl.trainers.dpo import DPOTask
from tests.config.refused import config_of
from tests.config.test_answers_checks import BASE
from tests.data.tiny_tokenizers import CHATML_MARKED, STRIPS_REASONING, make_tokenizer, trained_text, turns, write_jsonl

ASKED, GOOD, BAD = turns("2 + 2?"), [turns("x", "4")[1]], [turns("x", "fish")[1]]
PAIR = {"prompt": ASKED, "chosen": GOOD, "rejected": BAD}
SINGLE = {"prompt": ASKED, "completion": GOOD, "label": True}


def dataset(tmp_path, *rows, tokenizer=None, paired=True, **keys):
    config = PreferenceDataConfig(**{"train": write_jsonl(tmp_path / "rows.jsonl", rows), "max_length": 512, **keys})
    return PreferenceDataset(config, tokenizer or make_tokenizer(), paired=paired)


def refusal(tmp_path, row, **keys):
    """The one line that is said of a row, without the name of its file."""
    with pytest.raises(DataError) as caught:
        dataset(tmp_path, row, **keys).load(0)
    said = str(caught.value)
    assert "\n" not in said and "rows.jsonl:1" in said
    return said


@pytest.mark.parametrize("template", [None, CHATML_MARKED])
@pytest.mark.parametrize(
    "row",
    [
        PAIR,
        {"prompt": "2 + 2?", "chosen": "4", "rejected": "fish"},
        {"chosen": ASKED + GOOD, "rejected": ASKED + BAD},
        {"prompt": "2 + 2?", "chosen": ASKED + GOOD, "rejected": ASKED + BAD},
    ],
    ids=["messages", "strings", "implicit prompt", "prompt again in text"],
)
def test_every_form_becomes_the_same_two_answers(tmp_path, row, template):
    tokenizer = make_tokenizer(template) if template else make_tokenizer()
    chosen, rejected = dataset(tmp_path, row, tokenizer=tokenizer).load(0).answers
    assert [trained_text(tokenizer, a) for a in (chosen, rejected)] == [["4<|im_end|>"], ["fish<|im_end|>"]]
    asked = "<|im_start|>user\n2 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(chosen.prompt) == asked and chosen.prompt == rejected.prompt
    assert (chosen.is_chosen, rejected.is_chosen) == (True, False)


def test_without_a_chat_template_strings_are_joined_and_end(tmp_path):
    tokenizer = make_tokenizer(None)
    found = dataset(tmp_path, {"prompt": "2 + 2?", "chosen": " 4", "rejected": " fish"}, tokenizer=tokenizer).load(0)
    assert [trained_text(tokenizer, a) for a in found.answers] == [[" 4</s>"], [" fish</s>"]]


@pytest.mark.parametrize("label, good", [(True, True), (False, False), (1, True), (0, False)])
def test_single_answers_have_a_label(tmp_path, label, good):
    (answer,) = dataset(tmp_path, {**SINGLE, "label": label}, paired=False).load(0).answers
    assert answer.is_chosen is good


TALK = "\n\nHuman: 1?\n\nAssistant: 1.\n\nHuman: 2 + 2?\n\nAssistant:"
WHOLE = {"chosen": TALK + " 4", "rejected": TALK + " fish"}
END = "\n\nAssistant:"


@pytest.mark.parametrize("template", [None, CHATML_MARKED])
def test_whole_texts_are_the_prompt_up_to_the_last_end_that_both_share_and_two_answers(tmp_path, template):
    tokenizer = make_tokenizer(template)
    apart = {"prompt": TALK, "chosen": " 4", "rejected": " fish"}
    found = dataset(tmp_path, WHOLE, tokenizer=tokenizer, prompt_end=END).load(0)
    assert found == dataset(tmp_path, apart, tokenizer=tokenizer).load(0)
    if template is None:
        assert [trained_text(tokenizer, a)[0][:5] for a in found.answers] == [" 4</s", " fish"]


@pytest.mark.parametrize(
    "row, says",
    [
        (
            {"chosen": "\n\nHuman: 1?" + END, "rejected": "\n\nHuman: 2?" + END},
            r"up to '\n\nAssistant:' (data.prompt_end): what both begin with ends in '\n\nHuman: '; set that key to",
        ),
        ({**WHOLE, "rejected": TALK + "\n\nHuman: so?" + END + " 4"}, "again after the prompt that both share"),
        ({**WHOLE, "rejected": TALK}, "rejected is an empty str"),
        ({**WHOLE, "prompt": TALK}, "is no pair of whole texts without a prompt"),
        ({"chosen": ASKED + GOOD, "rejected": ASKED + BAD}, "is no pair of whole texts without a prompt"),
    ],
)
def test_whole_texts_whose_prompt_would_be_a_guess_are_refused(tmp_path, row, says):
    assert says in refusal(tmp_path, row, prompt_end=END)


def test_an_end_of_prompts_is_of_pairs_alone(tmp_path):
    with pytest.raises(DataError, match="data.prompt_end: is of the format preference, and the rows of"):
        dataset(tmp_path, SINGLE, paired=False, prompt_end=END)


def test_a_prompt_that_the_template_writes_by_what_follows_is_refused(tmp_path):
    """A template that marks its last turn: the earlier answer is told otherwise in one of the two."""
    loud = "{{ m.role }}{{ ' loud' if messages[-1].content == 'fish' and loop.index0 == 0 }}"
    row = {"prompt": turns("a", "b", "c"), "chosen": GOOD, "rejected": BAD}
    said = refusal(tmp_path, row, tokenizer=make_tokenizer(CHATML_MARKED.replace("{{ m.role }}", loud)))
    assert "what does not train before chosen and before rejected differs" in said and "loud" in said


def test_reasoning_that_a_template_drops_from_the_prompt_is_the_same_in_both(tmp_path):
    prompt = turns("a", "<think>\nhm\n</think>\n\nb", "c")
    row = {"prompt": prompt, "chosen": GOOD, "rejected": BAD}
    chosen, rejected = dataset(tmp_path, row, tokenizer=make_tokenizer(STRIPS_REASONING)).load(0).answers
    assert chosen.prompt == rejected.prompt


WRONG = {
    "no rejected": ({"prompt": ASKED, "chosen": GOOD}, "give prompt, chosen and rejected"),
    "rejected is null": ({**PAIR, "rejected": None}, "rejected is missing or null, and preference needs it"),
    "both forms": ({**PAIR, **SINGLE}, "fit the formats preference and unpaired; set data.format to one of them"),
    "text and list": ({**PAIR, "prompt": "2 + 2?"}, "prompt is '2 + 2?' and chosen is a list; give two strings or two"),
    "prompt again": ({**PAIR, "chosen": ASKED + GOOD}, "chosen begins with the messages of prompt again"),
    "texts without a prompt": ({"chosen": "a", "rejected": "b"}, "as {question: prompt}, or set data.turns"),
    "nothing shared": ({"chosen": GOOD, "rejected": BAD}, "chosen and rejected begin with different messages"),
    "nothing more": ({"chosen": ASKED + GOOD, "rejected": ASKED}, "rejected is an empty list"),
    "the same": ({**PAIR, "rejected": GOOD}, "chosen and rejected are the same tokens"),
    "empty answer": ({"prompt": "a", "chosen": "", "rejected": "b"}, "chosen is an empty str"),
    "a user answers": ({**PAIR, "chosen": turns("no")}, "has nothing to train on"),
    "an image": (
        {**PAIR, "prompt": [{"role": "user", "content": [{"type": "image", "path": "a.png"}]}]},
        "prompt[0].content[0].path is an image, and the model reads text alone",
    ),
    "message's weight": (
        {**PAIR, "chosen": [{**GOOD[0], "weight": 0.5}]},
        "has a message with a weight other than 0 and",
    ),
    "a turn of weight 0 that the other lacks": (
        {**PAIR, "chosen": [{**turns("x", "hm")[1], "weight": 0}, *turns("so?"), *GOOD]},
        "give both the same turns up to the first that trains",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_row_is_one_line_with_its_place(tmp_path, name):
    row, says = WRONG[name]
    assert says in refusal(tmp_path, row)


@pytest.mark.parametrize("label", ["yes", 0.5, None])
def test_a_label_that_is_none_is_refused(tmp_path, label):
    says = "label is missing or null, and unpaired needs it" if label is None else "label is"
    assert says in refusal(tmp_path, {**SINGLE, "label": label}, paired=False)


def test_single_answers_are_refused_by_a_loss_of_pairs(tmp_path):
    with pytest.raises(DataError, match="has single answers with a label, .* of pairs; set loss.name to kto"):
        dataset(tmp_path, SINGLE)


def test_long_rows_are_refused_or_dropped_whole(tmp_path):
    long = {**PAIR, "rejected": [{"role": "assistant", "content": "the lazy dog " * 40}]}
    assert "set data.truncation to drop, or raise data.max_length" in refusal(tmp_path, long, max_length=60)
    found = dataset(tmp_path, long, PAIR, max_length=60, truncation="drop")
    dropped = found.load(0)
    assert isinstance(dropped, RejectedRow) and dropped.outcome == "dropped" and "rows.jsonl:1" in dropped.why
    assert [rows for rows, _ in in_order(found, 4)] == [[1]]


def test_a_batch_has_chosen_first_and_counts_of_the_whole(tmp_path):
    rows = [dataset(tmp_path, PAIR, {**PAIR, "chosen": BAD, "rejected": GOOD}).load(i) for i in range(2)]
    batch = batch_of(rows, group=2)
    assert batch.sequence_fields["chosen"].tolist() == [True, False] * 2 and batch.group == 2
    tokens = sum(sum(row.answers[0].mask) for row in rows)
    wanted = {"units": 2, "chosen": 2, "rejected": 2, "chosen_tokens": tokens, "sequences": 4}
    assert {name: batch.denominators[name] for name in wanted} == wanted
    assert batch_of(rows, group=1).denominators["units"] == 4


def test_the_kl_of_kto_gives_each_prompt_an_answer_to_another(tmp_path):
    tokenizer = make_tokenizer()
    asked = [{"prompt": f"what {i}?", "chosen": f"yes{i}", "rejected": f"no{i}"} for i in range(3)]
    found = dataset(tmp_path, *asked, tokenizer=tokenizer)
    batch = with_other_answers(batch_of([found.load(i) for i in range(3)], group=1), 512)
    texts = []
    for start, end in zip(batch.cu_seqlens.tolist(), batch.cu_seqlens.tolist()[1:], strict=False):
        labels, mask = batch.labels[start:end], batch.loss_mask[start:end] != 0
        texts.append((tokenizer.decode(batch.tokens[start:end][:10]).split("?")[0][-1], tokenizer.decode(labels[mask])))
    assert texts == [("0", "yes1<|im_end|>"), ("0", "no1<|im_end|>"), ("1", "yes2<|im_end|>"),
                     ("1", "no2<|im_end|>"), ("2", "no0<|im_end|>"), ("2", "yes0<|im_end|>")]  # fmt: skip
    short = with_other_answers(batch_of([found.load(i) for i in range(3)], group=1), 14)
    assert short.max_length <= 13


@pytest.mark.parametrize(
    "rows, given",
    [
        (["a1", "a0", "b1"], ["b", "b", "a0"]),
        (["a1", "b1", "a1", "a0", "b0"], ["b", "a", "b", "b", "a"]),
        (["a1", "b0", "c1"], ["c", "a", "b"]),
        (["a1", "a0", "a1"], ["a", "a", "a"]),
    ],
)
def test_single_answers_that_share_a_prompt_are_given_to_others_where_there_are_some(tmp_path, rows, given):
    """rows: the prompt, and whether the answer is good; given: the prompt that each prompt's other answer was given
    to, and whether that was good where both kinds are."""
    tokenizer = make_tokenizer()
    asked = [{"prompt": f"what {r[0]}?", "completion": f"to {r}", "label": r[1] == "1"} for r in rows]
    found = dataset(tmp_path, *asked, tokenizer=tokenizer, paired=False)
    batch = with_other_answers(batch_of([found.load(i) for i in range(len(rows))], group=1), 512)
    starts = batch.cu_seqlens.tolist()
    spans = [slice(start, end) for start, end in zip(starts, starts[1:], strict=False)]
    texts = [tokenizer.decode(batch.labels[span][batch.loss_mask[span] != 0]) for span in spans]
    assert [t.removeprefix("to ")[: len(g)] for t, g in zip(texts, given, strict=True)] == given


@pytest.mark.parametrize(
    "name, weights, sizes",
    [("kto", (1, 1, 1, 1, 1), [2, 3]), ("kto", (0, 1, 0, 0, 1), [2, 3]), ("dpo", (1, 1, 0), [3])],
)
def test_no_evaluation_batch_is_of_one_row_for_kto_or_of_no_weight(tmp_path, name, weights, sizes):
    """kto's KL would take the answer to the same prompt."""
    task = DPOTask(config_of(DPOConfig, BASE | {"train": {"global_batch_size": 2}}, f"loss.name={name}"))
    form = {"prompt": "hello", "completion": "fox", "label": True} if name == "kto" else PAIR
    rows = dataset(tmp_path, *({**form, "weight": weight} for weight in weights), paired=name != "kto")
    batches = list(task.eval_batches(rows, None))
    assert [batch.num_sequences // task.config.group for batch in batches] == sizes


@pytest.mark.parametrize("name", LOSSES)
def test_a_row_of_weight_2_is_that_row_twice(tmp_path, name):
    """In the loss, its gradient and every metric, and nothing changes where all rows have one weight."""
    paired = LOSSES[name].of_margin is not None
    form = {"prompt": "hello", "chosen": "fox", "rejected": "lazy dog"}
    rows = [
        form | {"weight": 2},
        form | {"chosen": "the quick", "rejected": "4"},
        form | {"chosen": "over", "weight": 0},
    ]
    numbers = LossSettings(beta=0.3, sft_weight=0.7, gamma=0.2, desirable_weight=1.5)

    def losses_of(rows: list[dict], order: list[int]) -> dict[str, torch.Tensor]:
        config = PreferenceDataConfig(train=write_jsonl(tmp_path / "rows.jsonl", rows), max_length=64)
        dataset = PreferenceDataset(config, make_tokenizer(), paired=False)
        batch = batch_of([dataset.load(i) for i in order], group=2 if paired else 1)
        log_probs_T = -(batch.labels % 7 + 1).double() / 9
        log_probs_T.requires_grad_(True)
        reference_S = torch.linspace(-1, -1, batch.num_sequences)
        data = dataclasses.replace(batch, sequence_fields={**batch.sequence_fields, REFERENCE: reference_S})
        total, ctx = PreferenceLoss(name, numbers)(data, {"log_probs": log_probs_T}, {"kl": 0.1})
        loss = total / batch.denominators["units"]
        (gradient_T,) = torch.autograd.grad(loss, log_probs_T)
        by_label = torch.zeros(500, dtype=torch.float64).index_add(0, batch.labels, gradient_T)
        return {"loss": loss.detach(), "gradient": by_label} | {
            metric: torch.as_tensor(value) / batch.denominators["units"] for metric, value in ctx["metrics"].items()
        }

    plain = [{k: v for k, v in row.items() if k != "weight"} for row in rows]
    for weighted, repeated in (
        (losses_of(rows, [0, 1, 2]), losses_of(plain, [0, 0, 1])),
        (losses_of([row | {"weight": 3} for row in plain], [0, 1]), losses_of(plain, [0, 1])),
    ):
        assert weighted.keys() == repeated.keys()
        for what, value in weighted.items():
            torch.testing.assert_close(value, repeated[what], rtol=1e-12, atol=1e-12, msg=what)
