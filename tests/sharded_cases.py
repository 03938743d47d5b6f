"""What holds of sharded weights, run by four gloo processes in one spawn: `test_sharded.py` starts them and reports.

`python sharded_cases.py FOLDER [CASE ...]` runs the cases, which all ranks run in the same order, and writes
FOLDER/RANK.json: case -> what went wrong, or "". Ranks are forked, so that what they import is imported once.
"""

from __future__ import annotations

import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch._dynamo  # FSDP2 imports it when it first shards
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.utils._python_dispatch import TorchDispatchMode

from sharded_checkpoints import CHECKPOINTS
from sharded_models import MODELS, WORLD, mesh_of
from torchfoam import FOAM

LEVELS = (0, 2, "row")
STATES = ("float32", "bfloat16", "int8")
RULES = ("adam", "mini", "muon")
# rows for four, for fewer (empty shards), columns cut between blocks of 4 and groups of 32, ragged, a stack, a filter
SHAPES: tuple[tuple[int, ...], ...] = ((8, 512), (3, 12), (7, 21), (3, 5, 16), (6, 2, 3, 3), (9,))
CASES: dict[str, Callable[[], None]] = {**MODELS, **CHECKPOINTS}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(a: Tensor, b: Tensor, what: Any) -> None:
    a, b = whole(a), whole(b)
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    if not torch.equal(a, b):
        off = (a.float() - b.float()).abs().max().item()
        raise AssertionError(f"{what}: {int((a != b).sum())} of {a.numel()} differ, by up to {off}")


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x


# ---------------------------------------------------------------------- how a weight can be cut


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return mesh_of(WORLD), mesh_of(2, 2)


def cuts() -> Iterator[tuple[str, DeviceMesh, Callable[[int], list[Placement]]]]:
    """Name, mesh, and the placements of a tensor of so many dimensions."""
    one, two = meshes()
    last = lambda n: n - 1  # noqa: E731
    yield "rows", one, lambda n: [Shard(0)]
    yield "columns", one, lambda n: [Shard(last(n))]
    yield "second dimension", one, lambda n: [Shard(min(1, last(n)))]
    yield "replicated rows", two, lambda n: [Replicate(), Shard(0)]
    yield "rows and columns", two, lambda n: [Shard(0), Shard(last(n))]
    yield "columns twice", two, lambda n: [Shard(last(n)), Shard(last(n))]
    yield "rows over rows", two, lambda n: [_StridedShard(0, split_factor=2), Shard(0)]


def sharded(x: Tensor, mesh: DeviceMesh, placements: list[Placement]) -> Tensor:
    return distribute_tensor(x, mesh, [Replicate()] * mesh.ndim, src_data_rank=None).redistribute(placements=placements)


def weights(rule: str, turn: int) -> list[Tensor]:
    """One of every shape, float32 and bfloat16 in turn."""
    shapes = [s for s in SHAPES if rule != "muon" or len(s) > 1]
    dtypes = (torch.float32, torch.bfloat16)
    return [numbers(*shape, seed=i, dtype=dtypes[(i + turn) % 2]) for i, shape in enumerate(shapes)]


def both(
    cut: tuple[str, DeviceMesh, Callable[[int], list[Placement]]],
    rule: str,
    level: Any,
    state: str,
    turn: int,
    steps: int = 2,
) -> tuple[FOAM, FOAM]:
    """The same steps of whole weights and of cut ones."""
    _, mesh, placements = cut
    made = []
    for place in (lambda x: x, lambda x: sharded(x, mesh, placements(x.ndim))):
        params = [nn.Parameter(place(x)) for x in weights(rule, turn)]
        group = {"params": params, "level": level, "rule": rule, "state": state}
        opt = FOAM([group], lr=0.1)
        for step in range(steps):
            for i, p in enumerate(params):
                p.grad = place(numbers(*p.shape, seed=100 * step + i, dtype=p.dtype))
            opt.step()
        made.append(opt)
    return made[0], made[1]


