"""The calls of a training client at the desk, without a model: what is refused holds nothing up, what is sent again is
what it was.

What a client sends becomes a batch; what does not fit is one line that names the datum.
"""

import asyncio
import dataclasses
import json

import numpy as np
import pytest
import torch

from mrl.config.schema import LoraConfig
from mrl.errors import UserError
from mrl.serve import datums, messages
from mrl.serve.app import ClientRequest
from mrl.serve.datums import Limits
from mrl.serve.ledger import ENDED, Ledger
from mrl.serve.models import Models
from mrl.serve.operations import ModelKind
from mrl.serve.request_queue import QueueFull, RequestQueue
from mrl.serve.requests import RequestError
from mrl.serve.training import ServedModel, TrainingHandlers

MODEL = "s1:train:0"


@pytest.fixture
def training(tmp_path):
    made = TrainingHandlers(
        ServedModel("base", "folder", Limits(10, 6), LoraConfig(rank=4), 2),
        Ledger(tmp_path),
        RequestQueue(max_waiting=9),
    )
    made.ledger.session("s1")
    call(made, "create_model", session_id="s1", model_seq_id=0)
    done(made)
    return made


def call(training, name, **body):
    raw = body["raw"] if "raw" in body else json.dumps(body).encode()
    answer = asyncio.run(getattr(training, name)(ClientRequest(None, raw, {} if "raw" in body else body)))
    return json.loads(answer.body)["request_id"]


def done(training, found=None):
    """Does the next operation, and returns it."""
    work = training.request_queue.next_work(0)
    if work is None:
        return None
    [waiting] = work.requests
    waiting.operation.check()
    training.request_queue.finish(waiting.future, waiting.operation.answer(found))
    return waiting.operation.operation


def passed(number, *, wrong=False, forward_only=False):
    """The body of a pass over one position."""
    sent = request(([12 if wrong else 1], [2]))
    sent.model_id, sent.seq_id, sent.forward_only = MODEL, number, forward_only
    return {"raw": sent.SerializeToString()}


FOUND = (torch.zeros(1), 0.0)


def test_a_part_of_a_batch_is_not_trained_on(training):
    """A client cuts a batch into passes, and its step is on its way before it hears that one of them failed."""
    call(training, "forward_backward", **passed(1))
    call(training, "optim_step", model_id=MODEL, seq_id=2)
    call(training, "forward_backward", **passed(3))
    with pytest.raises(UserError, match="value 12 is no token"):
        call(training, "forward_backward", **passed(4, wrong=True))
    call(training, "forward_backward", **passed(5))
    for number in (6, 7):
        call(training, "optim_step", model_id=MODEL, seq_id=number)
    done(training, FOUND)
    assert done(training, {}).model == MODEL, "the step before is not of it"
    for _ in (3, 5):
        done(training, FOUND)
    with pytest.raises(UserError, match=r"part of what was sent, as a .* failed \(data\[0\].*12 is no token"):
        done(training)
    assert done(training, {}).model == MODEL, "it is said once"
    assert training.lost == {MODEL: {}}
    with pytest.raises(UserError, match="value 12 is no token"):
        call(training, "forward_backward", **passed(8, wrong=True))
    training.forget(MODEL, UserError("gone"))
    assert not training.lost


@pytest.mark.parametrize("number", [0, -3])
def test_a_pass_without_a_number(training, number):
    """It would be taken for the model's first operation, that made it."""
    with pytest.raises(UserError, match=f"seq_id: value {number} is below 1"):
        call(training, "forward_backward", **passed(number))


def test_a_session_that_has_ended_makes_nothing(training):
    training.ledger.finish("s1")
    with pytest.raises(UserError, match='session_id: value "s1" has ended; make a new ServiceClient'):
        call(training, "create_model", session_id="s1", model_seq_id=1)


def test_a_model_that_is_let_go_while_a_call_is_read(training, monkeypatch):
    read = datums.batch_of

    def slowly(*given):
        training.forget(MODEL, UserError("gone"))
        return read(*given)

    monkeypatch.setattr(datums, "batch_of", slowly)
    with pytest.raises(UserError, match="model_id: .* is gone: "):
        call(training, "forward_backward", **passed(1))


