"""The backends: a file for each, and the table of them in `backend.py`."""

from . import cpu, eager, triton
from .backend import BACKENDS, Backend, Slot, backends, choose, planned
from .sharded import here, perform

BACKENDS.update(
    eager=Backend("eager", eager.unavailable, eager.refuses, eager.update, wrapper=eager.wrapper),
    cpu=Backend("cpu", cpu.unavailable, cpu.refuses, cpu.update),
    triton=Backend("triton", triton.unavailable, triton.refuses, triton.update),
)

__all__ = ["BACKENDS", "Backend", "Slot", "backends", "choose", "cpu", "eager", "here", "perform", "planned", "triton"]
