"""Images of a micro-batch in a vision-language model: their features, the tokens that take them, the positions.

The model's own parts do the work: `get_rope_index` says where tokens are, `get_image_features` is the vision tower.
They are put together here and not by the model's forward, because a rank may have a part of the tokens (Ulysses) or no
image.

Dimensions: `T` tokens of the micro-batch, `R` rows of which this rank has `L/C` places, `N` features of its images.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from mrl.batch import Batch

INPUTS = {"pixel_values", "image_grid_thw"}
"""What a sequence with images carries in `Batch.multi_modal_inputs`."""


@dataclasses.dataclass(frozen=True)
class Images:
    """All images of a micro-batch, and this rank's places that take their features."""

    pixel_values: Tensor  # [patches, dim]
    grid: Tensor  # [images, 3]
    feature: Tensor  # [R, L/C], the number of the feature that a place takes, from 1; 0 at a token of text


def image_tokens(hf: nn.Module, batch: Batch) -> Tensor:
    """Returns [T] bool: the tokens that a feature replaces.

    In a sequence without images the image token is one like any other, since a policy may have sampled it.
    """
    having = [bool(inputs) for inputs in batch.multi_modal_inputs] or [False] * batch.num_sequences
    having = torch.tensor(having, dtype=torch.bool)
    return (batch.tokens.cpu() == hf.config.image_token_id) & having.repeat_interleave(batch.lengths.cpu())


def positions(hf: nn.Module, batch: Batch) -> Tensor:
    """Returns [3, T] int64: the positions (time, height, width) of each token, each sequence from its own start."""
    if not batch.multi_modal_inputs:
        return batch.position_ids.cpu().expand(3, -1)
    lengths, parts = batch.lengths.tolist(), []
    split = zip(
        batch.tokens.cpu().split(lengths), image_tokens(hf, batch).split(lengths), batch.multi_modal_inputs, strict=True
    )
    for tokens, of_image, inputs in split:
        if not inputs:
            parts.append(torch.arange(len(tokens)).expand(3, -1))
            continue
        assert inputs.keys() == INPUTS, f"images are {sorted(inputs)}; the engine knows {sorted(INPUTS)}"
        grid = inputs["image_grid_thw"].cpu()
        takes = int(grid.prod(-1).sum()) // hf.model.visual.spatial_merge_size**2
        assert takes == of_image.sum(), f"{of_image.sum()} image tokens for images of {takes} features"
        # mm_token_type_ids and not the ids say what is an image: a sampled image token is text
        found, _ = hf.model.get_rope_index(tokens[None], mm_token_type_ids=of_image.int()[None], image_grid_thw=grid)
        parts.append(found[:, 0])
    return torch.cat(parts, dim=1)


def images_of(hf: nn.Module, batch: Batch, feature: Tensor, device: torch.device) -> Images:
    """Returns the images of a micro-batch; a blank one where it has none.

    Every rank runs the tower in every micro-batch, because gathering its weights and reducing their gradients takes
    all.
    """
    inputs = batch.joined_multi_modal_inputs
    if not inputs:
        side, patches = hf.model.visual.spatial_merge_size, hf.model.visual.patch_embed.proj
        dim = patches.in_channels * int(torch.tensor(patches.kernel_size).prod())
        inputs = {"pixel_values": torch.zeros(side**2, dim), "image_grid_thw": torch.tensor([[1, side, side]])}
    return Images(inputs["pixel_values"].to(device), inputs["image_grid_thw"].to(device), feature.to(device))


def embed_images(hf: nn.Module, tokens: Tensor, images: Images) -> dict[str, Any]:
    """Returns the language model's inputs in place of tokens [R, L/C]: embeddings, with features at image tokens.

    A rank without image tokens has the tower in its graph too, with gradients of zero.
    """
    found = hf.model.get_image_features(images.pixel_values, images.grid, return_dict=True)
    embeddings = hf.get_input_embeddings()(tokens)
    takes = images.feature > 0
    which = images.feature[takes] - 1
    features = torch.cat(tuple(found["pooler_output"])).to(embeddings.dtype)
    inputs = {"inputs_embeds": embeddings.masked_scatter(takes[..., None], features[which])}
    if deep := found.get("deepstack_features"):  # Qwen3-VL: features of blocks within the tower, for the first layers
        inputs["visual_pos_masks"] = takes
        inputs["deepstack_visual_embeds"] = [torch.cat(tuple(of_block))[which] for of_block in deep]
    return inputs
