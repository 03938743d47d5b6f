"""Resuming from a run folder of any state: an exact end or one line, and nothing taken over by halves."""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from foamlab.errors import UserError
from foamlab.training import checkpoint
from foamlab.training.run import train
from tolerances import exact

OPTIMIZERS = ("foam", "adamw")


@pytest.fixture(scope="module")
def runs(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """optimizer -> (a run of 4 steps with checkpoints of 2 and 4, the same one on to 6)."""
    place = tmp_path_factory.mktemp("runs")
    for name in OPTIMIZERS:
        settings: dict[str, Any] = {"optimizer": name, "steps": 6, "checkpoint_every": 2, "keep": 3, "warmup": 0}
        train(small.config(home, place / f"{name}-whole", **settings))
        shutil.copytree(place / f"{name}-whole", place / name)
        shutil.rmtree(place / name / "checkpoints" / "step-00000006")
    return {name: (place / name, place / f"{name}-whole") for name in OPTIMIZERS}


def again(home: Path, out: Path, name: str, **changes: Any) -> None:
    settings: dict[str, Any] = {"optimizer": name, "steps": 6, "checkpoint_every": 2, "keep": 3, "warmup": 0, **changes}
    train(small.config(home, out, **settings), resume=out)


def seal(folder: Path) -> None:
    """Make the manifest agree with what the files hold now."""
    manifest = json.loads((folder / "manifest.json").read_text())
    for name in manifest["files"]:
        raw = (folder / name).read_bytes()
        manifest["files"][name] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def change(folder: Path, act: Callable[[dict[str, Any]], Any]) -> None:
    """Change training.pt, under a manifest that is right."""
    saved = torch.load(folder / "training.pt", weights_only=True)
    told = act(saved)
    torch.save(saved if told is None else told, folder / "training.pt")
    seal(folder)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Set the last of `path` where the others lead."""
    *way, key, value = path

    def act(saved: dict[str, Any]) -> None:
        for step in way:
            saved = saved[step]
        saved[key] = value

    return act


def first(saved: dict[str, Any], name: str) -> torch.Tensor:
    """The first tensor called so in the optimizer's state."""
    return next(entry[name] for entry in saved["optimizer"]["state"].values() if name in entry)


WRONG: dict[str, tuple[str, Callable[[dict[str, Any]], Any], str]] = {
    "not a dict": ("adamw", lambda saved: [1, 2], "holds a list"),
    "step text": ("adamw", put("step", "4"), "is of step 4"),
    "step real": ("foam", put("step", 4.0), "step is 4.0"),
    "step true": ("foam", put("step", True), "is of step True"),
    "another step": ("foam", put("step", 2), "is of step 2, manifest.json of 4"),
    "tokens negative": ("foam", put("tokens", -1), "tokens is -1"),
    "tokens None": ("foam", put("tokens", None), "tokens is None"),
    "seconds nan": ("foam", put("seconds", float("nan")), "seconds is nan"),
    "skipped too many": ("foam", put("skipped", 5), "5 of 4 steps are skipped"),
    "loss text": ("foam", put("loss", "low"), "loss is 'low'"),
    "config a list": ("foam", put("config", "[]"), r"config is \[\]"),
    "config deep": ("foam", put("config", "[" * 100_000), "the settings in .* nested over"),
    "config no JSON": ("foam", put("config", "{"), "cannot read the settings in .*training.pt"),
    "config flat": ("foam", put("config", '{"model": 3}'), "was made with model.name None"),
    "data a number": ("foam", put("data", 3), "data is 3"),
    "optimizer a list": ("foam", put("optimizer", [1]), r"optimizer is \[1\]"),
    "optimizer empty": ("adamw", put("optimizer", {}), "no state and groups"),
    "state a list": ("adamw", put("optimizer", "state", []), "no state and groups"),
    "groups numbers": ("adamw", put("optimizer", "param_groups", [1]), "no state and groups"),
    "no groups": ("adamw", put("optimizer", "param_groups", []), "0 groups, this run 1"),
    "entry a list": ("adamw", put("optimizer", "state", 0, [torch.ones(1)]), "state 0 is"),
    "moment nan": ("adamw", lambda s: first(s, "exp_avg").view(-1)[:1].fill_(torch.nan) and None, "not a number"),
    "foam nan": ("foam", lambda s: first(s, "v").view(-1)[:1].fill_(torch.nan) and None, "not a number"),
    "moment text": ("adamw", put("optimizer", "state", 0, "exp_avg", "x"), "state 0 exp_avg is 'x'"),
    "moment shape": ("adamw", put("optimizer", "state", 0, "exp_avg", torch.ones(1)), r"float32 tensor of \[1\]"),
    "moment meta": ("adamw", put("optimizer", "state", 0, "exp_avg", torch.ones(1, device="meta")), "plain data"),
    "moment sparse": ("adamw", put("optimizer", "state", 0, "exp_avg", torch.ones(2).to_sparse()), "plain data"),
    "step of a moment": ("adamw", put("optimizer", "state", 0, "step", 3), "step is Tensor or int from parameter"),
    "state lost": ("adamw", lambda s: s["optimizer"]["state"].pop(0) and None, "has state of"),
    "maximize": ("adamw", put("optimizer", "param_groups", 0, "maximize", "no"), "maximize of group 0 is 'no'"),
    "amsgrad": ("adamw", put("optimizer", "param_groups", 0, "amsgrad", True), "amsgrad of group 0 is True"),
    "foam moment text": ("foam", put("optimizer", "state", 0, "m", "x"), "state 0 m is 'x'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_no_run_writes_is_one_line_and_changes_nothing(
    home: Path, runs: dict[str, tuple[Path, Path]], tmp_path: Path, name: str
) -> None:
    optimizer, act, words = WRONG[name]
    out = Path(shutil.copytree(runs[optimizer][0], tmp_path / "run"))
    change(out / "checkpoints" / "step-00000004", act)
    before = small.tree(out)
    with pytest.raises(UserError, match=words) as error:
        again(home, out, optimizer)
    assert "\n" not in str(error.value) and small.tree(out) == before


def test_weights_of_another_step_type_or_without_numbers(
    home: Path, runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    from safetensors.torch import load_file, save_file

    def swap(out: Path, home_: Path) -> None:
        shutil.copy(home_ / "step-00000002" / "model.safetensors", out)

    def cast(out: Path, home_: Path) -> None:
        rewrite(out, lambda x: x.half())

    def empty(out: Path, home_: Path) -> None:
        rewrite(out, lambda x: x * torch.nan)

    def rewrite(out: Path, act: Callable[[torch.Tensor], torch.Tensor]) -> None:
        weights = load_file(out / "model.safetensors")
        save_file({k: act(v) for k, v in weights.items()}, out / "model.safetensors", {"format": "pt"})
        digest = hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()
        change(out, put("weights", digest))

    for act, words in (
        (swap, "is not the one that training.pt"),
        (cast, "is torch.float16, here"),
        (empty, "not finite"),
    ):
        out = Path(shutil.copytree(runs["foam"][0], tmp_path / act.__name__))
        newest = out / "checkpoints" / "step-00000004"
        act(newest, out / "checkpoints")
        seal(newest)
        before = small.tree(out)
        with pytest.raises(UserError, match=words):
            again(home, out, "foam")
        assert small.tree(out) == before


def test_a_folder_under_another_steps_name(home: Path, runs: dict[str, tuple[Path, Path]], tmp_path: Path) -> None:
    out = Path(shutil.copytree(runs["foam"][0], tmp_path / "run"))
    (out / "checkpoints" / "step-00000004").rename(out / "checkpoints" / "step-00000005")
    with pytest.raises(UserError, match=r"is of step 4, its folder is named for 5; resume from .*step-00000002"):
        again(home, out, "foam")


HOW = ("cut", "changed", "older", "foreign", "lost", "folder", "empty object")


@pytest.mark.parametrize(
    "name, count",
    [("foam", 2), ("adamw", 1), *(pytest.param(o, len(HOW), marks=pytest.mark.heavy) for o in OPTIMIZERS)],
)
def test_any_bytes_end_exactly_or_in_one_line(
    home: Path, runs: dict[str, tuple[Path, Path]], tmp_path: Path, name: str, count: int
) -> None:
    """Each file cut, changed, swapped for that of another step or another run, lost, or made a folder."""
    base, whole = runs[name]
    other = runs[OPTIMIZERS[1 - OPTIMIZERS.index(name)]][0]
    draw = random.Random(3)
    inside = "checkpoints/step-00000004"
    files = [f"{inside}/{p.name}" for p in sorted((base / inside).iterdir())] + ["run.json", "metrics.jsonl"]
    end = {k: v for k, v in small.tree(whole).items() if k.endswith("6/model.safetensors")}
    told = 0
    for k, file in enumerate(files):
        for how in draw.sample(HOW, count):
            out = Path(shutil.copytree(base, tmp_path / f"{k}-{how}".replace(" ", "")))
            path, raw = out / file, (out / file).read_bytes()
            sealed = draw.random() < 0.6 and path.name != "manifest.json" and inside in file
            if how == "cut":
                path.write_bytes(raw[: draw.randrange(len(raw))])
            elif how == "changed":
                at = draw.randrange(len(raw))
                path.write_bytes(raw[:at] + bytes([raw[at] ^ 1 << draw.randrange(8)]) + raw[at + 1 :])
            elif how == "older":
                shutil.copy(out / file.replace("00000004", "00000002"), path.with_name("x"))
                (path.with_name("x")).replace(path)
            elif how == "foreign":
                shutil.copy(other / file, path)
            elif how == "empty object":
                path.write_text("{}")
            else:
                path.unlink()
                if how == "folder":
                    path.mkdir()
            if sealed and path.is_file():
                seal(path.parent)
            before = small.tree(out)
            try:
                again(home, out, name, memory="ignore")
            except UserError as e:
                told += 1
                assert "\n" not in str(e)
                if path.name not in ("run.json", "metrics.jsonl"):
                    assert small.tree(out) == before
            else:
                tree = small.tree(out)  # a bit of training.pt, signed anew, may be that of the step: another end
                same = all(tree.get(k) == v for k, v in end.items())
                assert same or (path.name == "training.pt" and how == "changed"), (file, how, sealed, sorted(tree))
            shutil.rmtree(out)
    assert told > 2 * count


def test_a_checkpoint_without_the_newer_fields_still_resumes(
    home: Path, runs: dict[str, tuple[Path, Path]], tmp_path: Path
) -> None:
    out = Path(shutil.copytree(runs["foam"][0], tmp_path / "run"))
    change(out / "checkpoints" / "step-00000004", lambda saved: saved.pop("weights") and None)
    again(home, out, "foam")
    one, two = (checkpoint.load(checkpoint.found(run)[-1]) for run in (out, runs["foam"][1]))
    for entry, other in zip(one["optimizer"]["state"].values(), two["optimizer"]["state"].values()):
        exact(entry["m"] if "m" in entry else entry["exp_avg"], other["m"] if "m" in other else other["exp_avg"])


@pytest.mark.parametrize("name", ["adafactor", "sgd", "foam-int8"])
def test_parameters_may_keep_different_things(home: Path, tmp_path: Path, name: str) -> None:
    train(small.config(home, tmp_path / "run", name, steps=2))
    assert train(small.config(home, tmp_path / "run", name, steps=3), resume=tmp_path / "run").step == 3
