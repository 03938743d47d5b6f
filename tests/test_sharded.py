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

from sharded_cases import CASES, WORLD

if not dist.is_available() or not dist.is_gloo_available():
    pytest.skip("torch was built without gloo", allow_module_level=True)


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank says of each case."""
    folder = tmp_path_factory.mktemp("sharded")
    command = [sys.executable, str(Path(__file__).with_name("sharded_cases.py")), str(folder)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True
    ) as ranks:
        try:
            said, _ = ranks.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(ranks.pid, signal.SIGKILL)
            said, _ = ranks.communicate()
    found = [folder / f"{rank}.json" for rank in range(WORLD)]
    assert all(path.exists() for path in found), said[-3000:]
    return [json.loads(path.read_text()) for path in found]


@pytest.mark.parametrize("name", CASES)
def test_sharded(reports: list[dict[str, str]], name: str) -> None:
    wrong = {rank: report.get(name, "never ran") for rank, report in enumerate(reports)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text[-2000:]}" for rank, text in wrong.items() if text)
