"""Weights and gradients of every shape, layout, dtype and device; weights that move, are recast or leave."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

from problems import Toy, allocated, everything, numbers, same, toy, train
from torchfoam import FOAM, GradientRelease, param_groups
from torchfoam.kernels import BACKENDS, Slot, cpu, eager
from torchfoam.options import Options
from torchfoam.state import open_moment

# ---------------------------------------------------------------------- shapes, layouts, dtypes

SHAPES = [(), (1,), (7,), (3, 10), (10, 1), (1, 10), (0,), (0, 5), (5, 0), (2, 3, 5), (4, 3, 2, 3)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("level", [0, 1, 8, "row"])
@pytest.mark.parametrize("rule", ["adam", "mini"])
@pytest.mark.parametrize("state", ["float32", "int8"])
def test_every_shape(shape: tuple[int, ...], level: Any, rule: str, state: str) -> None:
    p = nn.Parameter(numbers(*shape, dtype=torch.float32))
    opt = FOAM([{"params": [p], "level": level, "rule": rule, "state": state}], lr=0.1)
    before = p.detach().clone()
    p.grad = numbers(*shape, seed=1, dtype=torch.float32)
    opt.step()
    assert p.shape == shape and p.isfinite().all() and ((p != before).all() or not p.numel())
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    def run(arrange: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], level: Any) -> torch.Tensor:
        p = nn.Parameter(arrange(numbers(*shape, dtype=dtype)))
        opt = FOAM([{"params": [p], "level": level}], lr=0.01)
        for t in range(3):
            g = numbers(*shape, seed=t, dtype=dtype)
            p.grad = [arrange(g), g, g[:1].expand(shape)][t]
            opt.step()
        return p.detach().contiguous()

    transposed = lambda x: x.mT.contiguous().mT  # noqa: E731
    channels_last = lambda x: x.to(memory_format=torch.channels_last)  # noqa: E731
    strided = lambda x: torch.stack([x, x], -1)[..., 0]  # noqa: E731
    for level in (0, 2, "row"):
        for shape, arranges in (((5, 11), (transposed, strided)), ((4, 3, 2, 5), (channels_last, strided))):
            for arrange in arranges:
                assert not arrange(numbers(*shape)).is_contiguous()
                assert torch.equal(run(arrange, shape, level), run(torch.clone, shape, level))


def test_mixed_dtypes_in_one_group() -> None:
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    params = [nn.Parameter(numbers(3, 10, dtype=d)) for d in dtypes]
    opt = FOAM(params, lr=0.1)
    assert [opt.state[p]["m"].dtype for p in params] == [torch.float64] + [torch.float32] * 3
    for p in params:
        p.grad = numbers(3, 10, seed=1, dtype=p.dtype)
    opt.step()
    for p in params[1:]:
        torch.testing.assert_close(p.double(), params[0], rtol=2**-7, atol=2**-8)


@torch.no_grad()
def test_a_gradient_wider_than_its_weight() -> None:
    # torch lets no .grad be one, but a backend is given what accumulates elsewhere
    g = torch.full((2, 8), 1 + 2**-12)  # no bfloat16 number
    for backend in (x for x in (eager, cpu) if not BACKENDS[x.__name__.split(".")[-1]].unavailable()):
        p = nn.Parameter(torch.zeros(2, 8, dtype=torch.bfloat16))
        state = FOAM([p]).state[p]
        state["step"] += 1
        backend.update([Slot(p, g, state, 0)], Options(lr=0.5, betas=(0.5, 0.99), weight_decay=0.0))
        assert torch.equal(p, torch.full_like(p, -0.5)) and torch.equal(state["m"], torch.full((2, 2), 0.5 + 2**-13))


def test_meta() -> None:
    with torch.device("meta"):
        model = Toy()
    opt = FOAM(model, lr=0.1)
    assert FOAM(model, backend="cpu").state_bytes() == opt.state_bytes()  # the model may move there yet
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert all(s["m"].is_meta for s in opt.state.values())


@pytest.mark.parametrize("same_objects", [False, True])
def test_state_follows_a_model_that_moves(same_objects: bool) -> None:
    # torch's optimizers have no state before the first step, so many a script moves the model after building them
    with torch.device("meta"):
        model = Toy()
    opt = FOAM(model, lr=0.1)
    before = set(model.parameters())
    torch.__future__.set_swap_module_params_on_conversion(same_objects)
    model.to_empty(device="cpu")
    torch.__future__.set_swap_module_params_on_conversion(False)
    assert same_objects == (before >= set(model.parameters()))
    pairs = {g["name"]: [dict(model.named_parameters())[n] for n in g["param_names"]] for g in opt.param_groups}
    for group in opt.param_groups:
        group["params"] = pairs[group["name"]]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(numbers(*p.shape))
    train(model, opt, 2)
    assert all(s["m"].device.type == "cpu" and s["m"].any() for p, s in opt.state.items() if p.grad is not None)
    assert opt.state[model.up.weight]["step"] == 2


# ---------------------------------------------------------------------- no full-size state, one temporary at a time


@pytest.mark.parametrize(
    ("level", "state", "bytes_a_weight"),
    [(0, "float32", 8), (2, "float32", 2), (3, "float32", 1), (3, "bfloat16", 0.5), ("row", "float32", 8 / 256)],
)
def test_state_is_folded(level: Any, state: str, bytes_a_weight: float) -> None:
    opt = FOAM([nn.Parameter(torch.zeros(64, 256))], level=level, state=state)
    assert opt.state_bytes() == allocated(opt) == 64 * 256 * bytes_a_weight + 4  # and the step count


# ---------------------------------------------------------------------- weights recast after construction


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8", "param"])
@pytest.mark.parametrize("rule", ["adam", "mini", "muon"])
@pytest.mark.parametrize("to", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_state_follows_weights_that_are_recast(dtype: Any, to: Any, rule: str, kind: str) -> None:
    model = toy(dtype)
    opt = FOAM(model, lr=0.01, rule=rule, state=kind)
    fresh = FOAM(toy(to), lr=0.01, rule=rule, state=kind)
    train(model, opt, 2)
    before = {p: open_moment(opt.state[p], "m", torch.float64).clone() for p in model.parameters()}
    model.to(to)
    saved = opt.state_dict()  # complete and as the weights are, also before the next step
    layout = [{name: (x.shape, x.dtype) for name, x in s.items()} for s in fresh.state_dict()["state"].values()]
    assert [{name: (x.shape, x.dtype) for name, x in s.items()} for s in saved["state"].values()] == layout
    for p, m in before.items():
        now = open_moment(opt.state[p], "m", torch.float64)
        assert (now - m).abs().max() <= 2**-5 * m.abs().max() and opt.state[p]["step"] == (m.any() and 2)
    fresh.load_state_dict(copy.deepcopy(saved))
    train(model, opt, 2, start=2)
    assert all(p.isfinite().all() and p.dtype == to for p in model.parameters())
    assert opt.state[model.up.weight]["step"] == 4 and opt.state_bytes() == allocated(opt)


@pytest.mark.parametrize("release", [False, True])
def test_a_step_takes_recast_weights_as_they_are(release: bool) -> None:
    w = nn.Parameter(numbers(3, 16))
    opt = FOAM([w], state="int8")
    model = nn.ParameterList([w]).float()
    assert opt.state[w]["m"].dtype == torch.float64
    with GradientRelease(opt) if release else nullcontext():
        model[0].square().sum().backward()
        opt.step()
    assert opt.state[w]["m"].dtype == torch.uint8 and opt.state[w]["m"].any()


def test_sparse_gradients_are_refused_before_anything_moves() -> None:
    table = nn.Embedding(9, 8, sparse=True)
    w = nn.Parameter(numbers(3, 8).float())
    opt = FOAM([{"params": [w], "level": 2}, {"params": table.parameters(), "level": 0}])
    before = everything(opt)
    (table(torch.tensor([1])).sum() + w.sum()).backward()
    with pytest.raises(RuntimeError, match=r"cannot use sparse gradients .* sparse=False"):
        opt.step()
    assert same(before, everything(opt))
    with pytest.raises(ValueError, match="cannot use the sparse gradients of '0': build it with sparse=False"):
        param_groups(nn.Sequential(table, nn.Linear(8, 8)))


def test_frozen_quantised_weights_may_be_among_the_parameters() -> None:
    codes = nn.Parameter(torch.zeros(4, 4, dtype=torch.uint8), requires_grad=False)
    w = nn.Parameter(numbers(3, 8).float())
    opt = FOAM([codes, w], lr=0.1)
    w.grad = torch.ones_like(w)
    opt.step()
    assert list(opt.state) == [w] and not codes.any()
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))


def test_several_devices_in_one_group() -> None:
    params = [nn.Parameter(torch.zeros(3, 8, device=device)) for device in ("cpu", "meta", "cpu")]
    opt = FOAM(params, lr=0.1, weight_decay=0.0)
    for p in params:
        p.grad = torch.ones_like(p)
    opt.step()
    assert all(opt.state[p]["m"].device == p.device for p in params)
    assert torch.equal(params[0], params[2]) and params[0].ne(0).all()


def test_dropped_parameters_leave_no_state() -> None:
    model = toy()
    opt = FOAM(model, lr=0.1)
    train(model, opt, 1)
    opt.param_groups[0]["params"].pop()
    train(model, opt, 1)
    opt.state_dict()
    assert len(opt.state) == sum(len(g["params"]) for g in opt.param_groups)
    assert opt.state_bytes() == allocated(opt)
