"""Trajectories: which tokens are in them, which of them train, and what is asked of the sampler. On layouts: test_layouts.py."""

import threading

import pytest
import torch

from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.errors import RewardError
from mrl.rollout.base import trajectories_to_batch
from mrl.rollout.rollouts import ROUND, SERIES
from tests.data.tiny_tokenizers import make_tokenizer
from tests.rollout.environments import ByTokens, Says, make_prompts, make_rollouts, write_environments

TOKENIZER = make_tokenizer()
ROWS = [{"prompt": "hello"}, {"prompt": "the quick fox", "last": "dog"}]
ASKED = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture
def path(tmp_path):
    return write_environments(tmp_path)


def ids(text):
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def parts(trajectory):
    """[(mask, text)]: the trajectory in runs of one mask."""
    runs = []
    for token, mask in zip(trajectory.tokens, trajectory.mask, strict=True):
        if not runs or runs[-1][0] != mask:
            runs.append((mask, []))
        runs[-1][1].append(token)
    return [(mask, TOKENIZER.decode(tokens)) for mask, tokens in runs]


def test_single_turns_are_prompt_major_and_keep_the_end_token():
    sampler = Says(TOKENIZER, "lazy dog")
    trajectories = make_rollouts(sampler).sample(make_prompts(ROWS, TOKENIZER), step=3, samples=2)
    assert [(t.prompt.index, t.sample) for t in trajectories] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for t in trajectories:
        assert parts(t) == [(0, ASKED.format(t.prompt.content)), (1, "lazy dog<|im_end|>")]
        assert (t.text, t.finished, t.turns, t.reward) == ("lazy dog", True, 1, None)
        assert t.log_probs == [0.0] * len(t.prompt.tokens) + [-(i + 1) / 8 for i in range(t.response_length)]


def test_what_is_asked_of_the_sampler():
    sampler = Says(TOKENIZER, "dog")
    keys = {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.1, "stop": ("fox",), "stop_tokens": (9,)}
    rollouts, prompts = make_rollouts(sampler, **keys), make_prompts(ROWS, TOKENIZER)
    rollouts.sample(prompts, step=3, samples=2)
    first = sampler.rounds[0][0]
    ends = sorted([9, *TOKENIZER.convert_tokens_to_ids(["</s>", "<|im_end|>"])])
    assert (first.tokens, first.max_new_tokens, first.stop, first.stop_tokens) == (
        prompts[0].tokens,
        60,
        ("fox",),
        ends,
    )
    assert first.sampling == SamplingParams(0.7, 5, 0.9, 0.1)
    assert [r.key for r in sampler.rounds[0]] == [SamplingKey(5, 3, p, s) for p in (0, 1) for s in (0, 1)]
    rollouts.sample(prompts, step=3, samples=1, greedy=True)
    assert {r.sampling for r in sampler.rounds[1]} == {GREEDY}


def test_no_two_samples_have_one_key():
    sampler = Says(TOKENIZER, "dog")
    rollouts, prompts = make_rollouts(sampler), make_prompts(ROWS, TOKENIZER)
    again = [prompts[0], prompts[1], prompts[0]]  # a small data set comes round within one batch
    trajectories = rollouts.sample(again, step=3, samples=2)
    assert [t.sample for t in trajectories] == [0, 1] * 3
    rollouts.sample(prompts, step=3, samples=2, round=1)
    rollouts.sample(prompts, step=3, samples=2, series="eval")
    keys = [r.key for requests in sampler.rounds for r in requests]
    assert len(set(keys)) == len(keys) == 14
    assert [k.sample for k in keys[4:6]] == [2, 3] and keys[6].sample == ROUND and keys[10].sample == SERIES


def test_text_keeps_a_stop_text_and_leaves_out_special_tokens():
    sampler = Says(TOKENIZER, "the fox", end="")
    (t,) = make_rollouts(sampler, stop=("fox",)).sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    assert t.text == "the fox" and t.finished
    sampler = Says(TOKENIZER, "the<|im_start|> fox", end="</s>")
    (t,) = make_rollouts(sampler).sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    assert t.text == "the fox" and parts(t)[1] == (1, "the<|im_start|> fox</s>")


def test_a_completion_that_fills_the_room_is_not_finished():
    (t,) = make_rollouts(Says(TOKENIZER, "fox " * 9), max_new_tokens=5).sample(
        make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1
    )
    assert not t.finished and t.response_length == 5 and (t.cut_by, t.conversation) == ("tokens", None)


