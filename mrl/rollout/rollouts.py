"""Turns prompts into trajectories: single completions, or conversations of several turns with a user's environment.

A trajectory's tokens are only ever appended to. The policy's tokens stay as they were sampled, with mask 1, the end
token among them. The environment's follow with mask 0. All is the same on every rank.

Conversations are divided into fixed parts. In each round of a part, its live conversations are sampled together, one
turn each, and answered together. While the environments of one part answer, another is sampled. So which sequences
share a forward, and the last bits of their log-probs, does not depend on how long an environment takes.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import RolloutConfig
from mrl.data.formats import Chat
from mrl.data.prompts import Prompt, TurnEncoder
from mrl.engine.base import Completion
from mrl.engine.collective import OnMain
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.errors import DataError, RewardError
from mrl.rollout.base import (
    SERIES_NAMES,
    Limit,
    Sampler,
    SampleRequest,
    Trajectory,
    TrajectoryRequest,
    TrajectorySource,
)
from mrl.rollout.environment import KEY, Content, Environments, EnvironmentStep, load_environment

ROUND, SERIES = 2**32, 2**48
"""How far apart, in the keys of the noise, the sample numbers are of rounds of dynamic sampling and of series."""


@dataclasses.dataclass(eq=False)
class _Conversation:
    """A trajectory in the making, of one turn or several."""

    number: int
    prompt: Prompt
    sample: int
    key: SamplingKey
    tokens: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    turns: list[str] = dataclasses.field(default_factory=list)  # the policy's texts
    messages: list[dict[str, Any]] | None = None  # turns and observations, where there is an environment
    chat: Chat | None = None  # the prompt as a conversation, for its tools and template arguments
    completed: bool = False
    done: bool = True
    full: bool = False  # whether the last observation leaves no room for a turn
    reward: float | None = None

    def append(self, tokens: Sequence[int], *, mask: int, log_probs: Sequence[float] | None = None) -> None:
        self.tokens += tokens
        self.mask += [mask] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs

    @property
    def new_tokens(self) -> int:
        """The number of tokens after the prompt, the environment's included."""
        return len(self.tokens) - len(self.prompt.tokens)

    @property
    def cut_by(self) -> Limit | None:
        if self.completed and self.done:
            return None
        return "turns" if self.completed and not self.full else "tokens"

    def trajectory(self, weights: int | None) -> Trajectory:
        return Trajectory(
            prompt=self.prompt,
            sample=self.sample,
            tokens=self.tokens,
            mask=self.mask,
            log_probs=self.log_probs,
            text="\n\n".join(self.turns),
            finished=self.cut_by is None,
            turns=len(self.turns),
            reward=self.reward,
            conversation=self.messages,
            cut_by=self.cut_by,
            weights=weights,
        )


