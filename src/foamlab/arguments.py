"""From words to a call: presets, YAML files and flags (jsonargparse) become the arguments of a function.

The function's signature is the flags, its docstring their help. Positional-only parameters become positional
arguments; a parameter `config: RunConfig` brings a preset or YAML file first, and all settings as flags. Nothing is
printed here, but for jsonargparse's own --help and --print_config.
"""

from __future__ import annotations

import inspect
import re
from argparse import SUPPRESS, ArgumentError, RawDescriptionHelpFormatter
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .config import RunConfig, UserError, known_name

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

PRESETS = Path(__file__).parent / "presets"
PARTS = ("model", "data", "optimizer", "train")
Function = Callable[..., int | str | None]


def call(name: str, function: Function, examples: str, args: list[str]) -> int | str | None:
    """Parse the arguments of one command by its function's signature, and call it.

    Raises:
        UserError: arguments that do not fit; for an unknown one the nearest is offered.
    """
    parser = make_parser(name, function, examples)
    signature = inspect.signature(function, eval_str=True)
    with_config = "config" in signature.parameters
    try:
        values = parser.parse_args(_recipe_first(args, models=name == "plan") if with_config else args)
    except (ArgumentError, UnicodeDecodeError) as e:
        raise UserError(_explain(name, e, [*parser.get_defaults().keys(), *signature.parameters])) from None
    positional: list[Any] = []
    flags: dict[str, Any] = {}
    for key, p in signature.parameters.items():
        if p.annotation is RunConfig:
            positional.append(_config(values))
        elif p.kind is p.VAR_POSITIONAL:
            positional += values[key]
        elif p.kind is p.POSITIONAL_ONLY:
            positional.append(values[key])
        else:
            flags[key] = values.get(key, p.default)
    return function(*positional, **flags)


def make_parser(name: str, function: Function, examples: str) -> ArgumentParser:
    """jsonargparse over the function's signature and the dataclasses of `config.py`."""
    import docstring_parser
    from jsonargparse import ActionConfigFile, ArgumentParser, DefaultHelpFormatter, set_parsing_settings

    class Help(DefaultHelpFormatter, RawDescriptionHelpFormatter):
        """Keep the examples' lines apart."""

    # a YAML file may not name things to import: a recipe is data
    set_parsing_settings(instantiate_subclass_spec_in_any=False, import_path_denylist=["*"])
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    texts = {p.arg_name.lstrip("*"): p.description or "" for p in doc.params}
    shown = "\n  ".join(["examples:", *examples.splitlines()]) + "\n"
    parser = ArgumentParser(
        prog=f"foamlab {name}", description=doc.short_description, epilog=shown,
        formatter_class=Help, exit_on_error=False, allow_abbrev=False,
    )  # fmt: skip
    for key, p in inspect.signature(function, eval_str=True).parameters.items():
        if p.annotation is RunConfig:
            first = "PRESET | FILE.yaml | MODEL" if name == "plan" else "PRESET | FILE.yaml"
            parser.usage = f"foamlab {name} [{first}] [--KEY VALUE ...]"
            parser.add_argument("--config", action=ActionConfigFile, help="a YAML file; the same as giving it first")
            parser.add_class_arguments(RunConfig, None, as_group=False)
        elif p.kind is p.VAR_POSITIONAL:
            parser.add_argument(key, nargs="+", type=p.annotation, help=texts[key])
        elif p.kind is p.POSITIONAL_ONLY:
            parser.add_argument(key, nargs="?", type=p.annotation, default=p.default, help=texts[key])
        elif p.annotation is bool:
            parser.add_argument(f"--{key}", action="store_true", default=SUPPRESS, help=texts[key])
        else:
            default = f" (default: {p.default})" if p.default else ""
            parser.add_argument(f"--{key}", type=p.annotation, default=SUPPRESS, help=texts[key] + default)
    return parser


