"""The mutants of what models compute, and of sampling from them."""

from __future__ import annotations

from tests.mutants.mutant import of as _of

SAMPLES = "engine/test_generation.py::test_samples_as_hugging_face"
COMPANY = "engine/test_generation.py::test_same_in_any_company[megatron qwen3_5 tp2]"
PARITY = "engine/test_parity_megatron.py::test_row"

OF_MODELS = (
    *_of(
        "engine/logprobs.py",
        "engine/test_logprobs.py",
        ("log_total - weighted / total, largest", "log_total + weighted / total, largest"),
        ("grad.div_(spec.temperature)", "grad"),
    ),
    *_of(
        "engine/sampling.py",
        "engine/test_sampling.py",
        ("z / temperature[:, None]", "z * temperature[:, None]"),
        ("((reached - mass) < rows.top_p[:, None])", "(reached < rows.top_p[:, None])"),
    ),
    *_of(
        "engine/fsdp/attention.py",
        "engine/test_fsdp_model.py::test_windows_and_chunks_are_those_of_transformers",
        ("mask.chunk or max(1, t.shape[2])", "(mask.chunk or t.shape[2]) + 1"),
        (", mask.window, s_aux, softcap)", ", mask.window and mask.window + 1, s_aux, softcap)"),
    ),
    *_of(
        "engine/fsdp/rotary.py",
        "engine/test_fsdp_parity.py::test_equal_to_hugging_face[phi3 long rope, dp1, padded, size 4, fsdp]",
        ("clamp(min=min(self.limit, int(lengths.max())))", "clamp(min=int(lengths.max()))"),
    ),
    *_of(
        "ops/kv_cache.py",
        "mcore_models/test_attention.py",
        ("hidden |= places <= at - window", "hidden |= places < at - window"),
    ),
    *_of(
        "mcore_models/decoder.py",
        "mcore_models/test_decoder.py",
        ("normed.mul_(self.weight).to(x.dtype)", "normed.to(x.dtype) * self.weight.to(x.dtype)"),
        ("weight + 1 if owner.zero_centered_gamma else weight", "weight"),
    ),
    *_of(
        "mcore_models/decoder.py",
        "engine/test_te_like.py::test_the_decoder_takes_its_modules[qwen3_moe-parallel0]",
        ("(self._activated(F.linear(x, fc1, bias1)) * prob[:, None])", "self._activated(F.linear(x, fc1, bias1))"),
    ),
    *_of(
        "mcore_models/dispatch.py",
        ("mcore_models/test_dispatch.py", "engine/test_padding.py::test_other_ways_of_tokens_to_experts"),
        ("return sum_of_rows(grad, rows), None, None", "return grad[: len(rows)], None, None"),
        ("self.drop_and_pad or config.moe_expert_capacity_factor is not None", "self.drop_and_pad"),
    ),
    *_of(
        "mcore_models/dispatch.py",
        "cuda/test_engine.py::test_a_rank_makes_an_update[Qwen1.5-MoE-A2.7B full router losses bf16 moments rank 0 of 1]",
        ("dispatch_preprocess\": dispatch_preprocess", "dispatch_preprocess\": preprocess"),
    ),
    *_of(
        "mcore_models/grouped.py",
        "engine/test_grouped.py",
        ("gradients.add_(weight.grad)", "gradients.copy_(weight.grad)"),
        ("(first, -number) for number", "(first, number) for number"),
    ),
    *_of(
        "engine/megatron/optim.py",
        "engine/test_grouped.py",
        ("        weights.join(ddp)\n", "        pass\n"),
    ),
    *_of(
        "kernels/route_launchers.py",
        "kernels/test_routes.py",
        ("places + row, token * E + expert[None, :]", "places + row, expert[None, :] * E + token"),
        ("tl.load(choices + row) // K", "tl.load(choices + row) % K"),
    ),
    *_of(
        "mcore_models/train_graphs.py",
        "engine/test_train_graphs.py",
        ("            self.layout.cu_seqlens_q.copy_(layout.cu_seqlens_q)\n", ""),
        ("            self.main_grad.add_(gradient)", "            self.main_grad.copy_(gradient)"),
    ),
    *_of(
        "engine/megatron/model.py",
        "engine/test_train_graphs.py",
        ("OVERLAPS, False) if config.engine.cuda_graphs", "OVERLAPS, True) if config.engine.cuda_graphs"),
    ),
    *_of(
        "mcore_models/decode_graphs.py",
        "mcore_models/test_decoder.py",
        ("between if sequences <= between and power >= 4 else power", "power"),
    ),
    *_of(
        "engine/generation.py",
        "engine/test_generation.py::test_same_in_any_company[megatron ep2]",
        ("            if all(exact):", "            if exact is not None:"),
    ),
    *_of(
        "ops/masked.py",
        "mcore_models/test_attention.py",
        ("allowed.triu(k_length - q_length - window + 1)", "allowed.triu(k_length - q_length - window)"),
    ),
    *_of(
        "ops/causal.py",
        ("mcore_models/test_attention.py", "ops/test_causal.py"),
        ("scoring.window is None or scoring.window >= keys", "scoring.window is None or scoring.window + 1 >= keys"),
        ("window is None and queries == keys:", "queries == keys:"),
    ),
    *_of(
        "mcore_models/attention.py",
        "mcore_models/test_attention.py",
        ("config.window_size[0] + 1 if windowed", "config.window_size[0] + 2 if windowed"),
    ),
)  # fmt: skip

