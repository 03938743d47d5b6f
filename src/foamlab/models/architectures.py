"""Models that others describe: a folder, a config.json or a name on the hub, and the causal language model that
transformers builds of it. Code of others is never run, and whatever is wrong with what they wrote becomes one line.

Encoders are refused: they see the token they are to predict. `check_causal` tries that on every model that is built,
and on a small copy of the configuration where there are no weights yet.
"""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import hub
from ..errors import UserError
from ..machine import out_of_memory

TRIED = 8  # tokens of the row on which a model is tried
# Of earlier tokens' share: what a later token may move by rounding. Causal models of transformers show 0, one of them
# (ProphetNet) 2e-6; encoders with random weights at least 1e-2.
ROUNDING = 1e-4
# what configurations call their sizes, and small ones: enough to tell which way a model reads
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers")
LISTS = ("layer_types", "mlp_layer_types", "layers_block_type", "attn_layers")  # one entry a layer
SMALL = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("intermediate_size", "n_inner", "d_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim"), 64),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "num_key_value_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_head", "rotary_dim", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 16),
    "moe_intermediate_size": 64,
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 512),
    "vocab_size": 256,
}
POSITIONS = ("max_position_embeddings", "max_target_positions", "max_source_positions")


def line(e: BaseException) -> str:
    """The message of an error of others in one line, with its kind where that says more."""
    said = " ".join(str(e).split())[:200]
    return said if isinstance(e, (OSError, ValueError)) and said else f"{type(e).__name__}: {said}"


def configuration(name: str) -> Any:
    """The transformers configuration in a folder or a config.json, or of a model on the hub.

    Raises:
        UserError: there is none, or it is not one that transformers can read.
    """
    from transformers import AutoConfig

    path = hub.local(name)
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as e:  # of any kind: each family checks its own settings in its own way
        if Path(name).is_dir():
            raise UserError(f"{name} is not a Hugging Face model folder: {line(e)}") from e
        raise UserError(
            f"no model configuration at {name!r}: {line(e)}; "
            "give a preset of `foamlab models`, a Hugging Face folder, a config.json, or a name on the hub"
        ) from e


def text_part(config: Any) -> Any:
    """What of a configuration concerns text."""
    try:
        return config.get_text_config()
    except ValueError:  # of several no one is meant
        return config


def positions(config: Any) -> int:
    """Longest sequence that a configuration allows; 0 if nothing limits it."""
    text = text_part(config)
    return next((n for key in POSITIONS if isinstance(n := getattr(text, key, 0), int) and n > 0), 0)


def admit(config: Any, name: str, vocabulary: int, sequence: int) -> None:
    """Raise UserError unless this is a causal language model, of float weights, with room for the tokens.

    Args:
        config: of transformers.
        name: to call it by.
        vocabulary: tokens it must know; 0 if that is not known yet.
        sequence: tokens in a row.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UserError(
            f"{name} ({config.model_type}) is none of the models that transformers builds as causal language models, "
            "which foamlab trains and plans: give one that predicts a text's next token from the text before it"
        )
    admit_text(config, name, vocabulary, sequence)


def admit_text(config: Any, name: str, vocabulary: int, sequence: int) -> None:
    """The part of `admit` that holds for every model of text."""
    text = text_part(config)
    if quantized := getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None):
        known = quantized if isinstance(quantized, dict) else quantized.to_dict()
        raise UserError(
            f"{name} has quantized weights ({known.get('quant_method', 'unnamed')}), which cannot be trained: give the "
            "float model, or take quantization_config out of config.json to plan it as one"
        )
    if sequence > (most := positions(config)) > 0:
        raise UserError(f"{name} has {most} positions: data.sequence must be at most that, got {sequence}")
    size = getattr(text, "vocab_size", None) or 0
    if vocabulary > size:
        raise UserError(
            f"the tokenizer has {vocabulary} tokens, {name} only {size}: use its own with --data.tokenizer {name}"
        )


def empty(config: Any, name: str, dtype: torch.dtype) -> nn.Module:
    """The model of a configuration on the meta device; UserError if it cannot be built, or is not causal."""
    try:
        model = small_copy(json.dumps(config.to_dict(), sort_keys=True, default=str))
    except Exception:  # sizes that this family cannot have: the check waits for the weights
        model = None
    if model is not None:
        check_causal(model, name)
    try:
        with torch.device("meta"):
            return build(config, dtype)
    except Exception as e:  # of any kind, as in `configuration`
        raise UserError(f"cannot build {name} ({config.model_type}): {line(e)}") from e


def build(config: Any, dtype: torch.dtype) -> nn.Module:
    """A model with random weights, on the device that is torch's default, with torch's fused attention where it has."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    config.use_cache = False
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # its hint to set is_decoder is part of our refusal, and a model is built twice
    try:
        # None is `scaled_dot_product_attention` where the family has it, and its own attention elsewhere
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, attn_implementation=None, dtype=dtype, trust_remote_code=False
        )
    finally:
        logging.set_verbosity(verbosity)
    return model


