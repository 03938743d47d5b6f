"""Models with a head that tells labels apart, or gives a number: transformers' sequence classification.

The body comes from a folder or the hub. A head that comes with it is kept; else it is drawn from the run's seed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import hub
from ..errors import UserError
from ..machine import out_of_memory
from . import architectures


@dataclass(frozen=True)
class Head:
    """What a model is to tell of a row.

    Args:
        labels: in their order; of a regression none.
        regress: it gives a number.
        pad_id: the token that fills short rows, for models that name none of their own.
    """

    labels: tuple[str, ...]
    regress: bool = False
    pad_id: int = 0


def head_labels(name: str) -> tuple[str, ...]:
    """The labels of the head that a model brings, in order; () if it brings none."""
    config = architectures.configuration(name)
    if not any("ForSequenceClassification" in kind for kind in config.architectures or ()):
        return ()
    return tuple(str(config.id2label[i]) for i in range(config.num_labels))


def build(name: str, source: Any, head: Head, vocabulary: int, sequence: int, dtype: torch.dtype,
          device: torch.device, seed: int) -> nn.Module:  # fmt: skip
    """The model of a folder, or on the hub, with its head. Without weights on the meta device.

    Raises:
        UserError: there is none, it cannot classify, its weights are quantized or not all there, its head is of another
            size, it has too few positions, or another vocabulary.
    """
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    config = source or architectures.configuration(name)
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        raise UserError(f"{name} ({config.model_type}) has no class for labels in transformers: give another model")
    architectures.admit_text(config, name, vocabulary, sequence)
    own = len(head_labels(name)) if source is None else 0
    wanted = 1 if head.regress else len(head.labels)
    if own and own != wanted:
        raise UserError(f"{name} has a head of {own} labels, the task needs {wanted}: give the model without its head")
    config.num_labels = wanted
    config.problem_type = "regression" if head.regress else "single_label_classification"
    if head.labels:
        config.id2label = dict(enumerate(head.labels))
        config.label2id = {label: i for i, label in enumerate(head.labels)}
    config.pad_token_id = padding(config, head.pad_id)
    config.use_cache = False
    model = _empty(name, config, dtype) if device.type == "meta" else _load(name, config, dtype, seed).to(device)
    if sequence > (most := places(model)) > 0:
        raise UserError(f"{name} has {most} positions: data.sequence must be at most that, got {sequence}")
    return model


def padding(config: Any, other: int) -> int:
    """The token that fills short rows: the model's own if it has one, else the other. A decoder reads a row's end off
    it."""
    own = config.pad_token_id
    return own if isinstance(own, int) and 0 <= own < config.vocab_size else other


def places(model: nn.Module) -> int:
    """Tokens that a table of positions has room for, where RoBERTa's kind begins to count behind its padding; 0 if
    there is none."""
    for path, table in model.named_modules():
        if path.endswith("position_embeddings") and isinstance(table, nn.Embedding):
            return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)
    return 0


def _empty(name: str, config: Any, dtype: torch.dtype) -> nn.Module:
    from transformers import AutoModelForSequenceClassification

    try:
        with torch.device("meta"):
            model: nn.Module = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    except Exception as e:  # of any kind, as in `architectures.configuration`
        raise UserError(f"cannot build {name} ({config.model_type}): {architectures.line(e)}") from e
    return model


def _load(name: str, config: Any, dtype: torch.dtype, seed: int) -> nn.Module:
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging

    path = hub.local(name, weights=True)
    if path.is_file():
        raise UserError(f"{name} describes a model without weights: to fine-tune give its folder")
    bar, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()  # its table of weights that are new or left over; those that matter are told below
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)  # of the head
            model, told = AutoModelForSequenceClassification.from_pretrained(
                path, config=config, local_files_only=True, trust_remote_code=False, use_safetensors=True,
                dtype=dtype, output_loading_info=True,
            )  # fmt: skip
    except Exception as e:  # of any kind, as in `architectures.configuration`
        if out_of_memory(e):
            raise
        raise UserError(f"cannot load the model in {name}: {architectures.line(e)}") from e
    finally:
        logging.set_verbosity(verbosity)
        if bar:
            logging.enable_progress_bar()
    body = f"{model.base_model_prefix}."
    if lost := sorted(key for key in told["missing_keys"] if key.startswith(body) and ".pooler." not in key):
        raise UserError(f"{name} lacks {len(lost)} weights of its model, the first is {lost[0]}: give a whole one")
    loaded: nn.Module = model
    return loaded
