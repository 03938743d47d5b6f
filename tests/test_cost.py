"""What `step_bytes` says beforehand is what a real step takes, and who takes it."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from torchfoam import FOAM, backends, step_bytes
from torchfoam.kernels import BACKENDS, eager
from torchfoam.rules import RULES
from torchfoam.state import STATES


class Real(TorchDispatchMode):
    """The most bytes of real memory that torch operations held at once, told by address."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = {x.untyped_storage().data_ptr() for x in args if isinstance(x, Tensor)}
        for x in out if isinstance(out, (list, tuple)) else [out]:
            if isinstance(x, Tensor) and (address := x.untyped_storage().data_ptr()) not in {0, *before, *self.alive}:
                self.alive[address] = x.untyped_storage().nbytes()
                self.most = max(self.most, sum(self.alive.values()))
                weakref.finalize(x.untyped_storage(), self.alive.pop, address)
        return out


def real(p: Tensor, options: dict[str, Any], backend: str) -> int:
    w = nn.Parameter(p.clone())
    opt = FOAM([{"params": [w], "level": 2, **options}], backend=backend)
    w.grad = torch.ones_like(w)
    opt.step()
    with Real() as memory:
        opt.step()
    return memory.most


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_is_said_is_what_a_real_step_takes(
    rule: str, state: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(eager.SLAB, "cpu", 1 << 12)  # the same steps, on smaller slabs
    for shape in [(12, 40), (96, 130)]:  # whole, and in slabs
        for level in (0, 2, "row"):
            options: dict[str, Any] = {"rule": rule, "state": state, "level": level}
            p = torch.ones(*shape, dtype=dtype)
            said = step_bytes(p.to("meta"), options, "cpu", "eager")
            took = real(p, options, "eager")
            assert said.backend == "eager" and took > 0
            assert 0.98 * took <= said.bytes <= 1.02 * took + 64, (said, took, shape, level)


@pytest.mark.skipif(backends()["cpu"] != "ok", reason=backends()["cpu"])
def test_the_kernel_needs_nothing_but_copies_of_what_has_gaps() -> None:
    p = torch.ones(64, 96)
    assert step_bytes(p) == ("cpu", 0) and real(p, {}, "cpu") == 0
    gaps = torch.ones(96, 64).t()
    w = nn.Parameter(gaps)
    opt = FOAM([{"params": [w], "level": 2}], backend="cpu")
    w.grad = torch.ones_like(w)
    with Real() as memory:
        opt.step()
    assert step_bytes(w, opt.param_groups[0]) == ("cpu", memory.most) and memory.most == 2 * p.nbytes


def test_who_steps_on_a_device_that_is_not_here() -> None:
    p = torch.empty(64, 64, device="meta")
    assert step_bytes(p, {"rule": "adam"}, "cuda", "eager").bytes > 3 * p.nbytes
    for options in ({"rule": "muon"}, {"rule": "mini"}, {"state": "int8"}):
        assert step_bytes(p, options, "cuda").backend == "eager"
    assert step_bytes(p).backend == "eager"  # it is on the meta device, and so steps there
    if not torch.cuda.is_available():
        assert step_bytes(p, None, "cuda") == ("triton", 0)
    for name in BACKENDS:  # what is chosen is what can be asked for
        for device in ("cpu", "cuda"):
            if step_bytes(p, None, device).backend == name:
                assert step_bytes(p, None, device, name) == step_bytes(p, None, device)


def test_the_choice_is_that_of_a_step() -> None:
    for rule in RULES:
        for dtype in (torch.float32, torch.float64, torch.float16):
            used = []
            w = nn.Parameter(torch.ones(8, 8, dtype=dtype))
            opt = FOAM([w], rule=rule)
            w.grad = torch.ones_like(w)
            used = [backend.name for _, backend, _ in opt._work(opt.param_groups[0], [(0, w)])]
            assert used == [step_bytes(w, opt.param_groups[0]).backend], (rule, dtype)


def test_what_cannot_step_is_refused_with_the_reason() -> None:
    p = torch.empty(8, 8, device="meta")
    for options, device, backend, words in (
        ({"rule": "muon"}, "cpu", "cpu", "only|backend 'cpu' cannot be used"),
        ({"state": "int8"}, "cuda", "triton", "backend 'triton' cannot be used: it keeps"),
        ({}, "cuda", "cpu", "cannot reach a parameter on cuda"),
        ({}, "cpu", "tritn", "did you mean 'triton'"),
        ({"levl": 3}, "cpu", None, "did you mean 'level'"),
        ({"level": -1}, "cpu", None, "level must be"),
    ):
        with pytest.raises(ValueError, match=words):
            step_bytes(p, options, device, backend)
    for q, options, words in (
        (torch.ones(3), {"rule": "muon"}, "only matrices"),
        (torch.ones(3, dtype=torch.int64), {}, "floating-point parameters, got torch.int64"),
    ):
        with pytest.raises(ValueError, match=words):
            step_bytes(q, options)
