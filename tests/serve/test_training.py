"""The calls of a training client at the desk, without a model: what is refused holds nothing up, what is sent again is
what it was."""

import asyncio
import json

import pytest

from mrl.config.schema import LoraConfig
from mrl.errors import UserError
from mrl.serve import messages
from mrl.serve.app import Asked
from mrl.serve.datums import Limits
from mrl.serve.desk import Desk
from mrl.serve.ledger import Ledger
from mrl.serve.models import Models
from mrl.serve.operations import Kind
from mrl.serve.training import Served, Training

MODEL = "s1:train:0"


@pytest.fixture
def training(tmp_path):
    made = Training(
        Served("base", "folder", Limits(10, 6), LoraConfig(rank=4), 2), Ledger(tmp_path), Desk(most_waiting=9)
    )
    made.ledger.session("s1")
    call(made, "create_model", session_id="s1", model_seq_id=0)
    done(made)
    return made


def call(training, name, **body):
    raw = body["raw"] if "raw" in body else json.dumps(body).encode()
    answer = asyncio.run(getattr(training, name)(Asked(None, raw)))
    return json.loads(answer.body)["request_id"]


def done(training, found=None):
    """Does the next operation, and returns it."""
    turn = training.desk.take(0)
    if turn is None:
        return None
    [waiting] = turn.waiting
    training.desk.finish(waiting.promise, waiting.operation.answer(found))
    return waiting.operation.operation


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("forward_backward", {"raw": messages.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="x")}, "loss_fn: value"),
        ("forward_backward", {"raw": messages.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="ppo")}, "data: is empty"),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "adam_params.learning_rate: value -1.0 .*give 0 to 1e"),
        ("optim_step", {"adam_params": {"eps": 0.0}}, "adam_params.eps: value 0.0 .*give 1e-30 to 1"),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "adam_params.beta1: value 1.0 .*less than 1"),
        ("save_weights", {"path": "../x"}, "is no name"),
        ("save_weights", {"path": "a", "ttl_seconds": 2**62}, "ttl_seconds: value .* is out of range"),
        ("save_weights", {"path": "a", "user_metadata": {"a": float("nan")}}, "user_metadata: has a value that is no text"),
        ("save_weights_for_sampler", {"path": "a", "user_metadata": {"a": "\ud800"}}, "user_metadata: has a value"),
        ("save_weights_for_sampler", {}, "sampling_session_seq_id: is missing"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["x"]}, "age_encryption_recipients: are not"),
    ],
)  # fmt: skip
def test_a_refused_call_holds_up_none_of_those_after_it(training, name, body, says):
    sent = {"raw": body["raw"].SerializeToString()} if "raw" in body else {"model_id": MODEL, "seq_id": 1, **body}
    for _ in range(2):
        with pytest.raises(UserError, match=says):
            call(training, name, **sent)
    call(training, "optim_step", model_id=MODEL, seq_id=2)
    assert done(training).update.lr == 1e-4


def test_a_save_that_is_sent_again_is_what_it_was(training):
    """Its answer was lost, and it is done by now: the name is taken, by itself."""
    body = {"model_id": MODEL, "seq_id": 1, "path": "a"}
    id = call(training, "save_weights", **body)
    assert done(training).folder.endswith("weights/a") and "tinker://s1:train:0/weights/a" in training.ledger.saved
    assert call(training, "save_weights", **body) == id
    with pytest.raises(UserError, match='path: value "a" is saved already'):
        call(training, "save_weights", **{**body, "seq_id": 2})
    assert done(training) is None


def test_what_cannot_be_loaded_holds_up_nothing(training):
    for model in ({"session_id": "s1", "model_seq_id": 1}, {"model_id": MODEL, "seq_id": 1}):
        with pytest.raises(UserError, match='path: value "tinker://x/weights/a" is not saved'):
            call(training, "load_weights", path="tinker://x/weights/a", **model)
    call(training, "optim_step", model_id=MODEL, seq_id=2)
    assert done(training).model == MODEL


def test_adapters_keep_their_alpha(training):
    """A server that is started anew with another one samples from what was saved as it was."""
    call(training, "create_model", session_id="s1", model_seq_id=1, lora_config={"rank": 2})
    kind = done(training).kind
    later = Models.__new__(Models)
    later.lora = LoraConfig(rank=8, alpha=77.0, rslora=True)
    assert later._scale(kind) == LoraConfig(rank=2).alpha / 2
    assert later._scale(Kind(rank=4)) == 77.0 / 2, "of new ones"


def test_no_clipping_at_all(training):
    call(training, "optim_step", model_id=MODEL, seq_id=1, adam_params={"grad_clip_norm": 1e12})
    assert done(training).update.clip_grad == 1e12
