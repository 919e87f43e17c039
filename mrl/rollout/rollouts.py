"""From prompts to trajectories: single completions, or conversations of several turns with a user's environment.

A trajectory's tokens are only ever appended to. Those that the policy sampled stay as they were sampled, with mask 1, the
end token among them; what an environment says follows with mask 0. All live conversations are sampled together, a turn of
each in a round. The same on every rank.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from mrl.config.ppo import RolloutConfig
from mrl.data.formats import Chat, parse_prompt
from mrl.data.prompts import Prompt
from mrl.data.turns import TurnEncoder
from mrl.engine.base import Completion
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.errors import DataError, RewardError
from mrl.rollout.base import Sampler, SampleRequest, Trajectory, TrajectorySource
from mrl.rollout.environment import KEY, Environments, Said, Step, load_environment
from mrl.rollout.samples import SERIES_NAMES, Series

T = TypeVar("T")
OnMain = Callable[[Callable[[], T]], T]
"""As `BaseEngine.on_main`: runs a function on the main process and gives all ranks its result, or its UserError."""

ROUND, SERIES = 2**32, 2**48
"""How far apart, in the keys of the noise, the sample numbers are of rounds of dynamic sampling and of series."""


@dataclasses.dataclass(eq=False)
class _Talk:
    """A trajectory in the making. chat: the first prompt as a conversation, for its tools and template arguments."""

    number: int
    prompt: Prompt
    sample: int
    key: SamplingKey
    tokens: list[int] = dataclasses.field(default_factory=list)
    mask: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[float] = dataclasses.field(default_factory=list)
    said: list[str] = dataclasses.field(default_factory=list)
    chat: Chat | None = None
    completed: bool = False
    done: bool = True
    reward: float | None = None

    def append(self, tokens: Sequence[int], *, mask: int, log_probs: Sequence[float] | None = None) -> None:
        self.tokens += tokens
        self.mask += [mask] * len(tokens)
        self.log_probs += [0.0] * len(tokens) if log_probs is None else log_probs

    @property
    def new_tokens(self) -> int:
        """What followed the prompt, the environment's part included."""
        return len(self.tokens) - len(self.prompt.tokens)

    def trajectory(self) -> Trajectory:
        return Trajectory(
            prompt=self.prompt,
            sample=self.sample,
            tokens=self.tokens,
            mask=self.mask,
            log_probs=self.log_probs,
            text="\n\n".join(self.said),
            finished=self.completed and self.done,
            turns=len(self.said),
            reward=self.reward,
        )


