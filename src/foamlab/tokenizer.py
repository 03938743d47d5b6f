"""From text to token ids: bytes, a byte-level BPE trained on the spot, or a tokenizer that the user brings.

One wrapper for the three, with what training needs to know: the end-of-document and padding ids and the size of the
embedding. Text is never taken for a special token: "<|eos|>" inside a document is seven characters like any others.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from .config import UserError

EOS, PAD = "<|eos|>", "<|pad|>"
KNOWN_EOS = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
KNOWN_PAD = (PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
LARGEST = 2**32  # token files hold at most 32 bits an id
LARGEST_BPE = 2**20  # a trainer sets aside some 70 bytes for each, and ends the process where it cannot
FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")


class Tokenizer:
    """A `tokenizers.Tokenizer` (`backend`) and the names of its two special tokens.

    Attributes:
        vocab_size: largest id + 1: rows that an embedding needs.
        eos_id: ends every document.
        pad_id: fills short rows ("paper" mode); the same as `eos_id` if the tokenizer has no padding token.
    """

    def __init__(self, backend: tokenizers.Tokenizer, eos: str, pad: str) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # in the text they are text
        ids = backend.get_vocab(with_added_tokens=True)
        self.backend, self.eos, self.pad = backend, eos, pad
        self.eos_id, self.pad_id, self.vocab_size = ids[eos], ids[pad], max(ids.values()) + 1
        if self.vocab_size > LARGEST:
            raise UserError(f"the tokenizer's largest id is {self.vocab_size - 1}; token files hold ids below 2^32")
        self._is_bytes = all(ids.get(letter) == byte for byte, letter in byte_letters().items()) and len(ids) == 258

    def encode(self, text: str) -> list[int]:
        """Token ids of `text`, without special tokens."""
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def encode_many(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Token ids of each text, uint32; safe to call from several threads."""
        if self._is_bytes:
            return [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 come out as U+FFFD."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def save(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json, which `transformers.AutoTokenizer` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
            "pad_token": self.pad,
            "clean_up_tokenization_spaces": False,
        }
        (folder / "tokenizer.json").write_text(self.backend.to_str(), "utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), "utf-8")

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer that `save` wrote."""
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text("utf-8"))
        backend = tokenizers.Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))
        return cls(backend, config["eos_token"], config["pad_token"])


def identify(spec: str) -> dict[str, Any]:
    """What `spec` stands for, as facts for a cache key. Raises UserError if it is not a tokenizer."""
    if spec == "bytes":
        return {"kind": "bytes"}
    kind, _, size = spec.partition(":")
    if kind == "bpe":
        if not size.isdecimal() or not 258 <= int(size) <= LARGEST_BPE:
            raise UserError(f"tokenizer {spec!r}: write bpe:SIZE with a size from 258 (256 bytes + 2) to 2^20")
        return {"kind": "bpe", "size": int(size)}
    path = Path(spec).expanduser()
    if not path.exists():
        near = difflib.get_close_matches(kind, ("bytes", "bpe"), n=1)
        hint = {"bytes": "; did you mean bytes?", "bpe": "; did you mean bpe:4096?"}[near[0]] if near else ""
        raise UserError(f"tokenizer {spec!r} is neither bytes nor bpe:SIZE nor an existing file or folder{hint}")
    digest = hashlib.sha256()
    for file in _parts(path):
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return {"kind": "file", "sha256": digest.hexdigest()}


def make(spec: str, texts: Iterator[str]) -> Tokenizer:
    """The tokenizer of `spec`, trained on `texts` if it is bpe:SIZE; equal texts give equal tokenizers."""
    facts = identify(spec)
    if facts["kind"] == "file":
        return _given(Path(spec).expanduser())
    is_bytes = facts["kind"] == "bytes"
    letters = {letter: byte for byte, letter in byte_letters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]) if is_bytes else models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_bytes)
    backend.decoder = decoders.ByteLevel()
    if is_bytes:
        backend.add_special_tokens([EOS, PAD])
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=facts["size"], special_tokens=[EOS, PAD], initial_alphabet=list(letters), show_progress=False
        )
        backend.train_from_iterator(texts, trainer)
    return Tokenizer(backend, EOS, PAD)


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level vocabularies: itself, or one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _parts(path: Path) -> list[Path]:
    """The files that make up the tokenizer at `path`."""
    if path.is_file():
        beside = [path.parent / name for name in CONFIGS] if path.name == "tokenizer.json" else []
        return [path, *(file for file in beside if file.is_file())]
    files = [path / name for name in (*FILES, *CONFIGS) if (path / name).is_file()]
    if not any(file.name in FILES for file in files):
        raise UserError(f"no tokenizer in folder {path}: it holds none of {', '.join(FILES)}")
    return files


def _given(path: Path) -> Tokenizer:
    parts = _parts(path)
    if parts[0].suffix != ".json" or parts[0].name == "vocab.json":
        return _converted(path)
    try:
        backend = tokenizers.Tokenizer.from_file(str(parts[0]))
    except Exception as error:  # the library raises a bare Exception
        raise UserError(f"{parts[0]} is not a tokenizer of the tokenizers library: {error}") from None
    named: dict[str, str] = {}
    for file in parts[1:]:
        for role, token in json.loads(file.read_text("utf-8")).items():
            token = token.get("content") if isinstance(token, dict) else token
            if role in ("eos_token", "pad_token") and isinstance(token, str):
                named.setdefault(role, token)
    return _with_specials(backend, path, named.get("eos_token"), named.get("pad_token"))


def _converted(path: Path) -> Tokenizer:
    """SentencePiece models and the older files of transformers, by way of transformers."""
    from transformers import AutoTokenizer

    with tempfile.TemporaryDirectory() as copy:
        if path.is_file():
            shutil.copy(path, Path(copy) / "tokenizer.model")
            (Path(copy) / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}', "utf-8")
        try:
            loaded: Any = AutoTokenizer.from_pretrained(str(copy if path.is_file() else path), local_files_only=True)
            backend = loaded.backend_tokenizer
        except Exception as error:  # whatever transformers raises on files it does not know
            why = " ".join(str(error).split())[:200]
            hint = "a SentencePiece model needs `pip install 'torchfoam[sentencepiece]'`; else give a tokenizer.json"
            raise UserError(f"cannot read the tokenizer {path}: {hint} ({why})") from None
    return _with_specials(backend, path, loaded.eos_token, loaded.pad_token)


def _with_specials(backend: tokenizers.Tokenizer, path: Path, eos: str | None, pad: str | None) -> Tokenizer:
    ids = backend.get_vocab(with_added_tokens=True)
    eos = next((token for token in (eos, *KNOWN_EOS) if token in ids), None)
    pad = next((token for token in (pad, *KNOWN_PAD) if token in ids), eos)
    if eos is None or pad is None:
        raise UserError(f"the tokenizer {path} names no end-of-text token: set eos_token in tokenizer_config.json")
    return Tokenizer(backend, eos, pad)
