"""Every config key: its type, default and meaning. Loading and checks are in `mrl.config.load`.

One name, one unit; nothing is rescaled in place and derived values are properties. `key()` carries the
help text and the allowed values, from which `docs/config.md` and the error messages are made.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Literal

from mrl.config.build import build_section
from mrl.config.fields import MAX_DEGREE, MAX_SECONDS, MAX_SEQUENCES, REQUIRED, key
from mrl.config.keys import value_kind
from mrl.config.megatron_speed import REMOVED_FIELDS, ROUNDING
from mrl.config.sections import MicroBatchConfig, MTPConfig, MuonConfig, PolicyMTPConfig
from mrl.config.sources import EVAL_HELP, TRAIN_HELP, LossOn, SFTShare, SFTSource, StreamedRowsConfig, eval_of, train_of
from mrl.errors import ConfigError, MistakeCollector


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters, with peft's names and meanings: a weight `W` acts as `W + scale * B A`, and only A and B
    train."""

    rank: int = key(16, "rank of each adapter", minimum=1, maximum=MAX_DEGREE)
    alpha: float = key(32.0, "adapters are scaled by alpha / rank", above=0)
    dropout: float = key(0.0, "dropout of what goes into an adapter, while training", minimum=0, maximum=0.99)
    target_modules: str | tuple[str, ...] = key(
        "all-linear",
        "modules that get an adapter, as in peft: all-linear, a list of ends of names, or a regular expression",
    )
    exclude_modules: str | tuple[str, ...] | None = key(
        None, "modules among these without an adapter, in the same forms"
    )
    rslora: bool = key(False, "scale by alpha / sqrt(rank) instead (rank-stabilised LoRA)")
    export: Literal["adapter", "merged"] = key(
        "adapter",
        "what an export writes. adapter: a folder that peft loads over the model. merged: the model with the "
        "adapters added in",
        may_change=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    path: str = key(REQUIRED, "Hugging Face model folder, or a hub id, from the local cache or by download", moves=True)
    init: Literal["pretrained", "random"] = key(
        "pretrained", "start from the folder's weights, or from scratch (config.json and tokenizer suffice)"
    )
    dtype: Literal["bfloat16", "float32"] = key(
        "bfloat16",
        "dtype of parameters and activations; bfloat16 keeps fp32 master weights and reduces gradients in fp32",
    )
    trust_remote_code: bool = key(
        False,
        "let transformers run Python code of the tokenizer. The model's own code never runs",
        may_change=True,
    )
    lora: LoraConfig | None = key(None, "low-rank adapters, which train instead of the weights (docs/lora.md)")


JSD_BETA = 0.5
"""The teacher's share of the mixture, where `beta` is null."""

_MTP = (
    "train the model's MTP layers (DeepSeek-V3, GLM-4.5, Qwen3.5), all that its config.json announces (megatron "
    "backend, docs/layouts.md). null skips them"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModelConfig(ModelConfig):
    """A language model that trains, with its MTP layers if `mtp` is given."""

    mtp: MTPConfig | None = key(None, _MTP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PolicyModelConfig(TrainedModelConfig):
    mtp: PolicyMTPConfig | None = key(None, _MTP)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleModelConfig:
    """The model of a role next to the policy."""

    path: str | None = key(
        None, "Hugging Face model folder or hub id; null is the policy's, in reward.model none", moves=True
    )
    dtype: Literal["bfloat16", "float32"] | None = key(None, "as model.dtype; null is the policy's")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    tp: int = key(1, "tensor parallel: ranks that share each weight matrix", minimum=1, maximum=MAX_DEGREE)
    pp: int = key(1, "pipeline parallel: ranks that share the layers", minimum=1, maximum=MAX_DEGREE)
    vpp: int = key(1, "virtual pipeline: model chunks per pipeline rank", minimum=1, maximum=MAX_DEGREE)
    cp: int = key(
        1,
        "context parallel: ranks that share each sequence (by Ulysses on backend fsdp)",
        minimum=1,
        maximum=MAX_DEGREE,
    )
    ep: int = key(1, "expert parallel: ranks that share the experts", minimum=1, maximum=MAX_DEGREE)
    etp: int | None = key(
        None, "tensor parallel of the experts; null is 1 where ep is above 1, else tp", minimum=1, maximum=MAX_DEGREE
    )
    sp: bool | Literal["auto"] = key(
        "auto", "sequence parallel; auto is true where tp is above 1 (MoE with tp needs it)"
    )

    @property
    def expert_tp(self) -> int:
        return self.etp if self.etp is not None else (1 if self.ep > 1 else self.tp)

    @property
    def sequence_parallel(self) -> bool:
        return self.tp > 1 if self.sp == "auto" else self.sp


@dataclasses.dataclass(frozen=True, kw_only=True)
class MoEConfig:
    aux_loss: float = key(0.0, "coefficient of the load-balancing loss, per MoE layer (megatron backend)", minimum=0)
    z_loss: float = key(0.0, "coefficient of the router z-loss (megatron backend)", minimum=0)
    grouped_mm: bool | Literal["auto"] = key(
        "auto",
        "multiply all experts of a layer in one kernel, torch's grouped_mm (megatron backend). auto is true for the "
        "local layer spec in bfloat16 on GPUs of compute capability 9 and 10 (H100, B200)",
        may_change=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class FSDPConfig:
    replicate: int = key(
        1,
        "copies of the weights, each sharded over processes / replicate neighbouring ranks (HSDP); 1 shards over all",
        minimum=1,
        maximum=MAX_DEGREE,
    )
    reshard_after_forward: bool = key(
        True,
        "free a layer's gathered weights after its forward, and gather them again for its backward. false keeps them",
    )
    defer_sync: bool = key(
        False,
        "gather weights and reduce gradients once a mini-batch, not once a micro-batch. Every rank then holds the "
        "whole model's weights and gradients",
    )
    compile: bool = key(False, "torch.compile each layer; needs a C++ compiler, and time at the first steps")


RecomputeModule = Literal["layernorm", "mlp", "moe", "shared_experts", "moe_act", "mla_up_proj", "core_attn"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    backend: str = key(
        "megatron", "engine that runs the model: megatron, fsdp, or one that an installed package registers"
    )
    options: dict[str, Any] = key(
        dict, "options of an engine from an installed package, which documents them", may_change=True
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto", "auto is cuda where there is a GPU", may_change=True)
    layer_spec: Literal["auto", "te", "local"] = key(
        "auto",
        "modules of the layers (megatron backend): te is transformer-engine's, local runs on any machine. auto is te "
        "if transformer-engine is installed, there is a GPU, and te has more than unfused attention for this model "
        "and layout; local for some experts: an H100 trained 32 experts of 1,024 x 768 faster so, and at most this "
        "size is taken (docs/gpu-keys.md). A resume keeps what auto was",
        may_change=True,
    )
    attention: Literal["auto", "flash", "fused", "unfused"] = key(
        "auto",
        "transformer-engine's attention kernel (megatron backend, docs/gpu-keys.md): flash is flash-attn's, fused is "
        "cuDNN's. auto is what transformer-engine chooses; any other value requires its layers",
        may_change=True,
    )
    recompute: Literal["none", "selective", "full"] = key(
        "none",
        "what the backward pass computes again: none, selective (recompute_modules) or full (every layer)",
        may_change=True,
    )
    recompute_modules: tuple[RecomputeModule, ...] | None = key(
        None,
        "what recompute selective computes again (megatron backend, docs/layouts.md). null is all of a layer but its "
        "attention: layernorm, mla_up_proj, and mlp or moe, if the model has them; core_attn, too, with gated "
        "delta nets. An empty list recomputes nothing",
        may_change=True,
    )
    recompute_every: int = key(
        1,
        "with recompute full, compute one of every N layers again (fsdp backend)",
        minimum=1,
        may_change=True,
    )
    offload: tuple[Literal["parameters", "gradients", "optimizer", "activations"], ...] = key(
        (),
        "state to keep in host memory between uses; activations stay there from a layer's forward to its backward",
        may_change=True,
    )
    parallel: ParallelConfig = key(
        ParallelConfig, "degrees of parallelism; the rest of the processes is data parallel", may_change=True
    )
    micro_batch: MicroBatchConfig = key(
        MicroBatchConfig,
        "how a mini-batch is split. Default: tokens = 4096, or the longest sequence if that is more",
        may_change=True,
    )
    batch_invariant: bool = key(
        False,
        "a sequence's log-probs, values and sampled tokens do not depend on the rest of its batch, to the bit "
        "(megatron backend, docs/decoding.md). Needs micro_batch.size 1, and samples one token at a time",
        may_change=True,
    )
    cuda_graphs: bool = key(
        False,
        "on a GPU, replay the layers' forward and backward passes as CUDA graphs in training (megatron backend, "
        "docs/training-graphs.md). Needs micro_batch.pad; no GPU has run it",
        may_change=True,
    )
    moe: MoEConfig = key(MoEConfig, "mixture-of-experts models: router losses, and how experts multiply")
    fsdp: FSDPConfig = key(FSDPConfig, "keys of the fsdp backend alone", may_change=True)
    megatron: dict[str, Any] = key(
        dict,
        "more fields of megatron-core's TransformerConfig, DistributedDataParallelConfig and OptimizerConfig, by "
        "their names there, as {overlap_grad_reduce: true} (megatron backend, docs/gpu-keys.md)",
        may_change=ROUNDING | REMOVED_FIELDS,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    name: Literal["adamw", "muon"] = key(
        "adamw",
        "adamw for all parameters; or muon for the matrices of layers (megatron backend), with adamw for embedding, "
        "head, norms and biases (docs/muon.md)",
    )
    muon: MuonConfig = key(MuonConfig, "keys of muon alone")
    lr: float = key(
        1e-5,
        "peak learning rate. Default: that of the resumed run, else of the command, with or without adapters (the "
        "table at the top of docs/config.md)",
        above=0,
        maximum=10,
    )
    min_lr: float = key(0.0, "learning rate that the schedule decays to", minimum=0, maximum=10)
    betas: tuple[float, float] = key((0.9, 0.95), "AdamW's decay rates", minimum=0, maximum=0.999999)
    eps: float = key(1e-8, "AdamW's epsilon", minimum=1e-30, maximum=100)
    weight_decay: float = key(0.0, "decoupled weight decay; not applied to biases and norms", minimum=0, maximum=1000)
    clip_grad: float = key(1.0, "gradient norm above which gradients are scaled down; 0 for never", minimum=0)
    schedule: Literal["constant", "linear", "cosine", "wsd"] = key("cosine", "learning-rate schedule after the warm-up")
    warmup_steps: int = key(0, "steps over which the learning rate rises linearly from 0", minimum=0)
    decay_steps: int | None = key(
        None, "steps of the decay. null is all steps after the warm-up; for wsd the last 10 % of the run", minimum=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig(StreamedRowsConfig):
    train: str | tuple[SFTShare, ...] = key(REQUIRED, TRAIN_HELP, moves=True, parse=train_of(SFTShare))
    eval: str | Mapping[str, SFTSource] | None = key(None, EVAL_HELP, may_change=True, parse=eval_of(SFTSource))
    format: Literal["auto", "messages", "prompt_completion", "alpaca", "text", "tokenized"] = key(
        "auto", "form of a row; auto detects it from the first row's fields"
    )
    loss_on: LossOn = key(
        "assistant",
        "tokens that train: every assistant turn, the last one, all, or the turns of listed roles, as in [assistant, "
        "tool]",
    )
    teacher: str | None = key(
        None, "teacher of rows that name none, by its name in teacher.others; null is teacher.model"
    )
    max_length: int = key(2048, "longest sequence in tokens", minimum=2, long_rows=True)
    truncation: Literal["error", "right", "left", "drop"] = key(
        "error",
        "a longer row stops the run, loses its right or left end, or is skipped (drop); counted and reported",
        long_rows=True,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    steps: int | None = key(None, "optimizer steps; excludes `epochs`", minimum=1, may_change=True)
    epochs: float | None = key(
        None,
        "passes over the usable rows, which are counted first if some may be skipped. Excludes `steps`; neither "
        "means one epoch",
        above=0,
        maximum=1e6,
        may_change=True,
    )
    global_batch_size: int = key(
        REQUIRED, "sequences per optimizer step over all ranks", minimum=1, maximum=MAX_SEQUENCES
    )
    eval_every: int | None = key(
        None,
        "evaluate before training, every N steps and at the end. null: at the end only, if data.eval is set",
        minimum=1,
        may_change=True,
    )
    eval_batches: int | None = key(
        None, "global batches per evaluation; null for all of data.eval", minimum=1, may_change=True
    )
    guards: bool = key(
        True,
        "check on the first step that every parameter trains, gradients are finite and replicas agree",
        may_change=True,
    )

    @property
    def resolved_epochs(self) -> float | None:
        """Passes over the data; None where the run's length is `steps`."""
        return None if self.steps is not None else 1.0 if self.epochs is None else self.epochs


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    every: int | None = key(None, "save every N steps; null saves at the end and on signals only", minimum=1)
    keep: int | None = key(2, "newest whole checkpoints kept; null for all", minimum=1)
    resume: str = key("auto", "auto (newest whole checkpoint of output_dir, if any), never, or a checkpoint folder")
    remote: str | None = key(None, "fsspec URL that checkpoints are copied to")
    background: bool = key(
        False,
        "copy a save to host memory and write it while training goes on. Saves at the end and on signals wait",
    )
    export_hf: bool = key(
        True, "write the final model to output_dir/hf, for transformers; with model.lora the adapter, for peft"
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class WandbConfig:
    project: str | None = key(None, "wandb project; null turns wandb off")
    mode: Literal["auto", "online", "offline"] = key(
        "auto", "auto is online when logged in and reachable, else offline"
    )
    name: str | None = key(None, "run name; default the output directory's name")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    console: Literal["rich", "plain", "none"] = key(
        "rich", "rich: a live progress bar, or plain without a terminal. plain: a line per step. none: nothing"
    )
    every: int = key(1, "show every Nth step, the first, the last and those with an evaluation", minimum=1)
    wandb: WandbConfig = key(WandbConfig, "Weights & Biases")
    tensorboard: bool = key(False, "write event files to output_dir/tb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherModelConfig:
    path: str = key(
        REQUIRED,
        "Hugging Face model folder or hub id, with the same tokenizer as model.path. With a server, the model that "
        "it serves; only its tokenizer is read here",
        moves=True,
    )
    dtype: Literal["bfloat16", "float32"] | None = key(None, "as model.dtype, which null is")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherServerConfig:
    url: str = key(REQUIRED, "the server, as http://host:8000")
    name: str | None = key(None, "name of the model there; null is the only one that it serves")
    concurrency: int = key(32, "requests at a time", minimum=1, maximum=MAX_DEGREE)
    timeout_s: float = key(600.0, "longest wait for an answer", above=0, maximum=MAX_SECONDS)
    key_variable: str | None = key(None, "environment variable with the server's key, sent as Authorization: Bearer")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OneTeacherConfig:
    """A model that teaches its next-token distributions, and its place."""

    model: TeacherModelConfig = key(REQUIRED, "the teacher")
    engine: EngineConfig | None = key(None, "its engine and layout; null is the model's", may_change=True)
    server: TeacherServerConfig | None = key(
        None, "a server with the teacher instead of an engine: vLLM, or mrl serve", may_change=True
    )


def other_teachers(raw: Any, path: str) -> dict[str, OneTeacherConfig]:
    """Returns `teacher.others`, or `reference.others` of `mrl ppo`."""
    if raw is None:
        return {}
    if not isinstance(raw, Mapping):
        fix = "give names with a model each, as in {math: {model: {path: DIR}}}"
        raise ConfigError(path, raw, f"is {value_kind(raw)}", fix)
    made = {}
    with MistakeCollector() as mistakes:
        for name, of in raw.items():
            with mistakes.noted():
                if not isinstance(name, str) or not re.fullmatch(r"[\w-]+", name):
                    raise ConfigError(path, name, "is no name of a teacher", "give letters, digits, _ and - alone")
                made[name] = build_section(OneTeacherConfig, of, f"{path}.{name}", OneTeacherConfig)
    return made


@dataclasses.dataclass(frozen=True, kw_only=True)
class DivergenceConfig:
    """How a student's next-token distributions are compared with a teacher's."""

    loss: Literal["forward_kl", "reverse_kl", "jsd"] = key(
        "forward_kl", "the divergence of the student's distributions from the teacher's"
    )
    beta: float | None = key(
        None,
        "for jsd: the teacher's share of the mixture that both are compared with. null is 0.5",
        above=0,
        maximum=0.999,
    )
    top_k: int | None = key(
        64,
        "compare both at the teacher's k likeliest token ids, with one bucket for all others. null, or as many as "
        "there are, compares the whole vocabulary exactly, and needs memory for that many numbers a token",
        minimum=1,
    )

    @property
    def resolved_beta(self) -> float:
        return JSD_BETA if self.beta is None else self.beta


@dataclasses.dataclass(frozen=True, kw_only=True)
class TeacherConfig(DivergenceConfig, OneTeacherConfig):
    """Models whose next-token distributions are learned (docs/distill.md): one, or several by row."""

    others: Mapping[str, OneTeacherConfig] = key(
        dict,
        "more teachers by name, each with its own `model`, `engine` and `server`. A row learns from the one that its "
        "`teacher`, or that of its source, names; else from teacher.model",
        parse=other_teachers,
    )
    temperature: float = key(1.0, "divides the logits of both in the divergence", minimum=0.01, maximum=100)
    weight: float = key(
        1.0, "share of the divergence in the loss; the rest is the fine-tuning loss", above=0, maximum=1
    )
    cache: bool = key(
        False,
        "compute its log-probs of all rows before the first step and keep them in output_dir/teacher. It then takes "
        "no memory while training",
        may_change=True,
    )

    @property
    def by_key(self) -> dict[str, OneTeacherConfig]:
        """The teachers by the keys of their sections, that of all other rows first."""
        return {"teacher": self} | {f"teacher.others.{name}": other for name, other in self.others.items()}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SFTConfig:
    output_dir: str = key(REQUIRED, "the run's directory", may_change=True)
    seed: int = key(0, "seed of initialisation, dropout and data order", minimum=0, maximum=2**32 - 1)
    model: TrainedModelConfig = key(REQUIRED, "the model")
    engine: EngineConfig = key(EngineConfig, "the engine and its layout")
    optimizer: OptimizerConfig = key(OptimizerConfig, "the optimizer and its schedule")
    teacher: TeacherConfig | None = key(None, "a model that is distilled into this one (docs/distill.md)")
    data: DataConfig = key(REQUIRED, "the data")
    train: TrainConfig = key(REQUIRED, "length of the run")
    checkpoint: CheckpointConfig = key(CheckpointConfig, "saving and resuming", may_change=True)
    log: LogConfig = key(LogConfig, "where metrics go", may_change=True)

    def teacher_model(self, own: TeacherModelConfig) -> ModelConfig:
        """Returns the model of a teacher, null resolved."""
        dtype = own.dtype or self.model.dtype
        return dataclasses.replace(self.model, path=own.path, init="pretrained", dtype=dtype, lora=None, mtp=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleConfig:
    """Holds all that an engine is built from: the model, engine and optimizer of one role."""

    model: ModelConfig
    engine: EngineConfig
    optimizer: OptimizerConfig | None  # None: it never trains
    seed: int = 0
    head: Literal["lm", "value"] = "lm"  # next-token logits, or one number per token
    packing: bool = True  # micro-batches hold sequences end to end; False pads them to the longest
    total_steps: int = 1  # optimizer steps of the whole run, over which the learning rate decays
    mtp: MTPConfig | None = None  # how MTP layers train; None leaves them out
