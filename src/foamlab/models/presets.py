"""Which models there are: a table of shapes, built from transformers' own classes with random weights.

A local Hugging Face folder works in place of a preset. This room knows nothing of data, optimizers or training.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..config import ModelConfig
from ..errors import UserError, known_name
from . import architectures, classifiers
from .classifiers import Head

# transformers' configuration class of each family, and what all its presets share. Dropout is off, as in
# pre-training of these sizes generally.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"tie_word_embeddings": False, "rms_norm_eps": 1e-6}),
    "qwen": ("Qwen2Config", {"rms_norm_eps": 1e-6, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "gpt2": ("GPT2Config", {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}),
}


@dataclass(frozen=True)
class Preset:
    """A model that can be built.

    Args:
        help: one line.
        family: a key of `FAMILIES`.
        vocab: size of the vocabulary where no tokenizer dictates another.
        shape: arguments of the family's transformers configuration.
        parameters: trainable parameters with `vocab` tokens at 1,024 positions (tied ones once).
    """

    help: str
    family: str
    vocab: int
    parameters: int
    shape: dict[str, Any]

    def config(self, vocab: int, sequence: int) -> Any:
        """The transformers configuration, with as many positions as `sequence`."""
        import transformers

        kind, common = FAMILIES[self.family]
        positions = {"n_positions" if self.family == "gpt2" else "max_position_embeddings": sequence}
        # token ids of another vocabulary would end generation at a wrong token
        ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
        return getattr(transformers, kind)(**{**common, **ids, **positions, **self.shape}, vocab_size=vocab)


def _llama(help: str, parameters: int, shape: tuple[int, int, int, int], vocab: int = 32_000, **more: Any) -> Preset:
    hidden, intermediate, heads, layers = shape
    return Preset(help, "llama", vocab, parameters, {**_wide(hidden, intermediate, heads, layers), **more})


def _qwen(help: str, parameters: int, shape: tuple[int, int, int, int], kv: int, vocab: int, tied: bool) -> Preset:
    more = {"num_key_value_heads": kv, "tie_word_embeddings": tied}
    return Preset(help, "qwen", vocab, parameters, {**_wide(*shape), **more})


def _gpt2(help: str, parameters: int, shape: tuple[int, int, int], vocab: int = 50_257) -> Preset:
    width, heads, layers = shape
    return Preset(help, "gpt2", vocab, parameters, {"n_embd": width, "n_head": heads, "n_layer": layers})


def _wide(hidden: int, intermediate: int, heads: int, layers: int) -> dict[str, Any]:
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
    }


LLAMA31 = {"num_key_value_heads": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}

# shapes: (hidden, intermediate, heads, layers); the LLaMA series is the paper's
MODELS: dict[str, Preset] = {
    "llama-1m": _llama(
        "for CPUs and tests: 4 layers of width 128; 0.9 M with bytes as tokens", 1_840_256, (128, 344, 4, 4), vocab=4096
    ),
    "llama-10m": _llama("for CPUs: 8 layers of width 256", 10_522_880, (256, 688, 8, 8), vocab=8192),
    "llama-60m": _llama("the paper's smallest", 58_073_600, (512, 1376, 8, 8)),
    "llama-130m": _llama("the paper's", 134_105_856, (768, 2048, 12, 12)),
    "llama-350m": _llama("the paper's", 367_969_280, (1024, 2736, 16, 24)),
    "llama-1.3b": _llama("the paper's; its rows are ragged (5461 columns)", 1_339_082_752, (2048, 5461, 32, 24)),
    "llama-3b": _llama("the paper's memory chart", 2_685_831_680, (2560, 6848, 32, 32)),
    "llama-7b": _llama("the paper's memory chart; LLaMA 1's shape", 6_738_415_616, (4096, 11008, 32, 32)),
    "llama-13b": _llama("LLaMA 1's shape", 13_015_864_320, (5120, 13824, 40, 40)),
    "llama-8b": _llama(
        "Llama 3.1's shape, for planning", 8_030_261_248, (4096, 14336, 32, 32), vocab=128_256, **LLAMA31
    ),
    "qwen-10m": _qwen("Qwen2.5-style, for CPUs", 9_856_896, (256, 704, 8, 11), 2, 8192, tied=True),
    "qwen-0.5b": _qwen("Qwen2.5-0.5B's shape", 494_032_768, (896, 4864, 14, 24), 2, 151_936, tied=True),
    "qwen-1.5b": _qwen("Qwen2.5-1.5B's shape", 1_543_714_304, (1536, 8960, 12, 28), 2, 151_936, tied=True),
    "qwen-3b": _qwen("Qwen2.5-3B's shape", 3_085_938_688, (2048, 11008, 16, 36), 2, 151_936, tied=True),
    "qwen-7b": _qwen("Qwen2.5-7B's shape", 7_615_616_512, (3584, 18944, 28, 28), 4, 152_064, tied=False),
    "gpt2-10m": _gpt2("GPT-2-style, for CPUs", 10_257_408, (256, 8, 10), vocab=8192),
    "gpt2": _gpt2("GPT-2 small's shape, tied head", 124_439_808, (768, 12, 12)),
    "gpt2-medium": _gpt2("GPT-2 medium's shape", 354_823_168, (1024, 16, 24)),
    "gpt2-large": _gpt2("GPT-2 large's shape", 774_030_080, (1280, 20, 36)),
    "gpt2-xl": _gpt2("GPT-2 XL's shape", 1_557_611_200, (1600, 25, 48)),
}


def build(
    config: ModelConfig,
    vocab_size: int | None = None,
    sequence: int = 1024,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    source: Any = None,
    head: Head | None = None,
) -> nn.Module:
    """A causal language model in training mode, or with a `head` one that classifies; attention is torch's
    `scaled_dot_product_attention` where it has one.

    A preset's weights are drawn on the CPU in float32 from `seed` alone, then cast and moved, so a seed gives the
    same weights on every device and beside every optimizer; the global random state is left alone. Those of a folder
    or a hub model's are read from its safetensors files. On the meta device nothing is allocated or drawn, and a
    config.json will do.

    Args:
        config: the preset, folder or name on the hub, and whether activations are recomputed.
        vocab_size: tokens the model must know; None takes the model's own.
        sequence: tokens in a row: a preset gets as many positions, others must have them.
        device, dtype: where and how the weights are held.
        seed: of the initial weights.
        source: a transformers configuration, for the meta device, in place of what the name says.
        head: what a model of a folder or the hub is to tell of a row, in place of the next token.

    Raises:
        UserError: an unknown name, or what it names is no causal language model, has too few positions or too small a
            vocabulary.
    """
    meta = torch.device(device).type == "meta"
    if head is not None:
        place = torch.device(device)
        model = classifiers.build(config.name, source, head, vocab_size or 0, sequence, dtype, place, seed)
        switch_checkpointing(model, config.checkpointing)
        return model.train()
    if source is None and not described(config.name):
        preset = MODELS[known_name(config.name, MODELS, "model preset or folder")]
        model = _random(preset.config(vocab_size or preset.vocab, sequence), device, dtype, seed)
    else:
        hf = source or architectures.configuration(config.name)
        name = config.name or type(hf).__name__
        architectures.admit(hf, name, vocab_size or 0, sequence)
        model = architectures.empty(hf, name, dtype) if meta else architectures.load(config.name, dtype).to(device)
    if not meta:
        architectures.check_causal(model, config.name, sequence)
    switch_checkpointing(model, config.checkpointing)
    return model.train()


def described(name: str) -> bool:
    """Whether a name is no preset's but a folder's, a config.json's or one on the hub."""
    return name not in MODELS and ("/" in name or Path(name).exists())


def _random(hf: Any, device: str | torch.device, dtype: torch.dtype, seed: int) -> nn.Module:
    if torch.device(device).type == "meta":
        with torch.device("meta"):
            return architectures.build(hf, dtype)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = architectures.build(hf, torch.float32)
    return model.to(device=device, dtype=dtype)


def switch_checkpointing(model: Any, on: bool) -> None:
    """Recompute activations in the backward pass, or do not; UserError for a model that cannot."""
    # transformers renamed the switch on its way to 6
    names = ("activation_checkpointing", "gradient_checkpointing")
    name = next((name for name in names if hasattr(model, f"{name}_enable")), "")
    try:
        if on:
            getattr(model, f"{name}_enable")({"use_reentrant": False})
        elif name:
            getattr(model, f"{name}_disable")()
    except (AttributeError, ValueError) as e:
        raise UserError(f"{type(model).__name__} cannot recompute activations: leave out --model.checkpointing") from e