# ------------------------------------------------------------------------------------------------------- conversations


def test_trap_7_what_trains_and_counts_is_what_was_sampled(path):
    sampler = Says(TOKENIZER, "quick", "dog", "lazy")
    rollouts = make_rollouts(sampler, environment=f"{path}:Count", max_turns=3)
    long, short = rollouts.sample(make_prompts(ROWS, TOKENIZER), step=0, samples=1)
    said = "\n<|im_start|>user\n{} fox<|im_end|>\n<|im_start|>assistant\n"
    asked = ASKED.format("hello")
    assert parts(long) == [
        (0, asked), (1, "quick<|im_end|>"), (0, said.format(5)), (1, "dog<|im_end|>"), (0, said.format(3)), (1, "lazy<|im_end|>"),
    ]  # fmt: skip
    assert (long.text, long.turns, long.reward, long.finished) == ("quick\n\ndog\n\nlazy", 3, 3.0, False)
    assert parts(short)[1:] == [(1, "quick<|im_end|>"), (0, said.format(5)), (1, "dog<|im_end|>")]
    assert (short.text, short.turns, short.reward, short.finished) == ("quick\n\ndog", 2, 2.0, True)
    words = [("assistant", "quick"), ("user", "5 fox"), ("assistant", "dog"), ("user", "3 fox"), ("assistant", "lazy"), ("user", "4 fox")]  # fmt: skip
    spoken = [[(m["role"], m["content"]) for m in t.conversation] for t in (long, short)]
    assert spoken == [words, words[:4]] and (long.cut_by, short.cut_by) == ("turns", None)
    assert [len(r) for r in sampler.rounds] == [2, 2, 1]  # all live ones together
    assert all(r.tokens == long.tokens[: len(r.tokens)] for r in (requests[0] for requests in sampler.rounds))
    batch = trajectories_to_batch([long, short])
    sampled = [*ids("quick<|im_end|>"), *ids("dog<|im_end|>"), *ids("lazy<|im_end|>"), *ids("quick<|im_end|>"), *ids("dog<|im_end|>")]  # fmt: skip
    assert batch.labels[batch.loss_mask == 1].tolist() == sampled
    assert batch.denominators == {"tokens": float(len(sampled)), "sequences": 2.0}
    assert long.response_length + short.response_length == len(sampled)


def test_trap_21_the_first_sampled_token_trains_and_has_its_own_log_prob():
    sampler = Says(TOKENIZER, "lazy dog")
    trajectories = make_rollouts(sampler).sample(make_prompts(ROWS, TOKENIZER), step=0, samples=1)
    batch = trajectories_to_batch(trajectories)
    first = int((batch.loss_mask == 1).nonzero()[0])
    prompt = trajectories[0].prompt.tokens
    assert batch.tokens[first] == prompt[-1] and batch.labels[first] == ids("lazy dog")[0] and first == len(prompt) - 1
    log_probs = batch.token_fields["rollout_log_probs"]
    n = trajectories[0].response_length
    assert log_probs.dtype == torch.float32 and log_probs[first : first + n].tolist() == [
        -(i + 1) / 8 for i in range(n)
    ]
    assert torch.equal(log_probs != 0, batch.loss_mask == 1)


def test_a_reset_gives_the_prompt_and_a_message_is_the_observation(path):
    sampler = Says(TOKENIZER, "fox")
    rollouts = make_rollouts(sampler, environment=f"{path}:Guess", max_turns=2, system="lazy")
    (t,) = rollouts.sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    system = "<|im_start|>system\nlazy<|im_end|>\n"
    tool = "\n<|im_start|>tool\nFOX<|im_end|>\n<|im_start|>assistant\n"
    assert parts(t) == [(0, system + ASKED.format("dog hello")), (1, "fox<|im_end|>"), (0, tool), (1, "fox<|im_end|>")]
    assert t.prompt.content == [{"role": "user", "content": "dog hello"}] and t.reward == 0.75
    assert [m["role"] for m in t.conversation] == ["assistant", "tool"] * 2 and t.tool_calls == 2
    assert t.turn_lengths == [3, 3] and t.observation_length == len(ids(tool))
    assert t.prompt.row == ROWS[0] and t.tokens[: len(t.prompt.tokens)] == t.prompt.tokens
    with pytest.raises(RewardError, match=r"Guess: row train.jsonl:1: reset gave a prompt of \d+ tokens, and data.max_prompt_length is 9"):  # fmt: skip
        make_rollouts(sampler, environment=f"{path}:Guess", max_prompt_length=9).sample(
            make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1
        )