def _recipe_first(args: list[str], models: bool = False) -> list[str]:
    """Turn a leading preset or file, and the settings of a run to resume, into --config, before all other flags.

    With `models`, a leading word that is neither is the name of a model, which keeps its own vocabulary.
    """
    first: list[str] = []
    rest = args
    if args and models and not args[0].startswith("-") and args[0] not in presets() and ".y" not in args[0]:
        first, rest = [*_model(args[0])], args[1:]
    elif args and not args[0].startswith("-"):
        first, rest = ["--config", _settings(recipe(args[0]))], args[1:]
        if args[0] in presets() and _brings(rest):
            first.append("--data.tokenizer=")  # the preset's is meant for the preset's model
    for k, arg in enumerate(rest):
        if arg == "--resume" or arg.startswith("--resume="):
            folder = Path(arg.partition("=")[2] or "".join(rest[k + 1 : k + 2]))
            if first:
                raise UserError(f"--resume takes the settings from {folder}: leave out {args[0]}")
            kept = [f / "config.yaml" for f in (folder, folder.parent.parent)]  # a run, or one checkpoint of it
            if not any(path.is_file() for path in kept):
                raise UserError(f"no run to resume in {str(folder)!r}: give a folder made by `foamlab train`")
            first = ["--config", _settings(next(path for path in kept if path.is_file()))]
    return first + rest


def _brings(args: list[str]) -> bool:
    """Whether the flags name a model that brings its own tokenizer: a folder, or one of the hub."""
    words = [*args, ""]
    named = [words[k + 1] if word == "--model.name" else word.partition("=")[2]
             for k, word in enumerate(args) if word.partition("=")[0] == "--model.name"]  # fmt: skip
    return bool(named) and ("/" in named[-1] or Path(named[-1]).is_dir())


def _settings(path: Path) -> str:
    """The path as text, of a file that holds settings in YAML; jsonargparse does not say what is wrong with others."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as e:
        raise UserError(f"cannot read the settings in {path}: {e}; it must be YAML, in UTF-8") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} holds no settings; `foamlab presets demo` shows what they look like")
    for part in PARTS:
        if not isinstance(content.get(part, {}), dict):
            raise UserError(
                f"{path}: {part} must hold settings, indented below it, got {content[part]!r}; or leave it out"
            )
    return str(path)


def _model(name: str) -> list[str]:
    """Flags for a model that has a vocabulary of its own."""
    from .models import MODELS

    vocabulary = [f"--data.tokenizer=bpe:{MODELS[name].vocab}"] if name in MODELS else []
    return [f"--model.name={name}", *vocabulary]


def presets() -> dict[str, Path]:
    """The recipes that come with the package: name -> file."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def recipe(name: str) -> Path:
    """The file of a preset, or a file that the user names."""
    known = presets()
    if name in known:
        return known[name]
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.yaml").is_file():
        raise UserError(f"{name} is a run folder: `foamlab train --resume {name}` goes on with it")
    if path.suffix in (".yaml", ".yml"):
        raise UserError(f"no such file: {name}; `foamlab train demo --print_config > {name}` makes one to start from")
    return known[known_name(name, sorted(known, key=len), "preset")]  # the plainest first


def _config(values: Any) -> RunConfig:
    """jsonargparse's namespace as dataclasses."""
    parts = {}
    for part in PARTS:
        own = getattr(RunConfig(), part)
        for key, value in vars(values[part]).items():
            if value is None and (default := getattr(own, key)) is not None:  # jsonargparse lets null through
                raise UserError(f"{part}.{key} is empty: give it a value, or leave it out for {default!r}")
        parts[part] = type(own)(**vars(values[part]))
    return RunConfig(**parts, out=values.out)


# jsonargparse's wordings for a key that does not exist
UNKNOWN = re.compile(
    r"unrecognized arguments: (?P<word>\S+)|Group '(?P<group>.+?)' does not accept option '(?P<key>.+?)'"
    r"|Option '(?P<option>.+?)' is not accepted"
)


def _explain(name: str, error: Exception, keys: Iterable[str]) -> str:
    """One line for a parsing error; for an unknown key it offers the nearest."""
    text = " ".join(str(error).split())
    found = UNKNOWN.search(text)
    if not found:
        text = re.sub(r'^Parser key "(.+?)"', r"\1", text)
        text = re.sub(
            r"Does not validate.*?Subtypes: \[(.*)\] Errors: .*Given value: ", r"Expected one of \1. Got value: ", text
        )
        text = re.sub(r"<class '(\w+)'>", r"\1", text).replace("typing.Literal", "one of ").replace("NoneType", "null")
        return f"{text} (see `foamlab {name} --help`)"
    word = found["word"] or found["option"] or f"{found['group']}.{found['key']}"
    if found["word"] and not word.startswith("-"):
        return f"unexpected argument {word!r}: see `foamlab {name} --help`"
    near = get_close_matches(word.lstrip("-").partition("=")[0], keys, n=1, cutoff=0.5)
    flag = "--" if found["word"] else ""
    hint = f"did you mean {flag}{near[0]}?" if near else f"see `foamlab {name} --help`"
    return f"unknown setting {word.partition('=')[0]}: {hint}"
