"""One run of a contest in a process of its own: `python -m foamlab.contest.trial`, its orders as JSON on stdin.

An ordinary run, so that its peak memory and its threads are its own; it stops itself when the contest's rule says so.
Orders: {"config": settings as in config.yaml, "resume": bool, "rule": {"step", "factor"} or null,
"parent": the process that it ends with, "data": hash of the text that all runs share}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from .. import settings
from ..errors import UserError
from ..files import write_atomically
from ..training.run import train
from .folder import STOPPED, loss_at, why_stop
from .model import Rule


def run(orders: dict[str, Any]) -> str:
    """Do the run; returns its status, "stopped" if the rule ended it."""
    config = settings.from_dict(orders["config"])
    folder = Path(config.out)
    rule = Rule(**orders["rule"]) if orders["rule"] else None

    def watch(event: dict[str, Any]) -> None:
        if event["kind"] == "start" and event["data"] != orders.get("data", event["data"]):
            raise UserError(f"{config.data.name} has changed since the contest was begun: start anew")
        if orders.get("parent") not in (None, os.getppid()):  # the contest was killed: save, so that it can go on
            signal.raise_signal(signal.SIGTERM)
        if rule and event["kind"] == "eval" and event["step"] == rule.step and (why := why_stop(folder, rule)):
            fate = {"step": rule.step, "loss": loss_at(folder, rule.step), "why": why}
            write_atomically(folder / STOPPED, json.dumps(fate) + "\n")
            signal.raise_signal(signal.SIGTERM)  # the loop ends after its next step, with all in order

    result = train(config, resume=folder if orders["resume"] else None, on_event=watch)
    return "stopped" if (folder / STOPPED).exists() else result.status


def main() -> int:
    """Exit code: 0 done or stopped by the rule; 2 what a user can fix, written to stderr; 130 interrupted."""
    try:
        return 130 if run(json.load(sys.stdin)) == "interrupted" else 0
    except UserError as e:
        sys.stderr.write(f"{' '.join(str(e).split())}\n")
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
