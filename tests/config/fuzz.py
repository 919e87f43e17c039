"""Random configs, overrides and data rows, and what `mrl` says of them: `python -m tests.config.fuzz --count N --seed S`.

Whatever a user writes, the command ends within seconds: with exit code 0, or with 2 and one line of at most 400 characters.
A case is a pure function of (seed, number). It runs in this process, through the command line with `--dry-run` (rows: through the
data sets of both commands), in a folder that nothing may be written to.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import pathlib
import random
import signal
import sys
import tempfile
import time
import traceback
import typing
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from mrl.config.command import roots
from mrl.config.dpo import PreferenceDataConfig
from mrl.config.keys import Key, types_of, walk_keys
from mrl.config.ppo import PromptsConfig
from mrl.config.rewards import NAMED, FunctionReward
from mrl.config.rm import FORMAT_OF, ScoredDataConfig
from mrl.config.schema import DataConfig
from mrl.data.batches import BatchSource
from mrl.data.dataset import SFTDataset
from mrl.data.preferences import PreferenceDataset, batch_of
from mrl.data.prompts import PromptDataset, PromptSource
from mrl.data.scored import ScoredDataset, detect, scored_batch
from mrl.errors import MAX_MISTAKES, UserError
from tests.bad_input.mistakes import CONFIG, DPO_CONFIG, PPO_CONFIG, RM_CONFIG, SERVE_CONFIG, Workspace, invoke
from tests.trainers.tiny_runs import load_example

LIMIT_S, LIMIT_CHARACTERS = 5.0, 400
REQUIRED_BESIDE = {"teacher.": ("teacher.model.path", "t")} | {
    f"{role}.server.": (f"{role}.server.url", "http://h:1") for role in ("teacher", "reference")
}
"""Of sections that may be null: what has to be there where one is -> a key and its value."""
FILES = {"sft": "config.yaml", "ppo": "ppo.yaml", "dpo": "dpo.yaml", "rm": "rm.yaml", "serve": "serve.yaml"}
BASES = {"sft": CONFIG, "ppo": PPO_CONFIG, "dpo": DPO_CONFIG, "rm": RM_CONFIG, "serve": SERVE_CONFIG}

WHOLE = [0, 1, 7, -1, 64, 10**6, 2**31 - 1, 2**31, 2**63 - 1, 2**63, 10**18, 10**22, -(10**18), 10**400, 720720]
NUMBERS = [0.0, -0.0, 1.0, 0.5, -1.0, 5e-324, 1e300, 1.7976931348623157e308, -1e300, math.inf, math.nan]
TEXTS = [
    "", " ", "a", "\0", "a\0b", "\x1b[31mred\x1b[0m", "\x7f", "\x85", "\u2028", "\u202e", "\ud800", "\N{GRINNING FACE}", "a\nb", "\t", "~", "*", "[",
    "..", "/", "/dev/null", "/proc/self/mem", "a" * 300, "a/" * 2500, "x" * 10_000, "é" * 5000, "null", "1e5", "(", "((a+)+)+$", "(" * 2000, "model",
    "model/config.json", "rows.jsonl", "config.yaml", "a:b", "a.py:f", "http://", "://", "s3://", "file:///" + "a" * 5000, "%s%n{0}", "[b]{x}[/b]", "run",
]  # fmt: skip
"""Texts that programs stumble over."""

SNIPPETS = [
    "&a [*a]", "&a {b: *a}", "*a", "\0", "\x1b[0m", "\ufeff", "\x85", "[" * 2000, "{a: " * 500, "[" * 50 + "]" * 50, "1" * 4301, "-" + "9" * 5000,
    "0x" + "f" * 5000, "1:" * 3000 + "1", "!!int ''", "!!float ''", "!!int x", "!!bool x", "!!timestamp x", "!!binary \"\\u00e9\"", "!!set {a, b}",
    "!!omap [a: 1]", "!!python/object/apply:os.system [ls]", "!<tag:x> 1", "? [a, b]\n: c", "? {a: b}\n: c", "<<: *a", "<<: 3", "<<: [1]", "2020-13-45",
    "2020-01-01", "2020-01-01: 1", "null: 1", "1: 2", "1.5: 2", ".nan: 1", "true: 1", "---", "...", "%YAML 9.9\n---\n", "%TAG ! x", "'", '"', "\"\\ud800\"", "\"\\x00\"",
    "|", ">-", "@", "`", "\t", "\r", "- ", "? ", ": ", ", ", "#", "}" * 30, "é" * 3000, "a" * 20_000, "{" + ", ".join(f"k{i}: {i}" for i in range(400)) + "}",
    "[" + ", ".join(map(str, range(3000))) + "]", "&a [1,1,1,1,1,1,1,1]", "{a: &a [1,1,1,1,1,1,1,1,1], b: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a], c: &c [*b,*b,*b,*b,*b,*b,*b,*b], "
    "d: &d [*c,*c,*c,*c,*c,*c,*c], e: &e [*d,*d,*d,*d,*d,*d,*d], f: &f [*e,*e,*e,*e,*e,*e,*e], g: [*f,*f,*f,*f,*f,*f,*f]}",
]  # fmt: skip
"""Pieces of YAML that parsers stumble over: cycles, depth, long numbers, tags whose text does not fit, exponential aliases."""

Case = tuple[str, str, str | bytes, tuple[str, ...]]
"""(kind, command, content of the config or of the rows, overrides)"""


# ----------------------------------------------------------------------------------------------------------- generation


@functools.cache
def keys_of(command: str) -> tuple[Key, ...]:
    """The keys of the command, those of its rewards among them, as of the first one."""
    keys = tuple(walk_keys(roots()[command]))
    if command == "ppo":
        for section in (*NAMED.values(), FunctionReward):
            keys += tuple(walk_keys(section, "rewards.functions[0]"))
    return keys


def make_case(seed: int, number: int) -> Case:
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choices(["keys", "text", "override", "rows"], [5, 3, 2, 3])[0]
    command = rng.choice(list(ROWS if kind == "rows" else BASES))
    plain = json.loads(json.dumps(BASES[command]))
    match kind:
        case "keys":
            overrides = []
            for _ in range(rng.choice([1, 1, 2, 3])):
                key = rng.choice(keys_of(command))
                value = value_of(rng, key.annotation)
                if rng.random() < 0.4 and "[" not in key.path:
                    overrides.append(f"{key.path}={yaml_of(value)}")
                else:
                    put(plain, key.path, value)
            return kind, command, yaml_of(plain), tuple(overrides)
        case "text":
            return kind, command, mutated(rng, yaml_of(plain), SNIPPETS), ()
        case "override":
            path = rng.choice(keys_of(command)).path if rng.random() < 0.7 else rng.choice(["", ".", "a.b", *TEXTS])
            text = rng.choice([*SNIPPETS, *TEXTS])
            override = rng.choice([f"{path}={text}", f"{path}.x={text}", path, f"{path}=[{text}]"])
            return kind, command, yaml_of(plain), (override,)
    lines = [
        mutated_row(rng, command) if rng.random() < 0.3 else json.dumps(rng.choice(ROWS[command])) for _ in range(4)
    ]
    content = "".join(f"{line}\n" for line in lines).encode("utf-8", "surrogatepass")
    return kind, command, content, (rng.choice(["stop", "skip"]), rng.choice(["error", "left", "drop"]))


def value_of(rng: random.Random, annotation: Any) -> Any:
    """A value that the key's type takes or not, mostly an extreme one."""
    if rng.random() < 0.15:
        odd = [None, True, [], {}, [[]], {"a": 1}, nested(rng.choice([5, 90, 120]))]
        return rng.choice([*odd, *(rng.choice(values) for values in (WHOLE, NUMBERS, TEXTS))])
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return rng.choice([*args, args[0].upper(), rng.choice(TEXTS)])
    if origin is tuple:
        return [value_of(rng, args[0]) for _ in range(rng.choice([0, 1, 2, 2, 3, 300]))]
    if dataclasses.is_dataclass(annotation):
        fields = list(types_of(annotation).items())
        return {name: value_of(rng, of) for name, of in [fields[0], *rng.sample(fields, 2)]}
    if origin in (dict, Mapping):
        return {rng.choice(TEXTS): value_of(rng, args[1]) for _ in range(rng.choice([0, 1, 3]))}
    if args:
        return value_of(rng, rng.choice(args))
    if annotation in (int, float):
        return rng.choice(WHOLE if annotation is int else [*NUMBERS, *WHOLE])
    if annotation is str:
        return rng.choice(TEXTS)
    return {bool: rng.random() < 0.5}.get(annotation)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


