"""State dicts find the same weights by name: whatever wraps them, in any order, through torch's distributed ones."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint import state_dict as dcp
from torch.optim.swa_utils import AveragedModel

from problems import SAVED, everything, numbers, same, through_a_file, toy, train
from torchfoam import FOAM, param_groups
from torchfoam.names import bare


class Pair(nn.Module):
    """Two layers of one shape, and two vectors, in either order."""

    a: nn.Linear
    b: nn.Linear

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
    def apply(model: Any) -> nn.Module:
        model.a = wrap(model.a)
        return model

    return apply


def compiled(model: nn.Module) -> Any:  # a module, though torch says a callable
    return torch.compile(model)


WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "nothing": lambda m: m,
    "compile": compiled,
    "DataParallel": nn.DataParallel,
    "an average": AveragedModel,
    "both": lambda m: nn.DataParallel(compiled(m)),
    "a checkpointed layer": inside(checkpoint_wrapper),
    "a compiled layer": inside(compiled),
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
    model: Any = nn.ModuleDict({"x": nn.Linear(8, 8, bias=False)})
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
    def make() -> tuple[Pair, FOAM]:
        model = Pair()
        groups: list[dict[str, Any]] = [{"params": list(layer.parameters())} for layer in (model.a, model.b)]
        groups.insert(place, {"params": [], "lr": 0.5})
        return model, FOAM(groups, lr=0.01)

    (model, opt), (other, again) = make(), make()
    model(numbers(4, 8).float()).square().sum().backward()
    opt.step()
    dcp.set_optimizer_state_dict(other, again, dcp.get_optimizer_state_dict(model, opt))
    assert same(again.state_dict(), opt.state_dict())


@pytest.mark.parametrize("options", [*SAVED.values(), {"lr": torch.tensor(0.01)}], ids=[*SAVED, "tensor lr"])
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
