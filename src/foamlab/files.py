"""Files: JSON and YAML of any origin read, or refused in one line that names the file; files written whole; one writer.

Everything in the lab that reads such text reads it here. Beside syntax and encoding, depth is refused: Python's parsers
raise RecursionError near its limit, and what lies just below it breaks whoever walks over the value later.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import UserError

if TYPE_CHECKING:
    from filelock import BaseFileLock

LOCK = ".lock"  # in a folder that has one writer at a time
# what a file system without locks says
UNLOCKABLE = {errno.ENOSYS, errno.EINVAL, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP}
DEEPEST = 50  # levels of nesting; a tokenizer.json, the deepest of the files read here, has about ten
LARGEST_YAML = 1_000_000  # values in a file of settings, aliases counted each time
TOO_DEEP = f"cannot read {{}}: nested over {DEEPEST} levels deep, as no program writes it"


def parse_json(text: str | bytes, where: str | Path) -> Any:
    """The value of one JSON text, in UTF-8 if it is bytes; `where` names it in the message.

    Raises:
        UserError: not UTF-8, not JSON, or nested over DEEPEST levels.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except json.JSONDecodeError as e:
        at = f"line {e.lineno}, column {e.colno}" if e.lineno > 1 else f"column {e.colno}"
        raise UserError(f"cannot read {where}: not JSON ({e.msg}, {at})") from None
    except UnicodeDecodeError as e:
        raise UserError(f"cannot read {where}: {_encoding(e)}") from None
    except RecursionError:
        raise UserError(TOO_DEEP.format(where)) from None
    except ValueError as e:  # an integer of thousands of digits
        raise UserError(f"cannot read {where}: not JSON ({e})") from None
    return shallow(value, where)


def read_json(path: Path) -> dict[str, Any]:
    """The object that a JSON file holds.

    Raises:
        UserError: as `parse_json`, and for what is no object or cannot be read.
        FileNotFoundError, NotADirectoryError: what a missing file means, the caller knows.
    """
    return _object(parse_json(_bytes(path), path), path)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; an empty file is an empty one. Raises as `read_json`."""
    value = parse_yaml(_bytes(path), path)
    return _object({} if value is None else value, path)


def parse_yaml(text: str | bytes, where: str | Path) -> Any:
    """The value of one YAML text, as `parse_json` has it of JSON; aliases must not make it too large."""
    import yaml

    try:
        value = yaml.safe_load(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except UnicodeDecodeError as e:
        raise UserError(f"cannot read {where}: {_encoding(e)}") from None
    except RecursionError:
        raise UserError(TOO_DEEP.format(where)) from None
    except (yaml.YAMLError, ValueError) as e:  # ValueError: a date that does not exist
        raise UserError(f"cannot read {where}: not YAML ({' '.join(str(e).split())})") from None
    return shallow(value, where, LARGEST_YAML)


def shallow(value: Any, where: str | Path, most: float = math.inf) -> Any:
    """The value itself, if it is nested at most DEEPEST levels and has at most that many parts; else UserError.

    YAML's aliases make of a small file one without end, or of a billion parts.
    """
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [x for x in level if isinstance(x, (dict, list))]
        if not level:
            return value
        most -= sum(map(len, level))
        if most < 0:
            raise UserError(f"cannot read {where}: its aliases make it too large; write it without them")
        level = [x for v in level for x in (v.values() if isinstance(v, dict) else v)]
    raise UserError(TOO_DEEP.format(where))


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        raise
    except (OSError, ValueError) as e:  # ValueError: a null byte in the name
        raise UserError(f"cannot read {path}: {getattr(e, 'strerror', None) or e}") from None


def _encoding(e: UnicodeDecodeError) -> str:
    return f"not in UTF-8 (byte {e.start} is {e.object[e.start]:#04x})"


def plain_name(name: Any) -> bool:
    """Whether a name from a file may be that of a file or folder: one printable part of a path, not hidden.

    >>> [plain_name(x) for x in ("foam-row", "../../evil", "/etc", "..", "", "a\\nb", 3)]
    [True, False, False, False, False, False, False]
    """
    return (
        isinstance(name, str)
        and name.isprintable()
        and 0 < len(name.encode()) <= 100
        and not name.startswith(".")
        and not set(name) & set("/\\:")
    )


def _object(value: Any, path: Path) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise UserError(f"cannot read {path}: expected an object with named values, found a {type(value).__name__}")
    return value


def lock(folder: Path) -> BaseFileLock:
    """Keep other processes from writing in a folder until the lock is released or this process ends, however it does.

    Where the file system has no locks nothing is kept out, and there is nothing to release.

    Raises:
        UserError: another process holds it, or the folder cannot be written.
    """
    from filelock import FileLock, Timeout

    held = FileLock(folder / LOCK, thread_local=False, fallback_to_soft=False)
    try:
        held.acquire(timeout=0)
    except Timeout:
        raise UserError(f"another process is writing {folder}: wait for it, or stop it, then resume") from None
    except NotImplementedError:  # flock is not there at all
        pass
    except OSError as e:
        if e.errno not in UNLOCKABLE:
            with writing(folder):
                raise
    return held


def await_release(folder: Path, patience: float = 60.0) -> None:
    """Wait until no process writes a run folder: one of a contest that was killed takes its step, saves and ends.

    Raises:
        UserError: it takes longer than `patience` seconds.
    """
    end = time.monotonic() + patience
    while True:
        try:
            lock(folder).release()
            return
        except UserError:
            if time.monotonic() > end:
                raise
            time.sleep(0.3)


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        # a file name or JSON escape may hold what is no Unicode: it is written as such an escape
        with open(part, "w", encoding="utf-8", errors="backslashreplace", newline="\n") as f:
            f.write(text)
            f.flush()
            os.fsync(f.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Turn an OSError into one line for the user."""
    try:
        yield
    except OSError as e:
        raise UserError(
            f"cannot write in {folder}: {e.strerror}; make room or choose another --out, then resume"
        ) from e


def make_folder(folder: Path) -> None:
    """Make a folder to write in, unless it is there. Raises UserError where it cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as e:
        raise UserError(f"cannot write in the folder {folder}: {e.strerror}; choose another --out") from None


def finite(x: Any) -> Any:
    """JSON knows no nan and inf: they become null."""
    if isinstance(x, Mapping):
        return {k: finite(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [finite(v) for v in x]
    return None if isinstance(x, float) and not math.isfinite(x) else x
