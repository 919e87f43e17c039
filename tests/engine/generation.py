"""Cases of generation; run in worlds (see harness.py) by test_generation.py, in layouts of both engines."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import random
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
from transformers import AutoModelForCausalLM

from mrl.batch import make_batch
from mrl.config.schema import LoraConfig, RoleConfig
from mrl.engine import generation
from mrl.engine.base import BaseEngine, Completion, GenerateRequest
from mrl.engine.kept import KeptSequences
from mrl.engine.megatron import meta
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams, gumbel, noise_key
from mrl.errors import ConfigError
from mrl.mcore_models import decode_graphs, decoder
from mrl.ops import kv_cache
from tests.engine import tiny
from tests.engine.contract import make_engine, train
from tests.engine.test_sampling import to_int64, transformers_logits

SAMPLINGS = [
    SamplingParams(),
    SamplingParams(0.7),
    SamplingParams(1.2, top_k=9),
    SamplingParams(1.0, top_p=0.8),
    GREEDY,
    SamplingParams(1.5, top_k=60, top_p=0.95, min_p=0.02),
]


def sampled_requests(samples: int = 2) -> list[GenerateRequest]:
    """Prompts of unequal length, `samples` of each, with every kind of sampling and unequal limits; one stops early."""
    numbers = random.Random(1)
    prompts = [[numbers.randrange(3, tiny.VOCAB) for _ in range(length)] for length in (5, 1, 11, 3, 8)]
    return [
        GenerateRequest(
            prompt,
            3 + (3 * p + s) % 8,
            (5, 6, 7, 8, 9, 10) if p == 2 else (),
            SAMPLINGS[(p + s) % len(SAMPLINGS)],
            SamplingKey(11, 2, p, s),
            (lambda new: len(new) == 2) if (p, s) == (3, 0) else None,
        )
        for p, prompt in enumerate(prompts)
        for s in range(samples)
    ]


def hugging_face(folder: str, requests: list[GenerateRequest]) -> list[tuple[list[int], bool]]:
    """Each request by whole forwards of the Hugging Face model, its filters, and argmax(logits / T + noise)."""
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    answers = []
    for request in requests:
        tokens, new, finished = list(request.tokens), [], False
        while len(new) < request.max_new_tokens and not finished:
            with torch.no_grad():
                logits = transformers_logits(hf(input_ids=torch.tensor([tokens])).logits[:, -1], request.sampling)
            if not request.sampling.greedy:
                logits = logits + gumbel(torch.tensor([to_int64(noise_key(request.key, len(tokens)))]), 0, tiny.VOCAB)
            new.append(int(logits.argmax()))
            tokens.append(new[-1])
            finished = new[-1] in request.stop_tokens or (request.stop_at is not None and request.stop_at(new))
        answers.append((new, finished))
    return answers


def samples_as_hugging_face(config: RoleConfig, expected: list[tuple[list[int], bool]]) -> None:
    """The tokens are those that one process would draw; log-probs are those of a forward at the temperature (trap 19)."""
    engine = make_engine(config)
    requests = sampled_requests()
    done_of: list[tuple[int, int]] = []
    completions = engine.generate(requests, progress=lambda done, of: done_of.append((done, of)))
    assert [(c.tokens, c.finished) for c in completions] == expected
    assert done_of == sorted(done_of) and done_of[-1][0] == done_of[-1][1] <= len(requests), (
        "all of this replica's share"
    )
    check_log_probs(engine, requests, completions)


def check_log_probs(engine: BaseEngine, requests: list[GenerateRequest], completions: list[Completion]) -> None:
    """Those of the completions are those that the engine's forward gives at each request's temperature."""
    for sampling in SAMPLINGS:
        chosen = [(r, c) for r, c in zip(requests, completions, strict=True) if r.sampling == sampling]
        batch = make_batch(
            [[*r.tokens, *c.tokens] for r, c in chosen],
            [[0.0] * len(r.tokens) + [1.0] * len(c.tokens) for r, c in chosen],
        )
        with engine.eval_mode():
            ctx = {"temperature": sampling.temperature or 1.0}
            predictions, _ = engine.forward_backward_step(batch, ctx, forward_only=True)
        scored = predictions["log_probs"].cpu()[batch.loss_mask.bool()]
        ours = torch.tensor([x for _, c in chosen for x in c.log_probs])
        torch.testing.assert_close(ours, scored, rtol=0, atol=1e-5)


def the_weights_of_now_generate(config: RoleConfig) -> None:
    """After each optimizer step completions come from the new weights, and generating changes nothing of training."""
    requests, norms = sampled_requests(), []
    for generates in (True, False):
        engine = make_engine(config)
        seen = []
        for _ in range(2):
            norms += [(norm, lr) for _, norm, lr, _ in train(engine, 1)]
            if generates:
                seen.append(engine.generate(requests))
                check_log_probs(engine, requests, seen[-1])
        assert not generates or seen[0] != seen[1]
    assert norms[:2] == norms[2:]


def assert_alike(found: list[Completion], expected: list[Completion]) -> None:
    """The same tokens, and log-probs within rounding."""
    for one, other in zip(found, expected, strict=True):
        assert (one.tokens, one.finished) == (other.tokens, other.finished)
        assert (torch.tensor(one.log_probs) - torch.tensor(other.log_probs)).abs().max() < 1e-5


@contextlib.contextmanager
def tokens_read_late() -> Iterator[None]:
    """The host reads a step's tokens after it has begun the next one, as with a GPU. Those under top_p hold, because all
    columns are candidates."""
    from mrl.engine.fsdp import generate as of_fsdp
    from mrl.engine.megatron import generate as of_megatron

    with (
        mock.patch("mrl.engine.sampling._CANDIDATES", tiny.VOCAB + 100),
        mock.patch.object(of_fsdp, "may_read_late", lambda *_: True),
        mock.patch.object(of_megatron, "may_read_late", lambda *_: True),
    ):
        yield


def same_in_any_company(config: RoleConfig) -> None:
    """A request alone, shuffled requests, little cache, prompts in small pieces, few logits that top_p looks at first: the
    same tokens, in the requests' order."""
    engine = make_engine(config)
    requests = sampled_requests()
    together = engine.generate(requests)

    def same(completions: list[Completion], indices: list[int]) -> None:
        assert_alike(completions, [together[i] for i in indices])

    everything = list(range(len(requests)))
    shuffled = random.Random(0).sample(everything, len(everything))
    same(engine.generate([requests[i] for i in shuffled]), shuffled)
    for i in (0, 3, 7):
        same(engine.generate([requests[i]]), [i])
    same(engine.generate(requests, cache_tokens=45, prefill_tokens=3), everything)
    same(engine.generate(requests, prefill_tokens=1), everything)
    with mock.patch("mrl.engine.sampling._CANDIDATES", 2):
        same(engine.generate(requests), everything)
    with tokens_read_late():
        same(engine.generate(requests), everything)
        kept, half = KeptSequences(200), [dataclasses.replace(r, max_new_tokens=2) for r in requests]
        begun = engine.generate(half, cache_tokens=45, prefill_tokens=3, kept=kept)
    rest = [i for i in everything if not begun[i].finished and requests[i].max_new_tokens > 2]
    longer = [
        dataclasses.replace(r, tokens=[*r.tokens, *begun[i].tokens], max_new_tokens=r.max_new_tokens - 2)
        for i, r in enumerate(requests)
        if i in rest
    ]
    ends = zip((begun[i] for i in rest), engine.generate(longer, kept=kept), strict=True)
    same([Completion(a.tokens + b.tokens, a.log_probs + b.log_probs, b.finished) for a, b in ends], rest)
    greedy = [dataclasses.replace(r, sampling=GREEDY) for r in requests]
    assert engine.generate(greedy) != together and engine.generate([]) == []
    other = engine.generate([dataclasses.replace(r, key=r.key._replace(step=3)) for r in requests])
    assert [c.tokens for c in other] != [c.tokens for c in together]


