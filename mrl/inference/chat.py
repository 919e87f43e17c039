"""`mrl generate --chat`: a conversation on the terminal.

The terminal belongs to the main process. It reads each turn of the user and gives it to all ranks as tokens. They
sample together, and the main process shows the answer as its tokens come.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mrl.config.inference import GenerateConfig
from mrl.data.encode import NO_TEMPLATE
from mrl.data.formats import Chat
from mrl.data.prompts import TurnEncoder
from mrl.engine.sampling import GREEDY, SamplingKey, SamplingParams
from mrl.errors import DataError, UserError
from mrl.inference.loaded import LoadedModel, check_length, read_tools
from mrl.inference.streaming import StreamedText
from mrl.rollout.base import SampleRequest
from mrl.trainers.console import Console

HELP = "/reset forgets the conversation, /system TEXT sets the system message, /save FILE writes it, /quit ends"
ASK = "> "


class Conversation:
    """Holds the conversation so far, on the main process.

    system: the system message, "" for none. Commands begin with a slash; a line that ends with a backslash goes on.
    """

    def __init__(self, config: GenerateConfig, model: LoadedModel) -> None:
        self._config = config
        self._tools = read_tools(config.request.tools)
        self._encoder = TurnEncoder(model.tokenizer)
        self.system, self.turns = config.data.system or "", list[dict[str, str]]()

    @property
    def messages(self) -> list[dict[str, Any]]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [*system, *self.turns]

    def next_turn(self) -> list[int] | None:
        """Reads lines until there is one to answer. Returns the conversation's tokens; None at its end."""
        while True:
            text = read_line()
            if text is None or text.strip() == "/quit":
                return None
            if text.startswith("/"):
                self._obey(text)
            elif text.strip():
                self.turns.append({"role": "user", "content": text})
                try:
                    return self._tokens()
                except UserError as error:
                    self.turns.pop()
                    say(str(error))

    def _tokens(self) -> list[int]:
        chat = Chat(self.messages, given=len(self.messages), tools=self._tools)
        tokens = self._encoder.prompt(chat)
        check_length(len(tokens), self._config, where="the conversation")
        return tokens

    def _obey(self, line: str) -> None:
        """Obeys a line that begins with a slash."""
        command, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        if command == "/reset":
            self.turns = []
            say("the conversation is empty")
        elif command == "/system":
            self.system, self.turns = rest, []
            say("the conversation begins anew " + ("with this system message" if rest else "without a system message"))
        elif command == "/save" and rest:
            say(self._save(rest))
        else:
            say(HELP if command == "/help" else f"{command} is no command, or lacks something: {HELP}")

    def _save(self, path: str) -> str:
        """Adds the conversation to a file of rows that `mrl sft` reads. Returns the line to say."""
        row: dict[str, Any] = {"messages": self.messages} | ({"tools": self._tools} if self._tools else {})
        try:
            with open(os.path.expanduser(path), "a", encoding="utf-8") as file:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
        except OSError as error:
            return str(error)
        return f"{path}: {len(row['messages'])} messages, as one more row"


@dataclasses.dataclass
class Interrupt:
    """Whether Ctrl-C was pressed while an answer came."""

    pressed: bool = False

    @contextlib.contextmanager
    def watched(self, *, alone: bool) -> Iterator[None]:
        """Lets Ctrl-C end the answer and not the command, inside the context, if this process is the only one."""
        self.pressed = False
        if not alone:
            yield
            return
        before = signal.signal(signal.SIGINT, lambda *_: setattr(self, "pressed", True))
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)


def talk(config: GenerateConfig, model: LoadedModel, console: Console) -> None:
    """Answers turn after turn, until the user ends it. Collective."""
    if model.tokenizer.chat_template is None:
        raise DataError("--chat", why=NO_TEMPLATE)
    dispatch, alone = model.dispatch, model.dispatch.world_size == 1
    conversation = Conversation(config, model)  # on every rank, so that all know what is wrong with it; one fills it
    console.say(f"{HELP}; Ctrl-D ends, too")
    console.close()
    if dispatch.is_main and sys.stdin is not None and sys.stdin.isatty():
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (`input` edits lines by it and remembers them; elsewhere its import prints)
    interrupt = Interrupt()
    parallel = config.engine.parallel
    replicas = dispatch.world_size // (parallel.tp * parallel.pp)
    # what several replicas keep goes by the key of a request, and theirs are copies with one key
    sampler = model.sampler.for_conversations(1)[0] if replicas == 1 else model.sampler
    while (tokens := dispatch.on_main(conversation.next_turn)) is not None:
        text = StreamedText(model.tokenizer, write, model.end_tokens)
        with interrupt.watched(alone=alone):
            # a copy for each replica: they would wait for the one that answers, and the main process sees its own
            requests = [request_of(tokens, config, model, text, interrupt)] * replicas
            answer = sampler.sample(requests)[0].tokens
        if dispatch.is_main:
            conversation.turns.append({"role": "assistant", "content": text.rest(answer)})
            write("\n")


def request_of(
    tokens: Sequence[int], config: GenerateConfig, model: LoadedModel, text: StreamedText, interrupt: Interrupt
) -> SampleRequest:
    """Returns the request for one answer. The noise follows from the seed and the positions of its tokens."""
    rollout = config.rollout
    sampling = SamplingParams(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)

    def seen(new: Sequence[int]) -> bool:
        if model.dispatch.is_main:
            text(new)
        return interrupt.pressed

    return SampleRequest(
        tokens=tokens,
        max_new_tokens=rollout.max_new_tokens,
        sampling=GREEDY if config.request.greedy else sampling,
        key=SamplingKey(config.seed),
        stop_tokens=sorted({*model.end_tokens, *rollout.stop_tokens}),
        stop=rollout.stop,
        on_token=seen,
    )


def read_line() -> str | None:
    """Returns what the user typed; None at the end of the input."""
    lines: list[str] = []
    while True:
        try:
            line = input(ASK if not lines else "")
        except EOFError:
            write("\n")
            return None
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def say(line: str) -> None:
    """Writes a line that is no part of the conversation."""
    write(f"({line})\n")
