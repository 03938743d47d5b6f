"""State dicts: bit for bit through a file; refused whole when they do not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from math import inf, nan
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from problems import SAVED, Toy, everything, same, through_a_file, toy, train
from torchfoam import FOAM


@pytest.mark.parametrize("options", SAVED.values(), ids=list(SAVED))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stopped_and_resumed_ends_bit_for_bit_the_same(options: dict[str, Any], dtype: torch.dtype) -> None:
    model = toy(dtype)
    opt = FOAM(model, lr=0.01, **options)
    train(model, opt, 3)
    weights, saved = through_a_file(model.state_dict()), through_a_file(opt.state_dict())
    train(model, opt, 3, start=3)

    resumed = Toy(dtype)
    resumed.load_state_dict(weights)
    again = FOAM(resumed, lr=0.5, **options)  # the rate comes from the file
    again.load_state_dict(saved)
    train(resumed, again, 3, start=3)
    assert same(everything(opt), everything(again))


def test_float32_moments_of_bfloat16_weights_stay_float32() -> None:
    model = toy(torch.bfloat16)
    opt = FOAM(model, lr=0.01)
    train(model, opt, 2)
    kept = [x for s in opt.state.values() for name, x in s.items() if name != "step"]
    assert any((x != x.bfloat16().float()).any() for x in kept)  # bfloat16 could not hold them
    saved = copy.deepcopy(opt.state_dict())
    train(model, opt, 2)
    opt.load_state_dict(saved)
    assert same(opt.state_dict(), saved)


def test_loading_writes_into_the_tensors_already_there() -> None:
    # no second copy of the state, and CUDA graphs go on reading the same memory
    model = toy()
    opt = FOAM(model, lr=torch.tensor(0.01))
    places = [x.data_ptr() for s in opt.state.values() for x in s.values()] + [opt.param_groups[0]["lr"].data_ptr()]
    other = toy()
    saved = FOAM(other, lr=torch.tensor(0.02))
    train(other, saved, 1)
    opt.load_state_dict(saved.state_dict())
    assert places == [x.data_ptr() for s in opt.state.values() for x in s.values()] + [
        opt.param_groups[0]["lr"].data_ptr()
    ]
    assert opt.param_groups[0]["lr"] == 0.02


def test_a_fresh_state_dict_resets() -> None:
    model = toy()
    opt = FOAM(model, lr=0.01)
    fresh = copy.deepcopy(opt.state_dict())
    train(model, opt, 2)
    opt.load_state_dict(fresh)
    assert same(opt.state_dict(), fresh)


# ---------------------------------------------------------------------- refusals


def changed(edit: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    def apply(saved: dict[str, Any]) -> Any:
        return edit(saved) or saved

    return apply


def cut(saved: dict[str, Any], name: str) -> None:
    # the last parameter of all: what comes before it must not have been loaded either
    state = saved["state"][max(saved["state"])]
    state[name] = state[name][..., :-1]


def drop(kept: dict[Any, Any], key: Any) -> None:
    del kept[key]


def put(kept: list[Any], i: int, x: Any) -> None:
    kept[i] = x


def renamed(saved: dict[str, Any], old: str, new: str) -> None:
    names = saved["param_groups"][0]["param_names"]
    names[names.index(old)] = new


def on(saved: dict[str, Any], i: int, name: str, change: Callable[[Tensor], Tensor]) -> None:
    saved["state"][i][name] = change(saved["state"][i][name])


def with_first(x: Tensor, value: float) -> Tensor:
    x.view(-1)[0] = value
    return x


class Wrapped(Tensor):
    """As DTensor and quantised weights are: a tensor, but not torch's own kind."""


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (
        lambda d: cut(d, "v"),
        r"group 1 \(unfolded\), parameter 8 \(dead.bias\): v was saved as torch.float32 \(2,\), this one has "
        r"torch.float32 \(3,\)",
    ),
    "dtype": (lambda d: d["state"][0].update(m=d["state"][0]["m"].bfloat16()), "m was saved as torch.bfloat16"),
    "a missing moment": (lambda d: drop(d["state"][0], "v"), r"saved state \['m', 'step'\], expected"),
    "a foreign moment": (lambda d: d["state"][0].update(exp_avg=1), r"saved state \['exp_avg', 'm', 'step', 'v'\]"),
    "not a tensor": (lambda d: d["state"][0].update(step=3), "step is a int, not a tensor"),
    "state of a wrong type": (lambda d: d["state"].update({0: [1]}), "the saved state is a list"),
    "a group too few": (lambda d: d["param_groups"].pop() and None, "has 1 parameter groups, this optimizer has 2"),
    "a parameter too few": (
        lambda d: d["param_groups"][1]["params"].pop() and None,
        r"group 1 \(unfolded\): saved with \d parameters, this one has \d",
    ),
    "level": (
        lambda d: d["param_groups"][0].update(level=3),
        r"group 0 \(folded\): saved with level=3, this optimizer has 2",
    ),
    "rule": (lambda d: d["param_groups"][1].update(rule="muon"), "saved with rule='muon', this optimizer has 'adam'"),
    "second moment": (
        lambda d: d["param_groups"][1].update(second_moment="square_mean"),
        "saved with second_moment='square_mean', this optimizer has 'mean_square'",
    ),
    "kind of state": (
        lambda d: d["param_groups"][1].update(state="bfloat16"),
        "saved with state='bfloat16', this optimizer has 'float32'",
    ),
    "a newer format": (lambda d: d["param_groups"][1].update(format=99), "written by a newer torchfoam"),
    "another name": (
        lambda d: renamed(d, "up.weight", "top.weight"),
        r"group 0 \(folded\), parameter 0: this optimizer has 'up.weight' there, the state dict 'top.weight'",
    ),
    "a name twice": (lambda d: renamed(d, "up.weight", "down.weight"), "names do not match one to one"),
    "a name too few": (lambda d: d["param_groups"][0]["param_names"].pop() and None, "not a name for each of 3 param"),
    "names of a wrong type": (lambda d: d["param_groups"][0].update(param_names=[1, 2, 3]), "not a name for each"),
    "a parameter twice": (lambda d: put(d["param_groups"][0]["params"], 1, 0), "has parameter 0 twice"),
    "a number that is none": (lambda d: put(d["param_groups"][0]["params"], 1, [1]), r"parameter's number is \[1\]"),
    "state of nobody": (lambda d: d["state"].update({99: {}}), "state of a parameter 99 that none of its groups has"),
    "no level": (lambda d: drop(d["param_groups"][0], "level"), "does not say its level, this optimizer has 2"),
    "no rule": (lambda d: drop(d["param_groups"][1], "rule"), "does not say its rule, this optimizer has 'adam'"),
    "sparse": (lambda d: on(d, 0, "m", Tensor.to_sparse), r"\(up.weight\): m is a Tensor \(torch.sparse_coo\), not"),
    "meta": (lambda d: on(d, 0, "v", lambda x: x.to("meta")), r"\(up.weight\): v is on the meta device"),
    "a subclass": (lambda d: on(d, 0, "v", lambda x: x.as_subclass(Wrapped)), r"\(up.weight\): v is a Wrapped"),
    "NaN": (
        lambda d: on(d, 0, "m", lambda x: with_first(x, nan)),
        r"\(up.weight\): m has values from nan to nan, which",
    ),
    "an infinite moment": (lambda d: on(d, 0, "m", lambda x: with_first(x, -inf)), "m has values from -inf to"),
    "NaN in v": (lambda d: on(d, 8, "v", lambda x: with_first(x, nan)), r"\(dead.bias\): v has values from nan"),
    "a negative square": (lambda d: on(d, 0, "v", lambda x: with_first(x, -1e-9)), "v has values from -1e-09 to"),
    "a negative step": (lambda d: on(d, 0, "step", lambda x: x - 9), "step has values from -7 to -7"),
    "half a step": (lambda d: on(d, 0, "step", lambda x: x + 0.5), "step has values from 2.5 to 2.5"),
    "an infinite step": (lambda d: on(d, 0, "step", lambda x: x + inf), "step has values from inf"),
    "a switch": (lambda d: d["param_groups"][1].update(maximize="no"), r"\(unfolded\): maximize must be True or False"),
    "a rate without a value": (
        lambda d: d["param_groups"][1].update(lr=torch.tensor(0.1, device="meta")),
        "lr is on the meta device",
    ),
    "a format that is none": (lambda d: d["param_groups"][1].update(format=True), "not a FOAM state dict"),
    "a nonsense rate": (lambda d: d["param_groups"][1].update(lr="fast"), "lr must be a number"),
    "groups of a wrong type": (lambda d: d.update(param_groups=[1, 2]), "not a parameter group of a state dict: 1"),
    "groups of no type": (lambda d: d.update(param_groups=3), "not an optimizer state dict"),
    "no state": (lambda d: drop(d, "state"), r"not an optimizer state dict: keys are \['param_groups'\]"),
    "a list": (lambda d: [d], "not an optimizer state dict but a list"),
}


