"""What a run stands on: processes under torchrun, devices, precision, memory. Nothing of models or data."""

from __future__ import annotations

import ctypes
import gc
import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .errors import UserError

Precision = Literal["float32", "bfloat16", "mixed"]
# rank 0 may be building a token cache, or writing a large checkpoint, while the others wait
PATIENCE = timedelta(hours=6)


@dataclass(frozen=True)
class World:
    """The processes of this run, and the device of this one. Without torchrun: one process."""

    device: torch.device
    rank: int = 0
    size: int = 1

    @classmethod
    @contextmanager
    def join(cls, device: str) -> Iterator[World]:
        """Take part in the processes that torchrun started, with nccl on CUDA and gloo elsewhere; leave at the end.

        Raises:
            UserError: an unknown device, or one that is not there.
        """
        size, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
        place = choose_device(device, local if size > 1 else None)
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if size == 1:
            yield cls(place)
            return
        joined = dist.is_initialized()
        if not joined:
            dist.init_process_group("nccl" if place.type == "cuda" else "gloo", timeout=PATIENCE)
        try:
            yield cls(place, dist.get_rank(), dist.get_world_size())
        finally:
            if not joined:
                dist.destroy_process_group()

    def sum(self, x: Tensor) -> Tensor:
        """Sum `x` over all processes, in place; each gets the same bits."""
        if self.size > 1:
            dist.all_reduce(x)
        return x

    def share(self, x: Any) -> Any:
        """Rank 0's value (plain data), on every rank."""
        box = [x]
        if self.size > 1:
            dist.broadcast_object_list(box, device=self.device)
        return box[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        self.sum(torch.zeros((), device=self.device))

    @contextmanager
    def first(self) -> Iterator[None]:
        """Rank 0 does the block first, the others when it has finished."""
        if self.rank:
            self.barrier()
        yield
        if not self.rank:
            self.barrier()


def choose_device(name: str, local: int | None = None) -> torch.device:
    """The device called `name`: "auto" is CUDA if there is any; under torchrun each process takes its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown train.device {name!r}: use auto, cpu, cuda or cuda:N") from None
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if device.index is None:
            device = torch.device("cuda", local or 0)
        if device.index >= count:
            raise UserError(f"train.device is {device}, but there are {count} CUDA devices here: use cpu or auto")
    elif device.type != "cpu":
        raise UserError(f"train.device {name!r} is not supported: use auto, cpu, cuda or cuda:N")
    return device


def resolve_precision(name: Precision | Literal["auto"], kind: str, bfloat16: bool) -> Precision:
    """What train.precision means on a device of this kind: "auto" is mixed on GPUs that have bfloat16, else float32."""
    if name == "auto":
        return "mixed" if kind == "cuda" and bfloat16 else "float32"
    return name


def choose_precision(name: Precision | Literal["auto"], device: torch.device) -> tuple[Precision, str]:
    """(float32, bfloat16 or mixed, a remark for the user or "") for train.precision on this device."""
    if device.type == "cuda":
        what, fast = "GPU", torch.cuda.is_bf16_supported(including_emulation=False)
    else:
        what = "CPU"
        fast = any(getattr(torch.cpu, f"_is_{x}_supported", bool)() for x in ("avx512_bf16", "amx_tile"))
    chosen = resolve_precision(name, device.type, fast)
    slow = f"this {what} has no fast bfloat16: train.precision {name} will be many times slower than float32 here"
    return chosen, "" if fast or chosen == "float32" else slow


def parallel(model: nn.Module) -> DistributedDataParallel:
    """The model with gradients averaged over all processes. Buffers are alike everywhere: they are not sent each step.

    Newer torch warns of the older name for that.
    """
    known = inspect.signature(DistributedDataParallel).parameters
    name = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
    settings: dict[str, Any] = {name: False}
    return DistributedDataParallel(model, **settings)


class Memory:
    """The peak memory of a stretch of work on one device; the stretch begins when this is made.

    On CUDA it is what the allocator gave out. On CPUs it is the resident memory of the process, interpreter, libraries
    and data included; what was freed before is first given back to the system, so that no earlier work counts.

    Attributes:
        before: bytes held at the beginning; 0 where the system does not tell.
        of: what is measured, in words.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.clean, self.of = device, True, "CUDA allocator"
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)
            return
        gc.collect()
        try:
            ctypes.CDLL(None).malloc_trim(0)
        except (OSError, AttributeError, TypeError):  # not glibc
            self.clean = False
        with suppress(OSError), open("/proc/self/clear_refs", "w") as f:
            f.write("5")
        self.before = _resident("VmRSS")
        self.of = "process, resident"
        if not self.before or self.peak() > self.before + (4 << 20):  # not Linux, or the mark could not be set back
            self.of, self.clean = "process, resident, since it began", False

    def peak(self) -> int:
        """Most bytes held at once since the beginning; 0 where the system does not tell."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        if size := _resident("VmHWM"):
            return size
        try:
            import resource
        except ImportError:  # Windows
            return 0
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)

    def added(self) -> int:
        """Bytes by which the peak stands above the beginning; 0 where that cannot be told."""
        return max(0, self.peak() - self.before) if self.clean else 0


def out_of_memory(error: BaseException) -> bool:
    """Whether the error says that memory ran out, on a GPU or on the host."""
    text = str(error)
    cpu = isinstance(error, RuntimeError) and ("can't allocate memory" in text or "not enough memory" in text)
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or cpu


def _resident(name: str) -> int:
    """A line of Linux's /proc/self/status in bytes: VmRSS (held now), VmHWM (most ever); 0 if there is none."""
    try:
        with open("/proc/self/status", encoding="utf-8") as f:
            return next(int(line.split()[1]) * 1024 for line in f if line.startswith(name + ":"))
    except (OSError, StopIteration):
        return 0


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Let torch use `count` CPU threads in the block; 0 leaves its choice."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
