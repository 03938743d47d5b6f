"""Language modelling: the loss, whole or in chunks, and sampling."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ..config import RunConfig
from ..errors import UserError


def loss_fn(model: nn.Module, ids: Tensor, labels: Tensor, chunk: int = 0) -> Tensor:
    """Cross entropy in nats, summed over the tokens of labels that are not -100: a float32 scalar.

    Shapes: ids, labels int64 [rows, sequence]; the model's logits [rows, sequence, vocabulary], or with `chunk` those
    of that many tokens at a time (`chunked_loss`).
    """
    if chunk:
        return chunked_loss(model, ids, labels, chunk)
    logits = model(input_ids=ids).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")


def chunked_loss(model: nn.Module, ids: Tensor, labels: Tensor, chunk: int) -> Tensor:
    """Cross entropy in nats, summed over labels that are not -100, with logits of `chunk` tokens at a time: float32.

        sum over chunks c of  cross_entropy(head(x_c), y_c),   x what the model gives to its head, [tokens, width]

    Each chunk's logits are computed again in the backward pass, so logits of all tokens never exist, nor in float32 of
    more than a chunk. The same as the whole up to rounding, for models that `check_head` lets pass.
    """
    head = head_of(model)
    with passing(head):
        x = model(input_ids=ids).logits.flatten(0, 1)

    def part(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(head(x).float(), y, reduction="sum")

    parts = zip(x.split(chunk), labels.flatten().split(chunk))
    return torch.stack([checkpoint(part, *xy, use_reentrant=False, preserve_rng_state=False) for xy in parts]).sum()


def vocabulary_of(model: nn.Module) -> int:
    """Columns of the model's logits, 0 if it names no head."""
    head = _head(model)
    return head.weight.shape[0] if head is not None else 0


def _head(model: Any) -> Any:
    return model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None


def head_of(model: Any) -> nn.Module:
    """The model's output embeddings, also under DistributedDataParallel; UserError if it names none."""
    model = getattr(model, "module", model)
    head: nn.Module | None = _head(model)
    if head is None:
        raise UserError(f"{type(model).__name__} names no output head: set --train.chunked_loss 0")
    return head


@contextmanager
def passing(head: nn.Module) -> Iterator[None]:
    """Let the head give back what it is given, so that the model, called as ever, returns its last hidden states."""
    before = vars(head).get("forward")
    head.forward = lambda x: x
    try:
        yield
    finally:
        del head.forward
        if before is not None:
            head.forward = before


@torch.no_grad()
def check_head(model: nn.Module) -> None:
    """Raise UserError unless the model's logits are what its head gives, and nothing is done to them afterwards.

    Soft caps and scales are found whatever they are called: the head's output is made large, and must come through.
    """
    given: list[Tensor] = []

    def large(module: nn.Module, args: Any, out: Tensor) -> Tensor:
        given.append(out * 1000 + 100)
        return given[-1]

    training, hook = model.training, head_of(model).register_forward_hook(large)
    try:
        ids = torch.zeros(1, 2, dtype=torch.long, device=next(model.parameters()).device)
        logits = model.eval()(input_ids=ids).logits
    finally:
        hook.remove()
        model.train(training)
    if len(given) != 1 or not torch.equal(logits.float(), given[0].float()):
        raise UserError(
            f"{type(model).__name__} does more to its logits than its output head does (a scale, a soft cap): "
            "set --train.chunked_loss 0"
        )


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
