"""Runs `mrl serve` on every rank: the main one listens, and all do what its clients ask.

Operations go from the main rank to the others by broadcast. A rank that waits for one sleeps in a socket: it takes no
processor. After PULSE_S seconds without work the main rank sends an empty one, so no rank takes another for dead.
"""

from __future__ import annotations

import contextlib
import dataclasses
import ipaddress
import json
import os
import pathlib
import shutil
import socket
import time
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from mrl.config.checks import micro_batch_tokens
from mrl.config.schema import OptimizerConfig, RoleConfig
from mrl.config.serve import KEY, ServeConfig, secret_of_clients
from mrl.data.tokenizer import load_tokenizer
from mrl.data.vision import load_vision
from mrl.engine.collective import all_ranks, is_main, on_main
from mrl.engine.registry import build_engine, engine_class
from mrl.errors import ConfigError, Stopped, UserError
from mrl.serve import operations as ops
from mrl.serve.app import Auth, ClientRequest, HTTPServer, make_retrieve_handler, open_socket, route
from mrl.serve.datums import Limits
from mrl.serve.ledger import Ledger, SavedRecord, layout_of, read_state, refuse_other_layout
from mrl.serve.models import Models, ServerFault, write_error_line
from mrl.serve.openai import OpenAIHandlers
from mrl.serve.records import ROOT, RecordHandlers
from mrl.serve.request_queue import QueuedRequest, RequestQueue, Result, Work
from mrl.serve.sampling import SamplingHandlers
from mrl.serve.servers import ServedAdapter, Servers
from mrl.serve.training import PreparedOperation, SamplingQueue, ServedModel, TrainingHandlers
from mrl.trainers import used_folder
from mrl.trainers.common import say_all
from mrl.trainers.console import Console, open_console
from mrl.trainers.run_directory import RunDirectory
from mrl.trainers.run_lock import RunLock
from mrl.trainers.signals import StopSignal
from mrl.weights.hf_config import read_hf_config, vocab_size_of
from mrl.weights.hub import model_folder

PULSE_S = 60.0
SLICE = 32  # tokens that are drawn of each sample before others have their turn, and new ones join in
SIGNAL_CHECK_S = 0.5  # how often the main rank looks for a signal
SILENCE_CHECK_S = 5.0  # and for clients that are gone
DRAIN_S = 60.0  # how long waiting calls of models are still done after a signal: its sender may kill soon
CHUNK_BYTES = 5_000_000  # the size of a pass that clients send in one body
MAX_TEXT_BYTES = 2**23  # the largest body of OpenAI's interface
API = "/api/v1"


def run(config: ServeConfig, command_line: str = "") -> None:
    """Serves until a signal comes. Called on every rank. Raises UserError, and Stopped after the signal."""
    directory = RunDirectory(pathlib.Path(config.output_dir))
    lock = RunLock(directory.path)
    keys = config.serve
    if not engine_class(config.engine.backend).holds_several_models():
        why = "holds one model, and mrl serve has several"
        raise ConfigError("engine.backend", config.engine.backend, why, "give megatron or fsdp")
    with (
        contextlib.ExitStack() as closing,
        contextlib.closing(open_console(config.log.console, enabled=is_main(), every=config.log.every)) as console,
    ):
        console.doing("reading the model's folder")
        folder = model_folder(config.model.path, weights=config.model.init == "pretrained")
        hf_config = read_hf_config(folder)  # first: a wrong one fails the tokenizer too
        vocab_size, vision = vocab_size_of(hf_config), load_vision(folder, hf_config)
        tokenizer = load_tokenizer(folder, config.model.trust_remote_code, None)
        engine = build_engine(role_config(config, folder))
        try:
            engine.on_main(lock.acquire)
            engine.on_main(lambda: used_folder.refuse_foreign(directory.path))
            engine.on_main(lambda: refuse_other_layout(config))
            listens: list[socket.socket] = []  # before the model is read, which may take long: two would seem to serve
            engine.on_main(lambda: listens.append(closing.enter_context(open_socket(keys.host, keys.port))))
            say_all(console, engine.notes)
            console.doing("building the model")
            engine.init_model()
            notes = [f"{name}: {value}" for name, value in engine.chosen.items()]
            engine.on_main(lambda: directory.prepare(config, command_line, notes))
            limits = Limits(vocab_size or len(tokenizer), keys.max_length, vision)
            snapshots = directory.path / "snapshots"
            engine.on_main(lambda: shutil.rmtree(snapshots, ignore_errors=True))
            given, lora = config.model.path, config.model.lora
            tokenizer_at = os.path.abspath(folder) if os.path.exists(os.path.expanduser(given)) else given
            exports = None if keys.servers.kind is None else snapshots
            served = ServedModel(keys.name or given, tokenizer_at, limits, lora, keys.max_models, exports)
            _serve(config, Models(engine, tokenizer, lora, folder, keys), served, console, listens)
        finally:
            lock.release()
    raise Stopped("stopped by a signal; run the same command again to go on")


