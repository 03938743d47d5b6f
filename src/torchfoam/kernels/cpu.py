"""The CPU backend: `cpu.c` and its headers, compiled for this machine on first use and called through data pointers.

The library is built by the system's compiler (CC, cc, gcc or clang; CFLAGS is added) into the user's cache,
under a name made of the source, the compiler's version, the flags, the CPU and its own content, so nothing stale or
damaged is ever loaded.
It shares torch's own pool of threads. This room does no arithmetic and allocates but one small table a step.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..fold import block
from ..options import Options
from ..quant import GROUP
from .backend import Slot
from .sharded import Run, runs

SOURCE = Path(__file__).with_name("cpu.c")
# no -ffast-math: NaN and infinity must come out as they do from the eager rule
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-ffp-contract=fast", "-fPIC", "-shared", "-pthread")
FLOATS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # the enum in cpu_storage.h, as is the next
MOMENTS = {**FLOATS, torch.uint8: 3}
MEND = "set CC to a working C compiler (gcc or clang) and look at CFLAGS"
FIELDS = 14  # of the struct Task in cpu.c


class Scalars(ctypes.Structure):
    """The struct Hyper in cpu.c."""

    _fields_ = [
        (name, ctypes.c_double)
        for name in ("lr", "beta1", "beta2", "eps", "weight_decay", "scale", "residual", "residual_in_v")
    ]
    _fields_ += [(name, ctypes.c_int64) for name in ("mean_square", "whole", "maximize", "stochastic", "seed")]


# ---------------------------------------------------------------------- building


def compiler() -> list[str]:
    """The system's C compiler, with its arguments: what CC names, else cc, gcc or clang; [] if there is none."""
    named = shlex.split(os.environ.get("CC", ""))
    return named or [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]


def cpu_features() -> str:
    """Text that differs where -march=native may differ."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.platform() + platform.processor()
    keys = ("flags", "Features", "model name", "CPU part", "cpu family", "model")
    return "\n".join(sorted({line for line in lines if line.split("\t")[0].strip() in keys}))


def run(command: list[str]) -> str:
    """Run a command and return what it printed; RuntimeError with its message if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(str(error)) from None
    if done.returncode:
        raise RuntimeError(done.stderr.strip() or f"{command[0]} ended with code {done.returncode}")
    return done.stdout


