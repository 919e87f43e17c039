"""Samplers of completions, and the trajectories that they are made into.

A rollout is made of trajectories, one for each sample of each prompt. A `Sampler` produces tokens: the actor's own
engine, an inference server, or a replay. Every rank calls it together, with all requests, and gets all completions.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from mrl.batch import Batch, make_batch
from mrl.engine.requests import Completion
from mrl.engine.sampling import SamplingKey, SamplingParams

if TYPE_CHECKING:  # a sampler in another program's environment has no use for data sets
    from mrl.data.prompts import Prompt
    from mrl.engine.collective import OnMain


Limit = Literal["tokens", "turns"]
Series = Literal["step", "eval", "baseline"]
"""The kind of rollouts: for training, of held-out prompts, or greedy completions for remax to compare with."""
SERIES_NAMES: tuple[Series, ...] = get_args(Series)


@dataclasses.dataclass(frozen=True)
class SampleRequest:
    """One completion that is wanted."""

    tokens: Sequence[int]  # the prompt, or the conversation so far
    max_new_tokens: int
    sampling: SamplingParams
    key: SamplingKey
    """Determines the noise, if the sampler can honour it: the actor's own engine does, a server gets a seed of it."""
    stop_tokens: Sequence[int] = ()  # ids that end the completion, and are kept in it
    stop: Sequence[str] = ()  # texts in the decoded new tokens that end it, with the token completing one
    on_token: Callable[[Sequence[int]], bool] | None = None
    """Called with the new ids after each of them, on the ranks that sample them. If it returns True there, the
    completion ends on all these ranks. A sampler that gets completions whole does not call it."""


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One sample of a prompt, in tokens and in words."""

    prompt: Prompt
    sample: int  # its number among the prompt's, from 0
    tokens: list[int]  # the whole sequence, prompt first
    mask: list[int]  # for each token: 1 if the policy sampled it, 0 in the prompt and in observations
    log_probs: list[float]  # the sampler's, for each token; 0.0 if mask is 0
    text: str  # the policy's text without special tokens; turns are joined by a blank line
    finished: bool  # whether it ended by itself, and not at a limit of tokens or turns
    turns: int = 1  # the policy's
    reward: float | None = None  # the environment's, in all; None without one
    conversation: Sequence[Mapping[str, Any]] | None = None
    """With an environment, the messages after the prompt as {"role", "content"}: the policy's turns ("assistant") and
    what the environment answered, its last answer too, which no turn follows."""
    cut_by: Limit | None = None  # the limit at which it ended; None if it is finished
    weights: int | None = None  # optimizer steps behind the weights that sampled it; None if unknown

    @property
    def response_length(self) -> int:
        """Tokens that the policy sampled."""
        return sum(self.mask)

    @property
    def turn_lengths(self) -> list[int]:
        """Tokens that the policy sampled in each of its turns; turns with no token between them count as one."""
        return [sum(run) for mask, run in itertools.groupby(self.mask) if mask]

    @property
    def observation_length(self) -> int:
        """Tokens of the environment's observations, with what the chat template puts around them."""
        return len(self.mask) - self.mask.index(1) - self.response_length

    @property
    def tool_calls(self) -> int:
        """Tool results that the environment answered with: its messages of role "tool"."""
        return sum(message["role"] == "tool" for message in self.conversation or ())

    @property
    def prompt_length(self) -> int:
        """Tokens before the first that the policy sampled."""
        return self.mask.index(1)


