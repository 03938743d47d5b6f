"""Gradient release: bit for bit the same weights, gradients gone, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tolerances import exact
from torchfoam import FOAM, GradientRelease


def tied_model() -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 12), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 11))
    model[3].weight = model[1].weight  # used twice in one backward pass
    model[4].weight = model[0].weight  # a tied head
    return model


def train(release: bool, steps: int = 5, **options: object) -> tuple[nn.Module, FOAM]:
    model = tied_model()
    opt = FOAM(model, lr=1e-2, **options)  # type: ignore[arg-type]
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
def test_released_steps_equal_plain_ones(options: dict[str, object]) -> None:
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
    with GradientRelease(opt), GradientRelease(opt), pytest.raises(RuntimeError, match="another GradientRelease"):
        w.sum().backward()


def test_a_parameter_unfrozen_after_the_optimizer_was_made() -> None:
    w, x = nn.Parameter(torch.ones(2, 4)), nn.Parameter(torch.ones(2, 4), requires_grad=False)
    opt = FOAM([w, x])
    x.requires_grad_(True)
    with GradientRelease(opt):
        (w + x).sum().backward()
    exact(w, x)
    assert x[0, 0] < 1 and opt.state[x]["step"] == 1
