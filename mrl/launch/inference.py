"""Starts `mrl generate` and `mrl eval`: finds the model, checks keys and layout, and runs ranks that ask it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pkgutil
import shlex
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

from mrl.config.build import build_section
from mrl.config.checks import parallel_dims
from mrl.config.command import Part
from mrl.config.inference import (
    DEFAULT_NEW_TOKENS,
    MAX_POSITIONS,
    EvalConfig,
    EvalKeys,
    EvalRequestConfig,
    GenerateConfig,
    InferenceConfig,
    PlaceConfig,
    RequestConfig,
    check_inference,
    refuse_row_keys,
)
from mrl.config.keys import value_kind
from mrl.config.load import apply_override
from mrl.config.ppo import DEFAULT_CACHE
from mrl.config.ppo_checks import check_inside, check_stop_tokens
from mrl.engine.checks import Sequences
from mrl.errors import ConfigError, UserError
from mrl.launch import preflight
from mrl.launch.environment import JoinedWorld, joined_world
from mrl.launch.start import LOADING, choose_nproc, join
from mrl.trainers.waits import announce, write_error_line

SAMPLING = ("temperature", "top_k", "top_p", "min_p")
"""Keys of `rollout` that a greedy choice leaves unread."""

Use = Literal["sample", "chat", "score"]
Keys = TypeVar("Keys", bound=InferenceConfig)
Checked = TypeVar("Checked")


def generate(
    model: str, overrides: Sequence[str], *, prompts: Sequence[str], file: str | None, chat: bool, score: bool,
    tools: str | None, out: str | None, greedy: bool, nproc: int | None, options: Mapping[str, Any],
) -> int | None:  # fmt: skip
    """Runs `mrl generate`. options: KEY -> VALUE of what has an option of its own. Returns the exit code."""
    joined = joined_world(os.environ)

    def checked() -> tuple[GenerateConfig, int]:
        raw = plain_of(overrides, options)
        refuse_rows(raw, "give rows with --prompts")
        is_greedy = drop_zero_temperature(raw) or greedy
        is_main = joined is None or joined.rank == 0
        from_stdin = not (prompts or file is not None or chat or score)
        texts = _from_stdin() if from_stdin and is_main else list(prompts)  # ranks of torchrun share one stdin
        asked = bool(texts) or (from_stdin and not is_main)
        if "" in prompts:
            raise UserError("--prompt", "", "is no prompt", "give a text")
        _check_request(raw, asked, file=file, chat=chat, score=score, tools=tools, greedy=is_greedy)
        if tools is not None:
            from mrl.inference.loaded import read_tools

            read_tools(tools)  # for what it refuses
        if out is not None:
            _check_out(out, {"the prompts": file, "--tools": tools}, chat=chat, writes=is_main)
        raw.setdefault("rollout", {}).setdefault("samples_per_prompt", 1)
        raw["data"] = {**raw.get("data", {}), "train": file or "-", "eval": file or "-"}
        with _said("reading the model's folder", joined):
            keys, place = prepared(raw, InferenceConfig, model, use="chat" if chat else "score" if score else "sample")
            if file is None:
                refuse_row_keys(keys.data)
            request = RequestConfig(
                prompts=tuple(texts), file=file, chat=chat, score=score, tools=tools, out=out, greedy=is_greedy
            )
            config = GenerateConfig(**vars(keys), place=place, request=request)
            return config, ranks_here(config, place, joined, nproc)

    config, world_size = _by_all(joined, overrides, checked)
    return run("mrl.inference.generate:run", config, world_size, joined)


def evaluate(
    model: str, task: str, overrides: Sequence[str], *, reward: str | None, limit: int | None, against: str | None,
    out: str | None, as_json: bool, nproc: int | None, options: Mapping[str, Any],
) -> int | None:  # fmt: skip
    """Runs `mrl eval`. options: as of `generate`. Returns the exit code."""
    joined = joined_world(os.environ)

    def checked() -> tuple[EvalConfig, int]:
        given = plain_of(overrides, options)
        refuse_rows(given, "name the rows in TASK")
        with _said("reading the task and the model's folder", joined), preflight.quiet():
            from mrl.inference.tasks import check_task_rewards, merged, read_task

            read = read_task(task)
            raw = merged(read, given, reward)
            _check_samples(raw)
            if not raw.get("rewards", {}).get("functions") and raw["rollout"].get("environment") is None:
                names = "gsm8k, exact_match and others (docs/rewards.md), or path.py:name"
                raise UserError("--reward", why="is missing, so that nothing says what is right", fix=f"give {names}")
            if out is not None:
                sources = {"the task": task, "the rows": raw["data"]["eval"], "--against": against}
                _check_out(out, sources, writes=joined is None or joined.rank == 0)
            config = _eval_config(raw, model, against, EvalRequestConfig(
                task=read.name, limit=limit or read.limit, out=out, as_json=as_json, against=against
            ))  # fmt: skip
            check_task_rewards(config)
            if config.request.against is not None:
                from mrl.inference.results import check_comparable, read_result

                check_comparable(config, read_result(config.request.against))
            world_size = ranks_here(config, config.place, joined, nproc)
            if config.other is not None:
                other = dataclasses.replace(config.model, path=config.other.folder)
                ranks_here(dataclasses.replace(config, model=other), config.other, joined, nproc)
        return config, world_size

    config, world_size = _by_all(joined, overrides, checked)
    return run("mrl.inference.evaluate:run", config, world_size, joined)


def _by_all(joined: JoinedWorld | None, overrides: Sequence[str], check: Callable[[], Checked]) -> Checked:
    """Returns the result of `check`. Raises the UserError of the first rank that found one, on every rank.

    Ranks of another launcher meet first, because only the first reads stdin and tries --out. A mistake that one finds
    is then printed once and ends all of them. Else the others would wait for it.
    """
    if joined is None:
        return check()
    if _is_of_cpu(overrides):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch looks
    join(joined)
    with _said("waiting for the other processes", joined):
        from mrl.engine import collective
        from mrl.ops import devices

        collective.join_processes(devices.device_type())
    try:
        return collective.call_on_every_rank(check)
    except UserError as error:
        if joined.rank == error.rank:
            write_error_line(f"mrl: {error}" if error.rank == 0 else f"mrl: rank {error.rank}: {error}")
        collective.wait_for_all()  # torchrun ends all ranks when one has ended: this one might not have said it
        error.said = True
        raise


def _is_of_cpu(overrides: Sequence[str]) -> bool:
    """Returns whether KEY=VALUE choose the CPU; what is wrong with them is said later."""
    raw: dict[str, Any] = {}
    with contextlib.suppress(UserError):
        for override in overrides:
            apply_override(raw, override)
    engine = raw.get("engine")
    return isinstance(engine, dict) and engine.get("device") == "cpu"


def _eval_config(raw: dict[str, Any], model: str, against: str | None, request: EvalRequestConfig) -> EvalConfig:
    """Returns what ranks are given. against: a model, or the file of a result."""
    keys, place = prepared(raw, EvalKeys, model)
    other = None
    if against is not None and not against.endswith(".json"):
        _, other = prepared(raw, EvalKeys, against, "--against")
        if place.limit is not None and other.limit is not None and other.limit < place.limit:
            keys, place = prepared(raw, EvalKeys, model, other=other)  # both get the same prompts
        other = dataclasses.replace(
            other, limit=place.limit, limited_by=place.limited_by,
            dtype=raw.get("model", {}).get("dtype", other.dtype),
        )  # fmt: skip
        request = dataclasses.replace(request, against=None)
    return EvalConfig(**vars(keys), place=place, other=other, request=request)


def plain_of(overrides: Sequence[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns KEY=VALUE and options as plain data; one that is given in both is refused."""
    raw: dict[str, Any] = {}
    for override in overrides:
        apply_override(raw, override)
    for name in ("data", "model", "rollout", "engine"):
        if not isinstance(raw.get(name, {}), Mapping):
            why = f"is {value_kind(raw[name])}"
            raise ConfigError(name, raw[name], why, f"give keys of it, as in {name}.KEY=VALUE")
    given = {override.partition("=")[0] for override in overrides}
    for key, value in options.items():
        if value is None or value == ():
            continue
        if key in given:
            raise ConfigError(key, why="is given by KEY=VALUE and by an option", fix="keep one of them")
        section, _, name = key.rpartition(".")
        (raw.setdefault(section, {}) if section else raw)[name] = list(value) if isinstance(value, tuple) else value
    return raw


