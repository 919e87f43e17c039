"""Cases of generation that only the megatron engine has; run in worlds (see harness.py)."""

from __future__ import annotations

import torch

from mrl.config.schema import RoleConfig
from mrl.engine.base import GenerateRequest
from mrl.engine.registry import build_engine


def own_attention_in_place_of_another(config: RoleConfig) -> None:
    """Where the layer spec has another core attention (transformer-engine's), generation brings ours and takes it away."""
    engine = build_engine(config)
    engine.init_model()
    requests = [GenerateRequest([5, 9, 2], 6), GenerateRequest([7], 6)]
    expected = engine.generate(requests)

    class Foreign(torch.nn.Module):
        def forward(self, *args, **kwargs):
            raise AssertionError("knows nothing of CacheLayout")

    attentions = [layer.self_attention for model in engine.models for layer in model.decoder.layers]
    for attention in attentions:
        attention.core_attention = Foreign()
    engine.spec = "te"
    assert engine.generate(requests) == expected
    assert all(isinstance(attention.core_attention, Foreign) for attention in attentions)


def many_prompts_in_little_cache(config: RoleConfig) -> None:
    """Requests beyond the cache's room run in groups, and come back in their order."""
    from mrl.engine.megatron import generate

    engine = build_engine(config)
    engine.init_model()
    requests = [GenerateRequest([5 + i, 9, 2 + i][: 1 + i % 3], 2 + i) for i in range(7)]
    together = engine.generate(requests)
    room, generate.CACHE_TOKENS = generate.CACHE_TOKENS, 16
    assert [len(group) for group in generate._groups([generate._Sequence(r, i) for i, r in enumerate(requests)])] != [7]
    alone = engine.generate(requests)
    generate.CACHE_TOKENS = room
    assert [c.tokens for c in alone] == [c.tokens for c in together]
    assert [len(c.tokens) for c in alone] == [2 + i for i in range(7)]
