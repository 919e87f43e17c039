"""SGLang's server as a sampler, through its native interface (see docs/rollout-servers.md).

Written against the source of SGLang 0.5.23 and not tried against a real server.

**Log-probs** of `/generate` are those at the temperature, before top_k, top_p and min_p, as a trainer needs them. A
server with SGLANG_RETURN_ORIGINAL_LOGPROB set gives those at temperature 1.

**Seeds** count only if the server was started with --enable-deterministic-inference.

**New weights**: SGLang itself goes back if a load fails, but to the new folder by then. So the folder before it is
loaded again from here.

**CUDA IPC** (`PickledLink`): each process of a server gets a pickle of its own, as SGLang's `MultiprocessingSerializer`
makes it. That is the standard library's ForkingPickler with torch's reductions: they say where a tensor of a GPU is,
without its content. SGLang 0.5.23 unpickles names from a list alone (`SafeUnpickler`), so there is nothing of mrl in
it. SGLang need not be installed here.
"""

from __future__ import annotations

import base64
import functools
import io
import types
from collections.abc import Callable, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import reductions

from mrl.engine import links
from mrl.engine.base import Completion
from mrl.engine.links import Link
from mrl.errors import ServerError
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import TRIES
from mrl.rollout.server import INCOMPLETE, Server, ServerGroup, common_fields, seed_of
from mrl.rollout.servers import ServerSampler


def sampling_fields(request: SampleRequest) -> dict[str, Any]:
    """Returns a request's parameters by SGLang's names; the end of a completion stays in it.

    The server adds the model's own end tokens to `stop_token_ids`; with `ignore_eos` it stops at none of them.
    """
    sampling = request.sampling
    return {
        "max_new_tokens": request.max_new_tokens,
        "top_k": -1 if sampling.greedy or sampling.top_k == 0 else sampling.top_k,
        "sampling_seed": seed_of(request),
        "ignore_eos": not request.stop_tokens,
        "no_stop_trim": True,
        **common_fields(request),
    }


def _of_adapter(name: str | None) -> dict[str, Any]:
    return {} if name is None else {"lora_path": name}


class SGLangServer(Server):
    """`python -m sglang.launch_server`."""

    path = ""
    links = frozenset({"broadcast", "ipc"})
    how_to_adapt = "--enable-lora, --max-lora-rank and --lora-target-modules"
    _group = ""  # that its processes are in

    def inspect(self, *, sleeps: bool) -> int | None:
        with self.get("/model_info") as info:
            self.path = info["model_path"]
        if sleeps:
            with self.get("/server_info") as info:
                can_sleep = info["enable_memory_saver"]
            if not can_sleep:
                raise self.http.error(
                    "cannot sleep; start it with --enable-memory-saver, or set rollout.server.sleep false"
                )
        with self.get("/v1/models") as models:
            return models["data"][0]["max_model_len"]

    def complete(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        body = {"input_ids": list(request.tokens), "sampling_params": sampling_fields(request), "return_logprob": True}
        with self.post("/generate", body | _of_adapter(adapter)) as answer:
            reason = answer["meta_info"]["finish_reason"]["type"]
            sampled = answer["meta_info"].get("output_token_logprobs", [])  # absent where nothing was sampled
            log_probs, tokens = [float(each[0]) for each in sampled], [each[1] for each in sampled]
            if reason in ("stop", "length") and tokens != answer["output_ids"]:
                raise ValueError("output_ids are not those of output_token_logprobs")
        if reason not in ("stop", "length"):
            raise self.http.error(f"ended a completion with {reason!r}; see its log")
        return Completion(tokens, log_probs, reason == "stop")

    def score(self, tokens: Sequence[int], *, adapter: str | None = None) -> list[float]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "return_logprob": True,
            "logprob_start_len": 0,
        }
        with self.post("/generate", body | _of_adapter(adapter)) as answer:
            log_probs = answer["meta_info"]["input_token_logprobs"]
            if [each[1] for each in log_probs] != list(tokens):
                raise ValueError("input_token_logprobs are of other tokens")
            return [float(each[0]) for each in log_probs[1:]]

    def load_adapter(self, name: str, folder: str) -> None:
        with self.post("/load_lora_adapter", {"lora_name": name, "lora_path": folder}) as answer:
            success, message = answer["success"], answer["error_message"]
        if success is not True:
            raise self.http.error(f"did not load the adapter {folder}: {message}")

    def unload_adapter(self, name: str) -> None:
        self.http.post("/unload_lora_adapter", {"lora_name": name})

    def pause(self) -> None:
        self.http.post("/pause_generation", {"mode": "abort"})  # answers when nothing is being sampled any more

    def load(self, path: str, version: str) -> None:
        fields = {"model_path": path, "weight_version": version, "flush_cache": True}
        self._done("/update_weights_from_disk", fields, f"load {path}")

    def _done(self, endpoint: str, fields: dict[str, Any], what: str, *, tries: int = TRIES) -> None:
        """Posts a request whose answer says whether it was done."""
        with self.post(endpoint, fields, tries=tries) as answer:
            success, message = answer["success"], answer["message"]
        if success is not True:
            raise self.http.error(f"did not {what}: {message}")

    def workers(self) -> int:
        with self.get("/server_info") as info:
            tp, others = info["tp_size"], {name: info.get(name, 1) for name in ("dp_size", "pp_size")}
        for name, size in others.items():
            if size != 1:  # SGLang 0.5.23 asserts the one and counts processes without the other
                raise self.http.error(
                    f"has {name} {size}, and takes weights through a link with 1 alone; set rollout.server.handover "
                    "to disk"
                )
        return int(tp)

    def memory_obstacle(self, device: torch.device, *, named: bool) -> str | None:
        if device.type != "cuda":
            return "SGLang takes memory of a GPU alone"
        if not self.http.is_here():
            return "it is on another machine"
        # Memory that it cannot map ends a process of SGLang, and with it the server.
        return None if named else "SGLang does not say which GPUs it sees"

    def memory_link(self, device: torch.device, servers: ServerGroup) -> Link:
        return PickledLink(device, servers.map(lambda s: s.workers()))

    def join(self, offer: dict[str, Any]) -> None:
        self.leave()
        if offer["link"] == "ipc":
            return
        group = {
            "master_address": offer["address"], "master_port": offer["port"], "rank_offset": offer["rank"],
            "world_size": offer["size"], "group_name": offer["name"], "backend": offer["backend"],
        }  # fmt: skip
        self._group = offer["name"]
        self._done("/init_weights_update_group", group, "join the trainer's group", tries=1)

    def begin(self) -> None:
        self.set_version(INCOMPLETE)
        begin = functools.partial(self._done, "/begin_weight_update", {}, "make ready for new weights", tries=1)
        try:
            begin()
        except ServerError as error:
            if error.status != 400:
                raise
            # A run that ended in the middle has left its update open, and SGLang has one at a time.
            self._done("/end_weight_update", {}, "end an update that broke off", tries=1)
            begin()

    def receive(self, bucket: dict[str, Any]) -> None:
        how = {"load_format": "flattened_bucket", "flush_cache": False}
        if "pickles" in bucket:
            endpoint, fields = "/update_weights_from_tensor", {"serialized_named_tensors": bucket["pickles"]}
        else:
            endpoint, fields = "/update_weights_from_distributed", bucket | {"group_name": self._group}
        self._done(endpoint, fields | how, "take new weights", tries=1)

    def finish(self, version: str) -> None:
        self._done("/end_weight_update", {}, "finish new weights", tries=1)
        self.http.post("/flush_cache", {})
        self.set_version(version)

    def set_version(self, version: str) -> None:
        self.http.post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    def leave(self) -> None:
        if self._group:
            name, self._group = self._group, ""
            self.http.post("/destroy_weights_update_group", {"group_name": name}, tries=1)

    def resume(self) -> None:
        self.http.post("/continue_generation", {})

    def version(self) -> str:
        with self.get("/model_info") as info:
            return info["weight_version"]

    def sleep(self) -> None:
        self.http.post("/release_memory_occupation", {})

    def wake(self) -> None:
        self.http.post("/resume_memory_occupation", {})


