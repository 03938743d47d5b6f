"""Command lines: presets, YAML files and flags become the arguments of a function.

The function's signature is the flags, its docstring their help. Positional-only parameters become positional
arguments; a parameter `config: RunConfig` brings a preset or YAML file first, and all settings as flags. What a name
or a value may be is in `settings`.
"""

from __future__ import annotations

import inspect
from argparse import SUPPRESS, ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

from .. import settings
from ..config import FOAM_OPTIONS, RunConfig, Task, of_old, to_dict
from ..errors import UserError, known_name, nearest
from ..files import parse_yaml, read_yaml
from .command import Command

PRESETS = Path(__file__).parents[1] / "presets"
YAML = (".yaml", ".yml")
Words = list[str]
Values = dict[str, Any]  # of settings, by their full names


def call(command: Command, args: Words) -> int | str | None:
    """Call a command's function with arguments parsed by its signature; or give its help or the settings as text.

    Raises:
        UserError: wrong arguments; for an unknown one the nearest is suggested.
    """
    if {"-h", "--help"} & set(args):
        return usage(command)
    shown = "--print_config" in args and takes_config(command)
    positional, flags = parse(command, [arg for arg in args if not (shown and arg == "--print_config")])
    if shown:
        import yaml

        return str(yaml.safe_dump(to_dict(positional[0]), sort_keys=False))
    return command.function(*positional, **flags)


def takes_config(command: Command) -> bool:
    """Whether its flags are the settings of a run."""
    return "config" in inspect.signature(command.function).parameters


def parse(command: Command, args: Words) -> tuple[list[Any], dict[str, Any]]:
    """(positional arguments, keyword arguments) of the command's function. Raises UserError as `call` does."""
    parameters = inspect.signature(command.function, eval_str=True).parameters
    own = {key: p for key, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)}
    with_config = own.pop("config", None) is not None
    flags = {key: p.default for key, p in own.items()}
    values: Values = {}
    first: Words = []
    rest = list(args)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            first.append(word)
            continue
        key, given, value = word[2:].partition("=")
        key = command.renamed.get(key, key)
        if key in own and own[key].annotation is bool and not given:
            flags[key] = True
        elif key in own:
            flags[key] = settings.read(own[key].annotation, value if given else _next(word, rest), f"--{key}")
        elif with_config and key == "config":
            values = _merged(values, _settings(recipe(value if given else _next(word, rest))))
        elif with_config:
            setting = settings.name_of(key, kinds := settings.knobs(), "--", [*own, "config"])
            switch = kinds.get(setting) is bool and not given and (not rest or rest[0].startswith("--"))
            value = "true" if switch else value if given else _next(word, rest)
            options = setting.startswith(settings.OPTIONS)
            values = _merged(values, {setting: parse_yaml(value, f"--{setting}") if options else value})
        else:
            near = nearest(key, own)
            hint = f"did you mean --{near}?" if near else f"see `foamlab {command.name} --help`"
            raise UserError(f"unknown setting --{key}: {hint}")
    if with_config:
        given_first = _given_first(command, first, str(flags.get("resume", "")))
        if first and first[0] in presets() and "model.name" in values and _brings(settings.build(values).model.name):
            given_first["data.tokenizer"] = ""  # the preset's is meant for the preset's model
        start = {} if flags.get("resume") else dict(command.defaults)
        if "train.steps" in {**given_first, **values}:
            start.pop("train.epochs", None)
        return [settings.build(_merged(start, _merged(given_first, values)))], flags
    return _positional(command.name, parameters, first), flags


def _next(flag: str, rest: Words) -> str:
    """The value of a flag: the next word."""
    if not rest or rest[0].startswith("--"):
        raise UserError(f"{flag}: expected one argument")
    return rest.pop(0)


def _merged(values: Values, later: Values) -> Values:
    """Both, where they differ the later; options given as a whole replace those given before."""
    whole = settings.OPTIONS in later
    kept = {
        key: x for key, x in values.items() if key not in later and not (whole and key.startswith(settings.OPTIONS))
    }
    return {**kept, **later}


def _positional(name: str, parameters: Mapping[str, inspect.Parameter], words: Words) -> list[Any]:
    """The positional arguments from the words that are no flags."""
    found: list[Any] = []
    left = list(words)
    for key, p in parameters.items():
        if p.kind is p.VAR_POSITIONAL:
            if not left:
                raise UserError(f"{name} takes {key}: see `foamlab {name} --help`")
            found += [settings.read(p.annotation, word, key) for word in left]
            left = []
        elif p.kind is p.POSITIONAL_ONLY:
            found.append(settings.read(p.annotation, left.pop(0), key) if left else p.default)
    _nothing_left(name, left)
    return found


def _nothing_left(name: str, words: Words) -> None:
    if words:
        raise UserError(f"unexpected argument {words[0]!r}: see `foamlab {name} --help`")


# ---------------------------------------------------------------------------------------------- presets and files


def _given_first(command: Command, words: Words, resume: str) -> Values:
    """What flags change: the settings of a preset, a file or a run to resume, or a model with its own vocabulary."""
    _nothing_left(command.name, words[1:])
    if resume:
        folder = Path(resume)
        if words:
            raise UserError(f"--resume takes the settings from {folder}: leave out {words[0]}")
        for kept in (folder, folder.parent.parent):  # a run, or one checkpoint of it
            if (kept / "config.yaml").is_file():
                return _settings(kept / "config.yaml")
        raise UserError(f"no run to resume in {str(folder)!r}: give a folder made by `foamlab train`")
    if not words:
        return {}
    if "TASK" in command.first_word and not _is_recipe(words[0]):
        known_name(words[0], [task for task in get_args(Task) if task], "task")
        return {"task.name": words[0]}
    if "MODEL" in command.first_word and not _is_recipe(words[0]):
        return _model(words[0])
    return _settings(recipe(words[0]))


