"""What torch promises of every optimizer, as a table: kinds of FOAM x contracts. Then what FOAM promises beyond."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedules

from problems import Toy, allocated, everything, numbers, same, toy, train
from torchfoam import FOAM

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {"level": 0},
    "level 2": {"level": 2},
    "row": {"level": "row", "scale": 0.25},
    "the paper's rule": {"bias_correction": "whole", "residual_in_v": 1.0, "scale": 0.25},
    "square_mean": {"second_moment": "square_mean"},
    "bfloat16 state": {"state": "bfloat16"},
    "int8 state": {"state": "int8"},
    "mini": {"rule": "mini"},
    "muon": {"rule": "muon"},
    "bfloat16 weights": {"dtype": torch.bfloat16},
    "state as the weights": {"dtype": torch.bfloat16, "state": "param"},
    "float16 weights": {"dtype": torch.float16, "state": "float32", "eps": 1e-6},
    "float64 weights": {"dtype": torch.float64, "level": 3},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "tensor lr of one element": {"lr": torch.tensor([0.01])},
    "capturable": {"capturable": True, "state": "bfloat16"},
}


class Made:
    """A toy and its optimizer, of one kind."""

    def __init__(self, kind: str) -> None:
        options = dict(KINDS[kind])
        self.model = toy(options.pop("dtype", torch.float32))
        options["lr"] = copy.deepcopy(options.get("lr", 0.01))
        self.options = options
        self.opt = FOAM(self.model, **options)

    def again(self) -> FOAM:
        """Another optimizer of the same kind over a copy of the model."""
        return FOAM(copy.deepcopy(self.model), **copy.deepcopy(self.options))

    def train(self, steps: int = 3) -> None:
        train(self.model, self.opt, steps)


def it_learns(made: Made) -> None:
    before = made.model.loss(0).item()
    for _ in range(15):
        train(made.model, made.opt, 1)
    assert made.model.loss(0).item() < before - 0.1


def a_dead_layer_stays(made: Made) -> None:
    dead = [p.detach().clone() for p in made.model.dead.parameters()]
    made.train()
    assert same(dead, [p.detach() for p in made.model.dead.parameters()])
    assert all(made.opt.state[p]["step"] == 0 for p in made.model.dead.parameters())


def a_closure_runs_with_gradients(made: Made) -> None:
    def closure() -> Any:  # a tensor, though torch says float
        assert torch.is_grad_enabled()
        made.opt.zero_grad()
        loss = made.model.loss(0)
        loss.backward()
        return loss

    with torch.no_grad():
        first, second = made.opt.step(closure), made.opt.step(closure)
    assert second < first and made.opt.step() is None


def gradients_are_cleared(made: Made) -> None:
    made.model.loss(0).backward()
    made.opt.zero_grad()
    assert all(p.grad is None for p in made.model.parameters())
    made.model.loss(0).backward()
    made.opt.zero_grad(set_to_none=False)
    assert all(p.grad is None or not p.grad.any() for p in made.model.parameters())


def gradients_are_left_as_they_are(made: Made) -> None:
    made.model.loss(0).backward()
    before = [p.grad.clone() for p in made.model.parameters() if p.grad is not None]
    made.opt.step()
    assert same(before, [p.grad for p in made.model.parameters() if p.grad is not None])


def schedules_work(made: Made) -> None:
    n = len(made.opt.param_groups)
    for make in (
        lambda o: schedules.LambdaLR(o, [lambda t: 1 / (t + 1)] * n),
        lambda o: schedules.CosineAnnealingLR(o, 5),
        lambda o: schedules.OneCycleLR(o, max_lr=0.02, total_steps=10),  # turns betas too
        lambda o: schedules.SequentialLR(o, [schedules.ConstantLR(o, 0.1, 2), schedules.ExponentialLR(o, 0.9)], [2]),
    ):
        plan = make(made.again())
        rates = []
        for _ in range(4):
            plan.optimizer.step()
            plan.step()
            rates.append(float(plan.optimizer.param_groups[0]["lr"]))
        assert len(set(rates)) > 1


def the_rate_scales_the_step(made: Made) -> None:
    if isinstance(made.options["lr"], torch.Tensor):
        made.opt.param_groups[0]["lr"].zero_()
    for group in made.opt.param_groups:
        group["lr"] = 0.0
    before = everything(made.opt)[0]
    made.train(2)
    assert same(before, everything(made.opt)[0])


def hooks_are_called(made: Made) -> None:
    seen: list[str] = []
    made.opt.register_step_pre_hook(lambda *_: seen.append("pre"))
    made.opt.register_step_post_hook(lambda *_: seen.append("post"))
    made.opt.register_state_dict_post_hook(lambda _, d: {**d, "extra": 1})
    made.opt.register_load_state_dict_pre_hook(lambda _, d: {k: v for k, v in d.items() if k != "extra"})
    made.opt.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    made.train(1)
    saved = made.opt.state_dict()
    made.opt.load_state_dict(saved)
    assert saved["extra"] == 1 and seen == ["pre", "post", "loaded"]
    with torch.profiler.profile() as profile:
        made.opt.step()
    assert any("FOAM.step" in event.key for event in profile.key_averages())


def groups_can_be_added(made: Made) -> None:
    more, vector = nn.Parameter(numbers(4, 9).float()), nn.Parameter(numbers(4).float())
    made.opt.add_param_group({"params": [more, vector], "lr": 0.5})
    n = len(made.opt.param_groups)
    assert sum(any(p is more for p in g["params"]) for g in made.opt.param_groups) == 1
    more.grad, vector.grad = torch.ones_like(more), torch.ones_like(vector)
    before = more.detach().clone(), vector.detach().clone()
    made.opt.step()
    assert not torch.equal(more, before[0]) and not torch.equal(vector, before[1])
    with pytest.raises(ValueError, match="more than one parameter group"):
        made.opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 8)), vector]})
    assert len(made.opt.param_groups) == n  # nothing was half added


def a_copy_goes_its_own_way(made: Made) -> None:
    made.train(2)
    for model, opt in (
        copy.deepcopy((made.model, made.opt)),
        pickle.loads(pickle.dumps((made.model, made.opt))),
    ):
        train(model, opt, 2, start=2)
        assert opt.backend == made.opt.backend and not same(everything(opt), everything(made.opt))
        twin = copy.deepcopy((made.model, made.opt))
        train(*twin, 2, start=2)
        assert same(everything(opt), everything(twin[1]))


def saving_and_loading_is_exact(made: Made) -> None:
    made.train(2)
    other = made.again()
    saved = copy.deepcopy(made.opt.state_dict())
    other.load_state_dict(made.opt.state_dict())
    assert same(other.state_dict(), saved)
    # and shares nothing
    theirs = {x.untyped_storage().data_ptr() for s in made.opt.state.values() for x in s.values()}
    assert not theirs & {x.untyped_storage().data_ptr() for s in other.state.values() for x in s.values()}
    for group in other.param_groups:
        group["lr"] = group["lr"].zero_() if isinstance(group["lr"], torch.Tensor) else 0.0
    assert same(made.opt.state_dict(), saved)


def steps_repeat_exactly(made: Made) -> None:
    twin = copy.deepcopy((made.model, made.opt))
    made.train()
    train(*twin, 3)
    assert same(everything(made.opt), everything(twin[1]))


def bytes_are_counted_exactly(made: Made) -> None:
    for _ in range(2):
        assert made.opt.state_bytes() == allocated(made.opt)
        made.train(1)
    with torch.device("meta"):
        assert FOAM(Toy(made.model.up.weight.dtype), **made.options).state_bytes() == made.opt.state_bytes()


def state_is_there_from_the_start(made: Made) -> None:
    before = {p: {k: (x.shape, x.dtype, x.data_ptr()) for k, x in s.items()} for p, s in made.opt.state.items()}
    assert set(before) == set(made.model.parameters())
    made.train(1)
    assert before == {p: {k: (x.shape, x.dtype, x.data_ptr()) for k, x in s.items()} for p, s in made.opt.state.items()}


def a_loss_scaler_skips_and_steps(made: Made) -> None:
    if made.model.up.weight.dtype == torch.float16:
        return  # torch's scaler refuses float16 gradients itself
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = everything(made.opt)[0]
    scaler.scale(made.model.loss(0)).backward()
    grad = made.model.up.weight.grad
    assert grad is not None
    grad[0, 0] = torch.inf
    scaler.step(made.opt)
    scaler.update()
    assert same(before, everything(made.opt)[0]) and scaler.get_scale() == 2
    made.opt.zero_grad()
    scaler.scale(made.model.loss(0)).backward()
    scaler.step(made.opt)
    assert not same(before, everything(made.opt)[0])


def swapped_parameters_are_taken_up(made: Made) -> None:
    # Accelerate's FSDP2 does this to a finished optimizer
    made.train(1)
    new = copy.deepcopy(made.model)
    pairs = dict(zip(made.model.parameters(), new.parameters()))
    for group in made.opt.param_groups:
        group["params"] = [pairs[p] for p in group["params"]]
    assert len(made.opt.state_dict()["state"]) == len(pairs)  # not a KeyError, and nothing of those that left
    assert set(made.opt.state) == set(pairs.values())
    train(new, made.opt, 1)
    assert set(made.opt.state) == set(pairs.values()) and made.opt.state_bytes() == allocated(made.opt)


def frozen_parameters_may_thaw(made: Made) -> None:
    made.model.up.weight.requires_grad_(False)
    opt = FOAM(list(made.model.parameters()), **made.options)
    assert made.model.up.weight not in opt.state
    train(made.model, opt, 1)
    made.model.up.weight.requires_grad_(True)
    before = made.model.up.weight.detach().clone()
    train(made.model, opt, 1)
    assert opt.state[made.model.up.weight]["step"] == 1 and not torch.equal(before, made.model.up.weight)


CONTRACTS: list[Callable[[Made], None]] = [
    it_learns,
    a_dead_layer_stays,
    a_closure_runs_with_gradients,
    gradients_are_cleared,
    gradients_are_left_as_they_are,
    schedules_work,
    the_rate_scales_the_step,
    hooks_are_called,
    groups_can_be_added,
    a_copy_goes_its_own_way,
    saving_and_loading_is_exact,
    steps_repeat_exactly,
    bytes_are_counted_exactly,
    state_is_there_from_the_start,
    a_loss_scaler_skips_and_steps,
    swapped_parameters_are_taken_up,
    frozen_parameters_may_thaw,
]


@pytest.mark.parametrize("contract", CONTRACTS, ids=lambda f: f.__name__)
@pytest.mark.parametrize("kind", KINDS)
def test_contract(kind: str, contract: Callable[[Made], None]) -> None:
    contract(Made(kind))


def test_a_group_of_another_rate_and_a_scalar_schedule() -> None:
    # alpha multiplies the rate of folded groups only
    def step(scale: float) -> tuple[float, float]:
        matrix, vector = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(8))
        opt = FOAM([matrix, vector], lr=0.1, scale=scale, weight_decay=0.0)
        matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
        opt.step()
        return matrix[0, 0].item(), vector[0].item()

    assert step(1.0) == pytest.approx((-0.1, -0.1)) and step(0.25) == pytest.approx((-0.025, -0.1))


def test_counting_goes_on_past_what_float32_can_count() -> None:
    # at 2^24 a float32 count stands still, and with it the noise: a bfloat16 weight would round the same way for ever
    w = nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
    opt = FOAM([w], lr=1e-3, weight_decay=0.0)
    for name, x in {"step": 2**24, "m": 1.0, "v": 1.0}.items():  # the averages have settled long ago
        opt.state[w][name].fill_(x)
    for _ in range(16):
        w.grad = torch.ones_like(w)
        opt.step()
    assert opt.state[w]["step"].item() == 2**24 + 16
    # 16 steps of 0.001 from 1.0, where bfloat16 numbers lie 0.0039 apart; the mean of 4,096 is good to 0.0001
    assert (1 - w.double().mean()).item() == pytest.approx(0.016, abs=1e-3)
    assert (w != 1).double().mean() > 0.9
