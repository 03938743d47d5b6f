"""Stored checkpoints of each format load and go on."""

from __future__ import annotations

import copy
import pickle
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from problems import SAVED, numbers, same
from torchfoam import FOAM
from torchfoam.saved import FORMAT

STORED = Path(__file__).parent / "data"


def problem(name: str) -> tuple[list[nn.Parameter], FOAM]:
    """A matrix, a ragged matrix and a vector in the two groups that FOAM(params) makes of them."""
    params = [nn.Parameter(numbers(*s, seed=k, dtype=torch.float32)) for k, s in enumerate([(3, 8), (2, 37), (5,)])]
    return params, FOAM(params, lr=0.01, **SAVED[name])


def steps(params: list[nn.Parameter], opt: FOAM, first: int, last: int) -> list[Tensor]:
    for t in range(first, last):
        for k, p in enumerate(params):
            p.grad = numbers(*p.shape, seed=10 * t + k, dtype=torch.float32)
        opt.step()
    return [p.detach().clone() for p in params]


def write() -> None:
    """Make the stored file: `python tests/test_checkpoint_stored.py write`. Once a format; older files stay."""
    stored = {}
    for name in SAVED:
        params, opt = problem(name)
        weights, state = steps(params, opt, 0, 3), copy.deepcopy(opt.state_dict())
        stored[name] = {"weights": weights, "optimizer": state, "after": steps(params, opt, 3, 5)}
    torch.save(stored, STORED / f"checkpoint_v{FORMAT}.pt")


@pytest.mark.parametrize("name", SAVED)
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
    for q, w, a in zip(steps(params, opt, 3, 5), stored["weights"], stored["after"]):
        # another machine or kernel may round otherwise; Newton-Schulz runs in bfloat16, codes have four bits
        apart = {"muon": 2e-2, "row, int8": 2e-2, "bfloat16": 1e-2}.get(name, 1e-4)
        assert (q - a).norm() <= apart * (a - w).norm()


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
