"""The rows of the parity table (tests/engine/parity.py): those of `make test`, and those of the nightly tier.

Between them stand every family; tp, sp, pp, vpp, cp, ep, etp and dp alone and together, up to 8 processes; packed and padded
batches; 1, 2 and 4 micro-batches and token budgets; uneven pipelines; tied embeddings under each split; recompute; value heads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from mrl.config.schema import FSDPConfig
from tests.engine import tiny
from tests.engine.layouts import EXTERNAL
from tests.engine.parity import MODELS, Row

AROUND_A_CHUNK = (1, 63, 2, 64, 65, 1, 130)
"""Lengths around the 64 tokens of a chunk of gated delta nets, a document of one token between two long ones."""
TWENTY = (5, 2, 9, 2, 4, 7, 3, 3, 2, 8, 6, 2, 5, 9, 2, 1, 4, 2, 7, 3)

ONE_PROCESS = (
    Row("llama", packing=False, size=8),
    Row("llama", size=4),
    Row("llama3 rope", size=8),
    Row("mistral", size=2),
    Row("qwen2", packing=False, size=4),
    Row("qwen2 window", tokens=64),
    Row("qwen3", size=8),
    Row("qwen3_moe", size=4),
    Row("qwen3_moe step 2", packing=False, size=4),
    Row("qwen3_moe window", size=4),
    Row("mixtral", size=4),
    Row("mixtral window", tokens=64),
    Row("olmoe", size=4),
    Row("olmoe normalised", size=8, packing=False),
    Row("qwen2_moe", size=4),
    Row("qwen2_moe window", tokens=64),
    Row("glm4_moe", size=4),
    Row("glm4_moe groups", packing=False, size=4),
    Row("deepseek_v3", size=4),
    Row("deepseek_v3 yarn", packing=False, size=4, recompute="selective"),
    Row("gpt_oss", size=4),
    Row("gpt_oss", packing=False, size=8),
    Row("qwen3_5", size=4),
    Row("qwen3_5", packing=False, size=8, recompute="selective"),
    Row("qwen3_5_moe", tokens=64),
    Row("qwen3_5_moe", packing=False, size=4, recompute="full"),
    Row("llama tied", tokens=48, recompute="full"),
    Row("llama value head", size=2),
)

TWO_PROCESSES = (
    Row("llama", "tp2", size=4),
    Row("llama", "tp2+sp", packing=False, size=4),
    Row("llama", "tp2+sp", size=2, recompute="full"),
    Row("llama", "pp2", size=2),
    Row("llama", "pp2", packing=False, size=8, why="one micro-batch"),
    Row("llama", "pp2xvpp2", size=2, why="both neighbours of a stage are the same rank: batched p2p crosses messages"),
    Row("llama", "cp2", tokens=48, why="a sequence of one token, shorter than 2*cp"),
    Row("llama", "dp2", size=2),
    Row("llama", "dp2", size=1, sequences=3, why="a rank with an empty micro-batch"),
    Row("llama tied", "tp2", size=4),
    Row("llama tied", "pp2", size=4),
    Row("llama tied", "cp2", size=8),
    Row("llama tied", "pp2xvpp2", size=2, packing=False),
    Row("llama 5 layers", "pp2", size=4, why="uneven pipeline"),
    Row("llama tied value head", "pp2", size=4),
    Row("llama value head", "tp2", packing=False, size=8),
    Row("llama value head", "dp2", size=2),
    Row("llama", "cp2", size=4, one_token=True, why="trap 4: the token lies on one rank of two"),
    Row("llama", "dp2", size=4, one_token=True, why="trap 4: one rank has nothing that trains"),
    Row("qwen3", "tp2", size=8, why="norms of heads that are split, without sequence parallelism"),
    Row("llama3 rope", "cp2", packing=False, size=4),
    Row("mistral", "cp2", size=4, why="the window crosses the zigzag's segments"),
    Row("mistral", "pp2", tokens=40),
    Row("qwen2", "tp2", size=8, recompute="selective"),
    Row("qwen3", "tp2+sp", tokens=64),
    Row("qwen3 tied", "dp2", size=4),
    Row("qwen3_moe", "dp2xep2", size=2),
    Row("qwen3_moe", "tp2+sp", size=4, why="experts split over tp (etp 2)"),
    Row("mixtral", "tp2+spxetp1", size=4, why="whole experts beside split attention, with ep 1"),
    Row("mixtral", "dp2xetp2", size=4, why="split experts beside whole attention, with ep 1"),
    Row("qwen3_moe", "pp2", size=4),
    Row("mixtral", "cp2", size=4),
    Row("deepseek_v3", "tp2+sp", size=4, why="a rotary key that the heads of all ranks share"),
    Row("deepseek_v3", "dp2xep2", size=4),
    Row("deepseek_v3", "cp2", size=4, why="keys and values of unequal sizes"),
    Row("gpt_oss", "tp2+spxetp1", size=4),
    Row("gpt_oss", "dp2xep2", size=4),
    Row("gpt_oss", "pp2", size=4),
    Row("olmoe", "tp2+sp", size=4, why="a norm over heads that are split"),
    Row("olmoe", "pp2", size=4),
    Row("qwen2_moe", "tp2+sp", size=4, why="a shared expert that is split, beside its gate that is not"),
    Row("qwen2_moe", "dp2xep2", size=4),
    Row("glm4_moe", "tp2+sp", size=4),
    Row("glm4_moe", "dp2xep2", size=4),
    Row("glm4_moe groups", "pp2xvpp2", size=4),
    Row("qwen3_5", "tp2", size=4, why="a norm of heads that are split, without sequence parallelism"),
    Row("qwen3_5", "tp2+sp", tokens=64),
    Row("qwen3_5", "cp2", size=4, why="ranks exchange tokens for heads"),
    Row("qwen3_5", "cp2", packing=False, size=4),
    Row("qwen3_5 long memory", "cp2", tokens=512, lengths=AROUND_A_CHUNK, why="chunks of documents that ranks share"),
    Row("qwen3_5", "pp2", size=4),
    Row("qwen3_5", "pp2xvpp2", size=2),
    Row("qwen3_5", "dp2", size=4),
    Row("qwen3_5_moe", "tp2+sp", size=4),
    Row("qwen3_5_moe", "dp2xep2", size=4),
    Row("qwen3_5_moe", "cp2", packing=False, size=4),
    Row("qwen3_5_moe", "pp2", size=4),
)

CROSSES = (
    Row("llama value head", "tp2+sp", size=4, recompute="selective"),
    Row("mixtral", "dp2xep2", packing=False, size=4, recompute="full"),
    Row("glm4_moe", "cp2", packing=False, size=4),
    Row("gpt_oss", "cp2", size=4),
    Row("qwen2 window", "pp2", size=4),
    Row("deepseek_v3 yarn", "pp2", size=4),
)
"""What goes together in no other row of CI: windows, sinks, rotations, recompute and padding with layouts."""

FOUR_PROCESSES = (
    Row("llama", "tp4+sp", size=4, why="two key/value heads on four ranks; vocabulary of 131"),
    Row("llama", "pp4", size=2),
    Row("llama", "cp4", size=4),
    Row("llama", "tp2xpp2", size=4),
    Row("llama 5 layers", "pp4", size=2, packing=False, why="uneven pipeline"),
    Row("llama tied", "pp4", size=2, why="tied embeddings on the first and last of more than two stages"),
    Row("llama", "dp4", size=1, sequences=3, why="a rank without any sequence"),
    Row("mixtral", "tp2+spxdp2xep2xetp2", size=4),
    Row("qwen3_moe", "pp2xdp2xep2", size=4),
    Row("qwen3_5", "tp2+spxcp2", size=4, why="heads split twice"),
    Row("qwen3_5_moe", "tp2+spxcp2", size=4),
)

EIGHT_PROCESSES = (
    Row("llama tied", "tp2+spxcp2xpp2", size=4),
    Row("llama", "tp2xpp2xdp2", size=2),
)

_SEEN = {MODELS[row.model][0] for row in ONE_PROCESS}
NEW_FAMILIES = tuple(Row(family, size=4) for family in tiny.FAMILIES if family not in _SEEN)
"""A family that no row above has yet: it is one entry of tests/engine/tiny.py."""

ROWS = ONE_PROCESS + NEW_FAMILIES + TWO_PROCESSES + CROSSES + FOUR_PROCESSES + EIGHT_PROCESSES

NIGHTLY_ROWS = (
    Row("deepseek_v3", "tp2+spxpp2xdp2xep2", size=2),
    Row("olmoe", "tp4+sp", size=4, why="key heads that two ranks share"),
    Row("glm4_moe", "tp2+spxdp2xep2", size=4),
    Row("llama", "tp2", tokens=64, recompute="selective"),
    Row("qwen2", "pp2xvpp2", size=2, packing=False, recompute="full"),
    Row("mixtral", "tp2+sp", tokens=64, recompute="full"),
    Row("qwen3_moe", "cp2xep2", size=4, why="experts split over context-parallel ranks"),
    Row("llama", "tp4", packing=False, size=8),
    Row("llama", "cp2xdp2", size=1, sequences=3),
    Row("llama", "tp2+spxcp2", tokens=48, why="sequences shorter than 2*cp*tp"),
    Row("llama", "tp2+spxpp2xvpp2", size=2),
    Row("llama tied", "tp4+sp", size=4),
    Row("llama tied", "tp2+spxpp2", packing=False, size=2),
    Row("llama 7 layers tied", "pp2xvpp2", size=2, why="uneven pipeline with two chunks a stage"),
    Row("llama 7 layers tied", "pp4", size=4, why="uneven pipeline"),
    Row("llama tied value head", "tp2+spxpp2", size=4),
    Row("llama value head", "cp2xpp2", size=4),
    Row("mistral", "cp4", size=4),
    Row("mistral", "tp2+spxcp2", packing=False, size=4),
    Row("qwen2 window", "cp2xpp2", size=4),
    Row("qwen3", "tp2+spxpp2", size=4),
    Row("qwen3", "tp4", size=4, why="a norm on key heads that two ranks share"),
    Row("qwen3", "tp4+sp", packing=False, size=4, why="a norm on key heads that two ranks share"),
    Row("llama", "cp2xpp2", size=1, one_token=True, why="micro-batches that train nothing"),
    Row("mixtral", "dp4xep4", size=1),
    Row("mixtral", "tp2+spxpp2", size=4),
    Row("qwen3_moe", "dp4xep2", size=2, why="two replicas of each expert"),
    Row("qwen3_moe", "tp2+spxdp2xep4", size=4, why="experts split over tp x dp"),
    Row("qwen3_moe", "pp4", size=2),
    Row("llama", "tp2+spxcp2xpp2", packing=False, size=4),
    Row("llama", "pp2xvpp2xdp2xcp2", size=2),
    Row("qwen3_moe", "tp2+spxpp2xdp2xep2", size=2),
    Row("mixtral", "tp2+spxcp2xdp2xep4xetp2", size=4),
    Row("qwen3_5 long memory", tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5", tokens=512, lengths=TWENTY),
    Row("qwen3_5 long memory", packing=False, tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5 long memory", "tp2+sp", tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5 long memory", "cp2", tokens=2048, lengths=(1000, 1, 130)),
    Row("qwen3_5_moe long memory", tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5_moe long memory", "cp2", packing=False, tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5_moe long memory", "tp2+sp", tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5", "tp4", size=4, why="key heads of attention that two ranks share, with a gate beside the queries"),
    Row("qwen3_5", "tp4+sp", packing=False, size=8),
    Row("qwen3_5", "pp4", size=2),
    Row("qwen3_5", "cp4", size=4),
    Row("qwen3_5", "dp4", size=1, sequences=3, why="a rank without any sequence"),
    Row("qwen3_5", "tp2xpp2", packing=False, size=4),
    Row("qwen3_5", "cp2xpp2", tokens=48),
    Row("qwen3_5", "tp2+spxpp2xvpp2", size=2),
    Row("qwen3_5", "tp2+spxcp2", packing=False, size=4, recompute="full"),
    Row("qwen3_5", "tp2+spxcp2xpp2", size=4, recompute="selective"),
    Row("qwen3_5_moe", "tp2+spxetp1", size=4),
    Row("qwen3_5_moe", "dp2xetp2", packing=False, size=4),
    Row("qwen3_5_moe", "cp2xep2", size=4, why="experts split over context-parallel ranks"),
    Row("qwen3_5_moe", "dp4xep4", size=1),
    Row("qwen3_5_moe", "tp2+spxpp2", packing=False, size=4),
    Row("qwen3_5_moe", "pp2xdp2xep2", size=4),
    Row("qwen3_5_moe", "tp2+spxdp2xep2xetp2", size=4, recompute="full"),
)


def first_rows(rows: Sequence[Row]) -> list[Row]:
    """Of rows on one or two processes the first of each model, layout and selection of adapters, and those where a rank has no
    sequence; of wider ones the first on four. More of them take as long as all others together."""
    found = [next(row for row in rows if row.world_size == 4)]
    for row in (row for row in rows if row.world_size <= 2):
        seen = [{getattr(other, field) for other in found} for field in ("model", "layout", "lora")]
        new = any(value not in known for value, known in zip((row.model, row.layout, row.lora), seen, strict=True))
        if new or row.sequences == 3:
            found.append(row)
    return found


OPTIONS = ("model", "layout", "lora", "recompute", "recompute_every", "one_token", "sequences", "lengths", "fsdp")


def next_rows(rows: Sequence[Row]) -> list[Row]:
    """Of the rows that are not among the first: each with an option that no row before it has."""
    seen = {(name, getattr(row, name)) for row in first_rows(rows) for name in OPTIONS}
    chosen = []
    for row in (row for row in rows if row not in first_rows(rows)):
        options = {(name, getattr(row, name)) for name in OPTIONS}
        if not options <= seen:
            chosen.append(row)
        seen |= options
    return chosen


def _fsdp(*rows: Row) -> tuple[Row, ...]:
    return tuple(dataclasses.replace(row, backend="fsdp") for row in rows)


FSDP_ROWS = _fsdp(
    Row("qwen3_5 long memory", tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5_moe", size=4, packing=False),
    Row("qwen3_5", "cp2", size=4, why="ranks exchange tokens for heads"),
    Row("qwen3_5_moe", "dp2", size=4),
    Row("qwen3_5", "cp2", packing=False, size=4),
    Row("llama", size=4, packing=False),
    Row("llama tied", size=8),
    Row("llama value head", size=4),
    Row("llama3 rope", tokens=64),
    Row("mistral", size=2),
    Row("qwen2 window", tokens=64, packing=False),
    Row("qwen3", tokens=64, recompute="full"),
    Row("qwen3_moe", size=4),
    Row("mixtral", tokens=64),
    Row("qwen2_moe window", size=4, why="attention whose function is not told of the window"),
    Row("llama", "dp2", size=2),
    Row("llama", "dp2", size=1, sequences=3, why="a rank with an empty micro-batch"),
    Row("llama tied", "dp2", tokens=64, packing=False, recompute="full"),
    Row("llama tied value head", "dp2", size=4),
    Row("mistral", "dp2", size=4, packing=False),
    Row("qwen2", "dp2", size=1),
    Row("qwen3_moe step 2", "dp2", size=2),
    Row("mixtral", "dp2", size=4, packing=False),
    Row("llama 5 layers", "dp4", tokens=48),
    Row("llama", "dp4", size=1, sequences=3, why="a rank without any sequence"),
    Row("qwen2", "dp4", size=2, packing=False),
    Row("qwen3 tied", "dp4", size=2, fsdp=FSDPConfig(defer_sync=True)),
    Row("qwen3_moe", "dp4", size=1),
    Row("llama", "dp4", size=1, sequences=3, fsdp=FSDPConfig(replicate=2, defer_sync=True)),
    Row("llama tied", "dp4", packing=False, tokens=64, recompute="full", fsdp=FSDPConfig(replicate=2)),
    Row(
        "mixtral",
        "dp4",
        size=1,
        sequences=3,
        fsdp=FSDPConfig(replicate=4),
        why="copies alone; a rank without a sequence",
    ),
    Row(
        "llama 5 layers",
        "dp2",
        size=4,
        recompute="full",
        recompute_every=2,
        fsdp=FSDPConfig(reshard_after_forward=False),
    ),
    Row("gemma2", "dp4", size=2, fsdp=FSDPConfig(replicate=2)),
    Row("deepseek_v3", size=4, why="a router bias, which is a buffer"),
    Row("glm4_moe", "dp2", size=4),
    Row("gpt_oss", size=4, why="attention sinks"),
    Row("gpt_oss", "dp2", size=4, packing=False),
    Row("gemma2", size=4, why="no table; soft capping of scores and of logits, windows"),
    Row("gemma2 tied", "dp2", size=4, packing=False),
    Row("granite", "dp2", tokens=64, why="no table; logits are scaled"),
    Row("gemma2 value head", size=4, packing=False),
    Row("gpt2 tied value head", "dp2", size=4),
    Row("gpt2 tied", "dp2", size=4, why="no table; learned positions, other names, biases everywhere"),
    Row("phi", size=4, why="no table; the output layer has a bias"),
    Row("granitemoe", "dp2", size=4, why="no table; experts stacked in the files"),
    Row("minimax_m2", "dp2", size=4, why="no table; experts apart in the files, a router bias, norms over heads"),
    Row("ernie4_5_moe", "dp2", size=4, why="no table; a router bias that is a parameter without a gradient"),
    Row("bloom tied", size=4, packing=False, why="no table; attention of its own, ALiBi"),
    Row("llama", "cp2", size=4, why="sequences of 23 and 1 tokens, which two ranks do not divide"),
    Row("llama", "cp2", size=2, sequences=3, packing=False, why="a micro-batch of one sequence of one token"),
    Row("llama", "cp2", size=4, one_token=True, why="trap 4: the token lies on one rank of two"),
    Row("llama tied value head", "cp2", size=4),
    Row("qwen2 window", "cp2", tokens=64, recompute="full", why="the window crosses the ranks' places"),
    Row("qwen3 three kv heads", "cp2", size=4, why="two ranks share a key head"),
    Row("mixtral", "cp2", size=4),
    Row("gpt_oss", "cp2", size=4, why="sinks of the heads that a rank has inside attention"),
    Row("gemma2", "cp2", size=4, packing=False, why="no table; windows and soft capping"),
    Row("llama", "cp4", size=4, why="two key/value heads on four ranks"),
    Row("qwen2 window", "cp4", size=4, packing=False),
    Row("llama", "cp2xdp2", size=1, sequences=3, why="a group whose two ranks have no sequence"),
    Row("llama dynamic rope", tokens=64, recompute="full", why="each sequence by the angles of its own length"),
    Row("llama dynamic rope", "cp2", size=4, packing=False, why="no rank has the end of all sequences"),
    Row("phi3 long rope", size=4, packing=False, why="no table; sequences of up to 10 tokens, and above"),
    Row("phi3 long rope", "cp2", size=4),
    Row("gpt2 23 positions tied", "cp2", size=4, packing=False, why="padded to 24 places"),
)

FSDP_NIGHTLY_ROWS = _fsdp(
    Row("qwen3_5 long memory", "cp2", tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5 long memory", "cp2", packing=False, tokens=512, lengths=AROUND_A_CHUNK),
    Row("qwen3_5", "dp2", size=1, sequences=3, why="a rank with an empty micro-batch"),
    Row("llama", size=4, fsdp=FSDPConfig(compile=True)),
    Row("gemma2", "dp2", size=4, packing=False, recompute="full", recompute_every=2, fsdp=FSDPConfig(compile=True)),
    Row("qwen3_moe", "dp4", size=4, fsdp=FSDPConfig(replicate=2, compile=True)),
    Row("deepseek_v3", "cp2", size=4, why="keys and values of unequal sizes"),
    Row("gpt2 tied", "cp2", size=4, why="learned positions"),
    Row("gemma2 value head", "cp4", size=4),
    Row("llama", "cp2", size=8, packing=False, why="one micro-batch"),
    Row("mistral", "cp2", size=2, packing=False),
    Row("qwen3_moe", "cp2xdp2", size=2),
    Row("llama", "cp4", size=1, one_token=True, packing=False, why="micro-batches that train nothing"),
    Row("llama", "cp2xdp2", size=4, one_token=True, why="trap 4: one rank of four has something that trains"),
    Row("llama3 rope", "cp4", tokens=48, recompute="full"),
    Row("llama value head", "cp4", size=2, packing=False),
    Row("llama tied", "cp2xdp2", size=4, packing=False),
    Row("mistral", "cp4", size=4, why="a window of 5, of sequences whose shares are of 6"),
    Row("olmoe", "cp2", size=4, why="a norm over all heads"),
    Row("qwen2_moe window", "cp2xdp2", tokens=64, packing=False),
    Row("mixtral window", "cp4", tokens=64),
    Row("llama", "cp2xdp2", size=4, fsdp=FSDPConfig(replicate=2)),
    Row("llama", "cp4", tokens=64, fsdp=FSDPConfig(replicate=2), why="a group that spans copies"),
    Row("qwen3", "cp2", size=4, recompute="full", recompute_every=2, fsdp=FSDPConfig(compile=True)),
    Row("llama", "dp4", size=2, packing=False, fsdp=FSDPConfig(replicate=2)),
    Row("ernie4_5_moe tied", size=4, packing=False),
    Row("ernie4_5_moe", "cp2", size=4),
    Row("qwen3_moe", "dp4", size=1, fsdp=FSDPConfig(defer_sync=True)),
    Row("llama", "cp2xdp2", size=2, recompute="full", fsdp=FSDPConfig(replicate=2, defer_sync=True)),
)

# adapters in place of weights: each starts at random
LORA_ROWS = (
    Row("llama", size=4, lora="all"),
    Row("llama", size=8, packing=False, lora="q v"),
    Row("qwen3", tokens=64, lora="k up", recompute="full"),
    Row("llama", size=4, lora="rslora", recompute="selective"),
    Row("qwen2_moe", size=4, lora="all"),
    Row("llama", "tp2", size=4, lora="all"),
    Row("llama tied", "tp2+sp", size=4, lora="all"),
    Row("llama", "tp2+sp", size=2, packing=False, recompute="full", lora="k up"),
    Row("llama tied", "pp2", size=2, lora="all"),
    Row("llama", "pp2", size=2, lora="last layer", why="a pipeline stage where nothing trains"),
    Row("qwen3_5", "cp2", size=4, lora="all"),
    Row("qwen3_moe", "dp2xep2", size=4, lora="all"),
    Row("qwen3_5", "tp2+sp", size=4, lora="all", why="four adapters of one linear, whose rows take turns by key head"),
)
FSDP_LORA_ROWS = _fsdp(
    Row("llama", "cp2", size=4, lora="all"),
    Row("llama tied", "cp2xdp2", tokens=64, packing=False, lora="q v"),
    Row("qwen3_moe", "dp4", size=2, lora="all", fsdp=FSDPConfig(replicate=2)),
    Row("llama", "cp2xdp2", size=2, lora="all", recompute="full", recompute_every=2, fsdp=FSDPConfig(replicate=2)),
    Row("qwen3_5", "cp2", size=4, lora="all"),
)
FSDP_NIGHTLY_LORA_ROWS = _fsdp(
    Row("llama", "cp4", size=4, lora="all"),
    Row("llama", "dp4", size=2, lora="all"),
    Row("llama", "dp4", size=2, packing=False, lora="all", fsdp=FSDPConfig(replicate=2)),
    Row("ernie4_5_moe", "dp2", size=4, lora="q v", why="no table; a parameter that the model itself freezes"),
)
NIGHTLY_LORA_ROWS = (
    Row("deepseek_v3", size=4, lora="all"),
    Row("llama", "pp2xvpp2", size=2, recompute="full", lora="last layer"),
    Row("llama", "cp2", size=4, lora="all"),
    Row("qwen3_5", "tp2", size=4, lora="all"),
    Row("qwen3_5", "pp2", size=4, lora="all"),
    Row("qwen3_5_moe", "tp2+spxdp2xep2", size=4, lora="all"),
    Row("llama", "tp4", size=4, lora="all", why="a key head that two ranks share"),
    Row("llama", "tp4+sp", size=4, lora="k up", why="a key head that two ranks share"),
    Row("llama value head", "tp2+sp", size=4, lora="all"),
    Row("llama tied value head", "pp2", size=4, lora="q v"),
    Row("qwen3_moe", "tp2+sp", size=4, lora="all"),
    Row("qwen3_moe", "tp2+spxdp2xep2", size=4, lora="all"),
    Row("mixtral", "tp2+spxdp2xep2xetp2", size=4, lora="all"),
    Row("mixtral", "dp2xetp2", size=4, lora="all", why="experts split over data-parallel ranks"),
    Row("mixtral", "tp2+spxetp1", size=4, lora="all", why="experts whole on each tensor-parallel rank"),
    Row("deepseek_v3", "tp2+spxdp2xep2", size=4, lora="all"),
    Row("deepseek_v3 yarn", "tp2+sp", size=4, lora="all"),
    Row("gpt_oss", "dp2xep2", size=4, lora="stacks", why="experts whose gate and up take turns in the file"),
    Row("qwen3_moe", "tp2+sp", size=4, lora="stacks", why="one adapter of gate and up over ranks that share an expert"),
    Row("qwen3_moe", "cp2xep2", size=4, lora="all"),
    Row("qwen3_moe", "dp2xep2", size=4, lora="experts", why="nothing trains but experts"),
    Row("qwen3_moe", "dp2xep2", size=4, lora="q v", why="no expert trains"),
    Row("qwen3_moe", "pp2xdp2xep2", size=2, lora="all"),
    Row("llama", "dp2", size=1, sequences=3, lora="all", why="a rank with an empty micro-batch"),
)

EXTERNAL_ROWS = tuple(
    dataclasses.replace(row, backend=EXTERNAL)
    for row in (
        Row("llama tied", size=4, packing=False),
        Row("qwen2 window", tokens=64),
        Row("llama", "dp2", size=1, sequences=3, why="a rank with an empty micro-batch"),
        Row("llama tied value head", "dp2", size=4),
        Row("mixtral", "dp2", tokens=64),
        Row("llama", "dp4", size=1, sequences=3, why="a rank without any sequence"),
    )
)
"""An engine of another package: that of tests/engine/external, or the one that tests.engine.suite is asked to test."""

ALL = (
    *ROWS, *NIGHTLY_ROWS, *FSDP_ROWS, *FSDP_NIGHTLY_ROWS, *LORA_ROWS, *FSDP_LORA_ROWS, *FSDP_NIGHTLY_LORA_ROWS,
    *NIGHTLY_LORA_ROWS, *EXTERNAL_ROWS,
)  # fmt: skip

OVER_NCCL = {
    "llama": {"tp2xpp2", "cp2xdp2"},
    "mixtral": {"dp4xep4", "tp2+spxpp2"},
    "qwen3_moe": {"pp2", "pp2xdp2xep2"},
    "deepseek_v3": {"tp2+sp", "dp2xep2", "cp2", "tp2+spxpp2xdp2xep2"},
    "deepseek_v3 yarn": {"pp2"},
    "gpt_oss": {"tp2+spxetp1", "dp2xep2", "cp2", "pp2"},
}
"""Model -> layouts that one GPU has not shown yet (docs/evidence/h100.md)."""

SEVERAL_GPUS = tuple(
    row for row in ALL if row.backend == "megatron" and row.lora is None and row.layout in OVER_NCCL.get(row.model, ())
)
