"""From text to token ids: bytes, a byte-level BPE trained on the corpus, or a given tokenizer.

One wrapper for the three, with what training needs: the end-of-document and padding ids and the size of the
embedding. Text never becomes a special token: "<|eos|>" inside a document is seven characters like any others.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from ..errors import UserError, nearest
from ..files import read_json
from ..hub import CONFIGS, TEMPLATES, VOCABULARIES, is_hub, local

DEFAULT = "bpe:4096"
EOS, PAD = "<|eos|>", "<|pad|>"
KNOWN_EOS = (EOS, "</s>", "<|endoftext|>", "<|end_of_text|>", "<eos>", "[SEP]")
KNOWN_PAD = (PAD, "<pad>", "[PAD]", "<|finetune_right_pad_id|>")
LARGEST = 2**32  # token files hold at most 32 bits an id
LARGEST_BPE = 2**20  # a trainer allocates about 70 bytes for each, and ends the process if it cannot
WORD = 256  # a BPE learns from words up to this length: its time grows with the square of it
# the class that transformers is given for a vocabulary without a config
CLASSES = {"vocab.txt": "BertTokenizer", "vocab.json": "GPT2Tokenizer", "tokenizer.model": "LlamaTokenizer"}


class Tokenizer:
    """A `tokenizers.Tokenizer` (`backend`) and the names of its two special tokens.

    Attributes:
        files: the original files of a given tokenizer, name -> bytes, for `save`.
        vocab_size: largest id + 1: rows that an embedding needs.
        eos_id: ends every document.
        pad_id: fills short rows ("paper" mode); the same as `eos_id` if the tokenizer has no padding token.
    """

    def __init__(
        self, backend: tokenizers.Tokenizer, eos: str, pad: str, files: dict[str, bytes] | None = None
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        backend.encode_special_tokens = True  # in the text they are text
        ids = backend.get_vocab(with_added_tokens=True)
        self.backend = backend
        self.files = files or {}
        self.eos, self.eos_id = eos, ids[eos]
        self.pad, self.pad_id = pad, ids[pad]
        self.vocab_size = max(ids.values()) + 1
        if self.vocab_size > LARGEST:
            raise UserError(f"the tokenizer's largest id is {self.vocab_size - 1}; a token cache holds ids below 2^32")
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

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 come out as U+FFFD."""
        return str(self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special_tokens))

    def save(self, folder: str | Path) -> None:
        """Write what `transformers.AutoTokenizer` reads: the original files, or two of our own."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": self.eos,
            "pad_token": self.pad,
            "clean_up_tokenization_spaces": False,
        }
        own = {"tokenizer.json": self.backend.to_str(), "tokenizer_config.json": json.dumps(config, indent=1)}
        for name, content in (self.files or {name: text.encode() for name, text in own.items()}).items():
            (folder / name).write_bytes(content)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """The tokenizer that `save` wrote."""
        return _given(Path(folder))


def own(model: str) -> str:
    """The value of `DataConfig.tokenizer` for the tokenizer of a model; "" if it has none, as presets do."""
    if is_hub(model) or Path(model).is_dir():
        folder = local(model)
        return model if any((folder / name).is_file() for name in VOCABULARIES) else ""
    return ""


def choose(spec: str, model: str) -> tuple[str, str]:
    """The tokenizer of a run, and a warning if it is not the one that its model was trained with.

    Raises:
        UserError: none is named, and the model needs its own, but has none.
    """
    theirs = own(model)
    if spec:
        if not theirs or identify(spec) == identify(theirs):
            return spec, ""
        return spec, f"{model} has its own tokenizer; {spec} gives token ids that its weights were not trained on"
    if not theirs and (is_hub(model) or (Path(model) / "config.json").is_file()):
        raise UserError(f"the model {model} has no tokenizer: name one with --data.tokenizer (a folder, or bytes)")
    return theirs or DEFAULT, ""


def identify(spec: str, version: int = 2) -> dict[str, Any]:
    """What `spec` means, as facts for a cache key. Raises UserError if it is not a tokenizer."""
    spec = spec or DEFAULT
    if spec == "bytes":
        return {"kind": "bytes"}
    kind, _, size = spec.partition(":")
    if kind == "bpe":
        if not size.isdecimal() or not 258 <= int(size) <= LARGEST_BPE:
            raise UserError(f"tokenizer {spec!r}: write bpe:SIZE with a size from 258 (256 bytes + 2) to 2^20")
        return {"kind": "bpe", "size": int(size)}
    path = local(spec)
    if not path.exists():
        near = nearest(kind, ("bytes", DEFAULT), least=0.6)
        hint = f"; did you mean {near}?" if near else ""
        raise UserError(f"tokenizer {spec!r} is neither bytes nor bpe:SIZE nor an existing file or folder{hint}")
    digest = hashlib.sha256()
    for file in _parts(path, version).values():
        digest.update(file.name.encode() + hashlib.sha256(file.read_bytes()).digest())
    return {"kind": "file", "sha256": digest.hexdigest()}


def make(spec: str, texts: Iterator[str], version: int = 2, waiting: Callable[[], None] = lambda: None) -> Tokenizer:
    """The tokenizer of `spec`, trained on `texts` if it is bpe:SIZE; equal texts give equal tokenizers.

    `waiting` is called regularly while it is trained.
    """
    facts = identify(spec)
    if facts["kind"] == "file":
        return _given(local(spec))
    is_bytes = facts["kind"] == "bytes"
    letters = {letter: byte for byte, letter in byte_letters().items()}
    backend = tokenizers.Tokenizer(models.BPE(vocab=letters, merges=[]) if is_bytes else models.BPE())
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not is_bytes)
    backend.decoder = decoders.ByteLevel()
    if is_bytes:
        backend.add_special_tokens([EOS, PAD])
    else:
        trainer = trainers.BpeTrainer(
            vocab_size=facts["size"], special_tokens=[EOS, PAD], initial_alphabet=list(letters), show_progress=False
        )
        short = pre_tokenizers.Sequence([words, pre_tokenizers.FixedLength(WORD)])
        backend.pre_tokenizer = short if version > 1 else words
        _beside(lambda: backend.train_from_iterator(texts, trainer), waiting)
    backend.pre_tokenizer = words
    return Tokenizer(backend, EOS, PAD)


def _beside(work: Callable[[], None], waiting: Callable[[], None]) -> None:
    """Do the work in a thread that ends with the process, so that Ctrl-C works at once."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.2)
        waiting()
    if raised:
        raise raised[0]


