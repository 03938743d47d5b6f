"""The memory ladder on a small model: every rung of real steps lies below the one before, by what it says it saves."""

from __future__ import annotations

import pytest
import torch

from foamlab.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from foamlab.studies import memory_ladder
from torchfoam.kernels import eager


@pytest.fixture(scope="module")
def found() -> list[memory_ladder.Rung]:
    base = RunConfig(
        model=ModelConfig("llama-1m"),
        data=DataConfig(sequence=64),
        train=TrainConfig(batch=8, device="cpu", threads=1),
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(eager.SLAB, "cpu", 1 << 12)  # in proportion to the model
        with torch.random.fork_rng():
            return list(memory_ladder.climb(base, chunk=32))


def test_every_rung_is_below_the_one_before(found: list[memory_ladder.Rung]) -> None:
    peaks = [rung.peak for rung in found]
    assert peaks == sorted(set(peaks), reverse=True), memory_ladder.table(found)
    assert peaks[-1] < 0.2 * peaks[0]


def test_each_saves_what_it_says(found: list[memory_ladder.Rung]) -> None:
    names = ["adamw", "level2", "level3", "row", "chunks", "checkpointing", "release", "bfloat16"]
    at = dict(zip(names, found, strict=True))
    n = 1_840_256  # weights
    assert at["adamw"].weights == 4 * n and at["bfloat16"].weights == 2 * n
    tensors = 4 * 9 + 3
    assert at["adamw"].state == 8 * n + 4 * tensors  # two moments and a step count each
    assert at["level2"].state < 0.75 * at["adamw"].state
    assert at["row"].state < at["level3"].state < at["level2"].state / 3
    token = 4096 * 4  # bytes of its logits
    assert at["row"].logits >= 2 * 8 * 64 * token and at["chunks"].logits <= 4 * 32 * token
    assert at["checkpointing"].temporaries < 0.5 * at["chunks"].temporaries
    assert at["release"].gradients < 0.5 * 4 * n
    assert at["bfloat16"].state == at["release"].state  # codes are codes


def test_the_table() -> None:
    rows = memory_ladder.table(
        [memory_ladder.Rung("a", 10**6, 2 * 10**6, 0, 0, 10**6), memory_ladder.Rung("b", 10**6, 0, 0, 0, 10**6)]
    )
    assert rows[1] == ["a", "1.0", "2.0", "0.0", "0.0", "1.0", "4.0", "100%"] and rows[2][-2:] == ["2.0", "50%"]
