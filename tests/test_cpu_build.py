"""When the CPU kernel is used, and how it is built: what is said where it cannot be."""

from __future__ import annotations

import multiprocessing
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from torchfoam import FOAM, backends
from torchfoam.kernels import cpu, eager

pytestmark = pytest.mark.skipif(cpu.unavailable() is not None, reason=str(cpu.unavailable()))


def test_what_it_refuses_falls_to_the_eager_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    for backend in (cpu, eager):
        name = backend.__name__.rpartition(".")[2]
        monkeypatch.setitem(
            sys.modules["torchfoam.kernels"].BACKENDS, name,
            replace(sys.modules["torchfoam.kernels"].BACKENDS[name], update=lambda s, h, n=name: used.append(n)),
        )  # fmt: skip
    F32, F64 = torch.float32, torch.float64
    kinds: list[tuple[torch.dtype, dict[str, Any]]] = [
        (F32, {}), (F64, {}), (F32, {"rule": "muon"}), (F32, {"state": "int8"}),
    ]  # fmt: skip
    for dtype, options in kinds:
        w = nn.Parameter(torch.ones(2, 8, dtype=dtype))
        w.grad = torch.ones_like(w)
        FOAM([w], **options).step()
    assert used == ["cpu", "eager", "eager", "cpu"]


def test_an_explicit_backend_works_or_says_why_not() -> None:
    assert backends()["cpu"] == "ok"
    kinds: list[tuple[torch.dtype, dict[str, Any], str]] = [
        (torch.float64, {}, "float64"), (torch.float32, {"rule": "muon"}, "adam rule"),
    ]  # fmt: skip
    for dtype, options, reason in kinds:
        with pytest.raises(ValueError, match=f"backend 'cpu' cannot be used: .*{reason}"):
            FOAM([nn.Parameter(torch.ones(2, 8, dtype=dtype))], backend="cpu", **options)


NO_COMPILER = """
import warnings, torch
from torchfoam import FOAM, backends
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    for _ in range(3):
        w = torch.nn.Parameter(torch.ones(2, 8)); w.grad = torch.ones_like(w)
        FOAM([("w", w)]).step()
assert w[0, 0] < 1 and len(seen) == 1, seen
assert "apt install gcc" in str(seen[0].message), seen[0].message
assert "apt install gcc" in backends()["cpu"]
try:
    FOAM([w], backend="cpu")
except ValueError as error:
    assert "apt install gcc" in str(error)
else:
    raise AssertionError
"""


def test_build_without_a_compiler_one_warning_says_what_to_install(tmp_path: Path) -> None:
    env = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(cpu.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", NO_COMPILER], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_failed_build_gives_the_compiler_s_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "broken.c"
    broken.write_text("int foam_adam(void) { return nonsense; }")
    monkeypatch.setattr(cpu, "SOURCE", broken)
    with pytest.raises(RuntimeError, match="nonsense"):
        cpu.build(tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_several_processes_may_build_at_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.starmap(cpu.build, [(tmp_path, ("-O0",))] * 3)
    assert len(set(paths)) == 1 and [x.name for x in tmp_path.iterdir()] == [paths[0].name]
    assert callable(cpu.load(paths[0]))


def test_build_knows_flags_and_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = cpu.build(tmp_path, ["-O0"])
    made = first.stat().st_mtime_ns
    assert cpu.build(tmp_path, ["-O0"]) == first and first.stat().st_mtime_ns == made
    assert cpu.build(tmp_path, ["-O0", "-DX"]) != first


def test_a_damaged_library_is_built_anew(tmp_path: Path) -> None:
    path = cpu.build(tmp_path, ["-O0"])
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:4096])
    assert cpu.build(tmp_path, ["-O0"]) == path and path.read_bytes() == whole


def test_cc_may_be_quoted_or_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my tools"
    folder.mkdir()
    real = shutil.which(cpu.compiler()[0])
    assert real
    (folder / "cc").symlink_to(real)
    monkeypatch.setenv("CC", f"'{folder}/cc' -g")
    assert cpu.build(tmp_path, ["-O0"]).exists()
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(RuntimeError, match="CC names 'no-such-compiler', which is not there; install gcc"):
        cpu.build(tmp_path)


@pytest.mark.parametrize(
    ("script", "flags", "message"),
    [
        ("exit 0", "", "reported success but wrote no library; set CC"),
        ('while [ "$1" != -o ]; do shift; done; : > "$2"', "", "reported success but wrote no library; set CC"),
        ('while [ "$1" != -o ]; do shift; done; echo nonsense > "$2"', "", "cannot be loaded .*; set CC"),
        (None, "-c", "cannot be loaded .*CFLAGS"),
        (None, "-Dfoam_adam=other", "cannot be loaded .*foam_adam.*CFLAGS"),
    ],
    ids=["no file", "empty", "nonsense", "object", "no function"],
)
def test_a_compiler_that_succeeds_without_a_library(
    script: str | None, flags: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if script:
        fake = tmp_path / "fakecc"
        fake.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit 0\n{script}\n')
        fake.chmod(0o755)
        monkeypatch.setenv("CC", str(fake))
    monkeypatch.setenv("CFLAGS", f"{flags} -O0")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    found = cpu._library.__wrapped__()
    assert isinstance(found, str) and re.search(message, found), found
    assert len(found.splitlines()) == 1
