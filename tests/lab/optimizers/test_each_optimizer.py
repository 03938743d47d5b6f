"""What each optimizer is in particular."""

from __future__ import annotations

import copy
import logging
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from toys import NAMES, learn, make, toy, train_on

from foamlab.config import ModelConfig, OptimizerConfig
from foamlab.contest.studies import STUDIES
from foamlab.errors import UserError
from foamlab.models.presets import build as build_model
from foamlab.optimizers.apollo import Apollo, projection
from foamlab.optimizers.fold_ablation import FoldAblation
from foamlab.optimizers.registry import OPTIMIZERS, build, state_bytes
from tolerances import exact


@pytest.mark.parametrize(
    "config, message",
    [
        (OptimizerConfig("fom"), r"did you mean foam\?"),
        (OptimizerConfig("foam", options={"levl": 3}), r"did you mean level\?"),
        (OptimizerConfig("foam", options={"level": -1}), "level must be"),
        (OptimizerConfig("foam", options={"backend": "abacus"}), "backend"),
        (OptimizerConfig("foam", options={"overrides": {"*.nowhere": {"level": 3}}}), "matches no"),
        (OptimizerConfig("adamw", lr=-1.0), r"optimizer\.lr must be"),
        (OptimizerConfig("muon", options={"adjust_lr_fn": "none"}), "optimizer muon: "),
    ],
)
def test_errors_are_one_line_for_the_user(config: Any, message: str) -> None:
    with pytest.raises(UserError, match=message):
        build(config, toy())


def test_options_reach_the_optimizer() -> None:
    opt = build(OptimizerConfig("foam", options={"level": 3, "overrides": {"body.1.*": {"level": "row"}}}), toy())
    assert {g["name"]: g["level"] for g in opt.param_groups}["folded"] == 3
    assert "row" in {g["level"] for g in opt.param_groups}
    exempt = build(OptimizerConfig("foam", weight_decay=0.1, options={"no_decay": True}), toy()).param_groups
    assert {g["name"]: g["weight_decay"] for g in exempt}.items() >= {("folded", 0.1), ("unfolded no decay", 0.0)}
    fitted = build(OptimizerConfig("foam", options={"state_budget": 1400}), toy())
    assert state_bytes(fitted) <= 1400 < state_bytes(build(OptimizerConfig("foam"), toy()))
    assert build(OptimizerConfig("foam-row"), toy()).param_groups[0]["level"] == "row"


def test_adamw_split_at_scale_one_is_adamw() -> None:
    a, b = toy(), toy()
    learn(a, build(OptimizerConfig("adamw", lr=1e-2, betas=(0.9, 0.95)), a), 5)
    learn(b, build(OptimizerConfig("adamw-split", lr=1e-2, scale=1.0), b), 5)
    for p, q in zip(a.parameters(), b.parameters()):
        exact(p, q)


