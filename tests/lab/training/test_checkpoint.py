"""Checkpoints: whole or not there; damage of any kind is named, and touches nothing."""

from __future__ import annotations

import errno
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import small
import torch

from foamlab.errors import UserError
from foamlab.training import checkpoint
from tolerances import exact

FILES = ("model.safetensors", "training.pt", "config.json", "tokenizer.json", "manifest.json")


class Letters:
    """A tokenizer as far as a checkpoint is concerned."""

    def save(self, folder: Path) -> None:
        (folder / "tokenizer.json").write_text('{"letters": true}')


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    home = small.prepare(tmp_path_factory.mktemp("home"))
    return AutoModelForCausalLM.from_pretrained(home / "gpt2")


def write(run: Path, model: Any, *steps: int, keep: int = 9) -> Path:
    run.mkdir(exist_ok=True)
    for step in steps:
        path = checkpoint.save(run, step, model, Letters(), {"step": step, "x": torch.arange(999.0) + step}, keep)
    return path


def test_saved_and_loaded_is_the_same(tmp_path: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    path = write(tmp_path / "run", model, 7)
    assert path == tmp_path / "run" / "checkpoints" / "step-00000007" and set(FILES) <= {p.name for p in path.iterdir()}
    assert not checkpoint.damage(path)
    saved = checkpoint.load(path)
    assert saved["step"] == 7
    exact(saved["x"], torch.arange(999.0) + 7)
    other = type(model)(model.config)
    checkpoint.load_weights(path, other)
    hub = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    for (name, x), y, z in zip(model.state_dict().items(), other.state_dict().values(), hub.state_dict().values()):
        exact(x, y, name)
        exact(x, z, name)
    assert other.lm_head.weight is other.transformer.wte.weight


def test_bfloat16_stays(tmp_path: Path, model: Any) -> None:
    from transformers import AutoModelForCausalLM

    narrow = type(model)(model.config).to(torch.bfloat16)
    hub = AutoModelForCausalLM.from_pretrained(write(tmp_path / "run", narrow, 1), dtype="auto")
    exact(hub.lm_head.weight, narrow.lm_head.weight)


def test_the_last_ones_are_kept(tmp_path: Path, model: Any) -> None:
    run = tmp_path / "run"
    write(run, model, 1, 2)
    remains = run / "checkpoints" / ".part-00000003-99999"  # of a killed save
    remains.mkdir()
    write(run, model, 3, keep=2)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert checkpoint.find(run)[1].name == "step-00000003"
    assert checkpoint.find(run / "checkpoints" / "step-00000002") == (run, run / "checkpoints" / "step-00000002")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("where", [0, 0.3, 0.99, "changed", "missing"])
def test_damage_is_named_and_the_one_before_offered(tmp_path: Path, model: Any, name: str, where: Any) -> None:
    run = tmp_path / "run"
    path = write(run, model, 1, 2)
    file = path / name
    content = bytearray(file.read_bytes())
    if where == "missing":
        file.unlink()
    elif where == "changed":
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    else:
        file.write_bytes(content[: int(len(content) * where)])
    before = small.tree(run)
    with pytest.raises(UserError) as error:
        checkpoint.load(path)
    assert name in str(error.value) and str(run / "checkpoints" / "step-00000001") in str(error.value), error.value
    assert "\n" not in str(error.value) and small.tree(run) == before


def test_without_another_complete_one_none_is_offered(tmp_path: Path, model: Any) -> None:
    path = write(tmp_path / "run", model, 1)
    (path / "training.pt").write_bytes(b"")
    with pytest.raises(UserError, match="no other complete one"):
        checkpoint.load(path)


def test_a_foreign_folder_is_no_checkpoint(tmp_path: Path, model: Any) -> None:
    with pytest.raises(UserError, match="nothing to resume"):
        checkpoint.find(tmp_path / "absent")
    with pytest.raises(UserError, match="holds no checkpoint"):
        checkpoint.find(tmp_path)
    foreign = tmp_path / "checkpoints" / "step-00000001"
    model.save_pretrained(foreign)
    with pytest.raises(UserError, match=r"manifest\.json is missing"):
        checkpoint.load(checkpoint.find(tmp_path)[1])


def test_another_format_is_refused(tmp_path: Path, model: Any) -> None:
    path = write(tmp_path / "run", model, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, "format": 99}))
    with pytest.raises(UserError, match="format 99"):
        checkpoint.load(path)


