"""Cases of `sharded_cases.py` that train and save models: FSDP2, tensor parallelism, checkpoints, other optimizers."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from torchfoam import FOAM, GradientRelease, from_adamw, param_groups, to_adamw

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


def fsdp(model: nn.Module, mesh: Any = None, **policy: Any) -> nn.Module:
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
        return x.full_tensor() if hasattr(x, "full_tensor") else x.detach().clone()  # type: ignore[operator]


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
        expected = float(nn.utils.get_total_norm([p.grad for p in plain.parameters()]))
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
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]

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


def tensor_parallel(model: nn.Module, mesh: Any) -> nn.Module:
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
    norms = [nn.LayerNorm(12), nn.LayerNorm(12)]
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
    alike(*norms, within=1e-6)


# ---------------------------------------------------------------------- checkpoints


def trained(options: dict[str, Any], mesh: Any = None, steps: int = 2) -> tuple[nn.Module, FOAM]:
    model = fsdp(Net(), mesh)
    opt = FOAM(model, lr=0.01, **options)
    train(model, opt, steps)
    return model, opt


def shared_folder() -> str:
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(name)
    return name[0]


def saved_and_loaded(
    options: dict[str, Any], others: dict[str, Callable[[], nn.Module]], save: Callable[[dict[str, Any], str], Any]
) -> None:
    model, opt = trained(options)
    folder = shared_folder()
    save({"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}, folder)
    train(model, opt, start=2)
    for make in others.values():
        other = make()
        again = FOAM(other, lr=0.5, **options)
        state = {"model": get_model_state_dict(other), "optim": get_optimizer_state_dict(other, again)}
        dcp.load(state, checkpoint_id=folder)
        set_model_state_dict(other, state["model"])
        set_optimizer_state_dict(other, again, state["optim"])
        train(other, again, start=2)
        alike(model, other, opt, again)


def targets() -> dict[str, Callable[[], nn.Module]]:
    two = mesh_of(2, 2)
    return {
        "four shards": lambda: fsdp(Net()),
        "two shards": lambda: fsdp(Net(), two),
        "one rank": lambda: fsdp(Net(), one_rank()),
        "whole": Net,
    }


def checkpoints_on_other_ranks() -> None:
    made = list(targets().items())
    for k, options in enumerate(OPTIONS):
        saved_and_loaded(options, dict([made[k % 4]]), lambda state, folder: dcp.save(state, checkpoint_id=folder))


def checkpoints_saved_while_training_goes_on() -> None:
    def save(state: dict[str, Any], folder: str) -> None:
        dcp.async_save(state, checkpoint_id=folder, process_group=dist.new_group(backend="gloo")).result()

    saved_and_loaded(OPTIONS[2], {"two shards": targets()["two shards"]}, save)


def full_state_dicts() -> None:
    """On rank 0 alone, from there to all; and the state dict of one process into shards and back."""
    for options in (OPTIONS[2], OPTIONS[7]):
        model, opt = trained(options)
        everything = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = copy.deepcopy(get_model_state_dict(model, options=everything))  # whole tensors on CPUs are not copied
        full = copy.deepcopy(get_optimizer_state_dict(model, opt, options=everything))
        if dist.get_rank() == 0:
            shapes = {tuple(x.shape) for s in full["state"].values() for x in s.values()}
            assert all(not hasattr(x, "full_tensor") for s in full["state"].values() for x in s.values()), shapes
        train(model, opt, start=2)
        other = fsdp(Net())
        again = FOAM(other, lr=0.5, **options)
        spread = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(other, weights, options=spread)
        set_optimizer_state_dict(other, again, full, options=spread)
        train(other, again, start=2)
        alike(model, other, opt, again)


def state_dicts_of_one_process() -> None:
    for options in OPTIONS[::2]:
        plain, cut = Net(), fsdp(Net())
        one, many = FOAM(plain, lr=0.01, **options), FOAM(cut, lr=0.5, **options)
        train(plain, one, 2)
        set_model_state_dict(cut, plain.state_dict(), options=StateDictOptions(full_state_dict=True))
        many.load_state_dict(one.state_dict())
        alike(plain, cut, one, many)
        train(plain, one, 2, start=2)
        train(cut, many, 2, start=2)
        alike(plain, cut, one, many)
        sharded = many.state_dict()
        again = fsdp(Net(), one_rank())
        for target in (Net(), again):  # neither is over these ranks
            try:
                FOAM(target, **options).load_state_dict(sharded)
            except ValueError as error:
                assert "full_state_dict=True" in str(error)
            else:
                raise AssertionError("sharded state was loaded into whole parameters")


# ---------------------------------------------------------------------- other optimizers


def adamw_in_and_out() -> None:
    for level in (2, "row"):
        results = []
        for model in (Net(), fsdp(Net())):
            adamw = torch.optim.AdamW(model.named_parameters(), lr=0.01)
            train(model, adamw, 2)
            opt = from_adamw(FOAM(model, lr=0.01, level=level), adamw)
            train(model, opt, 2, start=2)
            out = to_adamw(opt)
            train(model, out, 2, start=4)
            results.append((model, out))
        (a, x), (b, y) = results
        alike(a, b)
        for p, q in zip(a.parameters(), b.parameters()):
            assert torch.equal(whole(x.state[p]["exp_avg"]), whole(y.state[q]["exp_avg"]))


def adamw_state_dicts() -> None:
    """Sharded ones and those of one process fold alike; a sharded one does not fold into whole weights."""
    plain, cut = Net(), fsdp(Net())
    kept = []
    for model in (plain, cut):
        adamw = torch.optim.AdamW(model.named_parameters(), lr=0.01)
        train(model, adamw, 2)
        kept.append(adamw.state_dict())
    made = [from_adamw(FOAM(cut), state).state_dict()["state"] for state in kept]
    pairs = [(i, name, whole(x), whole(made[1][i][name])) for i in made[0] for name, x in made[0][i].items()]
    off = [(i, name) for i, name, x, y in pairs if not torch.equal(x, y)]
    assert not off and any(whole(s["m"]).ne(0).any() for s in made[0].values()), off
    try:
        from_adamw(FOAM(plain), kept[1])
    except ValueError as error:
        assert "exp_avg is sharded over ranks" in str(error)
    else:
        raise AssertionError("sharded moments were folded into whole parameters")


def state_dicts_of_the_same_ranks() -> None:
    for options in (OPTIONS[2], OPTIONS[4]):
        model, opt = trained(options)
        kept = copy.deepcopy(opt.state_dict())
        other, again = trained(options)
        train(model, opt, start=2)
        again.zero_grad()
        for mine in again.state.values():
            for x in mine.values():
                (x.to_local() if hasattr(x, "to_local") else x).zero_()
        again.load_state_dict(kept)
        train(other, again, start=2)
        alike(model, other, opt, again)


def zero_redundancy() -> None:
    plain, spread = Net(), Net()
    one = FOAM(plain, lr=0.01)
    many = ZeroRedundancyOptimizer(param_groups(spread, names=False), FOAM, lr=0.01)
    train(plain, one)
    train(spread, many)
    alike(plain, spread)


MODELS = {
    f.__name__: f
    for f in (
        fsdp2_as_one_process, fsdp2_policies, fsdp2_of_columns, fsdp2_batches_of_their_own, fsdp2_clipping,
        fsdp2_release, fsdp2_recomputed, fsdp2_residuals, optimizer_made_before_sharding,
        tensor_parallel_as_one_process, gradients_still_to_be_summed,
        checkpoints_on_other_ranks, checkpoints_saved_while_training_goes_on, full_state_dicts,
        state_dicts_of_one_process, adamw_in_and_out, adamw_state_dicts,
        state_dicts_of_the_same_ranks, zero_redundancy,
    )
}  # fmt: skip
