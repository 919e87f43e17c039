"""Keys of verl, NeMo-RL and TRL: every key of the lists in foreign/ (each with its source and version) is told ours or
that nothing stands for it, and a config of theirs is translated with its units."""

from __future__ import annotations

import pathlib

import pytest
import yaml
from click.testing import CliRunner

from mrl import cli
from mrl.config.command import roots
from mrl.config.load import from_dict
from mrl.config.translate import advice, known_keys, trainers
from mrl.errors import ConfigError, shortened
from tests.config.refused import dotted, nested
from tools import pages

LISTS = sorted((pathlib.Path(__file__).parent / "foreign").glob("*.txt"))
NAMED = {"verl": 100, "nemo": 55, "trl": 55}
"""Keys of a list that are told one of ours, at least; of verl's sft there are fewer in all."""


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_every_key_of_another_trainer_is_told_what_it_is_here(path):
    source, command, *keys = path.read_text().splitlines()
    assert source.startswith("# ") and any(c.isdigit() for c in source)
    root = roots()[command.split()[-1]]
    known = known_keys(root)
    with pytest.raises(ConfigError) as caught:
        from_dict(nested(dict.fromkeys(keys, "x")), root)
    fixes = {one.key: one.fix for one in (caught.value, *caught.value.others)}
    named = 0
    for key in keys:
        if key in known or key.startswith(("data.train.", "data.validation.")):
            named += 1  # ours has the name, or a value where theirs has a section
            continue
        said = advice(key, root)
        told = fixes[shortened(key)]
        assert said is not None and told == said, key
        named += said.startswith("did you mean")
    assert named >= (40 if path.stem == "verl_sft" else NAMED[path.stem.partition("_")[0]])


def test_every_row_names_keys_that_a_command_has():
    keys = [known_keys(root) for root in roots().values()]
    for trainer in trainers():
        for row in trainer.rows:
            assert all(any({key, f"actor.{key}"} & known for known in keys) for key in row.ours), row


@pytest.mark.parametrize(
    ("command", "key", "says"),
    [
        ("ppo", "actor_rollout_ref.rollout.n", "did you mean rollout.samples_per_prompt?"),
        ("ppo", "algorithm.adv_estimator", "did you mean algorithm.name?"),
        ("ppo", "data.train_batch_size", "did you mean train.global_batch_size? (counts prompts there; ours counts"),
        ("sft", "data.train_batch_size", "did you mean train.global_batch_size? (counts rows in both"),
        ("sft", "deepspeed", "did you mean engine.backend?"),
        ("sft", "optim.warmup_steps_ratio", "did you mean optimizer.warmup_steps? (a share of the run there"),
        ("sft", "optim.lr_scheduler", "did you mean optimizer.schedule?"),
        ("sft", "num_generations", "it is TRL's for rollout.samples_per_prompt, which this command lacks"),
        ("sft", "push_to_hub", "leave it out: checkpoint.export_hf"),
        ("sft", "lr_scheduler_kwargs.min_lr_rate", "leave it out: it is TRL's"),  # below a key of the table
        ("ppo", "critic.model.fsdp_config.param_offload", "did you mean critic.engine.offload?"),  # verl before 0.6
        ("ppo", "defaults", "leave it out: it names files whose keys this one has"),
        ("sft", "optimizer.leaning_rate", None),
    ],
)  # fmt: skip
def test_what_a_foreign_key_is_told(command, key, says):
    with pytest.raises(ConfigError) as caught:
        from_dict(nested({key: 1}), roots()[command])
    found = {one.key: one for one in (caught.value, *caught.value.others)}[key]
    assert found.why == "is given to an unknown key"
    assert found.fix.startswith(says) if says else advice(key, roots()[command]) is None


def translated(tmp_path, text: str, *words: str):
    """What `mrl config translate` makes of a file: dotted keys, and its lines on the rest."""
    (tmp_path / "theirs.yaml").write_text(text)
    done = CliRunner().invoke(cli.main, ["config", "translate", str(tmp_path / "theirs.yaml"), *words])
    return dotted(yaml.safe_load(done.stdout)), done


