"""The memory of one training step, found by taking the step: on the meta device, where tensors have sizes but no bytes.

The real model runs its real forward and backward pass while every storage that comes alive and dies is counted, so
checkpointing, attention, precision and architecture need no formulas. The blocks of a model are alike, so three stand
for all: the passes are simulated with three and the middle one's share is repeated. What a device does otherwise than
meta is `emulation`'s. Buffers inside kernels are not seen. `Tracker` counts real steps on real devices as well.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import _engine_run_backward
from torch.utils._python_dispatch import TorchDispatchMode

from ..models.language import vocabulary_of
from .emulation import Stand

Bytes = dict[str, int]
KINDS = ("gradients", "activations", "logits")  # what a tracker tells apart
MIDDLE = 1  # the block that stands for those left out
LossFn = Callable[[nn.Module, Tensor, Tensor], Tensor]
aten = torch.ops.aten


@dataclass(frozen=True)
class Segment:
    """A stretch of a step: how many bytes of each kind were alive at its end, and when most were."""

    name: str
    end: Bytes
    top: Bytes


@dataclass(frozen=True)
class Peak:
    """The peak of a step: where it is, and the bytes beyond weights and state: gradients, activations (kept
    by earlier stretches for the backward pass), logits (all that has a column for every token) and temporaries."""

    where: str
    bytes: Bytes

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


class Tracker(TorchDispatchMode):
    """Counts the bytes of all storages that come alive in the block, by kind, for as long as they live.

    Args:
        vocabulary: last dimension by which logits and their gradients are told; 0 means there are none.
        hypothetical: on the meta device, answer questions about values with True instead of raising.
    """

    def __init__(self, vocabulary: int = 0, hypothetical: bool = False) -> None:
        super().__init__()
        self.vocabulary, self.hypothetical = vocabulary, hypothetical
        self.live: Bytes = dict.fromkeys(KINDS, 0)
        self.total = self.most = 0
        self.top = dict(self.live)
        self.segments: list[Segment] = []
        self.name = "begin"
        # storage -> kind (or None where it is not counted), kept until the storage dies
        self.kinds: dict[int, str | None] = {}
        self.watch: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # saves the import of torch's compiler, about a second

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self.hypothetical and func is aten._local_scalar_dense.default:
            return True  # such as: "are all positions of one document?", which transformers asks
        for x in tensors(args):
            self.add(x, None)  # what is seen here first was there before: it does not count
        out = func(*args, **(kwargs or {}))
        for x in tensors(out):
            wide = self.vocabulary and x.ndim > 1 and x.shape[-1] == self.vocabulary
            self.add(x, "logits" if wide else "activations")
        return out

    def add(self, x: Tensor, kind: str | None) -> None:
        """Count the storage of x until it dies, unless it is counted already."""
        storage = x.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self.kinds:
            return

        def died(_: Any) -> None:
            kind = self.kinds.pop(key)
            del self.watch[key]
            if kind:
                self.live[kind] -= size
                self.total -= size

        self.kinds[key], self.watch[key] = kind, weakref.ref(storage, died)
        if kind:
            self.live[kind] += size
            self.total += size
            if self.total > self.most:
                self.most, self.top = self.total, dict(self.live)

    def pass_by(self, size: int) -> None:
        """Count `size` bytes that come and go at once."""
        if self.total + size > self.most:
            self.most = self.total + size
            self.top = {**self.live, "activations": self.live["activations"] + size}

    def stay(self, size: int, kind: str) -> None:
        """Count `size` bytes from now on."""
        self.live[kind] += size
        self.total += size
        self.pass_by(0)

    def rename(self, x: Tensor, kind: str) -> None:
        """Count the storage of x under another kind."""
        storage = x.untyped_storage()
        old = self.kinds.get(storage._cdata)
        if old and old != kind:
            self.live[old] -= storage.nbytes()
            self.live[kind] += storage.nbytes()
            self.kinds[storage._cdata] = kind

    def mark(self, name: str) -> None:
        """End the current stretch and begin the one called `name`."""
        self.segments.append(Segment(self.name, dict(self.live), self.top))
        self.name, self.most, self.top = name, self.total, dict(self.live)


def tensors(x: Any) -> Iterator[Tensor]:
    """The tensors in arguments or results of an operation."""
    if isinstance(x, Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for item in x:
            yield from tensors(item)


def blocks_of(model: nn.Module, least: int = 4) -> nn.ModuleList | None:
    """The model's stack of layers: its longest list of modules of one class, if it has `least` or more."""
    lists = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len({type(x) for x in m}) == 1]
    longest = max(lists, key=len, default=None)
    return longest if longest is not None and len(longest) >= least else None


