"""docs/parity.md is true: what each backend takes, what goes together, and what is refused with which words.

`python tests/test_parity.py` writes the page's first table anew from the backends.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

from foamlab import settled
from foamlab.config import RunConfig, TaskConfig, TrainConfig
from foamlab.models.language import check_head
from torchfoam import FOAM, GradientRelease, from_adamw
from torchfoam.kernels import BACKENDS, choose
from torchfoam.rules import RULES
from torchfoam.state import STATES

PAGE = Path(__file__).parents[1] / "docs" / "parity.md"
BEGIN, END = "<!-- begin: python tests/test_parity.py -->\n", "<!-- end -->\n"
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = {"eager": "cpu", "cpu": "cpu", "triton": "cuda"}


def refusal(backend: str, rule: str, state: str, dtype: torch.dtype) -> str | None:
    """Why the backend does not take a matrix of that kind on its own device, or None."""
    device = torch.device(DEVICES[backend])
    facts = {"dtype": dtype, "ndim": 2, "device": device, "is_cuda": device.type == "cuda", "shape": (4, 8)}
    matrix: Any = SimpleNamespace(**facts, is_contiguous=lambda: True)
    return BACKENDS[backend].refuses(matrix, {"rule": rule, "state": state, "level": 2})


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def table() -> str:
    """The table of rules, states and backends, and below it the reasons."""
    lines = ["| rule | state | " + " | ".join(BACKENDS) + " |", "| --- | --- |" + " --- |" * len(BACKENDS)]
    reasons: dict[str, dict[str, None]] = {backend: {} for backend in BACKENDS}
    for rule in RULES:
        for state in STATES:
            cells = []
            for backend in BACKENDS:
                answers = {name(dtype): refusal(backend, rule, state, dtype) for dtype in DTYPES}
                reasons[backend] |= dict.fromkeys(r for r in answers.values() if r)
                taken = [d for d, reason in answers.items() if reason is None]
                cells.append("all" if len(taken) == len(DTYPES) else ", ".join(taken) or "no")
            lines.append(f"| {rule} | {state} | " + " | ".join(cells) + " |")
    why = [f"* {backend}: {reason}" for backend, found in reasons.items() for reason in found]
    return "\n".join([*lines, "", "Why not:", "", *why]) + "\n"


def test_the_table_of_backends_is_what_they_take() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert text.split(BEGIN)[1].split(END)[0] == table(), "run python tests/test_parity.py"


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_backend_asked_for_works_or_says_why(backend: str) -> None:
    """What the table says of this machine's backends, by the constructor and by a step."""
    if BACKENDS[backend].unavailable():
        with pytest.raises(ValueError, match=re.escape(str(BACKENDS[backend].unavailable()))):
            choose(backend, nn.Parameter(torch.ones(4, 8)), {"rule": "adam", "state": "float32", "level": 2})
        return
    device = DEVICES[backend] if backend != "triton" or torch.cuda.is_available() else "cpu"
    for rule in RULES:
        for state in STATES:
            for dtype in DTYPES:
                w = nn.Parameter(torch.ones(4, 8, dtype=dtype, device=device))
                make = lambda w=w, rule=rule, state=state: FOAM([w], rule=rule, state=state, backend=backend)  # noqa: E731
                if reason := refusal(backend, rule, state, dtype):
                    with pytest.raises(ValueError, match=re.escape(reason)):
                        make()
                    continue
                opt = make()
                w.grad = torch.linspace(-1, 1, 32, device=device).view(4, 8).to(dtype)
                before = w.detach().clone()
                opt.step()
                assert w.isfinite().all() and not torch.equal(w, before), (rule, state, dtype)


# ---------------------------------------------------------------------- what is refused


def matrix(*shape: int, **more: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(*(shape or (4, 8)), **more))


def second_backward() -> None:
    w = matrix()
    GradientRelease(FOAM([w]))
    w.sum().backward()
    w.sum().backward()


def sparse_gradient() -> None:
    w = matrix()
    w.grad = torch.ones(4, 8).to_sparse()
    FOAM([w]).step()


def fsdp1() -> None:
    w = matrix()
    w._fsdp_flattened = True  # type: ignore[attr-defined]  # as FullyShardedDataParallel leaves a weight
    FOAM([w])


