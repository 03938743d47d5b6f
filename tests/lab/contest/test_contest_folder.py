"""Folders of contests: what is read, compared and refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small
from contests import small_contest

from foamlab.config import RunConfig
from foamlab.contest import folder as ledger
from foamlab.contest import runner
from foamlab.contest.folder import why_stop
from foamlab.contest.model import Rule
from foamlab.contest.page import report
from foamlab.errors import UserError

# ---------------------------------------------------------------------------------------------- words


def test_the_rule_compares_runs_of_one_arm(tmp_path: Path) -> None:
    for arm, name, loss in (("a", "x", 2.0), ("a", "y", 2.5), ("b", "z", 1.0)):
        (tmp_path / arm / name).mkdir(parents=True)
        line = json.dumps({"kind": "eval", "step": 4, "loss": loss})
        (tmp_path / arm / name / "metrics.jsonl").write_text(line + "\n")
    assert why_stop(tmp_path / "a" / "y", Rule(4, 1.2)) == "loss 2.5 at step 4 is above 1.2 times the 2 of x"
    assert not why_stop(tmp_path / "a" / "y", Rule(4, 1.3))
    assert not why_stop(tmp_path / "a" / "x", Rule(4, 1.0))
    assert not why_stop(tmp_path / "b" / "z", Rule(4, 1.0))
    assert not why_stop(tmp_path / "a" / "y", Rule(5, 1.0))


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "no contest in"),
        ("{", "cannot read"),
        ('{"format": 9}', "format 9"),
        ("[]", "list"),
        ('{"format": 1}', "lacks kind"),
        ('{"format": ' + "[" * 100_000, "cannot read .*contest.json"),
        ('{"format": 1, "studies": ' + "[" * 900 + "]" * 900 + "}", "levels deep"),
    ],
)
def test_a_folder_that_is_no_contest(tmp_path: Path, text: str | None, message: str) -> None:
    if text:
        (tmp_path / "contest.json").write_text(text)
    with pytest.raises(UserError, match=message) as e:
        ledger.read(tmp_path)
    assert "\n" not in str(e.value) and len(str(e.value)) < 400


def kept(config: RunConfig, change: Callable[[dict[str, Any]], Any] = lambda c: None) -> dict[str, Any]:
    c = {**small_contest(config).as_dict(), "status": "running", "command": "foamlab compare", "started": "now"}
    c = json.loads(json.dumps(c))
    change(c)
    return c


PATHS = ["../../evil", "/evil", "..", ".", "a/b", "a\\b", "", ".evil", "a\nb", "\x1b[2J", "x" * 300, 5, None, ["a"]]
HOSTILE: dict[str, Callable[[dict[str, Any]], Any]] = {
    **{f"label {x!r:.20}": lambda c, x=x: c["contestants"][0].update(label=x) for x in PATHS},  # type: ignore[misc]
    **{f"optimizer {x!r:.20}": lambda c, x=x: c["contestants"][0].update(optimizer=x) for x in PATHS},  # type: ignore[misc]
    "key": lambda c: c["contestants"][0]["tune"].update({"../../evil": [1.0, 2.0]}),
    "value": lambda c: c["contestants"][0]["tune"].update(level=["../../evil", "row"]),
    "values of two kinds": lambda c: c["contestants"][0]["tune"].update(level=[2, "row"]),
    "no values": lambda c: c["contestants"][0]["tune"].update(lr=[0.0, 1.0]),
    "start": lambda c: c["contestants"][0]["start"].update(lr="../../evil"),
    "another start": lambda c: c["contestants"][0]["start"].update({"../../evil": 1.0}),
    "seed": lambda c: c.update(seeds=["../../evil"]),
    "seeds": lambda c: c.update(seeds=[1, 1]),
    "no seeds": lambda c: c.update(seeds=[]),
    "study": lambda c: c.update(studies={"../../evil": {"about": "", "base": "foam", "cases": []}}),
    "cases": lambda c: c.update(studies={"rho": {"about": "", "base": "foam", "cases": [5]}}),
    "rule": lambda c: c.update(rule={"step": "../../evil", "factor": 1.2}),
    "margin": lambda c: c.update(margin="wide"),
    "negative margin": lambda c: c.update(margin=-1),
    "contestants": lambda c: c.update(contestants=[5]),
    "twins": lambda c: c.update(contestants=c["contestants"][:1] * 2),
    "settings": lambda c: c["settings"].pop("optimizer"),
    "kind": lambda c: c.update(kind="../../evil"),
    "finalists": lambda c: c.update(finalists=-1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_contest_is_refused_before_anything_is_made(config: RunConfig, tmp_path: Path, case: str) -> None:
    """Whatever of contest.json becomes a folder, a file or a figure: one line, and nothing in or out of the folder."""
    folder = tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    (tmp_path / "a" / "evil").mkdir()
    (folder / "contest.json").write_text(json.dumps(kept(config)))
    ledger.read(folder)
    (folder / "contest.json").write_text(json.dumps(kept(config, HOSTILE[case])))
    before = small.tree(tmp_path)
    for use in (runner.resume, lambda folder: report([folder], tmp_path / "r", static=["svg"])):
        with pytest.raises(UserError, match=r"contest.json was not written by foamlab, or is damaged") as e:
            use(folder)
        assert "\n" not in str(e.value) and len(str(e.value)) < 400
    assert small.tree(tmp_path) == before and not [p for p in tmp_path.rglob("*evil*") if p.name != "evil"]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda c: c["contestants"][0].update(optimizer="evil"), "unknown optimizer 'evil'"),
        (lambda c: c["contestants"][0]["options"].update(evil=1), "unknown option of foam-paper 'evil'"),
        (lambda c: c["settings"]["train"].update(evil=1), "contest.json: unknown setting train.evil"),
        (lambda c: c["settings"].pop("model"), "contest.json: these are no settings of a run: they lack model"),
    ],
)
def test_a_contest_over_what_there_is_not_is_refused_before_anything_is_made(
    config: RunConfig, tmp_path: Path, change: Callable[..., Any], message: str
) -> None:
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "contest.json").write_text(json.dumps(kept(config, change)))
    before = small.tree(tmp_path)
    with pytest.raises(UserError, match=message):
        runner.resume(tmp_path / "c")
    assert small.tree(tmp_path) == before
