"""vLLM as a sampler: its OpenAI-compatible server, or its engine in the trainer's process (docs/rollout-servers.md).

**Log-probs.** A trainer needs log_softmax(logits / temperature), before top_k, top_p and min_p. `--logprobs-mode` has
two choices. `raw_logprobs` are before the temperature too, so they are right at temperature 1. `processed_logprobs` are
after the temperature and all filters, so they are right without filters. With both a temperature and filters neither is
right: that is refused. Written against and tried with vLLM 0.32.0.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from mrl.config.ppo import RolloutConfig
from mrl.engine import links
from mrl.engine.base import Completion
from mrl.engine.sampling import SamplingParams
from mrl.errors import ConfigError, ServerError
from mrl.rollout.base import SampleRequest
from mrl.rollout.http import HttpClient
from mrl.rollout.server import INCOMPLETE, Server, common_fields, seed_of
from mrl.rollout.servers import ServerSampler

RAW, PROCESSED = "raw_logprobs", "processed_logprobs"
LINKS = frozenset({"broadcast", "ipc"})
ENGINE = "mrl"  # the weight-transfer engine of vllm_worker.py
MIN_TEMPERATURE = 0.01  # vLLM raises a lower one to it, with only a warning


def refuse(sampling: SamplingParams, mode: str, key: str, where: str) -> None:
    """Raises ConfigError if `mode` gives other log-probs than a trainer needs. key, where: name the engine."""
    temperature = sampling.temperature
    filters = {"top_k": (sampling.top_k, 0), "top_p": (sampling.top_p, 1.0), "min_p": (sampling.min_p, 0.0)}
    used = [f"rollout.{name} {value:g}" for name, (value, off) in filters.items() if value != off]
    if 0 < temperature < MIN_TEMPERATURE:
        raise ConfigError("rollout.temperature", temperature, "is below what vLLM knows", f"use {MIN_TEMPERATURE:g}")
    if sampling.greedy or (mode == RAW and temperature == 1) or (mode == PROCESSED and not used):
        return
    if used and temperature != 1:
        why = f"with {', '.join(used)}: vLLM gives log-probs before both or after both, and the trainer needs others"
        raise ConfigError("rollout.temperature", temperature, why, "use temperature 1, or no filter, or backend native")
    why = f"{where} gives {mode}, which are wrong at temperature {temperature:g} with the filters {used}"
    raise ConfigError(key, why=why, fix=f"start it with --logprobs-mode {log_probs_mode(temperature)}")


def sampling_fields(request: SampleRequest) -> dict[str, Any]:
    """Returns a request's parameters by vLLM's names.

    All are set: a server takes others from the model's generation_config.json. The end tokens are those of the request
    and no others, and the end of a completion stays in it.
    """
    sampling = request.sampling
    return {
        "max_tokens": request.max_new_tokens,
        "top_k": 0 if sampling.greedy else sampling.top_k,
        "seed": seed_of(request),
        "logprobs": 0,  # for the sampled token alone
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        **common_fields(request),
    }


def log_probs_mode(temperature: float) -> str:
    """Returns `--logprobs-mode` for samples at a temperature."""
    return RAW if temperature == 1 else PROCESSED


def check_sampling(rollout: RolloutConfig) -> None:
    """Raises ConfigError for parameters whose log-probs vLLM inside the trainer does not give."""
    sampling = SamplingParams(rollout.temperature, rollout.top_k, rollout.top_p, rollout.min_p)
    refuse(sampling, log_probs_mode(rollout.temperature), "rollout.backend", "vllm inside the trainer")


class VLLMServer(Server):
    """`python -m vllm.entrypoints.openai.api_server` with VLLM_SERVER_DEV_MODE=1."""

    greets = True
    how_to_link = (
        f"mrl on its PYTHONPATH, --worker-extension-cls mrl.rollout.vllm_worker.Worker and --weight-transfer-config "
        f'\'{{"backend": "{ENGINE}"}}\''
    )
    how_to_adapt = "--enable-lora, --max-lora-rank and the environment variable VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"

    def __init__(self, http: HttpClient) -> None:
        super().__init__(http)
        self.name, self.path, self.mode, self.on_cpu = "", "", RAW, False

    def inspect(self, *, sleeps: bool) -> int | None:
        with self.get("/v1/models") as models:
            model = models["data"][0]
            self.name, self.path, longest = model["id"], model["root"], model["max_model_len"]
        try:
            info = self.http.get("/server_info?config_format=json")
            self.version()
        except ServerError as error:
            if error.status != 404:
                raise
            fix = "start vLLM 0.32.0 or newer with the environment variable VLLM_SERVER_DEV_MODE=1"
            raise self.http.error(f"cannot take new weights; {fix}") from None
        with self._reading("/server_info"):
            config = info["vllm_config"]["model_config"]
            self.mode, can_sleep = config["logprobs_mode"], config["enable_sleep_mode"]
            engine = info["vllm_config"].get("weight_transfer_config")
            self.on_cpu = info["vllm_config"].get("device_config", {}).get("device") == "cpu"
            adapters = info["vllm_config"].get("lora_config")
            self.adapters_on = adapters is not None
            if adapters is not None:
                self.most_adapters = int(adapters["max_loras"])
            self.links = LINKS if engine is not None and engine["backend"] == ENGINE else frozenset()
        if self.mode not in (RAW, PROCESSED):
            raise self.http.error(f"gives {self.mode}; start it with --logprobs-mode {RAW} or {PROCESSED}")
        if sleeps and not can_sleep:
            raise self.http.error("cannot sleep; start it with --enable-sleep-mode, or set rollout.server.sleep false")
        return longest

    def refuse(self, sampling: SamplingParams) -> None:
        refuse(sampling, self.mode, "rollout.server.urls", self.http.url)

    def complete(self, request: SampleRequest, *, adapter: str | None = None) -> Completion:
        body = {
            "model": adapter or self.name,
            "prompt": list(request.tokens),
            "return_token_ids": True,
            **sampling_fields(request),
        }
        with self.post("/v1/completions", body) as answer:
            choice = answer["choices"][0]
            reason, tokens = choice["finish_reason"], [int(token) for token in choice["token_ids"]]
            log_probs = [float(value) for value in choice["logprobs"]["token_logprobs"]]
        if reason not in ("stop", "length"):
            raise self.http.error(f"ended a completion with {reason!r}; see its log")
        return Completion(tokens, log_probs, reason == "stop")

    def score(self, tokens: Sequence[int], *, adapter: str | None = None) -> list[float]:
        body = {"model": adapter or self.name, "prompt": list(tokens), "max_tokens": 1, "temperature": 0.0}
        body |= {"prompt_logprobs": 0}
        with self.post("/v1/completions", body) as answer:
            each = zip(tokens[1:], answer["choices"][0]["prompt_logprobs"][1:], strict=True)
            return [found[str(token)]["logprob"] for token, found in each]

    def load_adapter(self, name: str, folder: str) -> None:
        """Loads an adapter. If the server has the name, it forgets that first.

        With `load_inplace` vLLM 0.32.0 would read the files again for every step of sampling (lora/worker_manager.py,
        `add_adapter`).
        """
        if name in self.adapter_names():
            self.unload_adapter(name)
        self.http.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": folder})

    def unload_adapter(self, name: str) -> None:
        self.http.post("/v1/unload_lora_adapter", {"lora_name": name})

    def pause(self) -> None:
        self.http.post("/pause?mode=wait")  # running requests end with the weights that they began with

    def check_names(self, names: Collection[str]) -> None:
        if not self.on_cpu or self.links:
            return
        old = None
        if not any("lm_head" in name or "embed_out" in name for name in names):
            old = "keeps the old head of a model whose head is its embedding"
        elif any(".experts." in name for name in names):
            old = "reads new weights of experts as if they were packed, as the old ones are"
        if old is not None:
            raise self.http.error(f"runs on a CPU, where vLLM {old}; start it with {self.how_to_link}")

    def load(self, path: str, version: str) -> None:
        method = "mrl_reload" if self.links else "reload_weights"
        self.http.post("/collective_rpc", {"method": method, "kwargs": {"weights_path": path}})
        self._begin_anew(version)

    def _begin_anew(self, version: str) -> None:
        """Forgets results of older weights, and calls the present ones `version`."""
        with self.post("/reset_prefix_cache") as reset:
            if reset["success"] is not True:
                raise self.http.error(
                    "did not forget its prefix cache, so it would go on from the old weights; see its log"
                )
        self.set_version(version)

    def set_version(self, version: str) -> None:
        self.http.post("/update_weight_version", {"new_version": version})

    def workers(self) -> int:
        with self.get("/get_world_size") as answer:
            return int(answer["world_size"])

    def memory_obstacle(self, device: torch.device, *, named: bool) -> str | None:
        here = links.place()
        with self.post("/collective_rpc", {"method": "mrl_place"}) as answer:
            for place in answer["results"]:
                if place["machine"] != here["machine"]:
                    return "it is on another machine (or has a /dev/shm of its own)"
                if device.type == "cuda" and here["gpus"][torch.cuda.current_device()] not in place["gpus"]:
                    return "it does not see the trainer's GPU"
        return None

    def join(self, offer: dict[str, Any]) -> None:
        self.leave()
        self.http.post("/init_weight_transfer_engine", {"init_info": {"offer": offer}}, tries=1)

    def begin(self) -> None:
        self.set_version(INCOMPLETE)
        self.http.post("/start_weight_update", tries=1)

    def receive(self, bucket: dict[str, Any]) -> None:
        self.http.post("/update_weights", {"update_info": {"bucket": bucket}}, tries=1)

    def finish(self, version: str) -> None:
        self.http.post("/finish_weight_update", tries=1)
        self._begin_anew(version)

    def leave(self) -> None:
        self.http.post("/collective_rpc", {"method": "mrl_leave"}, tries=1)

    def resume(self) -> None:
        self.http.post("/resume")

    def version(self) -> str:
        with self.get("/weight_info") as info:
            return info["weight_version"]

    def sleep(self) -> None:
        self.http.post("/sleep?level=1&mode=wait")

    def wake(self) -> None:
        self.http.post("/wake_up")


class VLLMServerSampler(ServerSampler):
    """Completions from the vLLM servers of `config.urls`; see ServerSampler for the arguments."""

    server = VLLMServer