@pytest.mark.parametrize("name", ["/dev/zero", "../../config.yaml", ".", ""])
def test_a_manifest_names_no_file_elsewhere(tmp_path: Path, model: Any, name: str) -> None:
    """/dev/zero has 0 bytes to the eye and no end."""
    path = write(tmp_path / "run", model, 1)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = {"bytes": 0, "sha256": "0"}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"manifest\.json is damaged \(it names .*, which is no file of a checkpoint"):
        checkpoint.load(path)


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Bomb:
        def __reduce__(self) -> Any:
            return (Path.touch, (tmp_path / "exploded",))

    monkeypatch.setattr(torch, "save", lambda x, path: path.write_bytes(pickle.dumps(Bomb(), 2)))
    with pytest.raises(UserError, match=r"cannot read .*training\.pt"):
        checkpoint.load(write(tmp_path / "run", model, 1))
    assert not (tmp_path / "exploded").exists()


def test_another_model_is_refused(tmp_path: Path, model: Any) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    wider = GPT2LMHeadModel(GPT2Config(vocab_size=258, n_embd=14, n_layer=1, n_head=2, n_positions=32))
    with pytest.raises(UserError, match="does not fit this model"):
        checkpoint.load_weights(write(tmp_path / "run", model, 1), wider)


@pytest.mark.parametrize("at", ["weights", "training"])
def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    run = tmp_path / "run"
    path = write(run, model, 1)
    before = small.tree(run)

    def full(*args: Any, **more: Any) -> None:
        next((run / "checkpoints").glob(".part-*")).joinpath("half").write_bytes(b"half")
        if at == "weights":  # as safetensors words it
            raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")
        raise OSError(errno.ENOSPC, "No space left on device")

    owner, name = (type(model), "save_pretrained") if at == "weights" else (torch, "save")
    monkeypatch.setattr(owner, name, full)
    with pytest.raises(
        UserError, match=r"cannot save .*step-00000002: the disk is full .* make room; then resume from .*step-00000001"
    ):
        write(run, model, 2, keep=1)
    assert small.tree(run) == before and checkpoint.find(run)[1] == path


def test_a_full_disk_that_torch_does_not_name_is_told_by_what_is_left(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any) -> None:
        usage = checkpoint.shutil.disk_usage(tmp_path)
        monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: usage._replace(free=100))
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 3840 vs 3798")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="the disk is full"):
        write(tmp_path / "run", model, 1)


def test_a_save_that_fails_otherwise_says_why(tmp_path: Path, model: Any) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checkpoints").write_text("in the way")
    with pytest.raises(UserError, match="cannot save"):
        write(tmp_path / "run", model, 1)


def test_a_folder_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="is a file"):
        checkpoint.check_room(tmp_path / "file" / "run", 0)
    monkeypatch.setattr(checkpoint.os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match="no permission"):
        checkpoint.check_room(tmp_path / "run", 0)


def test_storable_is_what_torch_reads_back_safely(tmp_path: Path) -> None:
    good: dict[Any, Any] = {"a": [1, 2.0, None, True, "x", torch.ones(2)], 3: (torch.float32, {})}
    assert checkpoint.storable(good)
    torch.save(good, tmp_path / "good.pt")
    torch.load(tmp_path / "good.pt", weights_only=True)
    assert not any(map(checkpoint.storable, (Path(), {"a": [object()]}, lambda: 0)))
