"""What holds of the Triton kernels wherever they run.

`test_triton_kernel.py` runs this file under Triton's interpreter, `test_gpu.py` takes its tests to a GPU.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tolerances
from problems import numbers, toy
from torchfoam import FOAM
from torchfoam.fold import width
from torchfoam.kernels import Slot, eager, triton
from torchfoam.options import Options
from torchfoam.rules import adam
from torchfoam.shard import Part, part

DEVICE = "cpu" if triton.interpreted() else "cuda"
F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
# long, ragged, even, odd, tiny: shape and level of what has to agree
SHAPES: list[tuple[tuple[int, ...], Any]] = [
    ((), 0), ((1, 1), 2), ((13,), 0), ((64,), 0), ((3, 1), "row"), ((7, 11), 1), ((5, 37), 2), ((2, 3, 16), 2),
    ((6, 32), 3), ((3, 100), 3), ((3, 5461), 3), ((2, 5461), "row"), ((2, 2736), "row"), ((3, 256), "row"),
    ((2, 5504), 8), ((40, 128), 0), ((1, 16400), "row"), ((2, 20001), "row"), ((1, 40000), 15), ((1, 33000), 13),
]  # fmt: skip
DTYPES = [(F32, F32, F32), (BF16, BF16, F32), (BF16, BF16, BF16), (F32, BF16, BF16), (F16, F16, F32), (F16, F16, F16)]
OPTIONS: list[dict[str, Any]] = [
    {"second_moment": "square_mean"}, {"residual": 0.0}, {"residual": 0.5}, {"maximize": True},
    {"weight_decay": 0.0}, {"stochastic": False}, {"beta1": 0.0, "beta2": 0.0}, {"eps": 1e-3}, {"seed": -7},
    {"residual_in_v": 0.0}, {"residual_in_v": 0.7, "beta2": 0.9}, {"bias_correction": "whole", "residual_in_v": 1.0},
    {"bias_correction": "whole", "residual_in_v": 0.3},
]  # fmt: skip


def slot(shape: tuple[int, ...], level: Any, *dtypes: torch.dtype, t: int = 3) -> Slot:
    """Weight, gradient and moments of these dtypes."""
    p, g, s = dtypes
    folded = (*shape[:-1], width(level, shape[-1])) if shape else ()
    state = {"m": numbers(*folded, seed=3) * 0.1, "v": numbers(*folded, seed=4).square()}
    state = {name: x.to(s).to(DEVICE) for name, x in state.items()} | {"step": torch.tensor(t, dtype=torch.int32)}
    return Slot(numbers(*shape, seed=1).to(p).to(DEVICE), numbers(*shape, seed=2).to(g).to(DEVICE), state, 5)


def copy(s: Slot) -> Slot:
    return s._replace(p=s.p.clone(), state={name: x.clone() for name, x in s.state.items()})


def stored(s: Slot) -> dict[str, Tensor]:
    return {"p": s.p, "m": s.state["m"], "v": s.state["v"]}


def hyper(level: Any, beta1: float = 0.87, beta2: float = 0.999, **options: Any) -> Options:
    # with beta1 = 0.9 sums of two bfloat16 numbers are often exact ties, where float32 rounding decides
    return Options(**{"lr": 0.01, "betas": (beta1, beta2), "weight_decay": 0.1, "level": level, **options})


def both(start: Slot, h: Options) -> tuple[Slot, Slot]:
    ours, twin = copy(start), copy(start)
    triton.update([ours], h)
    eager.update([twin], h)
    return ours, twin


def agrees(start: Slot, h: Options) -> None:
    """One step from equal states: float32 and float16 against the float64 rule, bfloat16 against the eager backend."""
    ours, twin = both(start, h)
    truth = {name: x.double() for name, x in stored(start).items()}
    adam(truth["p"], start.g.double(), truth["m"], truth["v"], start.state["step"].item(), h)
    for name, x in stored(ours).items():
        if x.dtype == BF16:
            tolerances.narrow(x, stored(twin)[name], name)
        else:
            tolerances.rounding(x, stored(twin)[name], truth[name], name)


@pytest.mark.parametrize("dtypes", DTYPES[:3:2], ids=str)
@pytest.mark.parametrize(("shape", "level"), SHAPES, ids=str)
def test_every_shape_agrees(shape: tuple[int, ...], level: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    agrees(slot(shape, level, *dtypes), hyper(level, scale=0.25))


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("level", [0, 2, "row"])
def test_every_dtype_agrees(level: Any, dtypes: tuple[torch.dtype, ...]) -> None:
    for t in (1, 1000):
        agrees(slot((4, 48), level, *dtypes, t=t), hyper(level))


@pytest.mark.parametrize("option", OPTIONS, ids=str)
@pytest.mark.parametrize(("shape", "level"), [((3, 40), 0), ((3, 40), 2), ((3, 43), 2), ((1, 16385), "row")], ids=str)
def test_every_option_agrees(shape: tuple[int, ...], level: Any, option: dict[str, Any]) -> None:
    h = hyper(level, **option)
    agrees(slot(shape, level, F32, F32, F32), h)
    agrees(slot(shape, level, BF16, BF16, BF16), h)


def test_memory_that_is_not_aligned_agrees() -> None:
    for level in (0, 2):
        s = slot((4, 32), level, F32, F32, F32)
        off = torch.empty(129, device=DEVICE)[1:].view(4, 32)
        agrees(s._replace(g=off.copy_(s.g)), hyper(level))


def test_a_transposed_gradient_agrees() -> None:
    s = slot((6, 32), 2, F32, F32, F32)
    agrees(s._replace(g=s.g.t().contiguous().t()), hyper(2))


@pytest.mark.parametrize("shape", [(3, 40), (70, 41)], ids=str)
def test_moments_are_rounded_with_the_eager_bits(shape: tuple[int, ...]) -> None:
    # with betas 0 and level 0, m = g and v = g^2 before rounding, in whatever order they are computed
    ours, twin = both(slot(shape, 0, F32, F32, BF16), hyper(0, beta1=0.0, beta2=0.0))
    for name in ("m", "v"):
        tolerances.exact(ours.state[name], twin.state[name], name)
    assert (ours.state["m"] != ours.g.to(BF16)).any(), "rounded to nearest"


def part_of(shape: tuple[int, ...], dim: int, rank: int, unit: int) -> Part:
    """What one of two ranks holds of a tensor that is cut along a dimension."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=2)
    try:
        mesh = init_device_mesh("cpu", (2,))
        whole = DTensor.from_local(torch.zeros(shape), mesh, [Replicate()], run_check=False)
        found = part(whole.redistribute(placements=[Shard(dim)]), unit)
        assert found is not None and not found.whole_rows
        found.first(shape[-1]), found.first(width(unit.bit_length() - 1, shape[-1]))  # asks the mesh
        return found
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("shape", "dim", "level"),
    [((7, 41), 0, 0), ((6, 16), 0, 2), ((5, 24), 1, 2), ((5, 32), 1, 0), ((3, 5, 8), 1, 1), ((3, 4, 9), 0, 3),
     ((3, 65536), 1, 15), ((40,), 0, 0)],
)  # fmt: skip
def test_parts_are_rounded_as_the_whole(shape: tuple[int, ...], dim: int, level: int) -> None:
    """Noise is by the element's number in the whole, whatever rank holds it."""
    whole, h = slot(shape, level, BF16, BF16, BF16), hyper(level)
    ours = copy(whole)
    triton.update([ours], h)
    for rank in range(2):
        mine = part_of(shape, dim, rank, 1 << level)

        def cut(x: Tensor, part: Part = mine) -> Tensor:
            rows = x.reshape(-1, x.shape[-1])[part.rows.to(x.device)]
            B = 1 if x.shape[-1] == shape[-1] else 1 << level
            return rows[:, (part.columns[::B] // B).to(x.device)].contiguous()

        state = {name: x if name == "step" else cut(x) for name, x in whole.state.items()}
        here = whole._replace(p=cut(whole.p), g=cut(whole.g), state=state, part=mine)
        triton.update([here], h)
        tolerances.exact(here.p, cut(ours.p), f"p on rank {rank}")
        for name in ("m", "v"):
            tolerances.exact(here.state[name], cut(ours.state[name]), f"{name} on rank {rank}")


@pytest.mark.parametrize(("shape", "level"), [((70, 41), 0), ((5, 41), 2), ((2, 1030), "row"), ((2, 16385), "row")])
def test_weights_are_rounded_with_the_eager_bits(shape: tuple[int, ...], level: Any) -> None:
    # every gradient 1/4, betas and eps 0: the step is lr exactly, 0.01, which lies between two bfloat16 numbers
    start = slot(shape, level, BF16, F32, F32)
    start.p.zero_()
    start.g.fill_(0.25)
    ours, twin = both(start, hyper(level, beta1=0.0, beta2=0.0, eps=0.0))
    tolerances.exact(ours.p, twin.p)
    assert ours.p.unique().numel() == 2


def test_nan_and_infinity_are_not_hidden() -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        for level in (0, 2):
            start = slot((2, 32), level, BF16, BF16, BF16)
            start.g[1, 5] = bad
            ours, twin = both(start, hyper(level))
            for name, x in stored(ours).items():
                assert torch.equal(x.isnan(), stored(twin)[name].isnan()), (bad, level, name)
                assert torch.equal(x.isinf(), stored(twin)[name].isinf()), (bad, level, name)


def test_step_and_lr_on_the_device_are_read_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "on_device", lambda x: True)
    for beta1, beta2, t in [(0.9, 0.999, 1), (0.0, 0.95, 7), (0.9, 0.999, 20000)]:
        for shape, level in [((4, 48), 2), ((1, 16400), "row")]:
            h = hyper(level, beta1=beta1, beta2=beta2)
            ours = slot(shape, level, F32, F32, F32, t=t)
            twin, truth = copy(ours), {name: x.double() for name, x in stored(copy(ours)).items()}
            on_device = replace(h, lr=torch.tensor(0.01, device=DEVICE))
            ours.state["step"] = ours.state["step"].to(DEVICE)
            triton.update([ours], on_device)
            eager.update([twin], h)
            adam(truth["p"], ours.g.double(), truth["m"], truth["v"], t, h)
            for name, x in stored(ours).items():
                tolerances.rounding(x, stored(twin)[name], truth[name], name)


def test_a_model_trains_as_with_the_eager_backend() -> None:
    runs = {}
    for backend in ("triton", "eager"):
        model = toy().to(DEVICE)
        opt = FOAM(model, lr=0.01, level=2, backend=backend)
        for k in range(2):
            opt.zero_grad()
            for i, p in enumerate(model.parameters()):
                if i != k:  # step counts that differ
                    p.grad = numbers(*p.shape, seed=100 * k + i, dtype=F32).to(DEVICE)
            opt.step()
        runs[backend] = [p.detach() for p in model.parameters()]
    for a, b in zip(*runs.values()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_launches_do_not_grow_with_parameters() -> None:
    def launches(n: int) -> int:
        slots = [slot((3, 24), 2, F32, F32, F32) for _ in range(n)]
        slots += [slot((3, 25), 2, F32, F32, F32) for _ in range(n)]
        return len(triton.plan(slots, 2).launches)

    assert launches(2) == launches(9) == 2


def test_many_tensors_of_one_launch_keep_apart() -> None:
    h = hyper(2)
    ours = [slot((k, 24 + k % 3), 2, BF16, BF16, F32)._replace(number=k) for k in range(1, 8)]
    twins = [copy(s) for s in ours]
    triton.update(ours, h)
    eager.update(twins, h)
    for a, b in zip(ours, twins):
        tolerances.narrow(a.p, b.p)
        torch.testing.assert_close(a.state["m"], b.state["m"], rtol=1e-6, atol=1e-7)


def test_tables_are_kept_until_an_address_changes() -> None:
    s = slot((3, 24), 2, F32, F32, F32)
    first = triton.plan([s], 2)
    assert triton.plan([s], 2) is first
    moved = s._replace(g=s.g.clone())
    assert triton.plan([moved], 2) is not first
    h = hyper(2)
    agrees(moved, h)


def test_a_named_backend_is_used_through_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    p = nn.Parameter(numbers(4, 12, dtype=F32).to(DEVICE))
    opt = FOAM([p], backend="triton")
    monkeypatch.setattr(eager, "update", None)
    p.grad = torch.ones_like(p)
    before = p.detach().clone()
    opt.step()
    assert (p != before).all()


def test_moments_of_another_size_are_an_error_and_not_a_stray_write() -> None:
    s = slot((3, 24), 2, F32, F32, F32)
    with pytest.raises(ValueError, match=r"cannot step \(3, 24\).*level 3"):
        triton.update([s], hyper(3))
    with pytest.raises(ValueError, match=r"gradient of \(24,\)"):
        triton.update([s._replace(g=s.g[0])], hyper(2))