def test_an_old_session_whose_client_has_come_back(training):
    """Else the first look at silent clients, before its next heartbeat, lets go what it has just made."""
    training.ledger.sessions["s1"] = 5.0
    call(training, "create_model", session_id="s1", model_seq_id=1)
    assert training.ledger.sessions["s1"] > 5.0


@pytest.mark.parametrize(
    ("name", "body", "says"),
    [
        ("forward_backward", {"raw": messages.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="x")}, "loss_fn: value"),
        ("forward_backward", {"raw": messages.ForwardBackwardRequest(model_id=MODEL, seq_id=1, loss_fn="ppo")}, "data: is empty"),
        ("optim_step", {"adam_params": {"learning_rate": -1.0}}, "adam_params.learning_rate: value -1.0 .*give 0 to 1e"),
        ("optim_step", {"adam_params": {"learning_rate": 2e6}}, "adam_params.learning_rate: value 2000000.0 is out of range"),
        ("optim_step", {"adam_params": {"weight_decay": 2e6}}, "adam_params.weight_decay: value 2000000.0 is out of range"),
        ("optim_step", {"adam_params": {"eps": 0.0}}, "adam_params.eps: value 0.0 .*give 1e-30 to 1"),
        ("optim_step", {"adam_params": {"beta1": 1.0}}, "adam_params.beta1: value 1.0 .*less than 1"),
        ("save_weights", {"path": "../x"}, "is no name"),
        ("save_weights", {"path": "a", "ttl_seconds": 2**62}, "ttl_seconds: value .* is out of range"),
        ("save_weights", {"path": "a", "user_metadata": {"a": float("nan")}}, "user_metadata: has a value that is no text"),
        ("save_weights_for_sampler", {}, "sampling_session_seq_id: is missing"),
        ("save_weights_external", {"path": "a", "age_encryption_recipients": ["x"]}, "age_encryption_recipients: are not"),
    ],
)  # fmt: skip
def test_a_refused_call_holds_up_none_of_those_after_it(training, name, body, says):
    sent = {"raw": body["raw"].SerializeToString()} if "raw" in body else {"model_id": MODEL, "seq_id": 1, **body}
    for _ in range(2):
        with pytest.raises(UserError, match=says):
            call(training, name, **sent)
    call(training, "forward_backward", **passed(2))
    assert done(training, FOUND).loss == "cross_entropy"


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
    assert later._scale(ModelKind(rank=4)) == 77.0 / 2, "of new ones"


def test_no_clipping_at_all(training):
    call(training, "optim_step", model_id=MODEL, seq_id=1, adam_params={"grad_clip_norm": 1e12})
    assert done(training).update.clip_grad == 1e12


def test_a_forward_that_was_refused_spoils_no_batch(training):
    call(training, "forward_backward", **passed(1))
    with pytest.raises(UserError, match="value 12 is no token"):
        call(training, "forward_backward", **passed(2, wrong=True, forward_only=True))
    call(training, "optim_step", model_id=MODEL, seq_id=3)
    done(training, FOUND)
    assert done(training, {}).model == MODEL


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ({"lora_config": {"rank": 5}}, "lora_config.rank: value 5 is above the rank 4 of this server"),
        ({"lora_config": {"rank": 0}}, "rank: value 0 is below 1"),
        ({"lora_config": {"train_attn": False, "train_mlp": False}}, "trains neither attention nor MLP"),
        ({"base_model": "other"}, 'base_model: value "other" is not served here; give base'),
        ({"optimizer_config": {"type": "muon"}}, 'optimizer_config.type: value "muon" is not known here'),
        ({"session_id": "s9"}, 'session_id: value "s9" is no session'),
    ],
)  # fmt: skip
def test_models_that_are_not_made(training, body, says):
    with pytest.raises(UserError, match=says):
        call(training, "create_model", **{"session_id": "s1", "model_seq_id": 1, **body})
    assert done(training) is None


def test_no_more_models_than_are_held(training):
    """One that is not made yet counts; where one is about to be let go, the client is to come again."""
    assert training.ledger.models[MODEL].here
    call(training, "create_model", session_id="s1", model_seq_id=1, lora_config={"rank": 4})
    with pytest.raises(UserError, match="is one more than the 2 that can be held at once; close a ServiceClient first"):
        call(training, "create_model", session_id="s1", model_seq_id=2)
    training.ledger.session("s2")
    training.ledger.finish("s1")
    with pytest.raises(QueueFull):
        call(training, "create_model", session_id="s2", model_seq_id=0)
    training.served = dataclasses.replace(training.served, lora=None, max_models=9)
    training.ledger.record_heartbeat("s1")
    training.ledger.sessions["s1"] = 5.0
    with pytest.raises(UserError, match="is one more than the 1 that can be held at once"):
        call(training, "create_model", session_id="s2", model_seq_id=0)