def the_cache_is_bounded(config: RoleConfig) -> None:
    """However many requests there are, no more keys and values exist than `cache_tokens` of them."""
    engine = make_engine(config)
    made: list[kv_cache.KVCache] = []
    original = kv_cache.KVCache.__init__

    def remember(self, rows: int, length: int) -> None:
        original(self, rows, length)
        made.append(self)

    with mock.patch.object(kv_cache.KVCache, "__init__", remember):
        for count in (1, 10):
            engine.generate(sampled_requests() * count, cache_tokens=100)
        requests = [dataclasses.replace(r, max_new_tokens=20) for r in sampled_requests()]
        with mock.patch.object(generation, "FIRST_NEW_TOKENS", 2):
            grown = engine.generate(requests, cache_tokens=100)
        assert made[-1].length > 15, "rows have become longer"
    assert [c.tokens for c in grown] == [c.tokens for c in engine.generate(requests)]
    for cache in made:
        for keys, values in cache.layers.values():
            assert keys.shape == values.shape and keys.shape[0] * keys.shape[2] <= 100
        for pair in cache.states.values():
            assert sum(state[0].nbytes for state in pair) == meta.recurrent_bytes(config, engine.model.dims)


def own_attention_in_place_of_another(config: RoleConfig) -> None:
    """Where the layer spec has another core attention (transformer-engine's), generation brings ours and takes it away."""
    engine = make_engine(config)
    requests = [GenerateRequest([5, 9, 2], 6), GenerateRequest([7], 6)]
    expected = engine.generate(requests)

    class Foreign(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise AssertionError("knows nothing of CacheLayout")

    attentions = [layer.self_attention for model in engine.model.chunks for layer in model.decoder.layers]
    for attention in attentions:
        attention.core_attention = Foreign()
    engine.model.spec = "te"
    assert engine.generate(requests) == expected
    assert all(isinstance(attention.core_attention, Foreign) for attention in attentions)


def gpt_model_itself_gives_the_same(config: RoleConfig) -> None:
    """Completions by way of megatron's own forward are those of the shorter way over the same weights."""
    engine = make_engine(config)
    requests = sampled_requests()
    shorter = engine.generate(requests)
    assert all(decoder.supports_chunk(model) for model in engine.model.chunks)
    made: list[object] = []
    with (
        mock.patch.object(decoder, "supports_chunk", lambda model: False),
        mock.patch.object(decoder.Decoder, "__init__", lambda self, model: made.append(model)),
    ):
        longer = engine.generate(requests)
    assert not made
    assert_alike(longer, shorter)


def fixed_shapes_give_the_same(config: RoleConfig) -> None:
    """Completions by steps in fixed shapes, whose rows and places are wider than what runs, are those of other steps.

    What the rows beyond hold changes not a bit, be it no number; nor do they themselves in dense layers: a step with them
    gives what one without them gives. Experts' products and sums over a state are rounded otherwise on a CPU for another number
    of rows.
    """
    engine = make_engine(config)
    # what is widened: 5 sequences to 6 rows, and rows of 21 places at once
    requests = [*sampled_requests(), GenerateRequest([7, 3], 12, key=SamplingKey(3))]
    expected = engine.generate(requests)
    calls, apart, original = [], [], decode_graphs.DecodeGraphs.__call__

    def poisoned(self, tokens, positions, hidden, behind):
        """As it is, with rows beyond that are no numbers, once more with zeros there, and without such rows."""
        count = len(tokens)
        shape = (
            decode_graphs.rows_of(count, self.cache.rows),
            decode_graphs.places_of(max(positions) + 1, self.cache.length),
        )
        calls.append((count, shape[0]))
        apart.append(any(behind))
        bucket, found = self._bucket(count, max(positions) + 1, hidden), []
        states = [state for pair in self.cache.states.values() for state in pair]
        tensors = [*states, *(tensor for pair in self.cache.layers.values() for tensor in pair)]
        saved = [tensor.clone() for tensor in tensors]

        def once_more() -> None:
            for state, before in zip(states, saved, strict=False):
                state[:count] = before[:count]

        for beyond in (math.nan, 0.0):
            once_more()
            for tensor in tensors:
                tensor[count:] = beyond
            if bucket.hidden is not None:
                bucket.hidden[count:] = beyond
            found.append(original(self, tokens, positions, hidden, behind).clone())
        assert torch.equal(*found) and found[0].isfinite().all(), count
        place = found[0].device
        step = kv_cache.CachedStep.fixed(self.cache, torch.tensor(positions, device=place), shape[1])
        once_more()
        alone = self.decoder(tokens, hidden, step, fixed=True)
        exact = engine.model.transformer.num_moe_experts is None and not states
        bound = 0 if exact else 1e-5
        torch.testing.assert_close(found[0], alone, rtol=bound, atol=bound)
        for tensor, before in zip(tensors, saved, strict=True):
            tensor.copy_(before)
        return original(self, tokens, positions, hidden, behind)  # over rows that other sequences may use

    with mock.patch.object(decode_graphs.DecodeGraphs, "__call__", poisoned):
        found = engine.generate(requests, cuda_graphs=True)
        assert any(rows > count for count, rows in calls), "no step was widened"
        tight = engine.generate(requests, cuda_graphs=True, cache_tokens=45, prefill_tokens=3)
        assert any(apart) or engine.model.transformer.linear_attention_freq, "no prompt went on beside such a step"
    assert_alike(found, expected)
    assert_alike(tight, expected)


def experts_on_ranks_have_no_fixed_shapes(config: RoleConfig) -> None:
    engine = make_engine(config)
    with pytest.raises(ConfigError, match=r"^rollout\.cuda_graphs: value true is not for .*engine\.parallel\.ep"):
        engine.generate(sampled_requests(), cuda_graphs=True)


def ranks_agree_on_the_way(config: RoleConfig) -> None:
    """What one stage cannot do, none does. Adapters are on experts, which the first stage lacks; and with a chunk that does
    not fit on the last alone, all go through GPTModel."""
    lora = LoraConfig(target_modules=("experts.down_proj",))
    engine = make_engine(dataclasses.replace(config, model=dataclasses.replace(config.model, lora=lora)))
    last = engine.model.coords.pp_rank == 1
    assert [decoder.fixed_refusal(chunk) for chunk in engine.model.chunks] == [
        "experts have adapters" if last else None
    ]
    with pytest.raises(ConfigError, match=r"^rollout\.cuda_graphs: value true is not for .*: experts have adapters"):
        engine.generate(sampled_requests(), cuda_graphs=True)
    made: list[object] = []
    with (
        mock.patch.object(decoder, "supports_chunk", lambda model: not last),
        mock.patch.object(decoder.Decoder, "__init__", lambda self, model: made.append(model)),
    ):
        engine.generate(sampled_requests(1))
    assert not made


def graphs_on_all_tensor_parallel_ranks_or_none(config: RoleConfig, refuses: int | None) -> None:
    """Where CUDA refuses a capture on rank `refuses`, steps run as before on both; else both replay. A stand-in for CUDA keeps
    nothing: a capture runs nothing on other ranks, and a replay runs the step."""
    engine = make_engine(config)
    expected, model, lines = engine.generate(sampled_requests()), engine.model, []
    own, all_reduce, replayed = torch.distributed.get_rank(), torch.distributed.all_reduce, []

    @contextlib.contextmanager
    def capture(graph, **_):
        if own == refuses:
            raise RuntimeError("out of graphs")
        torch.distributed.all_reduce = lambda *_, **__: None
        try:
            yield
        finally:
            torch.distributed.all_reduce = all_reduce

    class Graph:
        def replay(self) -> None:
            [bucket] = [b for b in steps[-1]._buckets.values() if b.graph is self]
            bucket.out.copy_(steps[-1]._run(bucket))
            replayed.append(bucket)

    steps: list[decode_graphs.DecodeGraphs] = []
    begin = decode_graphs.DecodeGraphs.__init__
    with (
        mock.patch.multiple(torch.cuda, CUDAGraph=Graph, graph=capture, graph_pool_handle=lambda: None),
        mock.patch.object(decode_graphs.logger, "warning", lambda text, *of: lines.append(text % of)),
        mock.patch.object(
            decode_graphs.DecodeGraphs, "__init__", lambda self, *a, **k: (steps.append(self), begin(self, *a, **k))[0]
        ),
    ):
        model.captures_graphs = True
        found = engine.generate(
            [*sampled_requests(), GenerateRequest([7, 3], 40, key=SamplingKey(3))], cuda_graphs=True
        )
    assert [c.tokens for c in found[:-1]] == [c.tokens for c in expected]
    assert bool(replayed) == model.captures_graphs == (refuses is None)
    why = "out of graphs" if own == refuses else "on another rank"
    assert [why in line for line in lines] == ([] if refuses is None else [True])


def company_changes_no_bit(config: RoleConfig) -> None:
    """`engine.batch_invariant`: tokens and log-probs of a request are the same to the bit, alone, shuffled, in little cache, with
    prompts in pieces, and going on from kept rows; so are the log-probs of forward passes, alone and in any order."""
    engine = make_engine(config)
    requests = sampled_requests()
    together = engine.generate(requests)
    everything = list(range(len(requests)))
    shuffled = random.Random(0).sample(everything, len(everything))
    for i in (0, 3, 7):
        assert engine.generate([requests[i]]) == [together[i]]
    assert engine.generate([requests[i] for i in shuffled]) == [together[i] for i in shuffled]
    assert engine.generate(requests, cache_tokens=45, prefill_tokens=3) == together
    kept, half = KeptSequences(200), [dataclasses.replace(r, max_new_tokens=2) for r in requests]
    begun = engine.generate(half, kept=kept)
    longer = [
        dataclasses.replace(r, tokens=[*r.tokens, *c.tokens], max_new_tokens=r.max_new_tokens - 2)
        for r, c in zip(requests, begun, strict=True)
    ]
    whole = [i for i, c in enumerate(begun) if not c.finished]
    rest = engine.generate([longer[i] for i in whole], kept=kept)
    for i, found in zip(whole, rest, strict=True):
        assert begun[i].tokens + found.tokens == together[i].tokens
        assert begun[i].log_probs + found.log_probs == together[i].log_probs

    def scored(indices: list[int]) -> list[torch.Tensor]:
        tokens = [[*requests[i].tokens, *together[i].tokens] for i in indices]
        batch = make_batch(tokens, [[1.0] * len(t) for t in tokens])
        with engine.eval_mode():
            mine = engine.shard_data(batch)
            predictions, _ = engine.forward_backward_step(mine, {"temperature": 1.0}, forward_only=True)
            found = engine.unshard_data({"log_probs": predictions["log_probs"]}, batch)["log_probs"]
        return list(found.split(batch.lengths.tolist()))

    expected = scored(everything)
    for indices in (shuffled, [0], [7, 2]):
        for i, found in zip(indices, scored(indices), strict=True):
            assert torch.equal(found, expected[i])


def company_changes_bits(config: RoleConfig) -> bool:
    """Returns whether sampled log-probs alone are other than in company, as they may be without `engine.batch_invariant`."""
    engine, requests = make_engine(config), sampled_requests()
    together = engine.generate(requests)
    return any(engine.generate([request]) != [found] for request, found in zip(requests, together, strict=True))
