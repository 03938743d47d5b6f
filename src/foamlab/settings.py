"""The settings one by one: what each may be called, what it may hold, and what is said of one that is wrong.

Flags, YAML files, contest.json and a RunConfig from Python all pass here, so that the same mistake gets the same line.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from .config import FOAM_OPTIONS, Range, RunConfig
from .errors import UserError, nearest
from .files import shallow

Settings = TypeVar("Settings")
OPTIONS = "optimizer.options"
LATER = ("task",)  # parts of a run that older ones have not
YES, NO = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
FLOAT = re.compile(r"[-+]?[0-9][0-9_]*(\.[0-9]*)?[eE][-+]?[0-9]+")  # what YAML 1.1 takes for a word

# the last part of a name as other programs have it -> ours
ALIASES = {
    "batch_size": "train.batch", "micro_batch_size": "train.micro_batch", "max_steps": "train.steps",
    "num_steps": "train.steps", "warmup_ratio": "train.warmup", "max_grad_norm": "train.clip",
    "grad_clip": "train.clip",
    "gradient_clip": "train.clip", "dtype": "train.precision", "eval_steps": "train.eval_every",
    "save_steps": "train.checkpoint_every", "save_every": "train.checkpoint_every", "learning_rate": "optimizer.lr",
    "beta": "optimizer.betas", "wd": "optimizer.weight_decay", "epsilon": "optimizer.eps", "alpha": "optimizer.scale",
    "rho": "optimizer.options.residual", "fold_level": "optimizer.options.level", "seq_len": "data.sequence",
    "seq_length": "data.sequence", "sequence_length": "data.sequence", "max_length": "data.sequence",
    "context_length": "data.sequence", "block_size": "data.sequence", "dataset": "data.name", "cache_dir": "data.cache",
    "gradient_checkpointing": "model.checkpointing", "model_name": "model.name", "output_dir": "out", "output": "out",
}  # fmt: skip
# values as other programs have them
WORDS = {
    "bf16": "bfloat16", "fp32": "float32", "f32": "float32", "32": "float32", "amp": "mixed", "bf16-mixed": "mixed",
    "bf16-true": "bfloat16",
}  # fmt: skip


@cache
def knobs() -> dict[str, Any]:
    """Every setting and its type, bounds included: {"model.name": str, ..., "out": str}."""
    found: dict[str, Any] = {}
    for part, kind in get_type_hints(RunConfig, include_extras=True).items():
        inner = get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}
        found |= {f"{part}.{key}": k for key, k in inner.items()} or {part: kind}
    return found


# ---------------------------------------------------------------------------------------------- names


def name_of(word: str, known: Iterable[str], prefix: str = "", more: Iterable[str] = ()) -> str:
    """The setting that a word names: its own name, a part of the settings (which stands for its name), or a last part
    alone that only one setting has.

    Args:
        word: as the user has it, without dashes.
        known: the settings.
        prefix: what to write before a name in the message.
        more: other names that may have been meant.

    Raises:
        UserError: none is named so; the nearest are offered.
    """
    known = list(known)
    if word in known or (word.startswith(f"{OPTIONS}.") and word != f"{OPTIONS}."):
        return word
    if f"{word}.name" in known:
        return f"{word}.name"
    clean = word.lower().replace("-", "_")
    section, _, last = clean.rpartition(".")
    ends = {f"{OPTIONS}.{key}": key for key in FOAM_OPTIONS} | {key: key.rpartition(".")[2] for key in known}
    found = [key for key in known if ends[key] == last] or [key for key in ends if ends[key] == last]
    found = found or [key for key in ends if key == ALIASES.get(last)]
    if not section and len(found) == 1:
        return found[0]
    found = [key for key in found if key.startswith(f"{section}.")] or found or _alike(clean, ends, list(more))
    if not found and section == "optimizer":
        raise UserError(f"unknown setting {prefix}{word}: an option of one optimizer is {prefix}{OPTIONS}.{last}")
    hint = f"did you mean {' or '.join(prefix + key for key in found[:3])}?" if found else ""
    raise UserError(f"unknown setting {prefix}{word}: {hint or 'see `foamlab train --help`'}")


def _alike(word: str, ends: Mapping[str, str], more: list[str]) -> list[str]:
    """The name most like a misspelt one: by its last part, of these the one in its own section."""
    section, _, last = word.rpartition(".")
    near = nearest(last, [*more, *dict.fromkeys(ends.values())], least=0.6)
    found = [key for key in more if key == near] + [key for key, end in ends.items() if end == near]
    same = [key for key in found if key.rpartition(".")[0] == section]
    return (same or found)[:1]


# ---------------------------------------------------------------------------------------------- values


def read(kind: Any, value: Any, name: str) -> Any:
    """A value of the type `kind`, from one that a flag, a file or Python gives for the setting `name`.

    Raises:
        UserError: it is none, or out of bounds.

    >>> read(int, "1e3", "n"), read(tuple[float, float], "0.9, 0.95", "betas"), read(bool, "no", "b")
    (1000, (0.9, 0.95), False)
    """
    inner, origin = get_args(kind), get_origin(kind)
    if kind is Any:
        return value
    if origin is Annotated:
        return _bounded(read(inner[0], value, name), inner[1], name)
    if origin in (Union, UnionType):
        empty = value is None or (isinstance(value, str) and value.lower() in ("", "null", "none"))
        return None if empty else read(next(k for k in inner if k is not NoneType), value, name)
    if value is None:
        raise UserError(f"{name} is empty: give it a value, or leave it out")
    if origin is Literal:
        word = WORDS.get(_short(value).strip("'").lower(), value)
        if isinstance(word, str) and word.lower() in inner:
            return word.lower()
        more = ": float16 needs scaled losses, take bfloat16 or mixed" if word in ("fp16", "float16", "16") else ""
        raise UserError(f"{name} must be one of {', '.join(inner)}, got {_short(value)}{more}")
    if origin is tuple:
        parts = re.findall(r"[^\s,]+", value.strip("[]() ")) if isinstance(value, str) else value
        if not isinstance(parts, (list, tuple)) or len(parts) != len(inner):
            raise UserError(f"{name} takes {len(inner)} numbers, such as 0.9,0.95; got {_short(value)}")
        return tuple(read(k, x, name) for k, x in zip(inner, parts))
    if origin is dict:
        return {key: read(inner[1], x, f"{name}.{key}") for key, x in _options(value, name).items()}
    return READERS[kind](value, name)


def _bounded(x: Any, limit: Range, name: str) -> Any:
    if isinstance(x, str):
        if len(x) > limit.most or any(len(part.encode()) > 255 for part in x.split("/")):
            raise UserError(f"{name} is too long for a name or a path, got {_short(x)}")
        return x
    for wrong, what in (
        (not limit.least <= x, f"at least {limit.least}"),
        (not x <= limit.most, f"at most {limit.most:,}"),
        (not x < limit.below and limit.below < math.inf, f"below {limit.below}"),
        (isinstance(x, float) and not math.isfinite(x), "finite"),
    ):
        if wrong:
            raise UserError(f"{name} must be {what}, got {_short(x)}")
    return x


def _bool(value: Any, name: str) -> bool:
    if isinstance(value, int) and value in (0, 1):  # True and False among them
        return bool(value)
    if isinstance(value, str) and value.lower() in YES + NO:
        return value.lower() in YES
    raise UserError(f"{name} must be true or false, got {_short(value)}")


def _int(value: Any, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, (str, float)) and not isinstance(value, bool):
        try:
            return int(value) if isinstance(value, str) else int(str(value).removesuffix(".0"))
        except ValueError:
            pass
        try:
            x = float(value)
        except ValueError:
            x = math.nan
        if x.is_integer() and abs(x) <= 2**53:
            return int(x)
        if abs(x) > 2**53:  # infinity too; a float does not hold such a number exactly
            raise UserError(f"{name} is out of all bounds, got {_short(value)}")
    raise UserError(f"{name} must be a whole number, got {_short(value)}")


def _float(value: Any, name: str) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except (ValueError, OverflowError):
        pass
    raise UserError(f"{name} must be a number, got {_short(value)}")


def _str(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{name} must be text, got {_short(value)}: put it in quotes")
    if "\0" in value or any("\ud800" <= c <= "\udfff" for c in value):
        raise UserError(f"{name} must be text in UTF-8 without null bytes, got {_short(value)}")
    return value


def _options(value: Any, name: str) -> dict[str, Any]:
    """Plain data by name, that YAML and JSON can hold; its values are for the optimizer to judge."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise UserError(f"{name} must hold settings by name, such as {{level: 3}}; got {_short(value)}")
    shallow(dict(value), name)
    return {key: _plain(x, f"{name}.{key}") for key, x in value.items()}


