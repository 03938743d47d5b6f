"""`python -m torchfoam` says what a report of a problem needs, also on a machine where little works."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torchfoam
from torchfoam import backends
from torchfoam.__main__ import facts
from torchfoam.kernels import cpu


def test_the_command_prints_a_line_for_each_fact() -> None:
    done = subprocess.run([sys.executable, "-m", "torchfoam"], capture_output=True, text=True, check=True)
    shown = dict(line.split("  ", 1) for line in done.stdout.splitlines())
    told = {name.strip(): words.strip() for name, words in shown.items()}
    assert {f"backend {name}": told[f"backend {name}"] for name in backends()} == {
        f"backend {name}": " ".join(answer.split()) for name, answer in backends().items()
    }
    assert told["torchfoam"].startswith(torchfoam.__version__) and told["torch"].startswith(torch.__version__)
    assert told["python"].startswith(platform.python_version()) and platform.machine() in told["system"]
    assert not done.stderr


def test_compiler_and_cache_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    monkeypatch.setenv("CFLAGS", "-g")
    found = facts()
    assert found["cache"] == str(tmp_path / "torchfoam") == str(cpu.cache())
    assert found["compiler"].startswith("no-such-compiler (does not run: ")
    assert found["compiler"].endswith("; CC=no-such-compiler; CFLAGS=-g")


def test_the_processor_is_told_with_the_flags_that_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "cpu_features", lambda: "flags\t\t: fpu avx2 fma avx\nmodel name\t: A Processor")
    assert facts()["processor"] == "A Processor (avx2, fma)"
    monkeypatch.setattr(cpu, "cpu_features", lambda: "an unknown system")
    assert facts()["processor"].endswith("(no flags known)")


def test_nothing_there_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "compiler", list)

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(cpu, "cache", homeless)
    found = facts()
    assert found["compiler"] == "-" and found["cache"] == "none: Could not determine home directory."
    assert all("\n" not in words for words in found.values())