def load(name: str, dtype: torch.dtype) -> nn.Module:
    """The model in a folder or on the hub with its weights, from safetensors files."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    path = hub.local(name, weights=True)
    if path.is_file():
        raise UserError(f"{name} describes a model without weights: `foamlab plan` takes it; to train give a folder")
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, local_files_only=True, trust_remote_code=False, use_safetensors=True,
            attn_implementation=None, dtype=dtype,
        )  # fmt: skip
    except Exception as e:  # of any kind, as in `configuration`
        if out_of_memory(e):
            raise
        raise UserError(f"cannot load the model in {name}: {line(e)}") from e
    finally:
        if bar:
            logging.enable_progress_bar()
    model.config.use_cache = False
    return model


# ---------------------------------------------------------------------------------------------- which way it reads


def check_causal(model: nn.Module, name: str, tokens: int = TRIED) -> None:
    """Raise UserError if a later token moves an earlier prediction.

        d logits[i] / d x[j] = 0   for all i < j,    x the embedded tokens of one row

    Taken as a gradient, so that a causal model gives exact zeros whatever its precision. Nothing random is drawn from
    the global generators, and nothing is changed.

    Args:
        model: with weights, on any device.
        name: to call it by.
        tokens: of the row, if the model takes fewer than eight.
    """
    half = min(tokens, TRIED) // 2
    try:
        own = shares(model, half) if half else None
    except Exception as e:  # of any kind, as in `configuration`
        if out_of_memory(e):
            raise
        raise UserError(f"{name} cannot read a row of {2 * half} tokens: {line(e)}") from e
    if own is None:
        return
    before, after = own[:half].max(), own[half:].max()
    if after > ROUNDING * before:
        decoder = getattr(getattr(model, "config", None), "is_decoder", None) is False
        hint = '"is_decoder": true in its config.json makes it one; or ' if decoder else ""
        raise UserError(
            f"{name} is no causal language model: a token moves the predictions before it, so it would learn to copy "
            f"what it is to predict: {hint}give a model that reads from left to right"
        )


def shares(model: Any, half: int) -> Tensor | None:
    """How much each of 2 * half embedded tokens moves the first half's logits; None where that cannot be told."""
    seen: list[Tensor] = []

    def embedded(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        seen.append(out if out.requires_grad else out.detach().requires_grad_())
        return seen[-1]

    training, device = model.training, next(model.parameters()).device
    hook = model.get_input_embeddings().register_forward_hook(embedded)
    try:
        with torch.enable_grad(), torch.random.fork_rng([device] if device.type == "cuda" else []):
            torch.manual_seed(0)  # some families draw even when they do not train
            rows = torch.arange(2 * half, device=device)[None] % model.get_input_embeddings().weight.shape[0]
            logits = model.eval()(input_ids=rows).logits
            (grad,) = torch.autograd.grad(logits[0, :half].float().logsumexp(-1).sum(), seen[0], allow_unused=True)
    finally:
        hook.remove()
        model.train(training)
    return None if grad is None else grad.float().abs().amax(-1).flatten()


@lru_cache(maxsize=16)
def small_copy(text: str) -> nn.Module:
    """A small model of a configuration, given as JSON, that can take a row; any error if there is none."""
    from transformers import CONFIG_MAPPING

    def shrink(sizes: dict[str, Any]) -> dict[str, Any]:
        layers = next((min(n, 2) for key in LAYERS if isinstance(n := sizes.get(key), int)), None)
        for key, value in sizes.items():
            if isinstance(value, dict):
                shrink(value)
            elif isinstance(value, list) and key in LISTS:
                sizes[key] = value[:layers]
            elif isinstance(value, int) and not isinstance(value, bool):
                sizes[key] = min(value, 2 if key in LAYERS else SMALL.get(key, value))
                if key.endswith("_token_id"):
                    sizes[key] = value % SMALL["vocab_size"]
        return sizes

    sizes = shrink(json.loads(text))
    config = CONFIG_MAPPING[sizes["model_type"]].from_dict(sizes)
    with torch.device("meta"):
        if sum(p.numel() for p in build(config, torch.float32).parameters()) > 3 * 10**7:
            raise ValueError("not small")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config, torch.float32)
    shares(model, TRIED // 2)
    return model
