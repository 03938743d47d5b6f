"""Checkpoints: a folder that is either whole or not there, and that says itself whether it still is.

`checkpoints/step-XXXXXXXX/` holds a Hugging Face model folder (`from_pretrained` reads it), `training.pt` (tensors,
numbers and strings only) and `manifest.json` with the size and sha256 of each file. This room knows files; what a
run must keep, `train.py` decides.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UserError
from ..files import plain_name, read_json
from ..text import gb

FORMAT = 1  # of the manifest and of training.pt
WEIGHTS, TRAINING, MANIFEST = "model.safetensors", "training.pt", "manifest.json"
NAME = re.compile(r"step-(\d{8,})")


def save(
    run: Path, step: int, model: nn.Module, tokenizer: Any, training: Mapping[str, Any], keep: int,
    best: int | None = None,
) -> Path:  # fmt: skip
    """Write a checkpoint of a Hugging Face model, then let go of all but the last `keep`; return its folder.

    Everything is written to a hidden folder, forced to the disk and renamed. Until then, and whatever happens, the
    older checkpoints stay as they are; a hidden folder that a kill left behind is removed by the next save.

    Args:
        run: the run folder.
        step: optimizer steps taken.
        model: its weights and configuration.
        tokenizer: has `save(folder)`.
        training: what else the run needs to go on; must pass `storable`.
        keep: how many checkpoints stay, at least 1.
        best: step of a further one that stays.

    Raises:
        UserError: the disk is full or cannot be written; the half-written folder has been removed.
    """
    home = run / "checkpoints"
    target, part = home / f"step-{step:08d}", home / f".part-{step:08d}-{os.getpid()}"
    need = nbytes(dict(model.state_dict())) + nbytes(training)
    with explained(target, need):
        home.mkdir(exist_ok=True)
        try:
            part.mkdir()
            _write(part, step, model, tokenizer, training)
            if target.exists():  # only when a damaged one of the same step was resumed around
                os.replace(target, home / f".old-{step:08d}-{os.getpid()}")
            os.replace(part, target)
            _sync(home)
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
    past = [path for path in found(run)[: -max(keep, 1)] if int(path.name[5:]) != best]
    for old in [*past, *home.glob(".part-*"), *home.glob(".old-*")]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def load(path: Path) -> dict[str, Any]:
    """Check every file of a checkpoint and return what `save` got as `training`, on the CPU. Nothing is changed.

    Raises:
        UserError: a file is missing, truncated, altered or foreign; it is named, with the newest other complete
            checkpoint of the run if there is one.
    """
    if fault := damage(path):
        others = [p for p in found(path.parent.parent) if p != path and not damage(p)]
        advice = f"resume from the complete {others[-1]}" if others else "there is no other complete one: start anew"
        raise UserError(f"{fault}; {advice}")
    try:
        training = torch.load(path / TRAINING, map_location="cpu", weights_only=True)
    except Exception as e:
        raise UserError(f"cannot read {path / TRAINING}: {_line(e)}; it was not written by this program") from e
    listed = read_json(path / MANIFEST)
    if isinstance(training, dict):  # files of two steps, or of two runs, are no checkpoint
        step, digest = listed.get("step"), listed["files"][WEIGHTS]["sha256"]
        if training.get("step", step) != step:
            raise UserError(f"{path / TRAINING} is of step {training['step']}, {MANIFEST} of {step}: take another")
        if training.pop("weights", digest) != digest:
            raise UserError(f"{path / WEIGHTS} is not the one that {TRAINING} was saved with: resume from another")
    return training


def load_weights(path: Path, model: nn.Module) -> None:
    """Copy a checkpoint's weights into `model`, bit for bit.

    Raises:
        UserError: the weights belong to a model of another shape or type, or are not finite.
    """
    from safetensors import SafetensorError, safe_open
    from safetensors.torch import load_model

    try:
        with safe_open(path / WEIGHTS, "pt") as file:
            own = model.state_dict()
            for name in {*file.keys()} & {*own}:
                kind = file.get_tensor(name).dtype
                if kind != own[name].dtype:  # it would be rounded without a word
                    raise RuntimeError(f"{name} is {kind}, here {own[name].dtype}")
        load_model(model, path / WEIGHTS)
    except (RuntimeError, SafetensorError, OSError, ValueError) as e:
        raise UserError(f"{path / WEIGHTS} does not fit this model: {_line(e)}; resume with the same model") from e
    if bad := [name for name, p in model.named_parameters() if not bool(p.isfinite().all())]:
        raise UserError(f"{path / WEIGHTS}: {bad[0]} is not finite; resume from another checkpoint, or start anew")


def find(resume: Path) -> tuple[Path, Path]:
    """(run folder, checkpoint folder) of what the user wants to resume: a run (its newest) or one checkpoint."""
    resume = resume.absolute()
    if NAME.fullmatch(resume.name) or (resume / MANIFEST).exists():
        if not resume.is_dir():
            others = found(resume.parent.parent)
            raise UserError(f"no checkpoint {resume}" + (f"; the newest is {others[-1]}" if others else ""))
        return resume.parent.parent, resume
    if not resume.is_dir():
        raise UserError(f"nothing to resume: {resume} is not a folder; give a run folder or one of its checkpoints")
    if not (known := found(resume)):
        raise UserError(f"nothing to resume: {resume} holds no checkpoint; start the run anew in another folder")
    return resume, known[-1]


def found(run: Path) -> list[Path]:
    """A run's checkpoint folders, oldest first."""
    home = run / "checkpoints"
    names = os.listdir(home) if home.is_dir() else ()
    steps = sorted((int(m[1]), n) for n in names if (m := NAME.fullmatch(n)))
    return [home / name for _, name in steps]