def test_muon_is_torchs_muon_beside_torchs_adamw() -> None:
    a, b = toy(), toy()
    learn(a, build(OptimizerConfig("muon", lr=1e-2, scale=0.5), a), 5)
    matrices = [b.body[0].weight, b.body[1].weight, b.dead.weight]
    rest = [p for p in b.parameters() if p.requires_grad and not any(p is m for m in matrices)]

    class Both:
        parts = (
            torch.optim.Muon(matrices, lr=5e-3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(rest, lr=1e-2, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        )

        def __getattr__(self, name: str) -> Any:
            return lambda: [getattr(part, name)() for part in self.parts]

    learn(b, Both(), 5)
    for p, q in zip(a.parameters(), b.parameters()):
        exact(p, q)


def test_initial_weights_do_not_depend_on_the_optimizer() -> None:
    plain = dict(build_model(ModelConfig("llama-1m"), 64, 16, seed=1).named_parameters())
    for name in NAMES:
        model = build_model(ModelConfig("llama-1m"), 64, 16, seed=1)
        make(name, model)
        own = {n.replace(".base_layer", ""): p for n, p in model.named_parameters() if "lora_" not in n}
        assert own.keys() == plain.keys()
        for key, p in own.items():
            exact(p, plain[key], key)


def test_hidden_tensors_are_counted_once() -> None:
    """GaLore and its kind keep projections inside plain objects."""

    class Projector:
        def __init__(self) -> None:
            self.matrix, self.rank = torch.zeros(3, 5), 3

    p, shared = nn.Parameter(torch.zeros(2)), torch.zeros(4)
    opt = torch.optim.SGD([p])
    opt.state[p] = {"step": 1, "projector": Projector(), "list": [shared, shared], "codes": torch.zeros(8).byte()}
    assert state_bytes(opt) == 60 + 16 + 8


def test_a_package_that_is_missing_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(UserError, match=r"pip install 'torchfoam\[rivals\]'"):
        build(OptimizerConfig("galore"), toy())
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(UserError, match=r"pip install 'torchfoam\[rivals\]'"):
        make("lora", toy())


def test_lora_is_for_trained_models_and_trains_adapters_alone() -> None:
    with pytest.raises(UserError, match=r"lora adapts a trained model.*--model\.name"):
        build(OptimizerConfig("lora"), toy())
    model = toy()
    make("lora", model)
    assert {n.split(".")[-3] for n, p in model.named_parameters() if p.requires_grad} == {"lora_A", "lora_B"}


def test_embeddings_keep_wide_state_in_8_bit_adam() -> None:
    sizes = {}
    for bits in (8, 32):
        model: Any = build_model(ModelConfig("llama-1m"), 64, 16, seed=1)
        opt = build(OptimizerConfig("adamw8bit", options={"embedding_bits": bits}), model)
        train_on(model, opt, 1)
        sizes[bits] = state_bytes(opt, {"params": [model.get_input_embeddings().weight]})
    n = 64 * 128
    assert sizes[32] == pytest.approx(8 * n, rel=0.01) and 2 * n < sizes[8] < 2.6 * n


def test_apollo_scales_the_whole_gradient() -> None:
    """Its update is the gradient with one factor a column (row, where it is tall), so of full rank; rank 1 has one."""
    g = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    for shape, scaling, dim in (("wide", "channel", 0), ("tall", "channel", 1), ("wide", "tensor", (0, 1))):
        grad = g if shape == "wide" else g.mT.contiguous()
        p = nn.Parameter(torch.zeros_like(grad))
        opt = Apollo([p], lr=1.0, rank=2, scaling=scaling, scale=0.5)
        p.grad = grad
        opt.step()
        factor = -p.detach() / grad
        low, high = factor.amin(dim), factor.amax(dim)
        assert torch.allclose(low, high, rtol=1e-5) and bool((low > 0).all())
        # the first update of Adam is a sign: |q_j| / |Q_j| = sqrt(r) / |Q_j|
        Q = projection(2, 6, g, 0) @ g
        size = 2**0.5 / Q.norm(dim=0) if scaling == "channel" else Q.numel() ** 0.5 / Q.norm()
        assert torch.allclose(low, 0.5 * size, rtol=1e-4)


def test_apollo_limits_the_growth_of_its_updates() -> None:
    p = nn.Parameter(torch.zeros(4, 8))
    opt = Apollo([p], lr=1.0, rank=4, betas=(0.0, 0.999))
    moves = []
    for size in (1e-4, 1.0):
        before = p.detach().clone()
        p.grad = torch.full_like(p, size)
        opt.step()
        moves.append((p.detach() - before).norm().item())
    assert moves[1] == pytest.approx(1.01 * moves[0], rel=1e-4)


@pytest.mark.parametrize("options", [{}, {"level": "row", "residual": 0.5}])
def test_the_ablation_optimizer_is_foam_at_its_defaults(options: dict[str, Any]) -> None:
    a, b = toy(), toy()
    learn(a, build(OptimizerConfig("foam-paper", options={**options, "backend": "eager"}), a), 5)
    learn(b, build(OptimizerConfig("foam-ablation", options=options), b), 5)
    for (key, p), q in zip(a.named_parameters(), b.parameters()):
        assert torch.allclose(p, q, rtol=1e-5, atol=1e-6), key


def test_folding_columns_is_folding_the_turned_matrix() -> None:
    g = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    p, q = nn.Parameter(torch.zeros(4, 6)), nn.Parameter(torch.zeros(6, 4))
    a = FoldAblation([p], level=1, direction="columns")
    b = FoldAblation([q], level=1)
    for scale in (1.0, -0.5, 0.25):
        p.grad, q.grad = g * scale, (g * scale).mT.contiguous()
        a.step()
        b.step()
    exact(p.detach(), q.detach().mT)
    assert a.state[p]["m"].shape == (6, 2)


def test_studies_name_optimizers_and_options_that_exist() -> None:
    for about, cases in STUDIES.values():
        assert about and len({c.value for c in cases}) == len(cases) >= 2
        assert (
            sum(
                c.optimizer == "foam-paper" and not c.options and c.scale in (None, OPTIMIZERS["foam-paper"].scale)
                for c in cases
            )
            == 1
        )
        for case in cases:
            make(case.optimizer, toy()) if not case.options else build(
                OptimizerConfig(case.optimizer, scale=case.scale, options=case.options), toy()
            )


@pytest.mark.skipif("adam-mini" not in NAMES, reason="needs adam_mini")
@pytest.mark.parametrize("heads, kv", [(4, 2), (3, 1)])
def test_adam_mini_has_a_second_moment_a_head_whatever_the_heads_width(heads: int, kv: int) -> None:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    shape: dict[str, Any] = {"vocab_size": 13, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 1}
    model = Qwen3ForCausalLM(
        Qwen3Config(num_attention_heads=heads, num_key_value_heads=kv, head_dim=16, max_position_embeddings=8, **shape)
    )
    opt = make("adam-mini", model)
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    opt.step()
    attention = model.model.layers[0].self_attn
    assert [len(opt.state[m.weight]["vmean"]) for m in (attention.q_proj, attention.k_proj)] == [heads, kv]


def test_one_line_of_bitsandbytes_is_passed_over_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    from foamlab.optimizers.entry import hushed

    log = logging.getLogger("bitsandbytes.backends.cpu.ops")
    with hushed():
        log.warning("Failed to load CPU gemm_4bit_forward from kernels-community: %s", "no kernels")
        log.warning("The installed version was compiled without %s", "8-bit optimizers")
    log.warning("Failed to load CPU gemm_4bit_forward: told after the import")
    assert [r.getMessage().split()[0] for r in caplog.records] == ["The", "Failed"]


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["adamw8bit", "lora"])
def test_a_rival_is_built_without_a_word(name: str) -> None:
    for package in ("bitsandbytes", "peft"):
        pytest.importorskip(package)
    code = (
        "import torch; from foamlab.optimizers.registry import OptimizerConfig, build; from torch import nn\n"
        f"build(OptimizerConfig({name!r}, options={{'from_scratch': True}} if {name!r} == 'lora' else {{}}),"
        " nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_part_that_refuses_leaves_all_parts_as_they_were() -> None:
    model, other = toy(), toy()
    opt, again = (build(OptimizerConfig("muon"), m) for m in (model, other))
    learn(model, opt, 2)
    learn(other, again, 1)
    saved, before = copy.deepcopy(opt.state_dict()), copy.deepcopy(again.state_dict())
    last = saved["param_groups"][-1]["params"][0]
    saved["param_groups"][-1]["params"] = [last] * len(saved["param_groups"][-1]["params"])  # AdamW's part refuses
    saved["param_groups"][-1].pop("betas")
    saved["state"][last] = None
    with pytest.raises(Exception):  # noqa: B017  (torch's own words)
        again.load_state_dict(saved)
    after = again.state_dict()
    assert str(after["param_groups"]) == str(before["param_groups"])
    for i, kept in before["state"].items():
        for key, x in kept.items():
            exact(torch.as_tensor(after["state"][i][key]), torch.as_tensor(x))
    learn(other, again, 1)