def is_list(key: Key) -> bool:
    """Whether the key's value is a list."""
    return typing.get_origin(key.annotation) is tuple


def put(plain: dict[str, Any], path: str, value: Any) -> None:
    """Writes a key into plain data; sections on the way are made."""
    if path.startswith("rewards.functions[0]."):
        path, node = path.removeprefix("rewards.functions[0]."), plain["rewards"]["functions"][0]
        node[path] = value
        return
    *parents, name = path.split(".")
    for parent in parents:
        if not isinstance(plain.get(parent), dict):
            plain[parent] = {}
        plain = plain[parent]
    plain[name] = value


def yaml_of(value: Any) -> str:
    """YAML of any plain data on as few lines as it takes; what YAML escapes, escaped."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{yaml_of(k)}: {yaml_of(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(yaml_of, value)) + "]"
    if isinstance(value, float):
        return {"inf": ".inf", "-inf": "-.inf", "nan": ".nan"}.get(str(value), str(value))
    return json.dumps(value)


def mutated(rng: random.Random, text: str, snippets: list[str]) -> str | bytes:
    """A text with one to three accidents."""
    for _ in range(rng.choice([1, 1, 2, 3])):
        at, end = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        match rng.randrange(6):
            case 0:
                text = text[:at] + rng.choice(snippets) + text[at:]
            case 1:  # in place of a value
                colon = text.find(": ", at)
                stop = min((i for i in (text.find(c, colon) for c in ",}\n") if i > 0), default=len(text))
                text = text[: colon + 2] + rng.choice(snippets) + text[stop:]
            case 2:
                text = text[:at] + text[min(end, at + 20) :]
            case 3:
                text = text[:end] + text[at:end] + text[end:]
            case 4:
                character = rng.choice([0, 7, 27, 127, 133, 160, 8232, 65279, 65534, 128512, rng.randrange(32, 127)])
                text = text[:at] + chr(character) + text[at:]
            case 5:
                text = text[:at] if rng.random() < 0.3 else rng.choice(snippets) + "\n" + text
    if rng.random() < 0.1:
        content = bytearray(text.encode("utf-8"))
        for _ in range(3):
            content[rng.randrange(len(content) or 1) :][:1] = bytes([rng.randrange(256)])
            content.insert(rng.randrange(len(content) + 1), rng.randrange(128, 256))
        return bytes(content)
    return text


CHAT = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
ROWS: dict[str, list[dict[str, Any]]] = {
    "sft": [
        {"messages": CHAT},
        {"prompt": "1", "completion": "2"},
        {"instruction": "1", "output": "2"},
        {"text": "12"},
        {"input_ids": [3, 4, 5]},
    ],
    "ppo": [
        {"prompt": "1+1=", "answer": "2"},
        {"prompt": CHAT[:1]},
        {"messages": CHAT},
        {"instruction": "1", "input": "2"},
    ],
    "dpo": [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3"},
        {"prompt": CHAT[:1], "chosen": CHAT[1:], "rejected": [{"role": "assistant", "content": "3"}]},
        {"chosen": CHAT, "rejected": [CHAT[0], {"role": "assistant", "content": "3"}]},
        {"prompt": "1+1=", "completion": "2", "label": True},
    ],
    "rm": [
        {"prompt": "1+1=", "chosen": "2", "rejected": "3", "margin": 0.5},
        {"prompt": CHAT[:1], "completion": CHAT[1:], "score": 1.5},
        {"prompt": "1+1=", "completions": ["1+1=2", "2"], "labels": [True, 0.5]},
    ],
}
EXTRAS = ["tools", "chat_template_kwargs", "images", "image", "labels", "loss_mask", "input", "extra", "x" * 5000, "\0"]
JSON_SNIPPETS = ["1" * 4300, "1" * 4301, "-" + "9" * 5000, "[" * 2000, "[" * 2000 + "]" * 2000, '{"a":' * 900 + "1" + "}" * 900, "NaN", "-Infinity", "1e999", '"\\ud800"', '"\\u0000"', "\0", "\x1b", "'", '"', "\\", "\x85", "\u2028", "é" * 3000, "{}", "[]", "null", "\ufeff"]  # fmt: skip


def mutated_row(rng: random.Random, command: str) -> str:
    """A row as a line: with a field of another value, or as JSON text with accidents."""
    row = json.loads(json.dumps(rng.choice(ROWS[command])))
    if rng.random() < 0.4:
        text = mutated(rng, json.dumps(row), JSON_SNIPPETS)
        return (text if isinstance(text, str) else text.decode("utf-8", "replace")).replace("\n", " ")
    anything = lambda: rng.choice([None, True, [], {}, "", 0, 10**400, -5, 1.5, [1], ["a"], {"a": "b"}, rng.choice(TEXTS), [rng.choice(TEXTS)], nested(90), nested(400), "a" * 20_000, [3] * 5000])  # noqa: E731  # fmt: skip
    target: Any = row
    while isinstance(target, dict | list) and target:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = rng.choice(keys)
        if rng.random() < 0.4 or not isinstance(target[key], dict | list):
            target[key] = anything()
            break
        target = target[key]
    if rng.random() < 0.4:
        row[rng.choice(EXTRAS)] = anything()
    return json.dumps(row)


# -------------------------------------------------------------------------------------------------------------- running


class Hang(BaseException):
    """A case took longer than LIMIT_S."""


@contextlib.contextmanager
def alarm() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise Hang

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def dry_run(workspace: Workspace, command: str, *arguments: str) -> tuple[int, str, BaseException | None]:
    """`mrl COMMAND FILE ARGUMENTS --dry-run` in this process: exit code, standard error, and what escaped."""
    done = invoke(workspace, command, FILES[command], "--dry-run", *arguments)
    escaped = done.exception if not isinstance(done.exception, SystemExit) else None
    return done.exit_code, done.stderr, escaped


def read_rows(
    workspace: Workspace, command: str, on_bad_row: str, truncation: str
) -> tuple[int, str, BaseException | None]:
    """The first batch of rows.jsonl as a run reads it."""
    data = {"train": str(workspace.root / "rows.jsonl"), "on_bad_row": on_bad_row, "truncation": truncation}
    try:
        with warnings.catch_warnings(action="ignore"):
            if command == "sft":
                rows = SFTDataset(DataConfig(**data, max_length=64), tokenizer(), vocab_size=len(tokenizer()))
                BatchSource(rows, global_batch_size=4, seed=0, prefetch=False).next()
            elif command == "dpo":
                of_pairs, config = functools.partial(batch_of, group=1), PreferenceDataConfig(**data, max_length=64)
                pairs = PreferenceDataset(config, tokenizer(), vocab_size=len(tokenizer()), paired=False)
                BatchSource(pairs, global_batch_size=4, seed=0, prefetch=False, batch_of=of_pairs).next()
            elif command == "rm":
                scored(data)
            else:
                prompts = PromptDataset(
                    PromptsConfig(**data, max_prompt_length=32), tokenizer(), vocab_size=len(tokenizer())
                )
                PromptSource(prompts, seed=0).take(4)
    except UserError as error:
        return 2, f"mrl: {error}\n", None
    except Exception as error:
        return 1, "", error
    return 0, "", None


def scored(data: dict[str, str]) -> None:
    format = "preference"
    with contextlib.suppress(Exception):
        format = detect(json.loads(pathlib.Path(data["train"]).read_text().splitlines()[0]))
    loss, size = next(loss for loss in FORMAT_OF if FORMAT_OF[loss] == format), len(tokenizer())
    rows = ScoredDataset(ScoredDataConfig(**data), tokenizer(), vocab_size=size, loss=loss, pad_token_id=0)
    of_rows = functools.partial(scored_batch, group=1 + (format == "preference"))
    BatchSource(rows, global_batch_size=4, seed=0, prefetch=False, batch_of=of_rows).next()


@functools.cache
def tokenizer() -> Any:
    return load_example("arithmetic/make_data.py").make_tokenizer()


def run(case: Case, workspace: Workspace) -> str:
    """What is wrong with how a case ended; "" where nothing is."""
    kind, command, content, extra = case
    workspace.write(
        "rows.jsonl" if kind == "rows" else FILES[command],
        content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"),
    )
    before = None if kind == "rows" else workspace.snapshot()
    began_s = time.perf_counter()
    code, said, escaped = 1, "", None
    try:
        with alarm():
            code, said, escaped = (read_rows if kind == "rows" else dry_run)(workspace, command, *extra)
    except Hang:
        escaped = None
    seconds = time.perf_counter() - began_s
    wrong = fault(code, said, escaped, seconds)
    if not wrong and before is not None and workspace.snapshot() != before:
        return "something was written"
    return wrong


def fault(code: int, said: str, escaped: BaseException | None, seconds: float) -> str:
    if seconds > LIMIT_S:
        return f"took {seconds:.1f} s"
    if escaped is not None:
        last = traceback.extract_tb(escaped.__traceback__)
        ours = [frame for frame in last if "/mrl/" in frame.filename] or last
        return f"traceback: {type(escaped).__name__}: {str(escaped)[:150]} ({pathlib.Path(ours[-1].filename).name}:{ours[-1].lineno})"
    if (code, said) == (0, ""):
        return ""
    message = said.removeprefix("mrl: ").removesuffix("\n")
    if code != 2:
        return f"exit code {code}: {said[:200]!r}"
    lines = message.split("\nmrl: ")  # of a config with several mistakes
    if len(lines) > MAX_MISTAKES + 1 or not all(line.isprintable() for line in lines):
        return f"no printable lines, or too many: {said[:300]!r}"
    odd = [line for line in lines if len(line) > LIMIT_CHARACTERS or "; " not in line]
    return f"over {LIMIT_CHARACTERS} characters, or nothing of what would work: {odd[0]!r}" if odd else ""


def fuzz(count: int, seed: int, folder: pathlib.Path) -> list[str]:
    """What is wrong with each of `count` cases that is not as it should be."""
    found = []
    for name in ("configs", "rows"):
        Workspace(folder / name).make()
    for command in roots():  # what is imported when it is needed first counts for no case
        assert dry_run(Workspace(folder / "configs"), command) == (0, "", None)
        if command in ROWS:
            rows = Workspace(folder / "rows")
            rows.write("rows.jsonl", "".join(json.dumps(ROWS[command][0]) + "\n" for _ in range(8)))
            assert read_rows(rows, command, "stop", "error") == (0, "", None)
    for number in range(count):
        case = make_case(seed, number)
        fresh = Workspace(folder / "rows") if case[0] == "rows" else Workspace(folder / "configs")
        for command, base in BASES.items():
            fresh.write(FILES[command], yaml.safe_dump(base))
        if wrong := run(case, fresh):
            found.append(f"{number} ({case[0]}, {case[1]}): {wrong}")
            print(found[-1], flush=True)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        wrong = fuzz(given.count, given.seed, pathlib.Path(folder))
    print(f"{given.count} cases, {len(wrong)} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
