"""Learning rates kept in tensors: every group owns its own, and what writes rates does to it what it does to floats."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR

from problems import numbers, same, toy, train
from torchfoam import FOAM, param_groups, to_adamw

SCHEDULES: dict[str, Callable[[FOAM], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda t: 1 / (t + 1)),
    "a lambda a group": lambda o: schedules.LambdaLR(o, [lambda t: 1 / (t + 1), lambda t: 0.5**t]),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda t: 0.7),
    "StepLR": lambda o: schedules.StepLR(o, 2),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [1, 3]),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1.0, 4),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 3),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.001, 0.1, 2),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, max_lr=0.02, total_steps=10),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.LinearLR(o, 0.1, 1.0, 4), schedules.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=0),
    "SWALR": lambda o: SWALR(o, swa_lr=0.05, anneal_epochs=3),
}


def rates(opt: torch.optim.Optimizer) -> list[float]:
    return [float(group["lr"]) for group in opt.param_groups]


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=list(SCHEDULES))
def test_a_schedule_does_to_a_tensor_what_it_does_to_a_float(make: Callable[[FOAM], Any]) -> None:
    seen = []
    for lr in (0.01, torch.tensor(0.01, dtype=torch.float64)):
        opt = FOAM(toy(), lr=lr)
        assert len(opt.param_groups) == 2
        plan, told = make(opt), []
        for _ in range(7):
            opt.step()
            plan.step(1.0) if isinstance(plan, schedules.ReduceLROnPlateau) else plan.step()
            told.append(rates(opt))
        seen.append(told)
    assert len({x[0] for x in seen[0]}) > 1
    assert [x for step in seen[1] for x in step] == pytest.approx([x for step in seen[0] for x in step])


def test_a_plateau_halves_the_rate_once() -> None:
    for make in (torch.optim.AdamW, FOAM):
        opt = make(toy().parameters(), lr=torch.tensor(1e-2))
        plan = schedules.ReduceLROnPlateau(opt, factor=0.5, patience=0)
        plan.step(1.0)
        plan.step(1.0)
        assert rates(opt) == pytest.approx([0.005] * len(opt.param_groups))


def owned(opt: FOAM) -> list[int]:
    places = [group["lr"].data_ptr() for group in opt.param_groups]
    assert len(set(places)) == len(places), "groups share a tensor"
    return places


def test_every_group_owns_its_tensor_however_it_came_by_it() -> None:
    lr = torch.tensor(0.01)
    model = toy()
    opt = FOAM(model, lr=lr)
    owned(opt)
    for _ in range(2):  # the default, a tensor that a group has, and one that is split over two groups
        matrix, vector = nn.Parameter(numbers(4, 9).float()), nn.Parameter(numbers(4).float())
        opt.add_param_group({"params": [matrix, vector]})
        opt.add_param_group({"params": [nn.Parameter(torch.ones(4, 9))], "lr": opt.param_groups[0]["lr"]})
    owned(opt)
    assert rates(opt) == pytest.approx([0.01] * len(opt.param_groups))
    for again in (copy.deepcopy(opt), pickle.loads(pickle.dumps(opt))):
        again.add_param_group({"params": [nn.Parameter(torch.ones(4, 9))]})
        assert not set(owned(again)) & set(owned(opt))
    other = FOAM([{"params": g["params"], "level": g["level"]} for g in opt.param_groups], lr=0.5)
    saved = opt.state_dict()
    for group in saved["param_groups"]:
        group["lr"] = lr  # as it was saved while groups still shared
    other.load_state_dict(saved)
    owned(other)
    explicit = FOAM([{"params": [nn.Parameter(torch.ones(2, 8))], "lr": lr} for _ in range(3)])
    owned(explicit)
    owned(to_adamw(explicit))  # type: ignore[arg-type]


def test_a_single_groups_tensor_is_the_one_given() -> None:
    # as with AdamW: a captured step reads it, and its owner writes it
    lr = torch.tensor(0.01)
    opt = FOAM([nn.Parameter(torch.ones(2, 8))], lr=lr, capturable=True)
    assert opt.param_groups[0]["lr"] is lr
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lr.fill_(0.02)
        opt.step()


@pytest.mark.parametrize("backend", [None, "eager"])
def test_writing_the_tensor_that_several_groups_were_given_is_said_once(backend: Any) -> None:
    lr, model = torch.tensor(0.01), toy()
    opt = FOAM(model, lr=lr, backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, opt, 1)
        opt.param_groups[0]["lr"].fill_(0.02)  # a group's own may change
        train(model, opt, 1)
    lr.fill_(0.1)
    with pytest.warns(UserWarning, match=r'no group reads it: .* change group\["lr"\] of every group') as told:
        train(model, opt, 2)
    assert len(told) == 1 and rates(opt) == pytest.approx([0.02, 0.01])


def test_tensors_of_every_origin_will_do() -> None:
    with torch.inference_mode():
        born = torch.tensor(0.01)
    for lr in (born, torch.tensor(0.01, requires_grad=True), torch.tensor([0.01], dtype=torch.bfloat16)):
        model = toy()
        opt = FOAM(model, lr=lr)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            train(model, opt, 2)
        owned(opt)


def test_rates_load_into_the_very_tensors_whatever_was_saved() -> None:
    for mine in (torch.tensor(0.01), torch.tensor([0.01])):
        for theirs in (0.5, torch.tensor(0.5), torch.tensor([0.5])):
            opt, source = FOAM(toy(), lr=mine), FOAM(toy(), lr=theirs)
            places = owned(opt)
            opt.load_state_dict(source.state_dict())
            assert owned(opt) == places and rates(opt) == [0.5, 0.5]
    opt = FOAM(toy(), lr=0.01)
    opt.load_state_dict(FOAM(toy(), lr=torch.tensor(0.5)).state_dict())
    owned(opt)


def test_a_rate_a_group_trains_as_floats_do() -> None:
    runs = []
    for kind in (float, torch.tensor):
        model = toy()
        groups = param_groups(model)
        for group, lr in zip(groups, (0.03, 0.01)):
            group["lr"] = kind(lr) if kind is float else torch.tensor(lr, dtype=torch.float64)
        opt = FOAM(groups, backend="eager")
        train(model, opt, 3)
        runs.append([p.detach() for p in model.parameters()])
    assert all(torch.allclose(a, b, rtol=1e-6) for a, b in zip(*runs)) and not same(runs[0], [])


def test_a_step_with_tensor_rates_compiles_whole() -> None:
    w, b = nn.Parameter(numbers(2, 8).float()), nn.Parameter(numbers(8).float())
    opt = FOAM([w, b], lr=torch.tensor(0.01), capturable=True, backend="eager")
    w.grad, b.grad = torch.ones_like(w), torch.ones_like(b)
    (x, y), twin = copy.deepcopy(([w, b], opt))
    x.grad, y.grad = torch.ones_like(x), torch.ones_like(y)
    twin.step()
    torch.compile(opt.step, fullgraph=True, backend="eager")()
    torch.testing.assert_close((w, b), (x, y))


@pytest.mark.parametrize(
    "lr", [torch.tensor(1), torch.tensor(True), torch.tensor(0.1j), torch.tensor([0.1]).to_sparse()], ids=str
)
def test_a_tensor_that_cannot_hold_rates(lr: Tensor) -> None:
    with pytest.raises(ValueError, match="lr must be a float or a dense tensor of floating point, got torch"):
        FOAM([nn.Parameter(torch.ones(2, 8))], lr=lr)
