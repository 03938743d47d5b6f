"""Fine-tuning, end to end: every architecture from its folder to a checkpoint, and what is chosen, told and refused."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small
import torch
from labelled import FILES, KINDS, config, sentences, write
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from foamlab.cli.main import main
from foamlab.config import ModelConfig, TaskConfig
from foamlab.errors import UserError
from foamlab.models import Head
from foamlab.models import build as build_model
from foamlab.runs.record import read_run
from foamlab.studies import plan_check
from foamlab.tasks.examples import prepare
from foamlab.training import checkpoint
from foamlab.training.preview import preview
from foamlab.training.run import train
from tolerances import exact


def stop_at(step: int) -> Any:
    def on_event(event: dict[str, Any]) -> None:
        if event["kind"] == "train" and event["step"] == step:
            os.kill(os.getpid(), signal.SIGINT)

    return on_event


def predicted(folder: Path) -> list[str]:
    lines = folder.joinpath("predictions.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction" and [line.split("\t")[0] for line in lines[1:]] == [
        *map(str, range(len(lines) - 1))
    ]
    return [line.split("\t")[1] for line in lines[1:]]


# ---------------------------------------------------------------------------------------------- every architecture


@pytest.mark.parametrize("kind", KINDS)
def test_from_folder_to_checkpoint_and_bit_exact_resume(home: Path, tmp_path: Path, kind: str) -> None:
    whole = train(config(home, tmp_path / "whole", kind))
    assert train(config(home, tmp_path / "parts", kind), on_event=stop_at(4)).status == "interrupted"
    parts = train(config(home, tmp_path / "parts", kind), resume=tmp_path / "parts")
    assert small.metrics(tmp_path / "whole") == small.metrics(tmp_path / "parts")
    a, b = (checkpoint.found(tmp_path / name)[-1] for name in ("whole", "parts"))
    for name, x in load_file(a / "model.safetensors").items():
        exact(x, load_file(b / "model.safetensors")[name], name)
    one, two = whole.tested, parts.tested
    assert {**one["best"], "checkpoint": ""} == {**two["best"], "checkpoint": ""} and one["test"] == two["test"]
    # what comes out: transformers reads it, its predictions are ours, the tokenizer's files are the model's own
    best = Path(one["best"]["checkpoint"])
    model = AutoModelForSequenceClassification.from_pretrained(best).eval()
    assert model.config.id2label == {0: "bad", 1: "good"}
    own = AutoTokenizer.from_pretrained(best)
    said = []
    for row in sentences(11, 2):
        ids = own(row["text"], return_tensors="pt", truncation=True, max_length=32)
        said.append(model.config.id2label[int(model(input_ids=ids["input_ids"]).logits.argmax())])
    assert predicted(tmp_path / "whole") == said
    for file in ("tokenizer.json", "tokenizer_config.json", *FILES):
        assert (best / file).read_bytes() == (home / kind / file).read_bytes(), file


@pytest.mark.parametrize("kind", KINDS)
def test_padding_changes_no_prediction(home: Path, kind: str) -> None:
    c = config(home, Path(), kind)
    rows = prepare(c)
    model = build_model(c.model, rows.vocab_size, 32, seed=0, head=rows.head).eval()
    inputs, _ = rows.batch("validation", 0, 13)
    assert inputs["attention_mask"].min() == 0 and len({*inputs["attention_mask"].sum(1)}) > 2
    together = model(**{name: torch.from_numpy(x) for name, x in inputs.items()}).logits
    for k, ids in enumerate(rows.ids["validation"]):
        alone = model(input_ids=torch.from_numpy(ids.astype(np.int64))[None]).logits
        assert torch.allclose(together[k], alone[0], rtol=0, atol=1e-5), f"row {k}"


def test_a_head_is_a_function_of_the_seed(home: Path) -> None:
    def heads(seed: int) -> torch.Tensor:
        torch.manual_seed(7)
        drawn: Any = build_model(ModelConfig(str(home / "bert")), None, 32, seed=seed, head=Head(("a", "b", "c")))
        exact(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(7)), "the global generator is left")
        weight: torch.Tensor = drawn.classifier.weight
        return weight.detach()

    exact(heads(1), heads(1), "one seed")
    assert not torch.equal(heads(1), heads(2))


# ---------------------------------------------------------------------------------------------- what is learnt and told


def test_it_learns_and_the_best_checkpoint_is_told_once(home: Path, tmp_path: Path) -> None:
    result = train(config(home, tmp_path / "run", steps=40, batch=8, eval_every=4, checkpoint_every=0, keep=1))
    evals = read_run(tmp_path / "run").lines("eval")
    values = [line["values"]["accuracy"] for line in evals]
    best = result.tested["best"]
    assert best["accuracy"] == max(values) > 0.9 and best["step"] == evals[int(np.argmax(values))]["step"]
    kept = [path.name for path in checkpoint.found(tmp_path / "run")]
    assert {*kept} == {f"step-{best['step']:08d}", "step-00000040"}
    right = [a == row["label"] for a, row in zip(predicted(tmp_path / "run"), sentences(11, 2))]
    assert result.tested["test"]["accuracy"] == pytest.approx(np.mean(right))
    assert result.perplexity is None and read_run(tmp_path / "run").info["result"]["tested"] == result.tested
    assert sum("values" in line for line in evals) == len(evals)


def test_the_best_is_by_the_metric_asked_for(home: Path, tmp_path: Path) -> None:
    result = train(config(home, tmp_path / "run", steps=12, eval_every=2, metric="loss", lr=0.05))
    losses = {line["step"]: line["loss"] for line in read_run(tmp_path / "run").lines("eval")}
    assert result.tested["best"]["step"] == min(losses, key=lambda step: losses[step])
    with pytest.raises(UserError, match=r"task.metric is 'f2', classify is judged by: loss, accuracy, macro_f1"):
        train(config(home, tmp_path / "no", metric="f2"))


def test_micro_batches_and_the_order_of_rows(home: Path, tmp_path: Path) -> None:
    """Dropout off: a batch in pieces is the batch; each epoch sees every row once."""
    c = config(home, tmp_path, "llama")
    rows = prepare(c)
    seen = [rows.batch("train", step, 4)[0]["input_ids"] for step in range(12)]
    found = sorted(tuple(int(i) for i in row if i != rows.pad_id) for x in seen for row in x)
    assert found == sorted(tuple(map(int, ids)) for ids in rows.ids["train"])
    halves = [rows.batch("train", 3, 4, rank, 2)[1] for rank in range(2)]
    assert np.concatenate(halves).tolist() == rows.batch("train", 3, 4)[1].tolist()
    one = train(config(home, tmp_path / "one", "llama", steps=3))
    two = train(config(home, tmp_path / "two", "llama", steps=3, micro_batch=1))
    assert one.loss == pytest.approx(two.loss, rel=1e-5) and one.tokens == two.tokens


def test_epochs_set_the_steps_and_a_run_of_epochs_resumes(home: Path, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"epochs": 0.5, "steps": 400, "eval_every": 0}
    train(config(home, tmp_path / "whole", **changes))
    train(config(home, tmp_path / "parts", **changes), on_event=stop_at(2))
    notes: list[str] = []
    again = config(home, tmp_path / "parts", **changes)
    train(
        again, resume=tmp_path / "parts", on_event=lambda e: notes.append(e["message"]) if e["kind"] == "note" else None
    )
    assert not notes and small.metrics(tmp_path / "whole") == small.metrics(tmp_path / "parts")
    assert read_run(tmp_path / "whole").lines("train")[-1]["step"] == 6  # 0.5 * 48 / 4


def test_pairs_and_numbers(home: Path, tmp_path: Path) -> None:
    pairs = [{"premise": r["text"], "hypothesis": "the film", "label": i % 3} for i, r in enumerate(sentences(30))]
    write(tmp_path / "pairs.jsonl", pairs)
    shared: dict[str, Any] = {"name": str(tmp_path / "pairs.jsonl"), "validation": "", "test": ""}
    run = config(home, tmp_path / "p", task="pairs")
    run.data.name, run.data.validation, run.task = shared["name"], 0.3, TaskConfig("pairs")
    rows = prepare(run)
    assert rows.labels == ("0", "1", "2") and rows.rows("train") + rows.rows("validation") == 30
    inputs, _ = rows.batch("train", 0, 4)
    assert {*inputs["token_type_ids"].flatten()} == {0, 1}
    assert (inputs["input_ids"] == 2).sum(1).tolist() == [2] * 4  # [SEP] twice
    assert train(run).status == "done"
    scores = [{"text": r["text"], "score": len(r["text"]) / 10} for r in sentences(40)]
    write(tmp_path / "scores.jsonl", scores)
    run = config(home, tmp_path / "r", task="regress", steps=60, eval_every=10, lr=1e-2, batch=8)
    run.data.name = str(tmp_path / "scores.jsonl")
    run.task = TaskConfig("regress", validation=run.data.name, test=run.data.name)
    told = train(run).tested
    assert told["best"]["pearson"] > 0.8 and told["test"]["spearman"] > 0.8
    said = [float(x) for x in predicted(tmp_path / "r")]
    assert np.corrcoef(said, [row["score"] for row in scores])[0, 1] == pytest.approx(told["test"]["pearson"], abs=1e-3)


# ---------------------------------------------------------------------------------------------- before it runs


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_the_plan_is_what_a_step_takes(home: Path, tmp_path: Path, kind: str) -> None:
    check = plan_check.check(config(home, tmp_path, kind, batch=8), "cpu", None)
    for name in ("weights", "gradients", "state"):
        assert check.predicted[name] == check.measured[name], name
    assert check.measured["total"] == pytest.approx(check.predicted["total"], rel=0.1)


def test_a_dry_run_reads_the_rows_and_writes_nothing(home: Path, tmp_path: Path) -> None:
    text = preview(config(home, tmp_path / "no", epochs=2, sequence=6))
    assert "steps: 24" in text and "48 train, 13 validation, 11 test" in text and "labels  bad, good" in text
    assert "are longer than data.sequence 6 tokens and are cut there" in text
    assert not (tmp_path / "no").exists()


def test_the_command_line(home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--train.steps", "3", "--train.batch", "4", "--train.threads", "1", "--data.sequence", "16"]
    data = ["--data", str(home / "train.jsonl"), "--task.test", str(home / "test.jsonl"), "--data.validation", "0.2"]
    out = tmp_path / "run"
    assert main(["finetune", "classify", "--model", str(home / "bert"), *data, *flags, "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "step 3: validation loss" in shown and "accuracy 0." in shown and "perplexity" not in shown
    assert "test: loss" in shown and "predictions in predictions.tsv" in shown
    kept = (out / "config.yaml").read_text()
    assert "lr: 0.0001" in kept and "epochs: 0.0" in kept and "schedule: linear" in kept
    assert main(["finetune", "--resume", str(out)]) == 0
    assert "is finished" in capsys.readouterr().out
    assert main(["train", "--resume", str(out)]) == 0
    for words_, why in (
        (["finetune"], "takes a task first"),
        (["finetune", "clasify"], "did you mean classify"),
        (["finetune", "classify"], "takes a model"),
        (["finetune", "classify", "--model", "llama-10m", *data], "a shape without weights"),
        (["finetune", "classify", "--model", str(home / "bert"), *data, "--optimizer.name", "muon"], "--optimizer.lr"),
        (["train", "--task.label", "x"], "no task"),
        (["compare", "demo", "--task.name", "cola"], "language models only"),
    ):
        capsys.readouterr()
        assert main(words_) == 2
        assert why in capsys.readouterr().err
