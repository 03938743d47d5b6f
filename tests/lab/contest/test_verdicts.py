"""What is said of a contest in the end: claims with their n, corrected for their number, rarely false."""

from __future__ import annotations

import random
from typing import Any

from foamlab.contest.results import verdicts


class Run:
    def __init__(self, seed: int, loss: float) -> None:
        self.seed, self.loss = seed, loss


Runs = dict[str, list[Any]]  # an optimizer's runs, or what verdicts need of them


def test_verdicts_say_n_and_are_corrected_for_their_number() -> None:
    runs: Runs = {
        name: [Run(seed, base + 0.01 * seed + wobble * (seed % 2)) for seed in range(4)]
        for name, base, wobble in (
            ("muon", 1.0, 0),
            ("foam", 1.1, 0.01),
            ("adamw", 1.2, 0.02),
            ("foam-row", 1.3, 0.005),
        )
    }
    rows = [{"arm": name, "n": 4, "loss": 1.0, "ours": "foam" in name} for name in runs]
    said, count = verdicts("compare", rows, runs, {})
    # any of the six pairs could have been that of the best and another
    assert count == 6 and len(said) == 4 and all("n = 4" in s for s in said)
    assert [s.split(" (")[0] for s in said[:3]] == ["muon beats foam", "muon beats adamw", "muon beats foam-row"]
    assert said[3].startswith("foam beats adamw")  # the best FOAM against all that is not FOAM
    # p = 0.03 is no claim among four comparisons
    close: Runs = {
        "a": [Run(s, 1.0) for s in range(4)],
        "b": [Run(s, 1.0 + d) for s, d in enumerate((0.01, 0.02, 0.03, 0.05))],
    }
    pair = [{"arm": n, "n": 4, "loss": 1.0, "ours": "foam" in n} for n in close]
    assert "beats" in verdicts("compare", pair, close, {})[0][0]
    more: Runs = {**close, **{f"c{k}": close["b"] for k in range(3)}}
    told = verdicts("compare", [{"arm": n, "n": 4, "loss": 1.0, "ours": "foam" in n} for n in more], more, {})[0]
    assert len(told) == 4 and not any("beats" in s for s in told)


def test_claims_among_equals_are_rare() -> None:
    """Arms that differ by chance alone: in at most 5 % of contests is any said to beat another."""
    draw, false = random.Random(0), 0
    for _ in range(400):
        runs: Runs = {f"a{k}": [Run(seed, draw.gauss(3, 1)) for seed in range(6)] for k in range(8)}
        order = sorted(runs, key=lambda name: sum(run.loss for run in runs[name]))
        told = verdicts("compare", [{"arm": n, "n": 6, "loss": 1.0, "ours": "foam" in n} for n in order], runs, {})[0]
        false += any("beats" in sentence for sentence in told)
    assert false <= 0.05 * 400


def test_level_is_claimed_of_what_is_level_and_rarely_of_what_is_not() -> None:
    """Pairs of arms that are equal, or one margin apart: any false claim in at most 5 % of contests; the right ones are
    made. Beside it an arm that lost a seed, of which nothing is claimed but that it is beaten."""
    draw, false, right = random.Random(1), 0, 0
    at = {"a": 0.0, "b": 0.0, "c": 0.01, "d": 0.01}
    for _ in range(400):
        runs: Runs = {k: [Run(seed, x + draw.gauss(5, 0.001)) for seed in range(8)] for k, x in at.items()}
        order = sorted(runs, key=lambda name: sum(run.loss for run in runs[name]))
        rows = [{"arm": n, "n": 8, "loss": 1.0, "ours": "foam" in n} for n in order]
        told, count = verdicts("compare", rows, runs, {}, margin=0.01)
        assert count == 6 and len(told) == 3
        for sentence in told:
            pair = [word for word in sentence.split(" (")[0].replace(",", "").split() if word in at]
            same = at[pair[0]] == at[pair[1]]
            level = "is level with" in sentence or "by less than" in sentence
            false += level and not same
            false += "beats" in sentence and same
            right += level and same
        lost = verdicts("compare", rows, runs, {}, {order[0]: [9]}, 0.01)[0]
        assert all(f"as {order[0]} did not finish with every seed" in sentence for sentence in lost)
    assert false <= 0.05 * 400 and right > 0.8 * 400


def test_what_a_claim_asks_for_is_told_with_its_interval() -> None:
    """In the sentence and among the cautions: the level divided by the number of pairs."""
    off = {"a": [0] * 6, "b": [1, -1, 1, -1, 1, 0], "c": [11, 9, 12, 10, 9, 11]}
    runs: Runs = {k: [Run(seed, 5 + seed / 100 + x / 1e4) for seed, x in enumerate(xs)] for k, xs in off.items()}
    rows = [{"arm": n, "n": 6, "loss": 1.0, "ours": "foam" in n} for n in runs]
    told, count = verdicts("compare", rows, runs, {}, margin=0.01)
    assert count == 3 and told[0].startswith("a is level with b within 0.01 nat (mean difference")
    assert "96.7% interval" in told[0] and "where p < 0.017 is asked" in told[0] and "n = 6)." in told[0]
    assert told[1].startswith("a beats c, by less than 0.01 nat (") and "98.3% interval" in told[1]
    assert "nor shown to be level" not in verdicts("compare", rows, runs, {})[0][0]  # no margin, no such claim


def test_an_arm_that_lost_a_seed_is_not_said_to_beat() -> None:
    runs: Runs = {"a": [Run(s, 1.0 + s / 1e3) for s in range(3)], "b": [Run(s, 2.0 + s / 1.1e3) for s in range(4)]}
    rows = [{"arm": n, "n": len(runs[n]), "loss": 1.0, "ours": False} for n in runs]
    assert "a beats b" in verdicts("compare", rows, runs, {})[0][0]
    assert "nothing is claimed of a and b, as a did" in verdicts("compare", rows, runs, {}, {"a": [3]})[0][0]
    assert "a beats b" in verdicts("compare", rows, runs, {}, {"b": [4]})[0][0]