def test_without_a_chat_template_everything_is_appended_as_it_is(path):
    tokenizer = make_tokenizer(None)
    sampler = Says(tokenizer, " dog", end="")
    rollouts = make_rollouts(sampler, template=None, environment=f"{path}:Count", max_turns=2)
    (t,) = rollouts.sample(make_prompts(ROWS[:1], tokenizer), step=0, samples=1)
    assert parts(t) == [(0, "hello"), (1, " dog"), (0, "4 fox"), (1, " dog")]


def test_a_turn_that_a_stop_text_ended_gets_its_end_token_with_mask_0(path):
    rollouts = make_rollouts(Says(TOKENIZER, "dog", end=""), stop=("dog",), environment=f"{path}:Count", max_turns=2)
    (t,) = rollouts.sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    assert [p for p in parts(t) if p[0]] == [(1, "dog")] * 2 and parts(t)[2][1].startswith(
        "<|im_end|>\n<|im_start|>user"
    )


def test_a_turn_has_max_turn_tokens_at_most_and_the_next_one_as_many(path):
    sampler = Says(TOKENIZER, "quick quick quick quick")
    keys = {"environment": f"{path}:Count", "max_turns": 3, "max_turn_tokens": 3}
    (t,) = make_rollouts(sampler, **keys).sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    assert [r[0].max_new_tokens for r in sampler.rounds] == [3, 3, 3] and t.turn_lengths == [3, 3, 3]
    assert parts(t)[2][1].startswith("<|im_end|>\n<|im_start|>user"), (
        "a turn that was cut gets its end, which trains not"
    )
    assert (t.turns, t.finished, t.cut_by) == (3, False, "tokens")
    make_rollouts(sampler, **keys | {"max_new_tokens": 2}).sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    assert sampler.rounds[-1][0].max_new_tokens == 2, "max_new_tokens bounds all of it"


@pytest.mark.parametrize("room", range(1, 22))
def test_no_trajectory_is_longer_than_max_new_tokens_and_none_ends_with_an_observation(path, room):
    turn, answer = len(ids("quick<|im_end|>")), len(ids("\n<|im_start|>user\n5 fox<|im_end|>\n<|im_start|>assistant\n"))
    rollouts = make_rollouts(Says(TOKENIZER, "quick"), environment=f"{path}:Count", max_new_tokens=room)
    (t,) = rollouts.sample(make_prompts(ROWS[:1], TOKENIZER), step=0, samples=1)
    rollouts.close()
    new = len(t.tokens) - len(t.prompt.tokens)
    assert t.mask[-1] == 1 and new <= room and not t.finished and t.cut_by == "tokens"
    whole, rest = divmod(room, turn + answer)
    assert t.turns == t.reward == whole + (rest > 0)
    assert new == room if 0 < rest <= turn else new == whole * (turn + answer) + (turn if rest else -answer)


@pytest.mark.parametrize("slow", [0, 2])
def test_a_slow_environment_holds_its_own_part_alone(slow):
    """It answers for the first time when the conversations of the other part have had all their turns, in either order."""
    turns, others_done = [], threading.Event()

    class Waits:
        def reset(self, row):
            self.number = row["number"]

        def step(self, text):
            turns.append(self.number)
            if sum(number // 2 != slow // 2 for number in turns) == 6:
                others_done.set()
            assert self.number != slow or others_done.wait(20), "the others wait for it"
            return f"{self.number} fox", 1, False

    sampler = ByTokens(TOKENIZER)
    rollouts = make_rollouts(sampler, environment=Waits, max_turns=3, environment_parts=2)
    rows = [{"prompt": "hello", "number": i} for i in range(4)]
    made = rollouts.sample(make_prompts(rows, TOKENIZER), step=0, samples=1)
    rollouts.close()
    assert [t.turns for t in made] == [3] * 4
    assert sorted([r.key.prompt for r in requests] for requests in sampler.rounds) == [[0, 1]] * 3 + [[2, 3]] * 3
    assert [t.text for t in made] == ["\n\n".join(["dog", *[f"dog {i} fox"] * 2]) for i in range(4)]
