"""A processor of a vision-language model with a tokenizer of its own, as the hub has them, and generated pictures."""

import base64
import io

import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil

from mrl.data.vision import Vision, load_vision
from mrl.weights.hf_config import read_hf_config
from tests.data.tiny_tokenizers import trained_bpe

TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
# As Qwen2.5-VL: a part of type image is one token between two others.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(trained_bpe(False)), bos_token="<s>", eos_token="<|im_end|>", pad_token="</s>",
        additional_special_tokens=list(TOKENS), chat_template=template,
    )  # fmt: skip


def save_processor(folder: str, *, patch: int = 4, least: int = 64, most: int = 1024) -> PreTrainedTokenizerFast:
    """Writes tokenizer and image processor into `folder`. An image has `least` to `most` pixels, and a token takes 4 patches."""
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(folder)
    Qwen2VLImageProcessorPil(
        patch_size=patch, merge_size=2, temporal_patch_size=2, min_pixels=least, max_pixels=most
    ).save_pretrained(folder)
    return tokenizer


def make_vision(folder: str, model_type: str = "qwen2_5_vl") -> tuple[PreTrainedTokenizerFast, Vision]:
    """The tokenizer and the processor of a folder that is made here, without a model."""
    AutoConfig.for_model(model_type).save_pretrained(folder)
    tokenizer = save_processor(folder)
    vision = load_vision(str(folder), read_hf_config(folder))
    assert vision is not None
    return tokenizer, vision


def picture(seed: int = 0, width: int = 20, height: int = 12) -> Image.Image:
    """A picture of noise."""
    pixels = torch.randint(0, 256, (height, width, 3), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    return Image.fromarray(pixels.numpy())


def png(seed: int = 0, width: int = 20, height: int = 12) -> bytes:
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


def png_text(seed: int = 0, width: int = 20, height: int = 12) -> str:
    """The bytes in base64."""
    return base64.b64encode(png(seed, width, height)).decode()
