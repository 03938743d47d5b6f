"""Changing from AdamW to FOAM and back in the middle of a run; and FOAM in AdamW's place from the start."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from problems import Toy, everything, learn, numbers, same, toy, train
from torchfoam import FOAM, PAPER, fold, from_adamw, to_adamw, unfold


def stepped(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Toy, torch.optim.AdamW]:
    model = toy(dtype)
    adamw = torch.optim.AdamW(model.parameters(), lr=0.01, **options)
    train(model, adamw, 4)
    return model, adamw


@pytest.mark.parametrize("level", [0, 1, 2, "row"])
def test_moments_are_those_foam_would_hold_had_it_seen_the_same_gradients(level: Any) -> None:
    p, q = (nn.Parameter(numbers(3, 10)) for _ in range(2))
    adamw, opt = torch.optim.AdamW([p]), FOAM([{"params": [q], "level": level}])
    for t in range(5):
        p.grad = q.grad = numbers(3, 10, seed=t)
        adamw.step()
        opt.step()
    fresh = from_adamw(FOAM([{"params": [p], "level": level}]), adamw)
    for name in ("m", "v", "step"):
        torch.testing.assert_close(fresh.state[p][name], opt.state[q][name], rtol=1e-12, atol=0)


def test_at_level_0_the_run_goes_on_as_if_nothing_had_happened_there_and_back() -> None:
    model, adamw = stepped()
    other = copy.deepcopy(model)
    opt = from_adamw(FOAM(other.parameters(), lr=0.01, level=0), by_position(adamw, other))
    for k in range(4, 10):
        train(model, adamw, 1, start=k)
        train(other, opt, 1, start=k)
        if k == 6:
            opt = to_adamw(opt)  # type: ignore[assignment]
    for a, b in zip(model.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def by_position(adamw: torch.optim.AdamW, other: Toy) -> torch.optim.AdamW:
    """The same AdamW over the copied model."""
    new = torch.optim.AdamW(other.parameters(), lr=0.01)
    new.load_state_dict(adamw.state_dict())
    return new


def test_a_state_dict_is_matched_by_name_or_by_order() -> None:
    model, adamw = stepped()
    expected = everything(from_adamw(FOAM(model), adamw))
    ordered = from_adamw(FOAM(model), copy.deepcopy(adamw.state_dict()), params=model.parameters())
    assert same(everything(ordered), expected)

    named = torch.optim.AdamW(list(model.named_parameters())[::-1])  # another order: names find the way
    named.load_state_dict(named.state_dict())
    for p, s in adamw.state.items():
        named.state[p] = s
    assert same(everything(from_adamw(FOAM(model), copy.deepcopy(named.state_dict()))), expected)


@pytest.mark.parametrize("state", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_narrow_state_is_written_as_such(state: str, dtype: torch.dtype) -> None:
    model, adamw = stepped(dtype)
    opt = from_adamw(FOAM(model, level=2, state=state, lr=0.01), adamw)
    p = model.up.weight
    back = to_adamw(opt)
    for key in ("exp_avg", "exp_avg_sq"):
        full = adamw.state[p][key].float()
        expected = unfold(fold(full, 2), 2, full.shape[-1])
        got = back.state[p][key]
        assert got.dtype == dtype and got.shape == p.shape
        # a code within its octaves is 2^-5 off at most, bfloat16 2^-8; what is below them is small against the row
        tolerance = {"float32": 2**-7 if dtype == torch.bfloat16 else 0, "bfloat16": 2**-7, "int8": 2**-4}[state]
        assert ((got.float() - expected).abs() <= tolerance * expected.abs().amax()).all()
    train(model, opt, 2, start=4)
    assert all(p.isfinite().all() for p in model.parameters())


def test_back_again_keeps_rates_steps_groups_and_strides() -> None:
    model = toy()
    model.up.weight = nn.Parameter(torch.ones(10, 7).T)
    assert not model.up.weight.is_contiguous()
    opt = FOAM(model, lr=0.01, scale=0.25, betas=(0.8, 0.9), weight_decay=0.3)
    train(model, opt, 2)
    adamw = to_adamw(opt, fused=True)
    assert [(g["lr"], g["betas"], g["weight_decay"]) for g in adamw.param_groups] == [
        (0.0025, (0.8, 0.9), 0.3),
        (0.01, (0.8, 0.9), 0.3),
    ]
    state = adamw.state[model.up.weight]
    assert state["step"] == 2 and state["exp_avg"].stride() == model.up.weight.stride()  # the fused step wants it so
    assert torch.equal(state["exp_avg"], unfold(opt.state[model.up.weight]["m"], 2, 10))
    assert not {s["step"].data_ptr() for s in adamw.state.values()} & {s["step"].data_ptr() for s in opt.state.values()}
    train(model, adamw, 1, start=2)


@pytest.mark.parametrize(
    ("options", "changes", "message"),
    [
        ({"rule": "muon"}, {}, "cannot fold AdamW's moments into rule 'muon'"),
        ({"second_moment": "square_mean"}, {}, "cannot recover second_moment='square_mean'"),
        ({}, {"amsgrad": True}, "not the state of an Adam without amsgrad"),
    ],
    ids=str,
)
def test_what_cannot_be_taken_over_is_refused(options: dict, changes: dict, message: str) -> None:
    model, adamw = stepped(**changes)
    opt = FOAM(model, **options)
    before = everything(opt)
    with pytest.raises(ValueError, match=message):
        from_adamw(opt, adamw)
    assert same(before, everything(opt))
    if options:
        with pytest.raises(ValueError, match="AdamW has no counterpart for"):
            to_adamw(opt)


def test_other_parameters_are_refused() -> None:
    model, adamw = stepped()
    stranger = FOAM([*model.parameters(), nn.Parameter(torch.zeros(2, 9))])
    with pytest.raises(ValueError, match=r"AdamW does not hold a parameter of this optimizer \(shape \(2, 9\)\)"):
        from_adamw(stranger, adamw)
    with pytest.raises(ValueError, match="has not stepped yet"):
        from_adamw(FOAM(model), torch.optim.AdamW(model.parameters()))
    with pytest.raises(ValueError, match="cannot match a state dict without parameter names: pass params="):
        from_adamw(FOAM(model), adamw.state_dict())
    with pytest.raises(ValueError, match="has 9 parameters, `params` has 1"):
        from_adamw(FOAM(model), adamw.state_dict(), params=[model.up.weight])
    with pytest.raises(ValueError, match="expected a torch AdamW or its state dict, got str"):
        from_adamw(FOAM(model), "adamw.pt")
    wrong = copy.deepcopy(adamw.state_dict())
    wrong["state"][1]["exp_avg"] = wrong["state"][1]["exp_avg"][:-1]
    with pytest.raises(ValueError, match="AdamW's moment has shape"):
        from_adamw(FOAM(model), wrong, params=model.parameters())


def test_optimizers_without_adams_moments_are_refused_before_and_after_their_first_step() -> None:
    model = toy()
    sgd, adamax = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), torch.optim.Adamax(model.parameters())
    opt = FOAM(model)
    before = copy.deepcopy(opt.state_dict())
    for _ in range(2):
        for source, named in ((sgd, "SGD"), (sgd.state_dict(), "a state dict")):
            with pytest.raises(
                ValueError, match=f"got {named}, whose groups have no `betas`: .* begin with a new FOAM"
            ):
                from_adamw(opt, source, params=list(model.parameters()))
        for own in (FOAM(model), FOAM(model).state_dict()):
            with pytest.raises(ValueError, match=r"got FOAM's own state: use opt.load_state_dict"):
                from_adamw(opt, own)
        train(model, sgd, 1)
    train(model, adamax, 1)
    with pytest.raises(ValueError, match=r"not the state of an Adam but .*exp_inf"):
        from_adamw(opt, adamax)
    assert same(before, opt.state_dict())


def test_names_find_the_weights_through_wrappers_and_in_any_order() -> None:
    class Pair(nn.Module):
        def __init__(self, order: str) -> None:
            super().__init__()
            for name in order:
                setattr(self, name, nn.Linear(8, 8))

    plain = Pair("ab")
    adamw = torch.optim.AdamW(list(plain.named_parameters()))
    for k, p in enumerate(plain.parameters()):
        p.grad = torch.full_like(p, k + 1.0)
    adamw.step()
    saved = adamw.state_dict()
    expected = {name: adamw.state[p]["exp_avg"].flatten()[0] for name, p in plain.named_parameters()}
    model: Any
    for model in (Pair("ba"), nn.DataParallel(Pair("ba")), torch.compile(Pair("ba"))):
        inner = getattr(model, "module", getattr(model, "_orig_mod", model))
        opt = from_adamw(FOAM(model), copy.deepcopy(saved))
        assert {name: opt.state[p]["m"].flatten()[0] for name, p in inner.named_parameters()} == expected
        with pytest.raises(ValueError, match="`params` are in another order than the state dict"):
            from_adamw(FOAM(model), copy.deepcopy(saved), params=model.parameters())
    wrapped = torch.optim.AdamW(list(nn.DataParallel(plain).named_parameters()))
    wrapped.load_state_dict(saved)
    other = Pair("ba")
    opt = from_adamw(FOAM(other), wrapped.state_dict())
    assert {name: opt.state[p]["m"].flatten()[0] for name, p in other.named_parameters()} == expected


@pytest.mark.parametrize(
    ("key", "damage", "message"),
    [
        ("exp_avg", lambda x: x * float("nan"), "m has values from nan"),
        ("exp_avg_sq", lambda x: -x - 1, "v has values from"),
        ("exp_avg_sq", lambda x: x[:-1], r"AdamW's moment has shape \(6, 10\)"),
        ("exp_avg_sq", lambda x: x.to_sparse(), "exp_avg_sq is a Tensor .*, not a plain dense tensor"),
        ("exp_avg", lambda x: x.to("meta"), "m is on the meta device"),
        ("exp_avg", lambda x: x.tolist(), "exp_avg is a list, not a tensor"),
        ("step", lambda x: x - 9, "step has values from -5"),
        ("step", lambda x: "4", "step is a str, not a tensor"),
        ("step", lambda x: torch.ones(2), "not a count of steps: tensor"),
    ],
)
def test_a_damaged_state_is_refused_by_name_and_nothing_changes(key: str, damage: Any, message: str) -> None:
    model, adamw = stepped()
    opt = FOAM(model)
    state = adamw.state[model.up.weight]
    state[key] = damage(state[key])
    before = everything(opt)
    with pytest.raises(ValueError, match=f"up.weight: {message}"):
        from_adamw(opt, adamw)
    assert same(before, everything(opt))


# ---------------------------------------------------------------------- in AdamW's place, at AdamW's rate


@pytest.mark.parametrize(
    ("lr", "betas", "margin"),
    [
        (1e-2, (0.9, 0.95), 0.02),  # the best of the rates tried for AdamW: FOAM is as good
        (1e-2, (0.9, 0.999), 0.07),  # short for a slow beta2: docs/algorithm.md, part 3
        (1e-3, (0.9, 0.95), 0.07),  # a rate far too low for AdamW: FOAM takes shorter steps still
    ],
    ids=str,
)
def test_foam_at_adamws_rate_trains_as_well_as_adamw(lr: float, betas: tuple[float, float], margin: float) -> None:
    adamw = learn(torch.optim.AdamW, lr=lr, betas=betas)
    assert adamw < 2.8  # it has learned: 5.5 is chance
    for level in (2, 3):
        assert learn(FOAM, lr=lr, betas=betas, level=level) < adamw + margin


def test_the_papers_recipe_with_another_decay() -> None:
    for group in FOAM(toy(), **PAPER | {"weight_decay": 0.1}).param_groups:  # as docs/choosing.md writes it
        assert group["weight_decay"] == 0.1 and group["lr"] == PAPER["lr"]


def test_the_papers_recipe_trains() -> None:
    assert learn(FOAM, **PAPER) < 2.5  # AdamW at its rate, 1e-2 for all: 2.22; at 1e-3: 2.71


if __name__ == "__main__":  # the figures of docs/choosing.md
    torch.set_num_threads(1)
    for betas in ((0.9, 0.95), (0.9, 0.999)):
        for lr in (1e-3, 1e-2):
            print(betas, lr, f"AdamW {learn(torch.optim.AdamW, lr=lr, betas=betas):.3f}", end=" ")
            for level, scale in ((2, 1.0), (3, 1.0), (2, 2.0), (2, 0.25)):
                loss = learn(FOAM, lr=lr, betas=betas, level=level, scale=scale)
                print(f"| level {level} x {scale} {loss:.3f}", end=" ", flush=True)
            print()
