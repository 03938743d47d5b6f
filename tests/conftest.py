"""One thread a test process, also in the processes that tests start: two workers do not fight for two cores.

Signals are as a terminal leaves them: what starts the tests (nohup, a shell's `&`) may have them ignored, and the lab
respects that, so that a test which sends one would wait for ever.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

for _name in ("SIGHUP", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGTERM", "SIGINT"):
    if (_signal := getattr(signal, _name, None)) is not None and signal.getsignal(_signal) == signal.SIG_IGN:
        with suppress(ValueError):  # not the main thread
            signal.signal(_signal, signal.default_int_handler if _name == "SIGINT" else signal.SIG_DFL)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models and text of the lab's `small` runs, anew for each file of tests."""
    import small

    return small.prepare(tmp_path_factory.mktemp("home"))
