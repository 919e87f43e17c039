"""What a line of a step and the end of a run show, by what the run is about; clocks and waits are in test_parts.py."""

from __future__ import annotations

from mrl.trainers import console


def test_distillation_shows_the_kl_of_sequences_where_nothing_is_rewarded(capsys):
    plain = console.open_console("plain", enabled=True)
    plain.start(4, 10)
    plain.step(5, {"train/loss": 0.1, "actor/loss": 0.1, "actor/sequence_kl": 43.21})
    assert capsys.readouterr().out == "step 5/10  sequence kl 43.2  eta -\n"
    plain.step(5, {"reward/mean": 0.5, "actor/loss": 0.1, "actor/sequence_kl": 43.21})
    assert capsys.readouterr().out == "step 5/10  reward 0.500  eta -\n"
    rows = [{"actor/loss": 0.1, "actor/sequence_kl": kl} for kl in (53.0, 41.0)]
    assert console.figures(rows) == "sequence kl 53 -> 41"
    assert console.figures([*rows, {"reward/mean": 0.5}]) == "reward 0.500"


def test_rewards_of_single_answers_are_shown_and_zero_has_no_sign(capsys):
    """kto has no margin; pairs have one, which says what both rewards do."""
    plain = console.open_console("plain", enabled=True)
    plain.start(4, 10)
    kto = {"train/loss": 0.5, "rewards/chosen": 0.25, "rewards/rejected": -0.0001}
    plain.step(5, kto)
    assert capsys.readouterr().out == "step 5/10  loss 0.5000  chosen 0.250  rejected 0.000  eta -\n"
    plain.step(5, kto | {"rewards/margin": -0.0002})
    assert capsys.readouterr().out == "step 5/10  loss 0.5000  margin 0.000  eta -\n"
