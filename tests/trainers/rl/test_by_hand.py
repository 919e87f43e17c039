"""Two steps of ppo and of grpo, written out with Hugging Face models and torch.optim.AdamW, against what a run did.

Of the run only the sampled tokens and rewards are taken (samples/step_00000001.jsonl). From them, one sequence at a time and
straight from the papers, follow log-probs, advantages, returns, losses, gradient norms and new weights. Both steps are on
the whole rollout (algorithm.epochs 2), so that in the second one ratios are not 1 and the KL is not 0. The actor's micro-batches have 5,
5 and 2 sequences, the critic's 7 and 5.

What would show here, of shared/TRAPS.md's kinds (each named in a test): a mean of means over micro-batches, of actor or critic
(5), a logged loss that is scaled (6), the temperature left out (19), logits overwritten before the entropy (20), a mask
that is off by one (21), a KL without gradient (22).
"""

import itertools
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from mrl.config.schema import OptimizerConfig
from tests.engine.harness import run_case
from tests.trainers.rl import tiny_policies
from tests.trainers.rl.test_layouts import assert_same_update

TEMPERATURE, LAMBDA, CLIP, KL_COEF, ENTROPY_COEF, EPS, DECAY = 0.8, 0.95, 0.2, 0.3, 0.02, 1e-6, 0.1


@pytest.fixture(scope="module", params=["ppo", "grpo"])
def made(request, inputs, tmp_path_factory):
    """A run, and what a plain program makes of its rollout."""
    folder = tmp_path_factory.mktemp("by-hand") / "run"
    kl = {"kl_coef": KL_COEF} if request.param == "grpo" else {}
    config = tiny_policies.make_config(
        inputs, folder, request.param,
        actor={"engine": tiny_policies.engine("megatron", size=5), "optimizer": {"weight_decay": DECAY}},
        **({"critic": {"engine": tiny_policies.engine(size=7)}} if request.param == "ppo" else {}),
        algorithm={"epochs": 2, "mini_batch_size": tiny_policies.SEQUENCES, "entropy_coef": ENTROPY_COEF, **kl},
    )  # fmt: skip
    happening = "critic_is_exported" if request.param == "ppo" else None
    ended = run_case(1, "tests.trainers.rl.cases:train", config=config, happening=happening)
    assert ended[:2] == ("done", ""), ended
    rows = tiny_policies.samples_of(folder)["step_00000001.jsonl"]
    hand = by_hand(request.param, rows, str(inputs / "model"))
    return SimpleNamespace(
        name=request.param, folder=folder, rows=rows, steps=tiny_policies.metrics_of(folder), hand=hand
    )


# -- the plain program -----------------------------------------------------------------------------------------------------


def by_hand(name, rows, folder):
    actor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    critic = AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32, num_labels=1, attn_implementation="eager"
    )
    critic.score.weight.data.zero_()
    for model in (actor, critic):
        model.get_input_embeddings().padding_idx = None  # a pad token that was sampled trains like any other
    hand = SimpleNamespace(actor=actor, critic=critic, steps=[])
    with torch.no_grad():
        old = [log_probs_and_entropy(actor, row) for row in rows]
    hand.old = [log_probs for log_probs, _ in old]
    advantages, returns = ppo_advantages(rows) if name == "ppo" else grpo_advantages(rows)
    hand.advantages = advantages
    update_actor, update_critic = adamw(actor, 1e-3, DECAY), adamw(critic, 1e-2, 0.0)
    for _ in range(2):
        step = {}
        if name == "ppo":
            loss, found = critic_loss(critic, rows, returns)
            step |= found | {"critic/loss": loss.item(), "critic/grad_norm": update_critic(loss), "critic/lr": 1e-2}
        loss, found = actor_loss(name, actor, rows, hand.old, advantages)
        step |= found | {"actor/loss": loss.item(), "train/loss": loss.item(), "train/grad_norm": update_actor(loss)}
        step["train/lr"] = 1e-3
        hand.steps.append(step)
    return hand


