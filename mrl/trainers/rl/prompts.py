"""The prompts of `mrl ppo`, as `mrl data show` asks for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import PPOConfig
from mrl.converters.hf_config import vocab_size_of
from mrl.data.dataset import Part
from mrl.data.prompts import PromptDataset


@dataclasses.dataclass(frozen=True)
class PromptsTask:
    config: PPOConfig

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: dict[str, Any], part: Part
    ) -> PromptDataset:
        """Returns the prompts of data.train or data.eval."""
        return PromptDataset(self.config.data, tokenizer, part=part, vocab_size=vocab_size_of(hf_config))
