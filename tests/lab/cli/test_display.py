"""The display of a run on a narrow terminal and in a pipe."""

from __future__ import annotations

import io
import re

import pytest

from foamlab.cli.run_display import display

START = {
    "kind": "start", "folder": "runs/llama-1m-foam-1", "step": 0, "steps": 600, "tokens_per_step": 2048,
    "model": {"name": "llama-1m", "parameters": 1_840_256}, "optimizer": {"name": "foam"},
    "bytes": {"weights": 7_361_024, "state": 9_979_036, "peak": 500_000_000},
}  # fmt: skip
STEP = {"loss": 8.1234, "lr": 1e-3, "tokens_per_second": 12345.0, "tokens": 2048, "seconds": 1.0, "grad_norm": 1.0}


class Stream(io.StringIO):
    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


def shown(stream: Stream) -> str:
    with display(stream, interval=0) as on_event:
        on_event({"kind": "prepare", "stage": "tokens", "share": 0.4})
        on_event(START)
        for k in range(1, 4):
            on_event({"kind": "train", "step": k, **STEP})
            if stream.terminal:
                on_event.bars.refresh()  # type: ignore[attr-defined]
        on_event({"kind": "eval", "step": 3, "loss": 5.0, "perplexity": 148.4})
    return stream.getvalue()


@pytest.mark.parametrize("columns", [20, 40, 200])
def test_a_terminal_of_any_width_is_never_overrun(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown(Stream(True)))
    live = [line for line in re.split(r"[\r\n]", text) if re.match(r"(training|cutting|step \d+/)", line)]
    assert any(line.startswith("step 3/600") for line in live)
    assert all(len(line) <= columns for line in live)
    whole = "peak 500.0 MB" in text
    assert whole == (columns == 200) and all("peak" in x or x.endswith("…") for x in live if x.startswith("step "))


def test_a_pipe_gets_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "40")
    lines = shown(Stream(False)).splitlines()
    assert "\x1b" not in "".join(lines)
    assert lines[-1] == "step 3: validation loss 5.0000, perplexity 148.40"
    assert lines[-2].startswith("step 3/600  loss 8.1234") and lines[-2].endswith("peak 500.0 MB  1:39 left")