def of_answer(row, per_position):
    """The entries of [tokens - 1], one for each token after the first, that belong to tokens which were sampled."""
    return per_position[torch.tensor(row["mask"][1:]) == 1]


def log_probs_and_entropy(model, row):
    """Of the sampled tokens of a sequence, at the sampler's temperature."""
    tokens = torch.tensor(row["tokens"])
    logits = model(input_ids=tokens[None, :-1]).logits[0] / TEMPERATURE
    all_log_probs = torch.log_softmax(logits, -1)
    entropy = -(all_log_probs.exp() * all_log_probs).sum(-1)
    return of_answer(row, all_log_probs.gather(1, tokens[1:, None])[:, 0]), of_answer(row, entropy)


def values_of(critic, row):
    """Of the states in which the sampled tokens were chosen."""
    tokens = torch.tensor(row["tokens"])
    return of_answer(row, critic.score(critic.model(input_ids=tokens[None, :-1]).last_hidden_state)[0, :, 0])


def grpo_advantages(rows):
    """(r - mean) / std of the prompt's samples, for each sampled token (Shao 2024)."""
    advantages = []
    for _, group in itertools.groupby(rows, key=lambda row: row["row"]):
        group = list(group)
        rewards = torch.tensor([row["reward"] for row in group], dtype=torch.float64)
        for row, reward in zip(group, rewards, strict=True):
            advantage = (reward - rewards.mean()) / (rewards.std() + 1e-6)
            advantages.append(torch.full((row["response_length"],), advantage.item()))
    return advantages, None


def ppo_advantages(rows):
    """GAE with values that are still 0 (Schulman 2015), whitened over all tokens; and the returns."""
    plain = []
    for row in rows:
        count = row["response_length"]
        plain.append(torch.tensor([row["reward"] * LAMBDA ** (count - 1 - t) for t in range(count)]))
    every = torch.cat(plain).double()
    std = every.std(correction=0)
    return [((a.double() - every.mean()) / std).float() for a in plain], plain  # returns: A + V, where V = 0


def actor_loss(name, actor, rows, old, advantages):
    """The clipped surrogate, with grpo's k3 to the first weights, less the entropy bonus; and its metrics."""
    per_sequence, ratios, kls, sampled_kls, entropies, low, high = [], [], [], [], [], 0, 0
    for row, old_log_probs, advantage in zip(rows, old, advantages, strict=True):
        log_probs, entropy = log_probs_and_entropy(actor, row)
        ratio = (log_probs - old_log_probs).exp()
        surrogates = ratio * advantage, ratio.clamp(1 - CLIP, 1 + CLIP) * advantage
        kl = (old_log_probs - log_probs).exp() - 1 - (old_log_probs - log_probs)
        loss = -torch.minimum(*surrogates) - ENTROPY_COEF * entropy
        per_sequence.append(loss + KL_COEF * kl if name == "grpo" else loss)
        low += int(((ratio < 1 - CLIP) & (advantage < 0)).sum())
        high += int(((ratio > 1 + CLIP) & (advantage > 0)).sum())
        ratios.append(ratio), kls.append(kl), entropies.append(entropy)
        sampled_kls.append(ratio - 1 - ratio.log())
    tokens = sum(len(ratio) for ratio in ratios)
    loss = torch.stack([loss.mean() for loss in per_sequence]).mean()
    if name == "ppo":
        loss = torch.cat(per_sequence).mean()
    metrics = {"actor/ratio": ratios, "actor/kl": kls, "actor/approx_kl": sampled_kls, "actor/entropy": entropies}
    found = {name: torch.cat(values).mean().item() for name, values in metrics.items()}
    found |= {"actor/clip_fraction_low": low / tokens, "actor/clip_fraction_high": high / tokens}
    return loss, found | {
        "actor/clip_fraction": (low + high) / tokens,
        "actor/ratio_max": torch.cat(ratios).max().item(),
    }