def _serve(
    config: ServeConfig, models: Models, served: ServedModel, console: Console, listens: Sequence[socket.socket]
) -> None:  # listens: the one socket, on the main rank
    main = is_main()
    # on every rank: each gets the signal, and the main one acts on it
    with StopSignal("the server ends what it is at" if main else None) as stop:
        if not main:
            _follow(models)
            return
        server = Server(config, served, models, console, *listens)
        server.ledger.remove_partial()
        for line in filter(None, [server.ledger.skipped_lines(), *server.resume()]):
            console.say(line)
        say_all(console, models.end_tokens.notes(models.tokenizer, "completions end there, too, and exports name it"))
        server.http.start()
        server.print_ready()
        server.lead(stop)


def role_config(config: ServeConfig, folder: str) -> RoleConfig:
    """Returns the settings that the engine is built from.

    Clients' steps say how they are made, so the optimizer's own numbers are not read.
    """
    tokens = micro_batch_tokens(config.engine.micro_batch, config.serve.max_length)
    micro_batch = dataclasses.replace(config.engine.micro_batch, tokens=tokens)
    return RoleConfig(
        model=dataclasses.replace(config.model, path=folder),
        engine=dataclasses.replace(config.engine, micro_batch=micro_batch), optimizer=OptimizerConfig(),
        seed=config.seed, packing=config.serve.packing,
    )  # fmt: skip


