"""Cases of `sharded_cases.py` that train models: FSDP2, tensor parallelism."""

from __future__ import annotations

import warnings
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from torchfoam import FOAM, GradientRelease

WORLD = 4
OPTIONS: list[dict[str, Any]] = [
    {"rule": rule, "state": state, "level": level}
    for (rule, state), level in zip(
        product(("adam", "mini", "muon"), ("float32", "bfloat16", "int8")), (2, 0, "row", "row", 2, 0, 0, "row", 2)
    )
]


class Net(nn.Module):
    """Even rows, uneven ones, and fewer than ranks: some of its shards are empty."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.middle, self.down = nn.Linear(12, 16), nn.Linear(16, 18), nn.Linear(18, 3)
        self.norm = nn.LayerNorm(16)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.up(x.to(self.up.weight.dtype)).relu())
        return self.down(self.middle(x).relu())


@cache
def mesh_of(*sizes: int) -> Any:
    """All ranks, in so many dimensions: of two, the first are replicas (or data), the second shards (or the model)."""
    return init_device_mesh("cpu", sizes, mesh_dim_names=("data", "model")[-len(sizes) :])


def one_rank() -> Any:
    """A mesh of this rank alone."""
    return mesh_of(WORLD, 1)["model"]


def fsdp(model: Any, mesh: Any = None, **policy: Any) -> nn.Module:
    mesh = mesh or mesh_of(WORLD)
    fully_shard(model.middle, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    return model


def batch(step: int, rank: int | None = None) -> Tensor:
    """One batch, the same on every rank, so that sums have the same bits in any order; or the rank's own."""
    return torch.randn(4, 12, generator=torch.Generator().manual_seed(100 * (rank or 0) + step))


def train(model: nn.Module, opt: Any, steps: int = 3, start: int = 0, clip: float = 0.0) -> None:
    for step in range(start, start + steps):
        opt.zero_grad()
        model(batch(step)).float().square().sum().backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        opt.step()


def whole(x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.full_tensor() if hasattr(x, "full_tensor") else x.detach().clone()


def alike(a: nn.Module, b: nn.Module, x: FOAM | None = None, y: FOAM | None = None, within: float = 0.0) -> None:
    """Weights, and all that two optimizers keep, within so much (0: to the bit). All is gathered first, then judged."""
    pairs = [(name, whole(p), whole(q)) for (name, p), q in zip(a.named_parameters(), b.parameters())]
    if x is not None and y is not None:
        states = zip(x.state_dict()["state"].items(), y.state_dict()["state"].values())
        for (i, mine), theirs in states:
            assert mine.keys() == theirs.keys()
            pairs += [(f"{i} {name}", whole(mine[name]), whole(theirs[name])) for name in mine]
    off = {n: (p.float() - q.float()).abs().max().item() for n, p, q in pairs if p.shape == q.shape}
    assert len(off) == len(pairs) and all(v <= within for v in off.values()), off


def moved(model: nn.Module) -> None:
    start = dict(Net().named_parameters())
    still = [n for n, p in model.named_parameters() if torch.equal(whole(p).float(), start[n].float())]
    assert not still, f"never stepped: {still}"


# ---------------------------------------------------------------------- FSDP2


def fsdp2_as_one_process() -> None:
    for k, options in enumerate(OPTIONS):
        dtype = (torch.float32, torch.bfloat16)[k % 2]
        plain, cut = Net(dtype), fsdp(Net(dtype))
        one, many = FOAM(plain, lr=0.01, **options), FOAM(cut, lr=0.01, **options)
        train(plain, one)
        train(cut, many)
        moved(cut)
        alike(plain, cut, one, many)
        here, there = many.state_bytes(), one.state_bytes()
        assert here < 0.45 * there, (here, there)  # a quarter, and what rows that do not divide add


def fsdp2_policies() -> None:
    """Mixed precision, HSDP and offloading change nothing but where things are: as FSDP2 on one rank."""
    half = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
    two = mesh_of(2, 2)
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (None, half), (two, {}), (two, half), (None, {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ]  # fmt: skip
    for (mesh, policy), options in product(kinds, (OPTIONS[2], OPTIONS[7])):
        apart, cut = fsdp(Net(), one_rank(), **policy), fsdp(Net(), mesh, **policy)
        one, many = FOAM(apart, lr=0.01, **options), FOAM(cut, lr=0.01, **options)
        train(apart, one)
        train(cut, many)
        moved(cut)
        alike(apart, cut, one, many)


def fsdp2_of_columns() -> None:
    """`shard_placement_fn` may cut columns."""

    def columns(p: nn.Parameter) -> Shard | None:
        return Shard(1) if p.ndim == 2 and p.shape[1] % WORLD == 0 else None

    for options in (OPTIONS[0], OPTIONS[2], OPTIONS[4]):
        plain, cut = Net(), fsdp(Net(), shard_placement_fn=columns)
        one, many = FOAM(plain, lr=0.01, **options), FOAM(cut, lr=0.01, **options)
        train(plain, one)
        train(cut, many)
        alike(plain, cut, one, many)


def fsdp2_batches_of_their_own() -> None:
    plain, cut = Net(), fsdp(Net())
    one, many = FOAM(plain, lr=0.01), FOAM(cut, lr=0.01)
    for step in range(4):
        cut(batch(step, dist.get_rank())).square().mean().backward()
        plain(torch.cat([batch(step, rank) for rank in range(WORLD)])).square().mean().backward()
        for model, opt in ((plain, one), (cut, many)):
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            opt.step()
            opt.zero_grad()
    alike(plain, cut, one, many, within=1e-6)


def fsdp2_clipping() -> None:
    plain, cut = Net(), fsdp(Net())
    train(plain, FOAM(plain, lr=0.01), clip=0.05)
    train(cut, FOAM(cut, lr=0.01), clip=0.05)
    alike(plain, cut, within=1e-6)  # the norm is summed in another order


def fsdp2_release() -> None:
    for options in (OPTIONS[0], OPTIONS[4], OPTIONS[8]):
        plain, cut = Net(), fsdp(Net())
        opt, one = FOAM(cut, lr=0.01, **options), FOAM(plain, lr=0.01, **options)
        with GradientRelease(opt):
            train(cut, opt)
            assert all(p.grad is None for p in cut.parameters())
        train(plain, one)
        moved(cut)
        alike(plain, cut, one, opt)
    plain, cut = Net(), fsdp(Net())
    for model in (cut, fsdp(Net(), one_rank()), plain):
        opt = FOAM(model, lr=0.01)
        try:
            release = GradientRelease(opt, clip=0.01, skip_nonfinite=True)
        except RuntimeError as error:  # replicas, for all that the library can know
            assert model is plain and "data-parallel replicas" in str(error)
            continue
        model(batch(0)).square().sum().backward()
        norm = float(release.grad_norm())
        opt.step()
        plain(batch(0)).square().sum().backward()
        expected = float(nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None]))
        plain.zero_grad()
        assert abs(norm - expected) < 1e-4 * expected, (norm, expected)
        if model is cut:
            first = {n: whole(p) for n, p in model.named_parameters()}
        else:
            assert all(torch.allclose(whole(p), first[n], atol=1e-6) for n, p in model.named_parameters())


