"""Which parameters fold, in real architectures and hand-written models; overrides; the three ways to build a FOAM."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import nn

from architectures import REAL, build
from problems import Toy, split, toy, train
from torchfoam import FOAM, PAPER, param_groups, routing_table
from torchfoam.options import OPTIONS


def from_the_layer_on(name: str) -> str:
    """The name after the last number, where there is one."""
    return re.split(r"\.\d+\.", name)[-1]


@pytest.mark.parametrize("name", REAL)
def test_real_architectures(name: str) -> None:
    model = build(name)
    folded, unfolded = split(param_groups(model))
    # every trainable parameter in exactly one group, tied ones once
    assert sorted([*folded, *unfolded]) == sorted(n for n, _ in model.named_parameters())
    assert len({id(p) for p in [*folded.values(), *unfolded.values()]}) == len(folded) + len(unfolded)
    assert {from_the_layer_on(n) for n in folded} == REAL[name][3]
    assert {n.removesuffix(".weight") for n, p in unfolded.items() if p.ndim >= 2} == REAL[name][4]


@pytest.mark.parametrize(
    "name",
    [
        "llama",
        "llama, tied",
        "gpt2",
        "bert, classifier",
        "t5",
        "qwen3 moe",
        "mamba",
        "musicgen",
        "sam",
        "deit, two heads",
        "bert, pre-training",
        "csm's depth decoder",
    ],
)
def test_names_alone_say_the_same_on_real_architectures(name: str) -> None:
    # FOAM(model.named_parameters()) has no modules to look at
    model = build(name)
    by_kind = {n for g in FOAM(model).param_groups if g["level"] != 0 for n in g["param_names"]}
    opt = FOAM(model.named_parameters())
    by_name = {n for g in opt.param_groups if g["level"] != 0 for n in g["param_names"]}
    kernels = {n for n, p in model.named_parameters() if "conv" in n}  # 3-D: nothing tells them from experts
    # linear maps named after the embeddings that they change
    mapped = {n for n in by_kind if "embeds_projector" in n}
    assert by_name - kernels == by_kind - mapped


def test_conv1d_of_gpt2_folds_along_its_output() -> None:
    model = build("gpt2")
    opt = FOAM(model, level="row")
    weight = model.transformer.h[0].mlp.c_fc.weight  # (in, out)
    assert weight.shape == (16, 64) and opt.state[weight]["m"].shape == (16, 1)


def test_stacked_experts_fold() -> None:
    model = build("qwen3 moe")
    opt = FOAM(model, level=2)
    experts = model.model.layers[0].mlp.experts.gate_up_proj
    assert experts.ndim == 3 and opt.state[experts]["m"].shape == (*experts.shape[:2], experts.shape[2] // 4)


# ---------------------------------------------------------------------- models written by hand


class Attention(nn.Module):
    """Parts with the names of heads and embeddings inside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8, bias=False)
        self.score = nn.Linear(8, 8, bias=False)
        self.embed_out = nn.Linear(8, 8, bias=False)
        self.experts = nn.Parameter(torch.ones(2, 8, 8))


class Written(nn.Module):
    """As people write them: a bare position table, a stack in nn.Sequential, a head called `output`."""

    def __init__(self) -> None:
        super().__init__()
        self.tok = nn.Embedding(32, 8)
        self.pos = nn.Parameter(torch.zeros(16, 8))
        self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.patches = nn.Conv2d(3, 8, 2)
        self.blocks = nn.Sequential(Attention(), Attention())
        self.output = nn.Linear(8, 32, bias=False)


class Lookup(nn.Embedding):
    """A table by another name."""


