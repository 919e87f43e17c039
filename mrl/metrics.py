"""Metrics of a run: `metrics.jsonl`, and wandb and tensorboard when asked.

A step's metrics are one flat dict made anew for that step; nothing is kept from one step to the next.
"""

from __future__ import annotations

import html
import importlib.util
import json
import netrc
import os
import pathlib
import re
import secrets
import socket
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mrl.config.schema import LogConfig, WandbConfig
from mrl.errors import ConfigError

SFT_METRICS: dict[str, str] = {
    "step": "optimizer steps made, from 1; 0 is the evaluation of `mrl ppo` before training",
    "train/loss": "mean negative log-likelihood of the global mini-batch's trained tokens, before the step; of `mrl ppo`, `actor/loss`",
    "train/grad_norm": "global L2 norm of the gradient before clipping",
    "train/lr": "learning rate that the step was made with",
    "train/tokens": "trained tokens (sum of the loss mask) since the start of the run",
    "perf/step_s": "seconds the step took, without evaluation and saving",
    "perf/tokens_per_s": "tokens in the global mini-batch, trained or not, without padding, per second over all ranks",
    "perf/mfu": "model FLOPs of the step over what the GPUs' dense bf16 peak allows; absent where that is not known",
    "perf/memory_gb": "peak memory of a rank so far, the largest over ranks: of the GPU, or the process where there is none",
    "eval/loss": "mean negative log-likelihood of the evaluation set's trained tokens, after the step",
}
"""Name -> meaning of what `mrl sft` writes."""

CONVERSATION_METRICS: dict[str, str] = {
    "rollout/turns": "mean number of turns of the policy in a conversation (written where `rollout.environment` is set, as the next four)",
    "rollout/tool_calls": "mean number of messages of role tool that the environment answered with in a conversation",
    "rollout/turn_length": "mean number of tokens that the policy sampled in a turn",
    "rollout/turn_length_max": "most tokens of a turn",
    "rollout/observation_length": "mean number of tokens in a conversation that the environment said, the chat template's around them included",
}
PPO_METRICS: dict[str, str] = {
    "iteration": "the rollout that the step is trained on, from 1; what follows is of it, where it is not of the step",
    "reward/mean": "mean over the rollout's sequences of what they are rewarded with: rewards times their weights, without KL and length penalties",
    "reward/std": "standard deviation of the same",
    "reward/min": "the smallest of them",
    "reward/max": "the largest of them",
    "reward/equal_groups": "fraction of the groups of samples, of all that were sampled, whose rewards are all equal, so that group differences teach nothing; absent where a group is one sample",
    "reward/<label>/mean": "the same of one reward alone, before its weight",
    "reward/<label>/std": "and its standard deviation",
    "reward/faults": "calls of reward functions that failed and counted as 0 (`rewards.on_error: zero`)",
    "rollout/response_length": "mean number of tokens that the policy sampled of a sequence",
    "rollout/response_length_min": "tokens of the shortest of these responses",
    "rollout/response_length_max": "tokens of the longest of them",
    "rollout/response_length_finished": "mean number of tokens of those that ended by themselves; absent where none did",
    "rollout/prompt_length": "mean number of tokens before the first that the policy sampled",
    "rollout/prompt_length_max": "tokens of the longest such prompt",
    "rollout/finished": "fraction of the sequences that ended by themselves, not at a length or turn limit",
    **CONVERSATION_METRICS,
    "rollout/tokens_per_s": "sampled tokens per second of sampling, over all ranks",
    "rollout/logprob_gap": "mean over sampled tokens of the absolute difference of their log-probs, of sampler and trainer",
    "rollout/logprob_gap_max": "the largest of these differences",
    "rollout/prompts_rejected": "prompts whose group of samples was thrown away and another sampled (dynamic sampling)",
    "advantage/mean": "mean of the advantages over the rollout's trained tokens, as they enter the loss",
    "advantage/std": "standard deviation of the same",
    "actor/loss": "the actor's whole loss on the mini-batch, aggregated as `algorithm.aggregation` says, before the step",
    "actor/kl": "mean over trained tokens of the KL from the reference to the policy (k3), in nats, before the step",
    "actor/sequence_kl": "mean over the rollout's sequences of the sum of the KL from the reference to the policy (k1, of either sign) over their trained tokens; what kl_target is compared with",
    "actor/kl_coef": "coefficient that the KL was taken with",
    "actor/approx_kl": "mean over trained tokens of the KL from the policy to the one that sampled (k3), before the step",
    "actor/entropy": "mean over trained tokens of the entropy of the policy's next-token distribution, in nats, before the step",
    "actor/ratio": "mean over trained tokens of how much likelier the policy makes them than the one that sampled, before the step",
    "actor/ratio_max": "largest such ratio of a trained token, or its inverse where that is larger",
    "actor/clip_fraction": "fraction of the trained tokens where clipping changed the loss or its gradient",
    "actor/clip_fraction_low": "the part of that fraction whose ratio is below 1",
    "actor/clip_fraction_high": "the part whose ratio is above 1",
    "actor/importance_weight": "mean over trained tokens of the weight that corrects for the sampler's probabilities",
    "actor/importance_limited": "fraction of the trained tokens where that weight was capped or set to 0",
    "critic/loss": "the critic's loss on the mini-batch, aggregated as the actor's, before the step",
    "critic/value": "mean over trained tokens of the critic's value, before the step",
    "critic/clip_fraction": "fraction of the trained tokens where `algorithm.value_clip` took the gradient away",
    "critic/explained_variance": "1 - Var(return - value) / Var(return) over the mini-batch's trained tokens, before the step",
    "critic/grad_norm": "global L2 norm of the critic's gradient before clipping",
    "critic/lr": "learning rate that the critic's step was made with",
    "eval/accuracy": "mean over held-out prompts of the first reward function's value (without functions, of the reward): of the greedy answer, or the best of `train.eval_samples`",
    "eval/reward": "mean reward over all answers to held-out prompts",
    "eval/faults": "calls of reward functions that failed on them and counted as 0",
    "eval/response_length": "mean number of tokens of these answers",
    "perf/rollout_s": "seconds of sampling",
    "perf/reward_s": "seconds of scoring",
    "perf/log_probs_s": "seconds of the forward passes before training: log-probs of actor and reference, values of the critic",
    "perf/update_s": "seconds of the step's forward and backward passes and updates, of all roles",
    "perf/eval_s": "seconds of evaluation",
}
"""Name -> meaning of what `mrl ppo` writes beside `SFT_METRICS`, of which it leaves out eval/loss. <label>: of a reward, as
`mrl.config.rewards.label_of` says."""

