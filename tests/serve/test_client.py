"""The unmodified client of tinker over loopback: what it trains is what mrl trains, whatever comes between."""

import io
import json
import re
import signal
import tarfile
import urllib.error
import urllib.request

import numpy as np
import pytest
import safetensors.torch
import torch
from peft import PeftModel
from tinker import types
from transformers import AutoModelForCausalLM

from tests.serve.serving import ADAM, LAYOUTS, ask, datum, folder_of, rows, serving, step, tensor, weights
from tests.tiers import nightly_but


@pytest.fixture(scope="module", params=nightly_but(["one"], ["one", "pp2", "fsdp2"]))
def server(request, model, tmp_path_factory):
    if request.param == "one":
        yield request.getfixturevalue("one")
        return
    nproc, overrides = LAYOUTS[request.param]
    with serving(tmp_path_factory.mktemp(request.param), model, *overrides, nproc=nproc) as server:
        yield server


def close(actual, expected, bound):
    assert actual.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(actual[name], expected[name], rtol=bound, atol=bound)


def log_probs_of(model, data, adapter=None):
    """transformers' log-probs of the targets of each datum, with an adapter as peft loads it."""
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    hf = hf if adapter is None else PeftModel.from_pretrained(hf, adapter)
    found = []
    for one in data:
        with torch.no_grad():
            log_p = hf(torch.tensor([one.model_input.to_ints()])).logits[0].log_softmax(-1)
        targets = torch.tensor(one.loss_fn_inputs["target_tokens"].data)
        found.append(log_p.gather(1, targets[:, None])[:, 0])
    return found


def test_log_probs_and_loss_are_those_of_transformers(server, model):
    data = rows(0)
    found = server.train().forward(data, "cross_entropy").result()
    expected = log_probs_of(model, data)
    for one, log_probs in zip(found.loss_fn_outputs, expected, strict=True):
        np.testing.assert_allclose(one["logprobs"].data, log_probs, rtol=1e-5, atol=1e-5)
    loss = -sum(
        float(lp @ torch.tensor(one.loss_fn_inputs["weights"].data)) for lp, one in zip(expected, data, strict=True)
    )
    assert found.metrics["loss:sum"] == pytest.approx(loss, rel=1e-5, abs=1e-5)


@pytest.mark.slow
def test_calls_add_up(server):
    """A batch in one call, in two calls, and cut by the client into chunks of one datum."""
    data = rows(1)
    whole, two, cut = (server.train(seed=1) for _ in range(3))
    cut.holder._client_config = cut.holder._client_config.model_copy(update={"fwdbwd_max_chunk_len": 1})
    losses = {"whole": step(whole, data), "cut": step(cut, data)}
    first = two.forward_backward(data[:2], "cross_entropy").result().metrics["loss:sum"]
    rest = step(two, data[2:])
    losses["two"] = (first + rest[0], rest[1])
    for loss, norm in losses.values():
        assert (loss, norm) == pytest.approx(losses["whole"], rel=1e-5)
    of_whole = weights(server, whole, "whole")
    close(weights(server, cut, "cut"), of_whole, 1e-5)
    close(weights(server, two, "two"), of_whole, 1e-5)


@pytest.mark.slow
def test_two_clients_take_turns(server):
    """Each is, to the bit, what it is alone."""
    alone = []
    for i, options in ((1, {"seed": 3}), (2, {"seed": 4, "rank": 2})):
        client = server.train(**options)
        alone.append([step(client, rows(10 * i + s)) for s in range(3)])
    clients = [server.train(seed=3), server.train(seed=4, rank=2)]
    together = [[], []]
    for s in range(3):
        passed = [client.forward_backward(rows(10 * i + s), "cross_entropy") for i, client in enumerate(clients, 1)]
        stepped = [client.optim_step(ADAM) for client in clients]
        for i in (0, 1):
            together[i].append((passed[i].result().metrics["loss:sum"], stepped[i].result().metrics["grad_norm"]))
    assert together == alone