def set_aside(path: Path) -> None:
    """Hide the checkpoints later than `path`, from which a run goes on; the next save removes them."""
    later = [p for p in found(path.parent.parent) if int(p.name[5:]) > int(path.name[5:])]
    for p in later:
        os.replace(p, p.parent / f".old-{p.name[5:]}-{os.getpid()}")


def damage(path: Path) -> str:
    """What is wrong with a checkpoint, in words; empty if each file has the size and sha256 of the manifest."""
    manifest = path / MANIFEST
    try:
        listed = read_json(manifest)
        version, files = listed["format"], {n: (int(f["bytes"]), f["sha256"]) for n, f in listed["files"].items()}
        if not {WEIGHTS, TRAINING} <= set(files):
            raise KeyError(WEIGHTS)
        if strange := [n for n in files if not plain_name(n)]:
            raise ValueError(f"it names {strange[0]!r:.60}, which is no file of a checkpoint")
    except (FileNotFoundError, NotADirectoryError):
        return f"{path} is not a checkpoint of foamlab: {MANIFEST} is missing"
    except (UserError, ValueError, OverflowError, KeyError, TypeError, AttributeError) as e:
        return f"{manifest} is damaged ({_line(e)})"
    if (named := NAME.fullmatch(path.name)) and listed.get("step") != int(named[1]):
        return f"{manifest} is of step {listed.get('step')!r}, its folder is named for {int(named[1])}"
    if version != FORMAT:
        return f"{path} has format {version!r}, this foamlab reads format {FORMAT}"
    for name, (size, digest) in files.items():
        file = path / name
        try:
            if (actual := file.stat().st_size) != size:
                return f"{file} is damaged: {actual:,} bytes, {size:,} were written"
            if _sha256(file) != digest:
                return f"{file} is damaged: its content has changed since it was written"
        except FileNotFoundError:
            return f"{file} is missing"
        except OSError as e:
            return f"{file} cannot be read: {e.strerror}"
    return ""


def check_room(folder: Path, need: int) -> None:
    """Raise UserError now if `folder` (or its nearest existing parent) cannot take `need` more bytes at the end."""
    place = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    if not place.is_dir():
        raise UserError(f"cannot write the run folder {folder}: {place} is a file")
    if not os.access(place, os.W_OK | os.X_OK):
        raise UserError(f"cannot write the run folder {folder}: no permission in {place}; choose another --out")
    if (free := shutil.disk_usage(place).free) < need:
        raise UserError(
            f"not enough room in {place}: checkpoints need {gb(need)}, {gb(free)} are free; "
            "make room, lower --train.keep or choose another --out"
        )


def storable(x: Any) -> bool:
    """Whether `torch.load(weights_only=True)` will read `x` back: tensors, numbers, strings and nests of them."""
    if isinstance(x, Mapping):
        return type(x).__name__ in ("dict", "OrderedDict", "defaultdict") and all(map(storable, [*x, *x.values()]))
    if isinstance(x, (list, tuple)):
        return type(x) in (list, tuple) and all(map(storable, x))
    return x is None or type(x) in (bool, int, float, str, torch.Size, torch.dtype) or isinstance(x, Tensor)


def nbytes(x: Any) -> int:
    """Bytes of all tensors in a nest; storage shared by several counts once for each."""
    if isinstance(x, Tensor):
        return x.numel() * x.element_size()
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (list, tuple)) else ()
    return sum(map(nbytes, parts))


@contextmanager
def explained(target: Path, need: int) -> Iterator[None]:
    """Turn what goes wrong while writing into one line for the user.

    torch and safetensors wrap or lose the system's error number, so a full disk is also told by what is left of it.
    """
    try:
        yield
    except Exception as e:
        free = shutil.disk_usage(target.parent if target.parent.exists() else target.parent.parent).free
        full = getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in str(e) or free < need
        why = f"the disk is full ({gb(need)} needed), make room" if full else _line(e)
        last = found(target.parent.parent)[-1:]
        rest = f"then resume from {last[0]}, which is whole" if last else "there is no earlier checkpoint"
        raise UserError(f"cannot save {target}: {why}; {rest}") from e


def _write(part: Path, step: int, model: Any, tokenizer: Any, training: Mapping[str, Any]) -> None:
    from transformers.utils import logging

    bars = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        # one file whatever the size, and the names that this model has in memory: `load_weights` goes by them
        model.save_pretrained(part, max_shard_size="100TB", save_original_format=False)
    finally:
        if bars:
            logging.enable_progress_bar()
    tokenizer.save(part)
    digest = _sha256(part / WEIGHTS)
    torch.save({**training, "weights": digest}, part / TRAINING)
    files: dict[str, dict[str, Any]] = {}
    for file in sorted(part.iterdir()):
        files[file.name] = {"bytes": file.stat().st_size}
        files[file.name]["sha256"] = digest if file.name == WEIGHTS else _sha256(file)
        _sync(file)
    (part / MANIFEST).write_text(json.dumps({"format": FORMAT, "step": step, "files": files}, indent=1) + "\n")
    _sync(part / MANIFEST)
    _sync(part)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as f:
        while chunk := f.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _line(e: Exception) -> str:
    return " ".join(f"{e}".split())[:200] or type(e).__name__