def _plain(x: Any, name: str) -> Any:
    if isinstance(x, str):
        return float(x) if FLOAT.fullmatch(_str(x, name)) else x
    if isinstance(x, (list, tuple)):
        return [_plain(y, name) for y in x]
    if isinstance(x, Mapping):
        return _options(x, name)
    if x is None or isinstance(x, (bool, int, float)):
        return x
    raise UserError(f"{name} must be a number, a word or a list of such, got {_short(x)}")


READERS: dict[Any, Callable[[Any, str], Any]] = {
    bool: _bool, int: _int, float: _float, str: _str, Path: lambda value, name: Path(_str(value, name)),
}  # fmt: skip


def _short(value: Any) -> str:
    """A value in a message: never longer than a line has room for."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "a number of thousands of digits"
    except RecursionError:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


# ---------------------------------------------------------------------------------------------- all together


def build(values: Mapping[str, Any], where: str = "") -> RunConfig:
    """The settings from values by name, as `by_name` gives them; what is not named has its default.

    Raises:
        UserError: one that cannot be; `where` tells the file.
    """
    config, kinds = RunConfig(), knobs()
    for key, value in values.items():
        part, _, field = key.rpartition(".")
        if part == OPTIONS:
            config.optimizer.options[field] = _plain(value, f"{where}{key}")
            continue
        section = getattr(config, part) if part else config
        if value is None and (default := getattr(section, field)) is not None:
            raise UserError(f"{where}{key} is empty: give it a value, or leave it out for {default!r}")
        setattr(section, field, read(kinds[key], value, f"{where}{key}"))
    return config


def by_name(content: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Values by the full names of their settings, from what a file holds: a mapping of parts, of which each holds its
    own; or of names that `name_of` knows.

    Raises:
        UserError: an unknown name, one given twice, or a part without settings.
    """
    known, parts, found = knobs(), _parts(), dict[str, Any]()
    for key, value in content.items():
        held = isinstance(value, dict) and key not in known and (value or key in parts)
        inner = {f"{key}.{k}": x for k, x in value.items()} if held else None
        if key in parts and inner is None and (key == "train" or not isinstance(value, str)):
            raise UserError(f"{where}{key} must hold settings, indented below it, got {_short(value)}; or leave it out")
        for word, x in ({key: value} if inner is None else inner).items():
            try:
                name = name_of(str(word), known)
            except UserError as e:
                raise UserError(f"{where}{e}") from None
            if name in found:
                raise UserError(f"{where}{name} is given twice")
            found[name] = x
    return found


def from_dict(content: Mapping[str, Any], where: str = "") -> RunConfig:
    """The settings of a run from what `config.to_dict` made of them; those of old name no version of the data: it is 1.

    Raises:
        UserError: a part that is missing or unknown; an unknown setting; a value that cannot be. `where` is the file.
    """
    if lacking := [part for part in (*_parts(), "out") if part not in content and part not in LATER]:
        raise UserError(f"{where}these are no settings of a run: they lack {', '.join(lacking)}")
    return build({"data.version": 1, **by_name(content, where)}, where)


def checked(config: RunConfig) -> RunConfig:
    """The settings as their types have them. Raises UserError for one that cannot be, naming it."""
    values: dict[str, Any] = {"out": config.out}
    for part in _parts():
        section = getattr(config, part)
        values |= {f"{part}.{f.name}": getattr(section, f.name) for f in fields(section)}
    return build(values)


def section(part: str, config: Settings) -> Settings:
    """One part of the settings, checked as `checked` does."""
    found: Settings = getattr(build({f"{part}.{key}": value for key, value in vars(config).items()}), part)
    return found


def _parts() -> list[str]:
    return [part for part, kind in get_type_hints(RunConfig).items() if is_dataclass(kind)]
