"""Sharded weights, held to one process: four gloo processes run all cases (`sharded_cases.py`) in one spawn."""

from __future__ import annotations

import json
import os
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
    script = Path(__file__).with_name("sharded_cases.py")
    said = [(folder / f"{rank}.txt").open("w+") for rank in range(WORLD)]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(folder)],
            stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank, out in enumerate(said)
    ]  # fmt: skip
    try:
        for rank in ranks:
            rank.wait(timeout=300)
    finally:
        for rank in ranks:
            rank.kill()
    found = []
    for rank, out in enumerate(said):
        out.seek(0)
        text = out.read()
        out.close()
        assert (folder / f"{rank}.json").exists(), text[-3000:]
        found.append(json.loads((folder / f"{rank}.json").read_text()))
    return found


@pytest.mark.parametrize("name", CASES)
def test_sharded(reports: list[dict[str, str]], name: str) -> None:
    wrong = {rank: report.get(name, "never ran") for rank, report in enumerate(reports)}
    assert not any(wrong.values()), "\n".join(f"rank {rank}: {text[-2000:]}" for rank, text in wrong.items() if text)
