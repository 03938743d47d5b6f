"""Contracts that every entry of OPTIMIZERS keeps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from toys import NAMES, learn, make, toy, train_on

from foamlab.config import ModelConfig, OptimizerConfig
from foamlab.errors import UserError
from foamlab.models.presets import build as build_model
from foamlab.optimizers.registry import OPTIMIZERS, options, resolve, state_bytes
from foamlab.training.checkpoint import storable
from tolerances import exact

# classes of other packages whose copies have lost attributes (torch's Optimizer copies its own alone)
NO_COPY = {"adamw8bit", "flash-adamw", "adam-mini", "galore"}
# those that read a figure off a tensor in their step, which the meta device has none of
NO_META = {"adafactor"}


@pytest.mark.parametrize("name", NAMES)
def test_each_trainable_parameter_is_in_one_group(name: str) -> None:
    model = toy()
    opt = make(name, model)
    held = [p for g in opt.param_groups for p in g["params"]]
    assert len(held) == len({id(p) for p in held})
    assert {id(p) for p in held} == {id(p) for p in model.parameters() if p.requires_grad}
    assert all(g["name"] and g["lr"] > 0 for g in opt.param_groups)


@pytest.mark.parametrize("name", NAMES)
def test_it_learns_with_its_own_defaults(name: str) -> None:
    model = toy()
    losses = learn(model, make(name, model), 60)
    share = 0.99 if name == "lora" else 0.95  # adapters of random weights move slowly
    assert losses[-1] < share * losses[1], losses


@pytest.mark.parametrize("name", NAMES)
def test_matrices_step_at_scale_times_lr(name: str) -> None:
    """Without noise from anything else: the first move of a matrix doubles with scale, the rest stays."""
    moved = []
    for scale in (0.5, 1.0):
        model = toy()
        opt = make(name, model, lr=1e-3, scale=scale)
        matrix = model.body[0].lora_B["default"].weight if name == "lora" else model.body[0].weight
        before = [p.detach().clone() for p in (matrix, model.embedding.weight)]
        learn(model, opt, 1)
        after = [p.detach() for p in (matrix, model.embedding.weight)]
        moved.append([(p - b).norm().item() for p, b in zip(after, before)])
    assert moved[1][0] / moved[0][0] == pytest.approx(2.0, rel=1e-3)
    if name != "lora":  # which trains no embedding
        assert moved[1][1] / moved[0][1] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("name", NAMES)
def test_a_schedule_reaches_every_part(name: str) -> None:
    model = toy()
    opt = make(name, model, weight_decay=0.1)
    learn(model, opt, 2)
    for group in opt.param_groups:
        group["lr"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    learn(model, opt, 2)
    for p, b in zip(model.parameters(), before):
        exact(p, b)


@pytest.mark.parametrize("name", NAMES)
def test_save_and_load_go_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    model = toy()
    opt = make(name, model)
    learn(model, opt, 3)
    state = opt.state_dict()
    assert storable(state) == OPTIMIZERS[name].resumable
    if not OPTIMIZERS[name].resumable:
        return
    torch.save(state, tmp_path / "state.pt")
    other = toy()
    fresh = make(name, other)
    other.load_state_dict(model.state_dict())
    fresh.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert state_bytes(fresh) == state_bytes(opt)  # nothing was cast
    assert learn(model, opt, 3, 3) == learn(other, fresh, 3, 3)
    for (key, p), q in zip(model.named_parameters(), other.parameters()):
        exact(p, q, key)


@pytest.mark.parametrize("name", NAMES)
def test_a_copy_steps_alone(name: str) -> None:
    model = toy()
    opt = make(name, model)
    learn(model, opt, 2)
    both = copy.deepcopy((model, opt))
    if name in NO_COPY:
        with pytest.raises(AttributeError):
            learn(*both, 2)
        return
    assert learn(model, opt, 2) == learn(*both, 2)


@pytest.mark.parametrize("name", [n for n in NAMES if n not in NO_META])
def test_bytes_on_meta_are_the_bytes_allocated(name: str) -> None:
    sizes = []
    for device in ("cpu", "meta"):
        model = toy(device)
        opt = make(name, model)
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.requires_grad else None
        opt.step()
        sizes.append(state_bytes(opt))
        assert sum(state_bytes(opt, g) for g in opt.param_groups) == sizes[-1]
    assert sizes[0] == sizes[1] > 0


def storages(x: Any, found: dict[int, int]) -> dict[int, int]:
    """Address -> bytes of the storage of every tensor in a nest, objects included."""
    if isinstance(x, torch.Tensor):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
    elif isinstance(x, (list, tuple)):
        for part in x:
            storages(part, found)
    else:
        storages(list((x if isinstance(x, dict) else getattr(x, "__dict__", {})).values()), found)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_contract_on_a_llama(name: str) -> None:
    """It learns one batch, its state is counted to the byte, and it goes on after a save."""
    models = [build_model(ModelConfig("llama-1m"), 64, 16, seed=1) for _ in range(2)]
    opts = [make(name, model) for model in models]
    losses = train_on(models[0], opts[0], 5)
    assert losses[-1] < losses[0] - 0.02, losses
    assert state_bytes(opts[0]) == sum(storages(dict(opts[0].state), {}).values()) > 0
    if OPTIMIZERS[name].resumable:
        models[1].load_state_dict(models[0].state_dict())
        opts[1].load_state_dict(copy.deepcopy(opts[0].state_dict()))
        assert train_on(models[0], opts[0], 2) == train_on(models[1], opts[1], 2)


@pytest.mark.parametrize("name", NAMES)
def test_what_a_contest_tries(name: str) -> None:
    entry, full = OPTIMIZERS[name], resolve(OptimizerConfig(name))
    assert next(iter(entry.tune)) == "lr"
    for key, values in entry.tune.items():
        assert list(values) == sorted(set(values)) and len(values) >= 3
        assert key in ("lr", "scale") or key in options(name)
        near = min(values, key=lambda x: abs(x - getattr(full, key)))
        assert 0.5 < getattr(full, key) / near < 2, f"{name}: its default {key} is far from all that is tried"


@pytest.mark.parametrize("name", NAMES)
def test_defaults_and_options(name: str) -> None:
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
