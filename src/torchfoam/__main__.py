"""`python -m torchfoam`: what a report of a problem needs to say of the machine."""

from __future__ import annotations

import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from . import __version__, backends
from .kernels import cpu

# what decides how fast the C kernel is
FLAGS = ("avx2", "fma", "avx512f", "avx512bw", "avx512_bf16", "amx_bf16", "asimd", "sve", "bf16")


def facts() -> dict[str, str]:
    """What there is, as (name, words) in the order shown; "-" stands for what is not there."""
    known = {
        "torchfoam": f"{__version__}, in {Path(__file__).parent}",
        "torch": f"{torch.__version__} (CUDA {torch.version.cuda or '-'}, {torch.get_num_threads()} threads)",
        "triton": _version("triton"),
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.platform()}, {platform.machine()}, {os.cpu_count()} CPUs",
        "processor": _processor(),
        "compiler": _compiler(),
        "cache": _cache(),
    }
    for i in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(i)
        known[f"GPU {i}"] = f"{card.name}, {card.total_memory / 1e9:.1f} GB, capability {card.major}.{card.minor}"
    if not torch.cuda.device_count():
        known["GPU"] = "-"
    for name, answer in backends().items():
        known[f"backend {name}"] = " ".join(answer.split())
    return known


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"


def _processor() -> str:
    """The model, and which of `FLAGS` it has."""
    lines = [line.partition(":") for line in cpu.cpu_features().splitlines()]
    found = {key.strip(): value.strip() for key, _, value in lines}
    model = found.get("model name") or found.get("CPU part") or platform.processor() or "-"
    has = (found.get("flags") or found.get("Features") or "").split()
    return f"{model} ({', '.join(flag for flag in FLAGS if flag in has) or 'no flags known'})"


def _cache() -> str:
    try:
        return str(cpu.cache())
    except RuntimeError as error:  # no home
        return f"none: {error}"


def _compiler() -> str:
    """The C compiler that builds the kernel, as it names itself, and what the environment adds."""
    command = cpu.compiler()
    if not command:
        return "-"
    try:
        named = cpu.run([*command, "--version"]).splitlines()[0]
    except (RuntimeError, IndexError) as error:
        named = f"does not run: {' '.join(str(error).split())}"
    given = [f"{name}={os.environ[name]}" for name in ("CC", "CFLAGS") if os.environ.get(name)]
    return "; ".join([f"{' '.join(command)} ({named})", *given])


if __name__ == "__main__":
    shown = facts()
    width = max(map(len, shown))
    print("\n".join(f"{name:{width}}  {words}" for name, words in shown.items()))
