"""The command `foamlab`: arguments in, exit code out. Together with `display.py` the only room that prints.

A subcommand is one entry of `COMMANDS` and one function, whose signature is the flags and whose docstring is their
help (`arguments.py`). Heavy imports stay inside the functions: `foamlab --help` must be instant.

Exit codes: 0 done; 1 a bug (with its traceback); 2 something the user can mend (one line); 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from ..config import RunConfig
from ..errors import UserError, known_name
from ..signals import as_interrupts, silence
from ..text import fitted, table
from . import arguments, catalog, contest_commands

INTERRUPTED = 130
# of a write, not of a file that was to be opened: nobody reads, the terminal is gone, the disk or a quota is full
UNWRITTEN = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Command:
    """A subcommand: one line of help, examples, and its function, which gives an exit code, a text or nothing."""

    help: str
    examples: str
    function: Callable[..., int | str | None]


# ---------------------------------------------------------------------------------------------- the subcommands


def train(config: RunConfig, resume: str = "", dry_run: bool = False) -> int:
    """Train a language model: a preset or a YAML file, changed by flags, into a run folder.

    Args:
        resume: run folder to go on with, from its last checkpoint, with the settings it keeps.
        dry_run: resolve the settings, build the model without memory, say what would be trained; touch nothing.
    """
    if dry_run:
        from ..training.preview import preview

        print(preview(config))
        return 0
    if os.environ.get("RANK", "0") == "0":
        print(f"{config.model.name} with {config.optimizer.name}: loading torch", flush=True)  # which takes seconds
    from ..training.run import train as run
    from .run_display import display

    with display() as on_event:
        result = run(config, resume=Path(resume) if resume else None, on_event=on_event)
    return INTERRUPTED if result.status == "interrupted" else 0


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
    """Tell what memory a run needs, and what fits a card, before anything runs.

    Args:
        gpu: a card (rtx-4090, h100, ...) or a size (24GB is 24e9 bytes, 24GiB is 24 x 2^30); empty means this machine.
        gpus: data-parallel processes that share the batch.
        check: also take two real steps here and compare (on train.device).
        chart: show weights and optimizer state as the paper's memory chart counts them instead.
        rivals: list the optimizers of other packages too (importing them takes seconds).
        json: print everything as JSON.
        write: files to write, separated by commas: .html, .json, .yaml (settings that fit), .png, .svg, .pdf.
    """
    from json import dumps

    from .. import machine
    from ..config import plain
    from ..data.tokenizer import vocabulary
    from ..memory import advise, view
    from ..memory.planner import Planner

    here = machine.choose_device(config.train.device)
    device = "cuda" if gpu else here.type
    brings = "/" in config.model.name or Path(config.model.name).exists()  # such a model has its own vocabulary
    known = None if brings else vocabulary(config.data.tokenizer)[1]
    if check:
        from ..studies import plan_check

        print(plan_check.text(plan_check.check(config, str(here), known)))
        return 0
    planner = Planner(config, device=device, gpus=gpus, card=gpu or advise.available(here), vocabulary=known)
    if chart:
        sizes = advise.chart(planner, config)
        print(dumps(sizes) if json else table(("", "GB"), [(k, f"{v / 1e9:.1f}") for k, v in sizes.items()]))
        return 0
    answer = advise.fit(planner, config, rivals)
    settings = plain(answer.mildest.config) if answer.mildest else {}
    print(dumps({**answer.as_dict(), "settings": settings}) if json else view.text(answer, sys.stdout.isatty()))
    for path in filter(None, write.split(",")):
        view.save(answer, Path(path), settings)
        print(f"wrote {path}", file=sys.stderr)
    if answer.why:
        raise UserError(answer.why)
    return 0


def report(
    *runs: Path, out: Path = Path("report.html"), static: str = "", tables: bool = False, target: float = 0
) -> None:
    """Compare runs, or tell of a contest: a table here, and one self-contained HTML page with charts and settings.

    Args:
        runs: run folders, folders that hold some, or the folder of one contest or ablation. Contests among runs get a
            line each.
        out: the page; it needs no network to be read.
        static: also write the charts as pictures: png, svg, pdf, separated by commas.
        tables: also write the figures as CSV.
        target: loss whose cost is told; 0 means the highest final loss of the runs, in a contest that of adamw.
    """
    from ..contest import inventory, page
    from ..report import runs_page as runspage

    found = inventory.take(runs)
    for path, why in found.skipped.items():
        print(f"skipped {path}: {why}", file=sys.stderr)
    more: dict[str, Any] = {
        "static": [kind for kind in static.split(",") if kind],
        "tables": tables,
        "target": target or None,
    }
    if found.contest:
        print(fitted(page.compare_table([found.contest])))
        written = page.report([found.contest], out, **more)
    else:
        rows = runspage.compare_table(found.runs)
        print(fitted(rows), *runspage.legend(rows), sep="\n")
        print(*found.contests.values(), sep="\n", end="\n" * bool(found.contests))
        written = runspage.report(found.runs, out, contests=[*found.contests.values()], **more)
    for path in written:
        print(f"wrote {path}")


def bench(
    what: str = "step",
    /,
    *,
    model: str = "",
    optimizers: str = "",
    dtypes: str = "float32,bfloat16",
    pairs: int = 30,
    threads: int = 0,
    device: str = "cpu",
    everything: bool = False,
) -> None:
    """Time optimizer steps against torch's fused AdamW (step), or the whole loop against a bare one (train).

    Args:
        what: step or train.
        model: preset whose shapes are stepped (llama-60m), or which is trained (llama-1m).
        optimizers: names, separated by commas; those of `foamlab optimizers`, and for step also foam-0, foam-1, ...
        dtypes: of weights and gradients, for step.
        pairs: timed pairs for each optimizer.
        threads: CPU threads; 0 leaves torch's choice.
        device: cpu or cuda, for step.
        everything: step all weights of the model, not only the matrices that fold.
    """
    from ..config import ModelConfig
    from ..machine import threads as using
    from ..studies import bench as lab

    known_name(what, ("step", "train"), "bench")
    names = tuple(name for name in optimizers.split(",") if name)
    with using(threads):
        if what == "train":
            config = RunConfig(model=ModelConfig(model or "llama-1m"))
            rows = [r.cells() for r in lab.bench_train(config, names or lab.LOOPS, pairs)]
            print(table(lab.TrainRow.HEADER, rows))
        else:
            chosen = names or lab.STEPS
            steps = lab.bench_step(model or "llama-60m", chosen, dtypes.split(","), pairs, device, everything)
            print(table(lab.StepRow.HEADER, [r.cells() for r in steps]))


def study(
    what: str = "convergence",
    /,
    *,
    levels: str = "0,2,4,row",
    longest: int = 13,
    seeds: int = 8,
    rate: float = 0.1,
    seed: int = 0,
    out: Path = Path("study"),
) -> None:
    """Measure the theory: the mean squared gradient norm against the length T of a run (docs/theory.md).

    Args:
        what: convergence.
        levels: fold levels, separated by commas.
        longest: T runs over 64, 128, ..., 2^longest; at least 7.
        seeds: problems with a noise of their own; the intervals are over these.
        rate: the learning rate of a run is rate / sqrt(T).
        seed: of all that is random.
        out: folder for study.html, study.json, study.csv and the pictures.
    """
    import time

    from ..machine import threads
    from ..studies import convergence as lab
    from .run_display import display

    known_name(what, ("convergence",), "study")
    began = time.monotonic()
    with display(sys.stderr) as show, threads(1):

        def progress(share: float) -> None:
            if time.monotonic() - began > 2:
                show({"kind": "prepare", "stage": "study", "share": share})

        lengths = [2**k for k in range(6, longest + 1)]
        found = lab.convergence(lab.levels_of(levels), lengths, seeds, rate, seed, progress)
    head, *rows = lab.table(found)
    print(table(head, rows))
    for path in lab.write(found, out):
        print(f"wrote {path}", file=sys.stderr)


COMMANDS: dict[str, Command] = {
    "train": Command(
        "train a model, or resume a run",
        "foamlab train demo\n"
        "foamlab train llama-60m-paper --dry_run\n"
        "foamlab train demo --optimizer.name adamw --optimizer.lr 3e-3\n"
        "foamlab train my.yaml --train.steps 100 --optimizer.options.level 3\n"
        "foamlab train demo --print_config > my.yaml\n"
        "foamlab train --resume runs/llama-1m-foam-1",
        train,
    ),
    "plan": Command(
        "tell what memory a run needs, and what fits a card",
        "foamlab plan llama-7b --gpu 24GB\n"
        "foamlab plan llama-1.3b-paper --gpu rtx-4090 --data.sequence 1024 --write plan.html,fits.yaml\n"
        "foamlab plan qwen-0.5b --gpu 8GiB --optimizer.options.level row --train.batch 64\n"
        "foamlab plan demo --check",
        plan,
    ),
    "models": Command("list the models", "foamlab models\nfoamlab models llama-60m", catalog.models),
    "optimizers": Command(
        "list the optimizers and their options", "foamlab optimizers\nfoamlab optimizers foam", catalog.optimizers
    ),
    "datasets": Command("list the data sets", "foamlab datasets", catalog.datasets),
    "presets": Command(
        "list the recipes, or print one", "foamlab presets\nfoamlab presets demo > my.yaml", catalog.presets
    ),
    "bench": Command(
        "time optimizer steps, or the whole loop",
        "foamlab bench step\n"
        "foamlab bench step --model llama-130m --optimizers foam-3,adamw-foreach\n"
        "foamlab bench train",
        bench,
    ),
    "compare": Command(
        "a fair contest between optimizers",
        "foamlab compare demo --optimizers foam-split,adamw,adamw-split,muon --out runs/contest\n"
        "foamlab compare demo --optimizers foam,adamw --lr 1e-3,3e-3 --seeds 0,1,2,3,4\n"
        "foamlab compare --resume runs/contest",
        contest_commands.compare,
    ),
    "ablate": Command(
        "the paper's ablations of FOAM",
        "foamlab ablate demo --studies residual,level --out runs/ablation\nfoamlab ablate --resume runs/ablation",
        contest_commands.ablate,
    ),
    "study": Command(
        "measure what the theory says",
        "foamlab study convergence\nfoamlab study convergence --levels 3,row --longest 11 --seeds 4 --out runs/study",
        study,
    ),
    "report": Command(
        "write an HTML page about runs or a contest",
        "foamlab report runs/* --out report.html\nfoamlab report runs/contest --static png --tables",
        report,
    ),
}


# ---------------------------------------------------------------------------------------------- from words to calls


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115, `>&-`
    if isinstance(sys.stdout, TextIOWrapper):  # what the terminal's encoding lacks is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with as_interrupts():
            code = _answer(args)
            sys.stdout.flush()  # here a full disk is still an error that can be told
            return code
    except UserError as e:
        return _fail(" ".join(str(e).split()))
    except ModuleNotFoundError as e:
        if (e.name or "foamlab").startswith(("foamlab", "torchfoam")):
            raise
        return _fail(f"{e.name} is not installed: pip install 'torchfoam[lab]'")
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            print("foamlab: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as e:
        if e.filename is not None or e.errno not in UNWRITTEN:
            raise
        silence(sys.stdout)  # else what is left to write fails again at exit
        return 0 if e.errno == errno.EPIPE else _fail(f"cannot write the output: {e.strerror}")  # `| head`


def _answer(args: list[str]) -> int:
    """What a command line asks for; the exit code."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("torchfoam"))
        return 0
    command = COMMANDS[known_name(args[0], COMMANDS, "command")]
    told = arguments.call(args[0], command.function, command.examples, args[1:])
    if isinstance(told, str):
        print(told.removesuffix("\n"))
        return 0
    return told or 0


def _fail(message: str) -> int:
    with suppress(OSError):
        print(f"foamlab: error: {message}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = "\n".join(f"  {name:<12}{command.help}" for name, command in COMMANDS.items())
    return (
        "usage: foamlab COMMAND ...\n\n"
        "The lab around torchfoam: train language models with FOAM and its rivals, and compare them.\n\n"
        f"commands:\n{lines}\n\n"
        "`foamlab COMMAND --help` explains each, with examples. To begin: foamlab train demo"
    )
