"""How others call a FOAM: parameters without names, groups for weight decay, an optimizer for each tensor, ZeRO."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward

from architectures import REAL, build
from problems import Toy, same, toy, train
from torchfoam import FOAM, groups, param_groups

transformers = pytest.importorskip("transformers")


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    groups._said.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # what is not expected is an error
        yield
    groups._said.clear()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def trained(make: Any, steps: int = 3) -> list[torch.Tensor]:
    model = toy()
    train(model, make(model), steps)
    return weights(model)


# ---------------------------------------------------------------------- parameters without names

NAMELESS = {
    "parameters": lambda m: FOAM(m.parameters()),
    "one tensor": lambda m: FOAM([m.up.weight]),
    "groups": lambda m: FOAM([{"params": [m.up.weight, m.embed.weight], "weight_decay": 0.1}, {"params": [m.up.bias]}]),
    "added later": lambda m: FOAM([("up.weight", m.up.weight)]).add_param_group({"params": [m.embed.weight]}),
}
NAMED = {
    "the model": lambda m: FOAM(m),
    "names": lambda m: FOAM(m.named_parameters()),
    "groups of names": lambda m: FOAM([{"params": [("embed.weight", m.embed.weight), ("up.weight", m.up.weight)]}]),
    "decay": lambda m: FOAM(param_groups(m, weight_decay=0.1, no_decay=True)),
    "without names": lambda m: FOAM(param_groups(m, names=False)),
    "level 0": lambda m: FOAM(m.parameters(), level=0),
    "its own level": lambda m: FOAM([{"params": [m.up.weight, m.down.weight], "level": 3}]),
    "vectors of one layer": lambda m: FOAM([m.norm.weight]),
}


@pytest.mark.parametrize("call", NAMELESS)
def test_matrices_without_names_are_warned_of_once(call: str) -> None:
    with pytest.warns(UserWarning, match=r"without names, so every matrix folds.*FOAM\(model, \.\.\.\)") as told:
        NAMELESS[call](toy())
        NAMELESS[call](toy())
    assert len(told) == 1 and told[0].filename == __file__  # the line of the user, not of the library
    assert all(x in str(told[0].message) for x in ("named_parameters()", "no_decay=True", "optimizers=(FOAM(model"))


@pytest.mark.parametrize("call", NAMED)
def test_what_has_names_or_says_its_level_is_not_warned_of(call: str) -> None:
    NAMED[call](toy())


def test_only_what_does_not_fold_is_said() -> None:
    with pytest.warns(UserWarning, match=r"nothing folds: level=2 was asked for.*level=0 says so"):
        opt = FOAM([nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, 3, 2, 2))])
    assert [g["level"] for g in opt.param_groups] == [0]


# ---------------------------------------------------------------------- weight decay


def decayed(found: list[dict[str, Any]], default: float = 0.1) -> set[str]:
    return {n for g in found for n, _ in g["params"] if g.get("weight_decay", default) != 0}


@pytest.mark.parametrize("name", REAL)
def test_decay_groups_are_those_of_the_field(name: str) -> None:
    model = build(name)
    every = {n for n, _ in model.named_parameters()}
    # nanoGPT's configure_optimizers: whatever has two dimensions decays
    assert decayed(param_groups(model, weight_decay=0.1, no_decay="vectors")) == {
        n for n, p in model.named_parameters() if p.dim() >= 2
    }
    # transformers' Trainer; it names norms by their class or name, we also those called otherwise
    theirs = set(transformers.Trainer.get_decay_parameter_names(None, model)) & every
    ours = decayed(param_groups(model, weight_decay=0.1, no_decay=("norms", "biases")))
    assert ours <= theirs
    assert all("norm" in type(model.get_submodule(n.rpartition(".")[0])).__name__.lower() for n in theirs - ours)


def test_true_means_norms_biases_vectors_and_embeddings() -> None:
    assert decayed(param_groups(build("gpt-oss"), weight_decay=0.1, no_decay=True)) == {
        n for n, p in build("gpt-oss").named_parameters() if p.ndim >= 2 and "bias" not in n and "embed" not in n
    }
    assert "transformer.wte.weight" not in decayed(param_groups(build("gpt2"), no_decay=True))  # tied to the head
    vit = decayed(param_groups(build("vit"), no_decay=True))
    assert {"classifier.weight", "vit.embeddings.patch_embeddings.projection.weight"} <= vit
    assert not any("position" in n or "token" in n for n in vit)


def test_decay_is_exempted_by_pattern_and_an_override_has_the_last_word() -> None:
    found = param_groups(
        toy(), weight_decay=0.1, no_decay=["embeddings", "up.*"], overrides={"*up.bias": {"weight_decay": 0.5}}
    )
    rates = {n: (g["weight_decay"], g["level"], g["name"]) for g in found for n, _ in g["params"]}
    assert rates["embed.weight"] == (0.0, 0, "unfolded no decay") and rates["up.weight"] == (0.0, 2, "folded no decay")
    assert rates["down.weight"] == (0.1, 2, "folded") and rates["up.bias"][0] == 0.5
    assert rates["norm.weight"] == (0.1, 0, "unfolded")
    assert sum(len(g["params"]) for g in found) == len(list(toy().parameters()))


@pytest.mark.parametrize(
    ("no_decay", "message"),
    [
        (3, "no_decay must be True, False, kinds .* or patterns, got 3"),
        (None, "no_decay must be True, False, kinds .* or patterns, got None"),
        ([1], r"no_decay must be True, False, kinds .* or patterns, got \[1\]"),
        ("embedings", "unknown kind 'embedings' in no_decay; did you mean 'embeddings'"),
        (["*.nrm.*"], r"no_decay pattern '\*\.nrm\.\*' matches no trainable parameter; nearest: .*norm"),
    ],
)
def test_no_decay_without_effect_is_an_error(no_decay: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(toy(), no_decay=no_decay)


def test_decay_groups_step_as_groups_made_by_hand() -> None:
    def by_hand(model: Toy) -> FOAM:
        exempt = {n for n, p in model.named_parameters() if p.ndim < 2 or "embed" in n}
        pairs = list(model.named_parameters())
        both = [([x for x in pairs if (x[0] in exempt) == e], 0.0 if e else 0.1) for e in (False, True)]
        return FOAM([{"params": params, "weight_decay": rate} for params, rate in both], lr=0.01)

    assert same(trained(by_hand), trained(lambda m: FOAM(param_groups(m, weight_decay=0.1, no_decay=True), lr=0.01)))


def test_names_given_beside_parameters_count() -> None:
    # the groups of another optimizer: torch keeps the names apart
    adamw = torch.optim.AdamW(toy().named_parameters())
    opt = FOAM([{"params": g["params"], "param_names": g["param_names"]} for g in adamw.param_groups])
    assert [(g["level"], g["param_names"]) for g in opt.param_groups] == [
        (g["level"], [n for n, _ in g["params"]]) for g in param_groups(toy())
    ]
    with pytest.raises(ValueError, match="a group of 1 parameters has 9 names"):
        FOAM([{"params": [toy().up.weight], "param_names": adamw.param_groups[0]["param_names"]}])


# ---------------------------------------------------------------------- one optimizer for each tensor


class Several:
    """Many optimizers behind step and zero_grad."""

    def __init__(self, optimizers: list[FOAM]) -> None:
        self.optimizers = optimizers

    def step(self) -> None:
        for opt in self.optimizers:
            opt.step()

    def zero_grad(self) -> None:
        for opt in self.optimizers:
            opt.zero_grad()


def test_an_optimizer_for_each_parameter_steps_as_one_for_all() -> None:
    one = trained(lambda m: FOAM(m, lr=0.01))
    assert same(one, trained(lambda m: Several([FOAM([(n, p)], lr=0.01) for n, p in m.named_parameters()])))
    with pytest.warns(UserWarning, match="without names") as told:
        nameless = trained(lambda m: Several([FOAM([p], lr=0.01) for p in m.parameters()]))
        all_fold = trained(lambda m: FOAM(m.parameters(), lr=0.01))
    assert len(told) == 1 and same(nameless, all_fold)


def test_an_optimizer_for_each_layer_takes_those_of_vectors() -> None:
    with pytest.warns(UserWarning, match="nothing folds"):
        Several([FOAM(layer.named_parameters()) for layer in (toy().up, toy().norm)])


def test_torchs_own_optimizers_in_the_backward_pass() -> None:
    model = toy()
    with pytest.warns(UserWarning, match="without names"):
        _apply_optimizer_in_backward(FOAM, model.parameters(), {"lr": 0.01})
    before = weights(model)
    model.loss(0).backward()
    moved = [not torch.equal(a, b) for a, b in zip(before, weights(model))]
    assert moved == [not n.startswith("dead") for n, _ in model.named_parameters()]


# ---------------------------------------------------------------------- ZeRO


@pytest.fixture
def one_process() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "options", [{}, {"no_decay": True, "weight_decay": 0.1}, {"level": "row", "state": "bfloat16", "stochastic": False}]
)
def test_zero_over_groups_steps_as_foam_alone(one_process: None, options: dict[str, Any]) -> None:
    def zero(model: Toy) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(param_groups(model, names=False, **options), FOAM, lr=0.01)

    assert same(trained(zero), trained(lambda m: FOAM(param_groups(m, **options), lr=0.01)))


def test_zero_saves_and_loads(one_process: None) -> None:
    def zero(model: Toy) -> ZeroRedundancyOptimizer:
        return ZeroRedundancyOptimizer(param_groups(model, names=False), FOAM, lr=0.01)

    model = toy()
    opt = zero(model)
    train(model, opt, 2)
    opt.consolidate_state_dict()
    other = copy.deepcopy(model)
    again = zero(other)
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    train(model, opt, 2, start=2)
    train(other, again, 2, start=2)
    assert same(weights(model), weights(other))


def test_zero_that_states_a_level_for_all_is_warned_of(one_process: None) -> None:
    with pytest.warns(
        UserWarning, match=r"level=2 itself, so its 5 vectors.*param_groups\(model, level=.*names=False\)"
    ):
        ZeroRedundancyOptimizer(toy().parameters(), FOAM, lr=0.01, level=2)


# ---------------------------------------------------------------------- groups that are hidden for a while


def test_state_of_groups_that_are_hidden_during_a_step_stays() -> None:
    # DeepSpeed's ZeRO shows an optimizer one group at a time
    def hidden(model: Toy) -> Any:
        opt = FOAM(model, lr=0.01)
        everything = opt.param_groups

        class Hiding:
            def zero_grad(self) -> None:
                opt.param_groups = everything
                opt.zero_grad()

            def step(self) -> None:
                for group in everything:
                    opt.param_groups = [group]
                    opt.step()
                opt.param_groups = everything

        return Hiding()

    assert same(trained(hidden), trained(lambda m: FOAM(m, lr=0.01)))
