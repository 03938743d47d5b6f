"""State dicts: bit for bit through files and torch's distributed checkpoints; refused whole when they do not fit."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as dcp

from problems import Toy, everything, numbers, same, toy, train
from torchfoam import FOAM
from torchfoam.saved import FORMAT

STORED = Path(__file__).parent / "data"
OPTIONS: dict[str, dict[str, Any]] = {
    "level 2": {"level": 2},
    "row, int8": {"level": "row", "state": "int8"},
    "bfloat16": {"level": 3, "state": "bfloat16", "seed": 5},
    "mini": {"rule": "mini"},
    "muon": {"rule": "muon"},
}


def through_a_file(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
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


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "shape": (
        lambda d: cut(d, "v"),
        r"group 1 \(unfolded\), parameter \d+: v was saved as torch.float32 \(2,\), this one has torch.float32 \(3,\)",
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
    "another order": (
        lambda d: d["param_groups"][0]["param_names"].reverse(),
        r"group 0 \(folded\), parameter 0: saved as 'dead.weight', this optimizer has 'up.weight' there",
    ),
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
        for key in ("seed", "stochastic", "second_moment", "momentum", "param_names"):
            del group[key]
    before = everything(opt)
    opt.load_state_dict(saved)
    assert same(before, everything(opt))


# ---------------------------------------------------------------------- torch.distributed.checkpoint


@pytest.mark.parametrize("options", [*OPTIONS.values(), {"lr": torch.tensor(0.01)}], ids=[*OPTIONS, "tensor lr"])
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoint_round_trip(options: dict[str, Any], flat: bool) -> None:
    how = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    model, other = toy(torch.bfloat16), toy(torch.bfloat16, seed=1)
    opt = FOAM(model, **{"lr": 0.01, **options})
    train(model, opt, 2)
    saved = through_a_file(copy.deepcopy(dcp.get_optimizer_state_dict(model, opt, options=how)))
    again = FOAM(other, **copy.deepcopy({"lr": 0.02, **options}))
    dcp.set_optimizer_state_dict(other, again, saved, options=how)
    assert same(again.state_dict()["state"], opt.state_dict()["state"])
    assert [float(g["lr"]) for g in again.param_groups] == pytest.approx([0.01] * 2)


def test_materialising_missing_state_changes_nothing() -> None:
    model = toy()
    opt = FOAM(model, lr=0.01)
    weights = everything(opt)[0]
    opt.state.clear()
    dcp._init_optim_state(opt)
    assert same(everything(opt)[0], weights)
    assert len(opt.state) == 9 and not any(s["m"].any() or s["v"].any() for s in opt.state.values())


# ---------------------------------------------------------------------- stored checkpoints of each format


def problem(name: str) -> tuple[list[nn.Parameter], FOAM]:
    """A matrix, a ragged matrix and a vector in the two groups that FOAM(params) makes of them."""
    params = [nn.Parameter(numbers(*s, seed=k, dtype=torch.float32)) for k, s in enumerate([(3, 8), (2, 37), (5,)])]
    return params, FOAM(params, lr=0.01, **OPTIONS[name])


def steps(params: list[nn.Parameter], opt: FOAM, first: int, last: int) -> list[Tensor]:
    for t in range(first, last):
        for k, p in enumerate(params):
            p.grad = numbers(*p.shape, seed=10 * t + k, dtype=torch.float32)
        opt.step()
    return [p.detach().clone() for p in params]


def write() -> None:
    """Make the stored file: `python tests/test_checkpoint_state.py write`. Once a format; older files stay."""
    stored = {}
    for name in OPTIONS:
        params, opt = problem(name)
        weights, state = steps(params, opt, 0, 3), copy.deepcopy(opt.state_dict())
        stored[name] = {"weights": weights, "optimizer": state, "after": steps(params, opt, 3, 5)}
    torch.save(stored, STORED / f"checkpoint_v{FORMAT}.pt")


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("version", range(1, FORMAT + 1))
def test_stored_checkpoints_load_and_go_on(version: int, name: str) -> None:
    stored = torch.load(STORED / f"checkpoint_v{version}.pt", weights_only=True)[name]
    params, opt = problem(name)
    with torch.no_grad():
        for p, w in zip(params, stored["weights"]):
            p.copy_(w)
    opt.load_state_dict(stored["optimizer"])
    old = stored["optimizer"]["state"]
    for kept in old.values():
        kept["step"] = kept["step"].to(torch.int32)  # a float32 count in format 1
    assert same(opt.state_dict()["state"], old)
    # the rule it was trained with: in format 1 there was the paper's alone
    rule = {1: ("whole", 1.0), 2: ("moments", 0.1)}[version]
    assert all((g["bias_correction"], g["residual_in_v"], g["format"]) == (*rule, FORMAT) for g in opt.param_groups)
    for p, w, a in zip(steps(params, opt, 3, 5), stored["weights"], stored["after"]):
        # another machine or kernel may round otherwise; Newton-Schulz runs in bfloat16, codes have four bits
        apart = {"muon": 2e-2, "row, int8": 2e-2, "bfloat16": 1e-2}.get(name, 1e-4)
        assert (p - a).norm() <= apart * (a - w).norm()


def test_an_optimizer_pickled_by_the_first_version_goes_on_with_its_rule() -> None:
    params, opt = problem("level 2")
    older, new = {"bias_correction", "residual_in_v"}, pickle.loads(pickle.dumps(opt))
    old = opt.__getstate__()
    for group in (old["defaults"], *old["param_groups"]):
        group["format"] = 1
        for key in older:
            del group[key]
    for kept in old["state"].values():
        kept["step"] = torch.tensor(3.0)
    new.__setstate__(old)
    assert all((g["bias_correction"], g["residual_in_v"]) == ("whole", 1.0) for g in (new.defaults, *new.param_groups))
    steps(params, new, 3, 4)
    assert all(kept["step"].item() == 4 and kept["step"].dtype == torch.int32 for kept in new.state.values())


if __name__ == "__main__" and "write" in sys.argv:
    write()
