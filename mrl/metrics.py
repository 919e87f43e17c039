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
import secrets
import socket
import urllib.parse
from collections.abc import Mapping, Sequence
from typing import Any

from mrl.config.schema import LogConfig, WandbConfig
from mrl.config.urls import without_queries
from mrl.errors import ConfigError
from mrl.metric_names import is_metric

ONLINE_CHECK_S = 2.0
Cell = str | float | None


class MetricsLog:
    """`metrics.jsonl`, one object per optimizer step, and the sinks beside it.

    path: None writes nothing anywhere (every process but the main one). notes: lines for the user on where metrics go.
    """

    def __init__(
        self, path: pathlib.Path | None, sinks: Sequence[WandbSink | TensorboardSink] = (), notes: Sequence[str] = ()
    ) -> None:
        self.notes = list(notes)
        self._file = open(path, "a", encoding="utf-8") if path is not None else None  # noqa: SIM115
        self._sinks = list(sinks) if path is not None else []

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Appends one step's line, whole and flushed. Floats are written so that equal text means equal bits."""
        unknown = sorted(name for name in metrics if not is_metric(name))
        assert not unknown, f"metrics without a meaning in mrl.metric_names.METRICS: {unknown}"
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
    """Drops the lines after `step`, and torn lines, as after a kill.

    The file is replaced at once or not at all; the target of a link is replaced, not the link.
    """
    if not path.exists():
        return
    path, kept = path.resolve(), []
    with open(path, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            row = _row(line)
            if row is not None and line.endswith("\n") and row["step"] <= step:
                kept.append(line)
    temporary = path.with_name(path.name + ".tmp")
    with open(temporary, "w", encoding="utf-8") as out:
        out.writelines(kept)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, path)


def read(path: pathlib.Path) -> list[dict[str, float]]:
    """Returns the steps of a metrics.jsonl, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def last_line(path: pathlib.Path) -> dict[str, float] | None:
    """Returns the line of the newest step of a metrics.jsonl; None if it is empty, torn or not there."""
    try:
        return _row(path.read_text(encoding="utf-8").splitlines()[-1])
    except (OSError, ValueError, LookupError):
        return None


def _row(line: str) -> dict[str, float] | None:
    """Returns the row of a line; None where it is no step."""
    try:
        row = json.loads(line)
        return {**row, "step": int(row["step"])}
    except (ValueError, LookupError, TypeError, OverflowError, RecursionError):
        return None


def check_packages(log: LogConfig) -> None:
    """Raises ConfigError if a key of `log` needs a missing package."""
    for key, value, package in (
        ("log.tensorboard", log.tensorboard, "tensorboard"),
        ("log.wandb.project", log.wandb.project, "wandb"),
    ):
        if value and importlib.util.find_spec(package) is None:
            raise ConfigError(key, value, f"needs the package {package}", f"pip install {package}, or leave it out")


def check_login(log: LogConfig) -> None:
    """Raises ConfigError if `log.wandb.mode: online` has nobody logged in. For the process that writes."""
    if log.wandb.project is None or log.wandb.mode != "online":
        return
    import wandb as client

    settings = client.setup().settings
    if not _logged_in(settings):
        raise ConfigError(
            "log.wandb.mode",
            "online",
            "needs an account, and nobody is logged in",
            "run `wandb login`, set WANDB_API_KEY, or set it to auto or offline",
        )


def new_run_id() -> str:
    """Returns an id by which wandb recognizes a run after a resume."""
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
    """Opens the log of a run that has made `step` steps. Later lines of an interrupted run are dropped.

    config: the resolved config, for wandb's page. enabled: False on every process but one.
    """
    if not enabled:
        return MetricsLog(None)
    path = output_dir / "metrics.jsonl"
    rewind(path, step)
    sinks: list[WandbSink | TensorboardSink] = []
    notes = []
    if log.wandb.project is not None:
        wandb = WandbSink(output_dir, log.wandb, config=config, run_id=run_id)
        sinks.append(wandb)
        notes.append(wandb.note)
    if log.tensorboard:
        sinks.append(TensorboardSink(output_dir / "tb", step=step))
    return MetricsLog(path, sinks, notes)


class WandbSink:
    """A Weights & Biases run under output_dir/wandb; a resumed run goes on with the same id. note: says where."""

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
                config=without_queries(config),
                settings=client.Settings(silent=True, console="off", x_disable_stats=True),
            )
        except client.Error as error:
            why = f"did not work: wandb cannot start the run {mode} ({error})"
            fix = "log in again with `wandb login`, or set it to offline"
            raise ConfigError("log.wandb.mode", wandb.mode, why, fix) from error
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
    """Returns a value in a table of markdown."""
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    return html.escape(text).replace("|", "&#124;").replace("\n", "<br>")


def _why_offline(client: Any) -> str | None:
    """Returns why wandb cannot reach its server; None if somebody is logged in and the server answers.

    It decides in seconds, never with a prompt.
    """
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
    """Returns whether there are credentials for wandb's server: a key, a token, or an entry in the user's netrc
    file."""
    has_token = bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
    return bool(settings.api_key) or has_token or _in_netrc(urllib.parse.urlsplit(settings.base_url).hostname or "")


def _in_netrc(host: str) -> bool:
    """Returns whether `wandb login` left a key for `host`: it writes to the user's netrc file."""
    path = pathlib.Path(os.environ.get("NETRC") or "~/.netrc").expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