@pytest.mark.slow
def test_several_targets_of_a_position(server):
    """[N, K], dense and by rows, is K calls of one each."""
    ids, columns = [5, 6, 7, 8], 3
    rng = np.random.default_rng(0)
    targets, given = rng.integers(3, 100, (4, columns)), rng.normal(size=(4, columns)).astype("f4")
    given[1] = 0.0

    def made(targets, weights):
        inputs = {"target_tokens": tensor(targets, "int64"), "weights": weights}
        return types.Datum(model_input=types.ModelInput.from_ints(ids), loss_fn_inputs=inputs)

    several = made(targets, tensor(given))
    each = [made(targets[:, k], tensor(given[:, k])) for k in range(columns)]
    client, other = server.train(seed=6), server.train(seed=6)
    found, expected = client.forward([several], "cross_entropy").result(), other.forward(each, "cross_entropy").result()
    got = np.array(found.loss_fn_outputs[0]["logprobs"].data).reshape(4, columns)
    for k in range(columns):
        np.testing.assert_allclose(got[:, k], expected.loss_fn_outputs[k]["logprobs"].data, rtol=1e-5, atol=1e-6)
    assert step(client, [several]) == pytest.approx(step(other, each), rel=1e-5)
    rows_of = torch.tensor(given).to_sparse_csr()
    sparse = types.TensorData(
        data=rows_of.values().tolist(), dtype="float32", shape=[4, columns],
        sparse_crow_indices=rows_of.crow_indices().tolist(), sparse_col_indices=rows_of.col_indices().tolist(),
    )  # fmt: skip
    by_rows = made(targets, sparse)
    assert step(server.train(seed=6), [by_rows]) == pytest.approx(step(server.train(seed=6), [several]), rel=1e-6)


def sampler_of(client, name):
    """A sampling client of weights that are saved under a name."""
    return client.create_sampling_client(client.save_weights_for_sampler(name=name).result().path)


@pytest.mark.slow
def test_a_snapshot_stays_as_it_was(server):
    """Also where its name is saved anew, which whoever comes later gets."""
    client, prompt = server.train(seed=7), types.ModelInput.from_ints([5, 6, 7, 8])
    data = [datum([5, 6, 7, 8], weights=[1.0] * 3)]
    step(client, rows(3))
    scored = client.forward(data, "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    unnamed, named = client.save_weights_and_get_sampling_client(), sampler_of(client, "n")
    for sampler in (unnamed, named):
        found = sampler.compute_logprobs(prompt).result()
        assert found[0] is None
        np.testing.assert_allclose(found[1:], scored, rtol=1e-5, atol=1e-5)
    params = types.SamplingParams(max_tokens=8, seed=11, temperature=0.7)
    drawn = [sampler.sample(prompt, 3, params).result().sequences for sampler in (unnamed, named)]
    assert [one.tokens for one in drawn[0]] == [one.tokens for one in drawn[1]]
    step(client, rows(4))
    again = unnamed.sample(prompt, 3, params).result().sequences
    assert [(one.tokens, one.logprobs) for one in again] == [(one.tokens, one.logprobs) for one in drawn[0]]
    newer, anew = client.save_weights_and_get_sampling_client(), sampler_of(client, "n")
    before, after = (one.compute_logprobs(prompt).result() for one in (unnamed, newer))
    assert [one.compute_logprobs(prompt).result() for one in (named, anew)] == [before, after] and before != after


@pytest.mark.slow
def test_sampling_options(server, model):
    sampler, prompt = server.client().create_sampling_client(base_model=model), types.ModelInput.from_ints([5, 6, 7])
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[])
    asked = {"include_prompt_logprobs": True, "topk_prompt_logprobs": 2}
    found = sampler.sample(prompt, 1, greedy, **asked).result()
    [one] = found.sequences
    assert len(one.tokens) == 12 and one.stop_reason == "length"
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    expected = hf.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=12, do_sample=False, eos_token_id=None)[0, 3:]
    assert list(one.tokens) == expected.tolist()
    with torch.no_grad():
        log_p = hf(torch.tensor([[5, 6, 7, *one.tokens]])).logits[0].log_softmax(-1)
    of_tokens = log_p[:-1].gather(1, torch.tensor([6, 7, *one.tokens])[:, None])[:, 0].tolist()
    assert found.prompt_logprobs[0] is None and found.topk_prompt_logprobs[0] is None
    assert found.prompt_logprobs[1:] == pytest.approx(of_tokens[:2], abs=1e-5)
    assert list(one.logprobs) == pytest.approx(of_tokens[2:], abs=1e-5)
    for i, top in enumerate(found.topk_prompt_logprobs[1:]):
        values, ids = log_p[i].topk(2)
        assert [id for id, _ in top] == ids.tolist()
        assert [lp for _, lp in top] == pytest.approx(values.tolist(), abs=1e-5)
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}):
        params = types.SamplingParams(max_tokens=12, stop=[], **narrow)
        assert list(sampler.sample(prompt, 1, params).result().sequences[0].tokens) == expected.tolist()
    stop = types.SamplingParams(max_tokens=12, temperature=0.0, stop=[int(expected[3])])
    [short] = sampler.sample(prompt, 1, stop).result().sequences
    cut = expected.tolist().index(int(expected[3])) + 1
    assert list(short.tokens) == expected[:cut].tolist() and short.stop_reason == "stop"


