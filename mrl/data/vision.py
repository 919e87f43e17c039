"""Conversations with images: all their tokens, and the model's inputs for their images.

A chat template writes one token for an image. The model's own processor (transformers) replaces it and makes the
tensors for the model; mrl computes nothing of that. The processor uses pillow, even if torchvision is installed, so
that an image is the same numbers on every machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from mrl.data.encode import Encoded
from mrl.data.files import BadRow
from mrl.data.formats import Chat, Pair, Text, Tokens
from mrl.data.images import Image
from mrl.errors import DataError, ModelError
from mrl.weights.hf_config import VISION_LANGUAGE, reads_images

TEXT_FIELDS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""What a processor gives for the text; all else is for the images."""


@dataclasses.dataclass(frozen=True)
class ImageRow:
    """A row's tokens and its images."""

    encoded: Encoded  # the tokens in full, none of an image's trained
    inputs: Mapping[str, Tensor]  # as `Batch.multi_modal_inputs` of one sequence


class Vision:
    """The processor of a vision-language model. placeholders: the ids of tokens that stand for images or videos."""

    def __init__(self, processor: ProcessorMixin) -> None:
        self._processor = processor
        self._chat_template = processor.chat_template
        self.image_token = processor.image_token
        self.image_token_id: int = processor.image_token_id
        self.placeholders = frozenset({processor.image_token_id, *processor.video_token_ids} - {None})

    def give_template(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Gives the tokenizer the processor's chat template, if it has one: the tokenizer's own may know no images."""
        if self._chat_template is not None:
            tokenizer.chat_template = self._chat_template

    def count(self, ids: Sequence[int]) -> int:
        """Returns the number of tokens that stand for images or videos."""
        return sum(token in self.placeholders for token in ids)

    def expand(self, encoded: Encoded, images: Sequence[Image], folder: str) -> ImageRow:
        """Returns the row, its image tokens replaced by those that each image takes. folder: of the data file.

        Raises BadRow, also where the chat template has not written one token for each image.
        """
        found = self.count(encoded.ids)
        if found != len(images):
            raise BadRow(
                f"has {found} image tokens ({self.image_token}) for {len(images)} images; keep the token out of texts, "
                "and name a template with parts of type image in data.chat_template"
            )
        if not images:
            return ImageRow(encoded, {})
        made = [self._process(image, image.open(folder)) for image in images]
        ids: list[int] = []
        mask: list[float] = []
        tokens_of = iter([tokens for tokens, _ in made])
        for token, trains in zip(encoded.ids, encoded.mask, strict=True):
            of_image = next(tokens_of) if token in self.placeholders else None
            ids += [token] if of_image is None else of_image
            mask += [trains] if of_image is None else [0] * len(of_image)
        inputs = {name: torch.cat([of_image[name] for _, of_image in made]) for name in made[0][1]}
        return ImageRow(Encoded(ids, mask), inputs)

    def read(self, image: Image) -> tuple[list[int], dict[str, Tensor]]:
        """Returns the tokens of an image, and the model's inputs for it, from its bytes. Raises BadRow."""
        return self._process(image, image.open(""))

    def _process(self, image: Image, picture: Any) -> tuple[list[int], dict[str, Tensor]]:
        """Returns the tokens of an image, and the model's inputs for it."""
        try:
            out = self._processor(text=[self.image_token], images=[picture], add_special_tokens=False)
        except (ValueError, TypeError, OSError) as e:
            raise BadRow(
                f"{image.where}: the model's processor refuses the image ({e}); make it larger or less narrow"
            ) from e
        inputs = {n: torch.as_tensor(np.asarray(value)) for n, value in out.items() if n not in TEXT_FIELDS}
        return list(out["input_ids"][0]), inputs


def check_text_alone(content: Chat | Pair | Text | Tokens) -> None:
    """Raises DataError or BadRow for content that a model of text alone does not read. The model may be the wrong
    one."""
    if not isinstance(content, Chat):
        return
    if content.images:
        raise DataError(
            f"{content.images[0].where} is an image, and the model reads text alone; set model.path to a "
            f"vision-language model ({', '.join(VISION_LANGUAGE)}), or leave out the rows with images"
        )
    for i, message in enumerate(content.messages):
        if isinstance(message["content"], list):
            raise BadRow(
                f"messages[{i}].content is a list of parts; the model reads text alone: join its text parts into one "
                "string"
            )


def load_vision(path: str, hf_config: Mapping[str, Any]) -> Vision | None:
    """Returns the processor in the model's folder; None where the model reads text alone. Raises ModelError.

    hf_config: as `read_hf_config` gives it.
    """
    if not reads_images(hf_config):
        return None
    kind: Any = PROCESSOR_MAPPING[CONFIG_MAPPING[hf_config["model_type"]]]

    class ImagesOnly(kind):
        """Without its processor of videos, which needs torchvision."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [name for name in super().get_attributes() if "video" not in name]

    try:
        return Vision(ImagesOnly.from_pretrained(path, backend="pil", trust_remote_code=False))
    except Exception as e:  # transformers has no common error for what a folder can have wrong
        raise ModelError(
            path,
            why=f"the processor of its images cannot be loaded ({type(e).__name__}: {e})",
            fix="get preprocessor_config.json and the tokenizer's files again, and install pillow",
        ) from e
