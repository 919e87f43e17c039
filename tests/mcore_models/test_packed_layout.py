"""What a micro-batch's layout hands transformer-engine: one padded tensor, in every layout and for an empty one."""

import dataclasses
import itertools

import pytest
import torch

from mrl.batch import make_batch
from mrl.mcore_models import cpu_stand_in
from mrl.parallel import ParallelDims

cpu_stand_in.prepare()

from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402

from mrl.engine.megatron.inputs import prepare  # noqa: E402
from mrl.mcore_models.attention import PackedLayout  # noqa: E402

LENGTHS = ((), (1,), (7, 1, 30), (4, 4))
LAYOUTS = ({}, {"tp": 2}, {"cp": 2}, {"cp": 3}, {"tp": 4, "cp": 2}, {"tp": 3})


def made(lengths, layout, packed=True):
    dims = ParallelDims(world_size=layout.get("tp", 1) * layout.get("cp", 1), **layout)
    batch = make_batch([list(range(1, 2 + n)) for n in lengths], [[1.0] * (1 + n) for n in lengths])
    return dims, [
        prepare(batch, dims, dims.coordinates(rank), packed=packed, device=torch.device("cpu"), thd=True)
        for rank in range(dims.world_size)
    ]


@pytest.mark.parametrize("lengths, layout, packed", list(itertools.product(LENGTHS, LAYOUTS, (True, False))))
def test_all_tokens_belong_to_a_sequence(lengths, layout, packed):
    dims, ranks = made(lengths, layout, packed)
    for inputs in ranks:
        given = inputs.layout
        names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
        assert {id(getattr(given, name)) for name in names} == {id(given.cu_seqlens_q)}
        fields = {field.name for field in dataclasses.fields(PackedSeqParams)}
        # transformer-engine before 2.18 compares tensors on the GPU where it is not told, and waits for it
        assert "pad_between_seqs" not in fields or given.pad_between_seqs is False
        starts = given.cu_seqlens_q
        assert starts.dtype == torch.int32 and starts[0] == 0
        # transformer-engine divides them by cp, and splits each into 2*cp segments
        assert starts[-1] == inputs.tokens.numel() * dims.cp
        sizes = starts.diff()
        assert (sizes > 0).all() and (dims.cp == 1 or (sizes % (2 * dims.cp) == 0).all())
        assert inputs.tokens.numel() % (dims.tp if dims.sp else 1) == 0
        # of the whole sequence: transformer-engine divides it by cp
        assert sizes.max() <= given.max_seqlen_q == given.max_seqlen_kv < sizes.max() + 64
        # a real token stands before its sequence's padding, and never sees it
        ends = torch.searchsorted(starts, inputs.places, right=True)
        assert len(inputs.places) == sum(lengths)
        within = inputs.places - starts[ends - 1]
        assert within.tolist() == [i for n in lengths for i in range(n)]


@pytest.mark.parametrize(
    "padded, sequences, longest",
    [((3, 5), 8, 8), ((300, 200, 12), 8, 512), ((300, 600), 8, 900), ((40,) * 8, 8, 256), ((40,) * 9, 16, 256)],
)
def test_layouts_of_a_bucket_have_one_shape(padded, sequences, longest):
    """The sequences behind the last are empty, and the longest is no longer than all positions."""
    for qkv_format, rounded in (("sbhd", longest), ("thd", -(-longest // 64) * 64)):
        layout = PackedLayout.for_sequences(padded, positions=torch.empty(0), qkv_format=qkv_format, fixed=True)
        starts = [*itertools.accumulate(padded, initial=0)]
        assert layout.cu_seqlens_q.tolist() == starts + [sum(padded)] * (sequences - len(padded))
        assert layout.max_seqlen_q == layout.max_seqlen_kv == rounded and layout.padded_lengths == padded
