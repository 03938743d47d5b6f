"""Small encoders, and sentences with labels to fine-tune them on."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors

from foamlab.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TaskConfig, TrainConfig

GOOD, BAD = ("fine", "great", "warm"), ("dull", "grim", "flat")
VOCABULARY = ["[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]", "a", "film", "the", *GOOD, *BAD]
SHAPE = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
ENCODER = {**SHAPE, "vocab_size": len(VOCABULARY), "max_position_embeddings": 40, "pad_token_id": 0}
DECODER = {**SHAPE, "vocab_size": 258, "max_position_embeddings": 64, "num_key_value_heads": 1}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", ENCODER),
    "roberta": ("RobertaModel", {**ENCODER, "pad_token_id": 1, "type_vocab_size": 1}),
    "deberta-v2": ("DebertaV2Model", {**ENCODER, "type_vocab_size": 0, "relative_attention": True}),
    "llama": ("LlamaForCausalLM", DECODER),
    "qwen2": ("Qwen2ForCausalLM", DECODER),
    "qwen3": ("Qwen3ForCausalLM", {**DECODER, "head_dim": 8}),
    "gpt2": ("GPT2LMHeadModel", {"vocab_size": 258, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 64}),
    "gemma": ("GemmaForCausalLM", {**DECODER, "head_dim": 8}),
}
FILES = {"chat_template.jinja": "{{ messages }}", "special_tokens_map.json": '{"mask_token": "[MASK]"}'}


def words(folder: Path) -> None:
    """A tokenizer of an encoder: special tokens around a text and between two, and files that nobody here reads."""
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(VOCABULARY)}, "[UNK]"))
    made.add_special_tokens(VOCABULARY[:5])
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    both = {"single": "[CLS] $A [SEP]", "pair": "[CLS] $A [SEP] $B:1 [SEP]:1"}
    made.post_processor = processors.TemplateProcessing(**both, special_tokens=[("[CLS]", 1), ("[SEP]", 2)])
    made.enable_truncation(3)  # as a folder may have left it
    made.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "cls_token": "[CLS]",
        "sep_token": "[SEP]",
        "pad_token": "[PAD]",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "model_max_length": 40}))


def sentences(n: int, seed: int = 0) -> list[dict[str, Any]]:
    """Rows whose label their words tell."""
    draw = random.Random(seed)
    rows = []
    for i in range(n):
        kind = GOOD if i % 2 else BAD
        text = " ".join(draw.choice([*kind, "a", "film", "the"]) for _ in range(draw.randint(1, 9))) + f" {kind[0]}"
        rows.append({"text": text, "label": "good" if i % 2 else "bad"})
    return rows


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def config(home: Path, out: Path, model: str = "bert", task: str = "classify", **changes: Any) -> RunConfig:
    run = RunConfig(
        model=ModelConfig(name=str(home / model)),
        data=DataConfig(name=str(home / "train.jsonl"), sequence=32),
        optimizer=OptimizerConfig(lr=3e-3),
        train=TrainConfig(steps=6, batch=4, eval_every=2, checkpoint_every=3, threads=1, sample="", schedule="linear"),
        task=TaskConfig(task, validation=str(home / "dev.jsonl"), test=str(home / "test.jsonl")),  # type: ignore[arg-type]
        out=str(out),
    )
    for key, value in changes.items():
        part = next(p for p in (run.train, run.task, run.data, run.optimizer) if hasattr(p, key))
        setattr(part, key, value)
    return run