METRICS: dict[str, str] = SFT_METRICS | PPO_METRICS
"""Name -> meaning, the same on every backend and layout."""

_WITH_LABEL = [re.compile(name.replace("<label>", ".+")) for name in METRICS if "<label>" in name]

ONLINE_CHECK_S = 2.0


def is_metric(name: str) -> bool:
    """Whether METRICS says what `name` means."""
    return name in METRICS or any(pattern.fullmatch(name) for pattern in _WITH_LABEL)


Cell = str | float | None


class Sink(Protocol):
    """Somewhere else that metrics go, and what a file of numbers has no place for."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None: ...

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None: ...

    def close(self) -> None: ...


class MetricsLog:
    """`metrics.jsonl`, one object per optimizer step, and the sinks beside it.

    path: None writes nothing anywhere (every process but the main one). notes: lines for the user on where metrics go.
    """

    def __init__(self, path: pathlib.Path | None, sinks: Sequence[Sink] = (), notes: Sequence[str] = ()) -> None:
        self.notes = list(notes)
        self._file = open(path, "a", encoding="utf-8") if path is not None else None  # noqa: SIM115
        self._sinks = list(sinks) if path is not None else []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one step's line, whole and flushed. Floats are written so that equal text means equal bits."""
        unknown = sorted(name for name in metrics if not is_metric(name))
        assert not unknown, f"metrics without a meaning in mrl.metrics.METRICS: {unknown}"
        if self._file is None:
            return
        self._file.write(json.dumps({"step": step, **metrics}, allow_nan=False) + "\n")
        self._file.flush()
        for sink in self._sinks:
            sink.write(step, metrics)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """Shows a table in wandb and tensorboard: something of the step `step`, each row with an entry a column."""
        for sink in self._sinks:
            sink.table(step, name, columns, rows)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        """Shows in wandb and tensorboard how values of the step `step` are distributed, by name."""
        for sink in self._sinks:
            sink.histograms(step, {name: numbers for name, numbers in values.items() if numbers})

    @property
    def has_sinks(self) -> bool:
        """Whether tables and histograms go anywhere."""
        return bool(self._sinks)

    def sync(self) -> None:
        """Puts what was written on disk: before a checkpoint, so that no checkpoint is ahead of its metrics."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Ends the file and the sinks. May be called twice."""
        if self._file is not None:
            self._file.close()
        for sink in self._sinks:
            sink.close()
        self._file, self._sinks = None, []


