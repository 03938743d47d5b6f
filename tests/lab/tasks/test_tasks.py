"""The rows of tasks: GLUE's files, metrics, and what is said of rows that cannot be used."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from labelled import config, sentences, write

from foamlab.config import TaskConfig, TrainConfig
from foamlab.errors import UserError
from foamlab.tasks import predictions
from foamlab.tasks.examples import prepare
from foamlab.tasks.metrics import METRICS
from foamlab.training.run import train
from foamlab.training.step import schedule

# ---------------------------------------------------------------------------------------------- metrics


@pytest.mark.parametrize(
    "name, gold, said, value",
    [  # the values of scikit-learn's and scipy's examples, or counted by hand
        ("accuracy", [0, 1, 2, 3], [0, 2, 1, 3], 0.5),
        ("f1", [1, 1, 0, 0, 1], [1, 0, 1, 0, 1], 2 / 3),
        ("f1", [0, 0], [0, 0], 0.0),
        ("macro_f1", [0, 1, 2, 0, 1, 2], [0, 2, 1, 0, 0, 1], 4 / 15),
        ("matthews", [1, 1, 1, 0], [1, 0, 1, 1], -1 / 3),
        ("matthews", [0, 1, 2, 2], [0, 1, 2, 2], 1.0),
        ("matthews", [0, 1, 0], [1, 1, 1], 0.0),
        ("pearson", [1.0, 2, 3, 4, 5], [10.0, 9, 2.5, 6, 4], -0.7426106572325056),
        ("spearman", [1.0, 2, 3, 4, 5], [5.0, 6, 7, 8, 7], 0.8207826816681233),
        ("spearman", [1.0, 1, 2], [5.0, 5, 5], math.nan),
    ],
)
def test_metrics(name: str, gold: list[Any], said: list[Any], value: float) -> None:
    assert METRICS[name](np.array(gold), np.array(said)) == pytest.approx(value, nan_ok=True)


# ---------------------------------------------------------------------------------------------- GLUE

# each task: {file: its lines}, as GLUE's archives have them; a quote that nothing closes is text
HEADS = (
    "index\tpromptID\tpairID\tgenre\tsentence1_binary_parse\tsentence2_binary_parse\tsentence1_parse\tsentence2_parse"
)
MNLI = [
    f'{i}\tp\tq\tg\tb\tb\tp\tp\ta film\tthe "film\tlabel\t{x}'
    for i, x in enumerate(("neutral", "entailment", "contradiction"))
]
GLUE: dict[str, dict[str, list[str]]] = {
    "cola": {
        "train.tsv": ["gj04\t1\t\ta film", "gj04\t0\t*\tfilm \"a"], "dev.tsv": ["gj04\t1\t\tthe film"],
        "test.tsv": ["index\tsentence", "0\ta film", "1\tfilm the"],
    },
    "sst2": {
        "train.tsv": ["sentence\tlabel", "a fine film\t1", "a dull film \t0"],
        "dev.tsv": ["sentence\tlabel", "grim\t0"],
        "test.tsv": ["index\tsentence", "0\twarm", "1\tflat"],
    },
    "mrpc": {
        "train.tsv": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String",
                      "1\t7\t8\ta \"film\tthe film", "0\t7\t8\tfine\tgrim"],
        "dev.tsv": ["Quality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\ta\tthe"],
        "test.tsv": ["index\t#1 ID\t#2 ID\t#1 String\t#2 String", "0\t7\t8\ta\tfilm"],
    },
    "stsb": {
        "train.tsv": [
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
            "0\tg\tf\t2012\t1\ts\ts\ta film\tthe film\t5.000", "1\tg\tf\t2012\t1\ts\ts\ta film\tgrim\t0.250",
        ],
        "dev.tsv": [
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2\tscore",
            "0\tg\tf\t2012\t1\ts\ts\ta\tthe\t3.2", "1\tg\tf\t2012\t1\ts\ts\tfine\tgrim\t1.0",
        ],
        "test.tsv": [
            "index\tgenre\tfilename\tyear\told_index\tsource1\tsource2\tsentence1\tsentence2",
            "0\tg\tf\t2012\t1\ts\ts\ta\tthe",
        ],
    },
    "qqp": {
        "train.tsv": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate",
                      *(f"{i}\t1\t2\ta film\tthe film\t{i % 2}" for i in range(120)), "9\t1\t2\ta film"],
        "dev.tsv": ["id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "0\t1\t2\ta\tthe\t1"],
        "test.tsv": ["id\tquestion1\tquestion2", "0\ta\tthe"],
    },
    "mnli": {
        "train.tsv": [f"{HEADS}\tsentence1\tsentence2\tlabel1\tgold_label", *MNLI],
        "dev_matched.tsv": [f"{HEADS}\tsentence1\tsentence2\tlabel1\tgold_label", *MNLI[:2]],
        "dev_mismatched.tsv": [f"{HEADS}\tsentence1\tsentence2\tlabel1\tgold_label", *MNLI],
        "test_matched.tsv": [f"{HEADS}\tsentence1\tsentence2", "0\tp\tq\tg\tb\tb\tp\tp\ta\tthe"],
        "test_mismatched.tsv": [f"{HEADS}\tsentence1\tsentence2", "0\tp\tq\tg\tb\tb\tp\tp\ta\tthe"] ,
        "diagnostic.tsv": ["index\tsentence1\tsentence2", "0\ta\tthe", "1\tfilm\ta"],
    },
    "qnli": {
        "train.tsv": ["index\tquestion\tsentence\tlabel", "0\ta film\tthe\tentailment", "1\ta\tfine\tnot_entailment"],
        "dev.tsv": ["index\tquestion\tsentence\tlabel", "0\ta\tthe\tentailment"],
        "test.tsv": ["index\tquestion\tsentence", "0\ta\tthe"],
    },
    "rte": {
        "train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\ta\tthe\tnot_entailment", "1\ta\tfine\tentailment"],
        "dev.tsv": ["index\tsentence1\tsentence2\tlabel", "0\ta\tthe\tentailment"],
        "test.tsv": ["index\tsentence1\tsentence2", "0\ta\tthe"],
    },
    "wnli": {
        "train.tsv": ["index\tsentence1\tsentence2\tlabel", "0\ta\tthe\t1", "1\ta\tfine\t0"],
        "dev.tsv": ["index\tsentence1\tsentence2\tlabel", "0\ta\tthe\t1"],
        "test.tsv": ["index\tsentence1\tsentence2", "0\ta\tthe"],
    },
}  # fmt: skip
SUBMITTED = {
    "cola": ["CoLA.tsv"], "sst2": ["SST-2.tsv"], "mrpc": ["MRPC.tsv"], "stsb": ["STS-B.tsv"], "qqp": ["QQP.tsv"],
    "mnli": ["MNLI-m.tsv", "MNLI-mm.tsv", "AX.tsv"], "qnli": ["QNLI.tsv"], "rte": ["RTE.tsv"], "wnli": ["WNLI.tsv"],
}  # fmt: skip
JUDGED = {
    "cola": {"matthews"}, "mrpc": {"accuracy", "f1"}, "qqp": {"accuracy", "f1"}, "stsb": {"pearson", "spearman"},
}  # fmt: skip


@pytest.mark.parametrize("task", GLUE)
def test_glue_in_its_own_files(home: Path, tmp_path: Path, task: str) -> None:
    for name, lines in GLUE[task].items():
        (tmp_path / name).write_text("\n".join(lines) + "\n")
    c = config(home, tmp_path / "run", task=task, steps=1, batch=2)
    c.data.name, c.task = str(tmp_path), TaskConfig(task)  # type: ignore[arg-type]
    rows = prepare(c)
    assert rows.rows("train") == len(GLUE[task]["train.tsv"]) - (task != "cola") - (task == "qqp")
    assert {*rows.metrics("validation", np.zeros(rows.rows("validation")))} == JUDGED.get(task, {"accuracy"})
    if task == "qqp":
        assert rows.warnings == [
            f"left out of the train rows: {tmp_path / 'train.tsv'} row 121: the text 'question2' is missing"
        ]
    if task == "mnli":
        order = rows.gold["train"].tolist()
        assert rows.labels == ("entailment", "neutral", "contradiction") and order == [1, 0, 2]
    if task == "stsb":
        assert rows.gold["train"].tolist() == [5.0, 0.25]
    tested = train(c).tested
    found = [tested[split]["predictions"] for split in tested if split.startswith("test")]
    assert found == SUBMITTED[task]
    for split, name in zip([s for s in tested if s.startswith("test")], found):
        lines = (tmp_path / "run" / name).read_text().splitlines()
        assert lines[0] == "index\tprediction" and len(lines) == 1 + rows.rows(split)
        assert all(line.split("\t")[1] in rows.labels or task == "stsb" for line in lines[1:])
    assert ("validation_mismatched" in tested) == (task == "mnli")


def test_predictions_stand_in_the_order_of_the_file(home: Path, tmp_path: Path) -> None:
    rows = prepare(config(home, tmp_path))
    said = rows.gold["test"].astype(float)
    lines = predictions.write(tmp_path, rows, "test", said).read_text().splitlines()[1:]
    assert [line.split("\t")[1] for line in lines] == [row["label"] for row in sentences(11, 2)]


# ---------------------------------------------------------------------------------------------- rows and files


@pytest.mark.parametrize("kind", [".csv", ".tsv", ".json", ".jsonl.gz"])
def test_every_kind_of_table_gives_the_same_rows(home: Path, tmp_path: Path, kind: str) -> None:
    import csv
    import gzip

    rows, path = (
        [{"text": r["text"], "label": 1.0 * (r["label"] == "good")} for r in sentences(48)],
        tmp_path / f"x{kind}",
    )
    if kind == ".json":
        path.write_text(json.dumps(rows))
    elif kind == ".jsonl.gz":
        path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    else:
        with path.open("w", newline="") as file:
            writer = csv.writer(file, delimiter="\t" if kind == ".tsv" else ",")
            writer.writerows([("label", "text"), *((str(int(r["label"])), r["text"]) for r in rows)])
    c = config(home, tmp_path)
    c.data.name, c.task = str(path), TaskConfig("classify")
    c.data.validation = 0.3
    plain = config(home, tmp_path)
    plain.task, plain.data.validation = TaskConfig("classify"), 0.3
    a, b = prepare(c), prepare(plain)
    assert [x.tolist() for x in a.ids["train"]] == [x.tolist() for x in b.ids["train"]]
    assert (
        a.gold["train"].tolist() == b.gold["train"].tolist() and a.labels == ("0", "1") and b.labels == ("bad", "good")
    )


def test_a_folder_brings_its_own_splits(home: Path, tmp_path: Path) -> None:
    for ours, name in (("train", "train"), ("dev", "dev"), ("test", "test")):
        shutil.copy(home / f"{ours}.jsonl", tmp_path / f"{name}.jsonl")
    c = config(home, tmp_path)
    c.data.name, c.task = str(tmp_path), TaskConfig("classify")
    rows = prepare(c)
    assert {split: rows.rows(split) for split in rows.splits} == {"train": 48, "validation": 13, "test": 11}


FINE = {"text": "a fine film", "label": "good"}


@pytest.mark.parametrize(
    "rows, changes, why",
    [
        ([{"txt": "a", "label": 1}] * 3, {}, r"no columns text in .*train.jsonl; it has: txt, label: .*--task.columns"),
        ([FINE] * 3, {"columns": "body"}, "no columns body in"),
        ([FINE] * 3, {"columns": "text,label"}, "classify takes 1 text"),
        ([FINE] * 3, {"label": "stars"}, "no column 'stars' in .*it has: text, label"),
        ([FINE, {"text": "", "label": "bad"}], {}, "row 2: the text 'text' is empty: .*--data.lost"),
        ([FINE, {"text": None, "label": "bad"}] * 2, {}, "row 2: the text 'text' is empty, as 1 more rows"),
        ([FINE, {"text": ["a"], "label": "bad"}], {}, r"row 2: the text 'text' is \['a'\]"),
        ([FINE, {"text": "a film", "label": ""}], {}, "row 2: the label 'label' is missing"),
        ([{"text": "a film"}] * 2, {}, "row 1 has no label: name its column with --task.label; it has: text"),
        (
            [FINE, {"text": "a film", "label": "odd"}],
            {"labels": "good,bad"},
            "row 2: unknown label 'odd'; the labels are",
        ),
        ([FINE] * 4, {}, "at least two labels apart; these rows have good"),
        ([FINE, {"text": "a", "label": "odd"}], {"validation": "dev.jsonl"}, "dev.jsonl row 1: unknown label 'bad'"),
        ([], {}, "train.jsonl has no rows"),
        ([{"text": "a", "label": "x"}] * 3, {"name": "regress"}, "row 1: the label 'label' is 'x', not a number"),
        ([FINE] * 3, {"name": "cola"}, "cola reads GLUE's own files: give their folder"),
        ([FINE] * 3, {"test": "nowhere.csv"}, "no such file: .*nowhere.csv"),
        ([FINE] * 3, {"test": "notes.txt"}, "notes.txt is no table"),
    ],
)
def test_bad_rows_are_told_by_file_and_row(home: Path, tmp_path: Path, rows: Any, changes: Any, why: str) -> None:
    write(tmp_path / "train.jsonl", rows)
    shutil.copy(home / "dev.jsonl", tmp_path / "dev.jsonl")
    (tmp_path / "notes.txt").write_text("no table")
    c = config(home, tmp_path / "run")
    held = str(home / "dev.jsonl") if "labels" in changes or len(rows) == 4 else ""
    c.data.name, c.task = str(tmp_path / "train.jsonl"), TaskConfig("classify", validation=held)
    for key, value in changes.items():
        setattr(c.task, key, str(tmp_path / value) if key in ("validation", "test") else value)
    with pytest.raises(UserError, match=why) as raised:
        train(c)
    assert "\n" not in str(raised.value) and not (tmp_path / "run").exists()


def test_a_broken_file_is_told_by_its_row(home: Path, tmp_path: Path) -> None:
    c = config(home, tmp_path / "run")
    c.task = TaskConfig("classify")
    for name, text, why in (
        ("a.jsonl", '{"text": "a", "label": 1}\n{"text": \n', "after row 1: line 2 is not JSON"),
        ("a.jsonl", '{"text": "a", "label": 1}\n"b"\n', "row 2 is no object with columns: 'b'"),
        ("a.csv", "text,label\na,1\nb, c,0\n", "row 2: with more cells than the 2 columns"),
    ):
        (tmp_path / name).write_text(text)
        c.data.name = str(tmp_path / name)
        with pytest.raises(UserError, match=why):
            prepare(c)


def test_few_bad_rows_are_left_out_and_said_but_none_of_a_test(home: Path, tmp_path: Path) -> None:
    write(tmp_path / "train.jsonl", [*sentences(200), {"text": " ", "label": "good"}])
    write(tmp_path / "test.jsonl", [{"text": "a film"}, {"text": ""}])
    c = config(home, tmp_path)
    c.data.name, c.task.test = str(tmp_path / "train.jsonl"), str(tmp_path / "test.jsonl")
    rows = prepare(c)
    assert rows.rows("train") == 200 and "row 201: the text 'text' is empty" in rows.warnings[0]
    assert rows.rows("test") == 2 and not rows.labelled("test")


def test_models_that_cannot_be_fine_tuned_are_refused(home: Path, tmp_path: Path) -> None:
    def refused(why: str, **about: Any) -> None:
        shutil.copytree(home / "bert", tmp_path / "model", dirs_exist_ok=True)
        kept = json.loads((tmp_path / "model" / "config.json").read_text())
        (tmp_path / "model" / "config.json").write_text(json.dumps({**kept, **about}))
        c = config(home, tmp_path / "run")
        c.model.name = str(tmp_path / "model")
        with pytest.raises(UserError, match=why):
            train(c)
        assert not (tmp_path / "run").exists()
        shutil.rmtree(tmp_path / "model")

    refused("quantized weights .gptq.", quantization_config={"quant_method": "gptq", "bits": 4})
    refused("the tokenizer has 14 tokens", vocab_size=9)
    refused("has 8 positions: data.sequence must be at most that, got 32", max_position_embeddings=8)
    head = {"id2label": {"0": "x", "1": "y", "2": "z"}, "architectures": ["BertForSequenceClassification"]}
    refused("has a head of 3 labels .x, y, z., the rows have 2", **head)
    refused("lacks .* weights of its model, the first is bert.encoder.layer.2", num_hidden_layers=3)
    c = config(home, tmp_path / "run", "roberta", sequence=39)
    with pytest.raises(UserError, match="has 38 positions"):  # two of the table's 40 are not used
        train(c)


def test_a_head_that_comes_along_is_kept(home: Path, tmp_path: Path) -> None:
    best = train(config(home, tmp_path / "one", steps=2)).tested["best"]["checkpoint"]
    c = config(home, tmp_path / "two", steps=0)
    c.model.name = best
    again = train(c)
    assert again.loss == pytest.approx(
        json.loads((tmp_path / "one" / "metrics.jsonl").read_text().splitlines()[-1])["loss"], rel=1e-5
    )


@pytest.mark.parametrize(
    "name, values",
    [
        ("linear", [0.5, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125, 0.0]),
        ("constant", [0.5, *[1.0] * 9]),
        ("wsd", [0.5, *[1.0] * 7, 0.625, 0.0]),
    ],
)
def test_schedules(name: str, values: list[float]) -> None:
    t = TrainConfig(steps=10, warmup=0.2, final=0.0, schedule=name)  # type: ignore[arg-type]
    assert [schedule(step, t) for step in range(10)] == pytest.approx(values)
