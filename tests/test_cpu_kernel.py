"""The fused CPU kernel against the float64 rule, its own wide twin, and every number of threads."""

from __future__ import annotations

import math
import platform
import random
import sys
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tolerances
from problems import numbers, toy, train
from torchfoam import FOAM
from torchfoam.fold import width
from torchfoam.kernels import Slot, cpu, eager
from torchfoam.options import Options
from torchfoam.quant import encode, noise_key, round_stochastic
from torchfoam.rules import adam
from torchfoam.state import open_moment

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))

F32, BF16, F16, CODES = torch.float32, torch.bfloat16, torch.float16, torch.uint8
LEVELS: list[Any] = [0, 1, 2, 3, 4, 5, 6, 7, 8, "row"]
SHAPES: list[tuple[int, ...]] = [
    (), (1,), (17,), (1000,), (1, 1), (5, 1), (1, 3), (7, 11), (13, 37), (3, 5461), (2, 3, 31), (64, 48), (33, 512),
    (4, 3, 3, 3), (2, 4111),
]  # fmt: skip
OPTIONS: list[dict[str, Any]] = [
    {}, {"second_moment": "square_mean"}, {"residual": 0.0}, {"residual": 0.5}, {"maximize": True},
    {"weight_decay": 0.0}, {"beta1": 0.3, "beta2": 0.5}, {"beta1": 0.0, "beta2": 0.0}, {"eps": 1e-3}, {"scale": 0.25},
    {"lr": torch.tensor(0.02)}, {"eps": 1e16},
    {"residual_in_v": 0.0}, {"residual_in_v": 0.7, "beta2": 0.9}, {"bias_correction": "whole", "residual_in_v": 1.0},
    {"bias_correction": "whole", "residual_in_v": 0.3},
]  # fmt: skip


def slot(
    shape: tuple[int, ...], level: Any, p: Any = F32, g: Any = F32, s: Any = F32, t: int = 3, seed: int = 0
) -> Slot:
    folded = (*shape[:-1], width(level, shape[-1])) if shape else ()
    state = {"m": numbers(*folded, seed=seed + 3) * 0.1, "v": numbers(*folded, seed=seed + 4).square()}
    for name, x in list(state.items()):
        if s == CODES:
            state[name], state[f"{name}_exponent"] = encode(x.float(), name == "m", None)
        else:
            state[name] = x.to(s)
    state["step"] = torch.tensor(t, dtype=torch.int32)
    return Slot(numbers(*shape, seed=seed + 1).to(p), numbers(*shape, seed=seed + 2).to(g), state, 5)


def copy(s: Slot, dtype: torch.dtype | None = None) -> Slot:
    """A copy, stored in `dtype` if given."""
    state = {name: x.clone() for name, x in s.state.items()}
    if dtype:
        state = {name: open_moment(state, name, dtype).clone() for name in ("m", "v")} | {"step": state["step"]}
    return s._replace(p=s.p.to(dtype or s.p.dtype, copy=True), state=state)


def stored(s: Slot) -> dict[str, Tensor]:
    return {"p": s.p, **{name: x for name, x in s.state.items() if name != "step"}}


def hyper(level: Any, beta1: float = 0.9, beta2: float = 0.999, **options: Any) -> Options:
    return Options(**{"lr": 0.01, "betas": (beta1, beta2), "weight_decay": 0.1, "level": level, **options})


