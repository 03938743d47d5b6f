"""The tasks: what their rows hold, and how they are judged. GLUE's nine have its files, labels and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TEXTS = ("text", "sentence", "content", "review", "question", "title")
PAIRS = (
    ("text1", "text2"), ("sentence1", "sentence2"), ("premise", "hypothesis"), ("question1", "question2"),
    ("question", "sentence"), ("text_a", "text_b"), ("query", "passage"),
)  # fmt: skip
LABELS = ("label", "labels", "score", "class", "target", "gold_label", "category", "rating")


FILES = {"train": "train.tsv", "validation": "dev.tsv", "test": "test.tsv"}


@dataclass(frozen=True)
class Glue:
    """A task's files as GLUE gives them: tab-separated, never quoted.

    Args:
        texts: the text columns.
        label: the label's column.
        files: split -> file.
        submission: test split -> the file that GLUE takes.
        bare: the columns of training and validation files, where those have no header.
    """

    texts: tuple[str, ...]
    label: str
    files: Mapping[str, str]
    submission: Mapping[str, str]
    bare: tuple[str, ...]


@dataclass(frozen=True)
class Task:
    """A task.

    Args:
        texts: how many texts a row has; 0 means one or two.
        metrics: what is told of predictions.
        best: of these, whose mean chooses the best checkpoint.
        regress: a row's label is a number.
        labels: in the order of the head, where the task says so.
        glue: its files, of a task of GLUE.
    """

    texts: int
    metrics: tuple[str, ...]
    best: tuple[str, ...]
    regress: bool = False
    labels: tuple[str, ...] = ()
    glue: Glue | None = None


def _glue(
    name: str, texts: tuple[str, ...], labels: str, *metrics: str,
    label: str = "label", files: Mapping[str, str] = FILES, submission: Mapping[str, str] | None = None,
    bare: tuple[str, ...] = (),
) -> Task:  # fmt: skip
    """A task of GLUE: judged by the mean of its metrics, a regression where it has no labels."""
    glue = Glue(texts, label, files, submission or {"test": f"{name}.tsv"}, bare)
    return Task(len(texts), metrics, metrics, not labels, tuple(labels.split()), glue)


MNLI = {
    "train": "train.tsv", "validation": "dev_matched.tsv", "validation_mismatched": "dev_mismatched.tsv",
    "test": "test_matched.tsv", "test_mismatched": "test_mismatched.tsv", "test_ax": "diagnostic.tsv",
}  # fmt: skip
SENT = {"test": "MNLI-m.tsv", "test_mismatched": "MNLI-mm.tsv", "test_ax": "AX.tsv"}
COLA = ("source", "label", "mark", "sentence")
BOTH = ("sentence1", "sentence2")
ASKED = ("question1", "question2")
TWO = "entailment not_entailment"

TASKS: dict[str, Task] = {
    "classify": Task(1, ("accuracy", "macro_f1"), ("accuracy",)),
    "pairs": Task(2, ("accuracy", "macro_f1"), ("accuracy",)),
    "regress": Task(0, ("pearson", "spearman"), ("pearson", "spearman"), regress=True),
    "cola": _glue("CoLA", ("sentence",), "0 1", "matthews", bare=COLA),
    "sst2": _glue("SST-2", ("sentence",), "0 1", "accuracy"),
    "mrpc": _glue("MRPC", ("#1 String", "#2 String"), "0 1", "accuracy", "f1", label="Quality"),
    "stsb": _glue("STS-B", BOTH, "", "pearson", "spearman", label="score"),
    "qqp": _glue("QQP", ASKED, "0 1", "accuracy", "f1", label="is_duplicate"),
    "mnli": _glue("MNLI", BOTH, "entailment neutral contradiction", "accuracy",
                  label="gold_label", files=MNLI, submission=SENT),
    "qnli": _glue("QNLI", ("question", "sentence"), TWO, "accuracy"),
    "rte": _glue("RTE", BOTH, TWO, "accuracy"),
    "wnli": _glue("WNLI", BOTH, "0 1", "accuracy"),
}  # fmt: skip
