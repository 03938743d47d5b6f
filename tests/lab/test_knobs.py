"""Every setting, by flag, file and Python: what is a value of it, what is not, and what is said of a wrong name."""

from __future__ import annotations

import json
import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import small
import yaml

from foamlab import config, optimizers
from foamlab import settings as knobs
from foamlab.cli import main
from foamlab.config import FOAM_OPTIONS, OptimizerConfig, Role, RunConfig, to_dict
from foamlab.errors import UserError
from foamlab.training import restoring
from foamlab.training.run import train


def settings(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["train", *words, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


def told(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line that a mistake gets."""
    assert main(["train", *words]) == 2
    out, err = capsys.readouterr()
    assert not out and err.startswith("foamlab: error: ") and err.count("\n") == 1 and len(err) < 1600, err
    return err.removeprefix("foamlab: error: ").rstrip("\n")


# ---------------------------------------------------------------------------------------------- fuzz

BAD = [
    "", "many", "1e400", "-1e400", "nan", "inf", "-inf", "-1", "-1e-3", "1e23", "9" * 25, "9" * 5000, "0x10", "1.5",
    "[1, 2]", "{a: 1}", "\0", "\udcff", "1,2,3", "١٢", "true", "a" * 300, "../" * 2000, "\x1b[31m",
    "!!python/name:os.system",
]  # fmt: skip
WRONG: list[Any] = [
    None, [], [1, 2], {}, {"class_path": "os.system"}, True, math.nan, math.inf, -math.inf, -1, -0.5, 1.5, 1e23,
    10**30, 10**5000, "", "many", "\0", "\udcff", b"x", 1 + 2j, object(), {1, 2}, ["0.9", None], (0.9, 2.0, 0.9),
]  # fmt: skip
FREE = (
    "model.name", "data.name", "data.tokenizer", "data.column", "data.cache", "optimizer.name", "train.device",
    "train.sample", "out", "task.columns", "task.label", "task.labels", "task.validation", "task.test", "task.metric",
)  # fmt: skip


@pytest.mark.parametrize("key", knobs.knobs())
def test_no_value_of_any_setting_is_a_traceback(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    """By flag: a value is taken, and then it is one of the setting's type, or refused in a line with its name."""
    taken = 0
    for text in BAD:
        if main(["train", f"--{key}={text}", "--print_config"]) == 0:
            got = yaml.safe_load(capsys.readouterr().out)
            for part in key.split("."):
                got = got[part]
            assert knobs.read(knobs.knobs()[key], got, key) is not NotImplemented
            taken += 1
        else:
            out, err = capsys.readouterr()
            assert not out and key in err and err.count("\n") == 1 and len(err) < 250, (text[:20], err)
    assert taken < (len(BAD) if key in FREE else len(BAD) // 2), "hardly anything is refused"


@pytest.mark.parametrize("key", knobs.knobs())
def test_no_type_of_any_setting_is_a_traceback(key: str) -> None:
    """From Python and from what a file holds: the same."""
    part, _, name = key.rpartition(".")
    refused = 0
    for value in WRONG:
        run = RunConfig()
        setattr(getattr(run, part) if part else run, name, value)
        lines = []
        for reader in (lambda run=run: knobs.checked(run), lambda value=value: knobs.build({key: value})):
            try:
                to_dict(reader())
            except UserError as e:
                lines.append(str(e))
        assert len(lines) in (0, 2) and all(key in line and len(line) < 250 and "\n" not in line for line in lines)
        refused += bool(lines)
    assert refused >= len(WRONG) / 2


@pytest.mark.parametrize("key", [key for key in knobs.knobs() if key not in FREE])
def test_what_is_no_number_is_refused_before_a_run_begins(key: str, tmp_path: Path) -> None:
    part, _, name = key.rpartition(".")
    run = replace(RunConfig(), out=str(tmp_path / "run"))
    setattr(getattr(run, part), name, math.nan if name not in ("options", "checkpointing") else [1])
    with pytest.raises(UserError, match=key):
        train(run)
    assert not (tmp_path / "run").exists()


NAMES = [
    "a" * 300,
    "a" * 250,
    "../" * 2000,
    "../" * 300,
    "\x1b[31m",
    "text:" + "a" * 300,
    "bpe:" + "9" * 30,
    "~",
    "cuda:99999999999",
]


@pytest.mark.parametrize("key", ["model.name", "data.name", "data.tokenizer", "optimizer.name", "train.device"])
def test_no_name_is_a_traceback(key: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in NAMES:
        said = told(capsys, "demo", f"--{key}={name}", "--dry_run")
        assert key.split(".")[1].replace("name", "") in said


def test_the_largest_of_every_number_dry_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """What is within bounds works, or is refused by name: nothing overflows on the way."""
    most = {"data.sequence": 2**24, "train.batch": 2**24, "data.workers": 1024, "train.seed": 2**53, "train.threads": 2}
    words = []
    for key, kind in knobs.knobs().items():
        if "Range" in str(kind) and "tuple" not in str(kind) and "str" not in str(kind) and key != "train.clip_each":
            value = most.get(key, 10**12 if "int" in str(kind) else 0.99)
            words.append(f"--{key}={value}")
            with pytest.raises(UserError, match=key):
                knobs.build({key: "1" + "0" * 15 + "7" * 300})
    assert len(words) > 15
    assert main(["train", "demo", *words, "--train.device=cpu", "--dry_run"]) == 0
    assert "nothing was trained" in capsys.readouterr().out


def test_files_that_are_no_settings_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    bomb = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
        f"{chr(98 + k)}: &{chr(98 + k)} [{', '.join(['*' + chr(97 + k)] * 9)}]\n" for k in range(12)
    )
    files = {
        "bomb": bomb, "loop": "optimizer: &o {options: {x: *o}}\n", "deep": "train: {steps: " + "[" * 10**5,
        "nested": "optimizer: {options: {level: " + "[" * 200 + "]" * 200 + "}}",
        "class": "model: {class_path: os.system}",
        "tag": "train: !!python/object/apply:os.system ['true']", "list": "- a\n", "number": "7",
        "date": "out: 2026-01-01",
        "twice": "lr: 1e-3\noptimizer: {lr: 1e-2}", "key": "1: 2", "none": "train: {steps: ~}",
        "null byte": "out: \"a\\0b\"",
        "set": "optimizer: {options: {level: !!set {a, b}}}", "octal": "out: 007", "part": "train: 7",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / f"{name}.yaml").write_text(text)
        said = told(capsys, f"{name}.yaml", "--dry_run")
        assert name in said or any(part in said for part in ("out", "train.steps", "options", "settings")), said
    assert "optimizer.lr is given twice" in told(capsys, "twice.yaml", "--dry_run")
    assert "model.class_path" in told(capsys, "class.yaml", "--dry_run")


# ---------------------------------------------------------------------------------------------- names

MEANT = {  # what is understood, and what it gives
    "--lr 1e-3": ("optimizer", "lr", 1e-3),
    "--level 3": ("optimizer", "options", {"level": 3}),
    "--batch_size 8": ("train", "batch", 8),
    "--batch-size 8": ("train", "batch", 8),
    "--steps 1e3": ("train", "steps", 1000),
    "--seed 3": ("train", "seed", 3),
    "--learning_rate 1e-3": ("optimizer", "lr", 1e-3),
    "--seq_len 64": ("data", "sequence", 64),
    "--optimizer adamw": ("optimizer", "name", "adamw"),
    "--model llama-10m": ("model", "name", "llama-10m"),
    "--data c4": ("data", "name", "c4"),
    "--train.precision bf16": ("train", "precision", "bfloat16"),
    "--train.precision FP32": ("train", "precision", "float32"),
    "--dtype bf16-mixed": ("train", "precision", "mixed"),
    "--optimizer.betas 0.9,0.95": ("optimizer", "betas", [0.9, 0.95]),
    "--betas (0.9,0.95)": ("optimizer", "betas", [0.9, 0.95]),
    "--optimizer.betas null": ("optimizer", "betas", None),
    "--train.release": ("train", "release", True),
    "--train.release off": ("train", "release", False),
    "--optimizer.options.residual 5e-1": ("optimizer", "options", {"residual": 0.5}),
}
HINTED = {  # what is not, and what is offered instead
    "--optimizer.level 3": "did you mean --optimizer.options.level?",
    "--train.lr 1e-3": "did you mean --optimizer.lr?",
    "--train.learning_rate 1e-3": "did you mean --optimizer.lr?",
    "--optimizer.batch_size 8": "did you mean --train.batch?",
    "--model.sequence 8": "did you mean --data.sequence?",
    "--name x": "did you mean --model.name or --data.name or --optimizer.name?",
    "--train.stepz 3": "did you mean --train.steps?",
    "--train.warmpu 3": "did you mean --train.warmup?",
    "--optimizer.options.levle 3 --dry_run": "did you mean level?",
    "--optimizer.rank 3": "an option of one optimizer is --optimizer.options.rank",
    "--resum x": "did you mean --resume?",
    "--train.precision fp16": "float16 needs scaled losses, take bfloat16 or mixed",
    "--optimizer.lr -1e-3": "optimizer.lr must be at least 0, got -0.001",
    "--optimizer.betas 0.9,1": "optimizer.betas must be below 1, got 1.0",
    "--optimizer.betas 0.9": "optimizer.betas takes 2 numbers, such as 0.9,0.95; got '0.9'",
    "--train.chunked_loss=1e23": "train.chunked_loss is out of all bounds, got '1e23'",
    "--optimizer.options.overrides=3 --dry_run": "optimizer.options.overrides must hold settings by name",
    "--optimizer.options.overrides={q:3} --dry_run": "optimizer.options.overrides.q:3 is empty",
}


@pytest.mark.parametrize("words", MEANT)
def test_names_and_values_of_other_programs_are_understood(
    words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    part, key, value = MEANT[words]
    assert settings(capsys, *words.split())[part][key] == value
    name, text = [*words.removeprefix("--").split(), "true"][:2]
    (tmp_path / "x.yaml").write_text(f"{name}: {text}\n")
    assert settings(capsys, str(tmp_path / "x.yaml"))[part][key] == value


@pytest.mark.parametrize("words", HINTED)
def test_wrong_names_and_values_get_the_right_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert HINTED[words] in told(capsys, *words.split())


def test_a_word_wrong_by_a_letter_is_offered_right(capsys: pytest.CaptureFixture[str]) -> None:
    """All settings, each with two letters swapped."""
    for key in knobs.knobs():
        part, _, last = key.rpartition(".")
        if len(last) > 4:
            bad = f"{part}.{last[:2]}{last[3]}{last[2]}{last[4:]}".lstrip(".")
            if bad != key:
                assert f"did you mean --{key}?" in told(capsys, f"--{bad}=1"), bad


def test_other_options_are_kept_apart_from_flags_of_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`compare` has a --lr of its own: a grid."""
    assert main(["compare", "demo", "--lr", "1e-3,3e-3", "--optimizers", "adamw", "--out", "x"]) == 2
    assert "--optimizers takes at least two names" in capsys.readouterr().err


def test_the_help_names_all_options_of_foam(capsys: pytest.CaptureFixture[str]) -> None:
    assert set(FOAM_OPTIONS) == set(optimizers.options("foam"))
    assert main(["train", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"--optimizer.options.{key} " in shown for key in FOAM_OPTIONS)
    assert all(f"--{key} " in shown for key in knobs.knobs())


# ---------------------------------------------------------------------------------------------- options


SWITCHES = {"foam": "maximize", "adamw": "amsgrad", "sgd": "nesterov", "muon": "nesterov", "lora": "from_scratch"}


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_true_or_false_however_it_is_written(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    key = SWITCHES[name]
    for word, value in {"no": False, "false": False, "'false'": False, "0": False, "off": False, "yes": True, "1": True,
                        "True": True}.items():  # fmt: skip
        got = settings(capsys, "--optimizer.name", name, f"--optimizer.options.{key}", word)["optimizer"]
        assert optimizers.resolve(OptimizerConfig(name, options=got["options"])).options[key] is value
    wrong: Any
    for wrong in ("maybe", 2, 0.0, None, [True], {}):
        with pytest.raises(UserError, match=rf"optimizer\.options\.{key} "):
            optimizers.resolve(OptimizerConfig(name, options={key: wrong}))


def test_a_number_of_an_option_is_a_number() -> None:
    assert optimizers.resolve(OptimizerConfig("muon", options={"momentum": "0.9"})).options["momentum"] == 0.9
    for wrong in ("fast", [0.9], True):
        with pytest.raises(UserError, match=r"optimizer\.options\.momentum must be a number"):
            optimizers.resolve(OptimizerConfig("muon", options={"momentum": wrong}))


def test_settings_go_through_json_and_back(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    run = small.config(tmp_path, tmp_path / "run", lr=1e-3)
    run.optimizer.options = {"level": "row", "overrides": {"*q*": {"level": 0}}, "backend": None}
    run.optimizer.betas = (0.9, 0.95)
    again = knobs.from_dict(json.loads(json.dumps(to_dict(run))))
    assert again == run and all(vars(getattr(again, f.name)) == vars(getattr(run, f.name)) for f in fields(run)[:4])
    assert run == knobs.checked(run)


def test_what_each_setting_is_to_a_run() -> None:
    """Written out: a setting whose role is forgotten or changed is seen here."""
    data = ("name", "tokenizer", "sequence", "mode", "validation", "limit", "column", "version")
    task = ("name", "columns", "label", "labels", "validation", "test", "metric")
    fixed = ("model.name", *(f"data.{key}" for key in data), "optimizer.name", "optimizer.options", "train.precision")
    fixed += tuple(f"task.{key}" for key in task)
    record = ("eval_every", "eval_tokens", "checkpoint_every", "keep", "patience", "sample", "tensorboard", "memory")
    places = ("data.cache", "data.workers", "out")
    free = ("data.lost", *places, "train.release", "train.residual_every", *(f"train.{key}" for key in record))
    assert set(config.named(Role.FIXED)) == set(fixed)
    assert set(config.named(Role.FREE)) == set(free)
    assert config.named(Role.NEUTRAL) == places
    assert config.named(Role.REPEATS) == ("train.seed",)
    assert config.named(Role.ORDER) == ("train.batch", "train.seed")
    assert config.named(Role.SHARED) == ("optimizer.betas", "optimizer.eps", "optimizer.weight_decay")
    told = knobs.knobs().keys() - {*fixed, *free}
    loop = (
        "epochs",
        "schedule",
        "steps",
        "batch",
        "micro_batch",
        "warmup",
        "final",
        "clip",
        "clip_each",
        "chunked_loss",
        "seed",
        "threads",
    )
    rates = ("lr", "betas", "eps", "weight_decay", "scale")
    assert (*rates, "momentum") == restoring.TUNABLE
    assert told == {
        "model.checkpointing", "train.device", *(f"train.{k}" for k in loop), *(f"optimizer.{k}" for k in rates),
    }  # fmt: skip


def test_forms_of_settings() -> None:
    tree = {"optimizer": {"options": {"level": 2, "overrides": {}}, "lr": 1}, "out": ""}
    assert config.flat(tree, 2) == {
        "optimizer.options": {"level": 2, "overrides": {}}, "optimizer.lr": 1, "out": ""
    }  # fmt: skip
    assert config.flat(tree) == {"optimizer.options.level": 2, "optimizer.lr": 1, "out": ""}
    was, now = {"a": 1, "b": 2, "gone": 3}, {"a": 1, "b": 3, "new": 4}
    assert config.differences(was, now) == {"b": (2, 3), "new": (None, 4)}
    whole = to_dict(RunConfig())
    kept = config.shared(whole)
    assert set(kept["optimizer"]) == {"betas", "eps", "weight_decay"} and "seed" in whole["train"]
    assert kept["train"].keys() == whole["train"].keys() - {"seed"} and kept["model"] == whole["model"]
    with pytest.raises(UserError, match="no settings of a run: they lack data, out"):
        knobs.from_dict({part: {} for part in ("model", "optimizer", "train")})
    with pytest.raises(UserError, match=r"train\.steps must be a whole number"):
        knobs.from_dict({**whole, "train": {"steps": "many"}})