class SGLangServerSampler(ServerSampler):
    """Completions from the SGLang servers of `config.urls`; see ServerSampler for the arguments."""

    server = SGLangServer

    @property
    def forgets(self) -> bool:
        return self._config.sleep


class PickledLink(links.Link):
    """Memory of the trainer's GPU that SGLang's processes map. workers: how many processes each server has."""

    def __init__(self, device: torch.device, workers: Sequence[int]) -> None:
        super().__init__(device)
        self._workers = workers

    def offers(self) -> list[dict[str, Any]]:
        return [{"protocol": links.PROTOCOL, "link": "ipc"}] * len(self._workers)

    def buffer(self, turn: int, size: int) -> Tensor:
        """Returns a new buffer each time, because processes may still read the one before.

        A server answers when one of its processes has loaded a bucket. torch keeps the memory until all have let go of
        it.
        """
        return self._make(turn, size)

    def describe(self, bucket: links.Bucket) -> list[dict[str, Any]]:
        return [{"pickles": [_pickled(bucket) for _ in range(workers)]} for workers in self._workers]

    def send(self, bucket: links.Bucket, given_up: Callable[[], bool]) -> None:
        """Does nothing: the bucket is where the servers read it."""


def _pickled(bucket: links.Bucket) -> str:
    """Returns a bucket in SGLang's format `flattened_bucket`, for one process to read once: torch counts readers."""
    parts, at = [], 0
    for name, dtype, shape in zip(bucket.names, bucket.dtypes, bucket.shapes, strict=True):
        kind, size = getattr(torch, dtype), torch.Size(shape)
        end = at + size.numel() * kind.itemsize
        # SGLang makes its FlattenedTensorMetadata of what has these attributes.
        parts.append(
            types.SimpleNamespace(name=name, shape=size, dtype=kind, start_idx=at, end_idx=end, numel=end - at)
        )
        at = end
    content = io.BytesIO()
    _Pickler(content).dump({"flattened_tensor": bucket.data, "metadata": parts})
    return base64.b64encode(content.getvalue()).decode()


class _Pickler(ForkingPickler):
    def reducer_override(self, value: object) -> Any:
        """Names a tensor's GPU by its UUID, for SGLang to look up: another GPU may have its number there."""
        if not isinstance(value, Tensor):
            return NotImplemented
        rebuild, arguments = reductions.reduce_tensor(value)
        if rebuild is reductions.rebuild_cuda_tensor:
            *before, device = arguments[:7]
            arguments = (*before, str(torch.cuda.get_device_properties(device).uuid), *arguments[7:])
        return rebuild, arguments
