"""`foamlab plan`: the memory of a run before it starts."""

from __future__ import annotations

import sys
from pathlib import Path

from ...config import RunConfig
from ...errors import UserError
from ...text import table
from ..command import Command


def plan(
    config: RunConfig,
    gpu: str = "",
    gpus: int = 1,
    check: bool = False,
    chart: bool = False,
    rivals: bool = False,
    json: bool = False,
    write: str = "",
) -> int:
    """Estimate a run's peak memory before it starts, and find settings that fit a GPU.

    Args:
        gpu: a GPU (rtx-4090, h100, ...) or a size (24GB is 24e9 bytes, 24GiB is 24 x 2^30); empty means this machine.
        gpus: data-parallel processes that share the batch.
        check: take two real steps on train.device and compare the plan with them.
        chart: show weights and optimizer state as the paper's memory chart counts them instead.
        rivals: include optimizers from other packages (importing them takes seconds).
        json: print everything as JSON.
        write: files to write, separated by commas: .html, .json, .yaml (settings that fit), .png, .svg, .pdf.
    """
    from json import dumps

    from ... import machine
    from ...config import to_dict
    from ...data.tokenizer import vocabulary
    from ...memory import advise, view
    from ...memory.planner import Planner
    from ...models import described

    here = machine.choose_device(config.train.device)
    device = "cuda" if gpu else here.type
    # a model that others describe has a vocabulary of its own
    known = None if described(config.model.name) else vocabulary(config.data.tokenizer)[1]
    if check:
        from ...studies import plan_check

        print(plan_check.text(plan_check.check(config, str(here), known)))
        return 0
    planner = Planner(config, device=device, gpus=gpus, card=gpu or advise.available(here), vocabulary=known)
    if chart:
        sizes = advise.chart(planner, config)
        print(dumps(sizes) if json else table(("", "GB"), [(k, f"{v / 1e9:.1f}") for k, v in sizes.items()]))
        return 0
    answer = advise.fit(planner, config, rivals)
    settings = to_dict(answer.smallest.config) if answer.smallest else {}
    print(dumps({**answer.as_dict(), "settings": settings}) if json else view.text(answer, sys.stdout.isatty()))
    for path in filter(None, write.split(",")):
        view.save(answer, Path(path), settings)
        print(f"wrote {path}", file=sys.stderr)
    if answer.why:
        raise UserError(answer.why)
    return 0


COMMAND = Command(
    plan,
    group="run",
    help="estimate a run's peak memory, and find settings that fit a GPU",
    examples=(
        "foamlab plan llama-7b --gpu 24GB",
        "foamlab plan llama-1.3b-paper --gpu rtx-4090 --data.sequence 1024 --write plan.html,fits.yaml",
        "foamlab plan qwen-0.5b --gpu 8GiB --optimizer.options.level row --train.batch 64",
        "foamlab plan demo --check",
    ),
    first_word=("PRESET", "FILE.yaml", "MODEL"),
)
