"""The recipes for the paper's tables: each is what docs/recipes.md says, may begin, and runs under torchrun."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import small
import torch
import yaml
from safetensors.torch import load_file

from foamlab import models, optimizers
from foamlab.cli import arguments
from foamlab.cli.command import Command
from foamlab.config import RunConfig, to_dict
from foamlab.data.tokenizer import vocabulary
from foamlab.memory import gpus
from foamlab.memory.planner import Planner
from foamlab.text import gb
from foamlab.training import checkpoint
from foamlab.training.preview import preview
from foamlab.training.run import train
from tolerances import exact

PAGE = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text(encoding="utf-8")
# of the page: (processes, what follows `train`) of each command, {rival: flags}, cells of the table of memory
COMMANDS = [
    (int(n), shlex.split(words))
    for n, words in re.findall(r"^torchrun --nproc-per-node (\d+) -m foamlab train (.+)$", PAGE, re.M)
]
RIVALS = {
    name: shlex.split(words)
    for name, words in re.findall(r"^\| ([^|]+?) \| `(--optimizer\.name [^`]+)` \|", PAGE, re.M)
}
FLAGS = RIVALS | {f"FOAM {state}": ["--optimizer.options.state", state] for state in ("bfloat16", "int8")}
MEMORY = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if re.match(r"\| \S+ \| \d+ \|", line)]
HEAD = next(line for line in PAGE.splitlines() if line.startswith("| preset | n |")).strip("| ").split(" | ")
RECIPES = [
    name
    for name, path in arguments.presets().items()
    if yaml.safe_load(path.read_text(encoding="utf-8"))["data"]["name"] == "c4"
]
TOKENS = (
    420  # in one document of C4, on average: 156 B in 365 M documents (Dodge et al., arXiv 2104.08758), a little less
)
LOOSE = 5e-3  # Muon orthogonalises in bfloat16, and Adam turns rounding of tiny gradients into whole steps
SMALL = {"llama": "llama-1m", "qwen": "qwen-10m", "gpt2": "gpt2-10m"}


def parse(*words: str) -> RunConfig:
    """The settings that `foamlab train WORDS` would run with."""
    taken: list[RunConfig] = []

    def take(config: RunConfig) -> None:
        taken.append(config)

    arguments.call(Command(take, "run", "", ()), list(words))
    return taken[0]


def test_the_page_names_every_recipe_and_every_rival() -> None:
    assert {words[0] for _, words in COMMANDS} == {row[0] for row in MEMORY} == set(RECIPES)
    assert len(COMMANDS) == len(RECIPES) + 3  # the shorter sequences of llama-130m-long
    assert {parse("demo", *flags).optimizer.name for flags in RIVALS.values()} == {
        "adamw", "adamw8bit", "muon", "galore", "apollo"
    }  # fmt: skip
    for flags in RIVALS.values():  # nothing of FOAM's rates is left by accident
        keys = {word for word in flags if word.startswith("--")}
        assert keys == {"--optimizer.name", "--optimizer.lr", "--optimizer.scale", "--optimizer.betas"}


@pytest.mark.parametrize("n, words", COMMANDS, ids=lambda x: " ".join(x) if isinstance(x, list) else None)
def test_a_recipe_is_whole(n: int, words: list[str]) -> None:
    """It may be split over GPUs in equal passes, and there is as much text as it wants."""
    c = parse(*words)
    t, d = c.train, c.data
    for world in (1, 2, 4, 8, n):
        share = t.batch // world
        assert t.batch % world == 0 and share % min(t.micro_batch or share, share) == 0
    each = 1 if d.mode == "paper" else TOKENS / d.sequence  # rows a document gives
    assert t.steps * t.batch <= d.limit * (1 - d.validation) * each
    assert t.eval_tokens <= d.limit * d.validation * each * d.sequence * 0.99
    assert (t.precision, t.warmup, t.final) == ("bfloat16", 0.1, 0.1)
    assert t.batch * d.sequence == 131072  # as many tokens a step as the paper, whatever the length


@pytest.mark.parametrize("name", RECIPES)
def test_a_dry_run_of_a_recipe(name: str) -> None:
    """All that `train` checks before it reads text passes; model, optimizer and a step of it can be made."""
    c = parse(name)
    shown = preview(c)
    assert "foam-paper" in shown and "vocabulary of 32,000; precision bfloat16" in shown
    model = models.build(c.model, 32_000, c.data.sequence, "meta", torch.bfloat16)
    for flags in RIVALS.values():
        optimizer = optimizers.build(parse(name, *flags).optimizer, model)
        held = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(held) == sorted(id(p) for p in model.parameters())


@pytest.mark.parametrize("rival", RIVALS)
def test_a_dry_run_of_a_rival(rival: str) -> None:
    """The flags mean what the page says of them, and a step of it can be made."""
    flags = RIVALS[rival]
    given = dict(zip(flags[::2], flags[1::2]))
    c = parse("llama-60m-paper", *flags)
    full = optimizers.resolve(c.optimizer)
    assert (full.name, full.lr, full.scale) == (
        given["--optimizer.name"], float(given["--optimizer.lr"]), float(given["--optimizer.scale"])
    )  # fmt: skip
    assert full.betas == tuple(json.loads(given["--optimizer.betas"]))
    assert f"name: {full.name}" in preview(c)


def planned(row: list[str], *flags: str) -> str:
    """What the planner says that one GPU needs; it must fit the card."""
    name, n, card = row[:3]
    c = parse(name, *flags)
    plan = Planner(c, gpus=int(n), card=card, vocabulary=vocabulary(c.data.tokenizer)[1]).plan(c)
    assert plan.total < 0.95 * gpus.memory(card)
    return gb(plan.total).removesuffix(" GB")


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row[0])
def test_the_planner_says_what_the_page_says(row: list[str]) -> None:
    assert HEAD[:4] == ["preset", "n", "card", "FOAM"] and planned(row) == row[3]


@pytest.mark.heavy
@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row[0])
def test_the_planner_says_of_the_rivals_what_the_page_says(row: list[str]) -> None:
    assert set(HEAD[4:]) == set(FLAGS) - {"Adam with FOAM's split"}
    assert {rival: planned(row, *FLAGS[rival]) for rival in HEAD[4:]} == dict(zip(HEAD[4:], row[4:]))


@pytest.mark.parametrize("row", MEMORY, ids=lambda row: row[0])
def test_at_equal_precision_foam_needs_least_of_those_that_keep_full_moments(row: list[str]) -> None:
    size = {name: float(cell) for name, cell in zip(HEAD[3:], row[3:])}
    assert size["FOAM int8"] <= size["FOAM bfloat16"] <= min(size["Adam"], size["Muon"])
    assert size["FOAM int8"] < size["8-bit Adam"]


# ---------------------------------------------------------------------------------------------- runs


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A little text in the form of C4's files."""
    folder, draw = tmp_path_factory.mktemp("c4"), random.Random(0)
    with gzip.open(folder / "c4-train.00000-of-01024.jsonl.gz", "wt") as stream:
        for i in range(160):
            text = f"{i} " + " ".join(
                draw.choice(["foam", "folds", "the", "moments"]) for _ in range(draw.randint(9, 60))
            )
            row = {"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": f"https://example.org/{i}"}
            stream.write(json.dumps(row) + "\n")
    return folder


