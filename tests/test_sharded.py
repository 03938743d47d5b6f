"""Sharded weights, held to one process: four gloo processes run all cases (`sharded_cases.py`) in one spawn."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)

from sharded_cases import CASES, WORLD


def test_sharded_weights_are_stepped_and_saved_as_whole_ones(tmp_path: Path) -> None:
    """One test, so that workers of pytest do not each start the processes."""
    command = [sys.executable, str(Path(__file__).with_name("sharded_cases.py")), str(tmp_path)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    ) as ranks:
        try:
            said, _ = ranks.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            said, _ = ranks.communicate()
    found = [tmp_path / f"{rank}.json" for rank in range(WORLD)]
    assert all(path.exists() for path in found), said[-3000:]
    reports = [json.loads(path.read_text()) for path in found]
    wrong = {
        f"{name}, rank {rank}": report.get(name, "never ran")[-2000:]
        for name in CASES
        for rank, report in enumerate(reports)
        if report.get(name, "never ran")
    }
    assert not wrong, "\n".join(f"{where}: {what}" for where, what in wrong.items())
