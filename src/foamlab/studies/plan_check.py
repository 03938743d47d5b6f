"""Predictions held against reality: two real steps of a run, and what they allocated.

On CPUs every allocation of torch's allocator is counted (the profiler sees those inside kernels too), on CUDA the
allocator's own peak is read. Components are separated by counting storages as the simulation does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from .. import machine, models, optimizers
from ..config import RunConfig
from ..errors import UserError
from ..memory import simulate
from ..memory.planner import Planner
from ..settled import open_head
from ..tasks.objective import objective
from ..training.step import Step

SECOND = "foamlab: the second step"


@dataclass(frozen=True)
class Check:
    """Bytes predicted and measured: "weights", "gradients", "state" (all of them), and "total" at the peak.

    `counted` is the part of the total that storages explain; the rest of it are buffers inside kernels.
    """

    predicted: dict[str, int]
    measured: dict[str, int]
    counted: int
    where: str

    @property
    def error(self) -> float:
        """Of the total, relative to what was measured."""
        return self.predicted["total"] / self.measured["total"] - 1

    @property
    def exact(self) -> bool:
        """Whether weights, gradients and state were right to the byte."""
        return all(self.predicted[name] == self.measured[name] for name in ("weights", "gradients", "state"))


def check(config: RunConfig, device: str = "cpu", vocabulary: int | None = None) -> Check:
    """Plan a run, take two real steps of it on random tokens, and compare.

    Raises:
        UserError: what `plan` raises; a device that is not there.
    """
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise UserError("there is no CUDA device here to check on: use --train.device cpu")
    planner = Planner(config, device=device, vocabulary=vocabulary)
    plan = planner.plan(config)
    settings = plan.config
    total = plan.total - plan.peak.get("slack", 0) - plan.peak.get("context", 0)
    predicted = {**plan.exact, "total": total}
    with torch.random.fork_rng(), allocations(device) as peak:
        torch.manual_seed(settings.train.seed)
        dtype = torch.bfloat16 if settings.train.precision == "bfloat16" else torch.float32
        head = open_head(settings)
        model = models.build(settings.model, vocabulary, settings.data.sequence, device, dtype, head=head)
        optimizer = optimizers.build(settings.optimizer, model)
        aim = objective(settings.task, settings.train)
        step = Step(settings.train, model, optimizer, machine.World(torch.device(device)), aim)
        tokens = plan.vocabulary or model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids = torch.randint(tokens, (settings.train.batch, settings.data.sequence), device=device)
        batch = step.batch(*aim.of(ids))
        step(batch)
        gradients: list[int] = []
        with torch.profiler.record_function(SECOND), simulate.Tracker(plan.vocabulary) as tracker:
            step(batch, look=lambda: gradients.append(nbytes(step)))
    tracker.mark("end")
    measured = {
        "weights": sum(p.nbytes for p in model.parameters()),
        "gradients": gradients[0],
        "state": optimizers.state_bytes(optimizer),
        "total": peak(),
    }
    there = measured["weights"] + measured["state"] + sum(b.nbytes for b in model.buffers())
    counted = there + sum(tracker.segments[-1].top.values())
    return Check(predicted, measured, counted, plan.where)


def text(check: Check) -> str:
    """Predicted against measured, as a plain table."""
    lines = [f"{'':12}{'predicted':>16}{'measured':>16}{'':4}bytes"]
    for name, size in check.predicted.items():
        real = check.measured[name]
        verdict = "exact" if size == real else f"{100 * (size / real - 1):+.2f} %" if real else ""
        lines.append(f"{name:12}{size:16,}{real:16,}    {verdict}")
    lines.append(f"the peak: {check.where}; {check.counted:,} bytes of the measured are tensors")
    return "\n".join(lines)


def nbytes(step: Step) -> int:
    """Bytes of all gradients of a step: those there are, or where each is freed at once, as many as weights."""
    there = step.parameters if step.release else [p.grad for p in step.parameters if p.grad is not None]
    return sum(x.nbytes for x in there)


@contextmanager
def allocations(device: str) -> Iterator[Any]:
    """Yields a function that tells, after the block, the peak of allocated bytes while `SECOND` ran."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        yield lambda: torch.cuda.max_memory_allocated() - before
        return
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        yield lambda: peak_of(profile)


def peak_of(profile: Any) -> int:
    """Most bytes that torch's CPU allocator had given out at once while `SECOND` ran."""
    events = sorted(profile.profiler.kineto_results.events(), key=lambda e: e.start_ns())
    begin, end = next((e.start_ns(), e.end_ns()) for e in events if e.name() == SECOND)
    live = peak = 0
    for event in events:
        if event.name() == "[memory]" and event.start_ns() <= end:
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() >= begin else 0
    return peak