@pytest.mark.slow
def test_saved_in_one_client_goes_on_in_another(server):
    """With the optimizer bitwise, without it from the same weights."""
    client = server.train(seed=8)
    step(client, rows(5))
    path = client.save_state("half").result().path
    expected = [step(client, rows(6)), step(client, rows(7))]
    went_on = server.client().create_training_client_from_state_with_optimizer(path)
    assert [step(went_on, rows(6)), step(went_on, rows(7))] == expected
    anew = server.client().create_training_client_from_state(path)
    first = step(anew, rows(6))
    assert first == pytest.approx(expected[0], rel=1e-6) and step(anew, rows(7)) != expected[1]
    client.forward_backward(rows(8), "cross_entropy").result()  # of which nothing is left
    with pytest.warns(FutureWarning):  # how clients before 0.38 make the two above
        client.load_state_with_optimizer(path).result()
    assert [step(client, rows(6)), step(client, rows(7))] == expected
    with (
        pytest.warns(FutureWarning),
        pytest.raises(Exception, match="has adapters of rank 4, .*, the model adapters of rank 2,"),
    ):
        server.train(rank=2).load_state(path).result()


@pytest.mark.slow
def test_a_killed_server_goes_on_from_what_was_saved(model, tmp_path):
    """SIGKILL between forward_backward and optim_step, and with calls on their way; what was not saved is said to be gone."""
    with serving(tmp_path, model) as server:
        client = server.train(seed=9)
        step(client, rows(8))
        path = client.save_state("before").result().path
        named, unnamed = sampler_of(client, "shown"), client.save_weights_and_get_sampling_client()
        prompt = types.ModelInput.from_ints([5, 6, 7, 8])
        scored = named.compute_logprobs(prompt).result()
        assert unnamed.compute_logprobs(prompt).result() == scored
        expected = step(client, rows(9))
        client.forward_backward(rows(10), "cross_entropy").result()
        waiting = [client.forward_backward(rows(s), "cross_entropy") for s in range(30)]
        server.end(signal.SIGKILL)
        server.start()
        gone = "is gone: the server was started anew.*go on from tinker://"
        with pytest.raises(Exception, match=gone):
            client.optim_step(ADAM).result()
        assert named.compute_logprobs(prompt).result() == scored, "what has a name is sampled from as before"
        with pytest.raises(Exception, match="is gone: newer ones took its place, its client ended, or the server"):
            unnamed.compute_logprobs(prompt).result()
        with pytest.raises(Exception, match=gone):
            for each in waiting:
                each.result()
        went_on = server.client().create_training_client_from_state_with_optimizer(path)
        assert step(went_on, rows(9)) == expected


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "after"), [("one", "tp2"), ("pp2", "dp2")])
def test_a_save_goes_on_in_another_layout(model, tmp_path, before, after):
    """The optimizer goes with it: the third step is that of the first layout, to fp32's rounding."""
    nproc, overrides = LAYOUTS[before]
    with serving(tmp_path, model, *overrides, nproc=nproc) as server:
        client = server.train(seed=9)
        for s in (1, 2):
            step(client, rows(s))
        path = client.save_state("before").result().path
        expected = step(client, rows(3))
        server.end(signal.SIGKILL)
        server.nproc, overrides = LAYOUTS[after]
        server.overrides = list(overrides)
        server.start()
        went_on = server.client().create_training_client_from_state_with_optimizer(path)
        assert step(went_on, rows(3)) == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_a_signal_changes_nothing(model, tmp_path):
    """SIGTERM suspends what trains, with its gradients, and what nobody has fetched yet. One client is between two calls,
    another has a dozen on their way, and a third samples; the same clients go on."""
    with serving(tmp_path, model) as server:
        expected = []
        for seed in (1, 2):
            undisturbed = server.train(seed=seed)
            expected.append([step(undisturbed, rows(10 * seed + s)) for s in range(6)])
        between, busy = (server.train(seed=seed) for seed in (1, 2))
        sampler = server.client().create_sampling_client(base_model=model).result()
        passed = between.forward_backward(rows(10), "cross_entropy")
        sampled = sampler.sample(types.ModelInput.from_ints([5, 6]), 8, types.SamplingParams(max_tokens=40, seed=1))
        calls = [(busy.forward_backward(rows(20 + s), "cross_entropy"), busy.optim_step(ADAM)) for s in range(6)]
        assert server.end() == 75
        server.start()
        calls.insert(0, (passed, between.optim_step(ADAM)))
        found = [(a.result().metrics["loss:sum"], b.result().metrics["grad_norm"]) for a, b in calls]
        assert found == [expected[0][0], *expected[1]]
        assert [len(one.tokens) > 0 for one in sampled.result().sequences] == [True] * 8


