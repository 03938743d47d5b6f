"""The command `foamlab`: arguments in, exit code out.

Exit codes: 0 done; 1 a bug (with its traceback); 2 something the user can fix (one line); 130 interrupted.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from io import TextIOWrapper

from ..errors import UserError, known_name
from ..signals import as_interrupts, silence
from . import arguments
from .command import INTERRUPTED
from .commands import commands

GROUPS = {"run": "Train and plan", "measure": "Measure and compare", "list": "What there is"}
# of a write, not of a file that was to be opened: nobody reads, the terminal is gone, the disk or a quota is full
UNWRITTEN = (errno.EPIPE, errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    args = list(sys.argv[1:] if argv is None else argv)
    sys.stdout, sys.stderr = (s or open(os.devnull, "w") for s in (sys.stdout, sys.stderr))  # noqa: SIM115, `>&-`
    if isinstance(sys.stdout, TextIOWrapper):  # what the terminal's encoding lacks is escaped, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with as_interrupts():
            code = _answer(args)
            sys.stdout.flush()  # here a full disk is still an error that can be reported
            return code
    except UserError as e:
        return _fail(" ".join(str(e).split()))
    except ModuleNotFoundError as e:
        if (e.name or "foamlab").startswith(("foamlab", "torchfoam")):
            raise
        return _fail(f"{e.name} is not installed: pip install 'torchfoam[lab]'")
    except KeyboardInterrupt:
        with suppress(OSError):  # the terminal may be gone
            print("foamlab: interrupted", file=sys.stderr)
        return INTERRUPTED
    except OSError as e:
        if e.filename is not None or e.errno not in UNWRITTEN:
            raise
        silence(sys.stdout)  # else what is left to write fails again at exit
        return 0 if e.errno == errno.EPIPE else _fail(f"cannot write the output: {e.strerror}")  # `| head`


def _answer(args: list[str]) -> int:
    """What a command line asks for; the exit code."""
    if not args or args[0] in ("-h", "--help", "help"):
        print(_help())
        return 0 if args else 2
    if args[0] == "--version":
        from importlib.metadata import version

        print(version("torchfoam"))
        return 0
    answer = arguments.call(commands()[known_name(args[0], commands(), "command")], args[1:])
    if isinstance(answer, str):
        print(answer.removesuffix("\n"))
        return 0
    return answer or 0


def _fail(message: str) -> int:
    with suppress(OSError):
        print(f"foamlab: error: {message}", file=sys.stderr)
    return 2


def _help() -> str:
    lines = [
        "usage: foamlab COMMAND ...",
        "",
        "Train language models with FOAM and other optimizers, and compare them.",
    ]
    for group, title in GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<12}{command.help}" for name, command in commands().items() if command.group == group]
    return "\n".join(
        [*lines, "", "`foamlab COMMAND --help` explains each, with examples. To begin: foamlab train demo"]
    )