def cache() -> Path:
    """The folder that built libraries are kept in."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "torchfoam"


def build(folder: Path | None = None, extra: Sequence[str] = ()) -> Path:
    """Compile cpu.c, unless that was done before, and return the library's path.

    Safe under several processes at once: each compiles to a file of its own and renames it into place.

    Raises:
        RuntimeError: there is no compiler, it failed (with its message), or the cache cannot be written.
    """
    command = compiler()
    if not command or not shutil.which(command[0]):
        found = f"CC names {command[0]!r}, which is not there" if command else "no C compiler found"
        raise RuntimeError(f"{found}; install gcc or clang (Debian: apt install gcc libc6-dev), or set CC")
    native = () if platform.machine() == "ppc64le" else ("-march=native",)
    flags = [*FLAGS, *native, *shlex.split(os.environ.get("CFLAGS", "")), *extra]
    sources = [path.read_text() for path in sorted(SOURCE.parent.glob("*.[ch]"))]
    key = "\0".join((*sources, run([*command, "--version"]), *command, *flags, cpu_features()))
    where = folder or cache()
    name = f"cpu-{_digest(key.encode())}"
    try:
        for path in sorted(where.glob(f"{name}-*.so")):
            if path.stem == f"{name}-{_digest(path.read_bytes())}":  # loading a damaged one would end the process
                return path
        where.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=where) as scratch:
            made = Path(scratch) / "cpu.so"
            run([*command, *flags, str(SOURCE), "-o", str(made), "-lm"])
            if not made.is_file() or not made.stat().st_size:
                raise RuntimeError(f"{command[0]} reported success but wrote no library; {MEND}")
            return made.replace(where / f"{name}-{_digest(made.read_bytes())}.so")
    except OSError as error:
        raise RuntimeError(f"cannot write to {where}: {error.strerror}; set XDG_CACHE_HOME") from None


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:20]


def load(path: Path) -> Callable[..., int]:
    """The step function of a built library."""
    function = ctypes.CDLL(str(path)).foam_adam
    pointer = ctypes.c_void_p
    function.argtypes = [pointer, ctypes.c_long, ctypes.POINTER(Scalars), ctypes.c_int, pointer]
    function.restype = ctypes.c_int
    return function


@functools.cache
def _library() -> Callable[..., int] | str:
    """The step function, or why there is none. Built on first use, once a process."""
    try:
        return load(build())
    except RuntimeError as error:
        return str(error)
    except (OSError, AttributeError) as error:
        return f"what the compiler built cannot be loaded ({error}); {MEND}"


@functools.cache
def torch_threads() -> int | None:
    """Address of GOMP_parallel in the OpenMP runtime that torch itself uses, so that no second pool of threads fights
    for the cores; None where there is none, and the kernel starts plain threads."""
    if "backend: OpenMP" not in torch.__config__.parallel_info():
        return None
    try:
        maps = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in maps if "omp" in line.rpartition("/")[2]}
    home = str(Path(torch.__file__).parent.parent)
    for path in sorted(paths, key=lambda path: (not path.startswith(home), path)):
        try:
            return ctypes.cast(ctypes.CDLL(path).GOMP_parallel, ctypes.c_void_p).value
        except (OSError, AttributeError):
            continue
    return None


# ---------------------------------------------------------------------- the backend


def unavailable() -> str | None:
    found = _library()
    return found if isinstance(found, str) else None


def refuses(p: Tensor, group: Mapping[str, Any]) -> str | None:
    if group["rule"] != "adam":
        return f"the CPU kernel has only the adam rule, not {group['rule']!r}"
    if p.device.type != "cpu":
        return f"the CPU kernel cannot reach a parameter on {p.device}"
    if p.dtype not in FLOATS:
        return f"the CPU kernel takes float32, bfloat16 and float16 parameters, not {p.dtype}"
    return None


def update(slots: Sequence[Slot], h: Options) -> None:
    """One step of the adam rule for every slot, in place, in one call."""
    function = _library()
    if isinstance(function, str):
        raise RuntimeError(f"the CPU kernel cannot be used: {function}")
    step(function, slots, h, torch.get_num_threads(), torch_threads())


def step(function: Callable[..., int], slots: Sequence[Slot], h: Options, threads: int, parallel: int | None) -> None:
    """`update` with everything it depends on as an argument."""
    scalars = Scalars(
        float(h.lr), h.beta1, h.beta2, h.eps, h.weight_decay, h.scale, h.residual, h.residual_in_v,
        h.second_moment == "mean_square", h.bias_correction == "whole", h.maximize, h.stochastic, h.seed & 0xFFFFFFFF,
    )  # fmt: skip
    table: list[int] = []
    lengths: dict[int, int] = {}  # columns -> block length
    for slot in slots:
        p, g, state, number, _ = slot
        m, v = state["m"], state["v"]
        coded = m.dtype == torch.uint8
        kept = (p, g, m, v, state["m_exponent"], state["v_exponent"]) if coded else (p, g, m, v)
        if not all(x.is_contiguous() for x in kept):
            _step_by_copy(function, slot, h, threads, parallel)
            continue
        columns = p.size(-1) if p.ndim else 1
        size, entries = p.numel(), m.numel()
        rows = size // columns
        B = lengths.get(columns) or lengths.setdefault(columns, block(h.level, columns))
        W = -(-columns // B)
        fits = rows * W == entries == v.numel() and size == g.numel() and m.dtype == v.dtype
        if not fits or (coded and any(x.numel() != rows * -(-W // GROUP) for x in kept[4:])):
            raise ValueError(
                f"cannot step {tuple(p.shape)} at level {h.level!r} with a gradient of {tuple(g.shape)} and moments of "
                f"{tuple(m.shape)} {m.dtype} and {tuple(v.shape)} {v.dtype}"
            )
        dtypes = FLOATS[p.dtype] | FLOATS[g.dtype] << 4 | MOMENTS[m.dtype] << 8
        places = [x.data_ptr() for x in kept]
        for run in _numbered(slot, h) if slot.part else (Run(0, rows, 0, columns, 0, W),):
            # where p, g, m, v and the exponents of this run begin
            begin = [x + run.row * (y.nbytes // rows) for x, y in zip(places, kept)] if run.row else places
            table += (
                *begin[:4], state["step"].data_ptr(), run.rows, columns, B, dtypes, *(begin[4:] or (0, 0)), number,
                run.first, run.first_moment,
            )  # fmt: skip
    tasks = array("q", table)
    address, length = tasks.buffer_info()
    if length and function(address, length // FIELDS, scalars, threads, parallel):
        raise MemoryError("the CPU kernel could not allocate its partial sums")


def _numbered(slot: Slot, h: Options) -> list[Run]:
    """Rows whose elements are numbered one after the other; all at once where nothing is rounded by number."""
    p, m = slot.p, slot.state["m"]
    C, W = (p.shape[-1], m.shape[-1]) if p.ndim else (1, 1)
    if slot.part is None or not h.stochastic or not {p.dtype, m.dtype} & {torch.bfloat16, torch.uint8}:
        return [Run(0, p.numel() // C, 0, C, 0, W)]
    if slot.part.row_length == C:
        return runs(slot, h.level)
    return [  # cut rows: each for itself
        Run(x.row + i, 1, x.first + i * x.columns, C, x.first_moment + i * x.width, W)
        for x in runs(slot, h.level)
        for i in range(x.rows)
    ]


def _step_by_copy(function: Callable[..., int], slot: Slot, h: Options, threads: int, parallel: int | None) -> None:
    """For tensors with gaps or another order of dimensions: the step on contiguous copies, one parameter at a time."""
    kept = {"p": slot.p, **slot.state}
    flat = {name: x.contiguous() for name, x in kept.items()}
    state = {name: flat[name] for name in slot.state}
    step(function, [slot._replace(p=flat["p"], g=slot.g.contiguous(), state=state)], h, threads, parallel)
    for name, x in kept.items():
        if flat[name] is not x:
            x.copy_(flat[name])
