"""What a client sends becomes a batch; what does not fit is one line that names the datum."""

import numpy as np
import pytest
import torch

from mrl.errors import UserError
from mrl.serve import datums, messages

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
