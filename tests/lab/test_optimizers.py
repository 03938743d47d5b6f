"""Contracts that every entry of OPTIMIZERS keeps, and what each is in particular."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from foamlab.config import ModelConfig, OptimizerConfig, UserError
from foamlab.models import build as build_model
from foamlab.optimizers import OPTIMIZERS, build, options, resolve, state_bytes
from tolerances import exact

NAMES = list(OPTIMIZERS)


class Toy(nn.Module):
    """Odd sizes, a tied head, a scalar, a frozen weight, and a layer that never gets a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 7)
        self.body = nn.ModuleList([nn.Linear(7, 9), nn.Linear(9, 7)])
        self.norm = nn.LayerNorm(7)
        self.gain = nn.Parameter(torch.tensor(1.0))
        self.dead = nn.Linear(7, 5)
        self.frozen = nn.Parameter(torch.ones(3, 3), requires_grad=False)
        self.lm_head = nn.Linear(7, 13, bias=False)
        self.lm_head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids)
        return self.lm_head(self.norm(x + self.body[1](self.body[0](x).tanh())) * self.gain)


def toy(device="cpu"):
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return Toy()


def learn(model, opt, steps, first=0):
    losses = []
    for step in range(first, first + steps):
        ids = torch.randint(0, 13, (4, 6), generator=torch.Generator().manual_seed(step % 2))
        loss = nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.roll(-1, 1).flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", NAMES)
def test_each_trainable_parameter_is_in_one_group(name):
    model = toy()
    opt = build(OptimizerConfig(name), model)
    held = [p for g in opt.param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held})
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(g["name"] and g["lr"] > 0 for g in opt.param_groups)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_with_its_own_defaults(name):
    model = toy()
    losses = learn(model, build(OptimizerConfig(name), model), 60)
    assert losses[-1] < 0.95 * losses[0], losses


@pytest.mark.parametrize("name", NAMES)
def test_matrices_step_at_scale_times_lr(name):
    """Without noise from anything else: the first move of a matrix doubles with scale, the rest stays."""
    moved = []
    for scale in (0.5, 1.0):
        model = toy()
        before = [p.detach().clone() for p in (model.body[0].weight, model.embedding.weight)]
        learn(model, build(OptimizerConfig(name, lr=1e-3, scale=scale), model), 1)
        after = [p.detach() for p in (model.body[0].weight, model.embedding.weight)]
        moved.append([(p - b).norm().item() for p, b in zip(after, before)])
    assert moved[1][0] / moved[0][0] == pytest.approx(2.0, rel=1e-3)
    assert moved[1][1] / moved[0][1] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_reaches_every_part(name):
    model = toy()
    opt = build(OptimizerConfig(name, weight_decay=0.1), model)
    learn(model, opt, 2)
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    learn(model, opt, 2)
    for p, b in zip(model.parameters(), before):
        exact(p, b)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_go_on_bit_for_bit(name, tmp_path):
    model = toy()
    opt = build(OptimizerConfig(name), model)
    learn(model, opt, 3)
    torch.save(opt.state_dict(), tmp_path / "state.pt")
    other = copy.deepcopy(model)
    fresh = build(OptimizerConfig(name), other)
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert learn(model, opt, 3, 3) == learn(other, fresh, 3, 3)
    for (key, p), q in zip(model.named_parameters(), other.parameters()):
        exact(p, q, key)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_steps_alone(name):
    model = toy()
    opt = build(OptimizerConfig(name), model)
    learn(model, opt, 2)
    both = copy.deepcopy((model, opt))
    assert learn(model, opt, 2) == learn(*both, 2)


