"""The benchmark measures what it says: pairs, extra memory, bytes; and refuses what it does not know."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import small
import torch

from foamlab.cli import main
from foamlab.errors import UserError
from foamlab.studies import bench

CPU = torch.device("cpu")


def test_pairs_take_turns_and_time_each() -> None:
    order = []

    def slowly() -> None:
        order.append("slow")
        time.sleep(0.004)

    slow, fast = bench.paired([slowly, lambda: order.append("fast")], pairs=4, device=CPU, warm=1)
    assert order[2:] == ["fast", "slow", "slow", "fast"] * 2
    assert len(slow) == len(fast) == 4 and min(slow) >= 0.004 > max(fast)


@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_extra_memory_is_what_a_temporary_takes() -> None:
    x = torch.ones(8_000_000)
    assert 0.9 * x.nbytes < bench.extra_memory(lambda: x + 1, CPU) < 1.5 * x.nbytes
    assert bench.extra_memory(lambda: x.add_(1), CPU) < 1e6


def test_the_matrices_are_those_that_fold() -> None:
    model = bench.matrices("llama-1m", CPU, torch.float32)
    shapes = [tuple(p.shape) for p in model.parameters()]
    assert sorted(set(shapes)) == [(128, 128), (128, 344), (344, 128)] and len(shapes) == 4 * 7
    assert all(p.grad is not None for p in model.parameters())


def test_rows_hold_the_times_and_bytes_of_a_step() -> None:
    rows = list(bench.bench_step("llama-1m", ("foam-2", "foam-2-eager"), ("bfloat16",), pairs=3))
    assert [r.optimizer for r in rows] == ["foam-2", "foam-2-eager"]
    weights = 4 * (4 * 128 * 128 + 3 * 128 * 344)
    for r in rows:
        assert r.state == 2 * 4 * weights // 4 + 4 * 28
        assert r.low <= r.ratio <= r.high and r.milliseconds > 0 and r.share > 0
        moved = 3 * 2 * weights + 2 * r.state
        assert r.bandwidth == pytest.approx(moved / r.milliseconds * 1e3)
        assert len(r.cells()) == len(r.HEADER)


def test_all_weights_on_request() -> None:
    (row,) = bench.bench_step("llama-1m", ("foam-row",), ("float32",), pairs=1, everything=True)
    assert row.state > 8 * 2 * 4096 * 128


@pytest.mark.parametrize(
    "what", [{"model": "llama-1n"}, {"names": ("foam-9",)}, {"dtypes": ("float8",)}, {"device": "gpu"}]
)
def test_unknown_names_are_refused(what: dict) -> None:
    with pytest.raises(UserError, match="unknown"):
        next(bench.bench_step(**{"model": "llama-1m", **what}))


def test_the_loop_is_timed_in_turns_with_a_bare_one(tmp_path: Path) -> None:
    config = small.config(small.prepare(tmp_path), tmp_path / "run")
    rows = list(bench.bench_train(config, ("foam",), steps=4))
    assert [r.optimizer for r in rows] == ["foam"]
    assert rows[0].tokens_per_second > 0 and rows[0].bare > 0 and rows[0].low <= rows[0].ratio <= rows[0].high
    assert not (tmp_path / "run").exists()


def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["bench", "step", "--model", "llama-1m", "--optimizers", "foam-3", "--pairs", "2", "--threads", "1"]) == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3 and "ratio" in lines[0] and lines[1].startswith("float32") and "foam-3" in lines[2]
    assert main(["bench", "stop"]) == 2


@pytest.mark.parametrize("what", ["step", "train"])
def test_no_pairs_is_said(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sys.exit(main(["bench", what, "--pairs", "0"]))
    assert "--pairs must be at least 1, got 0" in capsys.readouterr().err