@pytest.mark.parametrize(("edit", "message"), REFUSED.values(), ids=list(REFUSED))
def test_what_does_not_fit_is_refused_and_nothing_is_loaded(edit: Callable[..., Any], message: str) -> None:
    model, other = toy(), toy(seed=1)
    opt, source = FOAM(model, lr=0.01), FOAM(other, lr=0.02, betas=(0.8, 0.9))
    train(model, opt, 1)
    train(other, source, 2)
    saved = changed(edit)(copy.deepcopy(source.state_dict()))
    before = everything(opt)
    with pytest.raises(ValueError, match=message):
        opt.load_state_dict(saved)
    assert same(before, everything(opt))


def test_adamws_state_dict_is_refused_with_the_way_out() -> None:
    model = toy()
    adamw = torch.optim.AdamW(model.parameters())
    train(model, adamw, 1)
    with pytest.raises(ValueError, match=r"to continue from torch.optim.AdamW use torchfoam.from_adamw"):
        FOAM([{"params": list(model.parameters()), "level": 2}]).load_state_dict(adamw.state_dict())
    # and the other way round: the moments have names of their own, so AdamW cannot take them for its own
    opt = FOAM([{"params": list(model.parameters()), "level": 2}])
    train(model, opt, 1)
    adamw.load_state_dict(opt.state_dict())
    model.loss(0).backward()
    with pytest.raises(KeyError):
        adamw.step()