OF_DELTA_NETS = (
    *_of(
        "ops/delta_rule.py",
        "ops/test_delta_rule.py",
        (".float().masked_fill(later, -torch.inf)", ".float().masked_fill(later, 0.0)"),
        ("decay.double()", "decay"),
        ("torch.cat([state, *ended[::-1]])", "torch.cat([state, *ended])"),
    ),
    *_of(
        "ops/delta_heads.py",
        (f"{SAMPLES}[megatron qwen3_5]", "engine/test_generation.py::test_the_cache_is_bounded[megatron qwen3_5]", COMPANY),
        ("before[:count] = window[..., 1:]", "before[:count] = window[..., :-1]"),
        ("before[:count].masked_fill(first, 0)", "before[:count]"),
        ("states[rows].masked_fill(first[:, None, None, None, None], 0)", "states[rows]"),
    ),
    *_of(
        "engine/generation.py",
        "engine/test_generation_schedule.py",
        ("leader.cached > len(s.prompt) - 1:", "leader.cached > len(s.context) + 9:"),
        ("end = min(end, s.length - 1)", "pass"),
        ("            if not s.finished:\n                s.context.append", "            if True:\n                s.context.append"),
    ),
    *_of(
        "engine/kept.py",
        "engine/test_generation_schedule.py",
        (" or recurrent and same < one.places", ""),
    ),
    *_of(
        "mcore_models/delta_net.py",
        f"{PARITY}[qwen3_5, tp2, packed, size 4]",
        ("copy_to_tensor_model_parallel_region(self.weight, self.tp)", "self.weight"),
        ("set_tensor_model_parallel_attributes(getattr(self, name), True, 0, 1)", "pass"),
    ),
    *_of(
        "mcore_models/delta_net.py",
        f"{PARITY}[qwen3_5, cp2, packed, size 4]",
        ("reorder(heads(whole, layout.chunks), back, order)", "heads(whole, layout.chunks)"),
        ("reorder(self._heads_for_tokens(inputs), order, back)", "self._heads_for_tokens(inputs)"),
    ),
    *_of(
        "engine/fsdp/delta_net.py",
        "engine/test_contract.py::test_more_layouts[fsdp-documents_do_not_see_each_other-qwen3_5]",
        ("if documents is None else list(documents.lengths)", "if True else []"),
    ),
    *_of(
        "weights/algebra.py",
        "weights/test_properties.py",
        ("(0, keys + head * key, key)", "(0, head * key, key)"),
    ),
    *_of(
        "mcore_models/layers.py",
        f"{PARITY}[qwen3_5, dp1, packed, size 4]",
        ("self.weight.float() + 1 if self.centered", "self.weight.float() if self.centered"),
    ),
)  # fmt: skip