VERL = """
data: {train_batch_size: 128, train_files: a.parquet, max_prompt_length: 512, max_response_length: 1024}
actor_rollout_ref:
  model: {path: Qwen/Qwen3-0.6B, lora_rank: 0, lora_alpha: 16}
  actor:
    ppo_mini_batch_size: 32
    ppo_micro_batch_size_per_gpu: 4
    optim: {lr: 1e-6}
    use_kl_loss: true
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    strategy: megatron
    megatron: {tensor_model_parallel_size: 2}
  rollout: {n: 8, name: vllm, temperature: 1.0, response_length: "${oc.select:data.max_response_length,512}"}
critic: {optim: {lr: 1e-5}}
algorithm: {adv_estimator: grpo, use_kl_in_reward: false}
trainer: {project_name: p, experiment_name: e, default_local_dir: "runs/${trainer.project_name}", total_epochs: 2, save_freq: 20}
custom_reward_function: {path: r.py, name: score}
"""
NEMO = """
grpo: {num_prompts_per_step: 32, num_generations_per_prompt: 16, max_num_epochs: 1, normalize_rewards: true}
loss_fn: {reference_policy_kl_penalty: 0.01, ratio_clip_min: 0.2, ratio_clip_max: 0.28, token_level_loss: true}
policy:
  model_name: Qwen/Qwen2.5-1.5B
  train_global_batch_size: 512
  train_micro_batch_size: 4
  precision: bfloat16
  max_grad_norm: 1.0
  megatron_cfg: {enabled: true, tensor_model_parallel_size: 2, optimizer: {lr: 5.0e-6, clip_grad: "${policy.max_grad_norm}"}}
  dtensor_cfg: {enabled: false, tensor_parallel_size: 4}
checkpointing: {checkpoint_dir: results/grpo}
"""
TRL = """
model_name_or_path: Qwen/Qwen3-0.6B
dataset_name: pairs
learning_rate: 5e-7
beta: 0.05
max_steps: 100
output_dir: out
seed: 3
logging_steps: 25
optim: adamw_torch
gradient_checkpointing_kwargs: {use_reentrant: false}
"""


@pytest.mark.parametrize(
    ("text", "command", "ours", "absent", "left", "needed"),
    [
        (
            VERL, "ppo",
            {
                "train.global_batch_size": 1024, "algorithm.mini_batch_size": 256, "rollout.samples_per_prompt": 8,
                "algorithm.name": "grpo", "algorithm.kl_in": "loss", "algorithm.kl_coef": 0.001,
                "algorithm.kl_estimator": "k3", "algorithm.kl_cap": 10, "algorithm.clip_low": 0.2, "algorithm.aggregation": "token_mean",
                "actor.engine.backend": "megatron", "actor.engine.parallel.tp": 2, "actor.engine.micro_batch.size": 4,
                "actor.optimizer.lr": 1e-6, "actor.optimizer.schedule": "constant", "actor.optimizer.weight_decay": 0.01,
                "rollout.max_new_tokens": 1024, "output_dir": "runs/p", "train.epochs": 2, "log.wandb.name": "e",
            },
            ("critic.optimizer.lr", "actor.model.lora.alpha", "checkpoint.every"),
            ("trainer.save_freq: 20: give checkpoint.every (counts rollouts there", "custom_reward_function.path"),
            {"rewards.functions": [{"function": "r.py:score"}]},
        ),
        (
            NEMO, "ppo",
            {
                "train.global_batch_size": 512, "algorithm.mini_batch_size": 512, "rollout.samples_per_prompt": 16,
                "algorithm.name": "grpo", "algorithm.kl_coef": 0.01, "algorithm.clip_high": 0.28,
                "actor.engine.backend": "megatron", "actor.engine.parallel.tp": 2, "actor.optimizer.lr": 5e-6,
                "actor.optimizer.clip_grad": 1.0, "actor.model.dtype": "bfloat16", "output_dir": "results/grpo",
            },
            (), ("data.train: is missing",), {"data.train": "a", "rewards.functions": [{"name": "gsm8k"}]},
        ),
        (
            TRL, "dpo",
            {
                "model.path": "Qwen/Qwen3-0.6B", "data.train": "pairs", "optimizer.lr": 5e-7, "loss.beta": 0.05,
                "train.steps": 100, "output_dir": "out", "seed": 3, "optimizer.schedule": "linear",
                "data.max_length": 1024, "engine.recompute": "full", "log.every": 25, "optimizer.betas": [0.9, 0.999],
            },
            ("train.epochs",),
            ("train.global_batch_size: is missing", "gradient_checkpointing_kwargs.use_reentrant: false: leave it out"),
            {"train.global_batch_size": 8},
        ),
        (
            "model_name_or_path: m\nnum_generations: 8\nuse_vllm: true\nvllm_importance_sampling_clip_min: 0.5\n", "ppo",
            {
                "algorithm.correction": "mask", "algorithm.correction_level": "sequence", "algorithm.correction_cap": 3.0,
                "actor.optimizer.lr": 1e-6, "actor.optimizer.betas": [0.9, 0.999],
            },
            (), ("train.global_batch_size: is missing", "clip_min: 0.5: give algorithm.correction_floor (of mask alone here)"),
            {"data.train": "a", "rewards.functions": [{"name": "gsm8k"}], "train.global_batch_size": 8, "output_dir": "o"},
        ),
        ("data: {train_batch_size: 8, train_files: a}\nmodel: {path: m}\noptim: {lr: 1e-5}\ntrainer: {default_local_dir: o}",
         "sft", {"train.global_batch_size": 8, "optimizer.lr": 1e-5, "model.path": "m"}, (), (), {}),
    ],
    ids=["verl", "nemo-rl", "trl", "trl-grpo", "verl-sft"],
)  # fmt: skip
def test_a_config_is_translated_with_its_units_and_what_was_not_is_listed(
    tmp_path, text, command, ours, absent, left, needed
):
    found, done = translated(tmp_path, text)
    assert done.exit_code == (2 if left else 0), done.stderr
    assert done.stdout.startswith(f"# for mrl {command}, from ")
    assert {key: found.get(key) for key in ours} == {
        k: v if isinstance(v, list) else pytest.approx(v) for k, v in ours.items()
    }
    assert not set(absent) & found.keys()
    lines = done.stderr.splitlines()
    assert all(line.startswith("mrl: not translated: ") for line in lines)
    assert all(any(part in line for line in lines) for part in left), lines
    from_dict(nested(found | needed), roots()[command])


