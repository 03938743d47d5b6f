"""`foamlab bench`: the time of optimizer steps and of the training loop."""

from __future__ import annotations

from ...config import RunConfig
from ...errors import known_name
from ...text import table
from ..command import Command


def bench(
    what: str = "step",
    /,
    *,
    model: str = "",
    optimizers: str = "",
    dtypes: str = "float32,bfloat16",
    pairs: int = 30,
    threads: int = 0,
    device: str = "cpu",
    everything: bool = False,
) -> None:
    """Time optimizer steps against torch's fused AdamW (step), or the whole loop against a bare one (train).

    Args:
        what: step or train.
        model: for step, the preset whose shapes are used (llama-60m); for train, the one that is trained (llama-1m).
        optimizers: names from `foamlab optimizers`, separated by commas; for step also foam-0, foam-1, ... (levels).
        dtypes: dtypes of weights and gradients, for step.
        pairs: timed pairs per optimizer.
        threads: CPU threads; 0 means torch's default.
        device: cpu or cuda, for step.
        everything: step all weights of the model, not only the matrices that fold.
    """
    from ...config import ModelConfig
    from ...machine import threads as using
    from ...studies import bench as lab

    known_name(what, ("step", "train"), "bench")
    names = tuple(name for name in optimizers.split(",") if name)
    with using(threads):
        if what == "train":
            config = RunConfig(model=ModelConfig(model or "llama-1m"))
            rows = [r.cells() for r in lab.bench_train(config, names or lab.LOOPS, pairs)]
            print(table(lab.TrainRow.HEADER, rows))
        else:
            chosen = names or lab.STEPS
            steps = lab.bench_step(model or "llama-60m", chosen, dtypes.split(","), pairs, device, everything)
            print(table(lab.StepRow.HEADER, [r.cells() for r in steps]))


COMMAND = Command(
    bench,
    group="measure",
    help="time optimizer steps, or the whole training loop",
    examples=(
        "foamlab bench step",
        "foamlab bench step --model llama-130m --optimizers foam-3,adamw-foreach",
        "foamlab bench train",
    ),
)