@pytest.mark.parametrize("name", NAMES)
def test_bytes_on_meta_are_the_bytes_allocated(name):
    sizes = []
    for device in ("cpu", "meta"):
        model = toy(device)
        opt = build(OptimizerConfig(name), model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        opt.step()
        sizes.append(state_bytes(opt))
        assert sum(state_bytes(opt, g) for g in opt.param_groups) == sizes[-1]
    assert sizes[0] == sizes[1] > 0
    storages = {x.data_ptr(): x.untyped_storage().nbytes() for s in _states(name) for x in s.values()}
    assert sum(storages.values()) == sizes[0]


def _states(name):
    model = toy()
    opt = build(OptimizerConfig(name), model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    opt.step()
    _states.alive = opt  # the tensors must live while their addresses are compared
    return opt.state.values()


@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_options(name):
    entry, full = OPTIMIZERS[name], resolve(OptimizerConfig(name))
    assert (full.lr, full.betas, full.scale) == (entry.lr, entry.betas, entry.scale)
    assert entry.help and entry.source
    given = resolve(OptimizerConfig(name, lr=0.5, betas=(0.1, 0.2), scale=0.0))
    assert (given.lr, given.betas, given.scale) == (0.5, (0.1, 0.2), 0.0)
    assert resolve(full) == full
    assert not {"lr", "params", "betas", "eps", "weight_decay", "scale", "kind", "model"} & set(options(name))
    with pytest.raises(UserError, match=r"use --optimizer\.lr"):
        resolve(OptimizerConfig(name, options={"lr": 1}))
    with pytest.raises(UserError, match=r"unknown option .*'maximise'.*known: "):
        resolve(OptimizerConfig(name, options={"maximise": True}))


@pytest.mark.parametrize(
    "config, message",
    [
        (OptimizerConfig("fom"), r"did you mean foam\?"),
        (OptimizerConfig("foam", options={"levl": 3}), r"did you mean level\?"),
        (OptimizerConfig("foam", options={"level": -1}), "level must be"),
        (OptimizerConfig("foam", options={"backend": "abacus"}), "backend"),
        (OptimizerConfig("foam", options={"overrides": {"*.nowhere": {"level": 3}}}), "matches no"),
        (OptimizerConfig("adamw", lr=-1.0), "learning rate"),
        (OptimizerConfig("muon", options={"adjust_lr_fn": "none"}), "optimizer muon: "),
    ],
)
def test_errors_are_one_line_for_the_user(config, message):
    with pytest.raises(UserError, match=message):
        build(config, toy())


def test_options_reach_the_optimizer():
    opt = build(OptimizerConfig("foam", options={"level": 3, "overrides": {"body.1.*": {"level": "row"}}}), toy())
    assert {g["name"]: g["level"] for g in opt.param_groups}["folded"] == 3
    assert "row" in {g["level"] for g in opt.param_groups}
    fitted = build(OptimizerConfig("foam", options={"state_budget": 1400}), toy())
    assert state_bytes(fitted) <= 1400 < state_bytes(build(OptimizerConfig("foam"), toy()))
    assert build(OptimizerConfig("foam-row"), toy()).param_groups[0]["level"] == "row"


def test_adamw_split_at_scale_one_is_adamw():
    a, b = toy(), toy()
    learn(a, build(OptimizerConfig("adamw", lr=1e-2, betas=(0.9, 0.95)), a), 5)
    learn(b, build(OptimizerConfig("adamw-split", lr=1e-2, scale=1.0), b), 5)
    for p, q in zip(a.parameters(), b.parameters()):
        exact(p, q)


def test_muon_is_torchs_muon_beside_torchs_adamw():
    a, b = toy(), toy()
    learn(a, build(OptimizerConfig("muon", lr=1e-2, scale=0.5), a), 5)
    matrices = [b.body[0].weight, b.body[1].weight, b.dead.weight]
    rest = [p for p in b.parameters() if p.requires_grad and not any(p is m for m in matrices)]

    class Both:
        parts = (
            torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

        def __getattr__(self, name):
            return lambda: [getattr(part, name)() for part in self.parts]

    learn(b, Both(), 5)
    for p, q in zip(a.parameters(), b.parameters()):
        exact(p, q)


def test_initial_weights_do_not_depend_on_the_optimizer():
    models = []
    for name in NAMES:
        models.append(build_model(ModelConfig("llama-1m"), 64, 16, seed=1))
        build(OptimizerConfig(name), models[-1])
    for model in models[1:]:
        for p, q in zip(models[0].parameters(), model.parameters()):
            exact(p, q)


def test_hidden_tensors_are_counted_once():
    """GaLore and its kind keep projections inside plain objects."""

    class Projector:
        def __init__(self):
            self.matrix, self.rank = torch.zeros(3, 5), 3

    p, shared = nn.Parameter(torch.zeros(2)), torch.zeros(4)
    opt = torch.optim.SGD([p])
    opt.state[p] = {"step": 1, "projector": Projector(), "list": [shared, shared], "codes": torch.zeros(8).byte()}
    assert state_bytes(opt) == 60 + 16 + 8
