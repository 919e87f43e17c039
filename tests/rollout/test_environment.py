"""A user's environment: what it may be, when its calls are made, and the one line of each thing that goes wrong in it."""

import time

import pytest

from mrl.errors import ConfigError, RewardError
from mrl.rollout.environment import Environments, EnvironmentStep, load_environment
from tests.data.tiny_tokenizers import make_tokenizer
from tests.rollout.environments import Says, make_prompts, make_rollouts, write_environments

TOKENIZER = make_tokenizer()


@pytest.fixture
def path(tmp_path):
    return write_environments(tmp_path)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Counts", "Counts: the file has no class Counts"),
        ("function", "function: the file has no class function"),
        ("NoStep", "'NoStep' has no attribute 'step'; write __init__(self), reset(self, row) and step(self, text)"),
        ("WrongStep", "too many positional arguments; write"),
        ("Needs", "missing a required argument: 'what'; write"),
    ],
)
def test_what_is_no_environment(path, name, message):
    with pytest.raises(ConfigError) as error:
        make_rollouts(Says(TOKENIZER, "fox"), environment=f"{path}:{name}")
    assert str(error.value).startswith(f"rollout.environment: {path}:{name}: ")
    assert message.format(path=path) in str(error.value)


def answer(path, row, name="Answers", **keys):
    """The error of a conversation with `row`, which is the second of two; in the first all is well."""
    rows = [{"prompt": "hello", "answer": ["fox", 1, True]}, {"prompt": "hello", **row}]
    rollouts = make_rollouts(Says(TOKENIZER, "dog"), environment=f"{path}:{name}", **keys)
    with pytest.raises(RewardError) as error:
        rollouts.sample(make_prompts(rows, TOKENIZER), step=0, samples=1)
    rollouts.close()
    message = str(error.value)
    assert message.startswith(f"rollout.environment: {path}:{name}: row train.jsonl:") and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("raise", "step raised ValueError: no such fox (envs.py:58); correct the environment"),
        ("exit", "step raised SystemExit: 3 (envs.py:60); correct the environment"),
        ("nan", "step returned nan as the reward, which is not finite"),
        ("object", "step returned the observation with something that is no plain data (Object of type Answers"),
        (None, "step returned None (NoneType), which is not (observation, reward, done)"),
        (["fox", 1], "step returned ['fox', 1] (list), which is not (observation, reward, done)"),
        (["fox", "1", False], "step returned '1' (str) as the reward, which is no number"),
        (["fox", 1, 1], "step returned 1 (int) as done, which is not True or False"),
        ([None, 1, False], "step returned no observation, and done is False"),
        ([5, 1, False], "step returned 5 (int) as the observation; give text, a message or a list of messages"),
        (
            [[], 1, False],
            "step returned what cannot be used: the observation is an empty list; give a list of at least one {role, content}",
        ),
        (
            [{"role": "user"}, 1, False],
            "step returned what cannot be used: the observation[0].content is missing or null; give a string",
        ),
    ],
)
def test_a_wrong_answer_names_the_environment_the_row_and_what_is_wrong(path, given, message):
    assert f"row train.jsonl:2: {message}" in answer(path, {"answer": given})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "reset returned 5 (int) as the prompt; give text, a message or a list of messages"),
        (
            [{"role": "assistant", "content": "x"}],
            "reset gave a prompt that cannot be used: prompt ends with an assistant turn",
        ),
    ],
)
def test_a_wrong_reset(path, given, message):
    assert message in answer(path, {"reset": given})


NO_TOOLS = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{{ m.content }}</s>{% endfor %}"


@pytest.mark.parametrize(
    ("template", "says"), [(NO_TOOLS, "the chat template cannot render"), (None, "the tokenizer has no chat template")]
)
def test_what_the_template_refuses_is_told_with_the_row(path, template, says):
    given = {"answer": [{"role": "tool", "content": "x"}, 1, False]}
    wrong = f"row train.jsonl:2: step gave an observation that cannot be used: {says}"
    assert wrong in answer(path, given, template=template)


@pytest.mark.parametrize("name", ["Answers", "Hangs"])
def test_a_call_that_takes_too_long(path, name):
    start = time.monotonic()
    message = answer(path, {"answer": "hang"}, name, environment_timeout_s=0.3)
    assert time.monotonic() - start < 30
    what = "row train.jsonl:2: step" if name == "Answers" else "row train.jsonl:1: reset"
    assert f"{what} took more than 0.3 s; make it faster, or raise rollout.environment_timeout_s" in message


@pytest.mark.parametrize("name", ["Slow", "SlowPlain"])
def test_calls_of_a_round_run_at_the_same_time(path, name):
    prompts = make_prompts([{"prompt": "hello"}] * 20, TOKENIZER)
    environments = Environments(load_environment(f"{path}:{name}"), name, timeout_s=5)
    for _ in range(2):  # a rollout, and the next one
        start = time.monotonic()
        environments.reset(prompts)
        environments.begin_steps(0, [(i, "dog") for i in range(20)])
        assert environments.answers(wait=False) == {}
        assert environments.answers(wait=True) == {0: [EnvironmentStep("fox", 0.5, True)] * 20}
        assert time.monotonic() - start < 6, "20 calls of 0.2 s, twice, one after the other take 8 s"
    environments.close()


def test_more_conversations_than_threads(path):
    prompts = make_prompts([{"prompt": "hello", "last": "x" * i} for i in range(300)], TOKENIZER)
    environments = Environments(load_environment(f"{path}:Count"), "Count", timeout_s=5)
    environments.reset(prompts)
    environments.begin_steps(0, [(i, "x" * i) for i in range(0, 300, 3)])
    assert environments.answers(wait=True) == {0: [EnvironmentStep(f"{i} fox", 1.0, True) for i in range(0, 300, 3)]}
    environments.close()


def test_a_row_is_the_environments_own(path):
    row = {"prompt": "hello", "answer": ["fox", 1, True], "list": [1]}

    class Changes:
        def reset(self, row):
            row["list"].append(2)

        def step(self, text):
            return None, 0, True

    prompts = make_prompts([row], TOKENIZER)
    make_rollouts(Says(TOKENIZER, "dog"), environment=Changes).sample(prompts, step=0, samples=2)
    assert row["list"] == [1]