def ran(start: Slot, h: Options, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    s = copy(start, dtype)
    cpu.update([s], h)
    return stored(s)


def by_rule(start: Slot, h: Options, dtype: torch.dtype) -> dict[str, Tensor]:
    s = copy(start, dtype)
    if isinstance(h.lr, Tensor):
        h = replace(h, lr=h.lr.item())
    adam(s.p, s.g.to(dtype), s.state["m"], s.state["v"], s.state["step"].item(), h)
    return stored(s)


def check(start: Slot, h: Options, what: str) -> None:
    """In float32 storage as good as the eager rule; in the slot's own storage exactly that, rounded.

    The numbers before the step stand beside those after it, so that an ulp is one of the size of what was added.
    """
    wide, truth, plain = ran(start, h, F32), by_rule(start, h, torch.float64), by_rule(start, h, F32)
    opened = stored(copy(start, F32))
    for name, x in wide.items():
        beside = [torch.cat([opened[name].flatten().to(y.dtype), y.flatten()]) for y in (x, plain[name], truth[name])]
        tolerances.rounding(beside[0], beside[1], beside[2], f"{what}: {name}")
    check_rounded(start, h, wide, what)


def check_rounded(start: Slot, h: Options, wide: dict[str, Tensor], what: str) -> None:
    """What the step keeps is its float32 result, rounded: quant.py says how, bit for bit."""
    kept = ran(start, h)
    for name, x in wide.items():
        dtype, step = kept[name].dtype, int(start.state["step"])
        key = noise_key(h.seed, step, start.number, "pmv".index(name)) if h.stochastic else None
        if dtype == CODES:
            rounded, exponents = encode(x, name == "m", key)
            tolerances.exact(kept[f"{name}_exponent"], exponents, f"{what}: exponents of {name}")
        else:
            rounded = round_stochastic(x, key) if dtype == BF16 and key is not None else x.to(dtype)
        tolerances.exact(kept[name], rounded, f"{what}: {name} in {dtype}")


@pytest.mark.parametrize("level", LEVELS)
def test_every_shape_is_as_good_as_the_eager_rule(level: Any) -> None:
    for shape in SHAPES:
        check(slot(shape, level), hyper(level), f"{shape} level {level}")
        if len(shape) > 1:
            for stochastic in (True, False):
                h = hyper(level, stochastic=stochastic, seed=11)
                check(slot(shape, level, s=CODES), h, f"{shape} level {level} codes")


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_option_is_as_good_as_the_eager_rule(options: dict[str, Any]) -> None:
    for level in (0, 1, 2, 3, 5, 9, "row"):
        for t in (1, 1000):
            check(slot((9, 1037), level, t=t), hyper(level, **options), f"level {level} step {t} {options}")


@pytest.mark.parametrize("p", [F32, BF16, F16])
@pytest.mark.parametrize("g", [F32, BF16, F16])
@pytest.mark.parametrize("s", [F32, BF16, F16, CODES])
def test_narrow_storage_is_the_wide_result_rounded(p: Any, g: Any, s: Any) -> None:
    for shape, level in (((9, 1037), 0), ((9, 1037), 2), ((16, 64), 3), ((2, 1500), "row")):
        for stochastic in (True, False):
            h = hyper(level, stochastic=stochastic, seed=-7)
            check(slot(shape, level, p, g, s), h, f"{shape} level {level}")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are for x86-64")
@pytest.mark.parametrize("flag", ["-mno-avx512f", "-march=x86-64-v2"])
def test_narrower_vectors_are_as_good(flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    function = cpu.load(cpu.build(tmp_path, [flag, "-O1"]))
    monkeypatch.setattr(cpu, "_library", lambda: function)
    for shape, level in (
        ((9, 1037), 0),
        ((16, 96), 0),
        ((16, 64), 1),
        ((9, 1037), 2),
        ((33, 512), 5),
        ((3, 1500), "row"),
    ):
        for p, s in ((F32, F32), (BF16, BF16), (BF16, CODES)):
            for h in (hyper(level), hyper(level, stochastic=False, eps=0.0)):
                check(slot(shape, level, p, p, s), h, f"{shape} level {level} {p} {s}")


def test_groups_of_tiny_and_of_no_numbers() -> None:
    """Codes of what has long had no gradient: nothing, almost nothing, and both beside ordinary numbers."""
    for size in (0.0, -0.0, 1e-45, 1e-39, 1e-35, 1e-31, 1e-28):
        for stochastic in (True, False):
            start = slot((4, 96), 0, s=CODES)
            start.g[:2] = size
            start.g[1, 40:50] = 0.0
            start.g[2, 3::7] = size
            for name in ("m", "v"):
                start.state[name][:2] = 0
            h = hyper(0, stochastic=stochastic, beta1=0.0, beta2=0.0)
            check_rounded(start, h, {k: x for k, x in ran(start, h, F32).items() if k != "p"}, f"g = {size}")


def test_fuzz() -> None:
    dice = random.Random(0)
    for k in range(150):
        columns = dice.choice([dice.randint(1, 40), dice.randint(1, 700), 2 ** dice.randint(0, 10)])
        lead = [dice.randint(1, 12) for _ in range(dice.randint(0, 2))]
        level = dice.choice([*LEVELS, 12])
        options: dict[str, Any] = {}
        for choice in dice.sample(OPTIONS, 2):
            options |= choice
        p, g = (dice.choice([F32, BF16, F16]) for _ in range(2))
        s = dice.choice([F32, BF16, F16, CODES] if lead else [F32, BF16, F16])
        start = slot((*lead, columns), level, p, g, s, t=dice.randint(1, 50), seed=k)
        if "eps" not in options:
            start.g.mul_(10.0 ** dice.randint(-3, 3))
        check(start, hyper(level, **options), f"case {k}: {(*lead, columns)} level {level} {p} {g} {s} {options}")


@pytest.mark.parametrize("level", [0, 1, 2, 3, 5, 8, 10, "row"])
def test_the_number_of_threads_does_not_matter(level: Any) -> None:
    starts = [slot(shape, level) for shape in ((300, 511), (130, 1024), (), (1, 7))]
    starts += [slot((600_000,), level), slot((2, 530_001), level, BF16, BF16, BF16), slot((1, 3), level)]
    starts += [slot(shape, level, s=CODES) for shape in ((300, 511), (3, 70_001), (130, 1024), (4, 3, 3, 3))]
    function = cpu.load(cpu.build())
    results = []
    for threads, parallel in ((1, None), (2, None), (3, cpu.torch_threads()), (7, None)):
        slots = [copy(s) for s in starts]
        cpu.step(function, slots, hyper(level), threads, parallel)
        results.append([x for s in slots for x in stored(s).values()])
    for result in results[1:]:
        for a, b in zip(results[0], result):
            tolerances.exact(a, b)


def test_huge_rows_are_as_good_as_the_eager_rule() -> None:
    for shape, level in (((600_000,), "row"), ((2, 530_001), "row"), ((1, 1_200_007), 19)):
        check(slot(shape, level), hyper(level), f"{shape} level {level}")


def test_it_shares_torch_s_threads() -> None:
    if sys.platform != "linux" or "backend: OpenMP" not in torch.__config__.parallel_info():
        pytest.skip("torch brings no OpenMP runtime here")
    assert cpu.torch_threads() is not None


@pytest.mark.parametrize("level", [0, 2, 4, 9])
@pytest.mark.parametrize("eps", [1e-8, 0.0])
def test_extremes_come_out_as_from_the_eager_rule(level: Any, eps: float) -> None:
    for value in (0.0, -0.0, 1e-41, 1e-30, 1e-22, 1e15, 3e19, math.inf, -math.inf, math.nan):
        start = slot((3, 1024), level)
        for x in start.state["m"], start.state["v"]:
            x[0] = 0.0
        start.g[0] = 0.0
        start.g[1, 5:9] = value
        start.g[2] = value
        ours, twin = ran(start, hyper(level, eps=eps)), by_rule(start, hyper(level, eps=eps), F32)
        for name, x in ours.items():
            sound = x.isfinite()  # of an infinite gradient the kernel makes NaN where the rule has infinity
            assert torch.equal(sound, twin[name].isfinite()), f"{name}, g = {value}"
            torch.testing.assert_close(x[sound], twin[name][sound], rtol=1e-5, atol=1e-7, msg=f"{name}, g = {value}")


@pytest.mark.parametrize("level", [0, 2, 9])
@pytest.mark.parametrize("stochastic", [True, False])
def test_codes_of_extremes(level: Any, stochastic: bool) -> None:
    """Bit for bit what quant.py makes of the float32 moments: zeros, denormals, the largest numbers, infinity, NaN."""
    h = hyper(level, stochastic=stochastic, beta1=0.0, beta2=0.0)
    for value in (0.0, -0.0, 1e-41, -1e-30, 1e-22, 1.8e19, -3.4e38, math.inf, -math.inf, math.nan):
        start = slot((3, 1021), level, s=CODES)
        start.g[0] = 0.0
        start.g[1, 5:9] = value
        start.g[2] = value
        check_rounded(start, h, {k: x for k, x in ran(start, h, F32).items() if k != "p"}, f"g = {value}")


@pytest.mark.parametrize("stochastic", [True, False])
def test_codes_are_those_of_the_eager_twin(stochastic: bool) -> None:
    """Where the float32 moments differ by an ulp a code may round to the other side: 99 % are equal, all within the
    codec's bound of the float64 moments."""
    for shape, level in (((33, 512), 0), ((40, 1376), 2), ((64, 96), 3), ((500, 300), "row")):
        h, start = hyper(level, stochastic=stochastic), slot(shape, level, s=CODES)
        twin, ours, truth = copy(start), copy(start), by_rule(start, h, torch.float64)
        cpu.update([ours], h)
        eager.update([twin], h)
        for name in ("m", "v"):
            for part in (name, f"{name}_exponent"):
                assert (ours.state[part] == twin.state[part]).double().mean() >= 0.99, (shape, level, part)
            tolerances.codec(
                open_moment(ours.state, name, F32), truth[name], name == "m", stochastic, f"{shape} {name}"
            )


def test_nan_and_infinity_in_narrow_storage() -> None:
    for dtype in (BF16, F16):
        start = slot((4, 64), 0, dtype)
        start.p[:2, :3] = torch.tensor([math.inf, -math.inf, math.nan])
        p = ran(start, hyper(0))["p"]
        assert p[:2, 0].isposinf().all() and p[:2, 1].isneginf().all() and p[:2, 2].isnan().all()
        assert p[:, 3:].isfinite().all()


@pytest.mark.parametrize("s", [F32, CODES])
def test_gaps_and_transposed_tensors(s: Any) -> None:
    for level in (0, 2, "row"):
        start, h = slot((6, 40), level, s=s), hyper(level)
        want = ran(start, h)
        base = torch.zeros(6, 80)
        base[:, ::2] = start.p
        for p, g in ((start.p.t().contiguous().t(), start.g.t().contiguous().t()), (base[:, ::2], start.g)):
            apart = copy(start)._replace(p=p, g=g)
            cpu.update([apart], h)
            for name, x in stored(apart).items():
                tolerances.exact(x.contiguous(), want[name], name)
        assert base[:, 1::2].eq(0).all()


def test_each_parameter_has_its_own_step_count() -> None:
    starts = [slot((3, 8), 2, t=t) for t in (1, 5)]
    together = [copy(s) for s in starts]
    cpu.update(together, hyper(2))
    for start, s in zip(starts, together):
        tolerances.exact(s.p, ran(start, hyper(2))["p"])


def test_the_optimizer_uses_it_and_follows_the_eager_one() -> None:
    models = [toy(), toy()]
    opts = [FOAM(m, lr=0.01, backend=name) for m, name in zip(models, ("cpu", "eager"))]
    for m, opt in zip(models, opts):
        train(m, opt, 20)
    for a, b in zip(*(m.parameters() for m in models)):
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_codes_are_saved_and_loaded_bit_for_bit(dtype: Any) -> None:
    def run(cut: int | None) -> list[Tensor]:
        model = toy().to(dtype)
        opt = FOAM(model.parameters(), lr=0.01, state="int8", backend="cpu")
        for k in range(6):
            if k == cut:
                saved = opt.state_dict()
                opt = FOAM(model.parameters(), lr=0.01, state="int8", backend="cpu")
                opt.load_state_dict(saved)
            for i, p in enumerate(model.parameters()):
                p.grad = numbers(*p.shape, seed=100 * k + i).to(dtype)
            opt.step()
        return [x for p in model.parameters() for x in (p, *(opt.state[p][n] for n in sorted(opt.state[p])))]

    for a, b in zip(run(None), run(3), strict=True):
        tolerances.exact(a, b)


class Memory(TorchDispatchMode):
    """Bytes of the tensors that torch operations create: now, and at most."""

    live = peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor):
            storage, size = out.untyped_storage(), out.untyped_storage().nbytes()
            if storage.data_ptr() not in {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}:
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self.free, size)
        return out

    def free(self, size: int) -> None:
        self.live -= size


def test_a_step_creates_no_tensor() -> None:
    slots = [slot((512, 512), 2, p, p, s) for p in (F32, BF16) for s in (F32, CODES)] + [slot((), 2)]
    with Memory() as memory:
        cpu.update(slots, hyper(2))
    assert memory.peak == 0


@pytest.mark.parametrize("level", [0, 2, "row"])
@pytest.mark.parametrize("columns", [1024, 1021])
def test_the_eager_twin_holds_three_full_size_temporaries_at_most(level: Any, columns: int) -> None:
    start = slot((32, columns), level)
    with Memory() as memory:
        adam(start.p, start.g, start.state["m"], start.state["v"], 1.0, hyper(level, maximize=True))
    folded = 0 if level == 0 else 2 * start.state["m"].nbytes
    assert memory.peak <= 3 * start.p.nbytes + folded


def test_state_of_another_level_is_refused_before_anything_is_written() -> None:
    start = slot((4, 64), "row")
    with pytest.raises(ValueError, match="at level 2"):
        cpu.update([start], hyper(2))