@pytest.mark.parametrize("version", ["0.28.9", "0.3", "", "newest"])
def test_clients_of_old(training, version):
    with pytest.raises(RequestError, match="is too old for this server: pip install -U 'tinker>=0.29'"):
        asyncio.run(training.create_session(ClientRequest(None, b"", {"sdk_version": version})))
    for right in ("0.29.0", "0.30.1", "1.0"):
        asyncio.run(training.create_session(ClientRequest(None, b"", {"sdk_version": right})))


def test_a_heartbeat_of_a_session_that_has_ended(training):
    training.ledger.finish("s1")
    with pytest.raises(RequestError, match="there is no session s1"):
        asyncio.run(training.session_heartbeat(ClientRequest(None, b"", {"session_id": "s1"})))
    assert training.ledger.sessions["s1"] == ENDED


def test_names_that_are_taken(training):
    """Of a state where it is not to be overwritten; the newest to sample from is wanted, and whoever saves says for how long."""
    for number, name, body in (
        (1, "save_weights", {"ttl_seconds": 60}), (2, "save_weights", {"overwrite": True}),
        (3, "save_weights_for_sampler", {"ttl_seconds": 60}), (4, "save_weights_for_sampler", {}),
    ):  # fmt: skip
        call(training, name, model_id=MODEL, seq_id=number, path="a", **body)
        done(training)
        part = "weights" if number < 3 else "sampler_weights"
        saved = training.ledger.saved[f"tinker://{MODEL}/{part}/a"]
        assert (saved.expires is None) == (not body.get("ttl_seconds"))
        assert saved.expires is None or saved.expires == pytest.approx(saved.time + 60)
    for number in (5, 6):  # both wait, and are refused when it comes to the second
        call(training, "save_weights", model_id=MODEL, seq_id=number, path="b")
    done(training)
    with pytest.raises(UserError, match='path: value "b" is saved already'):
        done(training)
    training.forget(MODEL, UserError("gone"))
    with pytest.raises(UserError, match=f"go on from tinker://{MODEL}/weights/b"):
        call(training, "optim_step", model_id=MODEL, seq_id=7)


def test_what_a_model_may_take_on(training):
    """A save of its kind, whatever seed it began with; with what the optimizer had gathered where that is asked for."""
    call(training, "save_weights", model_id=MODEL, seq_id=1, path="a")
    call(training, "save_weights_for_sampler", model_id=MODEL, seq_id=2, path="a")
    for _ in range(2):
        done(training)
    path = f"tinker://{MODEL}/weights/a"
    call(training, "create_model", session_id="s1", model_seq_id=1, lora_config={"rank": 4, "seed": 9})
    done(training)
    body = {"model_id": "s1:train:1", "path": path}
    call(training, "load_weights", seq_id=1, **body)
    call(training, "load_weights", seq_id=2, optimizer=True, **body)
    assert [done(training).optimizer for _ in range(2)] == [False, True]
    with pytest.raises(UserError, match="path: value .* has weights to sample from alone"):
        call(training, "load_weights", seq_id=3, **{**body, "path": path.replace("weights", "sampler_weights")})
    training.served = dataclasses.replace(training.served, lora=None)
    with pytest.raises(UserError, match="path: value .* has adapters; serve with the model.lora"):
        call(training, "load_weights", seq_id=4, **body)


def test_a_model_is_unloaded_once(training):
    first = call(training, "unload_model", model_id=MODEL)
    done(training)
    assert call(training, "unload_model", model_id=MODEL) == first and done(training) is None
    about = asyncio.run(training.get_info(ClientRequest(None, b"", {"model_id": MODEL})))
    assert json.loads(about.body)["lora_rank"] == 4, "what it was is known"


LIMITS = datums.Limits(vocab_size=10, length=6)


def put(tensor, values, kind=messages.FLOAT32, shape=None):
    dtype = {messages.FLOAT32: "<f4", messages.INT64: "<i8", messages.INT32: "<i4"}[kind]
    array = np.array(values, dtype)
    tensor.dense, tensor.dtype = array.tobytes(), kind
    tensor.shape.extend(array.shape if shape is None else shape)


