"""The command: its words, settings, mistakes; a run from beginning to report."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from foamlab.cli import arguments, main, run_display
from foamlab.cli.commands import commands
from foamlab.config import RunConfig

# a run of seconds
TINY = [
    "--data.name=text:corpus.txt", "--data.tokenizer=bytes", "--data.sequence=16", "--data.validation=0.3",
    "--data.cache=cache", "--train.batch=2", "--train.eval_tokens=64", "--train.threads=1", "--train.device=cpu",
]  # fmt: skip


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a small corpus, made the current one."""
    words = [f"Document {k}: {'abc' * (k % 7 + 3)} and {k * k}.\n" * 3 for k in range(60)]
    (tmp_path / "corpus.txt").write_text("\n\n".join(words))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def settings(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["train", *args, "--print_config"]) == 0
    return yaml.safe_load(capsys.readouterr().out)


# ---------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("words", [["--help"], ["--version"], *([name, "--help"] for name in commands())])
def test_help_loads_nothing_heavy(words: list[str]) -> None:
    """What makes --help slow is an import: 2 s for torch alone."""
    heavy = "{'torch', 'transformers', 'numpy', 'tokenizers', 'plotly', 'rich', 'torchfoam'}"
    code = "import sys; from foamlab.cli import main; rc = main(sys.argv[1:]); "
    code += f"sys.exit(rc or len({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


@pytest.mark.parametrize("name", commands())
def test_every_command_teaches_with_examples_that_parse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = commands()[name]
    assert command.name == name
    assert main([name, "--help"]) == 0
    shown = capsys.readouterr().out
    assert (command.function.__doc__ or "?").splitlines()[0] in shown.replace("\n", " ")
    for line in command.examples:
        assert line in shown
        program, called, *rest = shlex.split(line.partition(">")[0])
        assert (program, called) == ("foamlab", name)
        if "--resume" in rest:
            rest = rest[: rest.index("--resume")]
        arguments.parse(command, [word for word in rest if word not in ("my.yaml", "--print_config")])


def test_no_command_is_an_error_that_helps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "foamlab train demo" in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- settings


