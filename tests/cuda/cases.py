"""What is run on fake CUDA tensors, and what comes of it."""

from __future__ import annotations

import dataclasses
from typing import Any

from tests.cuda.models import MODELS, fewer_experts

LENGTHS = (700, 229, 95)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model in a layout, seen from one rank."""

    model: str
    world: int = 1
    rank: int = 0
    tp: int = 1
    pp: int = 1
    vpp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    sp: bool | str = "auto"
    layers: int = 4
    dtype: str = "bfloat16"
    recompute: str = "none"
    head: str = "lm"
    lora: bool = False
    mtp: bool = False
    detached: bool = False  # MTP layers, from the rest
    muon: bool = False
    router_losses: bool = False
    grouped: bool = False  # products of experts, where a GPU would not have them by itself
    graphs: int = 0  # positions of each micro-batch, whose layers are CUDA graphs; 0 for none
    modules: tuple[str, ...] | None = None  # that selective recomputation is of
    offload: tuple[str, ...] = ()
    bf16_moments: bool = False
    optimizer_on_host: bool = False
    spec: str = "auto"
    ids: int = 0  # of a teacher at each token, whose distribution is learned
    micro_batches: int = 2  # one whose gradients wait for the next, and the last
    calls: int = 1  # of forward_backward_step, before the optimizer's
    lengths: tuple[int, ...] = LENGTHS
    changes: dict[str, Any] = dataclasses.field(default_factory=dict)
    megatron: dict[str, Any] = dataclasses.field(default_factory=dict)  # engine.megatron, beside that of the options

    def __str__(self) -> str:
        layout = [f"{name}{getattr(self, name)}" for name in ("tp", "pp", "vpp", "cp", "ep", "etp")
                  if getattr(self, name) not in (1, None)]  # fmt: skip
        options = (
            [self.recompute] * (self.recompute != "none")
            + ["lora"] * self.lora
            + ["mtp"] * self.mtp
            + ["detached"] * self.detached
            + ["muon"] * self.muon
            + [f"{self.ids} ids"] * bool(self.ids)
            + ["router losses"] * self.router_losses
            + ["grouped"] * self.grouped
            + ["graphs"] * bool(self.graphs)
            + ["+".join(self.modules or ())] * (self.modules is not None)
            + ["bf16 moments"] * self.bf16_moments
            + ["optimizer on the host"] * self.optimizer_on_host
            + ["value"] * (self.head != "lm")
            + [f"{self.calls} calls"] * (self.calls > 1)
            + [name if value is True else str(value) for name, value in self.megatron.items()]
            + [self.spec] * (self.spec != "auto")
        )
        return " ".join(
            [self.model.split("/")[1], *layout, *options, *map("offload {}".format, self.offload),
             f"rank {self.rank} of {self.world}"]
        )  # fmt: skip


@dataclasses.dataclass
class Result:
    parameters: int  # bytes of this rank's parameters
    after_init: int  # bytes alive: parameters, gradients, masters
    backward_peak: int  # the most alive at once until the backward pass was done
    activations: int  # the most alive at once in forward and backward passes, beside what was alive before them
    peak: int  # the most alive at once, of init and step
    after_step: int
    syncs: dict[str, float]  # waits of the host in a micro-batch's forward and backward, by line
    step_syncs: dict[str, int]  # in the optimizer step
    updated: int  # parameters that it updates on this rank
    held: dict[str, int]  # bytes of parameters, gradients and optimizer, with what their buffers are padded by
    tensors: dict[str, list[str]]  # where parameters, masters, gradients and moments are, and of which dtype
    unordered: set[str] = dataclasses.field(default_factory=set)  # operators that add in no fixed order (order.py)
    replays: int = 0  # of CUDA graphs
    operators: dict[str, int] = dataclasses.field(default_factory=dict)  # how often each is called
    of_te: set[str] = dataclasses.field(default_factory=set)  # transformer-engine's that move experts' rows


HEADER = "| model, layout, rank, layers | parameters, GiB | peak, GiB | waits a micro-batch |\n|---|---|---|---|"


def as_shown(case: Case) -> Case:
    """Returns a case with as many micro-batches as fill the stages, as the table has it."""
    return dataclasses.replace(case, micro_batches=max(4, case.pp))


def row(case: Case, found: Result) -> str:
    """Returns a line of the table that `python -m tests.cuda` prints and docs/developers/gpu.md has some of."""
    waits = sum(found.syncs.values())
    return f"| {case}, {case.layers} layers | {found.parameters / 2**30:.2f} | {found.peak / 2**30:.2f} | {waits:g} |"


DENSE, MOE, LATENT = "Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3"
GLM, SINKS, GATED = "zai-org/GLM-4.5-Air", "openai/gpt-oss-20b", "Qwen/Qwen1.5-MoE-A2.7B"
DELTA, DELTA_MOE = "Qwen/Qwen3.5-9B", "Qwen/Qwen3.5-35B-A3B"
EVERYTHING = ("parameters", "gradients", "optimizer", "activations")


def _few(model: str) -> dict[str, Any]:
    """Few experts: sequential ones take a while each, also without numbers."""
    if model == LATENT:
        return fewer_experts(model, 16) | {"first_k_dense_replace": 1}  # two of each group
    if model in (DELTA, DELTA_MOE):
        return fewer_experts(model, 8) | {"full_attention_interval": 2}  # both kinds of layers
    return fewer_experts(model, 8)


def _case(model: str, **options: Any) -> Case:
    stages = options.get("pp", 1) * options.get("vpp", 1)
    if model == SINKS and options.get("tp", 1) > 1:
        options["etp"] = 1  # its experts have biases
    return Case(model, **{"layers": max(2, stages), "changes": _few(model)} | options)


# One of each family, which together have every option.
OF_EACH_FAMILY = [
    _case(
        "meta-llama/Llama-3.1-8B", world=4, tp=2, recompute="selective", modules=("core_attn", "layernorm"), muon=True
    ),
    _case("meta-llama/Llama-3.2-1B", world=2, tp=2, lora=True),
    _case("mistralai/Mistral-7B-v0.1", world=2, cp=2, lengths=(5000, 229)),  # longer than its window
    _case("Qwen/Qwen2.5-7B", world=4, pp=2, rank=3),
    _case(DENSE, world=16, rank=9, tp=2, pp=2, vpp=2, cp=2),
    _case(DENSE, world=2, tp=2, head="value", offload=EVERYTHING, bf16_moments=True),
    _case(MOE, world=8, rank=5, tp=2, ep=4, etp=1, router_losses=True),
    _case("allenai/OLMoE-1B-7B-0924", world=4, ep=2, lora=True),
    _case("allenai/OLMoE-1B-7B-0924", world=4, ep=2, optimizer_on_host=True),
    _case(GATED, recompute="full", router_losses=True, bf16_moments=True),
    _case(GLM, world=4, rank=2, pp=2, ep=2, mtp=True, detached=True),
    _case(LATENT, world=2, tp=2),
    _case(SINKS, world=2, ep=2, lengths=(700, 100), muon=True),
    _case("mistralai/Mixtral-8x7B-v0.1", world=4, tp=2, ep=2),
]

# What runs on each push: three families, on which each option and each kind of layout is once.
PUSHED = [
    _case(DENSE, world=4, tp=2, recompute="selective", modules=("core_attn", "layernorm"), muon=True),
    _case(DENSE, world=16, rank=9, tp=2, pp=2, vpp=2, cp=2),
    _case(DENSE, world=2, tp=2, head="value", offload=EVERYTHING, bf16_moments=True),
    _case(MOE, world=8, rank=5, tp=2, ep=4, etp=1, router_losses=True, optimizer_on_host=True),
    _case(MOE, world=4, ep=2, lora=True),
    _case(MOE, recompute="full", router_losses=True, bf16_moments=True),
    _case(LATENT, world=4, rank=2, pp=2, ep=2, mtp=True, detached=True),
]

# First, middle and last ranks of large worlds, with all experts.
CORNERS = [
    Case(
        LATENT, world=1024, rank=1023, tp=4, pp=8, ep=32, etp=1, layers=16
    ),  # of a last stage, which holds one at a time
    Case(LATENT, world=1024, rank=0, tp=4, pp=8, ep=32, etp=1, layers=16, micro_batches=8),
    Case(LATENT, world=1024, rank=517, tp=4, pp=8, vpp=2, ep=32, etp=1, layers=16, micro_batches=8),
    *(Case(DENSE, world=1024, rank=rank, tp=8, pp=4, cp=2, layers=8, micro_batches=4) for rank in (0, 500, 1023)),
    *(Case(MOE, world=256, rank=rank, tp=2, pp=2, cp=2, ep=32, layers=4) for rank in (0, 255)),
]


def _product() -> list[Case]:
    cases = []
    for model in MODELS:
        dense = not any("experts" in key for key in MODELS[model])
        layouts: list[dict[str, Any]] = [
            {}, {"world": 4, "rank": 1, "tp": 2}, {"world": 4, "rank": 0, "pp": 2}, {"world": 4, "rank": 3, "pp": 2},
            {"world": 4, "pp": 2, "vpp": 2}, {"world": 4, "cp": 2},
        ]  # fmt: skip
        if dense:
            layouts.append({"world": 2, "tp": 2, "sp": False})
        else:
            layouts += [
                {"world": 8, "rank": 5, "ep": 4}, {"world": 8, "rank": 5, "ep": 2, "tp": 2, "etp": 1},
                {"world": 32, "rank": 17, "tp": 2, "pp": 2, "cp": 2, "ep": 2},
            ]  # fmt: skip
        router = {"router_losses": not dense}
        # what of the keys of docs/gpu-keys.md needs no kernel of others, each with every model
        options: list[dict[str, Any]] = [
            {"recompute": "selective", "muon": True}, {"recompute": "full", "bf16_moments": True, **router},
            {"head": "value", "optimizer_on_host": True}, {"lora": True, **router}, {"offload": EVERYTHING},
            {"recompute": "selective", "modules": ("core_attn",), "optimizer_on_host": True},
        ]  # fmt: skip
        if model in (GLM, LATENT):
            layouts = [layout | {"mtp": True, "detached": bool(i % 2)} for i, layout in enumerate(layouts)]
            options = [o | {"mtp": not o.get("lora") and o.get("head") != "value"} for o in options]
        cases += [_case(model, **layout) for layout in layouts]
        cases += [_case(model, world=2, tp=2, **option) for option in options]
    return cases


PRODUCT = _product()


def ceilings(case: Case) -> dict[str, float]:
    """How often the host may wait in a micro-batch's forward and backward pass, by the line of code that makes it.

    Dense layers never wait. A layer of experts waits for the numbers of tokens, but where torch's grouped products take
    them on the device, and all experts are there; stages wait for the shapes of what they send each other. A copy of
    what the host has just made (`to_gpu`) is waited for too. What lays a micro-batch out (inputs.py) is not seen here:
    run.py gives it.
    """
    layers = (case.layers + case.mtp) * (2 if case.recompute != "none" else 1)
    here = case.ep * (case.tp if case.etp is None else case.etp) == 1
    grouped = case.spec != "te" and case.model != SINKS and not case.lora  # biases and adapters are one by one
    if case.megatron.get("moe_pad_expert_input_to_capacity") or here and grouped:
        layers = 0  # with places, numbers follow from that of the tokens
    between = r"megatron/core/pipeline_parallel/p2p_communication.py _communicate_shapes"
    return {
        # this rank's share of the tokens, before the first, of which router losses are means
        r"mrl/engine/megatron/engine.py _step_config (to_gpu|__float__)": 1 if case.router_losses else 0,
        # the losses, when all micro-batches are done
        r"mrl/engine/megatron/pipeline.py sum_micro_batches __float__": 1 + case.mtp,
        r"mrl/engine/megatron/engine.py most __int__": 1,  # how many micro-batches there are, before them
        r"mrl/engine/megatron/meta_run.py _maybe_dtoh_and_synchronize d2h_event.synchronize": layers,
        r"megatron/core/transformer/moe/experts.py forward tolist": layers if case.lora else 0,
        rf"{between} torch.cuda.synchronize": 4 * case.vpp,
        rf"{between} tolist": 4 * case.vpp,
        rf"{between} to_gpu": 4 * case.vpp,
        r"mrl/engine/(megatron/engine.py most|collective.py to_batch_order) to_gpu": 1,
        r"mrl/engine/offload.py park .*synchronize": len(case.offload),
    }


def step_ceilings(case: Case, updated: int) -> dict[str, float]:
    """How often the host may wait in an optimizer step, which updates so many parameters.

    For the norm of gradients, of dense ones and of experts, and for that of MTP layers which train apart. megatron's own,
    which it has where neither transformer-engine nor apex is, waits for each parameter's. Masters on the host wait for a
    copy of each gradient, and each parameter for the copy back.
    """
    norms = 4 if case.detached else 2
    host = r"mrl/engine/megatron/rounded_adam.py step"
    return {
        r"megatron/core/utils.py local_multi_tensor_l2_norm item": updated + norms,
        r"megatron/core/utils.py local_multi_tensor_l2_norm to_gpu": norms,
        r"megatron/core/optimizer/clip_grads.py get_grad_norm_fp32 item": norms,
        rf"{host} (cpu|to_gpu)": updated if case.optimizer_on_host else 0,
        r"mrl/engine/offload.py park .*synchronize": len(case.offload),
    }