class Rollouts(TrajectorySource):
    """Samples trajectories as the config says.

    end_tokens: of the model (`mrl.rollout.stops.end_tokens`), beside rollout.stop_tokens. environment: a class for
    conversations, in place of the one that rollout.environment names. system and max_prompt_length are those of `data`,
    for prompts that an environment gives. Raises ConfigError where the environment cannot be loaded.
    """

    def __init__(
        self,
        sampler: Sampler,
        tokenizer: PreTrainedTokenizerBase,
        config: RolloutConfig,
        *,
        seed: int,
        end_tokens: Sequence[int],
        environment: Callable[[], Any] | None = None,
        system: str | None = None,
        max_prompt_length: int | None = None,
        on_main: OnMain = lambda fn: fn(),
    ) -> None:
        self._sampler, self._tokenizer, self._config, self._seed = sampler, tokenizer, config, seed
        self._end_tokens = frozenset(end_tokens)
        self._max_prompt_length, self._on_main = max_prompt_length, on_main
        self._environments: Environments | None = None  # on the main process
        self._converses = environment is not None or config.environment is not None
        self._name = config.environment if environment is None else environment.__name__
        if self._converses:
            self._encoder = TurnEncoder(tokenizer, system)
            on_main(lambda: self._make_environments(environment))

    def close(self) -> None:
        """Ends the threads of the environments."""
        if self._environments is not None:
            self._environments.close()

    @property
    def exact(self) -> bool:
        """As `Sampler.exact`."""
        return self._sampler.exact

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        greedy: bool = False,
        round: int = 0,
        series: Series = "step",
    ) -> list[Trajectory]:
        """As `TrajectorySource.sample`.

        Noise follows from (seed, step, the prompt's index, sample), and from what they are for: the series, and the round of
        dynamic sampling, in which a prompt may come again. A prompt that is there twice gets other samples each time.
        Raises RewardError for what an environment does wrong.
        """
        talks = self._begin(prompts, step, samples, SERIES * SERIES_NAMES.index(series) + ROUND * round)
        live = talks
        while live:
            completions = self._sampler.sample([self._request(talk, greedy) for talk in live])
            for talk, completion in zip(live, completions, strict=True):
                self._hear(talk, completion)
            live = self._answer(live) if self._converses else []
        return [talk.trajectory() for talk in talks]

    def _begin(self, prompts: Sequence[Prompt], step: int, samples: int, offset: int) -> list[_Talk]:
        """offset: of the sample numbers in the keys."""
        talks, seen = [], collections.Counter[int]()
        for prompt in prompts:
            first = offset + samples * seen[prompt.index]
            seen[prompt.index] += 1
            for i in range(samples):
                key = SamplingKey(self._seed, step, prompt.index, first + i)
                talks.append(_Talk(len(talks), prompt, i, key))
        if self._converses:
            given = self._on_main(lambda: self._environments.reset([talk.prompt for talk in talks]))
            for talk, said in zip(talks, given, strict=True):
                self._set_prompt(talk, said)
        for talk in talks:
            talk.append(talk.prompt.tokens, mask=0)
        return talks

    def _request(self, talk: _Talk, greedy: bool) -> SampleRequest:
        config = self._config
        sampling = SamplingParams(config.temperature, config.top_k, config.top_p, config.min_p)
        return SampleRequest(
            tokens=list(talk.tokens),
            max_new_tokens=config.max_new_tokens - talk.new_tokens,
            sampling=GREEDY if greedy else sampling,
            key=talk.key,
            stop_tokens=sorted(self._end_tokens | set(config.stop_tokens)),
            stop=config.stop,
        )

    def _hear(self, talk: _Talk, completion: Completion) -> None:
        """A turn of the policy."""
        assert completion.tokens, f"row {talk.prompt.where}: the sampler gave a completion without tokens"
        talk.append(completion.tokens, mask=1, log_probs=completion.log_probs)
        talk.completed = completion.finished
        ends = completion.tokens[-1] in self._end_tokens
        words = completion.tokens[: -1 if ends else None]
        text = self._tokenizer.decode(words, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        talk.said.append(text)

    # --------------------------------------------------------------------------------------- with an environment

    def _make_environments(self, environment: Callable[[], Any] | None) -> None:
        environment = load_environment(self._config.environment) if environment is None else environment
        self._environments = Environments(environment, self._name, timeout_s=self._config.environment_timeout_s)

    def _set_prompt(self, talk: _Talk, said: Said | None) -> None:
        """The conversation's first prompt: the row's, or what the environment gave instead."""
        try:
            content = talk.prompt.content if said is None else said
            asked = parse_prompt({**talk.prompt.row, "prompt": content}, "prompt")
            talk.chat = asked if isinstance(asked, Chat) else asked.chat
            if said is None:
                return
            tokens = self._encoder.prompt(asked)
        except DataError as error:
            raise self._error(talk, f"reset gave a prompt that cannot be used: {error}") from None
        if self._max_prompt_length is not None and len(tokens) > self._max_prompt_length:
            raise self._error(
                talk,
                f"reset gave a prompt of {len(tokens)} tokens, and data.max_prompt_length is {self._max_prompt_length}; "
                "raise it, or give a shorter one",
            )
        talk.prompt = dataclasses.replace(talk.prompt, content=content, tokens=tokens, truncated=False)

    def _answer(self, live: list[_Talk]) -> list[_Talk]:
        """Lets the environments answer; the conversations that go on."""
        said = [(talk.number, talk.said[-1]) for talk in live]
        steps = self._on_main(lambda: self._environments.step(said))
        return [talk for talk, step in zip(live, steps, strict=True) if self._goes_on(talk, step)]

    def _goes_on(self, talk: _Talk, step: Step) -> bool:
        """Takes the reward, and the observation where there is a turn of the policy after it."""
        talk.reward = (talk.reward or 0.0) + step.reward
        talk.done = step.done
        if step.done or len(talk.said) >= self._config.max_turns:
            return False
        try:
            heard = self._encoder.observation(step.observation, talk.chat, talk.tokens[-1])
        except DataError as error:
            raise self._error(talk, f"step gave an observation that cannot be used: {error}") from None
        if talk.new_tokens + len(heard) >= self._config.max_new_tokens:
            return False
        talk.append(heard, mask=0)
        return True

    def _error(self, talk: _Talk, what: str) -> RewardError:
        return RewardError(f"{KEY}: {self._name}: row {talk.prompt.where}: {what}")
