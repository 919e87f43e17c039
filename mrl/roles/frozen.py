"""Models without an optimizer: the reference of `mrl dpo` and `mrl ppo`, teachers, a reward model.

A teacher may be on a server: `prompt_logprobs` of vLLM's API has the likeliest tokens after each place of a text.

A reward model gives the score that transformers' sequence classifier (`AutoModelForSequenceClassification`) gives a
conversation.

*What is read*: the messages, system prompt and answer included, through the reward model's own chat template, whatever
the policy's tokenizer and template are. Text without a template is joined as it is and ends with EOS.

*Which token's value is the score*: the last one that is not `pad_token_id` of config.json. That is the rule of
transformers 5 (modeling_layers.GenericForSequenceClassification), for padding on either side and for a sequence alone.
If EOS is also the padding and ends the text, it is the token before it. If a template ends a turn with "<|im_end|>\\n",
it is the newline.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mrl.batch import Batch, make_batch
from mrl.config.schema import TeacherServerConfig
from mrl.data.encode import Encoder
from mrl.data.formats import Chat, Text
from mrl.data.scored import scored_token
from mrl.engine.base import Predictions
from mrl.engine.lora.identity import weights_fingerprint
from mrl.errors import ConfigError, DataError, RewardError, ServerError, quoted
from mrl.roles.dispatch import WorkerDispatch
from mrl.rollout.base import Trajectory
from mrl.rollout.http import HttpClient
from mrl.weights.hf_config import pad_token_of, read_hf_config
from mrl.weights.hub import WEIGHTS, model_fingerprint

Ask = Callable[[Batch, dict[str, Any]], Predictions]
"""Asks a frozen model about a global batch, as `WorkerDispatch.forward` does. Collective."""


@dataclasses.dataclass(frozen=True)
class FrozenModel:
    """Holds a model that no checkpoint needs to hold."""

    folder: str
    is_read: bool = True  # else a server has its weights, and the folder is of its tokenizer
    is_cached: bool = False  # what it says of all rows is computed before the first step, and written

    def fingerprint(self) -> dict[str, str]:
        """Returns `model_fingerprint`, and what tells a sample of the weights from others."""
        hashes = model_fingerprint(self.folder)
        if self.is_read and any(pathlib.Path(self.folder).glob("*.safetensors")):  # it may start from scratch
            hashes[WEIGHTS] = weights_fingerprint(self.folder)
        return hashes


def ask_role(dispatch: WorkerDispatch, role: str) -> Ask:
    """Returns what asks a role of `dispatch`."""
    return lambda batch, ctx: dispatch.forward(role, batch, ctx)


def ask_server(dispatch: WorkerDispatch, server: TeacherServer) -> Ask:
    """Returns what asks a server, through the main process.

    It gives log_probs [T] of the labels that train, and of `ctx["top"]` ids top_tokens and top_log_probs [T, top]; 0
    elsewhere.
    """

    def ask(batch: Batch, ctx: dict[str, Any]) -> Predictions:
        ids_N, log_probs_N, of_labels_N = dispatch.on_main(lambda: server.top_and_labels(batch, ctx.get("top", 0)))
        trained = batch.loss_mask.nonzero()[:, 0]
        predictions = {"log_probs": of_labels_N, "top_tokens": ids_N.long(), "top_log_probs": log_probs_N}
        return {
            name: of_N.new_zeros(batch.num_tokens, *of_N.shape[1:]).index_copy(0, trained, of_N)
            for name, of_N in predictions.items()
        }

    return ask


COMPLETIONS = "/v1/completions"

TEXTS = (
    "\n0123456789 1,000.5", "\nThe quick brown fox", "\ndon't: naïve, façade", "\n  if x != [2**8]:\n\t",
    "\nбыстрая лиса", "\nγρήγορη αλεπού", "\nשועל מהיר",
    "\nثعلب سريع", "\nतेज़ लोमड़ी", "\n敏捷的狐狸",
    "\nすばやい狐", "\n빠른 여우", "\n🦊 🐾",
)  # fmt: skip
"""Texts whose ids a server is asked for. Each is short, as a server may be started for short rows, and begins with a
line end, as a server does not tell a text's first id."""


