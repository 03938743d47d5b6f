"""What fits a card, and the smallest change that makes a run fit.

Ways to save are tried in a stated order: what changes no result first, then what loses least (docs/planning.md gives
the evidence). A run that cannot fit is refused before it starts; one that ran out of memory is answered with what to
change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from torchfoam import FOAM

from .. import optimizers
from ..config import OptimizerConfig, RunConfig, differences, flat, to_dict
from ..errors import UserError
from ..settled import Settled
from ..text import gb
from . import simulate
from .planner import Plan, Planner

LEVELS = (2, 3, 4, 6, 8, "row")
STATES = ("float32", "bfloat16", "int8")
CHUNK = 1024  # tokens whose logits exist at once


@dataclass(frozen=True)
class Fit:
    """The answer to "what fits?".

    Args:
        asked: the run as it was set.
        smallest: the run with the smallest change that fits; None if nothing does.
        changes: those changes, as flags of `foamlab train`.
        why: why nothing fits, or "".
        rows, sequence: most rows a pass (at the sequence length set), and the longest sequence (one row a pass), that
            `smallest` has room for; 0 where nothing fits or there is no card.
        rivals: for every optimizer at its defaults: name, options, state, total (without the step's own), fits, peak.
        sharded: number of GPUs -> bytes on each, if the run is sharded over them by FSDP2 (modelled).
    """

    asked: Plan
    smallest: Plan | None
    changes: list[str]
    why: str
    rows: int
    sequence: int
    rivals: list[dict[str, Any]]
    sharded: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        smallest = self.smallest.as_dict() if self.smallest else None
        plans = {"asked": self.asked.as_dict(), "smallest_change": smallest, "mildest": smallest}  # as 0.2 calls it
        keys = ("changes", "why", "rows", "sequence", "rivals", "sharded")
        return plans | {key: getattr(self, key) for key in keys}


def fit(planner: Planner, config: RunConfig, everything: bool = False) -> Fit:
    """Plan a run, and find the smallest change with which it fits the planner's card.

    `everything`: compare also with the optimizers of other packages, whose imports take seconds.

    Raises:
        UserError: what `plan` raises.
    """
    asked = planner.plan(config)
    smallest, why = smallest_change(planner, asked) if planner.capacity else (asked, "")
    rows = sequence = 0
    if smallest and planner.capacity:
        rows, sequence = most_rows(planner, smallest.config), longest(planner, smallest.config)
    many = (2, 4, 8) if not config.train.release else ()  # each would step on its own gradient
    gpus = {n: sharded(planner, config, n) for n in many if config.train.batch >= n}
    changes = flags(asked.config, smallest.config) if smallest else []
    return Fit(asked, smallest, changes, why, rows, sequence, rivals(planner, asked, everything), gpus)


# ---------------------------------------------------------------------------------------------- the smallest change


def variants(asked: RunConfig, gpus: int = 1) -> Iterator[RunConfig]:
    """Ways to save memory, smallest change first: what comes first in this product is the last to change."""
    t = asked.train
    precisions = [t.precision] + ["bfloat16"] * (t.precision != "bfloat16")
    again = [asked.model.checkpointing] + [True] * (not asked.model.checkpointing)
    chunks = [t.chunked_loss] + [CHUNK] * (not t.chunked_loss and t.micro_batch * asked.data.sequence > CHUNK)
    for chosen, precision in product(optimizer_choices(asked.optimizer), precisions):
        ours = optimizers.ours(chosen.name)
        # gradient release cannot add up micro-batches, nor clip by the common norm
        freed = {"release": True, "clip": 0.0, "clip_each": t.clip or t.clip_each, "residual_every": 0}
        releases: list[dict[str, Any]] = [{}] + [freed] * (ours and not t.release and gpus == 1)
        for release, state, checkpointing, chunk in product(releases, states(chosen), again, chunks):
            options = {**chosen.options, "state": state} if state else chosen.options
            yield replace(
                asked,
                optimizer=optimizers.resolve(replace(chosen, options=options)),
                train=replace(t, precision=precision, chunked_loss=chunk, **release),
                model=replace(asked.model, checkpointing=checkpointing),
            )


def optimizer_choices(asked: OptimizerConfig) -> list[OptimizerConfig]:
    """The optimizer as asked, then FOAM at its rates with ever wider blocks."""
    ours = optimizers.ours(asked.name)
    level = asked.options.get("level", 2) if ours else 0
    wider = [x for x in LEVELS if level != "row" and (x == "row" or int(x) > int(level))]
    base = asked if ours else OptimizerConfig("foam", asked.lr, asked.betas, asked.eps, asked.weight_decay, asked.scale)
    return [asked] + [replace(base, options={**base.options, "level": x}) for x in wider]


def states(chosen: OptimizerConfig) -> list[str]:
    """The state as asked, then narrower kinds, where the optimizer has kinds."""
    if not optimizers.ours(chosen.name):
        return [""]
    asked = chosen.options.get("state", "float32")
    return [asked] + (list(STATES[STATES.index(asked) + 1 :]) if asked in STATES else ["int8"])


def smallest_change(planner: Planner, asked: Plan) -> tuple[Plan | None, str]:
    """(the plan with the smallest change that fits, ""), or (None, why nothing does)."""
    assert planner.capacity
    limit, target = planner.capacity, asked.card or gb(planner.capacity)
    least = asked.total
    floors: dict[str, int] = {}
    for config in variants(asked.config, planner.gpus):
        size = planner.sizes(config)
        floor = {"weights": size["weights"], "gradients": 0 if config.train.release else size["gradients"]}
        floors = {key: min(n, floors.get(key, n)) for key, n in floor.items()}
        if sum(floor.values()) <= limit and sum(floor.values()) + planner.optimizer(config).state <= limit:
            found = fewer_rows(planner, config)
            if found.fits:
                return found, ""
            least = min(least, found.total)
    if floors["weights"] > limit:
        return None, f"nothing fits {target}: the weights alone need {gb(floors['weights'])}"
    if (both := floors["weights"] + floors["gradients"]) > limit:
        return None, f"nothing fits {target}: weights and gradients alone need {gb(both)}"
    return None, f"nothing fits {target}: the least that was tried needs {gb(least)}"


def fewer_rows(planner: Planner, config: RunConfig) -> Plan:
    """The plan with the micro-batch halved until it fits, or with one row a pass."""
    plan = planner.plan(config)
    while not plan.fits and (rows := plan.config.train.micro_batch) > 1:
        if rows > 4 and not planner.plan(with_rows(config, 1)).fits:
            return planner.plan(with_rows(config, 1))
        plan = planner.plan(with_rows(config, rows // 2))
    return plan


def with_rows(config: RunConfig, rows: int) -> RunConfig:
    """`rows` a pass; gradients that are released cannot be added up, so there it is the batch that shrinks."""
    batch = rows if config.train.release else config.train.batch
    return replace(config, train=replace(config.train, micro_batch=rows, batch=batch))


def flags(old: RunConfig, new: RunConfig) -> list[str]:
    """What changed, as flags of `foamlab train`."""
    was, now = ({k: x for k, x in flat(to_dict(c), 3).items() if not _whole(k, c)} for c in (old, new))
    changed = differences({"optimizer.options.state": "float32", **was}, now)
    return [f"--{key} {str(x).lower() if isinstance(x, bool) else x}" for key, (_, x) in changed.items()]


def _whole(key: str, config: RunConfig) -> bool:
    """Whether a setting says nothing: a micro-batch as large as the batch."""
    return key == "train.micro_batch" and config.train.micro_batch == config.train.batch


# ---------------------------------------------------------------------------------------------- how much fits


def largest(need: Callable[[int], int], capacity: int, limit: int) -> int:
    """The largest n <= limit with need(n) <= capacity, 0 if there is none; `need` rises, nearly in a line."""
    low, at_low = 1, need(1)
    if at_low > capacity:
        return 0
    high, guess = limit + 1, 2
    slope = 0.0
    while high - low > 1:
        at_guess = need(guess)
        slope = (at_guess - at_low) / (guess - low) or slope
        if at_guess <= capacity:
            low, at_low = guess, at_guess
        else:
            high = guess
        step = (capacity - at_low) / slope if slope > 0 else high - low
        guess = min(max(low + int(min(step, high - low)), low + 1), high - 1)
    return low


def most_rows(planner: Planner, config: RunConfig, limit: int = 4096) -> int:
    """Most rows a pass, with gradients added up over passes where that can be."""

    def need(rows: int) -> int:
        batch = rows if config.train.release else max(config.train.batch, 2 * rows * planner.gpus)
        batch += -batch % planner.gpus
        return planner.plan(replace(config, train=replace(config.train, batch=batch, micro_batch=rows))).total

    assert planner.capacity
    return largest(need, planner.capacity, limit)


def longest(planner: Planner, config: RunConfig, unit: int = 64, limit: int = 2**20) -> int:
    """The longest sequence, in steps of `unit` tokens, with one row a pass."""

    def need(n: int) -> int:
        one = with_rows(replace(config, data=replace(config.data, sequence=n * unit)), 1)
        return planner.plan(one).total

    assert planner.capacity
    return unit * largest(need, planner.capacity, (planner.positions(config) or limit) // unit)


def sharded(planner: Planner, config: RunConfig, gpus: int) -> int:
    """Bytes on each of `gpus` GPUs if FSDP2 shards weights, gradients and state by their first dimension.

        peak = (weights + state) / n + buffers + max(passes, step)
        passes = max over t of  gathered + gradients(t) + activations(t) + logits(t) + temporaries(t)
        step   = gradients / n + what the optimizer's step needs

    Modelled: in the passes the largest block's weights are gathered twice (one computes, the next is fetched), a
    block's gradients are whole until the last of them is there, what belongs to no block is whole, weights and
    gradients, to the end; and each GPU passes its share of the rows.
    """
    batch = config.train.batch - config.train.batch % gpus
    few = Planner(planner.base, planner.source, planner.device, gpus, planner.card, planner.vocabulary)
    few._cache = planner._cache
    settled = few.settle(replace(config, train=replace(config.train, batch=batch)))
    model = few.model(settled)
    optimizer = few.optimizer(settled)
    size = few.sizes(settled)
    blocks: Any = simulate.blocks_of(model, 2) or []
    inside = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    gathered = 2 * max(inside, default=0) + size["weights"] - sum(inside)
    trained = [p for p in model.parameters() if p.requires_grad]
    gradients = sum(simulate.shard(p, gpus) for p in trained)
    kept = sum(simulate.shard(p, gpus) for p in model.parameters()) + size["buffers"]
    kept += int(optimizer.state * gradients / max(size["gradients"], 1))
    peak = kept + max(gathered + few.passes(settled, gpus).total, gradients + optimizer.scratch)
    return peak + sum(few.overheads(peak).values())


def rivals(planner: Planner, asked: Plan, everything: bool) -> list[dict[str, Any]]:
    """The run under each optimizer at its defaults, without what the step itself needs for a while.

    FOAM's moments are as wide as those of the others, which are held like the weights: under bfloat16 weights they are
    bfloat16 too, unless the optimizer's own options say otherwise (foam-int8).

    Optimizers of other packages are left out, unless asked for or `everything` is. One that is not available here, or
    not with the run's other settings, is left out.
    """
    rows = []
    narrow = asked.config.train.precision == "bfloat16"
    for name, entry in optimizers.OPTIMIZERS.items():
        if entry.install and not everything and name != asked.config.optimizer.name:
            continue
        ours = optimizers.ours(name)
        options: dict[str, Any] = {"from_scratch": True} if entry.adapts else {}
        if narrow and ours and "state" not in entry.options:
            options["state"] = "bfloat16"
        train = asked.config.train if ours else replace(asked.config.train, release=False, residual_every=0)
        rival = replace(asked.config, optimizer=OptimizerConfig(name, options=options), train=train)
        try:
            plan = planner.plan(rival, step=False)
        except UserError:
            continue
        size = {"state": plan.exact["state"], "total": plan.total, "peak": plan.peak}
        rows.append({"name": name, "options": options, "fits": plan.fits, **size})
    return rows


def chart(planner: Planner, config: RunConfig) -> dict[str, int]:
    """Weights and optimizer state as the paper's memory chart counts them: 2 bytes * (parameters + moments kept).

    GaLore and APOLLO keep, for an m x n matrix, two moments of rank r = min(m, n) // 4 and a projection:
    2 r max(m, n) + r min(m, n); all else keeps two full moments.
    """
    from torchfoam import param_groups

    model = planner.model(planner.settle(config))
    groups = {g["name"]: [p for _, p in g["params"]] for g in param_groups(model)}
    matrices, rest = groups["folded"], groups.get("unfolded", [])
    n = sum(p.numel() for p in model.parameters())
    plain, folded = 2 * sum(p.numel() for p in rest), sum(p.numel() for p in matrices)
    low = 0
    for p in matrices:
        short, long = sorted((p.shape[-1], p.numel() // p.shape[-1]))
        low += 2 * (short // 4) * long + (short // 4) * short

    def foam(level: Any) -> int:
        state = FOAM(param_groups(model, level=level), state="param").state.values()
        return sum(x.numel() for kept in state for name, x in kept.items() if name != "step")

    moments = {"Adam": plain + 2 * folded, "Muon": plain + folded, "GaLore, APOLLO": plain + low}
    moments |= {"FOAM level 2": foam(2), "FOAM row": foam("row")}
    return {name: 2 * (n + kept) for name, kept in moments.items()}


# ---------------------------------------------------------------------------------------------- before and after


def available(device: torch.device) -> int:
    """Bytes that a run can have on this device now, 0 if unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device)
    found = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(x.split()[1]) * 1024 for x in lines if x.startswith("MemAvailable")))
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            found.append(int(limit) - int((group / "memory.current").read_text()))
    except (OSError, StopIteration, ValueError):
        pass
    return max(min(found, default=0), 0)


