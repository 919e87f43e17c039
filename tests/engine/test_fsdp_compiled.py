"""torch.compile of a transformers layer with packed documents: one graph, attention in it, for documents of any lengths."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from transformers import AutoModelForCausalLM

from mrl.engine.fsdp import attention
from mrl.engine.fsdp.blocks import blocks_of
from mrl.ops.packed import Documents

ROWS = [[5, 9, 2], [4, 4, 7, 1], [3, 8], [20, 3, 3, 3, 2], [7, 8, 9]]


@pytest.fixture(params=["llama", "gpt_oss"], ids=["plain", "windows and sinks"])
def layer(request, folder):
    """The forward of a model's first attention layer, and what the model gives it with a row of documents."""
    hf = AutoModelForCausalLM.from_pretrained(folder(request.param))
    hf.set_attn_implementation(attention.NAME)
    first, given = blocks_of(hf)[0].self_attn, []

    def inputs(lengths):
        hook = first.register_forward_pre_hook(lambda _, *call: given.append(call), with_kwargs=True)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        documents = Documents.of(lengths, torch.device("cpu"))
        hf.model(input_ids=positions + 3, position_ids=positions, documents=documents, use_cache=False)
        hook.remove()
        others, options = given.pop()
        return options.pop("hidden_states").detach(), others, options

    torch._dynamo.reset()
    return first.forward, inputs


def test_attention_breaks_no_graph(layer):
    forward, inputs = layer
    hidden, others, options = inputs(ROWS[0])
    found = torch._dynamo.explain(forward)(hidden, *others, **options)
    assert (found.graph_count, found.graph_break_count) == (1, 0), found.break_reasons
    assert sum(node.target is torch.ops.mrl.packed_attention.default for node in found.graphs[0].graph.nodes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("layer", ["gpt_oss"], indirect=True)
def test_other_lengths_are_not_compiled_anew(layer):
    """Three versions serve all: numbers of the first call, then symbols in two steps."""
    forward, inputs = layer
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(forward, backend=counter)
    for row in ROWS:
        hidden, others, options = inputs(row)
        results = []
        for call in (compiled, forward):
            start = hidden.clone().requires_grad_()
            out = call(start, *others, **options)
            out = out[0] if isinstance(out, tuple) else out
            results.append((out.detach(), *torch.autograd.grad(out, start, torch.ones_like(out))))
        for ours, right in zip(*results, strict=True):
            torch.testing.assert_close(ours, right, rtol=1e-5, atol=1e-6)
    assert counter.frame_count <= 3