def fsdp2_recomputed() -> None:
    """Activation checkpointing, with and without gradient release."""

    class Recomputed(Net):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    plain, cut, released = Recomputed(), fsdp(Recomputed()), fsdp(Recomputed())
    one, many, last = (FOAM(model, lr=0.01) for model in (plain, cut, released))
    train(plain, one)
    train(cut, many)
    with GradientRelease(last):
        train(released, last)
    alike(plain, cut, one, many)
    alike(plain, released, one, last)


def fsdp2_residuals() -> None:
    plain, cut = Net(), fsdp(Net())
    one, many = FOAM(plain), FOAM(cut)
    for model in (plain, cut):
        model(batch(0)).square().sum().backward()
    assert one.residual_ratio() == many.residual_ratio() != {}


def optimizer_made_before_sharding() -> None:
    model = Net()
    opt = FOAM(model)
    fsdp(model)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        train(model, opt)
    said = [str(w.message) for w in told if "fully_shard" in str(w.message)]
    assert len(said) == 1 and "make the optimizer after that" in said[0], told


# ---------------------------------------------------------------------- tensor parallelism


def tensor_parallel(model: nn.Module, mesh: Any) -> Any:
    """middle is cut by rows, down by columns: 9 of 18 on each of two ranks, which no block of 4 allows for."""
    return parallelize_module(model, mesh, {"middle": ColwiseParallel(), "down": RowwiseParallel()})


def tensor_parallel_as_one_process() -> None:
    two = mesh_of(2, 2)
    for options, data in product(OPTIONS, (False, True)):
        plain, cut = Net(), tensor_parallel(Net(), two["model"])
        if data:
            fully_shard(cut.middle, mesh=two["data"])
            fully_shard(cut.down, mesh=two["data"])
            fully_shard(cut, mesh=two["data"])
        one, many = FOAM(plain, lr=0.01, **options), FOAM(cut, lr=0.01, **options)
        train(plain, one)
        train(cut, many)
        moved(cut)
        # sums of products over ranks are in another order; muon and codes take a last bit for a step of their own
        rough = options["rule"] == "muon" or options["state"] != "float32"
        alike(plain, cut, within=2e-3 if rough else 1e-5)


def gradients_still_to_be_summed() -> None:
    """Under sequence parallelism a norm's gradient is a sum that no rank has made yet."""
    mesh = mesh_of(WORLD)
    norms: list[Any] = [nn.LayerNorm(12), nn.LayerNorm(12)]
    parallelize_module(norms[1], mesh, SequenceParallel(sequence_dim=1))
    x = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(1))
    for norm in norms:
        opt = FOAM(norm.named_parameters(), lr=0.1, level=0)
        out = norm(x if norm is norms[0] else x.chunk(WORLD, 1)[dist.get_rank()])
        weight = torch.randn(2, 8, 12, generator=torch.Generator().manual_seed(2))
        if norm is norms[1]:
            out, weight = out.to_local(), weight.chunk(WORLD, 1)[dist.get_rank()]
        (out * weight).sum().backward()
        if norm is norms[1]:
            assert any(x.is_partial() for x in norm.weight.grad.placements)
        opt.step()
    alike(norms[0], norms[1], within=1e-6)


MODELS = {
    f.__name__: f
    for f in (
        fsdp2_as_one_process, fsdp2_policies, fsdp2_of_columns, fsdp2_batches_of_their_own, fsdp2_clipping,
        fsdp2_release, fsdp2_recomputed, fsdp2_residuals, optimizer_made_before_sharding,
        tensor_parallel_as_one_process, gradients_still_to_be_summed,
    )
}  # fmt: skip
