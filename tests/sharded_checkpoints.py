"""Cases of `sharded_cases.py` that save and load models, or step them with other optimizers."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.optim import ZeroRedundancyOptimizer

from sharded_models import OPTIONS, Net, alike, fsdp, mesh_of, one_rank, train, whole
from torchfoam import FOAM, from_adamw, param_groups, to_adamw


def trained(options: dict[str, Any], mesh: Any = None, steps: int = 2) -> tuple[nn.Module, FOAM]:
    model = fsdp(Net(), mesh)
    opt = FOAM(model, lr=0.01, **options)
    train(model, opt, steps)
    return model, opt


def shared_folder() -> str:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return name[0]


def saved_and_loaded(
    options: dict[str, Any], others: dict[str, Callable[[], nn.Module]], save: Callable[[dict[str, Any], str], Any]
) -> None:
    model, opt = trained(options)
    folder = shared_folder()
    save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}, folder)
    train(model, opt, start=2)
    for make in others.values():
        other = make()
        again = FOAM(other, lr=0.5, **options)
        state: dict[str, Any] = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, again)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, again, state["optim"])
        train(other, again, start=2)
        alike(model, other, opt, again)


def targets() -> dict[str, Callable[[], nn.Module]]:
    two = mesh_of(2, 2)
    return {
        "four shards": lambda: fsdp(Net()),
        "two shards": lambda: fsdp(Net(), two),
        "one rank": lambda: fsdp(Net(), one_rank()),
        "whole": Net,
    }


def checkpoints_on_other_ranks() -> None:
    made = list(targets().items())
    for k, options in enumerate(OPTIONS):
        saved_and_loaded(options, dict([made[k % 4]]), lambda state, folder: dcp.save(state, checkpoint_id=folder))


def checkpoints_saved_while_training_goes_on() -> None:
    def save(state: dict[str, Any], folder: str) -> None:
        saving: Any = dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo"))
        saving.result()

    saved_and_loaded(OPTIONS[2], {"two shards": targets()["two shards"]}, save)


def full_state_dicts() -> None:
    """On rank 0 alone, from there to all; and the state dict of one process into shards and back."""
    for options in (OPTIONS[2], OPTIONS[7]):
        model, opt = trained(options)
        everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = copy.deepcopy(get_model_state_dict(model, options=everything))  # whole tensors on CPUs are not copied
        full: Any = copy.deepcopy(get_optimizer_state_dict(model, opt, options=everything))
        if dist.get_rank() == 0:
            shapes = {tuple(x.shape) for s in full["state"].values() for x in s.values()}
            assert all(not hasattr(x, "full_tensor") for s in full["state"].values() for x in s.values()), shapes
        train(model, opt, start=2)
        other = fsdp(Net())
        again = FOAM(other, lr=0.5, **options)
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, weights, options=spread)
        set_optimizer_state_dict(other, again, full, options=spread)
        train(other, again, start=2)
        alike(model, other, opt, again)


def state_dicts_of_one_process() -> None:
    for options in OPTIONS[::2]:
        plain, cut = Net(), fsdp(Net())
        one, many = FOAM(plain, lr=0.01, **options), FOAM(cut, lr=0.5, **options)
        train(plain, one, 2)
        set_model_state_dict(cut, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        many.load_state_dict(one.state_dict())
        alike(plain, cut, one, many)
        train(plain, one, 2, start=2)
        train(cut, many, 2, start=2)
        alike(plain, cut, one, many)
        sharded = many.state_dict()
        again = fsdp(Net(), one_rank())
        for target in (Net(), again):  # neither is over these ranks
            try:
                FOAM(target, **options).load_state_dict(sharded)
            except ValueError as error:
                assert "full_state_dict=True" in str(error)
            else:
                raise AssertionError("sharded state was loaded into whole parameters")


# ---------------------------------------------------------------------- other optimizers


def adamw_in_and_out() -> None:
    for level in (2, "row"):
        results = []
        for model in (Net(), fsdp(Net())):
            adamw = torch.optim.AdamW(model.named_parameters(), lr=0.01)
            train(model, adamw, 2)
            opt = from_adamw(FOAM(model, lr=0.01, level=level), adamw)
            train(model, opt, 2, start=2)
            out = to_adamw(opt)
            train(model, out, 2, start=4)
            results.append((model, out))
        (a, x), (b, y) = results
        alike(a, b)
        for p, q in zip(a.parameters(), b.parameters()):
            assert torch.equal(whole(x.state[p]["exp_avg"]), whole(y.state[q]["exp_avg"]))


def adamw_state_dicts() -> None:
    """Sharded ones and those of one process fold alike; a sharded one does not fold into whole weights."""
    plain, cut = Net(), fsdp(Net())
    kept = []
    for model in (plain, cut):
        adamw = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        train(model, adamw, 2)
        kept.append(adamw.state_dict())
    made = [from_adamw(FOAM(cut), state).state_dict()["state"] for state in kept]
    pairs = [(i, name, whole(x), whole(made[1][i][name])) for i in made[0] for name, x in made[0][i].items()]
    off = [(i, name) for i, name, x, y in pairs if not torch.equal(x, y)]
    assert not off and any(whole(s["m"]).ne(0).any() for s in made[0].values()), off
    try:
        from_adamw(FOAM(plain), kept[1])
    except ValueError as error:
        assert "exp_avg is sharded over ranks" in str(error)
    else:
        raise AssertionError("sharded moments were folded into whole parameters")


def state_dicts_of_the_same_ranks() -> None:
    for options in (OPTIONS[2], OPTIONS[4]):
        model, opt = trained(options)
        kept = copy.deepcopy(opt.state_dict())
        other, again = trained(options)
        train(model, opt, start=2)
        again.zero_grad()
        for mine in again.state.values():
            for x in mine.values():
                (x.to_local() if hasattr(x, "to_local") else x).zero_()
        again.load_state_dict(kept)
        train(other, again, start=2)
        alike(model, other, opt, again)


def zero_redundancy() -> None:
    plain, spread = Net(), Net()
    one = FOAM(plain, lr=0.01)
    many = ZeroRedundancyOptimizer(param_groups(spread, names=False), FOAM, lr=0.01)
    train(plain, one)
    train(spread, many)
    alike(plain, spread)


CHECKPOINTS = {
    f.__name__: f
    for f in (
        checkpoints_on_other_ranks, checkpoints_saved_while_training_goes_on, full_state_dicts,
        state_dicts_of_one_process, adamw_in_and_out, adamw_state_dicts, state_dicts_of_the_same_ranks,
        zero_redundancy,
    )
}  # fmt: skip
