"""Weights, gradients and moments of a part on backend fsdp, exactly. Activations of its passes are not planned."""

from __future__ import annotations

from mrl.config.schema import RoleConfig
from mrl.engine.fsdp import precision
from mrl.engine.fsdp.shapes import shapes_of
from mrl.engine.megatron.meta import Buffer, RankFigures
from mrl.mcore_models.layer_spec import DTYPES
from mrl.parallel import ParallelDims
from mrl.weights.hf_config import read_hf_config


def figures(config: RoleConfig, dims: ParallelDims) -> RankFigures:
    """Returns what a rank holds; `chunks` is empty, as nothing is run.

    Weights that train are fp32, their own masters. A copy of the model lies on world_size / replicate ranks.
    """
    shapes, buffers = shapes_of(config)
    copies = config.engine.fsdp.replicate
    ranks = dims.world_size // copies
    trained = [shape for shape in shapes if shape.trains]
    elements = sum(shape.held(ranks) for shape in trained)
    frozen = sum(shape.held(ranks) * shape.itemsize for shape in shapes if not shape.trains)
    updated = tuple(sum(shape.updated(ranks, rank) for shape in trained) for rank in range(ranks)) * copies
    layers = tuple(range((read_hf_config(config.model.path).get("num_hidden_layers")) or 1))
    return RankFigures(
        coords=dims.coordinates(0), parameters=frozen + 4 * elements, trained_parameters=elements, buffers=buffers,
        grad_buffers=(Buffer(False, ranks, elements, 4, updated),) if trained else (), chunks=(), layers=(layers,),
        dtype_bytes=DTYPES[config.model.dtype].itemsize,
    )  # fmt: skip


def gathered_bytes(config: RoleConfig) -> int:
    """Returns bytes of the whole model in the dtypes that it computes in."""
    return sum(shape.held(1) * shape.gathered for shape in shapes_of(config)[0])


def bytes_over_a_mini_batch(config: RoleConfig, dims: ParallelDims, gpu_memory: int) -> int:
    """Returns bytes of the weights that stay gathered over a mini-batch; 0 if blocks are gathered one at a time."""
    gathered, shards = gathered_bytes(config), dims.world_size // config.engine.fsdp.replicate
    if config.engine.fsdp.defer_sync or precision.stays_gathered(gathered, shards, gpu_memory):
        return gathered
    return 0


def trained_elements(config: RoleConfig) -> int:
    """Returns the elements of the whole model that train."""
    return sum(shape.held(1) for shape in shapes_of(config)[0] if shape.trains)