def request(*rows, loss="cross_entropy", **inputs):
    """rows: (tokens, targets). inputs: name -> values of each row; weights are 1 where none are given."""
    sent = messages.ForwardBackwardRequest(model_id="m", seq_id=1, loss_fn=loss)
    for i, (tokens, targets) in enumerate(rows):
        datum = sent.data.add()
        datum.model_input.add().encoded_text.tokens = np.array(tokens, "<i4").tobytes()
        put(datum.loss_fn_inputs["target_tokens"], targets, messages.INT64)
        given = inputs or {"weights": [np.ones(np.shape(row[1])) for row in rows]}
        for name, values in given.items():
            put(datum.loss_fn_inputs[name], values[i])
    return sent


def batch(sent):
    return datums.batch_of(datums.read_call(sent.SerializeToString()), LIMITS)


def refused(sent):
    with pytest.raises(UserError) as error:
        batch(sent)
    return str(error.value)


def test_rows_lie_end_to_end_and_nothing_is_shifted():
    found = batch(request(([1, 2, 3], [2, 3, 4]), ([5], [6]), weights=[[0.5, -1.0, 0.0], [2.0]]))
    assert found.tokens.tolist() == [1, 2, 3, 5] and found.labels.tolist() == [2, 3, 4, 6]
    assert found.lengths.tolist() == [3, 1] and found.loss_mask.tolist() == [1.0] * 4
    assert found.token_fields["weights"].tolist() == [0.5, -1.0, 0.0, 2.0] and found.denominators["one"] == 1.0


def test_chunks_of_text_are_joined():
    sent = request(([1, 2], [2, 3, 4]), weights=[[1.0] * 3])
    sent.data[0].model_input.add().encoded_text.tokens = np.array([7], "<i4").tobytes()
    assert batch(sent).tokens.tolist() == [1, 2, 7]


def test_several_targets_dense_and_by_rows():
    sent = request(([1, 2], [[2, 3], [4, 5]]), weights=[[[0.0, 0.25], [0.5, 0.0]]])
    dense = batch(sent)
    assert dense.labels.tolist() == [[2, 3], [4, 5]] and dense.token_fields["weights"].shape == (2, 2)
    tensor = sent.data[0].loss_fn_inputs["weights"]
    tensor.sparse_csr.values = np.array([0.25, 0.5], "<f4").tobytes()
    tensor.sparse_csr.crow_indices = np.array([0, 1, 2], "<i8").tobytes()
    tensor.sparse_csr.col_indices = np.array([1, 0], "<i8").tobytes()
    assert torch.equal(batch(sent).token_fields["weights"], dense.token_fields["weights"])
    for name, values in (("crow_indices", [0, 3, 2]), ("col_indices", [1, 2]), ("crow_indices", [0, 2])):
        broken = messages.ForwardBackwardRequest.FromString(sent.SerializeToString())
        setattr(broken.data[0].loss_fn_inputs["weights"].sparse_csr, name, np.array(values, "<i8").tobytes())
        assert "is no sparse tensor of the shape [2, 2]" in refused(broken)


def test_bfloat16():
    sent = request(([1, 2], [2, 3]))
    tensor = sent.data[0].loss_fn_inputs["weights"]
    tensor.dense, tensor.dtype = torch.tensor([1.5, -2.0], dtype=torch.bfloat16).view(torch.int16).numpy().tobytes(), 4
    assert batch(sent).token_fields["weights"].tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        (([1, 12], [2, 3]), "data[0].model_input: value 12 is no token of the model"),
        (([1, -1], [2, 3]), "data[0].model_input: value -1 is no token of the model"),
        (([1, 2], [2, 10]), "data[0].loss_fn_inputs.target_tokens: value 10 is no token of the model"),
        (([], []), "data[0].model_input: has no token"),
        (([1] * 7, [1] * 7), "data[0].model_input: has 7 tokens; send at most 6, or raise serve.max_length"),
        (([1, 2], [2]), "has the shape [1]; send [2] or [2, K] for 2 positions"),
    ],
)
def test_what_does_not_fit_the_model(row, says):
    assert says in refused(request(row))


