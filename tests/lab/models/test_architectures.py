"""Models that others describe: what is planned, what gets one line, and which way a model reads."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import small
import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig

import foamlab
from foamlab.cli import main
from foamlab.config import ModelConfig
from foamlab.errors import UserError
from foamlab.models import architectures
from foamlab.models.presets import MODELS, build
from foamlab.training.preview import preview
from foamlab.training.run import train
from tolerances import exact

WIDE = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0,
}  # fmt: skip
EXPERTS = {**WIDE, "num_key_value_heads": 2, "num_experts_per_tok": 2}
GPT = {"vocab_size": 96, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 4}
CAUSAL: dict[str, dict[str, Any]] = {
    "llama": WIDE, "gpt2": GPT, "gemma2": {**WIDE, "head_dim": 8, "num_key_value_heads": 2},
    "bloom": {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    "mixtral": {**EXPERTS, "num_local_experts": 4},
    "qwen3_moe": {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8},
    "olmoe": {**EXPERTS, "num_experts": 4},
    "gpt_oss": {**EXPERTS, "num_local_experts": 4, "head_dim": 8},
    "mamba": {"vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2},
    "bert": {**WIDE, "is_decoder": True}, "roformer": {**WIDE, "is_decoder": True},
}  # fmt: skip
ENCODERS: dict[str, dict[str, Any]] = {
    "bert": WIDE, "roberta": WIDE, "electra": {**WIDE, "embedding_size": 32}, "megatron-bert": WIDE,
    "roformer": {**WIDE, "embedding_size": 32},
    "rembert": {**WIDE, "input_embedding_size": 32, "output_embedding_size": 32},
    "xlnet": {"vocab_size": 96, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48},
}  # fmt: skip
# of all families that transformers builds as causal, those that are not as their configurations come
NOT_CAUSAL = {
    "bert", "bert-generation", "big_bird", "camembert", "cpmant", "data2vec-text", "electra", "ernie", "megatron-bert",
    "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm", "xlm-roberta", "xlm-roberta-xl",
    "xlnet",
}  # fmt: skip


def configured(kind: str, sizes: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = CONFIG_MAPPING[kind](**sizes)
    return config


def real(kind: str, sizes: dict[str, Any], dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return architectures.build(configured(kind, sizes), dtype)


# ---------------------------------------------------------------------------------------------- which way it reads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", CAUSAL)
def test_what_reads_from_left_to_right_passes(kind: str, dtype: torch.dtype) -> None:
    model = real(kind, CAUSAL[kind], dtype).train()
    before, state = torch.random.get_rng_state(), {k: x.clone() for k, x in model.state_dict().items()}
    architectures.check_causal(model, kind)
    exact(torch.random.get_rng_state(), before, "the global random state")
    assert model.training and all(p.grad is None for p in model.parameters())
    for key, x in model.state_dict().items():
        exact(x, state[key], key)
    own = architectures.shares(model, 4)
    assert own is not None and own[:4].min() > 0 and own[4:].max() == 0


@pytest.mark.parametrize(
    "kind, dtype",
    [(kind, torch.float32) for kind in ENCODERS] + [("bert", torch.bfloat16), ("roberta", torch.bfloat16)], ids=str,
)  # fmt: skip
def test_what_sees_the_next_token_is_refused(kind: str, dtype: torch.dtype) -> None:
    hint = "" if kind == "xlnet" else '"is_decoder": true in its config.json makes it one; or '
    with pytest.raises(UserError, match=rf"^{kind} is no causal language model.*: {hint}give a model that reads"):
        architectures.check_causal(real(kind, ENCODERS[kind], dtype), kind)


def test_frozen_weights_and_short_rows_do_not_hide_it() -> None:
    model = real("bert", WIDE).requires_grad_(False)
    for tokens in (2, 3, 8, 1000):
        with pytest.raises(UserError, match="no causal language model"):
            architectures.check_causal(model, "x", tokens)
    architectures.check_causal(model, "x", 1)  # a row of one token has no next


def test_an_encoders_folder_is_refused_before_text_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "encoder"
    real("bert", WIDE).save_pretrained(folder)
    for device in ("cpu", "meta"):
        with pytest.raises(UserError, match="no causal language model"):
            build(ModelConfig(str(folder)), None, 16, device)
    with pytest.raises(UserError, match="no causal language model"):
        foamlab.plan(str(folder), sequence=16)
    monkeypatch.setattr("foamlab.data.corpus.prepare", lambda *args: pytest.fail("text was read"))
    with pytest.raises(UserError, match="no causal language model"):
        train(small.config(tmp_path, tmp_path / "run", model=str(folder)))
    # the small copy is not what is asked where it cannot be made: then the weights are
    monkeypatch.setattr(architectures, "small_copy", lambda text: 1 / 0)
    build(ModelConfig(str(folder)), None, 16, "meta")
    with pytest.raises(UserError, match="no causal language model"):
        build(ModelConfig(str(folder)), None, 16)


def test_a_decoders_folder_trains(tmp_path: Path) -> None:
    real("bert", CAUSAL["bert"]).save_pretrained(tmp_path)
    for device in ("cpu", "meta"):
        assert build(ModelConfig(str(tmp_path)), None, 16, device).training


def test_presets_are_causal() -> None:
    """As small copies of each family; those that are built with weights are tried themselves."""
    for preset in {preset.family: preset for preset in MODELS.values()}.values():
        config = preset.config(preset.vocab, 64)
        architectures.check_causal(architectures.small_copy(json.dumps(config.to_dict())), preset.family)


@pytest.mark.heavy
def test_all_families() -> None:
    """Of those whose default sizes can be shrunk, just the encoders are refused."""
    refused, tried = set(), 0
    for kind in MODEL_FOR_CAUSAL_LM_MAPPING:
        try:
            model = architectures.small_copy(json.dumps(kind().to_dict(), default=str))
        except Exception:
            continue
        tried += 1
        try:
            architectures.check_causal(model, kind.model_type)
        except UserError:
            refused.add(kind.model_type)
    assert tried > 140 and refused == NOT_CAUSAL


# ---------------------------------------------------------------------------------------------- descriptions


@pytest.mark.parametrize("kind", CAUSAL)
@pytest.mark.parametrize("precision", ["auto", "float32"])
def test_what_torch_can_train_is_planned(tmp_path: Path, kind: str, precision: str) -> None:
    """From a folder's config.json alone; attention is the family's own where torch's is not there."""
    configured(kind, CAUSAL[kind]).save_pretrained(tmp_path)
    plan = foamlab.plan(str(tmp_path), sequence=16, batch=2, precision=precision)
    model = real(kind, CAUSAL[kind])
    assert plan.exact["weights"] == sum(p.nbytes for p in model.parameters())
    assert plan.peak["activations"] > 0 and plan.vocabulary == 96
    same = foamlab.plan(str(tmp_path / "config.json"), sequence=16, batch=2, precision=precision)
    assert same.peak == plan.peak


