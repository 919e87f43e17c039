"""Tiny vision-language models with random weights, and batches of sequences with and without images for them."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from mrl.batch import Batch, make_batch
from tests.data.pictures import TOKENS, save_processor

PATCH, MERGE, DEPTH = 4, 2, 2
PATCH_DIM = 3 * 2 * PATCH**2
VISION = {
    "depth": DEPTH,
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "temporal_patch_size": 2,
    "num_heads": 2,
    "initializer_range": 0.15,
}
# model_type: (fields of its vision_config, fields of its text_config)
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ({"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2}, {}),
    "qwen2_5_vl": (
        {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "window_size": 16, "fullatt_block_indexes": [1]}, {},
    ),
    "qwen3_vl": (
        {
            "hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 24, "num_position_embeddings": 16,
            "deepstack_visual_indexes": [0, 1],
        },
        {"head_dim": 8},
    ),
}  # fmt: skip


def make_vision_model(folder: str, model_type: str, *, tied: bool = False, seed: int = 0) -> str:
    """Saves a random fp32 model and its processor in `folder` and returns it. All weights are random, those of norms too."""
    tokenizer = save_processor(folder, patch=PATCH)
    of_vision, of_text = FAMILIES[model_type]
    text = {
        "vocab_size": len(tokenizer) + 4, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        "initializer_range": 0.15, "tie_word_embeddings": tied, "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": tokenizer.bos_token_id, "pad_token_id": None,
    }  # fmt: skip
    start, end, image, video = tokenizer.convert_tokens_to_ids(list(TOKENS))
    config = AutoConfig.for_model(
        model_type, text_config={**text, **of_text}, vision_config={**VISION, **of_vision}, tie_word_embeddings=tied,
        image_token_id=image, video_token_id=video, vision_start_token_id=start, vision_end_token_id=end,
    )  # fmt: skip
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2 or name.endswith("bias"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return folder


def image_batch(folder: str, *, images: tuple[int, ...] = (1, 0, 2, 0, 1, 1), seed: int = 0) -> Batch:
    """A global mini-batch of sequences with so many images each, of uneven sizes, with text and holes in the mask around them."""
    config = AutoConfig.from_pretrained(folder)
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows, masks, inputs = [], [], []
    for count in images:
        row = [rng.randrange(5, 300) for _ in range(rng.randint(2, 9))]
        grids = [[1, MERGE * rng.randint(1, 3), MERGE * rng.randint(1, 3)] for _ in range(count)]
        for _, height, width in grids:
            row += [config.vision_start_token_id, *[config.image_token_id] * (height * width // MERGE**2)]
            row += [config.vision_end_token_id, *[rng.randrange(5, 300) for _ in range(rng.randint(1, 6))]]
        rows.append([*row, rng.randrange(5, 300)])
        masks.append([float(token != config.image_token_id and rng.random() < 0.8) for token in rows[-1]])
        patches = sum(height * width for _, height, width in grids)
        pixels = torch.randn(patches, PATCH_DIM, generator=generator)
        inputs.append({"pixel_values": pixels, "image_grid_thw": torch.tensor(grids)} if count else {})
    masks[0][-1] = 1.0
    return make_batch(rows, masks, multi_modal_inputs=inputs)