def rewind(path: pathlib.Path, step: int) -> None:
    """Drops the lines after `step`, and a last line that a kill tore; the file is replaced at once or not at all."""
    if not path.exists():
        return
    kept = []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                break  # only the last line of a killed run can be torn
            if line.endswith("\n") and row["step"] <= step:
                kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def read(path: pathlib.Path) -> list[dict[str, float]]:
    """The steps of a metrics.jsonl, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def last_line(path: pathlib.Path) -> dict[str, float] | None:
    """The line of the newest step of a metrics.jsonl; None where it is empty, torn or not there."""
    try:
        line = json.loads(path.read_text(encoding="utf-8").splitlines()[-1])
        return {**line, "step": int(line["step"])}
    except (OSError, ValueError, LookupError, TypeError):
        return None


def check_packages(log: LogConfig) -> None:
    """Raises ConfigError where a key of `log` needs a package that is not installed."""
    if log.tensorboard and importlib.util.find_spec("tensorboard") is None:
        raise ConfigError(
            "log.tensorboard: value true needs the package tensorboard; pip install 'mrl[tensorboard]', or set it to false"
        )
    if log.wandb.project is not None and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            f'log.wandb.project: value "{log.wandb.project}" needs the package wandb; pip install wandb, or set it to null'
        )


def check_login(log: LogConfig) -> None:
    """Raises ConfigError where `log.wandb.mode: online` has nobody logged in. For the process that writes the metrics."""
    if log.wandb.project is None or log.wandb.mode != "online":
        return
    import wandb as client

    settings = client.setup().settings
    if not _logged_in(settings):
        raise ConfigError(
            'log.wandb.mode: value "online" needs an account, and nobody is logged in; run `wandb login`, set WANDB_API_KEY, or '
            "set it to auto or offline"
        )


def new_run_id() -> str:
    """An id by which wandb knows a run again after a resume."""
    return secrets.token_hex(4)


def open_metrics(
    output_dir: pathlib.Path,
    log: LogConfig,
    *,
    step: int,
    config: Mapping[str, Any],
    run_id: str,
    enabled: bool,
) -> MetricsLog:
    """Opens the log of a run that has made `step` steps; what an interrupted run wrote after them is dropped.

    config: the resolved config, for wandb's page. enabled: False on every process but one.
    """
    if not enabled:
        return MetricsLog(None)
    path = output_dir / "metrics.jsonl"
    rewind(path, step)
    sinks: list[Sink] = []
    notes = []
    if log.wandb.project is not None:
        wandb = WandbSink(output_dir, log.wandb, config=config, run_id=run_id)
        sinks.append(wandb)
        notes.append(wandb.note)
    if log.tensorboard:
        sinks.append(TensorboardSink(output_dir / "tb", step=step))
    return MetricsLog(path, sinks, notes)


class WandbSink:
    """A Weights & Biases run under output_dir/wandb; a resumed run goes on with the same id. note: where it is, in words."""

    def __init__(self, output_dir: pathlib.Path, wandb: WandbConfig, *, config: Mapping[str, Any], run_id: str) -> None:
        import wandb as client

        why = _why_offline(client) if wandb.mode == "auto" else None
        mode = wandb.mode if wandb.mode != "auto" else ("online" if why is None else "offline")
        try:
            self._run = client.init(
                project=wandb.project,
                name=wandb.name or output_dir.resolve().name,
                id=run_id,
                dir=str(output_dir),
                mode=mode,
                resume="allow",
                config=dict(config),
                settings=client.Settings(silent=True, console="off", x_disable_stats=True),
            )
        except client.Error as error:
            raise ConfigError(
                f'log.wandb.mode: value "{wandb.mode}": wandb cannot start the run {mode} ({" ".join(str(error).split())}); '
                "log in again with `wandb login`, or set it to offline"
            ) from error
        self.note = f"wandb: {self._run.url}"
        if mode == "offline":
            because = "" if why is None else f", because {why}"
            folder = pathlib.Path(self._run.dir).parent
            self.note = f"wandb: writes offline{because}; `wandb sync {folder}` uploads it"
        # steps come with the metrics: wandb's own counter refuses the steps that a resumed run makes again
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({"step": step, **metrics})

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        import wandb as client

        self._run.log({"step": step, name: client.Table(columns=list(columns), data=[list(row) for row in rows])})

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        import wandb as client

        self._run.log({"step": step, **{name: client.Histogram(list(numbers)) for name, numbers in values.items()}})

    def close(self) -> None:
        self._run.finish()


class TensorboardSink:
    """Event files under output_dir/tb; steps after `step` that an interrupted run wrote are purged."""

    def __init__(self, path: pathlib.Path, *, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(path), purge_step=step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        lines = [columns, ["---"] * len(columns), *rows]
        self._writer.add_text(name, "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines), step)

    def histograms(self, step: int, values: Mapping[str, Sequence[float]]) -> None:
        import numpy

        for name, numbers in values.items():
            self._writer.add_histogram(name, numpy.array(numbers), step)

    def close(self) -> None:
        self._writer.close()


def _cell(value: Cell) -> str:
    """A value in a table of markdown."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def _why_offline(client: Any) -> str | None:
    """What keeps wandb from its server, in words; None where somebody is logged in and the server answers. Decided in seconds,
    never with a prompt."""
    settings = client.setup().settings
    url = urllib.parse.urlsplit(settings.base_url)
    if (mode := os.environ.get("WANDB_MODE", "online")) != "online":
        return f"WANDB_MODE is {mode}"
    if not _logged_in(settings):
        return "nobody is logged in (`wandb login`, or WANDB_API_KEY)"
    port = url.port or (443 if url.scheme == "https" else 80)
    try:
        socket.create_connection((url.hostname, port), timeout=ONLINE_CHECK_S).close()
    except OSError:
        return f"{url.hostname} does not answer"
    return None


def _logged_in(settings: Any) -> bool:
    """Whether there are credentials for wandb's server: a key, a token, or an entry in the user's netrc file."""
    has_token = bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
    return bool(settings.api_key) or has_token or _in_netrc(urllib.parse.urlsplit(settings.base_url).hostname or "")


def _in_netrc(host: str) -> bool:
    """Whether `wandb login` left a key for `host`: it writes to the user's netrc file."""
    path = pathlib.Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
