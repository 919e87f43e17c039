"""The prompts of `mrl ppo`, as `mrl data show` asks for them."""

from __future__ import annotations

import dataclasses
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import PPOConfig, PromptsConfig
from mrl.config.roles import teacher_names
from mrl.data.dataset import Part, RowDataset
from mrl.data.prompts import Prompt, PromptDataset, PromptSource
from mrl.weights.hf_config import vocab_size_of


@dataclasses.dataclass(frozen=True)
class PromptsTask:
    config: PPOConfig

    def of_data(self, data: PromptsConfig) -> PromptsTask:
        """Returns the same task on another section `data`."""
        return PromptsTask(dataclasses.replace(self.config, data=data))

    def source(self, dataset: RowDataset[Prompt]) -> PromptSource:
        """Returns the endless prompts of data.train."""
        return PromptSource(dataset, seed=self.config.seed, shuffle=self.config.data.shuffle)

    def dataset(
        self, tokenizer: PreTrainedTokenizerBase, folder: str, hf_config: dict[str, Any], part: Part
    ) -> PromptDataset:
        """Returns the prompts of data.train or data.eval."""
        names = teacher_names(self.config) if part == "train" else None
        return PromptDataset(
            self.config.data, tokenizer, part=part, vocab_size=vocab_size_of(hf_config), teachers=names
        )