OTHERS: dict[str, tuple[Any, str]] = {
    "t5": ({"model_type": "t5"}, r"\(t5\) is none of the models .* causal"),
    "vit": ({"model_type": "vit"}, r"\(vit\) is none of the models"),
    "llava": ({"model_type": "llava"}, r"\(llava\) is none of the models"),
    "qwen2-vl": ({"model_type": "qwen2_vl"}, r"\(qwen2_vl\) is none of the models"),
    "reformer": ({"model_type": "reformer"}, "cannot build .*is_decoder=True"),
    "whisper": ({"model_type": "whisper", "max_target_positions": 8}, "has 8 positions: .* got 16"),
    "seven heads": ({"model_type": "llama", "hidden_size": 64, "num_attention_heads": 7}, "hidden size.*64.*7"),
    "a size in words": ({"model_type": "llama", "hidden_size": "64"}, "hidden_size.*64"),
    "no kind": ({"hidden_size": 64}, "model_type"),
    "code of others": (
        {"model_type": "own", "auto_map": {"AutoConfig": "a.B", "AutoModelForCausalLM": "a.C"}}, "custom code"
    ),
    "a list": ([1, 2], "is not a Hugging Face model folder"),
    "quantized": (
        {"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, r"quantized weights \(fp8\).*give the"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_the_rest_gets_a_line(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    config, said = OTHERS[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"(?s){said}"):
        foamlab.plan(str(tmp_path), sequence=16)
    with pytest.raises(UserError):
        foamlab.plan(str(tmp_path / "config.json"), sequence=16)
    with pytest.raises(UserError):
        train(small.config(tmp_path, tmp_path / "run", model=str(tmp_path)))
    assert main(["plan", str(tmp_path), "--gpu", "1GB"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_an_encoder_is_refused_before_it_is_asked_for_a_tokenizer(tmp_path: Path) -> None:
    """A tokenizer would not make it a causal model; a causal one does need it."""
    for kind, said in (("bert", "no causal language model"), ("llama", "has no tokenizer: name one")):
        folder = tmp_path / kind
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": kind, **WIDE}))
        for start in (train, preview):
            config = small.config(tmp_path, tmp_path / "run", model=str(folder))
            config.data.tokenizer, config.data.name = "", "stdlib"
            with pytest.raises(UserError, match=said):
                start(config)


def test_a_refusal_is_all_that_is_said(tmp_path: Path) -> None:
    """transformers logs a hint whenever it builds an encoder; we build it twice, and our line has the hint."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", **WIDE}))
    architectures.small_copy.cache_clear()
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    try:
        with pytest.raises(UserError, match="is_decoder"):
            foamlab.plan(str(tmp_path), sequence=16)
    finally:
        logging.getLogger("transformers").removeHandler(handler)
    assert not said


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "{", "", "\x00", '{"model_type": "llama"'])
def test_a_broken_description_gets_a_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    for name in (str(tmp_path), str(tmp_path / "config.json")):
        with pytest.raises(UserError):
            foamlab.plan(name)


def test_no_quantization_is_no_quantization(tmp_path: Path) -> None:
    config = {**WIDE, "model_type": "llama", "quantization_config": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert foamlab.plan(str(tmp_path), sequence=16).exact["weights"] > 0


def test_positions_go_by_several_names() -> None:
    assert architectures.positions(transformers.GPT2Config(n_positions=7)) == 7
    assert architectures.positions(transformers.WhisperConfig()) == 448
    assert architectures.positions(transformers.MambaConfig()) == 0
    assert architectures.positions(transformers.XLNetConfig()) == 0  # it says -1


def test_a_description_is_no_model_to_train(tmp_path: Path) -> None:
    configured("llama", WIDE).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="a model without weights: `foamlab plan` takes it"):
        build(ModelConfig(str(tmp_path / "config.json")), None, 16)
    with pytest.raises(UserError, match="cannot load the model in"):
        build(ModelConfig(str(tmp_path)), None, 16)
