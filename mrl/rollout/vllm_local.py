"""vLLM's engine inside the trainer's processes, on the devices that train (docs/vllm-inside.md).

Every process runs vLLM's executor `external_launcher`, as verl and TRL do. `rollout.server.tp` consecutive processes
make one engine, and its parts run the same requests in step. Each engine samples its share of the requests. vLLM finds
the trainer's process group and makes its own groups inside it.

On a GPU the engine and the trainer take turns. vLLM measures the free memory when it starts. So the engine is made
before any role builds its model, and sleeps at once. It sleeps at level 2, without weights: new ones come before it
samples. At level 1 every process would hold a copy of its engine's weights on the host. vLLM keeps the model's buffers
itself. A weight sync wakes the memory of the weights and takes them tensor by tensor, with the actor's
alone beside them on the device. The KV cache is woken after the actor's were offloaded.

It needs vLLM in the environment that mrl is in. Tried with vLLM 0.32.0 on CPUs; on GPUs it is untried.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy
import torch
from torch import Tensor

from mrl import patches
from mrl.config.ppo import ServerConfig
from mrl.engine import collective
from mrl.engine.atomic_checkpoint import RankGroup
from mrl.engine.base import Completion
from mrl.engine.kept import share
from mrl.engine.rng import Generators
from mrl.errors import ServerError
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.cpu_packing import repack
from mrl.rollout.handover import DrainedStream
from mrl.rollout.vllm import log_probs_mode, refuse, sampling_fields
from mrl.rollout.vllm_start import check_version, import_vllm, last_words

_ARGUMENTS = "vllm.v1.executor.uniproc_executor:ExecutorWithExternalLauncher._distributed_args"
SLEEP_LEVEL = 2
AFTER_A_FAILED_LOAD = 1
"""Level 2 copies the model's buffers to the host, and a load that broke off has left some of them without memory."""