def test_what_does_not_fit_the_loss():
    row = ([1, 2], [2, 3])
    of_sampler = {"logprobs": [[0.0, 0.0]], "advantages": [[0.0, 0.0]]}
    assert "is not known here; use one of cross_entropy" in refused(request(row, loss="sft"))
    assert "use importance_sampling" in refused(request(row, loss="stable_reinforce"))
    assert "has no logprobs; send target_tokens, logprobs, advantages" in refused(request(row, loss="ppo"))
    assert "weights: is not read by this loss" in refused(request(row, loss="ppo", weights=[[1.0, 1.0]], **of_sampler))
    wide = request(([1, 2], [[2, 3], [3, 4]]), loss="ppo", logprobs=[[[0.0] * 2] * 2], advantages=[[[0.0] * 2] * 2])
    assert "has the shape [2, 2]; send [2] for 2 positions" in refused(wide)
    assert "has the shape [1] and target_tokens [2]" in refused(request(row, weights=[[1.0]]))
    assert "has a number that is not finite" in refused(request(row, weights=[[1.0, float("nan")]]))
    unlike = request(([1], [2]), ([1], [[2, 3]]), weights=[[1.0], [[1.0, 1.0]]])
    assert "data[1]: has targets [N, 2] and data[0] [N]" in refused(unlike)
    assert "data: is empty" in refused(messages.ForwardBackwardRequest(model_id="m", loss_fn="cross_entropy"))


def test_images_and_odd_tensors():
    sent = request(([1, 2], [2, 3]))
    image = messages.ForwardBackwardRequest.FromString(sent.SerializeToString())
    image.data[0].model_input[0].image.format = "png"
    assert "data[0].model_input[0]: is an image, and this model reads text alone; send encoded_text" in refused(image)
    for change, says in (
        (lambda t: setattr(t, "dtype", 9), "has the unknown dtype 9"),
        (lambda t: setattr(t, "dense", b"123"), "has 3 bytes"),
        (lambda t: t.shape.append(3), "has 2 numbers for the shape [2, 3]"),
        (lambda t: t.shape.extend([1, 1]), "send one or two dimensions"),
        (lambda t: t.shape.__setitem__(0, -2), "has the shape [-2]"),
    ):
        odd = messages.ForwardBackwardRequest.FromString(sent.SerializeToString())
        change(odd.data[0].loss_fn_inputs["weights"])
        assert says in refused(odd)


def test_a_few_bytes_that_stand_for_very_many_numbers():
    sent = request(([1], [2]))
    for tensor in sent.data[0].loss_fn_inputs.values():
        tensor.shape[:] = [1, 10**7]
        tensor.sparse_csr.crow_indices = np.array([0, 0], "<i8").tobytes()
    assert "data: makes 20000000 numbers; keep to 16777216" in refused(sent)


def test_options():
    sent = request(([1], [2]), loss="ppo", logprobs=[[0.0]], advantages=[[1.0]])
    options = lambda: datums.options_of(datums.read_call(sent.SerializeToString()))  # noqa: E731
    assert options() == {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    sent.loss_fn_config["clip_low_threshold"] = 0.5
    assert options()["clip_low_threshold"] == 0.5
    sent.loss_fn_config_v2["beta"].number = 1.0
    with pytest.raises(UserError, match=r"loss_fn_config.beta: value 1.0 is no option of ppo"):
        options()
    with pytest.raises(UserError, match="is no protobuf"):
        datums.read_call(sent.SerializeToString()[:-3])


@pytest.mark.parametrize("columns", [(), (2,)])
def test_the_answer_has_a_row_for_each_datum(columns):
    targets = [2, 3] if not columns else [[2, 3], [3, 4]]
    of = batch(request(([1, 2], targets), ([1, 2], targets)))
    log_probs = torch.arange(4.0 * (columns[0] if columns else 1)).view(4, *columns)
    out = messages.ForwardBackwardOutput.FromString(datums.answer(of, log_probs, {"loss": 1.5}))
    [record] = out.loss_fn_outputs
    field = record.fields["logprobs"]
    assert record.num_datums == 2 and list(field.trailing_shape) == list(columns) and out.metrics == {"loss:sum": 1.5}
    width = 4 * (columns[0] if columns else 1)
    assert np.frombuffer(field.offsets, "<i8").tolist() == [0, 2 * width, 4 * width]
    assert np.frombuffer(field.data, "<f4").tolist() == log_probs.flatten().tolist()