def alike(model: nn.Module, blocks: nn.ModuleList) -> bool:
    """Whether one block stands for all: the same shapes, and no layer types that alternate."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if config is not None else None
    shapes = {tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()) for block in blocks}
    return len(shapes) == 1 and len(set(getattr(text, "layer_types", None) or [0])) == 1


@contextmanager
def fewer_blocks(model: nn.Module, by_name: bool = False) -> Iterator[tuple[list[nn.Parameter], int]]:
    """Leave the model only three of its blocks for a while, if they are alike.

    Yields the middle one's parameters, and how many more blocks it stands for. `by_name`: blocks are told apart.
    """
    blocks = blocks_of(model)
    if blocks is None or by_name or not alike(model, blocks):
        yield [], 0
        return
    kept = dict(blocks._modules)
    blocks._modules = dict(list(kept.items())[:3])
    try:
        yield list(blocks[MIDDLE].parameters()), len(kept) - 3
    finally:
        blocks._modules = kept


def passes(
    model: nn.Module,
    loss_fn: LossFn,
    rows: int,
    sequence: int,
    *,
    mixed: bool = False,
    accumulate: bool = False,
    release: dict[int, int] | None = None,
    device: str = "cuda",
    whole: bool = False,
    shards: int = 1,
) -> Peak:
    """Simulate the forward and backward pass of one micro-batch.

    Args:
        model: on the meta device, in training mode.
        loss_fn: (model, ids, labels) -> scalar.
        rows, sequence: shape of the micro-batch.
        mixed: bfloat16 products under float32 weights (autocast).
        accumulate: gradients of an earlier micro-batch are there already; they count.
        release: each weight steps and frees its gradient as soon as that is complete; id of a weight ->
            bytes that its step needs for a while.
        device: "cpu" or "cuda", whose kernels are meant.
        whole: simulate every block instead of three.
        shards: GPUs over which gradients are cut as soon as all of a block are there (FSDP2); what belongs to no
            block stays whole to the end. Those of earlier micro-batches are there in shards.

    Returns:
        The peak. Weights and optimizer state are not part of it.
    """
    for p in model.parameters():
        p.grad = None
    tracker = Tracker(vocabulary_of(model), hypothetical=True)
    with fewer_blocks(model, by_name=whole) as (middle, extra):
        try:
            cut = Cut(model, tracker, shards, accumulate) if shards > 1 else None
            for _ in range(1 + (accumulate and not cut)):
                follow(model, loss_fn, rows, sequence, tracker, Stand(device, mixed), release, middle, cut)
        finally:
            for p in model.parameters():
                p.grad = None
    before = 0
    if accumulate and cut:
        before = sum(shard(p, shards) for p in model.parameters() if p.requires_grad)
    elif accumulate and release is None:
        before = extra * sum(p.nbytes for p in middle if p.requires_grad)
    return extrapolate(tracker.segments, extra, {"gradients": before})


def shard(p: Tensor, shards: int) -> int:
    """Bytes of a tensor on the first of `shards` GPUs that cut it along its first dimension."""
    return -(-p.shape[0] // shards) * p[:1].nbytes if p.ndim else p.nbytes


class Cut:
    """Leaves of a block's gradients one shard, as soon as the last of them is there.

    Args:
        model: whose blocks are meant.
        tracker: which counts.
        shards: on how many GPUs.
        added: to shards that are there already, so that nothing new stays.
    """

    def __init__(self, model: nn.Module, tracker: Tracker, shards: int, added: bool) -> None:
        self.tracker, self.shards, self.added = tracker, shards, added
        blocks = [[p for p in block.parameters() if p.requires_grad] for block in blocks_of(model, 2) or ()]
        self.block = {id(p): params for params in blocks for p in params}
        self.missing = {id(params): len(params) for params in blocks}

    def __call__(self, p: Tensor) -> None:
        """The gradient of p is complete."""
        params = self.block.get(id(p), [])
        if not params:
            return
        self.missing[id(params)] -= 1
        if not self.missing[id(params)]:
            for q in params:
                q.grad = None
            self.tracker.stay(0 if self.added else sum(shard(q, self.shards) for q in params), "gradients")


def follow(
    model: Any, loss_fn: LossFn, rows: int, sequence: int, tracker: Tracker, stand: Stand,
    release: dict[int, int] | None, middle: list[nn.Parameter], cut: Cut | None = None,
) -> None:  # fmt: skip
    """Take one forward and backward pass under the tracker, marking where each block begins and ends."""
    forward = True

    def begins(i: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not forward:  # checkpointing calls the block again
                return
            tracker.mark(f"forward of layer {i}")
            x = args[0] if args else kwargs.get("hidden_states")
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(
                    lambda _: tracker.mark(f"backward of layer {i - 1}" if i else "backward of the embedding")
                )

        return hook

    def accumulated(p: Tensor) -> None:
        if release is not None:
            tracker.pass_by(release[id(p)])
            p.grad = None
        elif p.grad is not None:
            tracker.rename(p.grad, "gradients")
            if cut is not None:
                cut(p)

    handles: list[Any] = [
        p.register_post_accumulate_grad_hook(accumulated) for p in model.parameters() if p.requires_grad
    ]
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is not None:
        handles.append(head.register_forward_pre_hook(lambda *_: tracker.mark("head and loss") if forward else None))
    for i, block in enumerate(blocks_of(model, 3) or ()):
        handles.append(block.register_forward_pre_hook(begins(i), with_kwargs=True))
    tracker.segments.clear()
    tracker.name, tracker.most, tracker.top = "forward of the embedding", tracker.total, dict(tracker.live)
    try:
        with tracker, stand:
            ids = torch.zeros(rows, sequence, dtype=torch.long, device="meta")
            loss = loss_fn(model, ids, ids)
            forward = stand.caching = False
            tracker.mark(f"casts of layer {MIDDLE} end")
            for p in middle:
                stand.casts.pop(id(p), None)
            tracker.mark("backward of the head and the last layer")
            stand.casts.clear()
            # Tensor.backward would leave `stand`, which blocks that are computed again need
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, accumulate_grad=True)
            del loss, ids
    finally:
        for handle in handles:
            handle.remove()
    tracker.mark("end")


def extrapolate(segments: list[Segment], extra: int, before: Bytes) -> Peak:
    """The peak over all stretches, with those of the middle one of three blocks repeated `extra` times more."""
    live = {kind: before.get(kind, 0) for kind in KINDS}
    start = dict.fromkeys(KINDS, 0)
    best, kept = Segment("", live, live), 0
    for segment in segments:
        for _ in range(1 + extra * (f"layer {MIDDLE}" in segment.name)):
            begin = live
            top = {kind: begin[kind] + segment.top[kind] - start[kind] for kind in KINDS}
            live = {kind: begin[kind] + segment.end[kind] - start[kind] for kind in KINDS}
            if sum(top.values()) > sum(best.top.values()):
                best, kept = Segment(segment.name, live, top), begin["activations"]
        start = segment.end
    kept = min(kept, best.top["activations"])
    split = {**best.top, "activations": kept, "temporaries": best.top["activations"] - kept}
    return Peak(best.name, split)
