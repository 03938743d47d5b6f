"""The planner against real steps on this machine, as a table: see docs/planning.md.

python benchmarks/plan_check.py [MODEL ...]
"""

from __future__ import annotations

import sys
import warnings

from foamlab.config import DataConfig, ModelConfig, OptimizerConfig, RunConfig, TrainConfig
from foamlab.studies.plan_check import check

MODELS = ("llama-1m", "llama-10m", "llama-60m", "gpt2", "qwen-10m", "gpt2-10m")


def main() -> None:
    warnings.simplefilter("ignore")
    print("| model | optimizer | checkpointing | predicted MB | measured MB | total off | weights, gradients, state |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for model in sys.argv[1:] or MODELS:
        for optimizer in ("foam", "adamw", "muon"):
            for checkpointing in (False, True):
                config = RunConfig(
                    model=ModelConfig(model, checkpointing),
                    data=DataConfig(sequence=256),
                    optimizer=OptimizerConfig(optimizer),
                    train=TrainConfig(batch=4, precision="float32"),
                )
                found = check(config)
                sizes = [f"{x['total'] / 1e6:.1f}" for x in (found.predicted, found.measured)]
                cells = [model, optimizer, "yes" if checkpointing else "no", *sizes, f"{100 * found.error:+.2f} %"]
                print("| " + " | ".join([*cells, "exact" if found.exact else "WRONG"]) + " |", flush=True)


if __name__ == "__main__":
    main()
