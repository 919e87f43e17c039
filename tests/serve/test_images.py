"""Images of a client: the model is given what its own processor makes of them."""

import pytest
import torch
from tinker import types
from transformers import AutoModelForImageTextToText, AutoTokenizer

from mrl.data.images import Image
from mrl.data.vision import load_vision
from mrl.weights.hf_config import read_hf_config
from tests.data.pictures import png
from tests.engine.tiny_vision import make_vision_model
from tests.serve.serving import ADAM, serving, tensor

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_vision_model(str(tmp_path_factory.mktemp("model")), "qwen2_5_vl")


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    with serving(tmp_path_factory.mktemp("run"), model, "engine.backend=fsdp") as server:
        yield server


def asked(model, expected):
    """(a datum of text, an image, and text; the same for transformers)."""
    tokenizer, vision = AutoTokenizer.from_pretrained(model), load_vision(model, read_hf_config(model))
    start, end = tokenizer.convert_tokens_to_ids(["<|vision_start|>", "<|vision_end|>"])
    ids, of_image = vision.read(Image("here", data=png(0)))
    whole = [20, 21, start, *ids, end, 30, 31, 32]
    chunks = [
        types.EncodedTextChunk(tokens=[20, 21, start]),
        types.ImageChunk(data=png(0), format="png", expected_tokens=len(ids) if expected is None else expected),
        types.EncodedTextChunk(tokens=[end, 30, 31]),
    ]
    weights = [0.0] * (len(whole) - 3) + [1.0, 0.5]
    datum = types.Datum(
        model_input=types.ModelInput(chunks=chunks),
        loss_fn_inputs={"target_tokens": tensor(whole[1:], "int64"), "weights": tensor(weights)},
    )
    return datum, whole, of_image


def test_log_probs_are_those_of_transformers(server, model):
    datum, whole, of_image = asked(model, None)
    client = server.train()
    found = client.forward([datum], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    hf = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    ids = torch.tensor([whole[:-1]])
    kinds = (ids == hf.config.image_token_id).int()
    with torch.no_grad():
        log_p = hf(input_ids=ids, mm_token_type_ids=kinds, **of_image).logits[0].log_softmax(-1)
    expected = log_p.gather(1, torch.tensor(whole[1:])[:, None])[:, 0].tolist()
    assert found == pytest.approx(expected, abs=1e-5)
    losses = []
    for _ in range(3):
        losses.append(client.forward_backward([datum], "cross_entropy").result().metrics["loss:sum"])
        client.optim_step(ADAM).result()
    assert losses[2] < losses[0]


def test_an_image_of_another_size_than_expected(server, model):
    with pytest.raises(Exception, match=r"model_input\[1\].expected_tokens: value 3 is not the \d+ that it takes"):
        server.train().forward([asked(model, 3)[0]], "cross_entropy").result()