def preflight(run: Settled) -> str:
    """A warning if the run may not fit the device, or ""; `train.memory` says what follows.

    Raises:
        UserError: it cannot fit; the message says what to change.
    """
    capacity = available(run.device) if run.config.train.memory != "ignore" else 0
    if not capacity:
        return ""
    planner = Planner.of(run, capacity)
    try:
        plan = planner.plan(run.config)
    except UserError as e:
        return f"memory could not be planned: {e}"
    if plan.total <= 0.95 * capacity:
        return ""
    advice = advise(planner, plan)
    if plan.total > 1.05 * capacity and run.config.train.memory == "refuse":
        raise UserError(f"{advice} (--train.memory warn tries it all the same)")
    return advice


def advise(planner: Planner, plan: Plan) -> str:
    """One line: what a run needs, what there is, and what to change."""
    assert planner.capacity
    parts = ", ".join(f"{name} {gb(size)}" for name, size in sorted(plan.peak.items(), key=lambda x: -x[1])[:4] if size)
    smallest, why = smallest_change(planner, plan)
    hint = f"it fits with {' '.join(flags(plan.config, smallest.config))}" if smallest else why
    return f"this run needs about {gb(plan.total)} of {gb(planner.capacity)} ({parts}): {hint}"


def after(run: Settled) -> str:
    """What to say after memory ran out: the planner's advice for this device."""
    device = run.device
    total = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else available(device)
    planner = Planner.of(run, total)
    try:
        plan = planner.plan(run.config)
        if not planner.capacity:
            return f"out of memory: this run needs about {gb(plan.total)}"
        if plan.fits:  # others use the device, or the plan was too low: ask for a tenth less than there is
            planner.capacity = int(0.9 * plan.total)
        return f"out of memory: {advise(planner, replace(plan, capacity=planner.capacity))}"
    except UserError as e:
        return f"out of memory; {e}"
