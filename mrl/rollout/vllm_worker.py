"""The part of a weight sync in vLLM's processes, in vLLM's environment: it imports torch and vllm alone.

    PYTHONPATH=MRL VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server ... \\
        --worker-extension-cls mrl.rollout.vllm_worker.Worker --weight-transfer-config '{"backend": "mrl"}'

vLLM imports this module for `Worker`, before it makes the weight-transfer engine that is registered here: vLLM's own
`nccl` needs a GPU. Its endpoints /init_weight_transfer_engine, /start_weight_update, /update_weights and
/finish_weight_update call the engine. Written against vLLM 0.32.0.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import layerwise

from mrl import patches
from mrl.engine import links
from mrl.rollout.cpu_packing import repack

BACKEND = "mrl"

patches.check("mrl.rollout.cpu_packing")


@dataclasses.dataclass
class LinkOffer(WeightTransferInitInfo):
    """An offer of `links.Link.offers`."""

    offer: dict[str, Any]


@dataclasses.dataclass
class WeightUpdate(WeightTransferUpdateInfo):
    """A bucket, as `links.Link.describe` returns it."""

    bucket: dict[str, Any]


class Engine(WeightTransferEngine[LinkOffer, WeightUpdate]):
    """Takes buckets of a model's weights, in any cut: a layer is loaded when all of its parts have come."""

    init_info_cls, update_info_cls = LinkOffer, WeightUpdate
    supports_draft_weight_update = False
    _end: links.LinkReceiver | None = None

    def init_transfer_engine(self, init_info: LinkOffer) -> None:
        self.shutdown()  # it may be a killed run's
        at = self.parallel_config
        self._end = links.make_receiver(init_info.offer, at.data_parallel_index * at.world_size + at.rank)

    def start_weight_update(self) -> None:
        forget_parts(self.model, self.model_config)
        self._loaded: set[str] = set()
        layerwise.initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Takes a bucket. vLLM's own method waits for an accelerator; `LinkReceiver.receive` has waited."""
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: WeightUpdate) -> None:
        assert self._end is not None, "/init_weight_transfer_engine comes first"
        data = self._end.receive(update_info.bucket, self.device)
        loaded = self.model.load_weights(iter(links.unpack(update_info.bucket, data)))
        if loaded is None:
            raise RuntimeError(f"vLLM's {type(self.model).__name__} does not say which parameters it has loaded")
        self._loaded |= set(loaded)

    def finish_weight_update(self) -> None:
        """Raises RuntimeError if a parameter has got nothing: vLLM itself would keep the old one."""
        if self._end is not None:
            self._end.rest()
        layerwise.finalize_layerwise_reload(self.model, self.model_config)
        wanted = {name.replace(".base_layer.", ".") for name, _ in self.model.named_parameters()}
        missing = sorted(wanted - {name.replace(".base_layer.", ".") for name in self._loaded})
        if missing:
            raise RuntimeError(f"no weights have come for {len(missing)} parameters, as {missing[0]}")
        repack(self.model)

    def shutdown(self) -> None:
        if self._end is not None:
            self._end.close()
        self._end = None


def forget_parts(model: Any, model_config: Any) -> None:
    """Forgets the parts of layers from an update that broke off; they would be loaded for new ones."""
    broken_off = False
    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            broken_off = True
            info.loaded_weights, info.load_numel = [], 0
    if broken_off:
        layerwise.finalize_layerwise_reload(model, model_config)


class Worker:
    """Further methods of vLLM's workers, over /collective_rpc."""

    weight_transfer_engine: Any
    model_runner: Any
    _weight_update_active: bool

    def mrl_reload(self, weights_path: str) -> None:
        """Calls vLLM's `reload_weights`, and repacks what it leaves stale (cpu_packing.py)."""
        model = self.model_runner.get_model()
        forget_parts(model, self.model_runner.model_config)
        self.model_runner.reload_weights(weights_path=weights_path)
        repack(model)

    def mrl_place(self) -> dict[str, Any]:
        return links.place()

    def mrl_leave(self) -> None:
        """Leaves the trainer's link, also in the middle of an update that a killed trainer did not end."""
        if self.weight_transfer_engine is not None:
            self.weight_transfer_engine.shutdown()
        self._weight_update_active = False


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, Engine)
