"""Requests to stop a run, and output that can no longer be written.

Ctrl-C, SIGTERM, SIGHUP (a terminal that was closed), SIGUSR1, SIGUSR2 and SIGXCPU (what batch systems send before they
kill) all mean the same: finish the step, save, end. A signal that the process was started to ignore (`nohup`) stays
ignored. No torch here, so that the command can use this from its first line.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU")
STOPS = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))  # Windows has the first two


@contextmanager
def stop_requests() -> Iterator[Callable[[], bool]]:
    """Whether a signal of `STOPS` has come during the block, as a function; a second Ctrl-C is a KeyboardInterrupt.

    No other pair aborts: torchrun sends SIGTERM and SIGINT for one Ctrl-C, Slurm a warning and SIGTERM. Outside the
    main thread nothing is caught. The end of torchrun is a request too: it ends on SIGUSR1 and leaves its processes
    running.
    """
    asked: list[int] = []
    parent = os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None

    def ask(number: int, frame: object) -> None:
        if number == signal.SIGINT and signal.SIGINT in asked:
            raise KeyboardInterrupt
        asked.append(number)

    with _handling(ask, STOPS):
        yield lambda: bool(asked) or (parent is not None and os.getppid() != parent)


@contextmanager
def as_interrupts() -> Iterator[None]:
    """Let every signal of `STOPS` that would kill be a KeyboardInterrupt in the block, as Ctrl-C is."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    with _handling(interrupt, [s for s in STOPS if signal.getsignal(s) == signal.SIG_DFL]):
        yield


@contextmanager
def _handling(handler: Callable[[int, object], None], numbers: Any) -> Iterator[None]:
    main = threading.current_thread() is threading.main_thread()
    caught = [s for s in numbers if main and signal.getsignal(s) != signal.SIG_IGN]
    before = {s: signal.signal(s, handler) for s in caught}
    try:
        yield
    finally:
        for s, old in before.items():
            signal.signal(s, signal.SIG_DFL if old is None else old)  # None: not set from Python


class _Steady:
    """`steady`'s stream: all but writing is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._unsaid: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        self._unsaid.append(text)
        try:
            self._stream.write(text)
        except OSError as e:
            self._lost(e)
        return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
            self._unsaid.clear()
        except OSError as e:
            self._lost(e)

    def _lost(self, error: OSError) -> None:
        """Go on with stderr, or without output if that is lost too."""
        silence(self._stream)
        text = "".join(self._unsaid)
        self._unsaid.clear()
        if self._stream is sys.stderr:
            return
        self._stream = sys.stderr
        if error.errno == errno.EIO:  # the terminal is gone: the run is not, unless SIGHUP has come with it
            self.write(text)
        else:
            self.write(f"cannot write the output ({error.strerror}): stopping\n{text}")
        self.flush()
        if error.errno != errno.EIO:
            signal.raise_signal(signal.SIGINT)  # the run ends as on Ctrl-C: saved


def steady(stream: TextIO) -> TextIO:
    """The stream, wrapped so that a run does not fail when it can no longer be written.

    If its reader is gone (`| head`) or its disk is full, the run is asked to stop, so that it saves; if a terminal was
    closed, it goes on without output. What could not be written goes to stderr.
    """
    return cast(TextIO, _Steady(stream))


def silence(stream: TextIO) -> None:
    """Discard what is still to be written to a stream, also at exit."""
    with suppress(OSError, ValueError, AttributeError):  # no file below it
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)