def critic_loss(critic, rows, returns):
    """Half the squared error, the larger of it and that of a value within 0.2 of the old one, 0; and its metrics."""
    values, wanted = torch.cat([values_of(critic, row) for row in rows]), torch.cat(returns)
    near = values.clamp(-CLIP, CLIP)
    loss = torch.maximum((values - wanted) ** 2, (near - wanted) ** 2).mean() / 2
    explained = 1 - (wanted - values).var() / wanted.var()
    clipped = ((near - wanted).abs() > (values - wanted).abs()).float().mean().item()
    found = {"critic/value": values.mean().item(), "critic/explained_variance": explained.item()}
    return loss, found | {"critic/clip_fraction": clipped}


def adamw(model, lr, decay):
    """A function that steps on a loss and returns the gradient norm before clipping to 1."""
    betas = OptimizerConfig().betas
    groups = [
        {"params": [p for p in model.parameters() if p.ndim == n], "weight_decay": decay * (n - 1)} for n in (1, 2)
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=betas, eps=EPS)

    def update(loss):
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item()
        optimizer.step()
        return norm

    return update


# -- against the run -------------------------------------------------------------------------------------------------------


def near(metrics, names):
    return [{name: pytest.approx(step[name], rel=2e-5, abs=2e-5) for name in names} for step in metrics]


def only(metrics, names):
    return [{name: step[name] for name in names} for step in metrics]


def test_trap_19_and_21_log_probs_are_of_the_sampled_tokens_at_the_temperature(made):
    """The first token of the answer among them, and none of the prompt: as many as tokens were trained."""
    assert sum(row["response_length"] for row in made.rows) == made.steps[0]["train/tokens"]
    for row, log_probs in zip(made.rows, made.hand.old, strict=True):
        start = len(row["tokens"]) - row["response_length"]
        assert row["mask"] == [0] * start + [1] * row["response_length"]
        assert row["log_probs"][start:] == pytest.approx(log_probs.tolist(), abs=1e-5)


def test_samples_have_the_advantages_of_their_tokens(made):
    """In the order of sampling, though they are trained on in another; one number where all tokens of an answer share it."""
    for row, advantages in zip(made.rows, made.hand.advantages, strict=True):
        if made.name == "grpo" or len(advantages) == 1:
            assert row["advantages"] is None
            continue
        sampled = [x for x, m in zip(row["advantages"], row["mask"], strict=True) if m]
        assert sampled == pytest.approx(advantages.tolist(), abs=1e-5)
        assert {x for x, m in zip(row["advantages"], row["mask"], strict=True) if not m} == {0.0}


def test_advantages(made):
    means = [advantage.mean().item() for advantage in made.hand.advantages]
    assert [row["advantage"] for row in made.rows] == pytest.approx(means, abs=1e-5)
    every = torch.cat(made.hand.advantages)
    assert made.steps[0]["advantage/mean"] == pytest.approx(every.mean().item(), abs=1e-5)
    assert made.steps[0]["advantage/std"] == pytest.approx(every.std(correction=0).item(), abs=1e-5)


def test_trap_5_6_20_and_22_the_actors_loss_metrics_and_gradient(made):
    """In the second step the KL is part of grpo's loss and of its gradient; the entropy is in both algorithms'."""
    names = [name for name in made.hand.steps[0] if not name.startswith("critic/")]
    assert only(made.steps, names) == near(made.hand.steps, names)
    assert made.hand.steps[0]["actor/ratio"] == 1.0 and made.hand.steps[1]["actor/kl"] > 1e-3
    assert made.hand.steps[1]["actor/clip_fraction"] > 0


def test_trap_5_and_22_the_actors_new_weights(made, inputs):
    assert_same_update(
        tiny_policies.weights_of(made.folder / "hf"),
        made.hand.actor.state_dict(),
        tiny_policies.weights_of(inputs / "model"),
    )


def test_trap_5_and_6_the_critics_loss_and_gradient(made, inputs):
    names = [name for name in made.hand.steps[0] if name.startswith("critic/")]
    assert (made.name == "ppo") == bool(names)
    assert only(made.steps, names) == near(made.hand.steps, names)
    if made.name == "ppo":
        start, expected = tiny_policies.weights_of(inputs / "model"), made.hand.critic.state_dict()
        assert_same_update(tiny_policies.weights_of(made.folder / "critic"), expected, start)
