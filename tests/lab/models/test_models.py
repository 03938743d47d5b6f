"""The table of models: sizes, routing, seeds, folders."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from foamlab.config import ModelConfig
from foamlab.errors import UserError
from foamlab.models.presets import FAMILIES, MODELS, build
from tolerances import exact
from torchfoam import param_groups

# algorithm.md part 5: hidden, intermediate, heads, layers of the paper's series
PAPER = {
    "llama-60m": (512, 1376, 8, 8),
    "llama-130m": (768, 2048, 12, 12),
    "llama-350m": (1024, 2736, 16, 24),
    "llama-1.3b": (2048, 5461, 32, 24),
    "llama-3b": (2560, 6848, 32, 32),
    "llama-7b": (4096, 11008, 32, 32),
    "llama-13b": (5120, 13824, 40, 40),
}
SMALL = [name for name, preset in MODELS.items() if preset.parameters < 12e6]
# published names of shapes that do not say their size
SIZES = {"gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-large": 774e6, "gpt2-xl": 1558e6}


@pytest.fixture(scope="module", params=MODELS)
def planned(request: pytest.FixtureRequest) -> tuple[str, Any]:
    return request.param, build(ModelConfig(request.param), device="meta")


def test_parameters_are_what_the_table_and_the_name_say(planned: tuple[str, Any]) -> None:
    name, model = planned
    count = sum(p.numel() for p in model.parameters())
    assert count == MODELS[name].parameters
    number = re.search(r"-([\d.]+)([mb])$", name)
    size = float(number[1]) * {"m": 1e6, "b": 1e9}[number[2]] if number else SIZES[name]
    if name == "llama-1m":  # named for bytes as tokens
        count = sum(p.numel() for p in build(ModelConfig(name), 258, device="meta").parameters())
    assert abs(count / size - 1) < 0.15, f"{count:,} parameters"


def test_routing_folds_all_but_embeddings_head_and_vectors(planned: tuple[str, Any]) -> None:
    _, model = planned
    groups = {g["name"]: g["params"] for g in param_groups(model)}
    tables = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    tables.add(id(model.get_output_embeddings().weight))
    for name, p in groups["unfolded"]:
        assert p.ndim < 2 or id(p) in tables, name
    assert all(p.ndim == 2 and id(p) not in tables for _, p in groups["folded"])


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_shapes(name: str) -> None:
    config = MODELS[name].config(32_000, 256)
    shape = (config.hidden_size, config.intermediate_size, config.num_attention_heads, config.num_hidden_layers)
    assert shape == PAPER[name]
    assert (MODELS[name].vocab, config.max_position_embeddings, config.tie_word_embeddings) == (32_000, 256, False)


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_learns_from_its_seed_alone(name: str) -> None:
    before = torch.random.get_rng_state()
    model: Any = build(ModelConfig(name), 64, 16, seed=3)
    exact(torch.random.get_rng_state(), before, "the global random state")
    torch.manual_seed(99)
    again: Any = build(ModelConfig(name), 64, 16, seed=3)
    other: Any = build(ModelConfig(name), 64, 16, seed=4)
    half = build(ModelConfig(name), 64, 16, dtype=torch.bfloat16, seed=3)
    for (key, p), q, h in zip(model.named_parameters(), again.parameters(), half.parameters()):
        exact(p, q, key)
        exact(p.bfloat16(), h, key)
    assert not torch.equal(model.get_input_embeddings().weight, other.get_input_embeddings().weight)
    assert model.config._attn_implementation == "sdpa" and model.training

    ids = torch.arange(32).view(2, 16)
    loss = model(input_ids=ids, labels=ids).loss
    assert abs(loss.item() - torch.tensor(64.0).log().item()) < 0.5
    loss.backward()
    assert all(p.grad is not None for p in model.parameters())


def test_recomputed_activations_give_the_same_gradients() -> None:
    ids = torch.arange(32).view(2, 16)
    grads = []
    for checkpointing in (False, True):
        model = build(ModelConfig("llama-1m", checkpointing), 64, 16)
        assert any(getattr(m, "gradient_checkpointing", False) for m in model.modules()) == checkpointing
        model(input_ids=ids, labels=ids).loss.backward()
        grads.append([p.grad for p in model.parameters()])
    for a, b in zip(*grads):
        exact(a, b)


def test_every_family_has_a_preset() -> None:
    assert {preset.family for preset in MODELS.values()} == set(FAMILIES)


# -------------------------------------------------------------------------------------------- folders


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    model: Any = build(ModelConfig("gpt2-10m"), 64, 16, seed=5)
    model.save_pretrained(path)
    return path


def test_a_folder_gives_its_weights(folder: Path) -> None:
    model = build(ModelConfig("gpt2-10m"), 64, 16, seed=5)
    loaded: Any = build(ModelConfig(str(folder)), 64, 16)
    for (key, p), q in zip(model.named_parameters(), loaded.named_parameters()):
        assert key == q[0]
        exact(p, q[1], key)
    assert loaded.training and loaded.config._attn_implementation == "sdpa"
    planned = build(ModelConfig(str(folder)), 64, 16, device="meta")
    assert [p.shape for p in planned.parameters()] == [p.shape for p in model.parameters()]


def test_folders_that_do_not_fit(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has 16 positions: data\.sequence must be at most that, got 32"):
        build(ModelConfig(str(folder)), 64, 32)
    with pytest.raises(UserError, match="65 tokens"):
        build(ModelConfig(str(folder)), 65, 16)
    with pytest.raises(UserError, match="not a Hugging Face model folder"):
        build(ModelConfig(str(tmp_path)), 64, 16)


def test_pickled_weights_are_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    torch.save(build(ModelConfig("gpt2-10m"), 64, 16).state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(UserError, match="cannot load the model"):
        build(ModelConfig(str(tmp_path)), 64, 16)


def test_a_truncated_safetensors_file(folder: Path, tmp_path: Path) -> None:
    shutil.copy(folder / "config.json", tmp_path)
    whole = (folder / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(UserError, match="cannot load the model"):
        build(ModelConfig(str(tmp_path)), 64, 16)


def test_an_unknown_name_offers_the_nearest() -> None:
    with pytest.raises(UserError, match=r"'llama-60': did you mean llama-60m\?"):
        build(ModelConfig("llama-60"))