def _settings(path: Path) -> Values:
    """The settings that a YAML file holds. Raises UserError if they are none."""
    if not (content := read_yaml(path)):
        raise UserError(f"{path} holds no settings; `foamlab presets demo` prints an example")
    values = settings.by_name(content, f"{path}: ")
    return of_old(values) if (path.parent / "run.json").is_file() else values


def _brings(model: str) -> bool:
    """Whether a model has its own tokenizer: a folder, or a name on the hub."""
    return "/" in model or Path(model).is_dir()


def _model(name: str) -> Values:
    """A model, with the vocabulary that it has of its own."""
    from ..models.presets import MODELS

    return {"model.name": name, **({"data.tokenizer": f"bpe:{MODELS[name].vocab}"} if name in MODELS else {})}


def presets() -> dict[str, Path]:
    """The recipes that come with the package: name -> file."""
    return {path.stem: path for path in sorted(PRESETS.glob("*.yaml"))}


def _is_recipe(word: str) -> bool:
    """Whether a word names a preset, a YAML file (existing or not) or, by mistake, a run folder."""
    return word in presets() or Path(word).suffix in YAML or (Path(word) / "config.yaml").is_file()


def recipe(name: str) -> Path:
    """The file of a preset, or a file that the user names."""
    known = presets()
    if name in known:
        return known[name]
    path = Path(name)
    if path.is_file():
        return path
    if path.is_dir() and (path / "config.yaml").is_file():
        raise UserError(
            f"{name} is a run folder: `foamlab train --resume {name}` resumes it, {name}/config.yaml has its settings"
        )
    if path.suffix in YAML:
        raise UserError(f"no such file: {name}; `foamlab train demo --print_config > {name}` writes one to start from")
    from ..models.presets import MODELS

    if name in MODELS:
        raise UserError(f"{name} is a model, not a recipe: give --model.name {name}; `foamlab presets` lists recipes")
    return known[known_name(name, sorted(known, key=len), "preset")]  # the plainest first


# ---------------------------------------------------------------------------------------------- help


def usage(command: Command) -> str:
    """The help of a command."""
    import docstring_parser

    name, function = command.name, command.function
    doc = docstring_parser.parse(inspect.getdoc(function) or "")
    texts = {p.arg_name.lstrip("*"): p.description or "" for p in doc.params}
    parser = ArgumentParser(
        prog=f"foamlab {name}", description=doc.short_description, add_help=False,
        epilog="\n  ".join(["examples:", *command.examples]), formatter_class=RawDescriptionHelpFormatter,
    )  # fmt: skip
    options = parser.add_argument_group("options")
    options.add_argument("-h", "--help", action="store_true", help="show this help")
    for key, p in inspect.signature(function, eval_str=True).parameters.items():
        if p.annotation is RunConfig:
            parser.usage = f"foamlab {name} [{' | '.join(command.first_word)}] [--KEY VALUE ...]"
            options.add_argument("--config", metavar="FILE", help="a YAML file, as if given first")
            options.add_argument("--print_config", action="store_true", help="print the settings as YAML and exit")
            _describe_settings(parser, command.defaults)
        elif p.kind in (p.VAR_POSITIONAL, p.POSITIONAL_ONLY):
            parser.add_argument(key, nargs="+" if p.kind is p.VAR_POSITIONAL else "?", help=texts[key])
        elif p.annotation is bool:
            options.add_argument(f"--{key}", action="store_true", help=_escaped(texts[key]))
        else:
            _describe(options, key, p.annotation, texts[key], p.default)
    return parser.format_help().rstrip()


def _describe_settings(parser: ArgumentParser, defaults: Mapping[str, Any]) -> None:
    import docstring_parser

    for part in fields(RunConfig()):
        held = getattr(RunConfig(), part.name)
        doc = docstring_parser.parse(inspect.getdoc(held if is_dataclass(held) else RunConfig) or "")
        texts = {p.arg_name: p.description or "" for p in doc.params}
        own = {key: kind for key, kind in settings.knobs().items() if key.partition(".")[0] == part.name}
        group = parser.add_argument_group((doc.short_description or "").rstrip(".") if is_dataclass(held) else "Output")
        for key, kind in own.items():
            last = key.rpartition(".")[2]
            default = getattr(held, last) if is_dataclass(held) else held
            _describe(group, key, kind, texts[last], defaults.get(key, default))
        if part.name == "optimizer":
            group = parser.add_argument_group("Options of FOAM (`foamlab optimizers NAME` lists those of others)")
            for key, text in FOAM_OPTIONS.items():
                _describe(group, f"{settings.OPTIONS}.{key}", str, text, None)


def _describe(group: Any, key: str, kind: Any, text: str, default: Any) -> None:
    shown = f" (default: {default})" if default or (default == 0 and default is not False) else ""
    inner = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    choices = get_args(inner) if get_origin(inner) is Literal else ("true", "false") if inner is bool else ()
    metavar = f"{{{','.join(choices)}}}" if choices else key.rpartition(".")[2].upper()
    group.add_argument(f"--{key}", metavar=metavar, default=SUPPRESS, help=_escaped(text + shown))


def _escaped(text: str) -> str:
    return text.replace("%", "%%")  # which argparse would fill in
