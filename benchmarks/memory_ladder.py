"""Peak memory of a real training step, one saving after another: a markdown table on standard output."""

import argparse

from foamlab.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from foamlab.studies import memory_ladder

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="llama-60m")
parser.add_argument("--batch", type=int, default=8, help="rows a step")
parser.add_argument("--sequence", type=int, default=256, help="tokens a row")
parser.add_argument("--chunk", type=int, default=128, help="tokens whose logits exist at once, on the lower rungs")
parser.add_argument("--device", default="cpu")
parser.add_argument("--threads", type=int, default=0)
args = parser.parse_args()

base = RunConfig(
    model=ModelConfig(args.model),
    data=DataConfig(sequence=args.sequence),
    train=TrainConfig(batch=args.batch, device=args.device, threads=args.threads),
)
found = []
for rung in memory_ladder.climb(base, args.chunk):
    found.append(rung)
    for row in (
        memory_ladder.table(found)[-1:]
        if len(found) > 1
        else [*memory_ladder.table(found)[:1], ["---"] * 8, memory_ladder.table(found)[1]]
    ):
        print("| " + " | ".join(row) + " |", flush=True)
