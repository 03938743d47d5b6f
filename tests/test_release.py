"""Gradient release: bit for bit the same weights, gradients gone, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

from problems import everything, same
from tolerances import exact
from torchfoam import FOAM, GradientRelease


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 11))
    model[3].weight = model[1].weight  # used twice in one backward pass
    model[4].weight = model[0].weight  # a tied head
    return model


def train(release: bool, steps: int = 5, **options: Any) -> tuple[nn.Module, FOAM]:
    model = tied_model()
    opt = FOAM(model, lr=1e-2, **options)
    schedule = torch.optim.lr_scheduler.LinearLR(opt, 0.1, 1.0, 5)
    handle = GradientRelease(opt) if release else None
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(11, (7,), generator=generator)
        nn.functional.cross_entropy(model(ids), ids).backward()
        if release:
            assert all(p.grad is None for p in model.parameters())
        opt.step()
        opt.zero_grad()
        schedule.step()
    assert handle is None or handle.skipped == 0
    return model, opt


@pytest.mark.parametrize(
    "options", [{}, {"level": 0}, {"state": "int8", "level": "row"}, {"rule": "mini"}, {"rule": "muon"}]
)
def test_released_steps_equal_plain_ones(options: dict[str, Any]) -> None:
    (plain, a), (released, b) = train(False, **options), train(True, **options)
    for (name, p), q in zip(plain.named_parameters(), released.parameters()):
        exact(p, q, name)
        for key, x in a.state[p].items():
            exact(x, b.state[q][key], f"{name} {key}")


def test_a_second_backward_is_refused() -> None:
    model = tied_model()
    opt = FOAM(model)
    GradientRelease(opt)
    ids = torch.arange(5)
    model(ids).sum().backward()
    with pytest.raises(RuntimeError, match="second backward pass before opt"):
        model(ids).sum().backward()


def test_clip_and_nonfinite_are_per_parameter() -> None:
    w, x = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))
    opt = FOAM([w, x], level=0, weight_decay=0.0, eps=1.0, lr=1.0)
    with GradientRelease(opt, clip=1.0, skip_nonfinite=True) as release:
        ((w * 100).sum() + (x * float("nan")).sum()).backward()
        opt.step()
    assert release.skipped == 1
    exact(x, torch.zeros(2, 4))
    torch.testing.assert_close(w.norm(), torch.tensor(8**0.5 / (1 + 8**0.5)))  # g = 1 / sqrt 8 each, u = g / (g + 1)
    (w * 2).sum().backward()
    assert w.grad is not None  # removed: gradients stay again


def test_norm_of_all_gradients_is_told() -> None:
    w, x = nn.Parameter(torch.zeros(2, 4)), nn.Parameter(torch.zeros(2, 4))
    opt = FOAM([w, x])
    with GradientRelease(opt, skip_nonfinite=True) as release:
        assert release.grad_norm() == 0
        (3 * w.sum() + 4 * x.sum()).backward()
        torch.testing.assert_close(release.grad_norm(), torch.tensor((8 * 9 + 8 * 16) ** 0.5))
        opt.step()
        assert release.grad_norm() == 0


def test_nonsense_clip() -> None:
    with pytest.raises(ValueError, match="clip must be finite and >= 0, got -1"):
        GradientRelease(FOAM([nn.Parameter(torch.zeros(2, 2))]), clip=-1)


def test_two_releases_and_other_optimizers_are_refused() -> None:
    w = nn.Parameter(torch.zeros(2, 4))
    with pytest.raises(ValueError, match="needs a FOAM optimizer, got AdamW"):
        GradientRelease(torch.optim.AdamW([w]))  # type: ignore[arg-type]
    opt = FOAM([w])
    with GradientRelease(opt), pytest.raises(RuntimeError, match="released already: remove"):
        GradientRelease(opt)
    with GradientRelease(opt):  # removed, so it may be attached again
        w.sum().backward()
    w.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    with GradientRelease(FOAM([w])), pytest.raises(RuntimeError, match="another hook has taken this gradient"):
        w.sum().backward()


def test_a_parameter_unfrozen_after_the_optimizer_was_made() -> None:
    w, x = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4), requires_grad=False)
    opt = FOAM([w, x])
    x.requires_grad_(True)
    with GradientRelease(opt):
        (w + x).sum().backward()
    exact(w, x)
    assert x[0, 0] < 1 and opt.state[x]["step"] == 1


# ---------------------------------------------------------------------- refused before anything moves


def test_a_scaled_loss_is_refused_before_a_weight_moves() -> None:
    model = tied_model()
    opt = FOAM(model)
    before = everything(opt)
    scaler = torch.amp.GradScaler("cpu")
    GradientRelease(opt)
    with pytest.raises(RuntimeError, match=r"a GradScaler has scaled: .* bfloat16 without one"):
        scaler.scale(model(torch.arange(5)).sum()).backward()
    assert same(before, everything(opt))


def test_a_scaler_of_another_optimizer_or_one_that_is_off_is_none_of_ours() -> None:
    model, critic = tied_model(), nn.Linear(3, 1)
    other, scaler, off = (
        torch.optim.AdamW(critic.parameters()),
        torch.amp.GradScaler("cpu"),
        torch.amp.GradScaler("cpu", enabled=False),
    )
    scaler.scale(critic(torch.ones(2, 3)).sum()).backward()
    scaler.step(other)
    for updated in (False, True):
        if updated:
            scaler.update()
        with GradientRelease(FOAM(model)):
            off.scale(model(torch.arange(5)).sum()).backward()
        assert all(p.grad is None for p in model.parameters())


def test_what_is_left_of_a_run_that_was_refused_does_not_count() -> None:
    # a notebook keeps the failed cell's graph and scaler alive
    scaler, layer = torch.amp.GradScaler("cpu"), nn.Linear(4, 4)
    left = scaler.scale(checkpoint(layer, torch.ones(2, 4, requires_grad=True), use_reentrant=True).sum())
    with GradientRelease(FOAM(layer)):
        layer(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad is None and left.grad_fn is not None


@pytest.mark.parametrize("shared", [True, False])
def test_reentrant_checkpointing_is_refused_before_a_weight_moves(shared: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    opt = FOAM(model)
    before = everything(opt)
    x = torch.ones(2, 4, requires_grad=True)
    GradientRelease(opt)
    for layer in (model[0], model[0] if shared else model[1]):
        x = checkpoint(layer, x, use_reentrant=True)
    with pytest.raises(RuntimeError, match=r"reentrant checkpointing: .*use_reentrant=False"):
        model[2](x).sum().backward()
    assert same(before, everything(opt))


def test_a_layer_shared_under_checkpointing_that_is_not_reentrant_steps_once() -> None:
    outcome = []
    for release in (False, True):
        torch.manual_seed(0)
        layer, x = nn.Linear(4, 4), torch.ones(2, 4)
        opt = FOAM(layer)
        if release:
            GradientRelease(opt)
        for _ in range(2):
            x = checkpoint(layer, x, use_reentrant=False)
        x.sum().backward()
        opt.step()
        outcome.append(everything(opt))
    assert same(*outcome)


def test_an_option_changed_under_way_is_refused_before_a_weight_moves() -> None:
    model = tied_model()
    for release in (False, True):
        for key, value in (("level", 3), ("rule", "mini"), ("state", "int8"), ("betas", 0.9)):
            opt = FOAM(model)
            attached = GradientRelease(opt) if release else None
            opt.param_groups[1 if key == "betas" else 0][key] = value  # the group that would be stepped last
            before = [p.detach().clone() for p in model.parameters()]
            with pytest.raises((ValueError, TypeError)):
                model(torch.arange(5)).sum().backward()
                opt.step()
            assert same(before, [p.detach() for p in model.parameters()])
            assert all(s["step"] == 0 for s in opt.state.values())
            opt.zero_grad()
            if attached:
                attached.remove()


def test_replicas_that_begin_after_the_release_are_refused() -> None:
    model = tied_model()
    opt = FOAM(model)
    before = everything(opt)
    GradientRelease(opt)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(RuntimeError, match="data-parallel replicas"):
            model(torch.arange(5)).sum().backward()
    finally:
        dist.destroy_process_group()
    assert same(before, everything(opt))