def same(one: FOAM, many: FOAM, what: Any) -> None:
    """Weights and all that is kept, to the bit."""
    for k, (p, q) in enumerate(zip(one.param_groups[0]["params"], many.param_groups[0]["params"])):
        equal(p, q, (*what, k, tuple(p.shape), p.dtype))
        assert one.state[p].keys() == many.state[q].keys()
        for name, x in one.state[p].items():
            equal(x, many.state[q][name], (*what, k, tuple(p.shape), p.dtype, name))


def exact(rule: str, state: str) -> None:
    shift = STATES.index(state)  # every cut with every state, and over the states with every level
    for k, cut in enumerate(cuts()):
        level = LEVELS[(k + shift) % len(LEVELS)]
        one, many = both(cut, rule, level, state, turn=k + shift)
        same(one, many, (cut[0], level))


for _rule, _state in product(RULES, STATES):
    CASES[f"{_rule} {_state}"] = partial(exact, _rule, _state)


def words(rule: str, shape: tuple[int, ...], mesh: DeviceMesh, placements: list[Placement]) -> str:
    """What a step at level 2 communicates, as docs/sharding.md says it."""
    p = nn.Parameter(sharded(numbers(*shape, seed=0), mesh, placements))
    opt = FOAM([{"params": [p], "level": 2, "rule": rule}])
    p.grad = sharded(numbers(*shape, seed=1), mesh, placements)
    with Traffic() as traffic:
        opt.step()
    said = {torch.float32: "the gradient's rows", torch.bfloat16: "the update"}
    return ", ".join(dict.fromkeys(said[dtype] for dtype in traffic.sent)) or "nothing"


class Traffic(TorchDispatchMode):
    """The dtypes of all that is handed to a collective, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # to see what it does inside
        if func.namespace in ("c10d", "_c10d_functional", "c10d_functional") and "wait" not in str(func):
            self.sent.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


def communication() -> None:
    one, two = meshes()
    rows: dict[str, tuple[tuple[int, ...], DeviceMesh, list[Placement]]] = {
        "by rows (FSDP2)": ((8, 20), one, [Shard(0)]),
        "by rows, in replicas (HSDP)": ((8, 20), two, [Replicate(), Shard(0)]),
        "by rows twice (FSDP2 over tensor parallelism)": ((8, 20), two, [_StridedShard(0, split_factor=2), Shard(0)]),
        "by columns, between blocks": ((8, 32), one, [Shard(1)]),
        "by columns, through blocks": ((8, 20), one, [Shard(1)]),
        "by rows and by columns, through blocks": ((8, 20), two, [Shard(0), Shard(1)]),
    }
    page = (Path(__file__).parents[1] / "docs" / "sharding.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| (by [^|]+) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)
    found = [(name, *(words(rule, *cut) for rule in RULES)) for name, cut in rows.items()]
    assert found == table, found
    stack = (4, 3, 8)
    assert words("muon", stack, one, [Shard(0)]) == "nothing" and words("muon", stack, one, [Shard(1)]) == "the update"


CASES["communication"] = communication


def main(rank: int, folder: Path, names: list[str]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'store'}", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    torch.set_num_threads(1)
    for said in ("FOAM was given parameters without names", "a group states level=", "FSDP2-wrapped module"):
        warnings.filterwarnings("ignore", message=said)
    wrong = {}
    for name, function in CASES.items():
        if names and name not in names:
            continue
        try:
            start = perf_counter()
            function()
            wrong[name] = ""
            print(f"{perf_counter() - start:5.1f} s  {name}", flush=True)
        except Exception:
            wrong[name] = traceback.format_exc()
        (folder / f"{rank}.json").write_text(json.dumps(wrong))
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    ranks = [get_context("fork").Process(target=main, args=(r, Path(sys.argv[1]), sys.argv[2:])) for r in range(WORLD)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
