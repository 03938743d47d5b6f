"""What holds of sharded weights, run by four gloo processes in one spawn: `test_sharded.py` starts them and reports.

`python sharded_cases.py RANK FOLDER [CASE ...]` runs the cases, which all ranks run in the same order, and writes
FOLDER/RANK.json: case -> what went wrong, or "".
"""

from __future__ import annotations

import json
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from itertools import product
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from sharded_models import MODELS
from torchfoam import FOAM

WORLD = 4
LEVELS = (0, 2, "row")
STATES = ("float32", "bfloat16", "int8")
RULES = ("adam", "mini", "muon")
# rows for four, for fewer (empty shards), columns cut between blocks of 4 and groups of 32, ragged, a stack, a filter
SHAPES: tuple[tuple[int, ...], ...] = ((8, 512), (3, 12), (7, 21), (3, 5, 16), (6, 2, 3, 3), (9,))
CASES: dict[str, Callable[[], None]] = {**MODELS}


def numbers(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def equal(a: Tensor, b: Tensor, what: Any) -> None:
    a, b = whole(a), whole(b)
    assert a.dtype == b.dtype and a.shape == b.shape, (what, a.dtype, b.dtype, a.shape, b.shape)
    if not torch.equal(a, b):
        off = (a.float() - b.float()).abs().max().item()
        raise AssertionError(f"{what}: {int((a != b).sum())} of {a.numel()} differ, by up to {off}")


def whole(x: Tensor) -> Tensor:
    return x.full_tensor() if hasattr(x, "full_tensor") else x  # type: ignore[operator]


# ---------------------------------------------------------------------- how a weight can be cut


def meshes() -> tuple[DeviceMesh, DeviceMesh]:
    return init_device_mesh("cpu", (WORLD,)), init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))


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


def weights(rule: str) -> list[Tensor]:
    shapes = [s for s in SHAPES if rule != "muon" or len(s) > 1]
    return [
        numbers(*shape, seed=i, dtype=dtype)
        for i, shape in enumerate(shapes)
        for dtype in (torch.float32, torch.bfloat16)
    ]


def both(
    cut: tuple[str, DeviceMesh, Callable[[int], list[Placement]]],
    rule: str,
    level: Any,
    state: str,
    steps: int = 2,
    **more: Any,
) -> tuple[FOAM, FOAM]:
    """The same steps of whole weights and of cut ones."""
    _, mesh, placements = cut
    made = []
    for place in (lambda x: x, lambda x: sharded(x, mesh, placements(x.ndim))):
        params = [nn.Parameter(place(x)) for x in weights(rule)]
        group = {"params": params, "level": level, "rule": rule, "state": state}
        opt = FOAM([group], lr=0.1, **more)
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
        one, many = both(cut, rule, level, state)
        same(one, many, (cut[0], level))


for _rule, _state in product(RULES, STATES):
    CASES[f"{_rule} {_state}"] = partial(exact, _rule, _state)


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
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