def shrunk(home: Path, name: str, *flags: str, out: Path) -> list[str]:
    """The recipe with a tiny model and text: 2 processes take 4 rows each of every step, in 2 passes."""
    family = parse(name).model.name.partition("-")[0]
    return [
        name, *flags, "--model.name", SMALL[family], "--data.name", f"text:{home}", "--data.tokenizer", "bpe:300",
        "--data.sequence", "32", "--data.validation", "0.2", "--data.cache", str(home / "cache"), "--train.steps", "3",
        "--train.batch", "8", "--train.micro_batch", "2", "--train.precision", "float32", "--train.eval_every", "2",
        "--train.eval_tokens", "512", "--train.checkpoint_every", "2", "--train.threads", "1", "--train.device", "cpu",
        "--out", str(out),
    ]  # fmt: skip


def torchrun(words: list[str]) -> None:
    launch = [
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=localhost:0",
    ]
    done = subprocess.run(
        [sys.executable, *launch, "-m", "foamlab", "train", *words], capture_output=True, text=True, timeout=180,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def run_of(home: Path, out: Path, name: str, *flags: str) -> None:
    """Two processes run the recipe, and come to what one comes to."""
    torchrun(shrunk(home, name, *flags, out=out / "two"))
    info = json.loads((out / "two" / "run.json").read_text())
    assert info["status"] == "done" and info["hardware"]["processes"] == 2
    asked, used = parse(name, *flags), yaml.safe_load((out / "two" / "config.yaml").read_text())
    assert used["optimizer"] == to_dict(replace(asked, optimizer=optimizers.resolve(asked.optimizer)))["optimizer"]
    assert (used["data"]["mode"], used["data"]["limit"]) == (asked.data.mode, asked.data.limit)
    train(parse(*shrunk(home, name, *flags, out=out / "one")))
    one, two = small.metrics(out / "one"), small.metrics(out / "two")
    assert [x["kind"] for x in two] == ["train", "train", "eval", "train", "eval"]
    for a, b in zip(one, two, strict=True):
        assert (a["kind"], a["step"], a["tokens"]) == (b["kind"], b["step"], b["tokens"])
        assert a["loss"] == pytest.approx(b["loss"], rel=LOOSE)


def test_a_recipe_runs_under_torchrun(home: Path, tmp_path: Path) -> None:
    run_of(home, tmp_path, "llama-60m-paper")


@pytest.mark.heavy
@pytest.mark.parametrize("name", [name for name in RECIPES if name != "llama-60m-paper"])
def test_every_recipe_runs_under_torchrun(home: Path, tmp_path: Path, name: str) -> None:
    run_of(home, tmp_path, name)


@pytest.mark.heavy
@pytest.mark.parametrize("rival", RIVALS)
def test_every_rival_runs_under_torchrun(home: Path, tmp_path: Path, rival: str) -> None:
    run_of(home, tmp_path, "llama-60m-paper", *RIVALS[rival])


@pytest.mark.heavy
def test_a_recipe_goes_on_under_torchrun(home: Path, tmp_path: Path) -> None:
    """One process prepares the text, as the page advises; a run from its checkpoint ends as it did."""
    words = shrunk(home, "llama-60m-paper", out=tmp_path / "run")
    ready = [
        *words[:-2],
        "--train.steps",
        "0",
        "--train.eval_tokens",
        "0",
        "--train.sample",
        "",
        "--out",
        str(tmp_path / "ready"),
    ]
    assert train(parse(*ready)).status == "done"
    torchrun(words)
    before = small.metrics(tmp_path / "run")
    whole, older = (checkpoint.found(tmp_path / "run")[k] for k in (-1, 0))
    assert (older.name, whole.name) == ("step-00000002", "step-00000003")
    weights = load_file(whole / "model.safetensors")
    torchrun(["--resume", str(older)])
    assert small.metrics(tmp_path / "run") == before
    for name, x in load_file(checkpoint.found(tmp_path / "run")[-1] / "model.safetensors").items():
        exact(x, weights[name], name)