MODEL, GRPO, OF_NEMO = (
    "model_name_or_path: m\n",
    "model_name_or_path: m\nnum_generations: 8\n",
    "policy: {model_name: m}\n",
)
OF_VERL = (
    "actor_rollout_ref: {model: {path: m}}\nalgorithm: {adv_estimator: grpo, use_kl_in_reward: true, kl_penalty: %s}"
)
PARTS = [  # a part of a config -> keys of ours, and what is said of the rest
    (MODEL + "adam_beta1: 0.95", "sft", {"optimizer.betas": None}, "adam_beta1: 0.95: give optimizer.betas"),
    (MODEL + "adam_beta1: 0.95\nadam_beta2: 0.999", "sft", {"optimizer.betas": None}, "adam_beta2: 0.999: give optimizer.betas"),
    # losses
    (MODEL + "loss_type: ipo", "dpo", {"loss.name": "ipo", "loss.length_normalized": True}, ""),
    (MODEL + "loss_type: sigmoid_norm", "dpo", {"loss.name": "dpo", "loss.length_normalized": True}, ""),
    (MODEL + "loss_type: sigmoid\nlabel_smoothing: 0.1", "dpo", {"loss.label_smoothing": None}, "label_smoothing: 0.1: give"),
    (MODEL + "loss_type: [sigmoid, sft]\nloss_weights: [1.0, 0.2]", "dpo", {"loss.sft_weight": None}, "loss_weights: "),
    (MODEL + "center_rewards_coefficient: 0.1", "rm", {"optimizer.lr": 1e-4}, ""),
    (OF_NEMO + "dpo: {preference_loss_weight: 2, sft_loss_weight: 0.5}", "dpo", {"loss.sft_weight": None}, "sft_loss_weight: 0.5"),
    (OF_NEMO + "dpo: {preference_loss_weight: 1, sft_loss_weight: 0.5}", "dpo", {"loss.sft_weight": 0.5}, ""),
    (OF_NEMO + "dpo: {sft_average_log_probs: false, sft_loss_weight: 0.5}", "dpo", {"loss.sft_weight": None}, "sft_average_log_probs: false"),
    # of two of their keys one is told by hand, and one has the value
    (GRPO + "report_to: wandb\nproject: mine", "ppo", {"log.wandb.project": "mine"}, ""),
    (GRPO + "sync_ref_model: true\nref_model_sync_steps: 64", "ppo", {"reference.update_every": 64}, ""),
    (GRPO + "per_device_train_batch_size: 8\ngeneration_batch_size: 64", "ppo", {"train.global_batch_size": 64}, ""),
    ("grpo: {}\ndata: {dataset_name: x, train_data_path: a.jsonl}", "ppo", {"data.train": "a.jsonl"}, ""),
    ("grpo: {}\npolicy: {max_total_sequence_length: 512}\ndata: {max_input_seq_length: 256}", "ppo", {"data.max_prompt_length": 256}, ""),
    ("grpo: {}\npolicy: {scheduler: [{}], megatron_cfg: {enabled: true, scheduler: {lr_decay_style: cosine}}}", "ppo", {"actor.optimizer.schedule": "cosine"}, ""),
    # the best checkpoints there are not the newest here
    (OF_NEMO + "grpo: {}\ncheckpointing: {keep_top_k: 3, metric_name: null}", "ppo", {"checkpoint.keep": 3}, ""),
    (OF_NEMO + "grpo: {}\ncheckpointing: {keep_top_k: 3, metric_name: 'val:accuracy'}", "ppo", {"checkpoint.keep": None}, "keep_top_k: 3: give checkpoint.keep (the best there"),
    # verl's k3 is capped
    (OF_VERL % "low_var_kl", "ppo", {"algorithm.kl_cap": 10}, ""),
    (OF_VERL % "kl", "ppo", {"algorithm.kl_cap": None}, ""),
    # corrections
    (GRPO + "use_vllm: true\nvllm_importance_sampling_correction: false", "ppo", {"algorithm.correction": "none"}, ""),
    (GRPO + "use_vllm: true\nvllm_importance_sampling_mode: token_truncate\nvllm_importance_sampling_clip_max: null", "ppo",
     {"algorithm.correction": "truncate", "algorithm.correction_level": "token"}, "give algorithm.correction_cap (null is no bound there)"),
    (GRPO + "use_vllm: false", "ppo", {"algorithm.correction": None}, ""),
    # advantages
    (OF_NEMO + "grpo: {normalize_rewards: true, use_leave_one_out_baseline: true}", "ppo", {"algorithm.advantage": None}, "use_leave_one_out_baseline: true: give"),
    (OF_NEMO + "grpo: {normalize_rewards: false, use_leave_one_out_baseline: true}", "ppo", {"algorithm.advantage": "rloo"}, ""),
    (OF_NEMO + "grpo: {normalize_rewards: false, use_leave_one_out_baseline: false}", "ppo", {"algorithm.advantage": "group_mean"}, ""),
    # verl's algorithm is gae where a file has none, which is PPO with a critic
    ("actor_rollout_ref: {model: {path: m}}\ndata: {train_files: a}", "ppo", {"algorithm.name": "ppo"}, ""),
]  # fmt: skip


@pytest.mark.parametrize(("text", "command", "ours", "left"), PARTS, ids=[next(iter(part[2])) for part in PARTS])
def test_a_part_is_ours_or_is_said_to_be_none(tmp_path, text, command, ours, left):
    found, done = translated(tmp_path, f"{text}\n", "--as", command)
    assert {key: found.get(key) for key in ours} == ours
    assert left in done.stderr, done.stderr


def test_what_is_no_config_of_theirs_is_said(tmp_path):
    (tmp_path / "ours.yaml").write_text("nothing: 1\n")
    done = CliRunner().invoke(cli.main, ["config", "translate", str(tmp_path / "ours.yaml")])
    assert done.exit_code == 2 and "has no keys of verl, NeMo-RL or TRL; see docs/coming-from.md" in done.stderr


def test_the_page_is_current():
    path = pathlib.Path(__file__).parents[2] / "docs" / "coming-from.md"
    assert path.read_text(encoding="utf-8") == pages.coming_from(), "run `make docs`"
