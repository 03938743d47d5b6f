"""The search of a contest for each arm's best point: which trials are to be run next."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from foamlab.contest.model import Arm, Outcome, Trial
from foamlab.contest.search import beyond, search, wanted


class Model(dict[str, Outcome]):
    """Outcomes by a formula of the point; a list of what was asked for."""

    def __init__(self, loss: Callable[..., float], runs: Any = ()) -> None:
        super().__init__()
        self.loss, self.runs = loss, dict(runs)

    def __missing__(self, name: str) -> Outcome:
        return self.runs.get(name, Outcome("none"))

    def do(self, trials: list[Trial]) -> None:
        for t in trials:
            assert not self[t.name].over, f"{t.name} is run twice"
            loss = self.loss(t.point, t.seed)
            self.runs[t.name] = Outcome("diverged") if math.isinf(loss) else Outcome("done", loss)


def play(arms: list[Arm], loss: Callable[..., float], seeds: Sequence[int] = (0,), finalists: int = 0) -> Any:
    model = Model(loss)
    for _ in range(50):
        todo, found = wanted(arms, seeds, finalists, model)
        if not todo:
            return model, found
        model.do(todo)
    raise AssertionError("no end")


def valley(lr: float, scale: float = 0.25) -> Callable[..., float]:
    return lambda p, seed: math.log(p["lr"] / lr) ** 2 + math.log(p["scale"] / scale) ** 2 + seed


ARM = Arm("a", "adamw", {}, {"lr": 1e-2, "scale": 1.0}, {"lr": [1e-3, 3e-3, 1e-2]})


def test_a_best_value_inside_the_grid_is_taken() -> None:
    model, found = play([ARM], valley(3e-3))
    assert found["a"].point["lr"] == 3e-3 and not found["a"].edge and not found["a"].extended
    assert len(model.runs) == 3


@pytest.mark.parametrize("lr, added, edge", [(1e-2, 0.033, []), (1.0, 0.033, ["lr"]), (1e-9, 0.00033, ["lr"])])
def test_a_best_value_at_an_end_is_followed_once_and_flagged_if_it_stays_there(
    lr: float, added: float, edge: list[Any]
) -> None:
    model, found = play([ARM], valley(lr))
    assert found["a"].extended == {"lr": added} and len(model.runs) == 4
    assert found["a"].edge == edge and found["a"].point["lr"] == (added if edge else 1e-2)


def rates(rest: float, matrices: float, together: float = 0.0) -> Callable[..., float]:
    """A valley in the rates of the matrices, lr * scale, and of the rest; `together` bends it."""

    def loss(p: dict[str, float], seed: int) -> float:
        x, y = math.log(p["lr"] / rest), math.log(p["lr"] * p["scale"] / matrices)
        return x**2 + y**2 + together * x * y + seed

    return loss


BOTH = replace(ARM, start={"lr": 1e-2, "scale": 0.25}, tune={"lr": [5e-3, 1e-2, 2e-2], "scale": [0.125, 0.25, 0.5]})


@pytest.mark.parametrize(
    "start", [{"lr": 1e-2, "scale": 0.25}, {"lr": 1e-2, "scale": 0.125}, {"lr": 5e-3, "scale": 1.0}]
)
@pytest.mark.parametrize("rest, matrices", [(5e-3, 1.25e-3), (2e-2, 1.25e-3), (1e-2, 5e-3), (4e-2, 2.5e-3)])
def test_the_best_rates_are_found_wherever_the_search_begins(
    start: dict[str, float], rest: float, matrices: float
) -> None:
    _, found = play([replace(BOTH, start=start)], rates(rest, matrices))
    point = found["a"].point
    assert point["lr"] == rest and point["lr"] * point["scale"] == pytest.approx(matrices, rel=1e-3)


def test_lr_is_tried_with_the_matrices_rate_held() -> None:
    todo, _ = wanted([BOTH], [0], 0, Model(valley(1.0)))
    assert {(t.point["lr"], t.point["scale"]) for t in todo} == {(5e-3, 0.5), (1e-2, 0.25), (2e-2, 0.125)}


@pytest.mark.parametrize("lr, runs", [([5e-3, 1e-2, 2e-2], 3), ([2e-2], 1)])
def test_one_value_is_no_grid_but_the_value(lr: list[float], runs: int) -> None:
    """Nothing is run at the value that the arm would have started from, though it may be better."""
    model, found = play([replace(BOTH, tune={"lr": lr, "scale": [0.5]})], rates(2e-2, 2e-2 * 0.25))
    assert all("scale0.5" in name for name in model.runs) and len(model.runs) == runs + bool(found["a"].extended)
    assert found["a"].point["scale"] == 0.5


def test_a_single_rate_takes_no_run_of_its_own() -> None:
    model, found = play([replace(BOTH, tune={"lr": [2e-2], "scale": [0.125, 0.25]})], rates(2e-2, 2e-2 * 0.125))
    assert found["a"].point == {"lr": 2e-2, "scale": 0.125} and found["a"].extended == {"scale": 0.062}
    assert {name for name in model.runs if "scale0.0" not in name} == {
        f"a/lr0.02-scale{x}-seed0" for x in (0.125, 0.25)
    }


def test_keys_are_tuned_again_until_none_moves() -> None:
    """In a bent valley the first look at lr, far from the best scale, is misled."""
    model, found = play([replace(BOTH, start={"lr": 5e-3, "scale": 1.0})], rates(1e-2, 1.25e-3, together=0.8))
    assert found["a"].point == {"lr": 1e-2, "scale": 0.125}
    assert "a/lr0.005-scale0.25-seed0" in model.runs, "scale was tuned at another lr first"


@pytest.mark.parametrize("case", range(200))
def test_the_search_ends_at_the_best_it_has_tried_whatever_the_losses(case: int) -> None:
    """Rates that follow from one another are rounded: what should be one run may be two, a digit apart."""
    draw = random.Random(case)

    def some(low: float, high: float) -> list[float]:
        return sorted({float(f"{10 ** draw.uniform(low, high):.3g}") for _ in range(draw.randint(1, 4))})

    start = {"lr": draw.choice([1e-2, 0.0724]), "scale": draw.choice([0.25, math.sqrt(128)])}
    arm = replace(ARM, start=start, tune={"lr": some(-3.5, -0.5), "scale": some(-1.5, 0.7)})

    def loss(p: dict[str, float], seed: int) -> float:
        luck = random.Random(f"{case} {p}").random()
        smooth = valley(3e-3)(p, seed) + 0.8 * math.log(p["lr"]) * math.log(p["scale"])
        return math.inf if luck < 0.05 else round(smooth + luck, draw.choice([0, 9]) if case % 2 else 9)

    model, found = play([arm], loss)
    best = min(model.runs, key=lambda name: model.runs[name].rank)
    assert model.runs[Trial(arm, found["a"].point, 0, "").name].rank == model.runs[best].rank


def test_values_that_are_one_run_are_one_run() -> None:
    close = replace(ARM, tune={"lr": [0.0017, 0.0017001]})
    todo, _ = wanted([close], [0], 0, Model(valley(1.0)))
    assert len({t.name for t in todo}) == len(todo) == 1


def test_where_all_diverge_lower_is_tried() -> None:
    _, found = play([ARM], lambda p, seed: math.inf)
    assert found["a"].extended == {"lr": 0.00033} and found["a"].edge == ["lr"]


def test_what_was_stopped_is_behind_what_finished() -> None:
    names = {x: Trial(ARM, {"lr": x, "scale": 1.0}, 0, "lr").name for x in (1e-3, 3e-3, 1e-2)}
    runs = {names[1e-3]: Outcome("diverged"), names[3e-3]: Outcome("done", 5.0), names[1e-2]: Outcome("stopped", 3.0)}
    assert search(ARM, 0, Model(valley(1.0), runs)).point["lr"] == 3e-3


@pytest.mark.parametrize("finalists, expected", [(0, {"a", "b", "c"}), (2, {"a", "b"}), (9, {"a", "b", "c"})])
def test_seeds_are_for_the_winners(finalists: int, expected: set[str]) -> None:
    arms = [replace(ARM, label=x, start={**ARM.start, "scale": y}) for x, y in (("c", 4.0), ("a", 0.25), ("b", 0.5))]
    model, _ = play(arms, valley(3e-3), seeds=(7, 8, 9), finalists=finalists)
    assert {n.split("/")[0] for n in model.runs if n.endswith(("seed8", "seed9"))} == expected
    assert all("lr0.003" in n for n in model.runs if not n.endswith("seed7"))


def test_an_arms_own_default_is_tried_first() -> None:
    todo, _ = wanted([ARM], [0], 0, Model(valley(1.0)))
    assert [t.point["lr"] for t in todo] == [1e-2, 3e-3, 1e-3]


@pytest.mark.parametrize(
    "values, end, expected",
    [
        ([1.0, 2.0], 2.0, 4.0),
        ([1.0, 2.0], 1.0, 0.5),
        (["a", "b"], "b", None),
        ([0, 1], 0, None),
        ([1.0, 1e200], 1e200, None),
        ([1e-200, 1.0], 1e-200, None),
    ],
)
def test_beyond(values: list[Any], end: float | str, expected: float | None) -> None:
    assert beyond(values, end) == expected