def vocabulary(spec: str) -> tuple[int, int]:
    """(least, most) tokens of the vocabulary; they differ if a BPE is still to be trained."""
    facts = identify(spec)
    if facts["kind"] == "bpe":
        return 258, facts["size"]
    size = make(spec, iter(())).vocab_size
    return size, size


def byte_letters() -> dict[int, str]:
    """The printable letter that stands for each byte in byte-level vocabularies: itself, or one from 256 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def _parts(path: Path, version: int = 2) -> dict[str, Path]:
    """The files of the tokenizer at `path`, by the names that transformers uses."""
    beside = (*CONFIGS, *TEMPLATES) if version > 1 else CONFIGS
    folder, parts = path, {}
    names: tuple[str, ...] = (*VOCABULARIES, *beside)
    if path.is_file():
        other = "tokenizer.json" if path.suffix == ".json" else "tokenizer.model"
        name = path.name if path.name in VOCABULARIES else other
        folder, parts = path.parent, {name: path}
        pair = ("vocab.json", "merges.txt")
        names = (*(pair if name in pair else ()), *beside) if path.name in VOCABULARIES else ()
        if version == 1 and name != "tokenizer.json":
            names = ()
    parts |= {name: folder / name for name in names if name not in parts and (folder / name).is_file()}
    if not any(name in VOCABULARIES for name in parts):
        raise UserError(f"no tokenizer in folder {path}: it holds none of {', '.join(VOCABULARIES)}")
    if version > 1 and "tokenizer.json" not in parts and (folder / "config.json").is_file():
        parts["config.json"] = folder / "config.json"  # the kind of model, and so of tokenizer
    return parts


def _given(path: Path) -> Tokenizer:
    parts = _parts(path)
    configs = {name: read_json(parts[name]) for name in (*CONFIGS, "config.json") if name in parts}
    try:
        files = {name: file.read_bytes() for name, file in parts.items()}
    except OSError as error:
        raise UserError(f"cannot read the tokenizer {path}: {error.strerror}") from None
    if "tokenizer.json" not in files:
        files |= _converted(path, files, configs)
        configs["tokenizer_config.json"] = json.loads(files["tokenizer_config.json"])
    try:
        backend = tokenizers.Tokenizer.from_str(files["tokenizer.json"].decode())
    except Exception as error:  # the library raises a bare Exception
        why = " ".join(str(error).split())[:200]
        raise UserError(f"{path} is not a tokenizer of the tokenizers library: {why}") from None
    named: dict[str, str] = {}
    for name in CONFIGS:
        for role, token in configs.get(name, {}).items():
            token = token.get("content") if isinstance(token, dict) else token
            if role in ("eos_token", "pad_token") and isinstance(token, str):
                named.setdefault(role, token)
    ids = backend.get_vocab(with_added_tokens=True)
    eos = next((token for token in (named.get("eos_token"), *KNOWN_EOS) if token in ids), None)
    pad = next((token for token in (named.get("pad_token"), *KNOWN_PAD) if token in ids), eos)
    if eos is None or pad is None:
        raise UserError(f"the tokenizer {path} has no end-of-text token: set eos_token in tokenizer_config.json")
    files.pop("config.json", None)  # the model's
    return Tokenizer(backend, eos, pad, files)


def _converted(path: Path, files: dict[str, bytes], configs: dict[str, Any]) -> dict[str, bytes]:
    """tokenizer.json and tokenizer_config.json for SentencePiece models and older files, made by transformers."""
    from transformers import AutoTokenizer

    config = dict(configs.get("tokenizer_config.json", {}))
    if "tokenizer_class" not in config and "model_type" not in configs.get("config.json", {}):
        kind = next((kind for name, kind in CLASSES.items() if name in files), "")
        config["tokenizer_class"] = kind
        if kind == "BertTokenizer":
            config.setdefault("do_lower_case", not re.search(r"^(?!\[).*[A-Z]", files["vocab.txt"].decode(), re.M))
    with tempfile.TemporaryDirectory() as copy, tempfile.TemporaryDirectory() as out:
        for name, content in {**files, "tokenizer_config.json": json.dumps(config).encode()}.items():
            (Path(copy) / name).write_bytes(content)
        try:
            loaded: Any = AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
            loaded.save_pretrained(out)
            made = json.loads((Path(out) / "tokenizer_config.json").read_bytes())
            whole = (Path(out) / "tokenizer.json").read_bytes()
        except Exception as error:  # whatever transformers raises on files it does not know
            why = " ".join(str(error).split())[:200]
            hint = (
                "a SentencePiece model needs `pip install 'torchfoam[sentencepiece]'`; otherwise give a tokenizer.json"
            )
            raise UserError(f"cannot read the tokenizer {path}: {hint} ({why})") from None
    return {"tokenizer.json": whole, "tokenizer_config.json": json.dumps({**made, **config}, indent=1).encode()}
