"""Runs `mrl check`, from a config to a verdict on each layout."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pkgutil
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from mrl.check import reference
from mrl.check.command import CommandCheck, Subject
from mrl.check.compare import BOUNDS, LayoutComparison, Problem, Undecided, clue, problems, undecided
from mrl.check.folder import CheckedModel, make_folder, parse_cut
from mrl.check.layouts import Layout, Machine, choose_cut, layouts_of_config, machine, parse_layouts, size_of_batch
from mrl.check.measure import LayoutWork, StepNumbers, Task, numbers_file, result_file, work_file
from mrl.check.reference import has_experts, undecided_tokens
from mrl.check.rows import Rows
from mrl.config.command import TrainingCommand, all_training, command_of_data
from mrl.config.load import apply_override, load_config, read_yaml
from mrl.config.schema import MicroBatchConfig
from mrl.engine.checks import Sequences
from mrl.engine.lora.folder import shapes_in_file, write_adapter
from mrl.engine.registry import checks_of
from mrl.errors import ConfigError, ModelError, UserError
from mrl.launch import preflight
from mrl.launch.local import RankFailed, launch
from mrl.weights.hub import model_folder
from mrl.weights.json_file import read_json
from mrl.words import pluralize

B_SCALE = 0.05
"""Deviation of what adapters start from: with B at zero, A would have no gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Holds the words of the command line."""

    config_path: str
    overrides: Sequence[str] = ()
    layouts: str = "auto"
    against: Literal["hf", "first"] = "hf"
    cut: str = "auto"
    dtype: Literal["float32", "bfloat16"] = "float32"
    nproc: int | None = None
    tokens: int | None = None


Verdict = Literal["same", "different", "undecided", "failed"]


@dataclasses.dataclass(frozen=True)
class CheckRow:
    """Is the verdict on one layout."""

    role: str  # "" where the config has one model alone
    layout: str
    processes: int
    measured: LayoutComparison | None = None  # None of the one that others are compared with
    problems: Sequence[Problem] = ()
    failed: str | None = None  # why it ended before it had numbers

    @property
    def name(self) -> str:
        return f"{self.role} {self.layout}".strip()

    @property
    def verdict(self) -> Verdict:
        if self.failed is not None:
            return "failed"
        if not self.problems:
            return "same"
        return "different" if self.undecided is None else "undecided"

    @property
    def undecided(self) -> Undecided | None:
        if self.measured is None or self.failed is not None:
            return None
        return undecided(self.measured, self.problems)

    @property
    def clue(self) -> str | None:
        return clue(self.problems) if self.undecided is None else self.undecided.why


@dataclasses.dataclass
class Report:
    """Holds everything that a check found."""

    header: list[tuple[str, str]] = dataclasses.field(default_factory=list)  # what of, in words
    batch: list[str] = dataclasses.field(default_factory=list)  # how the batch differs from its rows
    rows: list[CheckRow] = dataclasses.field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """Returns the layouts that differ or failed, and the batch if it differs."""
        rows = [row.name for row in self.rows if row.verdict in ("different", "failed")]
        return ["the batch", *rows] if self.batch else rows

    @property
    def undecided(self) -> list[str]:
        return [row.name for row in self.rows if row.verdict == "undecided"]

    @property
    def same(self) -> list[str]:
        """Returns the layouts that were compared and are the same, without their reference."""
        return [row.name for row in self.rows if row.measured is not None and row.verdict == "same"]

    @property
    def nothing(self) -> list[str]:
        """Returns the layouts that could not be compared: all of them if none is the same and none is wrong."""
        if not (self.same or self.wrong):
            return [row.name for row in self.rows]
        return [row.name for row in self.rows if row.undecided is not None and not row.undecided.compared]


class Listener:
    """Hears of a check as it goes; this one minds nothing."""

    def header(self, name: str, text: str) -> None:
        """A line that says what is checked."""

    def doing(self, what: str) -> None:
        """Called when something begins."""

    def row(self, row: CheckRow) -> None:
        """A layout is done."""


def read_config(path: str, overrides: Sequence[str]) -> tuple[TrainingCommand, Any]:
    """Returns the command that a config file is of, and the config."""
    raw = read_yaml(path)
    for override in overrides:
        apply_override(raw, override)
    command = command_of_data(raw)
    if command.checked is None:
        known = ", ".join(f"mrl {other.name}" for other in all_training() if other.checked is not None)
        raise UserError(
            path, why=f"is a config of mrl {command.name}, which mrl check has no step for", fix=f"give one of {known}"
        )
    return command, load_config(path, overrides, command.root)


def check(asked: CheckOptions, listener: Listener) -> Report:
    """Runs every layout on its own processes. Raises UserError for what the user can put right."""
    command, config = read_config(asked.config_path, asked.overrides)
    if "cpu" in preflight.devices(command, config):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # megatron computes on a GPU wherever it sees one
    listener.doing("reading the config and the models' folders")
    parts = [part for part in preflight.check_files(command, config) if part.optimizer is not None]
    paths = {part.role: model_folder(part.model.path, weights=part.model.init == "pretrained") for part in parts}
    place = tempfile.mkdtemp(prefix="mrl_check_")
    try:
        session = Session(asked, command, config, Path(place), listener)
        subjects = session.checked.subjects(config, parts, paths)
        fitted = [session.fit(subject) for subject in subjects]
        for subject, (model, layouts) in zip(subjects, fitted, strict=True):
            session.prepare(subject, model, layouts)
        session.run()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    return session.report


@dataclasses.dataclass(frozen=True)
class Item:
    """Is a layout of a model, to be run."""

    number: int
    row: CheckRow  # without a result
    work: LayoutWork


class Session:
    """Runs one check. place: the folder of its files."""

    def __init__(
        self, asked: CheckOptions, command: TrainingCommand, config: Any, place: Path, listener: Listener
    ) -> None:  # fmt: skip
        self.asked, self.command, self.config, self.place, self.listener = asked, command, config, place, listener
        assert command.checked is not None, command.name
        self.checked: CommandCheck[Any] = pkgutil.resolve_name(command.checked)
        self.report = Report()
        self.rows: Rows | None = None  # which all roles share
        self.items: list[Item] = []

    def header(self, name: str, text: str) -> None:
        self.report.header.append((name, text))
        self.listener.header(name, text)

    def fit(self, subject: Subject) -> tuple[CheckedModel, list[Layout]]:
        """Makes the folder and the layouts of one model. Raises UserError where something does not fit it."""
        self._check_router_losses(subject)
        on = machine(subject.config.engine.device, self.asked.nproc)
        if on.note:
            self.header("device", on.note)
        own, config = subject.config.engine.parallel, subject.config
        named = None if self.asked.layouts == "auto" else parse_layouts(self.asked.layouts, own)
        cut = parse_cut(self.asked.cut)
        if cut is None:
            cut = choose_cut(read_json(Path(config.model.path, "config.json")), config.head, named, on)
        model = make_folder(
            config.model.path, str(self.place / f"model-{subject.name}"), cut=cut, head=config.head,
            init=config.model.init, seed=config.seed,
        )  # fmt: skip
        self.header(subject.name, model.words)
        if self._dtype(model) != self.asked.dtype:
            self.header(
                "dtype", f"the step of the {subject.name} is compared in float32: in bfloat16 routers are undecided"
            )
        with self.command.rewrite_error_keys(self.config, subject.part.role):
            return model, self._layouts(subject, model, named, on)

    def prepare(self, subject: Subject, model: CheckedModel, layouts: list[Layout]) -> None:
        """Makes the batch and the reference of one model, and the work of its layouts."""
        on = machine(subject.config.engine.device, self.asked.nproc)
        rows = self._rows(subject, model, layouts, on)
        adapter = self._adapter(subject, model)
        store = self.place / f"reference-{subject.name}"
        store.mkdir()
        narrow = None
        if self.asked.against == "hf" or has_experts(read_json(Path(model.path, "config.json"))):
            self.listener.doing(f"computing the step of the {subject.name} with transformers")
            narrow = self._reference(subject, model, rows, store, adapter, on)
        dtype, micro_batch = self._dtype(model), micro_batch_of(subject, rows, layouts)
        for layout in layouts:
            work = LayoutWork(
                config=subject.on(layout, path=model.path, init=model.init, dtype=dtype, micro_batch=micro_batch),
                batch=rows.batch, loss_fn=subject.loss_fn, denominator=subject.denominator,
                ctx={"temperature": subject.loss.temperature, **rows.ctx}, adapter=adapter, reference=str(store),
                bounds=BOUNDS[dtype], undecided=narrow,
                writes=self.asked.against == "first" and layout == layouts[0],
            )  # fmt: skip
            row = CheckRow(subject.part.role, str(layout), layout.processes)
            self.items.append(Item(len(self.items), row, work))

    # -- what is checked ----------------------------------------------------------------------------------------------

    def _check_router_losses(self, subject: Subject) -> None:
        """Raises ConfigError for losses of the router that transformers defines differently."""
        moe = subject.config.engine.moe
        for name in ("aux_loss", "z_loss") if self.asked.against == "hf" else ():
            if value := getattr(moe, name):
                key = f"{subject.part.key('engine')}.moe.{name}"
                fix = f"give --against first, or {key}=0"
                raise ConfigError(key, value, "is a router loss, which transformers defines otherwise", fix)

    def _layouts(
        self, subject: Subject, model: CheckedModel, named: list[Layout] | None, on: Machine
    ) -> list[Layout]:  # fmt: skip
        """Returns the layouts. Raises ConfigError if a requested one does not fit the model."""
        raw = read_json(Path(model.path, "config.json"))
        engine, checks = subject.config.engine, checks_of(subject.config.engine.backend)

        def refusal(layout: Layout) -> ConfigError | ModelError | None:
            if layout.dims.dp > self.config.train.global_batch_size:
                why = f"has too few sequences for the {layout.dims.dp} replicas of {layout}"
                size = self.config.train.global_batch_size
                return ConfigError("train.global_batch_size", size, why, f"give at least {layout.dims.dp}")
            on_layout = dataclasses.replace(engine, parallel=layout.parallel)
            sequences = Sequences(2, "--tokens", packed=subject.config.packing, generated=False)
            try:
                checks.check_config(subject.config.model, on_layout)
                checks.check_model(on_layout, layout.dims, raw, sequences)
            except (ConfigError, ModelError) as error:
                return error
            return None

        if named is None:
            return layouts_of_config(engine.parallel, most=on.processes, fits=lambda layout: refusal(layout) is None)
        for layout in named:
            if layout.processes > on.processes:
                why = f"{layout} needs {layout.processes} processes, and {on.processes} run here at a time"
                raise UserError("--layouts", why=why, fix="give a smaller one, or a larger --nproc on a CPU")
            if (error := refusal(layout)) is not None:
                raise error.going_on(f"--layouts {layout} does not fit")
        return named

    def _rows(self, subject: Subject, model: CheckedModel, layouts: list[Layout], on: Machine) -> Rows:
        """Returns the batch, which is made for the first role."""
        if self.rows is not None:
            return self.rows
        self.listener.doing("making the batch")
        sequences, length = size_of_batch(
            model.parameters, layouts, tokens=self.asked.tokens, most=self.config.train.global_batch_size,
            even=subject.has_router_losses, on=on,
        )  # fmt: skip
        self.rows = self.checked.rows(
            self.config, subject, model, sequences=sequences, length=length, device=on.device
        )  # fmt: skip
        self.header("data", self.rows.words)
        self.report.batch = self.rows.problems()
        return self.rows

    def _adapter(self, subject: Subject, model: CheckedModel) -> str | None:
        """Returns a folder of random adapters to start from; None where the whole model trains."""
        lora, head = subject.lora, subject.config.head
        if lora is None:
            return None
        generator = torch.Generator().manual_seed(subject.config.seed)
        shapes = shapes_in_file(model.path, lora, head)
        tensors = [(name, B_SCALE * torch.randn(shape, generator=generator)) for name, shape in shapes.items()]
        path = self.place / f"adapter-{subject.name}"
        write_adapter(path, lora, model.path, tensors, head=head)
        return str(path)

    # -- the two sides ------------------------------------------------------------------------------------------------

    def _reference(
        self, subject: Subject, model: CheckedModel, rows: Rows, store: Path, adapter: str | None, on: Machine
    ) -> Tensor | None:
        """Computes the step with transformers and plain torch, in this process, if layouts are compared with it.

        Returns the tokens that routers are undecided about.
        """
        head, optimizer = subject.config.head, subject.optimizer
        loaded = reference.load(model.path, head).to(on.device)
        if self._dtype(model) == "bfloat16":  # the same weights, computed with in fp32
            for parameter in loaded.parameters():
                parameter.data = parameter.data.bfloat16().float()
        start = {name: tensor.cpu() for name, tensor in reference.weights_of(loaded).items()}
        if adapter is not None:
            loaded = reference.with_adapter(loaded, adapter)
        narrow = undecided_tokens(loaded, rows.examples, head=head, rounding=BOUNDS[self._dtype(model)].router)
        if self.asked.against == "hf":
            made = reference.run(
                loaded, rows.examples, subject.loss, optimizer=optimizer, rates=[optimizer.lr], fields=rows.fields
            )  # fmt: skip
            StepNumbers(made.loss, made.grad_norm, made.log_probs, start, made.gradients, made.weights).save(store)
        return narrow

    def _dtype(self, model: CheckedModel) -> Literal["float32", "bfloat16"]:
        """Returns the dtype that layouts of a model compute in: float32 for models with experts.

        Most of their routers are undecided within bfloat16's rounding, so nothing would be left to compare.
        """
        return "float32" if has_experts(read_json(Path(model.path, "config.json"))) else self.asked.dtype

    def run(self) -> None:
        """Runs the layouts of all roles, those on equally many processes together.

        One that fails ends its processes, and the rest of them are started again.
        """
        for item in self.items:
            torch.save(item.work, work_file(str(self.place), item.number))
        order = sorted(self.items, key=lambda item: (not item.work.writes, item.row.processes))
        for _, together in itertools.groupby(order, key=lambda item: (item.work.writes, item.row.processes)):
            group = [item for item in together if self._has_reference(item)]
            while group:
                shown, count = ", ".join(item.row.name for item in group), group[0].row.processes
                self.listener.doing(f"running {shown} on {pluralize(count, 'process', 'processes')}")
                failed = self._launch(group, count)
                group = self._collect(group, failed)

    def _has_reference(self, item: Item) -> bool:
        """Returns whether a layout can be compared with something. If the first one failed, it cannot."""
        if item.work.writes or numbers_file(item.work.reference).exists():
            return True
        self.note(dataclasses.replace(item.row, failed="is not compared, as the first of the layouts failed"))
        return False

    def _launch(self, group: list[Item], processes: int) -> str | None:
        """Returns what ended the processes before their time."""
        task = Task(folder=str(self.place), numbers=tuple(item.number for item in group))
        try:
            launch("mrl.check.measure:run", task, "", processes, quiet=True)
        except (UserError, RankFailed) as error:
            return str(error)
        return None

    def _collect(self, group: list[Item], failed: str | None) -> list[Item]:
        """Notes the layouts that are done. Returns the rest if one of them ended the processes."""
        assert self.rows is not None
        lengths = self.rows.batch.lengths.tolist()
        for position, item in enumerate(group):
            file = result_file(str(self.place), item.number)
            row = item.row
            if file.exists():
                found: LayoutComparison = torch.load(file, weights_only=False)  # made by this command
                differ = problems(found, head=item.work.config.head, lengths=lengths)
                row = dataclasses.replace(row, measured=found, problems=differ)
            elif not (item.work.writes and numbers_file(item.work.reference).exists()):
                row = dataclasses.replace(row, failed=failed or "it left no numbers")
            if position == len(group) - 1:  # a rank may end badly after the main one has left its numbers
                row = dataclasses.replace(row, failed=row.failed or failed)
            self.note(row)
            if row.failed is not None:
                return group[position + 1 :]
        return []

    def note(self, row: CheckRow) -> None:
        self.report.rows.append(row)
        self.listener.row(row)


def micro_batch_of(subject: Subject, rows: Rows, layouts: Sequence[Layout]) -> MicroBatchConfig:
    """Returns the micro-batches of the config, made small enough for two on each replica.

    Router losses are means over a micro-batch. With them, each holds one sequence, or one pair, so all layouts have the
    same.
    """
    own, group = subject.config.engine.micro_batch, rows.batch.group
    if subject.has_router_losses:
        return MicroBatchConfig(size=group)
    if own.size is not None:
        replicas, count = max(layout.dims.dp for layout in layouts), rows.batch.num_sequences // group
        return MicroBatchConfig(size=group * max(1, min(own.size // group, count // (2 * replicas))))
    half = -(-rows.batch.num_tokens // 4)
    longest = int(rows.batch.lengths.view(-1, group).sum(-1).max())
    return MicroBatchConfig(tokens=max(longest, min(own.token_limit or half, half)))