def refuse_rows(raw: Mapping[str, Any], fix: str) -> None:
    """Raises ConfigError for rows that are given as keys: these commands have a word of their own for them."""
    for name in ("train", "eval"):
        if name in raw.get("data", {}):
            raise ConfigError(f"data.{name}", raw["data"][name], "has no effect here", fix)


def drop_zero_temperature(raw: dict[str, Any]) -> bool:
    """Takes a temperature of 0 out of `rollout`: it is greedy, for which rollouts have another word."""
    rollout = raw.get("rollout", {})
    if type(rollout.get("temperature")) in (int, float) and rollout["temperature"] == 0:
        del rollout["temperature"]
        return True
    return False


def _check_samples(raw: dict[str, Any]) -> None:
    """Raises UserError where a task's temperature does not go with its number of samples."""
    samples = raw["rollout"].setdefault("samples_per_prompt", 1)
    if drop_zero_temperature(raw) and type(samples) is int and samples > 1:
        why = f"makes the {samples} samples of a prompt equal"
        raise UserError("--temperature", 0, why, "give one above 0, or --samples 1, which is greedy")
    if samples == 1:
        check_unread(raw, SAMPLING, "one sample of each prompt, which is greedy (--samples)")


def _check_out(out: str, sources: Mapping[str, str | None], *, chat: bool = False, writes: bool) -> None:
    """Raises UserError if results cannot be written, or would replace one of their sources.

    - sources: files by their names in words
    - writes: this process writes the results
    """
    from mrl.inference.output import check_writable  # it imports torch

    if chat:
        raise UserError("--out", why="has no effect with --chat", fix="write /save FILE there")
    for name, path in sources.items():
        if path is not None and os.path.realpath(os.path.expanduser(path)) == os.path.realpath(os.path.expanduser(out)):
            raise UserError("--out", why=f"is the file of {name}", fix="give another one")
    if writes:
        check_writable(out)


