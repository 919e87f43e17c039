"""A reward model: the score that transformers' sequence classifier gives a conversation, as
`AutoModelForSequenceClassification`.

*What is read*: the messages, system prompt and answer included, through the reward model's own chat template, whatever
the policy's tokenizer and template are. Text without a template is joined as it is and ends with EOS.

*Which token's value is the score*: the last one that is not `pad_token_id` of config.json. That is the rule of
transformers 5 (modeling_layers.GenericForSequenceClassification), for padding on either side and for a sequence alone.
If EOS is also the padding and ends the text, it is the token before it. If a template ends a turn with "<|im_end|>\\n",
it is the newline.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.batch import make_batch
from mrl.data.encode import Encoder
from mrl.data.formats import Chat, Text
from mrl.data.scored import scored_token
from mrl.errors import ConfigError, DataError, RewardError
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Trajectory
from mrl.weights.hf_config import pad_token_of, read_hf_config


class RewardModel:
    """Scores of trajectories, from the role `reward` of `dispatch`.

    tokenizer: the reward model's. system: data.system, which stands before every prompt.
    """

    def __init__(
        self, dispatch: WorkerDispatch, tokenizer: PreTrainedTokenizerBase, *, system: str | None = None
    ) -> None:
        self.dispatch, self.system = dispatch, system
        self.encoder = Encoder(tokenizer, "all", as_rendered=True)
        hf_config = read_hf_config(dispatch.engines["reward"].config.model.path)
        self.max_length = hf_config.get("max_position_embeddings")
        self.pad_token_id = pad_token_of(hf_config)

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Returns one number for each trajectory, the same on every rank. Collective.

        Raises ConfigError (a sequence is longer than the model's positions, a conversation cannot be rendered),
        DataError (the chat template refuses one) and RewardError (a score is not finite).
        """
        if not trajectories:
            return []
        sequences = [self.tokens(trajectory) for trajectory in trajectories]
        # a batch has no value for a sequence's last token, after which nothing is predicted: one more is that last one
        batch = make_batch([[*ids, 0] for ids in sequences], [[0.0] * (len(ids) + 1) for ids in sequences])
        values = self.dispatch.forward("reward", batch)["values"]
        starts = batch.cu_seqlens.tolist()
        places = [start + scored_token(ids, self.pad_token_id) for start, ids in zip(starts, sequences, strict=False)]
        scores = values[places].tolist()
        for trajectory, score in zip(trajectories, scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(
                    "reward.model",
                    why=f"{_name(trajectory)}: the score is {score}",
                    fix="use a model whose weights are finite, or float32",
                )
        return scores

    def tokens(self, trajectory: Trajectory) -> list[int]:
        """Returns the tokens that the reward model reads of a trajectory.

        It reads as much of a truncated prompt as it has positions for.
        """
        ids = self._rendered(trajectory)
        if self.max_length is None or len(ids) <= self.max_length:
            return ids
        if trajectory.prompt.truncated:
            return ids[-self.max_length :]
        raise ConfigError(
            "reward.model",
            why=f"{_name(trajectory)}: has {len(ids)} tokens, and the model has {self.max_length} positions",
            fix="lower data.max_prompt_length or rollout.max_new_tokens, or use a reward model with more",
        )

    def _rendered(self, trajectory: Trajectory) -> list[int]:
        """Prompt and answer through the reward model's chat template; text is joined as it is where it has none."""
        asked = trajectory.prompt.conversation
        try:
            if self.encoder.has_template:
                return self.encoder.encode(self._conversation(trajectory)).ids
            if isinstance(asked, Chat) or len(asked.chat.messages) > 1 or self.system is not None:
                raise ConfigError(
                    "reward.model",
                    why=(
                        f"{_name(trajectory)}: the prompt is a conversation, and the reward model's tokenizer has no "
                        "chat template"
                    ),
                    fix="use a reward model with one, or prompts of plain text",
                )
            answers = [message["content"] for message in _answers(trajectory)]
            return self.encoder.encode(Text("".join([asked.plain, *answers]))).ids
        except DataError as error:
            raise DataError("reward.model", why=f"{_name(trajectory)}: {error}") from error

    def _conversation(self, trajectory: Trajectory) -> Chat:
        """Returns all messages up to the policy's last, with the prompt's tools and template arguments."""
        chat = trajectory.prompt.conversation.chat
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        messages = [*system, *chat.messages, *_answers(trajectory)]
        return Chat(messages, tools=chat.tools, template_kwargs=chat.template_kwargs)


def _answers(trajectory: Trajectory) -> list[dict[str, Any]]:
    """Returns the policy's turns, and between them what an environment answered; nothing after the last turn."""
    if trajectory.conversation is None and trajectory.turns == 1:
        return [{"role": "assistant", "content": trajectory.text}]
    if trajectory.conversation is None:
        why = f"{_name(trajectory)}: has {trajectory.turns} turns and was saved without its messages"
        raise ConfigError("reward.model", why=why, fix="sample it again")
    messages = [dict(message) for message in trajectory.conversation]
    last = max(i for i, message in enumerate(messages) if message["role"] == "assistant")
    return messages[: last + 1]


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.prompt.where}, sample {trajectory.sample}"