class ChordEmbedding(nn.Module):
    """A table that is no nn.Embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(16, 8))


HAND: dict[str, tuple[nn.Module, set[str]]] = {
    "toy": (Toy(), {"up.weight", "down.weight", "dead.weight"}),
    "mlp": (
        nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
        {"0.weight", "2.weight", "4.weight"},
    ),
    "language model in a row": (nn.Sequential(nn.Embedding(32, 8), nn.Linear(8, 8), nn.Linear(8, 32)), {"1.weight"}),
    "written": (
        Written(),
        {f"blocks.{i}.{x}" for i in (0, 1) for x in ("head.weight", "score.weight", "embed_out.weight", "experts")},
    ),
    "wrapped": (nn.Sequential(Written()), {f"0.{x}" for x in split(param_groups(Written()))[0]}),
    "attention": (nn.MultiheadAttention(8, 2), {"in_proj_weight", "out_proj.weight"}),
    "attention with biases": (
        nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=4),
        {"q_proj_weight", "k_proj_weight", "v_proj_weight", "out_proj.weight"},
    ),
    "encoder": (
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1),
        {f"layers.0.{x}" for x in ("self_attn.in_proj_weight", "self_attn.out_proj.weight")}
        | {"layers.0.linear1.weight", "layers.0.linear2.weight"},
    ),
    "tables": (nn.ModuleDict({"a": Lookup(16, 8), "b": ChordEmbedding(), "c": nn.Linear(8, 8)}), {"c.weight"}),
    "lstm": (nn.LSTM(8, 4), {"weight_ih_l0", "weight_hh_l0"}),
    "classifier head of layers": (
        nn.ModuleDict({"body": nn.Linear(8, 8), "classifier": nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))}),
        {"body.weight"},
    ),
}  # fmt: skip


# names of parameters [32, 8] beside an embedding [32, 8] -> whether they fold, with modules and with names alone
LISTS = {
    "lm_heads.0.weight": False, "heads.1.weight": False, "mtp_heads.0.weight": False, "classifiers.0.weight": False,
    "classifiers.0.dense.weight": False, "decoder.lm_heads.2.weight": False, "heads.0.1.weight": False,
    "depth.lm_heads.weight": False, "token_classifier.weight": False, "to_logits.weight": False, "fc.weight": False,
    "out.weight": False, "head_dist.linear.weight": False, "mtp_heads.0.shared.weight": False,
    "_orig_mod.heads.0.weight": False,
    "layers.0.heads.1.weight": True, "layers.0.fc.weight": True, "layers.0.attn.out.weight": True,
    "layers.0.classifiers.weight": True,
}  # fmt: skip


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_heads_are_heads(name: str) -> None:
    model = nn.Module()
    model.tok = nn.Embedding(32, 8)
    owner = model
    *path, last, leaf = name.split(".")
    for part in path:
        owner.add_module(part, nn.Module())
        owner = owner.get_submodule(part)
    owner.add_module(last, nn.Linear(8, 32, bias=False))
    model.add_module("body", nn.Linear(8, 8, bias=False))
    for groups in (param_groups(model), FOAM(model.named_parameters()).param_groups):
        folded = next(g for g in groups if g["level"] != 0)["params"]
        weight = owner.get_submodule(last).get_parameter(leaf)
        assert any(x is weight or (isinstance(x, tuple) and x[1] is weight) for x in folded) == LISTS[name]


def test_layers_below_a_list_of_heads_fold_and_its_vocabulary_does_not() -> None:
    model = nn.ModuleDict({"tok": nn.Embedding(32, 8), "body": nn.Linear(8, 8)})
    head = nn.ModuleDict({"proj": nn.Linear(16, 8), "out": nn.Linear(8, 32)})
    model["mtp_heads"] = nn.ModuleList([head])
    assert set(split(param_groups(model))[0]) == {"body.weight", "mtp_heads.0.proj.weight"}


def test_what_a_model_names_as_its_classifier_is_its_head() -> None:
    class Timm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.last_linear = nn.Linear(8, 8), nn.Linear(8, 5)
            self.aux = nn.Linear(8, 5)

        def get_classifier(self) -> tuple[nn.Module, nn.Module]:
            return self.last_linear, self.aux

    assert set(split(param_groups(Timm()))[0]) == {"body.weight"}


@pytest.mark.parametrize("question", ["get_classifier", "get_output_embeddings"])
@pytest.mark.parametrize(
    "attribute", [lambda self, x: self.body(x), lambda self: self.no_such, True], ids=["asks", "fails", "no method"]
)
def test_what_only_shares_a_name_with_such_a_method_names_no_head(question: str, attribute: object) -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.classifier = nn.Linear(8, 8), nn.Linear(8, 5)

    setattr(Own, question, attribute)
    assert set(split(param_groups(Own()))[0]) == {"body.weight"}


@pytest.mark.parametrize("name", HAND)
def test_hand_written_models(name: str) -> None:
    model, expected = HAND[name]
    folded, unfolded = split(param_groups(model))
    assert set(folded) == expected
    assert len(folded) + len(unfolded) == len(list(model.parameters()))


@pytest.mark.parametrize("prefix", ["module", "_orig_mod"])
def test_a_wrapped_model_folds_as_the_model_itself(prefix: str) -> None:
    model = HAND["language model in a row"][0]
    wrapper = nn.Module()
    wrapper.add_module(prefix, model)  # as DistributedDataParallel and torch.compile do
    pairs = list(wrapper.named_parameters())
    assert set(split(param_groups(wrapper))[0]) == {f"{prefix}.1.weight"}
    assert {g["level"]: len(g["params"]) for g in FOAM(pairs).param_groups} == {
        g["level"]: len(g["params"]) for g in FOAM(model.named_parameters()).param_groups
    }


def test_a_head_tied_to_an_embedding_is_one_unfolded_parameter() -> None:
    folded, unfolded = split(param_groups(toy()))
    assert "embed.weight" in unfolded and not {"lm_head.weight", "embed.weight"} & set(folded)


def test_frozen_parameters_are_in_no_group() -> None:
    model = toy()
    model.up.requires_grad_(False)
    names = {n for g in param_groups(model) for n, _ in g["params"]}
    assert names == {n for n, _ in model.named_parameters()} - {"up.weight", "up.bias"}


@pytest.mark.parametrize("model", [nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Embedding(5, 4)])
def test_nothing_folds_is_an_error(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"nothing folds in {type(model).__name__}: .*level=0 .*overrides"):
        FOAM(model)
    assert all(g["level"] == 0 for g in FOAM(model, level=0).param_groups)


# ---------------------------------------------------------------------- options and overrides


def test_scale_is_for_what_folds_and_the_rest_for_all() -> None:
    groups = param_groups(toy(), level=3, scale=0.25, weight_decay=0.5, state="bfloat16")
    assert [(g["name"], g["level"], g["scale"], g["weight_decay"], g["state"]) for g in groups] == [
        ("folded", 3, 0.25, 0.5, "bfloat16"),
        ("unfolded", 0, 1.0, 0.5, "bfloat16"),
    ]


def test_the_first_matching_pattern_wins() -> None:
    overrides: dict[str, dict[str, Any]] = {
        "up.*": {"level": 3, "lr": 0.5},
        "*n.weight": {"level": 4},
        "embed*": {"level": "row"},
        "d*": {"level": 0},
    }
    groups = param_groups(toy(), overrides=overrides, scale=0.25)
    at = {n: (g["level"], g["scale"], g.get("lr")) for g in groups for n, _ in g["params"]}
    opt = FOAM(param_groups(toy(), overrides=overrides, scale=0.25))
    assert at["up.weight"] == (3, 0.25, 0.5)
    assert at["up.bias"] == (0, 1.0, 0.5)  # a vector does not fold, whatever the pattern says of matrices
    assert at["embed.weight"] == ("row", 1.0, None)
    assert at["down.weight"] == (4, 0.25, None) and at["dead.weight"] == (0, 0.25, None)
    assert sum(len(g["params"]) for g in opt.param_groups) == len(list(toy().parameters()))
    assert "folded embed*" in routing_table(opt) and "unfolded d*" in routing_table(opt)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"*.upp.*": {"level": 3}}, r"'\*\.upp\.\*' matches no trainable parameter; nearest: .*up\.weight"),
        ({"up": {"level": 3}}, "override pattern 'up' matches no trainable parameter; nearest: .*up"),
        ({"*bias": {"level": 3}}, r"'\*bias' sets level, but matches only vectors, which do not fold"),
        ({"up.*": {"levle": 3}}, "unknown option 'levle'; did you mean 'level'"),
        ({"up.*": {"level": -3}}, "level must be"),
    ],
    ids=str,
)
def test_overrides_without_effect_are_errors(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FOAM(param_groups(toy(), overrides=overrides))


def test_overrides_may_fold_what_would_not() -> None:
    groups = param_groups(nn.Conv2d(3, 8, 3), overrides={"weight": {"level": 1}})
    assert [(g["name"], g["level"]) for g in groups] == [("folded weight", 1), ("unfolded", 0)]


def test_unknown_options_are_errors() -> None:
    with pytest.raises(ValueError, match="unknown option 'momentun'; did you mean 'momentum'"):
        param_groups(toy(), momentun=0.9)
    with pytest.raises(ValueError, match="unknown option 'xyz'; known: lr, betas"):
        param_groups(toy(), xyz=1)


def test_the_list_of_options_is_foams_own() -> None:
    assert set(OPTIONS) == set(FOAM(toy()).param_groups[0]) - {"params", "param_names", "name", "format"}


# ---------------------------------------------------------------------- the three ways to build one


def test_a_module_named_parameters_or_parameters() -> None:
    model = toy()
    folded = [{n for n, p in model.named_parameters() if any(p is q for q in o.param_groups[0]["params"])} for o in (
        FOAM(model), FOAM(model.named_parameters()), FOAM(model.parameters()),
    )]  # fmt: skip
    matrices = {"up.weight", "down.weight", "dead.weight"}
    assert folded == [matrices, matrices, matrices | {"embed.weight"}]  # tensors alone: every matrix folds


def test_groups_are_taken_as_they_say() -> None:
    model = toy()
    # trainers make groups by weight decay: each is split, and keeps what it says
    decayed = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.ndim < 2]
    opt = FOAM([{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}], level=3)
    assert [(g["level"], g["weight_decay"]) for g in opt.param_groups] == [(3, 0.1), (0, 0.0)]
    # a group that states its level is left alone, vectors and all
    opt = FOAM([{"params": model.parameters(), "level": 1}])
    assert [g["level"] for g in opt.param_groups] == [1]
    assert FOAM(model.parameters(), level=0).param_groups[0]["level"] == 0


def test_the_papers_recipe() -> None:
    groups = FOAM(toy(), **PAPER).param_groups
    assert [(g["lr"], g["scale"], g["level"]) for g in groups] == [(0.01, 0.25, 2), (0.01, 1.0, 0)]


def test_the_routing_table_tells_all() -> None:
    model = toy()
    opt = FOAM(model, state="bfloat16")
    train(model, opt, 1)
    header, *rows, total = routing_table(opt).splitlines()
    assert header.split()[:4] == ["group", "rule", "level", "state"] and len(rows) == 2
    assert rows[0].startswith("folded    adam  2") and "up.weight, down.weight, dead.weight" in rows[0]
    assert rows[1].startswith("unfolded  adam  0") and "..." in rows[1]
    assert total.startswith("total") and f"{opt.state_bytes():,}" in total
    assert f"{sum(p.numel() for p in model.parameters()):,}" in total
