"""Wrong configs of `mrl ppo`: keys of roles, rollout and algorithm, against each other, the processes and the models."""

from __future__ import annotations

from tests.bad_input.mistakes import Case, set_model, set_other_model

AHEAD = ("rollout.backend=vllm", "rollout.server.urls=['http://a:1']", "rollout.async_level=1")

CASES = [
    # Keys.
    Case("key of mrl sft", "model.path", ("unknown key", "did you mean actor.model.path?"), ("model.path=x",)),
    Case("init of a critic", "critic.model.init", ("unknown key",), ("critic.model.init=random",)),
    Case("stop texts", "rollout.stop", ("give a list of texts",), ("rollout.stop=END",)),
    Case("label of a reward model", "rewards.functions[0].label", ("is taken",), ("rewards.functions=[{name: math, label: model}]",)),
    # Sizes and lengths.
    Case("groups", "train.global_batch_size", ("rollout.samples_per_prompt 3", "give 6 or 9"), ("rollout.samples_per_prompt=3",)),
    Case("mini-batches", "algorithm.mini_batch_size", ("does not divide train.global_batch_size 8", "give 2 or 4"), ("algorithm.mini_batch_size=3",)),
    Case("whole iterations", "train.steps", ("multiple of the 6 steps", "give 6 or 12"), ("train.steps=8", "algorithm.epochs=3")),
    Case("less than an iteration", "train.steps", ("give 2",), ("train.steps=1",)),
    Case("micro-batch below a sequence", "critic.engine.micro_batch.tokens", ("data.max_prompt_length 32 and rollout.max_new_tokens 32", "at least 64"), ("algorithm.name=ppo", "critic.engine.micro_batch.tokens=63")),
    Case("actor's micro-batch", "actor.engine.micro_batch.tokens", ("actor.engine.micro_batch.size 2", "keep one"), ("actor.engine.micro_batch={tokens: 64, size: 2}",)),
    Case("cache below a sequence", "rollout.cache_tokens", ("at least 64",), ("rollout.cache_tokens=63",)),
    Case("one sample of a group", "rollout.samples_per_prompt", ("algorithm.name grpo compares", "at least 2"), ("rollout.samples_per_prompt=1",)),
    # Optimizers and engines.
    Case("actor's warm-up", "actor.optimizer.warmup_steps", ("the 2 steps", "algorithm.critic_warmup 2"), ("algorithm.name=ppo", "algorithm.critic_warmup=2", "actor.optimizer.warmup_steps=3")),
    Case("critic's warm-up", "critic.optimizer.warmup_steps", ("train.steps 4",), ("algorithm.name=ppo", "critic.optimizer.warmup_steps=5")),
    Case("the critic alone", "algorithm.critic_warmup", ("leaves the actor none", "at most 3"), ("algorithm.name=ppo", "algorithm.critic_warmup=4")),
    Case("rotary embedding beyond its length", "data.max_prompt_length 32 + rollout.max_new_tokens 32: value 64", ('"dynamic"', "give at most 63"), ("actor.engine={backend: fsdp}",), set_model(rope_scaling={"rope_type": "dynamic", "factor": 2.0}, max_position_embeddings=63)),
    Case("fsdp with tp", "critic.engine.parallel.tp", ("fsdp", "choose another backend"), ("algorithm.name=ppo", "critic.engine={backend: fsdp, parallel: {tp: 2}}")),
    Case("two devices", "critic.engine.device", ("same processes",), ("algorithm.name=ppo", "critic.engine.device=cuda")),
    Case("adapters with dropout", "actor.model.lora.dropout", ("set it to 0",), ("actor.model={path: model, lora: {dropout: 0.1}}",)),
    Case("recompute of a reference", "reference.engine.recompute", ("never trains",), ("reference.engine.recompute=full",)),
    Case("optimizer of a reference", "reference.engine.offload", ("never trains",), ("reference.engine.offload=[optimizer]",)),
    # Teachers.
    Case("the best of no rewards", "checkpoint.best", ("where nothing is rewarded", "actor/sequence_kl"), ("algorithm.name=opd", "reference.model.path=model", "rewards=null", "checkpoint.best=reward/mean", "checkpoint.every=1")),
    Case("invariance of servers", "actor.engine.batch_invariant", ("rollout.backend vllm", "native"), ("actor.engine={batch_invariant: true, micro_batch: {size: 1}}", "rollout.backend=vllm")),
    Case("invariance in graphs", "actor.engine.batch_invariant", ("rollout.cuda_graphs",), ("actor.engine={batch_invariant: true, micro_batch: {size: 1}}", "rollout.cuda_graphs=true")),
    # What scores.
    Case("no rewards", "rewards", ("nothing to learn from", "rollout.environment"), ("rewards=null",)),
    Case("rewards of weight 0", "rewards.functions", ("nothing to learn from",), ("rewards.functions=[{name: gsm8k, weight: 0}]",)),
    Case("reward model of weight 0", "reward.weight", ("nothing to learn from",), ("rewards=null", "reward={model: {path: model}, weight: 0}")),
    Case("weight without a reward model", "reward.weight", ("without reward.model.path",), ("reward.weight=2",)),
    Case("a language model that scores", "reward.model.path", ("value 'judge' is a language model (Qwen3ForCausalLM); give a sequence classifier with one label, as mrl rm makes",),
        ("reward.model.path=judge",), set_other_model("judge")),
    Case("no function file", "rewards.functions[0].function", ("score.py, which does not exist",), ("rewards.functions=[{function: 'score.py:f'}]",)),
    # Rollout.
    Case("a stop token that no model has", "rollout.stop_tokens", ("value 256 is no token of the model", "vocab_size 256"), ("rollout.stop_tokens=[255, 256]",)),
    Case("nobody to sample ahead", "rollout.async_level", ("needs servers", "rollout.server.urls"), ("rollout.async_level=1",)),
    Case("ranks of another backend", "rollout.ranks", ("value 1", "rollout.backend is vllm", "native"), (*AHEAD, "rollout.ranks=1")),
    Case("ranks that wait", "rollout.async_level", ("value 0", "rollout.ranks", "set it to 1"), ("rollout.ranks=1",)),
    Case("ranks of several iterations", "rollout.async_level", ("value 2", "rollout.ranks", "set it to 1"), ("rollout.ranks=1", "rollout.async_level=2")),
    Case("no rank trains", "rollout.ranks", ("value 1", "none of the 1 process"), ("rollout.ranks=1", "rollout.async_level=1", "--nproc", "1")),
    Case("urls beside ranks", "rollout.server.urls", ("rollout.ranks",), ("rollout.ranks=1", "rollout.async_level=1", "rollout.server.urls=['http://a:1']")),
    Case("ranks that share an unsharded model", "rollout.server.tp", ("value 2", "fsdp"), ("rollout.ranks=2", "rollout.async_level=1", "rollout.server.tp=2", "actor.engine.backend=fsdp")),
    Case("whole weights of several iterations", "rollout.async_level", ("value 2", "rollout.server.lora", "adapter"), (*AHEAD, "rollout.async_level=2")),
    Case("rounds of several iterations", "rollout.async_level", ("value 2", "algorithm.dynamic_sampling"), (*AHEAD, "rollout.async_level=2", "algorithm.name=dapo", "actor.model.init=pretrained", "actor.model.lora.rank=4", "rollout.server.lora=adapter")),
    Case("servers that sleep and sample", "rollout.async_level", ("rollout.server.sleep",), (*AHEAD, "rollout.server.sleep=true")),
    Case("old samples uncorrected", "algorithm.correction", ("rollout.async_level 1", "truncate"), (*AHEAD, "algorithm.correction=none")),
    Case("a divergence of old samples", "algorithm.distill", ("rollout.async_level",), (*AHEAD, "algorithm.name=opd", "algorithm.distill={}", "reference.model.path=model", "rewards=null")),
    Case("evaluation within an iteration", "train.eval_every", ("multiple of the 2 steps",), (*AHEAD, "train.eval_every=3", "data.eval=rows.jsonl")),
    Case("nothing to replay", "rollout.path", ("recorded",), ("rollout.backend=recorded",)),
    Case("path of native", "rollout.path", ("not used by rollout.backend native",), ("rollout.path=samples",)),
    Case("no recorded folder", "rollout.path", ("is no folder",), ("rollout={backend: recorded, path: samples, samples_per_prompt: 4, max_new_tokens: 32}",)),
    Case("graphs of roles that take turns", "actor.engine.cuda_graphs", ("train.offload_idle is auto", "set that to never"),
        ("actor.engine.cuda_graphs=true", "actor.engine.micro_batch={tokens: 64, pad: true}")),
    Case("server of native", "rollout.server.bucket_mb", ("vllm or sglang",), ("rollout.server.bucket_mb=1",)),
    Case("server that is no URL", "rollout.server.urls", ("http://host:8000",), ("rollout.backend=vllm", "rollout.server.urls=['host:8000']")),
    Case("sglang without servers", "rollout.server.urls", ("http://host:30000",), ("rollout.backend=sglang", "rollout.cache_tokens=65536")),
    Case("cache of servers", "rollout.cache_tokens", ("by rollout.backend vllm",), ("rollout.backend=vllm", "rollout.server.urls=['http://a:1']", "rollout.cache_tokens=99")),
    Case("memory of servers", "rollout.server.memory_fraction", ("which have their own",), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {urls: ['http://a:1'], memory_fraction: 0.3}}",)),
    Case("servers' keys without servers", "rollout.server.sleep", ("inside the trainer",), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {sleep: true}}",)),
    Case("adapters of an actor without", "rollout.server.lora", ("actor.model.lora is null", "set it to merged"), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {urls: ['http://a:1'], lora: adapter}}",)),
    Case("a broadcast of adapters", "rollout.server.handover", ("which go as files", "set it to auto"), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {urls: ['http://a:1'], lora: adapter, handover: broadcast}}", "actor.model.init=pretrained", "actor.model.lora={rank: 2}")),
    Case("buckets of adapters", "rollout.server.bucket_mb", ("which writes one file",), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {urls: ['http://a:1'], lora: adapter, bucket_mb: 8}}", "actor.model.init=pretrained", "actor.model.lora={rank: 2}")),
    Case("an engine's processes beside servers", "rollout.server.tp", ("which have their own",), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {urls: ['http://a:1'], tp: 2}}",)),
    Case("an engine of more processes than there are", "rollout.server.tp", ("does not divide the number of processes, 1", "give 1"), ("rollout={backend: vllm, samples_per_prompt: 4, max_new_tokens: 32, server: {tp: 2}}",)),
    Case("sampling of a replay", "rollout.top_p", ("samples nothing",), ("rollout={backend: recorded, path: ., samples_per_prompt: 4, max_new_tokens: 32, top_p: 0.9}",)),
    Case("turns alone", "rollout.max_turns", ("without rollout.environment",), ("rollout.max_turns=3",)),
    Case("environment without a class", "rollout.environment", ("my_env.py:Env",), ("rollout.environment=env.py",)),
    Case("no environment file", "rollout.environment", ("env.py, which does not exist",), ("rollout.environment='env.py:Env'",)),
    Case("environment of a replay", "rollout.environment", ("replays",), ("rollout.backend=recorded", "rollout.path=.", "rollout.environment='env.py:Env'")),
    # Algorithm.
    Case("policy gradient in several steps", "algorithm.objective", ("one step on a rollout",), ("algorithm.objective=policy_gradient", "algorithm.epochs=2")),
    Case("dual clip below 1", "algorithm.dual_clip", ("not above 1",), ("algorithm.dual_clip=0.5",)),
    Case("floor above the cap", "algorithm.correction_floor", ("algorithm.correction_cap 2",), ("algorithm.correction=mask", "algorithm.correction_floor=3")),
    Case("warm-up without a critic", "algorithm.critic_warmup", ("without a critic",), ("algorithm.critic_warmup=1",)),
    Case("critic without a critic", "critic.optimizer.lr", ("without a critic",), ("critic.optimizer.lr=1e-4",)),
    Case("reference without a KL", "reference.update_every", ("set algorithm.kl_in",), ("algorithm.name=dapo", "reference.update_every=2")),
    Case("sampling rounds", "algorithm.max_sampling_rounds", ("algorithm.dynamic_sampling",), ("algorithm.max_sampling_rounds=3",)),
    # Evaluation and the best checkpoint.
    Case("eval_samples alone", "train.eval_samples", ("without data.eval",), ("train.eval_samples=2",)),
    Case("best_is alone", "checkpoint.best_is", ("without checkpoint.best",), ("checkpoint.best_is=lowest",)),
    Case("best of no evaluation", "checkpoint.best", ("set data.eval",), ("checkpoint.best=eval/accuracy",)),
    Case("best of no metric", "checkpoint.best", ("is no metric",), ("checkpoint.best=eval/acuracy", "data.eval=rows.jsonl")),
    # Processes and models.
    Case("processes of one role", "reference.engine.parallel", ("does not divide the 3 processes",), ("reference.engine={device: cpu, parallel: {tp: 2}}", "--nproc", "3")),
    Case("small mini-batch", "algorithm.mini_batch_size", ("8 data-parallel replicas of the actor", "at least 8"), ("--nproc", "8")),
    Case("heads of a role on the actor's engine", "reward.engine", ("value null is the actor's engine", "6 attention heads"), ("actor.engine.parallel.tp=4", "reward.model.path=judge"), set_other_model("judge", num_attention_heads=6)),
    Case("no actor", "actor.model.path", ("is no folder",), ("actor.model.path=./nowhere",)),
    Case("no weights", "actor.model.path", ("init to random",), ("actor.model.init=pretrained",)),
    Case("no reward model", "reward.model.path", ("is no folder",), ("reward.model.path=./nowhere",)),
    Case("no weights of a reference", "reference.model.path", ("*.safetensors",), ("reference.model.path=model",)),
    Case("adapters of a critic without a classifier", "critic.model.lora", ("'olmoe' has no sequence classifier", "set it to null"), ("algorithm.name=ppo", "critic.model={path: judge, lora: {rank: 8}}"), set_other_model("judge", model_type="olmoe", num_experts=6, num_experts_per_tok=2)),
    Case("family of a reward model", "reward.model", ("config.json", "'gpt2' is not supported",), ("reward.model.path=judge",), set_other_model("judge", model_type="gpt2")),
]  # fmt: skip

COLD_CASES = [Case("no gpu", "actor.engine.device", ("needs a GPU",), ("actor.engine.device=cuda",))]
"""Where megatron has been imported without a GPU, torch counts one."""