class Server:
    """Holds the main rank's records, queues, and the thread that listens. Does clients' work on all ranks."""

    def __init__(
        self, config: ServeConfig, served: ServedModel, models: Models, console: Console, listens: socket.socket
    ) -> None:
        self.config, self.served, self.models, self.console = config, served, models, console
        self.request_queue = RequestQueue(max_waiting=config.serve.max_waiting)
        self.ledger = Ledger(pathlib.Path(config.output_dir))
        self.training = TrainingHandlers(served, self.ledger, self.request_queue)
        self.sampling = SamplingHandlers(served, self.ledger, self.request_queue, models.end_tokens.ids)
        self.openai = OpenAIHandlers(self.sampling, models.tokenizer, lambda: set(models.snapshots))
        keys = config.serve
        self.servers = None
        if keys.servers.kind is not None:
            self.servers = Servers(keys.servers, self.request_queue, longest=keys.max_length)
        self.http = HTTPServer(self._routes(), listens)

    def _routes(self) -> list[Any]:
        training, sampling, records = self.training, self.sampling, RecordHandlers(self.ledger)
        auth = Auth(secret_of_clients(), self.config.serve.max_body_mb * 2**20)
        doors = {"forward_backward": dataclasses.replace(auth, is_json=False)}
        of_texts = dataclasses.replace(auth, max_bytes=min(auth.max_bytes, MAX_TEXT_BYTES))
        chunk = min(
            CHUNK_BYTES, self.config.serve.max_body_mb * 2**19
        )  # clients estimate: room for what they leave out
        model = {
            "model_name": self.served.base, "max_context_length": self.served.limits.length, "trainable": True,
            "sampleable": True,
        }  # fmt: skip
        handlers = {
            "POST client/config": _constant({"parallel_fwdbwd_chunks": False, "fwdbwd_max_chunk_bytes_count": chunk}),
            "POST client/dynamic_config": _constant({}),
            "POST telemetry": _constant({"status": "accepted"}),
            "GET healthz": _constant({"status": "ok"}),
            "GET get_server_capabilities": _constant({"supported_models": [model]}),
            "POST create_session": training.create_session,
            "POST session_heartbeat": training.session_heartbeat,
            "POST sessions/{id}/finish": training.finish_session,
            "POST create_model": training.create_model,
            "POST get_info": training.get_info,
            "POST unload_model": training.unload_model,
            "POST forward_backward": training.forward_backward,
            "POST optim_step": training.optim_step,
            "POST save_weights": training.save_weights,
            "POST load_weights": training.load_weights,
            "POST save_weights_for_sampler": training.save_weights_for_sampler,
            "POST save_weights_external": training.save_weights_external,
            "POST create_sampling_session": sampling.create_sampling_session,
            "GET samplers/{id}": sampling.sampler,
            "POST asample": sampling.asample,
            "POST retrieve_future": make_retrieve_handler(self.request_queue, training.model_status),
            "GET training_runs": records.training_runs,
            "GET training_runs/{id}": records.training_run,
            "GET training_runs/{id}/checkpoints": records.checkpoints_of_run,
            "GET training_runs/{id}/checkpoints/{part}/{name}/archive": records.archive,
            "GET training_runs/{id}/checkpoints/{part}/{name}/external_weights_urls": records.external_weights_urls,
            "DELETE training_runs/{id}/checkpoints/{part}/{name}": records.delete_checkpoint,
            "PUT training_runs/{id}/checkpoints/{part}/{name}/ttl": records.set_ttl,
            "GET checkpoints": records.checkpoints,
            "POST weights_info": records.weights_info,
            "GET sessions": records.sessions,
            "GET sessions/{id}": records.session,
        }
        of_openai = {
            "GET models": self.openai.models,
            "GET models/{name:path}": self.openai.model,
            "POST completions": self.openai.completions,
            "POST chat/completions": self.openai.chat_completions,
        }
        signed = ROOT + "/{until}/{signature}/{what:path}"
        routes = [route("GET", signed, records.follow_link, Auth(None, 0, is_public=True))]
        for root, below, usual in ((API, handlers, auth), ("/v1", of_openai, of_texts)):
            for name, handler in below.items():
                method, path = name.split()
                routes.append(route(method, f"{root}/{path}", handler, doors.get(path, usual)))
        return routes

    def print_ready(self) -> None:
        """Prints the address and key that a client needs."""
        host = client_address(self.config.serve.host)
        self.console.say(f"serving {self.served.base}")
        self.console.say(f"export TINKER_BASE_URL=http://{host}:{self.http.port}")
        self.console.say(f"export TINKER_API_KEY={'tml-local' if secret_of_clients() is None else f'${KEY}'}")
        self.console.close()  # or its line on building the model would stay

    def stop(self) -> None:
        """Ends the thread that listens, after waiting clients were told."""
        self.request_queue.end()
        self.http.stop()

    # -- work ---------------------------------------------------------------------------------------------------------

    def lead(self, stop: StopSignal) -> None:
        """Takes work from the queues until a signal comes."""
        looked = time.monotonic()
        while not stop.requested:
            work = self.request_queue.next_work(SIGNAL_CHECK_S)
            now = time.monotonic()
            if not self.http.thread.is_alive():  # nobody would hear of it otherwise
                raise RuntimeError("the thread that listens has ended")
            self.ledger.clear()
            if work is not None:
                self.do_work(work)
            if time.monotonic() - self.models.spoken > PULSE_S:  # also if inference servers do all the work
                self.do_on_all_ranks(ops.Idle())
            if now - looked > min(SILENCE_CHECK_S, self.config.serve.silent_s / 4):
                self._release_idle()
                looked = now
        try:
            self.suspend()
        except UserError:  # a full disk; all ranks have it
            self.stop()
            self.do_on_all_ranks(ops.Shutdown())
            raise
        self.do_on_all_ranks(ops.Shutdown())

    def suspend(self) -> None:
        """Does what models have yet to do, and writes their state for the next start. Clients ask again for samples."""
        self.request_queue.close()
        if self.servers is not None:
            self.servers.close()
        until = time.monotonic() + DRAIN_S
        while time.monotonic() < until:
            turn = self.request_queue.next_work(0)
            if turn is None:
                break
            self.ledger.clear()
            if not isinstance(turn.queue, SamplingQueue):
                self.do_work(turn)
        why = "the server was ended before this was done, and it was not done; send it again"
        for work in self.request_queue.fail_waiting(why):
            work.on_failure(why)
        folder = self.ledger.suspended
        shutil.rmtree(folder, ignore_errors=True)
        self.do_on_all_ranks(ops.SuspendModels(f"{folder}.partial"))
        lost = {model: list(passes.items()) for model, passes in self.training.lost.items()}
        state = {"layout": layout_of(self.config), "desk": self.request_queue.state(), "lost": lost}
        try:
            (folder.parent / f"{folder.name}.partial" / "desk.json").write_text(json.dumps(state), encoding="utf-8")
            os.rename(f"{folder}.partial", folder)
        except OSError as error:
            raise write_error_line(error) from error
        self.stop()

    def resume(self) -> list[str]:
        """Restores what `suspend` wrote. Returns lines on it. Damaged state is put aside, and nothing of it is taken.

        It removes the folder at once, so nothing stale is left if a later end suspends nothing.
        """
        folder = self.ledger.suspended
        shutil.rmtree(f"{folder}.partial", ignore_errors=True)
        if not folder.exists():
            return []
        try:
            state = read_state(folder)
            self.do_on_all_ranks(ops.ResumeModels(str(folder)))
        except UserError as error:
            aside = f"{folder}.damaged-{time.time_ns()}"
            os.rename(folder, aside)
            return [f"{error}: {aside} has it, and models of the last start are gone but for what was saved"]
        self.request_queue.restore(state["desk"])
        self.training.lost = state["lost"]
        unknown = sorted(self.models.waiting.keys() - (self.ledger.models.keys() & state["desk"]["numbers"].keys()))
        if unknown:  # their lines of the ledger were passed over
            self.do_on_all_ranks(ops.ForgetModels(models=unknown))
        here = self.training.restore(self.models.waiting, self.models.snapshots)
        os.rename(folder, f"{folder}.partial")  # at once: half of it could not be resumed
        shutil.rmtree(f"{folder}.partial")
        return [f"going on with {here} of the last start"] if here else []

    def do_work(self, work: Work) -> None:
        """Does the work of a queue, and finishes its futures."""
        if isinstance(work.queue, SamplingQueue):
            self._sample(work.queue, work.requests)
            return
        [waiting] = work.requests
        operation = waiting.operation.operation
        try:
            result = self._done(waiting.operation)
        except UserError as error:
            waiting.operation.on_failure(str(error))
            self.request_queue.fail(waiting.future, "server" if isinstance(error, ServerFault) else "user", str(error))
            if isinstance(operation, (ops.CreateModel, ops.LoadModel)) and not self.ledger.models[operation.model].here:
                self.training.forget(operation.model, error)
            return
        self.request_queue.finish(waiting.future, result)

    def _done(self, work: PreparedOperation) -> Result:
        """Does a client's operation on all ranks.

        A full disk does not end the server, unless it stops one of several ranks: the others wait for it.
        """
        alone = all_ranks().size == 1
        try:
            work.check()
        except UserError:
            if work.fallback is not None:
                self.do_on_all_ranks(work.fallback)
            raise
        try:
            outcome = self.do_on_all_ranks(work.operation)
            alone = True
            return work.answer(outcome)
        except OSError as error:
            if not alone:
                raise
            raise write_error_line(error) from error

    def _sample(self, queue: SamplingQueue, waiting: Sequence[QueuedRequest]) -> None:
        """Draws more tokens of all samples from one place; inference servers draw what they can.

        Samples that are not whole wait for the next turn, together with new ones.
        """
        waiting, unwanted = self.request_queue.split_abandoned(waiting)
        try:
            if self.servers is not None:
                waiting = self._draw_on_servers(queue, waiting)
            if not waiting and not unwanted:
                return
            snapshot = self._snapshot(queue)
            running = self.models.running[snapshot][0] if snapshot in self.models.running else {}
            begun = {one.future.id: one.operation.operation for one in waiting if one.future.id not in running}
            left = [id for id in unwanted if id in running]
            ended = self.do_on_all_ranks(ops.ContinueSampling(snapshot, begun, SLICE, left)) if begun or running else {}
            answered = [one for one in waiting if one.future.id in ended]
            results = [one.operation.answer(ended[one.future.id]) for one in answered]
        except UserError as error:
            for one in waiting:
                self.request_queue.fail(one.future, "server" if isinstance(error, ServerFault) else "user", str(error))
            return
        for one, result in zip(answered, results, strict=True):
            self.request_queue.finish(one.future, result)
        rest = [one for one in waiting if one.future.id not in ended]
        if rest:
            self.request_queue.put_back(queue, rest)
        for one in rest:
            if one.operation.progress is not None:
                one.operation.progress(self.models.running[snapshot][0][one.future.id].completions)

    def _draw_on_servers(self, queue: SamplingQueue, waiting: Sequence[QueuedRequest]) -> Sequence[QueuedRequest]:
        """Gives the inference servers the samples that they can draw, and returns the rest. Raises UserError."""
        assert self.servers is not None
        adapter = None
        if queue.path is not None:
            saved = self._saved(queue)
            adapter = ServedAdapter(str(self.ledger.folder_of(saved)), saved.time)
        elif queue.snapshot is not None:
            if queue.snapshot not in self.models.folders:  # it is of an earlier start, or is gone
                return waiting
            adapter = ServedAdapter(self.models.folders[queue.snapshot])
        theirs = [one for one in waiting if self.servers.can_draw(one.operation.operation)]
        self.servers.draw(theirs, adapter)
        return [one for one in waiting if one not in theirs]

    def _saved(self, queue: SamplingQueue) -> SavedRecord:
        """Returns the save that a queue samples from. Raises UserError if it is gone."""
        assert queue.path is not None
        saved = self.ledger.find(queue.path)
        if saved.time != queue.saved:
            raise UserError("model_path", queue.path, "was saved anew since", "make another sampling client")
        return saved

    def _snapshot(self, queue: SamplingQueue) -> str | None:
        """Returns the name of the snapshot to sample from; reads it if it is only saved. Raises UserError."""
        if queue.path is None:
            if queue.snapshot is not None and queue.snapshot not in self.models.snapshots:
                why = "is gone: newer ones took its place, its client ended, or the server was started anew"
                fix = "save it under a name"
                raise UserError("sampling_session_id", queue.snapshot, why, fix)
            return queue.snapshot
        name = f"{queue.path}@{queue.saved}"
        if name not in self.models.snapshots:
            saved = self._saved(queue)
            folder = str(self.ledger.folder_of(saved))
            self.do_on_all_ranks(ops.LoadSnapshot(name, saved.kind, folder))
        return name

    def _release_idle(self) -> None:
        """Frees the models of silent clients, and removes saves whose time is over."""
        now = time.time()
        self.ledger.expire(now)
        for model, count in self.request_queue.fail_overdue().items():
            self.training.fail_pass(str(model), count, f"the call with seq_id {count} has not come")
        gone = {id for id, heard in self.ledger.sessions.items() if now - heard > self.config.serve.silent_s}
        silent = [
            m.id
            for m in self.ledger.models.values()
            if m.here and m.session in gone and not self.request_queue.has_work(m.id)
        ]
        snapshots = [
            name for name in self.models.snapshots
            if name.partition(":")[0] in gone and not self.request_queue.has_work(SamplingQueue(None, None, name))
        ]  # fmt: skip
        if silent or snapshots:
            self.do_on_all_ranks(ops.ForgetModels(silent, snapshots))
        for id in silent:
            self.training.forget(id, UserError("model_id", id, "is gone: its client was gone for long", "create one"))

    def do_on_all_ranks(self, operation: Any) -> Any:
        """Does an operation on all ranks; the main one tells the others. Returns its outcome."""
        self.models.spoken = time.monotonic()  # not of each turn: what inference servers draw is told to no other rank
        on_main(lambda: operation)
        return None if isinstance(operation, (ops.Idle, ops.Shutdown)) else self.models.do(operation)


def client_address(host: str) -> str:
    """Returns the host that clients use in a URL. If all addresses are listened on, it is the machine's name."""
    try:
        every = ipaddress.ip_address(host).is_unspecified
    except ValueError:
        every = not host
    host = socket.gethostname() if every else host
    return f"[{host}]" if ":" in host else host


def _constant(answer: Any) -> Any:
    async def handler(request: ClientRequest) -> JSONResponse:
        return JSONResponse(answer)

    return handler


# -- the other ranks ---------------------------------------------------------------------------------------------------


def _follow(models: Models) -> None:
    """Does what the main rank says, until it ends."""
    while True:
        operation: Any = on_main(lambda: None)  # the main rank's
        if isinstance(operation, ops.Shutdown):
            return
        if not isinstance(operation, ops.Idle):
            with contextlib.suppress(UserError):  # which the main rank answers its client
                models.do(operation)
