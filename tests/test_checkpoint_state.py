"""State dicts: bit for bit through files and torch's distributed checkpoints; refused whole when they do not fit."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections.abc import Callable
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim.swa_utils import AveragedModel

from problems import Toy, everything, numbers, same, toy, train
from torchfoam import FOAM, param_groups
from torchfoam.names import bare
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


# ---------------------------------------------------------------------- names, wrappers, order


class Pair(nn.Module):
    """Two layers of one shape, and two vectors, in either order."""

    def __init__(self, order: str = "ab") -> None:
        super().__init__()
        for name in order:
            setattr(self, name, nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x).tanh())


def trained(model: nn.Module, **options: Any) -> FOAM:
    opt = FOAM(model, lr=0.01, **options)
    for _ in range(2):
        opt.zero_grad()
        model(numbers(4, 8).float()).square().sum().backward()
        opt.step()
    return opt


class Fsdp(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._fsdp_wrapped_module = model


def inside(wrap: Callable[[nn.Module], nn.Module]) -> Callable[[nn.Module], nn.Module]:
    def apply(model: nn.Module) -> nn.Module:
        model.a = wrap(model.a)
        return model

    return apply


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda m: m,
    "compile": torch.compile,
    "DataParallel": nn.DataParallel,
    "an average": AveragedModel,
    "both": lambda m: nn.DataParallel(torch.compile(m)),
    "a checkpointed layer": inside(checkpoint_wrapper),
    "a compiled layer": inside(torch.compile),
    "FSDP, outside and inside": lambda m: Fsdp(inside(Fsdp)(m)),
}


def by_name(opt: FOAM) -> dict[str, Any]:
    return {bare(name): opt.state[p] for g in opt.param_groups for name, p in zip(g["param_names"], g["params"])}


@pytest.mark.parametrize("wrap", WRAPS.values(), ids=list(WRAPS))
@pytest.mark.parametrize("order", ["ab", "ba"])
def test_moments_are_those_of_the_same_weights_whatever_wraps_them(wrap: Any, order: str) -> None:
    torch.manual_seed(0)
    plain = trained(Pair("ab"))
    wrapped = FOAM(wrap(Pair(order)))
    wrapped.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert same(by_name(wrapped), by_name(plain)) and len(by_name(plain)) == 4
    back = FOAM(Pair("ab"))
    back.load_state_dict(copy.deepcopy(wrapped.state_dict()))
    assert same(back.state_dict()["state"], plain.state_dict()["state"])


def test_names_are_compared_group_by_group() -> None:
    opt = trained(Pair())
    other = FOAM(Pair())
    for group in other.param_groups:
        group["param_names"] = [name.replace("a.", "c.") for name in group["param_names"]]
    with pytest.raises(
        ValueError, match=r"parameter 0: this optimizer has 'c.weight' there, the state dict 'a.weight'"
    ):
        other.load_state_dict(opt.state_dict())
    saved = copy.deepcopy(opt.state_dict())
    for group in saved["param_groups"]:
        del group["param_names"]
    other.load_state_dict(saved)  # then the order decides, as the message says
    assert same(other.state_dict()["state"], opt.state_dict()["state"])
    alone = {"b.weight": {"lr": 0.1}}
    split, swapped = (FOAM(param_groups(Pair(order), overrides=alone)) for order in ("ab", "ba"))
    with pytest.raises(
        ValueError, match=r"parameter 0: this optimizer has 'b.weight' there, the state dict 'a.weight'"
    ):
        swapped.load_state_dict(split.state_dict())


def test_a_part_called_module_is_no_wrapper_where_names_would_run_together() -> None:
    model = nn.ModuleDict({"x": nn.Linear(8, 8, bias=False)})
    model["x"].module = nn.Linear(8, 8, bias=False)
    opt, other = FOAM(model), FOAM(torch.compile(model))
    opt.state[model["x"].weight]["m"].fill_(1)
    again = FOAM(model)
    again.load_state_dict(opt.state_dict())
    assert same(again.state_dict(), opt.state_dict())
    with pytest.raises(ValueError, match="names do not match one to one"):
        other.load_state_dict(opt.state_dict())


def test_two_models_in_one_optimizer_share_names_and_keep_their_order() -> None:
    models = [Pair(), Pair()]
    opt, other = (FOAM([pair for m in models for pair in m.named_parameters()]) for _ in range(2))
    for k, p in enumerate(p for m in models for p in m.parameters()):
        opt.state[p]["m"].fill_(k)
    other.load_state_dict(opt.state_dict())
    assert same(other.state_dict(), opt.state_dict())


def test_exchanged_states_of_its_own_are_exchanged() -> None:
    opt = trained(Pair())
    saved = opt.state_dict()  # its very tensors
    saved["state"][0], saved["state"][1] = saved["state"][1], saved["state"][0]
    expected = copy.deepcopy(saved)
    opt.load_state_dict(saved)
    assert same(opt.state_dict()["state"], expected["state"])


# ---------------------------------------------------------------------- torch.distributed.checkpoint


# the others torch's own names do not see through
@pytest.mark.parametrize("wrap", ["nothing", "compile", "a checkpointed layer", "a compiled layer"])
@pytest.mark.parametrize("flat", [False, True])
def test_distributed_checkpoints_find_the_same_weights(wrap: str, flat: bool) -> None:
    how = dcp.StateDictOptions(flatten_optimizer_state_dict=flat)
    plain = Pair("ab")
    opt = trained(plain)
    other = WRAPS[wrap](Pair("ba"))
    again = FOAM(other)
    dcp.set_optimizer_state_dict(other, again, dcp.get_optimizer_state_dict(plain, opt, options=how), options=how)
    assert same(by_name(again), by_name(opt))


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_a_distributed_checkpoint_of_a_part_goes_by_torchs_own_names(order: str) -> None:
    whole, other = nn.ModuleDict({"part": Pair("ab")}), nn.ModuleDict({"part": Pair(order)})
    opt, again = trained(whole["part"]), FOAM(other["part"])
    dcp.set_optimizer_state_dict(other, again, dcp.get_optimizer_state_dict(whole, opt))
    assert same(by_name(again), by_name(opt))


@pytest.mark.parametrize("place", [0, 1, 2])
def test_an_empty_group_survives_a_distributed_checkpoint(place: int) -> None:
    def make() -> tuple[nn.Module, FOAM]:
        model = Pair()
        groups: list[dict[str, Any]] = [{"params": list(layer.parameters())} for layer in (model.a, model.b)]
        groups.insert(place, {"params": [], "lr": 0.5})
        return model, FOAM(groups, lr=0.01)

    (model, opt), (other, again) = make(), make()
    model(numbers(4, 8).float()).square().sum().backward()
    opt.step()
    dcp.set_optimizer_state_dict(other, again, dcp.get_optimizer_state_dict(model, opt))
    assert same(again.state_dict(), opt.state_dict())


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
