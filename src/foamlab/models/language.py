"""What a language model is trained for, how fast, and what it has to say: loss, perplexity, schedule, sample."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..config import RunConfig, TrainConfig
from ..data.corpus import IGNORED
from .thrift import chunked_loss


def loss_fn(model: nn.Module, ids: Tensor, labels: Tensor, chunk: int = 0) -> Tensor:
    """Cross entropy in nats, summed over the tokens of labels that are not -100: a float32 scalar.

    Shapes: ids, labels int64 [rows, sequence]; the model's logits [rows, sequence, vocabulary], or with `chunk` those
    of that many tokens at a time (`thrift.chunked_loss`).
    """
    if chunk:
        return chunked_loss(model, ids, labels, chunk)
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum")


def schedule(step: int, t: TrainConfig) -> float:
    """Learning rate of step 0, 1, ... relative to its peak: a rising line, then a cosine down to `final`.

    w = round(warmup * steps)
    (step + 1) / w                                                       step < w, so step w - 1 is the peak
    final + (1 - final) / 2 * (1 + cos(pi (step - w + 1) / (steps - w)))       then; the last step is `final`
    """
    w = round(t.warmup * t.steps)
    if step < w:
        return (step + 1) / w
    return t.final + (1 - t.final) / 2 * (1 + math.cos(math.pi * (step - w + 1) / (t.steps - w)))


def perplexity(loss: float) -> float:
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


@torch.no_grad()
def sample(model: Any, tokenizer: Any, prompt: str, config: RunConfig) -> str:
    """`prompt` and up to 200 tokens that the model adds, drawn with the run's seed at temperature 0.8."""
    ids = tokenizer.encode(prompt)[: config.data.sequence // 2]
    if not ids:
        return ""
    rows = torch.tensor([ids], device=next(model.parameters()).device)
    torch.manual_seed(config.train.seed)
    model.eval()
    out = model.generate(
        rows, attention_mask=torch.ones_like(rows), max_new_tokens=min(200, config.data.sequence - len(ids)),
        do_sample=True, temperature=0.8, top_k=50, use_cache=True,
        eos_token_id=tokenizer.eos_id, pad_token_id=tokenizer.pad_id,
    )  # fmt: skip
    model.train()
    return str(tokenizer.decode(out[0].tolist()))
