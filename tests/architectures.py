"""Real architectures, and which of their parameters fold."""

from __future__ import annotations

from typing import Any

import pytest
import torch

DECODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
ENCODER = {
    "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 32,
    "max_position_embeddings": 16,
}  # fmt: skip
GPT2 = {
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 32,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
VIT = {k: v for k, v in ENCODER.items() if "embed" not in k and "vocab" not in k} | {"image_size": 16, "patch_size": 8}

ATTENTION = {f"self_attn.{x}_proj.weight" for x in "qkvo"}
MLP = {f"mlp.{x}_proj.weight" for x in ("gate", "up", "down")}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
BERT = {
    *(f"attention.self.{x}.weight" for x in ("query", "key", "value")),
    "attention.output.dense.weight", "intermediate.dense.weight", "output.dense.weight",
}  # fmt: skip
GPT2_FOLDS = {f"{x}.weight" for x in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
T5_ATTENTION = {f"{x}.weight" for x in "qkvo"}

# model class, its config's class and options -> what folds (names from the layer on), what is unfolded though not a
# vector. Both must be complete.
REAL: dict[str, tuple[str, str, dict[str, Any], set[str], set[str]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", DECODER, ATTENTION | MLP, {"model.embed_tokens", "lm_head"}),
    "llama, tied": (
        "LlamaForCausalLM", "LlamaConfig", DECODER | {"tie_word_embeddings": True}, ATTENTION | MLP,
        {"model.embed_tokens"},
    ),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2Config", DECODER, ATTENTION | MLP, {"model.embed_tokens", "lm_head"}),
    "qwen3 moe": (
        "Qwen3MoeForCausalLM", "Qwen3MoeConfig",
        DECODER | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "head_dim": 8},
        ATTENTION | EXPERTS | {"mlp.gate.weight"}, {"model.embed_tokens", "lm_head"},
    ),
    "mixtral": (
        "MixtralForCausalLM", "MixtralConfig", DECODER | {"num_local_experts": 4},
        ATTENTION | EXPERTS | {"mlp.gate.weight"}, {"model.embed_tokens", "lm_head"},
    ),
    "gpt-oss": (  # its experts have biases, 2-D for being stacked
        "GptOssForCausalLM", "GptOssConfig", DECODER | {"num_local_experts": 4, "head_dim": 8},
        ATTENTION | EXPERTS | {"mlp.router.weight"},
        {"model.embed_tokens", "lm_head", *(f"model.layers.{i}.{x}_bias" for i in (0, 1) for x in EXPERTS)},
    ),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", GPT2, GPT2_FOLDS, {"transformer.wte", "transformer.wpe"}),
    "gpt2, classifier": (
        "GPT2ForSequenceClassification", "GPT2Config", GPT2, GPT2_FOLDS,
        {"transformer.wte", "transformer.wpe", "score"},
    ),
    "bert, classifier": (
        "BertForSequenceClassification", "BertConfig", ENCODER, BERT | {"bert.pooler.dense.weight"},
        {*(f"bert.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")), "classifier"},
    ),
    "bert, masked": (
        "BertForMaskedLM", "BertConfig", ENCODER, BERT | {"cls.predictions.transform.dense.weight"},
        {f"bert.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")},
    ),
    "roberta, classifier": (
        "RobertaForSequenceClassification", "RobertaConfig", ENCODER, BERT,
        {
            *(f"roberta.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")),
            "classifier.dense", "classifier.out_proj",
        },
    ),
    "deberta-v2, classifier": (
        "DebertaV2ForSequenceClassification", "DebertaV2Config",
        ENCODER | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"], "position_buckets": 8},
        {*(f"attention.self.{x}_proj.weight" for x in ("query", "key", "value", "pos_key", "pos_query"))}
        | {x for x in BERT if "self" not in x} | {"pooler.dense.weight"},
        {
            "deberta.embeddings.word_embeddings", "deberta.embeddings.position_embeddings",
            "deberta.encoder.rel_embeddings", "classifier",
        },
    ),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 32, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 2},
        {*(f"SelfAttention.{x}" for x in T5_ATTENTION), *(f"EncDecAttention.{x}" for x in T5_ATTENTION),
         "DenseReluDense.wi.weight", "DenseReluDense.wo.weight"},
        {"shared", *(f"{x}.block.0.layer.0.SelfAttention.relative_attention_bias" for x in ("encoder", "decoder"))},
    ),
    "vit": (
        "ViTForImageClassification", "ViTConfig", VIT,
        {*(f"attention.{x}_proj.weight" for x in "qkvo"), "mlp.fc1.weight", "mlp.fc2.weight"},
        {f"vit.embeddings.{x}" for x in ("cls_token", "position_embeddings", "patch_embeddings.projection")}
        | {"classifier"},
    ),
    "mamba": (
        "MambaForCausalLM", "MambaConfig",
        {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "pad_token_id": 2},
        {f"mixer.{x}_proj.weight" for x in ("in", "x", "dt", "out")},
        {"backbone.embeddings", *(f"backbone.layers.{i}.mixer.{x}" for i in (0, 1) for x in ("A_log", "conv1d"))},
    ),
    "swin": (
        "SwinForImageClassification", "SwinConfig",
        {"image_size": 32, "patch_size": 4, "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "window_size": 4},
        {*(f"attention.{x}_proj.weight" for x in "qkvo"), "mlp.fc1.weight", "mlp.fc2.weight",
         "downsample.reduction.weight"},
        {"swin.embeddings.patch_embeddings.projection", "classifier"}
        | {
            f"swin.encoder.layers.{i}.blocks.0.attention.relative_position_bias.relative_position_bias_table"
            for i in (0, 1)
        },
    ),
    "musicgen": (  # a list of heads
        "MusicgenForCausalLM", "MusicgenDecoderConfig",
        {"vocab_size": 32, "hidden_size": 16, "ffn_dim": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
         "num_codebooks": 3, "max_position_embeddings": 16, "pad_token_id": 0, "bos_token_id": 1},
        {*(f"{a}.{x}_proj.weight" for a in ("self_attn", "encoder_attn") for x in ("q", "k", "v", "out")),
         "fc1.weight", "fc2.weight"},
        {f"{x}.{i}" for x in ("model.decoder.embed_tokens", "lm_heads") for i in (0, 1, 2)},
    ),
    "csm's depth decoder": (  # a stack of heads in one parameter
        "CsmDepthDecoderForCausalLM", "CsmDepthDecoderConfig",
        {k: v for k, v in DECODER.items() if "token" not in k}
        | {"backbone_hidden_size": 16, "num_codebooks": 4, "head_dim": 8},
        ATTENTION | MLP | {"model.inputs_embeds_projector.weight"}, {"model.embed_tokens", "codebooks_head"},
    ),
    "sam": (
        "SamVisionModel", "SamVisionConfig",
        {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
         "mlp_dim": 24, "output_channels": 8, "window_size": 2, "global_attn_indexes": [1], "num_pos_feats": 4},
        {"attn.qkv.weight", "attn.proj.weight", "mlp.lin1.weight", "mlp.lin2.weight"},
        {f"vision_encoder.layers.{i}.attn.rel_pos_{x}" for i in (0, 1) for x in "hw"}
        | {f"vision_encoder.{x}" for x in ("pos_embed", "patch_embed.projection", "neck.conv1", "neck.conv2")},
    ),
    "deit, two heads": (
        "DeiTForImageClassificationWithTeacher", "DeiTConfig", VIT,
        {*(f"attention.{x}_proj.weight" for x in "qkvo"), "mlp.fc1.weight", "mlp.fc2.weight"},
        {f"deit.embeddings.{x}" for x in ("cls_token", "distillation_token", "position_embeddings")}
        | {"deit.embeddings.patch_embeddings.projection", "cls_classifier", "distillation_classifier"},
    ),
    "bert, pre-training": (
        "BertForPreTraining", "BertConfig", ENCODER,
        BERT | {"bert.pooler.dense.weight", "cls.predictions.transform.dense.weight"},
        {*(f"bert.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")), "cls.seq_relationship"},
    ),
    "electra, pre-training": (
        "ElectraForPreTraining", "ElectraConfig", ENCODER | {"embedding_size": 8},
        BERT | {"electra.embeddings_project.weight", "discriminator_predictions.dense.weight"},
        {f"electra.embeddings.{x}_embeddings" for x in ("word", "position", "token_type")}
        | {"discriminator_predictions.dense_prediction"},
    ),
    "decision transformer": (
        "DecisionTransformerModel", "DecisionTransformerConfig",
        {"hidden_size": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "max_ep_len": 8, "act_dim": 4, "state_dim": 6,
         "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1},
        GPT2_FOLDS | {f"embed_{x}.weight" for x in ("action", "return", "state")},
        {"encoder.wte", "encoder.wpe", "embed_timestep", "predict_state", "predict_action.0", "predict_return"},
    ),
}  # fmt: skip


def build(name: str) -> Any:
    model, config, options, *_ = REAL[name]
    torch.manual_seed(0)
    transformers = pytest.importorskip("transformers")
    return getattr(transformers, model)(getattr(transformers, config)(**options))
