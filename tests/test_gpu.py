"""On a GPU: the kernels agree with the twin, replay from a CUDA graph, launch little and allocate nothing.

`make test-gpu` runs these; nothing else here needs a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from problems import numbers
from torchfoam import FOAM, backends
from triton_cases import (  # noqa: F401  (tests, to be collected here)
    test_a_model_trains_as_with_the_eager_backend,
    test_a_transposed_gradient_agrees,
    test_every_dtype_agrees,
    test_every_option_agrees,
    test_every_shape_agrees,
    test_launches_do_not_grow_with_parameters,
    test_many_tensors_of_one_launch_keep_apart,
    test_memory_that_is_not_aligned_agrees,
    test_moments_are_rounded_with_the_eager_bits,
    test_moments_of_another_size_are_an_error_and_not_a_stray_write,
    test_nan_and_infinity_are_not_hidden,
    test_step_and_lr_on_the_device_are_read_there,
    test_tables_are_kept_until_an_address_changes,
    test_weights_are_rounded_with_the_eager_bits,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
SHAPES = [(64, 256), (64, 256), (33, 1367), (512, 64), (128,), (7,)]
MIB = 2**20


def weights(dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[nn.Parameter]:
    params = [nn.Parameter(numbers(*shape, seed=k).to(dtype).cuda()) for k, shape in enumerate(shapes)]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def gradients(params: list[nn.Parameter], step: int) -> None:
    for k, p in enumerate(params):
        assert p.grad is not None
        p.grad.copy_(numbers(*p.shape, seed=1000 * step + k))


def test_it_is_the_backend_of_cuda_parameters() -> None:
    assert backends()["triton"] == "ok"


@pytest.mark.parametrize("backend", ["triton", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("level", [2, "row"])
def test_a_captured_step_replays_what_eager_steps_do(level: Any, dtype: torch.dtype, backend: str) -> None:
    runs = []
    for captured in (True, False):
        params = weights(dtype)
        opt = FOAM(params, lr=torch.tensor(0.01, device="cuda"), level=level, capturable=True, backend=backend)
        gradients(params, 0)
        opt.step()
        graph = torch.cuda.CUDAGraph()
        if captured:
            with torch.cuda.graph(graph):
                opt.step()
        for step in range(1, 6):
            gradients(params, step)
            for group in opt.param_groups:
                group["lr"].fill_(0.01 / step)
            graph.replay() if captured else opt.step()
        assert all(s["step"].item() == 6 for s in opt.state.values())
        runs.append([*params, *(s[name] for s in opt.state.values() for name in ("m", "v"))])
    for a, b in zip(*runs):
        assert torch.equal(a, b)


def test_gradients_born_in_a_graph_replay() -> None:
    # a whole captured step: the graph's own gradients have addresses that no step before it saw
    runs = []
    for captured in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 64)).cuda()
        opt = FOAM(model, lr=0.01, level=2, capturable=True, backend="triton")
        x = torch.zeros(8, 64, device="cuda")

        def step(model: nn.Module = model, opt: FOAM = opt, x: torch.Tensor = x) -> None:
            opt.zero_grad(set_to_none=True)
            model(x).square().mean().backward()
            opt.step()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.copy_(numbers(8, 64, seed=0))
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        if captured:
            opt.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                step()
        for k in range(1, 5):
            x.copy_(numbers(8, 64, seed=k))
            graph.replay() if captured else step()
        runs.append([p.detach().clone() for p in model.parameters()])
    for a, b in zip(*runs):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def kernels(opt: FOAM) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        opt.step()
        torch.cuda.synchronize()
    return sum(e.count for e in profile.key_averages() if "Memcpy" not in e.key and "Memset" not in e.key)


@pytest.mark.parametrize("capturable", [False, True])
def test_kernel_launches_do_not_grow_with_parameters(capturable: bool) -> None:
    counts = []
    for n in (2, 30):
        params = weights(torch.bfloat16, [(64, 256), (33, 1367)] * n)
        opt = FOAM(params, level=2, capturable=capturable, backend="triton")
        opt.step()
        counts.append(kernels(opt))
    # one for whole blocks and one for ragged rows; capturable adds the step counts, which torch batches
    assert counts[0] >= 2 and counts[1] <= counts[0] + 2 * capturable


@pytest.mark.parametrize(("level", "dtype"), [(0, torch.float32), (2, torch.bfloat16), ("row", torch.bfloat16)])
def test_a_step_allocates_no_full_size_tensor(level: Any, dtype: torch.dtype) -> None:
    params = weights(dtype, [(2048, 4096), (1000, 5461)])
    opt = FOAM(params, level=level, backend="triton")
    opt.step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    opt.step()
    torch.cuda.synchronize()
    assert torch.cuda.max_memory_allocated() - before < MIB
    assert torch.cuda.memory_allocated() == before


def test_a_step_does_not_wait_for_the_device() -> None:
    params = weights(torch.bfloat16)
    opt = FOAM(params, level=2, capturable=True, backend="triton")
    opt.step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for p in params:
            p.grad = p.grad.clone() if p.grad is not None else None  # new addresses: the table is written again
        opt.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_every_device_steps_its_own() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    params = [nn.Parameter(torch.ones(16, 64, device=f"cuda:{k}")) for k in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    FOAM(params, lr=0.1, weight_decay=0.0, backend="triton").step()
    assert all(torch.allclose(p, torch.full_like(p, 0.9)) for p in params)