def test_options_added_later_are_filled_in() -> None:
    # a state dict from before an option existed loads; the option keeps this optimizer's value
    model = toy()
    opt = FOAM(model, lr=0.01)
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        for key in ("seed", "stochastic", "momentum", "param_names"):
            del group[key]
    before = everything(opt)
    opt.load_state_dict(saved)
    assert same(before, everything(opt))


@pytest.mark.parametrize("state", ["int8", "bfloat16", "param"])
def test_damage_shows_in_narrow_state_too(state: str) -> None:
    model = toy(torch.bfloat16)
    opt = FOAM(model, lr=0.01, state=state)
    train(model, opt, 2)
    saved = copy.deepcopy(opt.state_dict())
    kept = saved["state"][0]
    if state == "int8":
        kept["v_exponent"][0, 0], kept["v"][0, 0] = 255, 255
    else:
        kept["v"][0, 0] = nan
    before = everything(opt)
    with pytest.raises(ValueError, match=r"\(up.weight\): v has values from nan to nan"):
        opt.load_state_dict(saved)
    assert same(before, everything(opt))


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_a_square_that_overflowed_is_no_damage(state: str) -> None:
    w = nn.Parameter(torch.ones(3, 8))
    opt = FOAM([w], state=state)
    w.grad = torch.full_like(w, 1e30)
    opt.step()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