def partial_sum() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        FOAM([nn.Parameter(DTensor.from_local(matrix().detach(), init_device_mesh("cpu", (2,)), [Partial()]))])
    finally:
        dist.destroy_process_group()


def wrapped_gradient() -> None:
    w = matrix()
    w.grad = TwoTensor(torch.ones(4, 8), torch.ones(4, 8))
    FOAM([w]).step()


def scaled_loss() -> None:
    w, scaler = matrix(), torch.amp.GradScaler("cpu")
    GradientRelease(FOAM([w]))
    scaler.scale(w.sum()).backward()


def reentrant() -> None:
    w = matrix()
    GradientRelease(FOAM([w]))
    checkpoint(torch.mul, w, w, use_reentrant=True).sum().backward()


def released_twice() -> None:
    opt = FOAM([matrix()])
    GradientRelease(opt), GradientRelease(opt)


def adamw_into(rule: str) -> Callable[[], Any]:
    def ask() -> None:
        w = matrix()
        adamw = torch.optim.AdamW([w])
        w.grad = torch.ones(4, 8)
        adamw.step()
        from_adamw(FOAM([w], rule=rule), adamw)

    return ask


def setting(**changes: Any) -> Callable[[], Any]:
    return lambda: settled.check_switches(TrainConfig(**{"clip": 0.0, **changes}))


REFUSED: dict[str, Callable[[], Any]] = {
    "rule muon, a vector": lambda: FOAM([{"params": [matrix(8)], "level": 0, "rule": "muon"}]),
    "rule mini, second_moment square_mean": lambda: FOAM([matrix()], rule="mini", second_moment="square_mean"),
    "AdamW's state into rule mini": adamw_into("mini"),
    "AdamW's state into rule muon": adamw_into("muon"),
    "sparse gradients": sparse_gradient,
    "complex parameters": lambda: FOAM([matrix(dtype=torch.complex64)]),
    "weights sharded by FSDP1": fsdp1,
    "a DTensor that is a partial sum": partial_sum,
    "gradients that are wrappers of other tensors": wrapped_gradient,
    "parameters of a lazy module": lambda: FOAM(nn.LazyLinear(4)),
    "gradient release, several backward passes a step": second_backward,
    "gradient release, a GradScaler": scaled_loss,
    "gradient release, reentrant checkpointing": reentrant,
    "gradient release, twice": released_twice,
    "train.release, train.clip": setting(release=True, clip=1.0),
    "train.release, train.micro_batch below train.batch": setting(release=True, batch=8, micro_batch=4),
    "train.release, train.residual_every": setting(release=True, residual_every=10),
    "train.release, several processes": lambda: settled.check_optimizer(TrainConfig(release=True), FOAM([matrix()]), 2),
    "train.release, another optimizer": lambda: settled.check_optimizer(
        TrainConfig(release=True), torch.optim.SGD([matrix()]), 1
    ),
    "train.clip, train.clip_each": setting(clip=1.0, clip_each=1.0),
    "train.chunked_loss, a model without a head": lambda: check_head(nn.Linear(2, 2)),
    "train.chunked_loss, a task": lambda: settled.check(
        RunConfig(train=TrainConfig(chunked_loss=64, clip=1.0), task=TaskConfig("cola"))
    ),
}


def rows(text: str) -> dict[str, str]:
    part = text.split("## What is refused")[1].split("\n## ")[0]
    return dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", part, re.M)[1:])


def test_the_page_names_every_refusal() -> None:
    assert list(rows(PAGE.read_text(encoding="utf-8")))[1:] == list(REFUSED)


@pytest.mark.parametrize("asked", REFUSED)
def test_what_is_refused_says_so(asked: str) -> None:
    words = rows(PAGE.read_text(encoding="utf-8"))[asked]
    with pytest.raises((ValueError, RuntimeError, settled.UserError), match=re.escape(words.split(" … ")[0])) as error:
        REFUSED[asked]()
    assert all(part in str(error.value) for part in words.split(" … "))


if __name__ == "__main__":
    old = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(old.split(BEGIN)[0] + BEGIN + table() + END + old.split(END)[1], encoding="utf-8")
