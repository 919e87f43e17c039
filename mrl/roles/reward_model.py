"""A reward model: the value of a sequence's last token is the score of what the policy said.

Its tokens are the policy's where both have one tokenizer and chat template. Otherwise the conversation is rendered again by
the reward model's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from mrl.batch import make_batch
from mrl.converters.hf_config import read_hf_config
from mrl.data.encode import Encoder
from mrl.data.formats import Chat, Text
from mrl.data.tokenizer import same_tokenizer
from mrl.errors import ConfigError, DataError, RewardError
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Trajectory


class RewardModel:
    """Scores of trajectories, from the role `role` of `dispatch`.

    tokenizer: the reward model's. actor_tokenizer: the policy's, with the chat template that its prompts are rendered by.
    end_tokens: what ends a completion of the policy, the usual one first; the tokenizer's EOS where none is given.
    """

    def __init__(
        self,
        dispatch: WorkerDispatch,
        tokenizer: PreTrainedTokenizerBase,
        *,
        actor_tokenizer: PreTrainedTokenizerBase,
        end_tokens: Sequence[int] = (),
        role: str = "reward",
    ) -> None:
        self.dispatch, self.role = dispatch, role
        self.takes_tokens = same_tokenizer(tokenizer, actor_tokenizer)
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        self.end_tokens = list(end_tokens) or eos
        self.encoder = Encoder(tokenizer, "all")
        path = dispatch.engines[role].config.model.path
        self.max_length = read_hf_config(path).get("max_position_embeddings")

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """One number for each trajectory, the same on every rank. Collective.

        Raises ConfigError (a sequence is longer than the model's positions, a conversation cannot be rendered again),
        DataError (the chat template refuses one) and RewardError (a score is not finite).
        """
        if not trajectories:
            return []
        sequences = [self.tokens(trajectory) for trajectory in trajectories]
        # a batch has no value for a sequence's last token, after which nothing is predicted: one more is that last one
        batch = make_batch([[*ids, 0] for ids in sequences], [[0.0] * (len(ids) + 1) for ids in sequences])
        values = self.dispatch.forward(self.role, batch)["values"]
        scores = values[batch.lengths.cumsum(0) - 1].tolist()
        for trajectory, score in zip(trajectories, scores, strict=True):
            if not math.isfinite(score):
                raise RewardError(
                    f"reward.model: {_name(trajectory)}: the score is {score}; use a model whose weights are finite, or float32"
                )
        return scores

    def tokens(self, trajectory: Trajectory) -> list[int]:
        """What the reward model reads of a trajectory."""
        ids = self._own_tokens(trajectory) if self.takes_tokens else self._rendered(trajectory)
        if self.max_length is not None and len(ids) > self.max_length:
            raise ConfigError(
                f"reward.model: {_name(trajectory)}: has {len(ids)} tokens, and the model has {self.max_length} positions; lower "
                "data.max_prompt_length or rollout.max_new_tokens, or use a reward model with more"
            )
        return ids

    def _own_tokens(self, trajectory: Trajectory) -> list[int]:
        """The policy's tokens; those that no end token ends (a length limit, a stop text) get one."""
        ended = trajectory.tokens[-1] in self.end_tokens
        return list(trajectory.tokens) if ended else [*trajectory.tokens, *self.end_tokens[:1]]

    def _rendered(self, trajectory: Trajectory) -> list[int]:
        """Prompt and answer through the reward model's chat template; text is joined as it is where it has none."""
        content, text = trajectory.prompt.content, trajectory.text
        if trajectory.turns > 1:
            raise ConfigError(
                f"reward.model: {_name(trajectory)}: has {trajectory.turns} turns, which a reward model with another tokenizer or "
                "chat template than the actor's cannot be given; use one with the actor's, or a reward function"
            )
        if not self.encoder.has_template and not isinstance(content, str):
            raise ConfigError(
                f"reward.model: {_name(trajectory)}: the prompt is a conversation, and the reward model's tokenizer has no chat "
                "template; use a reward model with one, or prompts of plain text"
            )
        if self.encoder.has_template:
            asked = [{"role": "user", "content": content}] if isinstance(content, str) else content
            row = Chat([*asked, {"role": "assistant", "content": text}], given=len(asked))
        else:
            row = Text(content + text)
        try:
            return self.encoder.encode(row).ids
        except DataError as error:
            raise DataError(f"reward.model: {_name(trajectory)}: {error}") from error


def _name(trajectory: Trajectory) -> str:
    return f"{trajectory.prompt.where}, sample {trajectory.sample}"
