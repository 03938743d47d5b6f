"""What the world does to a run: every request to stop saves it, and output that nobody can read does not fail it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
from contests import small_contest

from foamlab import signals
from foamlab.cli import main, run_display
from foamlab.cli.command import Command
from foamlab.cli.commands import commands
from foamlab.contest import runner
from foamlab.training import checkpoint
from foamlab.training.run import train


def ask(kind: str, *numbers: int) -> Callable[[dict[str, Any]], None]:
    """An `on_event` that gets each signal once, at an event of this kind."""
    left = list(numbers)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == kind and left:
            signal.raise_signal(left.pop(0))

    return on_event


@pytest.mark.parametrize("number", signals.STOPS)
def test_every_request_saves_the_run_and_says_how_to_go_on(number: Any, home: Path, tmp_path: Path) -> None:
    before, out = signal.getsignal(number), tmp_path / "a run"
    assert train(small.config(home, out), on_event=ask("train", number)).status == "interrupted"
    info = json.loads((out / "run.json").read_text())
    assert (info["status"], info["resume"]) == ("interrupted", f"foamlab train --resume '{out}'")
    assert checkpoint.load(checkpoint.found(out)[-1])["step"] == 2
    assert signal.getsignal(number) is before
    assert train(small.config(home, out), resume=out).status == "done"
    assert json.loads((out / "run.json").read_text())["resume"] == ""


def test_a_warning_and_the_end_that_follows_do_not_abort(home: Path, tmp_path: Path) -> None:
    """Slurm: SIGUSR1, then SIGTERM, to all processes; a shell: SIGHUP, then SIGTERM."""
    numbers = (signal.SIGUSR1, signal.SIGHUP, signal.SIGTERM, signal.SIGUSR1)
    for k in (1, 2):
        on_event = ask("train", *numbers[-2 * k :][:2])
        assert train(small.config(home, tmp_path / str(k)), on_event=on_event).status == "interrupted"


def test_processes_whose_torchrun_has_died_save(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It dies of SIGUSR1, and does not hand it on; where one process of several asks, all stop."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    assert train(small.config(home, tmp_path / "whole")).status == "done"

    def die(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == 2:
            monkeypatch.setattr(os, "getppid", lambda: 1)

    monkeypatch.setattr(os, "getppid", lambda: 1234)
    assert train(small.config(home, tmp_path / "orphan"), on_event=die).status == "interrupted"


def test_what_is_ignored_stays_ignored(home: Path, tmp_path: Path) -> None:
    """`nohup foamlab train ...` outlives its terminal."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert train(small.config(home, tmp_path / "run"), on_event=ask("train", signal.SIGHUP)).status == "done"
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.parametrize("number", signals.STOPS)
def test_before_a_run_has_begun_a_request_is_as_ctrl_c(
    number: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def wait() -> None:
        """Wait."""
        signal.raise_signal(number)

    before = signal.getsignal(number)
    monkeypatch.setitem(commands(), "wait", Command(wait, "run", "", ()))
    assert main(["wait"]) == 130
    assert capsys.readouterr().err == "foamlab: interrupted\n" and signal.getsignal(number) is before


@pytest.mark.parametrize("number", signals.STOPS)
def test_a_contest_lets_its_runs_save(number: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that has not come to its own handler yet is ended by the signal itself: no failure either."""
    log = []

    class Endless:
        returncode = None

        def poll(self) -> int | None:
            return self.returncode

        def terminate(self) -> None:
            log.append("terminated")
            self.returncode = 130

        def wait(self, timeout: float | None = None) -> None:
            assert self.returncode == 130

    ran = [Endless(), Endless()]
    monkeypatch.setattr(runner.Runner, "spawn", lambda self, orders, slot, log: ran[slot] if not log.touch() else None)

    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "state":
            ran[0].returncode = -number  # Slurm tells all processes of a step
            signal.raise_signal(number)

    config = small.config(home, tmp_path / "unused", eval_every=2, checkpoint_every=0, memory="ignore")
    end = runner.start(small_contest(config), tmp_path / "c", 2, on_event)
    assert end["status"] == "interrupted" and log


# ---------------------------------------------------------------------------------------------- a terminal


def closed_terminal() -> Any:
    """A terminal that nobody can see any more: writing to it fails."""
    master, slave = os.openpty()
    os.close(master)
    with pytest.raises(OSError):
        os.write(slave, b"x")
    return os.fdopen(slave, "w")


def test_a_closed_terminal_does_not_stop_what_was_not_asked_to(monkeypatch: pytest.MonkeyPatch) -> None:
    out, err = closed_terminal(), closed_terminal()
    asked: list[int] = []
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(signal, "raise_signal", asked.append)
    stream = signals.steady(out)
    for _ in range(3):
        print("a line", file=stream, flush=True)
    assert not asked
    out.close(), err.close()  # as at exit: nothing is left to write


def test_what_a_terminal_cannot_show_goes_to_a_log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        monkeypatch.setattr(sys, "stderr", log)
        with run_display.display(closed_terminal(), interval=0) as on_event:
            on_event({"kind": "note", "message": "one"})
            on_event({"kind": "note", "message": "two"})
    assert (tmp_path / "log").read_text() == "note: one\nnote: two\n"


def test_a_terminal_that_is_closed_lets_the_run_save(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live display, its thread and all, on a terminal that goes away in the middle."""
    monkeypatch.setenv("TERM", "xterm")
    master, slave = os.openpty()
    out, on_step = os.fdopen(slave, "w"), ask("train", signal.SIGHUP)
    monkeypatch.setattr(sys, "stderr", out)
    with run_display.display(out) as show:

        def on_event(event: dict[str, Any]) -> None:
            if event["kind"] == "train" and event["step"] == 1:
                assert b"training" in os.read(master, 10_000)
                os.close(master)
            show(event)
            on_step(event)

        assert train(small.config(home, tmp_path / "run"), on_event=on_event).status == "interrupted"
    assert checkpoint.found(tmp_path / "run")
    out.close()


@pytest.mark.heavy
def test_a_closed_terminal_ends_the_command(home: Path, tmp_path: Path) -> None:
    """The whole of it, in a process whose terminal goes away: the system sends SIGHUP."""
    settings = tmp_path / "run.yaml"
    settings.write_text(json.dumps(runner.to_dict(small.config(home, tmp_path / "run", steps=10**6, memory="ignore"))))
    master, slave = os.openpty()
    code = "import fcntl, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
    words = [
        sys.executable,
        "-c",
        code + "from foamlab.cli import main; sys.exit(main())",
        "train",
        str(settings),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "TERM": "xterm", "COLUMNS": "100"}
    process = subprocess.Popen(
        words, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True, cwd=tmp_path
    )
    os.close(slave)
    seen = b""
    while b"step 3" not in seen:
        seen += os.read(master, 1000)
    assert b"loading torch" in seen
    os.close(master)
    assert process.wait(30) == 130
    info = json.loads((tmp_path / "run" / "run.json").read_text())
    assert info["status"] == "interrupted" and info["resume"] == f"foamlab train --resume {tmp_path / 'run'}"
    assert checkpoint.found(tmp_path / "run")


# ---------------------------------------------------------------------------------------------- a full disk


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
@pytest.mark.parametrize("words", ["models", "--help", "train --help", "train demo --print_config", "optimizers foam"])
def test_a_full_disk_under_the_output_is_one_line(
    words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = open("/dev/full", "w")  # noqa: SIM115
    monkeypatch.setattr(sys, "stdout", full)
    assert main(words.split()) == 2
    full.close()  # as at exit: nothing is left to write
    assert capsys.readouterr().err == "foamlab: error: cannot write the output: No space left on device\n"


def test_a_closed_pipe_or_no_output_at_all_is_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    os.close(read)
    pipe = os.fdopen(write, "w")
    for stream, words in ((pipe, "models"), (pipe, "train --help"), (None, "models"), (None, "train --help")):
        monkeypatch.setattr(sys, "stdout", stream)
        assert main(words.split()) == 0
    pipe.close()  # as at exit: nothing is left to write
    assert capsys.readouterr().err == ""
