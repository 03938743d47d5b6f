"""Parameters that are no plain tensors: DTensors, quantised and fake ones, FSDP1's flat ones, subclasses of users."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.testing._internal.distributed.fake_pg import FakeStore  # collectives that return at once
from torch.testing._internal.two_tensor import TwoTensor

from problems import numbers
from tolerances import exact
from torchfoam import FOAM, from_adamw, param_groups, to_adamw
from torchfoam.kernels import BACKENDS
from torchfoam.memory import whole
from torchfoam.shard import local


class Quantised(Tensor):
    """As torchao's quantised training weights: a wrapper of codes that knows few operations."""

    codes: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor) -> Quantised:
        made: Quantised = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)
        made.codes = codes
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].codes)
        raise NotImplementedError(f"{func} is not known to Quantised")


class Kept(TwoTensor):
    """Arithmetic that is thrown away: a step leaves it as it was."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func._schema.is_mutable:
            return args[0]
        return super().__torch_dispatch__(func, types, args, kwargs)


class Mine(nn.Parameter):
    """A user's own parameter: memory like any other."""


@pytest.fixture
def two_ranks() -> Iterator[Any]:
    """This process as rank 0 of two."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def two(*shape: int, kind: Any = TwoTensor) -> Any:
    return nn.Parameter(kind(numbers(*shape, dtype=torch.float32), numbers(*shape, dtype=torch.float32)))


def swap(opt: FOAM, old: nn.Module, new: nn.Module) -> None:
    """Let the optimizer hold the parameters of another model, as Accelerate does after fully_shard."""
    pairs = dict(zip(old.parameters(), new.parameters()))
    for group in opt.param_groups:
        group["params"] = [pairs[p] for p in group["params"]]


@pytest.mark.parametrize("backend", [None, *BACKENDS])
def test_sharded_weights_swapped_in_get_a_state_of_their_own(two_ranks: Any, backend: str | None) -> None:
    from torch.distributed.fsdp import fully_shard

    if backend and BACKENDS[backend].unavailable():
        pytest.skip("not on this machine")
    late: nn.Module = layers()
    model: Any = layers()
    opt = FOAM(late, backend=backend)
    fully_shard(model, mesh=two_ranks)
    swap(opt, late, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = [local(p).clone() for p in model.parameters()]
    opt.step()
    opt.state_dict()
    assert set(opt.state) == set(model.parameters())
    for p, old in zip(model.parameters(), before):
        m = opt.state[p]["m"]
        assert m.placements == p.placements and m.shape == (
            *p.shape[:-1],
            p.shape[-1] // (4 if p.ndim > 1 else 1),
        )
        assert local(m).shape[0] == 4 and not (local(p) == old).any()
    assert opt.state_bytes() == 2 * (2 * (4 * 2 + 4) * 4 + 2 * 4)  # half of everything but the counts


def test_the_state_of_whole_weights_is_not_used_for_sharded_ones(two_ranks: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    late, model = layers(), layers()
    opt = FOAM(late)
    fully_shard(model, mesh=two_ranks)
    pairs = dict(zip(late.parameters(), model.parameters()))
    swap(opt, late, model)
    for old, p in pairs.items():
        opt.state[p] = opt.state.pop(old)
        p.grad = torch.zeros_like(p)
    with pytest.raises(ValueError, match="whose gradient or state is whole, or cut in another way: build a new FOAM"):
        opt.step()


def test_a_model_sharded_on_the_meta_device_can_be_planned_with(two_ranks: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = layers()
    fully_shard(model, mesh=two_ranks)
    opt = FOAM(model)
    assert opt.state_bytes() == 2 * (2 * (4 * 2 + 4) * 4 + 2 * 4)
    model.to_empty(device="cpu")  # values come later
    for p in model.parameters():
        p.grad = torch.ones_like(p)
        local(p).zero_()
    opt.step()
    assert all(local(p).ne(0).all() and local(opt.state[p]["m"]).device.type == "cpu" for p in model.parameters())


def test_a_sum_that_is_still_to_come_is_no_parameter(two_ranks: Any) -> None:
    p = nn.Parameter(DTensor.from_local(torch.ones(4, 8), two_ranks, [Partial()]))
    with pytest.raises(ValueError, match="still to be summed over ranks"):
        FOAM([p])


@pytest.mark.parametrize("original", [True, False], ids=["original", "flat"])
def test_fsdp1_is_refused_by_name(two_ranks: Any, original: bool) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = layers()
    early = FOAM(model)
    wrapped = FullyShardedDataParallel(model, use_orig_params=original, device_id=torch.device("cpu"))
    with pytest.raises(ValueError, match="FSDP1 hands over flat pieces"):
        FOAM(wrapped)
    with pytest.raises(ValueError, match="FSDP1 hands over flat pieces"):
        FOAM(wrapped.parameters())
    if original:  # the parameters of before are pieces now
        for p in wrapped.parameters():
            p.grad = torch.zeros_like(p)
        with pytest.raises(ValueError, match="was sharded after the optimizer was made: FSDP1"):
            early.step()


def test_a_wrapper_that_torch_can_compute_with_steps_as_a_plain_weight() -> None:
    wrapper, plain = two(4, 8), nn.Parameter(numbers(4, 8, dtype=torch.float32))
    assert not whole(wrapper) and whole(plain)
    for p in (wrapper, plain):
        opt = FOAM([("up.weight", p)], lr=0.1, backend="eager")
        for k in range(3):
            p.grad = numbers(4, 8, seed=k, dtype=torch.float32)
            opt.step()
    exact(wrapper.a, plain)
    exact(wrapper.b, plain)


@pytest.mark.parametrize("state", ["float32", "int8"])
def test_a_wrapper_that_cannot_be_stepped_is_refused_before_a_weight_moves(state: str) -> None:
    before = Quantised(torch.ones(4, 8, dtype=torch.int8))
    for p, why in (
        (
            nn.Parameter(before),
            r"cannot be used on a Quantised of shape \(4, 8\): torch does not know the arithmetic .*aten",
        ),
        (two(4, 8, kind=Kept), "cannot be used on a Kept .*: its weights do not move"),
    ):
        with pytest.raises(ValueError, match=why):
            FOAM([p], state=state)
        w = nn.Parameter(torch.ones(4, 8))
        opt = FOAM([w, nn.Parameter(torch.ones(4, 8))], state=state)
        opt.param_groups[0]["params"][1] = p  # swapped in
        w.grad = p.grad = torch.ones(4, 8)
        with pytest.raises(ValueError, match=why):
            opt.step()
        exact(w, torch.ones(4, 8))
        assert opt.state[w]["step"] == 0
        with pytest.raises(ValueError, match="backend 'cpu' cannot be used: it reads memory, of which a"):
            FOAM([p], backend="cpu")


def test_a_gradient_or_state_of_another_kind_is_refused() -> None:
    w, x = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))
    opt = FOAM([w, x])
    w.grad, x.grad = torch.ones(4, 8), two(4, 8).detach()
    with pytest.raises(ValueError, match=r"Parameter of shape \(4, 8\) whose gradient or state is a TwoTensor"):
        opt.step()
    x.grad = torch.ones(4, 8)
    opt.state[x]["v"] = two(4, 2).detach()
    with pytest.raises(ValueError, match="whose gradient or state is a TwoTensor"):
        opt.step()
    exact(w, torch.ones(4, 8))


def freed(x: Tensor, left: int = 0) -> Tensor:
    """x as an engine leaves what it has gathered and given back; `left` bytes of it are there."""
    x.untyped_storage().resize_(left)
    return x


NO_MEMORY = {
    "freed": freed,
    "cut off": lambda x: freed(x, left=2),
    "functional": torch._to_functional_tensor,
    "stated zeros": lambda x: torch._efficientzerotensor(x.shape, dtype=x.dtype),
}


@pytest.mark.parametrize("kind", NO_MEMORY)
@pytest.mark.parametrize("state", ["float32", "int8"])
def test_what_has_no_memory_is_refused_before_a_weight_moves(kind: str, state: str) -> None:
    def optimizer() -> tuple[FOAM, nn.Parameter, nn.Parameter]:
        w, x = (nn.Parameter(torch.ones(4, 8)) for _ in range(2))
        w.grad, x.grad = torch.ones(4, 8), torch.ones(4, 8)
        return FOAM([("w", w), ("x", x)], state=state), w, x

    names = ["weight", "gradient", *optimizer()[0].state_dict()["state"][0]]
    assert len(names) == (7 if state == "int8" else 5)
    for name in names:
        opt, w, x = optimizer()
        if name == "weight":
            x.data = NO_MEMORY[kind](x.data)
        elif name == "gradient":
            x.grad = NO_MEMORY[kind](torch.ones(4, 8))
        else:
            opt.state[x][name] = NO_MEMORY[kind](opt.state[x][name])
        with pytest.raises(ValueError, match=rf"shape \(4, 8\): its {name} has no memory"):
            opt.step()
        exact(w, torch.ones(4, 8))
        assert opt.state[w]["step"] == 0


def test_a_gradient_inside_a_transform_of_torch_func_is_refused() -> None:
    w = nn.Parameter(torch.ones(4, 8))
    opt = FOAM([("w", w)])

    def step(g: Tensor) -> Tensor:
        w.grad = g
        opt.step()
        return g

    with pytest.raises(ValueError, match="its gradient has no memory"):
        torch.func.vmap(step)(torch.ones(3, 4, 8))
    exact(w, torch.ones(4, 8))


def test_a_gradient_of_one_number_spread_out_is_a_gradient() -> None:
    w, x = nn.Parameter(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))
    w.grad, x.grad = torch.ones(1).expand(4, 8), torch.ones(4, 8)
    FOAM([("w", w), ("x", x)]).step()
    exact(w.detach(), x.detach())
    assert not torch.equal(w, torch.ones(4, 8))


def test_moments_without_memory_are_not_loaded_folded_or_unfolded() -> None:
    w = nn.Parameter(torch.ones(4, 8))
    opt, adamw = FOAM([("w", w)]), torch.optim.AdamW([w])
    w.grad = torch.ones(4, 8)
    adamw.step()
    freed(adamw.state[w]["exp_avg"])
    with pytest.raises(ValueError, match="exp_avg has no memory"):
        from_adamw(opt, adamw)
    saved = opt.state_dict()
    saved["state"][0] = {k: x.clone() for k, x in saved["state"][0].items()}
    freed(saved["state"][0]["m"])
    with pytest.raises(ValueError, match="m has no memory"):
        opt.load_state_dict(saved)
    freed(opt.state[w]["v"])
    with pytest.raises(ValueError, match="its v has no memory"):
        to_adamw(opt)


def test_fake_weights_can_be_planned_with() -> None:
    with FakeTensorMode():
        fake: Any = layers()
        for backend in (None, "cpu", "eager"):
            if backend is None or not BACKENDS[backend].unavailable():
                opt = FOAM(param_groups(fake, state="int8"), backend=backend)
                assert opt.state_bytes() == FOAM(param_groups(layers(), state="int8")).state_bytes()
    real: Any = layers()
    opt.param_groups[0]["params"][0] = real[0].weight  # values come later, and the state must be made again
    opt.state[real[0].weight] = opt.state.pop(fake[0].weight)
    real[0].weight.grad = torch.ones_like(real[0].weight)
    with pytest.raises(ValueError, match="is a FakeTensor: gradients must be plain"):
        opt.step()


def test_a_parameter_class_of_ones_own_is_stepped_by_any_backend() -> None:
    mine, plain = Mine(torch.ones(4, 8)), nn.Parameter(torch.ones(4, 8))
    for name, backend in BACKENDS.items():
        if name != "triton" and not backend.unavailable():
            for p in (mine, plain):
                p.grad = numbers(4, 8, dtype=torch.float32)
                FOAM([p], backend=name).step()
            exact(mine.detach(), plain.detach())


def test_a_lazy_parameter_has_no_shape_yet() -> None:
    with pytest.raises(ValueError, match="no shape yet: run the model once"):
        FOAM(nn.Sequential(nn.LazyLinear(4)))
    with pytest.raises(ValueError, match="no shape yet: run the model once"):
        FOAM(nn.LazyLinear(4).parameters())
