"""vLLM's engine inside the trainer's process, on the GPU that trains: for a run of one process
(docs/rollout-servers.md).

It needs vLLM in the environment that mrl is in. Tried with vLLM 0.32.0 on a CPU; on a GPU it is untried.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor

from mrl.config.ppo import ServerConfig
from mrl.engine.base import Completion
from mrl.errors import ConfigError
from mrl.rollout.base import Sampler, SampleRequest
from mrl.rollout.vllm import PROCESSED, RAW, refuse, sampling_fields


class VLLMSampler(Sampler):
    """path: the model's folder. dtype: "bfloat16" or "float32". temperature: of the requests, which decides what
    log-probs vLLM is asked to give. max_length: tokens of the longest sequence. world_size: of the run. gpu: whether it
    runs on one; then `sleep` keeps the weights on the host and frees the rest, and on a CPU there is nothing to free.
    """

    exact = False

    def __init__(
        self,
        config: ServerConfig,
        *,
        path: str,
        dtype: str,
        temperature: float,
        max_length: int,
        world_size: int,
        gpu: bool,
    ) -> None:
        if world_size != 1:
            raise ConfigError(
                "rollout.server.urls",
                [],
                f"with {world_size} processes: an engine inside the trainer is for one process",
                "start vLLM servers and give their urls",
            )
        # The engine runs in this process: what `update_weights` streams could not reach another one.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            import vllm
        except ImportError as error:
            why = f"without rollout.server.urls needs vLLM beside mrl ({error})"
            raise ConfigError(
                "rollout.backend", "vllm", why, "install it here, or start a server and give its url"
            ) from error
        self._vllm, self._mode = vllm, RAW if temperature == 1 else PROCESSED
        self._gpu, self._asleep, self._whole = gpu, False, False
        on_gpu: dict[str, Any] = {"gpu_memory_utilization": config.memory_fraction, "enable_sleep_mode": True}
        self._engine = vllm.LLM(
            model=path,
            dtype=dtype,
            max_model_len=max_length,
            logprobs_mode=self._mode,
            distributed_executor_backend="uni",
            enforce_eager=not gpu,
            **(on_gpu if gpu else {}),
        )

    def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        assert self._whole, "update_weights comes before sample"
        self.wake()
        for sampling in {request.sampling for request in requests}:
            refuse(sampling, self._mode, "rollout.backend", "vllm inside the trainer")
        outputs = self._engine.generate(
            [{"prompt_token_ids": list(request.tokens)} for request in requests],
            [self._vllm.SamplingParams(**sampling_fields(request)) for request in requests],
            use_tqdm=False,
        )
        return [_completion(output.outputs[0]) for output in outputs]

    def update_weights(self, weights: Iterator[tuple[str, Tensor]]) -> None:
        """Tensor by tensor, as they come.

        After an error nothing is sampled any more: the engine may hold some of them.
        """
        self.wake()
        self._whole = False
        self._engine.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        assert self._engine.reset_prefix_cache(), "the prefix cache is of the old weights"
        self._whole = True

    def sleep(self) -> None:
        if self._gpu and not self._asleep:
            self._engine.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._engine.wake_up()
            self._asleep = False


def _completion(output: Any) -> Completion:
    tokens = list(output.token_ids)
    log_probs = [found[token].logprob for token, found in zip(tokens, output.logprobs, strict=True)]
    return Completion(tokens, log_probs, output.finish_reason == "stop")
