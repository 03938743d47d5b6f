"""A run shown on terminals and in pipes."""

from __future__ import annotations

import io
import os
import re
import signal
from typing import Any

import pytest

from foamlab.cli import run_display

# ---------------------------------------------------------------------------------------------- display

SIZE = {"weights": 7_000_000, "state": 2_000_000, "peak": 500_000_000}
EVENTS: list[dict[str, Any]] = [
    {"kind": "prepare", "stage": "tokens", "share": 0.5},
    {"kind": "prepare", "stage": "tokens", "share": None},
    {"kind": "prepare", "stage": "warning", "message": "a file was not text"},
    {"kind": "note", "message": "using float32"},
    {
        "kind": "start", "folder": "runs/x", "step": 0, "steps": 100, "tokens_per_step": 64,
        "model": {"name": "m", "parameters": 1234}, "optimizer": {"name": "foam"}, "bytes": {**SIZE, "state": 0},
    },
    {"kind": "bytes", "bytes": SIZE},
    {"kind": "train", "step": 10, "loss": 2.0, "lr": 0.01, "grad_norm": 1.0, "tokens_per_second": 640.0},
    {"kind": "skip", "step": 11, "why": "loss is nan"},
    {"kind": "train", "step": 100, "loss": 1.0, "lr": 0.001, "grad_norm": 1.0, "tokens_per_second": 640.0},
    {"kind": "eval", "step": 100, "loss": 1.5, "perplexity": 4.48},
    {"kind": "save", "step": 100, "path": "runs/x/checkpoints/step-00000100"},
    {"kind": "of another version"},
    {"kind": "end", "status": "done", "folder": "runs/x", "resume": "", "sample": "def f[0]:", "result": {}},
]  # fmt: skip


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_a_run_is_shown_on_terminals_and_in_pipes(stream: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    shown = stream()
    with run_display.display(shown, interval=0) as on_event:
        for event in EVENTS:
            on_event(event)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
    for expected in (
        "1,234 parameters, with foam", "a file was not text", "using float32", "step 100/100", "loss 1.0000",
        "perplexity 2.72", "lr 1.00e-03", "640 tokens/s", "state 2.0 MB", "peak 500.0 MB", "1 skipped", "0:00 left",
        "validation loss 1.5000", "loss is nan", "saved runs/x", "def f[0]:", "done: runs/x",
    ):  # fmt: skip
        assert expected in text, expected
    if stream is io.StringIO:
        assert "\x1b" not in shown.getvalue() and "step 10/100  loss 2.0000  perplexity 7.39" in text
        assert "0:09 left" in text  # 90 steps of 64 tokens at 640 tokens/s


def test_a_pipe_gets_one_line_an_interval() -> None:
    shown = io.StringIO()
    with run_display.display(shown, interval=3600) as on_event:
        on_event(EVENTS[4])
        on_event(EVENTS[5])
        for step in range(1, 101):
            on_event({**EVENTS[6], "step": step})
    lines = [line for line in shown.getvalue().splitlines() if line.startswith("step ")]
    assert [line.split()[1] for line in lines] == ["1/100", "100/100"]


def test_when_nobody_reads_the_output_the_run_is_asked_to_stop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """`foamlab train demo 2>&1 | head`: both pipes are broken; the run ends as on Ctrl-C, which saves."""
    asked = []
    before = signal.signal(signal.SIGINT, lambda *_: asked.append(1))
    ends = [os.pipe() for _ in range(2)]
    out, err = (os.fdopen(write, "w") for _, write in ends)
    try:
        for read, _ in ends:
            os.close(read)
        monkeypatch.setattr(run_display.sys, "stderr", err)
        with run_display.display(out, interval=0) as on_event:
            for event in EVENTS:
                on_event(event)
        assert asked == [1]
        out.close()  # as at exit: nothing is left to write
        err.close()
    finally:
        signal.signal(signal.SIGINT, before)