def files_of(client, path):
    """What links to external weights lead to, by name, as a plain download gets them."""
    urls = client.create_rest_client().get_external_weights_urls(path).result().urls
    found = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url) as answer:
            found[name] = answer.read()
    return found


@pytest.mark.slow
def test_what_was_saved_for_others_is_downloaded(server, model, tmp_path):
    """And peft, which loads it over the base, gives the log-probs of the model that was saved."""
    client = server.train(seed=13)
    step(client, rows(11))
    path = client.save_weights_external("out").result().path
    files = files_of(server.client(), path)
    assert safetensors.torch.load(files["adapter_model.safetensors"]).keys() == weights(server, client, "same").keys()
    assert json.loads(files["adapter_config.json"])["r"] == 4
    id, _, _ = path.removeprefix("tinker://").partition("/")
    _, answer = ask(server, f"/api/v1/training_runs/{id}/checkpoints/external_weights/out/archive", method="GET")
    url = json.loads(answer)["url"]
    with urllib.request.urlopen(url) as archive, tarfile.open(fileobj=io.BytesIO(archive.read())) as tar:
        assert set(tar.getnames()) == files.keys()
        tar.extractall(tmp_path, filter="data")
    trained = client.forward(rows(0), "cross_entropy").result().loss_fn_outputs
    for one, log_probs in zip(trained, log_probs_of(model, rows(0), adapter=tmp_path), strict=True):
        np.testing.assert_allclose(one["logprobs"].data, log_probs, rtol=1e-5, atol=1e-5)
    late = re.sub(r"links/\d+", "links/9", url)
    for wrong in (url.replace("out/all.tar", "../x"), url.replace("/archive/", "/file/"), late):
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(wrong)
    assert not list((server.folder / "run" / "models").glob(".tmp-*")), "an archive that was sent is removed"


@pytest.mark.slow
def test_records_and_archives(server):
    client = server.train(seed=12, user_metadata={"who": "tests"})
    client.save_state("kept").result()
    client.save_weights_for_sampler(name="shown").result()
    id, rest = client.get_info().model_id, server.client().create_rest_client()
    run = rest.get_training_run(id).result()
    assert run.lora_rank == 4 and run.last_checkpoint.tinker_path == f"tinker://{id}/weights/kept"
    assert id in [one.training_run_id for one in rest.list_training_runs(limit=100).result().training_runs]
    found = {one.checkpoint_id: one for one in rest.list_checkpoints(id).result().checkpoints}
    assert found.keys() == {"weights/kept", "sampler_weights/shown"}
    rest.set_checkpoint_ttl_from_tinker_path(f"tinker://{id}/sampler_weights/shown", 3600).result()
    left = (rest.list_checkpoints(id).result().checkpoints[1].expires_at - found["weights/kept"].time).total_seconds()
    assert 3500 < left < 7200 and rest.list_checkpoints(id).result().checkpoints[0].expires_at is None
    rest.delete_checkpoint(id, "weights/kept").result()
    assert [one.checkpoint_id for one in rest.list_checkpoints(id).result().checkpoints] == ["sampler_weights/shown"]
    with pytest.raises(Exception, match="is not saved on this server"):
        gone = server.client().create_training_client_from_state(f"tinker://{id}/weights/kept")
        gone.forward(rows(0), "cross_entropy").result()
    shown = folder_of(server, client, "sampler_weights", "shown") / "adapter_config.json"
    assert json.loads(shown.read_text())["r"] == 4