def _from_stdin() -> list[str]:
    """Returns the text on stdin as a prompt, where there is one."""
    if sys.stdin is None or sys.stdin.isatty():
        return []
    text = sys.stdin.read()
    return [text.removesuffix("\n")] if text.strip() else []


def _check_request(
    raw: Mapping[str, Any], texts: bool, *, file: str | None, chat: bool, score: bool, tools: str | None, greedy: bool
) -> None:
    """Raises UserError for options that do not go together. texts: there are some, of --prompt or on stdin."""
    given = [name for name, value in (("--prompt", texts), ("--prompts", file), ("--chat", chat)) if value]
    if len(given) > 1:
        raise UserError(given[0], why=f"is given together with {given[1]}", fix="keep one of them")
    if not given:
        ways = "--prompt TEXT, --prompts FILE.jsonl, a text on stdin, or --chat"
        raise UserError("mrl generate", why="has no prompt", fix=f"give {ways}")
    if score and file is None:
        raise UserError("--score", why="reads rows with completions", fix="give them with --prompts FILE.jsonl")
    if tools is not None and file is not None:
        raise UserError(
            "--tools", why="is for --prompt and --chat: rows have a field tools of their own", fix="leave it out"
        )
    if greedy or score:
        check_unread(raw, SAMPLING if greedy else SAMPLING[1:], "--greedy" if greedy else "--score")
    if greedy and raw.get("rollout", {}).get("samples_per_prompt", 1) != 1:
        check_unread(raw, ("samples_per_prompt",), "--greedy, by which all samples of a prompt are equal")
    if score:
        names = ("samples_per_prompt", "max_new_tokens", "stop", "stop_tokens", "backend", "environment", "server")
        check_unread(raw, (*names, "cache_tokens", "prefill_tokens", "cuda_graphs"), "--score, which samples nothing")
    if chat:
        check_unread(raw, ("samples_per_prompt", "environment"), "--chat")


def check_unread(raw: Mapping[str, Any], names: Sequence[str], reason: str) -> None:
    """Raises ConfigError where one of the keys of `rollout` is given and nothing would read it."""
    for name in names:
        if name in raw.get("rollout", {}):
            value = raw["rollout"][name]
            raise ConfigError(f"rollout.{name}", value, f"has no effect with {reason}", "leave one of them out")