class TeacherServer:
    """One server. It is asked by the main process alone. key: of its section."""

    def __init__(self, config: TeacherServerConfig, key: str = "teacher.server") -> None:
        self.config, self.key = config, key
        self._secret = os.environ.get(config.key_variable or "", "").strip()
        self.http = HttpClient(config.url, timeout_s=config.timeout_s, key=f"{key}.url", secret=self._secret)

    @functools.cached_property
    def name(self) -> str:
        """The name of the model there. Raises ConfigError where it has to be chosen, or the server's key is missing."""
        variable = self.config.key_variable
        if variable is not None and not (self._secret.isascii() and self._secret.isprintable() and self._secret):
            why = "names no variable of the main process's environment that holds a key of printable ASCII"
            raise ConfigError(f"{self.key}.key_variable", variable, why, "set the variable, or leave it out")
        answer = self.http.get("/v1/models")
        try:
            names = [one["id"] for one in answer["data"]]
        except (KeyError, TypeError) as error:
            raise self.http.error(f"/v1/models answered otherwise than expected ({error!r})") from error
        name = self.config.name
        if name is None and len(names) == 1:
            return str(names[0])
        if name is not None and name in names:
            return name
        served = ", ".join(names) or "none"
        if name is None:
            raise ConfigError(f"{self.key}.name", None, "leaves open which model is asked", f"give one of {served}")
        raise ConfigError(f"{self.key}.name", quoted(name), "is not served there", f"give one of {served}")

    def check_tokenizer(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raises ConfigError if a text has other ids on the server than by `tokenizer`, that of model.path beside the
        server. Ids would be other tokens there, and log-probs those of another text."""
        named = (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token, tokenizer.unk_token)
        for text in (*TEXTS, *(f"a {token} a" for token in dict.fromkeys(named) if token is not None)):
            here = tokenizer(text, add_special_tokens=False)["input_ids"]
            if len(here) < 2:  # of characters that it drops; servers refuse an empty prompt
                continue
            there = self._ids_of(text)
            if len(there) == len(here) and all(str(own) in ids for own, ids in zip(here[1:], there[1:], strict=True)):
                continue
            path = f"{self.key.rpartition('.')[0]}.model.path"
            why = f"has another tokenizer: {quoted(text)} has other ids there than by {path}"
            fix = f"serve that model with the tokenizer of its folder, or name the folder of what {self.name} is"
            raise ConfigError(f"{self.key}.url", quoted(self.http.url), why, fix)

    def _ids_of(self, text: str) -> list[dict[str, Any]]:
        """Returns, of each of a text's tokens, its id there with what is said of it; None of the first."""
        answer = self._ask(text, 0, add_special_tokens=False)
        try:
            return list(answer["choices"][0]["prompt_logprobs"])
        except (KeyError, IndexError, TypeError) as error:
            raise self._unexpected(error) from error

    def _ask(self, prompt: str | list[int], count: int, **options: bool) -> Any:
        """Returns the answer with `count` log-probs of each of a prompt's tokens."""
        body = {"model": self.name, "prompt": prompt, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": count}
        return self.http.post(COMPLETIONS, body | options)

    def top_and_labels(self, batch: Batch, count: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns ids [N, count] int32, log-probs [N, count] fp32 and log-probs of labels [N] fp32. They are of the
        likeliest tokens after the trained positions, and of the labels there. count: may be 0."""
        lengths = batch.lengths.tolist()
        parts = zip(*(field.split(lengths) for field in (batch.tokens, batch.labels, batch.loss_mask)), strict=True)
        texts = [([*tokens.tolist(), int(labels[-1])], mask.nonzero()[:, 0].tolist()) for tokens, labels, mask in parts]
        with concurrent.futures.ThreadPoolExecutor(self.config.concurrency) as pool:
            rows = [
                row for found in pool.map(lambda text: self._of_text(text[0], text[1], count), texts) for row in found
            ]
        tops, of_labels = [row for row, _ in rows], torch.tensor([log_prob for _, log_prob in rows])
        ids = torch.tensor([[token for token, _ in row] for row in tops], dtype=torch.int32)
        log_probs = torch.tensor([[log_prob for _, log_prob in row] for row in tops])
        return ids.view(len(rows), count), log_probs.view(len(rows), count), of_labels

    def _of_text(
        self, ids: Sequence[int], places: Sequence[int], count: int
    ) -> list[tuple[list[tuple[int, float]], float]]:
        """Returns, of each of the places, (id, log-prob) of the likeliest tokens after it, the likeliest first, and the
        log-prob of the one that is there."""
        answer = self._ask(list(ids), max(1, count))
        try:
            found = [(answer["choices"][0]["prompt_logprobs"][place + 1], str(ids[place + 1])) for place in places]
            return [(_largest(each, count), float(each[label]["logprob"])) for each, label in found]
        except (KeyError, IndexError, TypeError, ValueError, AttributeError) as error:
            raise self._unexpected(error) from error

    def _unexpected(self, error: Exception) -> ServerError:
        what = f"{COMPLETIONS} answered otherwise than expected ({error!r}); see docs/distill.md for what works"
        return self.http.error(what)


def _largest(found: dict[str, Any], count: int) -> list[tuple[int, float]]:
    """Returns the largest of a token's neighbours, among which the token itself is told too, wherever it stands."""
    each = sorted(((int(token), float(about["logprob"])) for token, about in found.items()), key=lambda one: -one[1])
    if len(each) < count:
        raise ValueError(f"{len(each)} log-probs of a token for {count}")
    return each[:count]


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