def test_flags_overrule_a_file_whatever_their_order(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (desk / "my.yaml").write_text("train: {steps: 7, batch: 3}\noptimizer: {options: {level: row}, eps: 1e-6}\n")
    got = settings(capsys, "my.yaml", "--train.steps", "9", "--optimizer.options.state", "bfloat16")
    assert got["train"]["steps"] == 9 and got["train"]["batch"] == 3
    assert got["optimizer"]["options"] == {"level": "row", "state": "bfloat16"}
    assert got["optimizer"]["eps"] == 1e-6
    assert settings(capsys, "--train.steps", "9", "--config", "my.yaml")["train"]["steps"] == 7


def test_options_keep_their_types(capsys: pytest.CaptureFixture[str]) -> None:
    words = "--optimizer.options.level 3 --optimizer.options.residual 0.5 --optimizer.options.stochastic false"
    got = settings(capsys, *words.split(), "--optimizer.betas", "[0.9, 0.95]", "--optimizer.options.backend", "eager")
    assert got["optimizer"]["options"] == {"level": 3, "residual": 0.5, "stochastic": False, "backend": "eager"}
    assert got["optimizer"]["betas"] == [0.9, 0.95]


@pytest.mark.parametrize("name", arguments.presets())
def test_printed_settings_give_the_same_settings(name: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    got = settings(capsys, name)
    (desk / "again.yaml").write_text(yaml.safe_dump(got))
    assert settings(capsys, "again.yaml") == got
    assert set(got) == set(vars(RunConfig()))


@pytest.mark.parametrize("name", arguments.presets())
def test_every_preset_dry_runs_and_touches_nothing(name: str, desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", name, "--dry_run", "--train.device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "nothing was trained" in shown and "of optimizer state" in shown and "folded" in shown
    assert sorted(path.name for path in desk.iterdir()) == ["corpus.txt"]


def test_every_preset_says_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(len(line.split(maxsplit=1)) == 2 for line in lines[1:]) and len(lines) == 1 + len(arguments.presets())
    assert main(["presets", "demo"]) == 0
    assert capsys.readouterr().out == arguments.presets()["demo"].read_text()


def test_a_dry_run_of_a_rival_shows_its_groups(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", "--dry_run", "--optimizer.name", "adamw-split", "--train.device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "matrices: 28 tensors" in shown and "lr 0.0012" in shown
    # two float32 moments a weight and a float32 step a tensor
    assert f"{1_840_256 * 8 + 39 * 4:,} of optimizer state" in shown


def test_a_dry_run_takes_a_named_backend(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "demo", "--dry_run", "--optimizer.options.backend", "cpu"]) == 0
    assert "backend: cpu" in capsys.readouterr().out


def test_a_settings_file_cannot_run_code(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Some programs import and call what a file names; here a file is data."""
    call = {"class_path": "pathlib.Path.touch", "init_args": {"self": "owned"}}
    (desk / "bad.yaml").write_text(yaml.safe_dump({"optimizer": {"options": {"level": call}}}))
    assert main(["train", "bad.yaml", "--dry_run"]) == 2
    assert not (desk / "owned").exists()


# ---------------------------------------------------------------------------------------------- errors

WRONG = {
    "trian": r"unknown command 'trian': did you mean train\?",
    "train dem": r"unknown preset 'dem': did you mean demo\?",
    "train llama-1m": r"llama-1m is a model, not a recipe: give --model.name llama-1m",
    "train nope.yaml": r"no such file: nope\.yaml",
    "train --train.stepz 3": r"unknown setting --train\.stepz: did you mean --train\.steps\?",
    "train --dryrun": r"did you mean --dry_run\?",
    "train --train.step 3": r"unknown setting --train\.step: did you mean --train\.steps\?",
    "train group.yaml": r"unknown setting train\.stepz: did you mean train\.steps\?",
    "train top.yaml": r"top\.yaml: unknown setting trian\.steps: did you mean train\.steps\?",
    "train broken.yaml": r"cannot read broken\.yaml: not YAML .*line 3",
    "train latin.yaml": r"cannot read latin\.yaml: not in UTF-8",
    "train --config latin.yaml": "not in UTF-8",
    "train empty.yaml": r"empty\.yaml holds no settings",
    "train section.yaml": r"section\.yaml: train must hold settings, indented below it, got None; or leave it out",
    "train null.yaml --dry_run": r"train\.steps is empty: give it a value, or leave it out for 400",
    "train --train.steps many": r"error: train\.steps must be a whole number, got 'many'",
    "train --optimizer.lr fast": r"optimizer\.lr must be a number, got 'fast'",
    "train --train.precision float16": "float16",
    "train --model.name": r"--model\.name: expected one argument",
    "train demo stdlib": "unexpected argument 'stdlib'",
    "train --resume nowhere": "no run to resume in 'nowhere'",
    "train demo --resume nowhere": "leave out demo",
    "train --dry_run --train.batch 0": r"train\.batch must be at least 1, got 0",
    "train --dry_run --model.name llama-1mm": r"did you mean llama-1m\?",
    "train --dry_run --model.name .": "not a Hugging Face model folder",
    "train --dry_run --data.name stdlb": r"did you mean stdlib\?",
    "train --dry_run --data.name text:nowhere/x": "no such file or folder: 'nowhere/x'",
    "train --dry_run --data.name text:latin.yaml": "cannot tell from its name what latin.yaml contains",
    "train --dry_run --data.name text:pictures": r"no text in pictures \(1 files of other kinds\)",
    "train --dry_run --data.name text:": "lacks its PATH",
    "train --dry_run --data.name stdlib:3": "takes nothing after a colon",
    "train --dry_run --data.name /nowhere/mine": "write text:/nowhere/mine for your own",
    "train --dry_run --data.name mine.jsonl": r"write text:mine\.jsonl for your own",
    "train --dry_run --data.name hub:some/one": r"hub:some/one is a stream: set data\.limit",
    "train --dry_run --data.name c4": r"c4 is a stream: set data\.limit",
    "train --dry_run --data.tokenizer bpe:many": "bpe:SIZE",
    "train --dry_run --data.tokenizer BYTE": r"did you mean bytes\?",  # upper and lower case alike, for all names
    "train --dry_run --data.name text:CORPUS.TXT": r"did you mean 'corpus\.txt'\?",
    "train --TRAIN.STEPZ 3": r"did you mean --train\.steps\?",
    "train --dry_run --optimizer.name fom": r"did you mean foam\?",
    "train --dry_run --optimizer.options.levl 3": r"did you mean level\?",
    "train --dry_run --optimizer.options.level -3": "level must be",
    "train --dry_run --optimizer.options.level 33": "level must be an integer from 0 to 30 or 'row', got 33",
    "train --dry_run --train.device tpu": "device",
    "models llama": "unknown model 'llama'",
    "presets demoo": r"did you mean demo\?",
    "presets llama": r"did you mean llama-10m\?",
    "models lama": r"did you mean llama-1m\?",
    "models qwen": r"did you mean qwen-10m\?",
    "models LLAMA-7B": r"did you mean llama-7b\?",
    "optimizers AdamW": r"did you mean adamw\?",
    "optimizers adam": r"did you mean adamw\?",
    "plan old": r"old is a run folder: .* old/config\.yaml has its settings",
    "train old": r"old is a run folder: `foamlab train --resume old` resumes it",
    "report": "runs",
    "report nowhere": "nowhere",
}


@pytest.mark.parametrize("words", WRONG)
def test_a_users_mistake_is_one_line_and_exit_code_2(
    words: str, desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (desk / "group.yaml").write_text("train:\n  stepz: 3\n")
    (desk / "top.yaml").write_text("trian:\n  steps: 3\n")
    (desk / "broken.yaml").write_text("train:\n  steps: [\n")
    (desk / "latin.yaml").write_bytes("out: é".encode("latin-1"))
    (desk / "empty.yaml").write_text("# nothing\n")
    (desk / "section.yaml").write_text("train:\n#  steps: 3\n")
    (desk / "null.yaml").write_text("train:\n  steps: null\n")
    (desk / "old").mkdir()
    (desk / "old" / "config.yaml").write_text("out: old\n")
    (desk / "pictures").mkdir()
    (desk / "pictures" / "a.png").touch()
    before = sorted(desk.iterdir())
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert re.fullmatch(r"foamlab: error: [^\n]+\n", err) and not out
    assert re.search(WRONG[words], err), err
    assert sorted(desk.iterdir()) == before


def test_a_bug_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch, desk: Path) -> None:
    def broken(config: RunConfig) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("foamlab.training.preview.preview", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["train", "--dry_run"])


# ---------------------------------------------------------------------------------------------- lists


@pytest.mark.parametrize(
    "words, expected",
    [
        ("models", "llama-60m"),
        ("models llama-60m", '"intermediate_size": 1376'),
        ("optimizers", "adamw-split"),
        ("optimizers foam-row", "'row'"),
        ("datasets", "text:PATH"),
    ],
)
def test_lists(words: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 0
    assert expected in capsys.readouterr().out


# ---------------------------------------------------------------------------------------------- a run


def test_train_stop_resume_report(
    desk: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in step 3 saves and exits with 130; resuming ends where a run that was never stopped ends."""
    assert main(["train", *TINY, "--train.steps", "6", "--out", "whole"]) == 0
    shown = capsys.readouterr().out
    assert "step 6/6  loss " in shown and "validation loss" in shown and "done: whole" in shown

    def stop(self: object, event: dict[str, Any]) -> None:
        if event["step"] == 3:
            os.kill(os.getpid(), signal.SIGINT)

    with monkeypatch.context() as patch:
        patch.setattr(run_display.Plain, "train", stop)
        assert main(["train", *TINY, "--train.steps", "6", "--out", "halves"]) == 130
    assert "to resume: foamlab train --resume halves" in capsys.readouterr().out
    assert main(["train", "--resume", "halves"]) == 0
    newest = "checkpoints/step-00000006/model.safetensors"
    assert (desk / "halves" / newest).read_bytes() == (desk / "whole" / newest).read_bytes()

    assert main(["train", "whole"]) == 2  # a run folder is no recipe, its config.yaml is
    assert "--resume whole" in capsys.readouterr().err
    assert settings(capsys, "whole/config.yaml")["train"]["steps"] == 6

    assert main(["report", "whole", "halves", "--out", "page.html", "--tables"]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"validation loss +\d", shown) and "wrote page.html" in shown
    assert (desk / "page.html").stat().st_size > 10_000 and list(desk.glob("page-*.csv"))


def test_the_library_alone_says_what_the_lab_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)  # as where only the library is installed
    assert main(["train", "demo"]) == 2
    assert "pip install 'torchfoam[lab]'" in capsys.readouterr().err


@pytest.mark.parametrize("how", [["--model.name", "MODEL"], ["--model.name=MODEL"], ["--model.name=org/name"]])
def test_a_preset_leaves_the_tokenizer_to_a_model_that_brings_one(tmp_path: Path, how: list[str]) -> None:
    def tokenizer(*words: str) -> str:
        (config,), _ = arguments.parse(commands()["train"], list(words))
        return config.data.tokenizer

    words = [word.replace("MODEL", str(tmp_path)) for word in how]
    assert tokenizer("llama-10m", *words) == ""
    assert tokenizer("llama-10m", *words, "--data.tokenizer", "bytes") == "bytes"
    assert tokenizer("llama-10m", "--model.name", "llama-1m") == tokenizer("llama-10m") == "bpe:8192"
    (tmp_path / "my.yaml").write_text("data:\n  tokenizer: bytes\n")  # named by the user: stays
    assert tokenizer(str(tmp_path / "my.yaml"), *words) == "bytes"


@pytest.mark.parametrize("dry", [[], ["--dry_run"]])
def test_a_hub_model_that_is_out_of_reach_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, dry: list[Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    hub = pytest.importorskip("huggingface_hub")

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr(hub, "snapshot_download", unreachable)
    assert main(["train", "demo", "--model.name", "org/name", *dry]) == 2
    err = capsys.readouterr().err
    assert re.fullmatch(
        r"foamlab: error: cannot fetch org/name from the Hugging Face hub: no route to host; [^\n]+\n", err
    )