def prepared(
    raw: Mapping[str, Any], root: type[Keys], given: str, key: str = "MODEL", *, other: PlaceConfig | None = None,
    use: Use = "sample",
) -> tuple[Keys, PlaceConfig]:  # fmt: skip
    """Returns the config of `raw` and the place of the model. The model's folder fills keys that are not given.

    The dtype is that of the stored weights. Prompts and new tokens fit the positions of the model and of `other`.
    """
    plain = {name: dict(value) if isinstance(value, Mapping) else value for name, value in raw.items()}
    build_section(root, {**plain, "model": {"path": given, **plain.get("model", {})}}, "", root)  # for what it refuses
    if "path" in plain.get("model", {}):
        raise ConfigError("model.path", why=f"is {key}, which comes first", fix="leave it out")
    with preflight.quiet():
        from mrl.inference.places import find_model

        place = find_model(given, key)
    plain["model"] = {"path": place.folder, "dtype": place.dtype, **plain.get("model", {})}
    rollout, data = plain.setdefault("rollout", {}), plain.setdefault("data", {})
    if "max_prompt_length" in data:
        place = dataclasses.replace(place, limit=None)
    elif place.limit is not None:
        limit, words = _longest_sequence(place.limit, place.limited_by, other, rollout, use)
        rollout.setdefault("max_new_tokens", max(1, min(DEFAULT_NEW_TOKENS, limit // 2)))
        new = rollout["max_new_tokens"]
        if type(new) is int and new >= limit:
            why = f"leaves no prompt room in {words}"
            raise ConfigError("rollout.max_new_tokens", new, why, f"give at most {limit - 1}")
        if type(new) is int:
            data["max_prompt_length"] = limit - new
        place = dataclasses.replace(place, limit=limit, limited_by=words)
    config = build_section(root, plain, "", root)
    auto = rollout.get("cache_tokens") == "auto"
    if config.rollout.backend == "native" and (auto or (use != "sample" and "cache_tokens" not in rollout)):
        # Of a chat half keeps the conversation between its turns. Neither half is larger than the conversation has
        # grown, and scores have no cache.
        room = max(config.rollout.cache_limit, config.max_length * (1 if use == "sample" else 2))
        config = dataclasses.replace(config, rollout=dataclasses.replace(config.rollout, cache_tokens=room))
    check_inference(config)
    return config, place


def _longest_sequence(
    positions: int, words: str, other: PlaceConfig | None, rollout: Mapping[str, Any], use: Use
) -> tuple[int, str]:
    """Returns the tokens of the longest sequence, and what has so few, in words: whatever bounds it most."""
    bounds = [(positions, words)]
    given = rollout.get("cache_tokens")
    room = given if type(given) is int and given > 0 else DEFAULT_CACHE
    if rollout.get("backend", "native") != "native":
        bounds.append(
            (MAX_POSITIONS, f"the {MAX_POSITIONS} tokens that a sequence has where data.max_prompt_length is not set")
        )
    elif use == "sample":
        bounds.append((room, f"the {room} tokens of rollout.cache_tokens"))
    elif given not in (None, "auto"):
        half = max(1, room // 2)
        bounds.append((half, f"the {half} tokens that a conversation has of rollout.cache_tokens {room}"))
    if other is not None and other.limit is not None:
        bounds.append((other.limit, f"the {other.limit} positions of {other.given}"))
    return min(bounds, key=lambda bound: bound[0])


def ranks_here(config: InferenceConfig, place: PlaceConfig, joined: JoinedWorld | None, nproc: int | None) -> int:
    """Returns how many ranks ask the model. Raises a UserError where it cannot be run on them."""
    if config.engine.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    beside = dataclasses.replace(config.model, init="random") if place.source is not None else config.model
    # a run from scratch has a folder without weights; those of a checkpoint are elsewhere
    part = Part("", config.model, config.engine, hf=preflight.read_model_config(beside))
    if joined is not None and nproc is not None:
        raise ConfigError("--nproc", nproc, f"has no effect under {joined.launcher}", "leave it out")
    world_size = choose_nproc([part], nproc) if joined is None else joined.world_size
    new, prompt = config.rollout.max_new_tokens, config.data.max_prompt_length
    words = f"data.max_prompt_length {prompt} + rollout.max_new_tokens {new}"
    sequences = Sequences(config.max_length, words, packed=config.data.packing, generated=True)
    preflight.check_part(part, parallel_dims(config.engine.parallel, world_size), sequences)
    check_inside(config.rollout, world_size, part.hf)
    with preflight.quiet():
        from mrl.weights.hf_config import vocab_size_of

    check_stop_tokens(config.rollout, vocab_size_of(part.hf))
    return world_size


def run(target: str, config: Any, world_size: int, joined: JoinedWorld | None) -> int | None:
    """Runs `target` on so many ranks; a rank of another launcher runs it as that one. Returns the exit code."""
    command_line = shlex.join(["mrl", *sys.argv[1:]])
    with _said(LOADING, joined):
        from mrl.launch import local

    def here(*given: Any) -> None:
        with _said(LOADING, joined):
            function: Callable[..., None] = pkgutil.resolve_name(target)
        function(*given)

    try:
        if joined is not None:
            with warnings.catch_warnings(action="ignore"):
                here(config, command_line)
        elif world_size == 1:
            local.run_here(here, config, command_line)
        else:
            local.launch(target, config, command_line, world_size, quiet=True)
    except local.RankFailed as failure:
        print(f"mrl: {failure}", file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted") from None
    return None


def _said(what: str, joined: JoinedWorld | None) -> Any:
    return announce(what, shows=joined is None or joined.rank == 0, write=write_error_line)