class Rollouts(TrajectorySource):
    """Samples trajectories as the config says.

    - end_tokens: of the model (`mrl.rollout.stops.end_tokens`), besides rollout.stop_tokens
    - system, max_prompt_length: of `data`, for prompts that an environment gives

    Raises ConfigError if the environment cannot be loaded.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        seed: int,
        end_tokens: Sequence[int],
        system: str | None = None,
        max_prompt_length: int | None = None,
        on_main: OnMain = lambda fn: fn(),
    ) -> None:
        self._sampler, self._tokenizer, self._config, self._seed = sampler, tokenizer, config, seed
        self._end_tokens = frozenset(end_tokens)
        self._max_prompt_length, self._on_main = max_prompt_length, on_main
        self._environments: Environments | None = None  # on the main process
        spec = config.environment
        if spec is not None:
            self._encoder = TurnEncoder(tokenizer, system)
            on_main(lambda: self._make_environments(spec))

    def close(self) -> None:
        """Ends the threads of the environments."""
        if self._environments is not None:
            self._environments.close()

    @property
    def exact(self) -> bool:
        """Returns `Sampler.exact`."""
        return self._sampler.exact

    def answer(self, prompts: Sequence[Prompt], asked: TrajectoryRequest) -> list[Trajectory]:
        """Samples as `TrajectorySource.sample` says.

        Noise follows from (seed, step, the prompt's index, sample), the series, and the round of dynamic sampling. A
        prompt that is there twice gets other samples each time. Raises RewardError for what an environment does wrong.
        """
        conversations = self._begin(prompts, asked)
        if self._config.environment is not None:
            self._converse(conversations, asked.greedy)
        else:
            self._sample_turn(self._sampler, conversations, asked.greedy)
        return [conversation.trajectory(asked.made) for conversation in conversations]

    def _begin(self, prompts: Sequence[Prompt], asked: TrajectoryRequest) -> list[_Conversation]:
        """Makes the conversations of a rollout."""
        offset = SERIES * SERIES_NAMES.index(asked.series) + ROUND * asked.round  # of the sample numbers in the keys
        conversations: list[_Conversation] = []
        seen = collections.Counter[int]()
        for prompt in prompts:
            first = offset + asked.samples * seen[prompt.index]
            seen[prompt.index] += 1
            for i in range(asked.samples):
                key = SamplingKey(self._seed, asked.step, prompt.index, first + i)
                conversations.append(_Conversation(len(conversations), prompt, i, key))
        if self._config.environment is not None:
            given = self._on_main(lambda: self._reset([conversation.prompt for conversation in conversations]))
            for conversation, content in zip(conversations, given, strict=True):
                self._set_prompt(conversation, content)
                conversation.messages = []
        for conversation in conversations:
            conversation.append(conversation.prompt.tokens, mask=0)
        return conversations

    def _sample_turn(self, sampler: Sampler, conversations: Sequence[_Conversation], greedy: bool) -> None:
        completions = sampler.sample([self._request(conversation, greedy) for conversation in conversations])
        for conversation, completion in zip(conversations, completions, strict=True):
            self._add_turn(conversation, completion)

    def _request(self, conversation: _Conversation, greedy: bool) -> SampleRequest:
        config = self._config
        sampling = SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)
        left = config.max_new_tokens - conversation.new_tokens
        return SampleRequest(
            tokens=list(conversation.tokens),
            max_new_tokens=min(left, left if config.max_turn_tokens is None else config.max_turn_tokens),
            sampling=GREEDY if greedy else sampling,
            key=conversation.key,
            stop_tokens=sorted(self._end_tokens | set(config.stop_tokens)),
            stop=config.stop,
        )

    def _add_turn(self, conversation: _Conversation, completion: Completion) -> None:
        """Appends a turn of the policy."""
        assert completion.tokens, f"row {conversation.prompt.where}: the sampler gave a completion without tokens"
        conversation.append(completion.tokens, mask=1, log_probs=completion.log_probs)
        conversation.completed = completion.finished
        ends = completion.tokens[-1] in self._end_tokens
        words = completion.tokens[: -1 if ends else None]
        text = self._tokenizer.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        conversation.turns.append(text)
        if conversation.messages is not None:
            conversation.messages.append({"role": "assistant", "content": text})

    # --------------------------------------------------------------------------------------- with an environment

    def _make_environments(self, spec: str) -> None:
        timeout_s = self._config.environment_timeout_s
        self._environments = Environments(load_environment(spec), spec, timeout_s=timeout_s)

    def _reset(self, prompts: Sequence[Prompt]) -> list[Content | None]:
        assert self._environments is not None, "environments are on the main process"
        return self._environments.reset(prompts)

    def _set_prompt(self, conversation: _Conversation, given: Content | None) -> None:
        """Sets the conversation's first prompt: the row's, or the environment's instead."""
        try:
            prompt = conversation.prompt
            asked = prompt.conversation if given is None else prompt.with_conversation(given)
            conversation.chat = asked.chat
            if given is None:
                return
            tokens = self._encoder.prompt(asked)
        except DataError as error:
            raise self._error(conversation, f"reset gave a prompt that cannot be used: {error}") from None
        if self._max_prompt_length is not None and len(tokens) > self._max_prompt_length:
            raise self._error(
                conversation,
                f"reset gave a prompt of {len(tokens)} tokens, and data.max_prompt_length is "
                f"{self._max_prompt_length}; raise it, or give a shorter one",
            )
        conversation.prompt = dataclasses.replace(prompt, content=given, tokens=tokens, truncated=False)

    def _converse(self, conversations: Sequence[_Conversation], greedy: bool) -> None:
        """Samples and answers turns until all conversations have ended."""
        count, parts = len(conversations), min(self._config.environment_parts, len(conversations))
        live = {i: list(conversations[count * i // parts : count * (i + 1) // parts]) for i in range(parts)}
        samplers = self._sampler.for_conversations(parts)
        ready = collections.deque(live)
        while live:
            part = ready.popleft() if ready else None
            if part is not None:
                self._sample_turn(samplers[part], live[part], greedy)
            exchange = functools.partial(self._exchange, part, live, wait=not ready)
            for answered, steps in self._on_main(exchange).items():
                goes_on = [c for c, step in zip(live.pop(answered), steps, strict=True) if self._goes_on(c, step)]
                if goes_on:
                    live[answered] = goes_on
                    ready.append(answered)

    def _exchange(
        self, part: int | None, live: Mapping[int, Sequence[_Conversation]], *, wait: bool
    ) -> dict[int, list[EnvironmentStep]]:
        """Gives the last turns of a part to its environments, and takes the answers of parts that have all theirs."""
        assert self._environments is not None, "environments are on the main process"
        if part is not None:
            turns = [(conversation.number, conversation.turns[-1]) for conversation in live[part]]
            self._environments.begin_steps(part, turns)
        return self._environments.answers(wait=wait)

    def _goes_on(self, conversation: _Conversation, step: EnvironmentStep) -> bool:
        """Takes the reward, and the observation if a turn of the policy follows. Returns whether one does."""
        conversation.reward = (conversation.reward or 0.0) + step.reward
        conversation.done, answer = step.done, step.observation
        assert conversation.messages is not None and conversation.chat is not None, "the environment was not reset"
        conversation.messages += [{"role": "user", "content": answer}] if isinstance(answer, str) else answer or []
        if step.done or len(conversation.turns) >= self._config.max_turns:
            return False
        assert answer is not None, "only a conversation that is done has no observation"
        try:
            observation = self._encoder.observation(answer, conversation.chat, conversation.tokens[-1])
        except DataError as error:
            raise self._error(conversation, f"step gave an observation that cannot be used: {error}") from None
        conversation.full = conversation.new_tokens + len(observation) >= self._config.max_new_tokens
        if conversation.full:
            return False
        conversation.append(observation, mask=0)
        return True

    def _error(self, conversation: _Conversation, what: str) -> RewardError:
        return RewardError(KEY, why=f"{self._config.environment}: row {conversation.prompt.where}: {what}")
