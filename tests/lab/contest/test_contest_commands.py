"""`compare` and `ablate` on the command line."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from foamlab.cli import main
from foamlab.cli.contest_commands import grids
from foamlab.config import RunConfig
from foamlab.contest import folder as ledger
from foamlab.contest import runner
from foamlab.errors import UserError

# ---------------------------------------------------------------------------------------------- settings


def test_grids() -> None:
    assert grids("1e-3,3e-3", "lr") == {"": [1e-3, 3e-3]}
    assert grids("adamw=1e-3, 3e-3; sgd=0.1", "lr") == {"adamw": [1e-3, 3e-3], "sgd": [0.1]}
    with pytest.raises(UserError, match=r"--lr takes numbers.*'fast'"):
        grids("fast", "lr")


def test_the_command(
    config: RunConfig,
    tmp_path: Path,
    here: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings = runner.to_dict(config)
    settings.pop("out")
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(settings))
    words = ["compare", "my.yaml", "--optimizers", "foam,adamw", "--lr", "1e-3", "--seeds", "0,1", "--out", "c"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "95% interval" in said and "What can be said" in said and "n = 2" in said and "wrote c/contest.json" in said
    assert main(words) == 2
    assert "--resume c" in capsys.readouterr().err
    assert main(["compare", "--resume", "c", "--train.steps", "7"]) == 2
    assert "was begun with train.steps 6, not 7" in capsys.readouterr().err
    assert main(["compare", "--resume", "c", "--margin", "0.1"]) == 2
    assert "begun with another --margin" in capsys.readouterr().err
    same = ["compare", "--resume", "c", "--optimizers", "foam,adamw", "--lr", "1e-3", "--seeds", "0,1"]
    assert main([*same, "--hopeless", "2"]) == 2  # as 0.2 called it
    assert "begun with another --stop_factor or --stop_at" in capsys.readouterr().err
    assert main(["compare", "--resume", "c"]) == 0
    assert main(same) == 0
    assert main(["ablate", "my.yaml", "--studies", "residual,direction", "--seeds", "0", "--out", "a"]) == 0
    said = capsys.readouterr().out
    assert "direction-columns" in said and "n = 1" in said
    kept = ledger.read(Path("a"))
    assert set(kept["studies"]) == {"residual", "direction"} and len(kept["results"]) == 3
    assert main(["report", *map(str, Path("c").glob("*/*")), "--out", "r.html"]) == 0


@pytest.mark.parametrize("seeds", ["inf", "nan", "-1", "0.5", "1e30"])
def test_seeds_that_are_none(seeds: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "--optimizers", "foam,adamw", "--seeds", seeds]) == 2
    assert "--seeds takes whole numbers" in capsys.readouterr().err
    assert main(["compare", "--optimizers", "foam, adamw", "--finalists=-1"]) == 2
    assert "--finalists is a number" in capsys.readouterr().err
    assert main(["ablate", "--jobs=-1"]) == 2
    assert "--jobs is a number" in capsys.readouterr().err
