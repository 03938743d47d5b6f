"""Who runs what, where and with which versions: the first keys of a record. No torch here."""

from __future__ import annotations

import getpass
import os
import platform
import shlex
import sys
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGES = ("torchfoam", "torch", "transformers", "tokenizers", "safetensors", "numpy")


def circumstances(before: Mapping[str, Any], step: int, hardware: Mapping[str, Any]) -> dict[str, Any]:
    """Who runs what, where and with which versions: the first keys of `run.json`.

    Args:
        before: `run.json` of the run that goes on at `step`, whose beginning is kept; empty for a new one.
        hardware: what else is known of it, such as the GPU.
    """
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # a container without a user name
        user = str(os.getuid()) if hasattr(os, "getuid") else "unknown"
    begun = {"who": f"{user}@{platform.node()}", "command": shlex.join(sys.argv), "started": now()}
    parts = before.get("resumed")
    again = [*(parts if isinstance(parts, list) else []), {**begun, "step": step}]
    return {
        **({"resumed": again} if before else begun),
        "versions": {"python": platform.python_version(), **{n: v for n in PACKAGES if (v := installed(n))}},
        "hardware": {"system": platform.platform(), "processor": processor(), "cores": cores(), **hardware},
    }


def now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def installed(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's name, as well as the system tells it."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