class Sampler(abc.ABC):
    """A source of completions."""

    exact = False
    """Whether its log-probs are of the trainer's own weights and arithmetic, so that a gap is a fault."""

    everywhere = False
    """Whether `update_weights` takes the weights on every rank, and not on rank 0 alone."""

    @property
    def notes(self) -> Sequence[str]:
        """Lines for the user on what it was made to do; on the main process alone."""
        return ()

    @property
    def takes_adapters(self) -> bool:
        """Whether `update_weights` takes the actor's adapters alone (`engine.adapter_weights()`), not all weights."""
        return False

    @property
    def forgets(self) -> bool:
        """Whether the weights are lost in `sleep`, so that `update_weights` comes before the next `sample`."""
        return False

    @abc.abstractmethod
    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions in the order of the requests, the same on every rank. Collective."""

    def for_conversations(self, parts: int) -> list[Sampler]:
        """Returns samplers for the conversations of one rollout, one for each of its `parts`.

        Each may keep computed state of its conversations until their next turns. The completions are the same.
        """
        return [self] * parts

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:  # noqa: B027 (some have nothing to do)
        """Takes the actor's new weights, streamed by their Hugging Face names (`engine.hf_weights()`). Collective.

        A later `sample` sees all or none of them. A sampler that reads the actor's own weights has nothing to do. One
        that sleeps wakes the memory of its weights alone. The rest waits for `wake`, so the actor's is offloaded in
        between.
        """

    def sleep(self) -> None:  # noqa: B027 (some have nothing to do)
        """Gives the device's memory back until `wake`: training comes next."""

    def wake(self) -> None:  # noqa: B027 (some have nothing to do)
        """Makes it ready for `sample` again."""

    def close(self) -> None:  # noqa: B027 (some have nothing to do)
        """Ends what was started. May be called twice."""


@dataclasses.dataclass(frozen=True)
class TrajectoryRequest:
    """What is asked of a source of trajectories, besides the prompts."""

    step: int  # made so far
    samples: int  # of each prompt
    greedy: bool
    round: int  # of dynamic sampling, in which a prompt may come again
    series: Series  # what they are for
    made: int | None  # optimizer steps behind the weights that sample; None for those of the step


class TrajectorySource(abc.ABC):
    """A source of the trajectories of prompts: sampled, or replayed."""

    earlier_s = 0.0
    """Seconds of sampling by an earlier start of the run, for the trajectories of the latest `sample`."""

    @property
    def exact(self) -> bool:
        """Returns `Sampler.exact`."""
        return False

    def sample(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        samples: int,
        greedy: bool = False,
        round: int = 0,
        series: Series = "step",
        made: int | None = None,
    ) -> list[Trajectory]:
        """Returns `samples` trajectories of each prompt, all of the first prompt first. Collective.

        The other arguments are those of TrajectoryRequest.
        """
        return self.answer(prompts, TrajectoryRequest(step, samples, greedy, round, series, made))

    @abc.abstractmethod
    def answer(self, prompts: Sequence[Prompt], asked: TrajectoryRequest) -> list[Trajectory]:
        """Does as `sample`."""

    def begin(self, run_id: str, made: int) -> None:  # noqa: B027 (not every source has something to do)
        """Begins the sampling of a run that has made so many optimizer steps. Collective."""

    def forget(self) -> None:  # noqa: B027 (not every source has something to do)
        """Removes what is kept for a later start, once all is trained on. Collective."""

    @abc.abstractmethod
    def close(self) -> None:
        """Ends what was started."""


class SharedRollouts(TrajectorySource):
    """Gives to every rank what a source of the main process samples.

    sources: on the main process one for each of `groups` groups of servers, of which `group` is asked, and `ahead`,
    for `LaunchedRollouts`; none on other processes.
    """

    def __init__(self, sources: Sequence[TrajectorySource], on_main: OnMain, groups: int) -> None:
        self._sources, self._on_main, self._groups, self.group = sources, on_main, groups, 0

    @property
    def ahead(self) -> Sequence[TrajectorySource]:
        return self._sources[self._groups :]

    def answer(self, prompts: Sequence[Prompt], asked: TrajectoryRequest) -> list[Trajectory]:
        return self._on_main(lambda: self._sources[self.group].answer(prompts, asked))

    def begin(self, run_id: str, made: int) -> None:
        def begin() -> None:
            for source in self._sources:
                source.begin(run_id, made)

        self._on_main(begin)

    def forget(self) -> None:
        def forget() -> None:
            for source in self._sources:
                source.forget()

        self._on_main(forget)

    def close(self) -> None:
        for source in self._sources:
            source.close()


def trajectories_to_batch(trajectories: Sequence[Trajectory]) -> Batch:
    """Returns a global batch of the trajectories in their order. The policy's own tokens train and are counted.

    token_fields: "rollout_log_probs" [T] float32, the sampler's log-prob of the next token if the policy sampled it,
    else 0.
    """
    log_probs = [x for t in trajectories for x in t.log_probs[1:]]
    return make_batch(
        [t.tokens for t in trajectories],
        [t.mask for t in trajectories],
        token_fields={"rollout_log_probs": torch.tensor(log_probs, dtype=torch.float32)},
    )