class VLLMSampler(Sampler):
    """Completions from vLLM's engine in the trainer's processes. Making one is collective.

    - path: the model's folder
    - dtype: "bfloat16" or "float32"
    - temperature: of the requests; it decides the kind of log-probs
    - max_length: tokens of the longest sequence
    - device: the one that this process trains on

    The processes have joined. On a CPU sleeping and waking free nothing.
    """

    everywhere = True

    def __init__(
        self,
        config: ServerConfig,
        *,
        path: str,
        dtype: str,
        temperature: float,
        max_length: int,
        device: torch.device,
    ) -> None:
        self._ranks, self._tp = collective.all_ranks(), config.tp
        assert self._ranks.size % config.tp == 0, f"rollout.server.tp {config.tp} on {self._ranks.size} processes"
        gpu = device.type == "cuda"
        self._mode = log_probs_mode(temperature)
        self._awake: set[str] = {"weights", "kv_cache"}
        self._whole = False  # whether it holds one set of weights, all of them
        self._broken = False  # whether this process's last load broke off
        # Without a process of its own: what `update_weights` streams could not reach another one.
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "RANK": str(self._ranks.rank)}
        variables["LOCAL_RANK"] = os.environ.get("LOCAL_RANK", "0")
        self._apart = IsolatedState(device, variables, {"VLLM_LOGGING_LEVEL": "WARNING" if gpu else "ERROR"})
        arguments = engine_arguments(config, path=path, dtype=dtype, max_length=max_length, mode=self._mode, gpu=gpu)
        # On a CPU vLLM shares memory among the parts of an engine: it gets a name of its own.
        shared = contextlib.nullcontext() if gpu or config.tp == 1 else _own_shared_memory(self._ranks)
        with self._apart.inside():
            self._vllm = collective.call_on_every_rank(lambda: import_vllm(gpu))
            # vLLM's own ends the default process group with its engine; here that is the trainer's.
            patches.check("mrl.rollout.cpu_packing")
            patches.replace({"vllm.v1.engine.core:cleanup_dist_env_and_memory": _end_groups})
            try:
                with shared:
                    self._engine = self._vllm.LLM(**arguments)
            except Exception as error:
                raise ServerError(
                    f"rollout.backend: vLLM inside the trainer does not start on rank {self._ranks.rank} "
                    f"({last_words(error)}); see docs/vllm-inside.md for what it needs"
                ) from error
        self.sleep()

    @property
    def forgets(self) -> bool:
        return True

    @property
    def notes(self) -> Sequence[str]:
        line = check_version()
        return [] if line is None else [line]

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Returns completions. Raises ConfigError for sampling parameters whose log-probs vLLM does not give."""
        for sampling in {request.sampling for request in requests}:
            refuse(sampling, self._mode, "rollout.backend", "vllm inside the trainer")
        self.wake()
        engines = self._ranks.size // self._tp
        mine = self._generate([requests[i] for i in share(len(requests), self._ranks.rank // self._tp, engines)])
        # An error of one engine ends its process, and so the run: the others of its group wait inside vLLM.
        everyone = self._ranks.gather(mine if self._ranks.rank % self._tp == 0 else [])
        return [completion for part in everyone for completion in part]

    def _generate(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        if not requests:
            return []
        with self._apart.inside():
            outputs = self._engine.generate(
                [{"prompt_token_ids": list(request.tokens)} for request in requests],
                [self._vllm.SamplingParams(**sampling_fields(request)) for request in requests],
                use_tqdm=False,
            )
        return [_completion(output.outputs[0]) for output in outputs]

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Gives the engine tensor by tensor, as they come.

        After an error (ServerError, on every rank) nothing is sampled any more: engines may hold some of them.
        """
        self._whole = self._broken = False
        stream, why = DrainedStream(weights), None
        # around all of it: the weights' engine installs generators of its own, and restores these
        with self._apart.inside():
            try:
                self._wake("weights")
                self._load(stream)
            except Exception as error:
                if stream.broken:  # the others are not at its end, and never will be
                    raise
                self._broken, why = True, last_words(error)
            stream.read_the_rest()  # the other ranks are in it too
        self._agree(
            why,
            "rollout.backend: vLLM inside the trainer has not taken the actor's weights",
            "nothing is sampled from them; the same command goes on from the last checkpoint. Without memory, set "
            "train.offload_idle to always, or a larger rollout.server.tp (a lower rollout.server.memory_fraction makes "
            "the cache smaller, not the weights)",
        )
        self._whole = True

    def _load(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Gives the engine weights, whose memory is awake. Call it in `self._apart.inside()`."""
        self._engine.collective_rpc(_reload, args=(iter(weights),))
        if not self._engine.reset_prefix_cache():
            raise RuntimeError("the prefix cache of the old weights cannot be emptied")

    def sleep(self) -> None:
        if self._awake:
            self._whole = False
            with self._apart.inside():
                self._engine.sleep(level=AFTER_A_FAILED_LOAD if self._broken else SLEEP_LEVEL)
            self._awake = set()

    def wake(self) -> None:
        """Makes the engine ready for `sample`.

        Raises ServerError, on every rank, if no weights have come since it slept, or the KV cache has no memory.
        """
        if not self._whole:
            raise ServerError("rollout.backend: vLLM inside the trainer has no weights: they were not handed over")
        if "kv_cache" in self._awake:
            return
        why = None
        try:
            with self._apart.inside():
                self._wake("kv_cache")
        except Exception as error:
            why = last_words(error)
        self._agree(
            why,
            "rollout.server.memory_fraction: vLLM inside the trainer does not get its memory back",
            "give less, or set train.offload_idle to always",
        )

    def _wake(self, tag: str) -> None:
        """Wakes vLLM's memory of a tag, if it sleeps. Call it in `self._apart.inside()`."""
        if tag not in self._awake:
            self._engine.wake_up(tags=[tag])
            self._awake.add(tag)

    def _agree(self, why: str | None, what: str, fix: str) -> None:
        """Raises ServerError on every rank if `why` is not None on one; nothing is sampled any more then."""
        for rank, reason in enumerate(self._ranks.gather(why)):
            if reason is not None:
                self._whole = False
                raise ServerError(f"{what} on rank {rank} ({reason}); {fix}")

    def close(self) -> None:
        """Ends the engine and its process groups; collective.

        While an error ends the run, they are left to the end of the process: a group may wait for others that are gone.
        """
        engine = self.__dict__.pop("_engine", None)
        if engine is None or sys.exc_info()[0] is not None:
            return
        with self._apart.inside():
            engine.llm_engine.engine_core.shutdown()


def engine_arguments(
    config: ServerConfig, *, path: str, dtype: str, max_length: int, mode: str, gpu: bool
) -> dict[str, Any]:
    """Returns the arguments of `vllm.LLM`; its sleep mode, and its share of the memory, are for GPUs alone."""
    # An imported folder has no such files, nor need one have any of a model that starts from scratch.
    stored = any(pathlib.Path(path).glob("*.safetensors"))
    on_gpu: dict[str, Any] = {"gpu_memory_utilization": config.memory_fraction, "enable_sleep_mode": True}
    return {
        "model": path,
        "load_format": "auto" if stored else "dummy",
        "dtype": dtype,
        "max_model_len": max_length,
        "logprobs_mode": mode,
        "distributed_executor_backend": "external_launcher",
        "tensor_parallel_size": config.tp,
        "enforce_eager": not gpu,
        **(on_gpu if gpu else {}),
    }


@contextlib.contextmanager
def _own_shared_memory(ranks: RankGroup) -> Iterator[None]:
    """Gives an engine that is made inside shared memory of its own (on a CPU), and leaves none behind.

    Under `external_launcher` vLLM 0.32.0 names it alike in every run, and cannot start if one was killed.
    """
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher as Launcher

    name = ranks.gather(f"mrl-{secrets.token_hex(8)}")[0]
    original = Launcher._distributed_args

    def arguments(launcher: Any) -> tuple[str, int, int]:
        method, rank, local_rank = original(launcher)
        # the processes have met: the end of the address is all that is read
        return f"{method}:{name}", rank, local_rank

    try:
        with patches.replaced({_ARGUMENTS: arguments}):
            yield
            ranks.gather(None)  # all have it open, so its name can go
    finally:
        for file in pathlib.Path("/dev/shm").glob(f"{name}-*"):
            file.unlink(missing_ok=True)


def _end_groups() -> None:
    """Ends vLLM's own process groups."""
    from vllm import envs
    from vllm.distributed import parallel_state as state

    envs.disable_envs_cache()
    gc.unfreeze()
    state.destroy_model_parallel()
    if state._WORLD is not None:
        state._WORLD.destroy()
    state._WORLD = state._NODE_COUNT = None
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _reload(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Loads `weights` in vLLM's worker; they must be all that the model has.

    vLLM itself would only warn of missing ones, and what sleep has thrown away is noise. Raises RuntimeError if some
    are missing, and if the model's `load_weights` does not return what it has loaded.
    """
    model = worker.model_runner.get_model()
    wanted = {name for name, _ in model.named_parameters()}
    loaded: set[str] | None = None
    load: Callable[..., set[str] | None] = model.load_weights

    def noted(*args: Any, **kwargs: Any) -> set[str] | None:
        nonlocal loaded
        loaded = load(*args, **kwargs)
        return loaded

    model.load_weights = noted
    try:
        worker.reload_weights(weights_iterator=weights)
    finally:
        del model.load_weights
    if loaded is None:
        raise RuntimeError(f"vLLM's {type(model).__name__} does not say which of its parameters it has loaded")
    missing = sorted(wanted - loaded)
    if missing:
        raise RuntimeError(f"the actor has no weights for {len(missing)} of vLLM's parameters, as {missing[0]}")
    repack(model)


def _completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    log_probs = [found[token].logprob for token, found in zip(tokens, output.logprobs, strict=True)]
    return Completion(tokens, log_probs, output.finish_reason == "stop")


class IsolatedState:
    """Keeps what one library changed in the process from everything else.

    In the trainer's process vLLM 0.32.0 changes:

    - the seeds of torch, numpy and Python, and the current CUDA stream
    - the number of torch's threads, and how float32 is multiplied
    - on a CPU, LD_PRELOAD and LOCAL_WORLD_SIZE in the environment, so in every process started later
    - torch.set_num_threads: it is replaced

    variables: of the environment, for the library alone. defaults: likewise, but a variable that is set already outside
    stays as it is.
    """

    def __init__(
        self, device: torch.device, variables: Mapping[str, str], defaults: Mapping[str, str] | None = None
    ) -> None:
        missing = {name: value for name, value in (defaults or {}).items() if name not in os.environ}
        self._changed: dict[str, str | None] = {**variables, **missing}
        self._generators, self._numpy = Generators(0, device), numpy.random.get_state()
        self._device = device
        self._stream: torch.cuda.Stream | None = None

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Gives the process to the library while inside, and back to the trainer whatever happens."""
        with self._generators.installed(), self._environment(), self._numpy_state(), _threads(), self._current_stream():
            yield

    @contextlib.contextmanager
    def _environment(self) -> Iterator[None]:
        outside = dict(os.environ)
        _change(self._changed)
        try:
            yield
        finally:
            now = dict(os.environ)
            names = sorted(name for name in now.keys() | outside.keys() if now.get(name) != outside.get(name))
            self._changed = {name: now.get(name) for name in names}
            _change({name: outside.get(name) for name in names})

    @contextlib.contextmanager
    def _numpy_state(self) -> Iterator[None]:
        outside = numpy.random.get_state()
        numpy.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._numpy = numpy.random.get_state()
            numpy.random.set_state(outside)

    @contextlib.contextmanager
    def _current_stream(self) -> Iterator[None]:
        """Lets each side's work begin after the work that the other has queued."""
        if self._device.type != "cuda":
            yield
            return
        outside = torch.cuda.current_stream(self._device)
        if self._stream is not None:
            self._stream.wait_stream(outside)
            torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            self._stream = torch.cuda.current_stream(self._device)
            outside.wait_stream(self._stream)
            torch.cuda.set_stream(outside)


@contextlib.contextmanager
def _threads() -> Iterator[None]:
    """Restores torch's threads, how it multiplies float32, and the dtype of new tensors."""
    count, set_count = torch.get_num_threads(), torch.set_num_threads
    precision, dtype = torch.get_float32_matmul_precision(), torch.get_default_dtype()
    try:
        yield
    finally:
        torch.set_num_threads = set_count
        if torch.get_num_threads() != count:
            torch.set_num_threads(count)
        torch.set_float32_matmul_precision(precision)
        torch.set_default_dtype(dtype)


def _change(variables: Mapping[str, str | None]) -> None:
    """Sets variables of the environment; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
