"""Tokenizers: our own, those that the user brings in every kind of folder, and that of a model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from foamlab.config import DataConfig
from foamlab.data.corpus import Corpus, prepare
from foamlab.data.tokenizer import Tokenizer, choose, identify, make, vocabulary
from foamlab.errors import UserError

TEXTS = ['Plain.\nTwo lines, a "quote"; and, a comma.', "été 数 🙂\ttab"]


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_own_tokenizers_lose_nothing(text: str) -> None:
    if any(0xD800 <= ord(letter) < 0xE000 for letter in text):
        return
    for tokenizer in OWN:
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.encode_many([text])[0].tolist() == tokenizer.encode(text)


OWN = [make("bytes", iter(())), make("bpe:400", iter(TEXTS * 9))]


def test_bpe_is_the_same_again_and_text_is_never_a_special_token() -> None:
    assert make("bpe:400", iter(TEXTS * 9)).backend.to_str() == OWN[1].backend.to_str()
    assert OWN[0].encode("az\n") == [97, 122, 10] and OWN[0].vocab_size == 258
    for tokenizer in OWN:
        ids = tokenizer.encode("<|eos|>")
        assert tokenizer.eos_id not in ids and tokenizer.decode(ids) == "<|eos|>"


def use(spec: Path, tmp_path: Path) -> Corpus:
    (tmp_path / "t.txt").write_text("some plain text to be read, long enough")
    return prepare(DataConfig(f"text:{tmp_path / 't.txt'}", str(spec), 2, validation=0.0, cache=str(tmp_path / "c")), 0)


def test_given_tokenizer_folder_and_file(tmp_path: Path) -> None:
    OWN[1].save(tmp_path / "own")
    from_folder, from_file = use(tmp_path / "own", tmp_path), use(tmp_path / "own" / "tokenizer.json", tmp_path)
    assert from_folder.vocab_size == OWN[1].vocab_size == from_file.vocab_size
    text = "some plain"
    assert from_folder.tokenizer.encode(text) == OWN[1].encode(text) == Tokenizer.load(from_file.folder).encode(text)
    assert (from_folder.tokenizer.eos, from_folder.tokenizer.pad) == ("<|eos|>", "<|pad|>")


def test_given_tokenizer_with_large_ids_takes_32_bits(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "?": 70_000}, unk_token="?"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "words.json"))
    data = use(tmp_path / "words.json", tmp_path)
    assert data.tokens("train").dtype == np.uint32 and data.vocab_size == 70_001
    assert data.tokenizer.pad_id == data.tokenizer.eos_id == 0 and data.batch("train", 0, 1)[0].max() == 70_000


def test_bad_tokenizers_are_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("{}")
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "nameless.json"))
    for name, says in {
        "empty": "no tokenizer in folder",
        "bad.json": "not a tokenizer",
        "nameless.json": "eos_token",
    }.items():
        with pytest.raises(UserError, match=says):
            use(tmp_path / name, tmp_path)


@pytest.mark.heavy
def test_transformers_reads_what_save_writes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    for i, own in enumerate(OWN):
        own.save(tmp_path / str(i))
        loaded = AutoTokenizer.from_pretrained(str(tmp_path / str(i)), local_files_only=True)
        assert loaded(TEXTS[1]).input_ids == own.encode(TEXTS[1])
        assert (loaded.eos_token_id, loaded.pad_token_id) == (own.eos_id, own.pad_id)
        assert loaded.decode(own.encode(TEXTS[1])) == TEXTS[1]


# Folders as they are found on the hub and elsewhere


def byte_bpe(folder: Path) -> None:
    backend = tokenizers.ByteLevelBPETokenizer()
    backend.train_from_iterator(TEXTS * 9, 300, special_tokens=["<|endoftext|>"])
    backend.save_model(str(folder))


def word_pieces(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "some", "plain", "text", "##s"]
    (folder / "vocab.txt").write_text("\n".join(words) + "\n")


def sentence_pieces(folder: Path) -> None:
    spm = pytest.importorskip("sentencepiece")
    trained = {"vocab_size": 40, "model_type": "bpe", "hard_vocab_limit": False, "minloglevel": 2}
    with (folder / "tokenizer.model").open("wb") as file:
        spm.SentencePieceTrainer.train(sentence_iterator=iter(["some plain text"] * 20), model_writer=file, **trained)


KINDS = {  # kind -> (what writes it, text, its tokens, end-of-text token)
    "merges": (byte_bpe, "Plain", None, "<|endoftext|>"),
    "vocab.txt": (word_pieces, "Some plain texts", ["some", "plain", "text", "##s"], "[SEP]"),
    "tokenizer.model": (sentence_pieces, "some", ["\u2581some"], "</s>"),
}


@pytest.mark.parametrize("also", [False, True], ids=["alone", "beside tokenizer.json"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_folder_loads_and_stays_whole(tmp_path: Path, kind: str, also: bool) -> None:
    write, text, expected, eos = KINDS[kind]
    folder, again = tmp_path / "given", tmp_path / "again"
    folder.mkdir()
    write(folder)
    if also:
        make(str(folder), iter(())).backend.save(str(folder / "tokenizer.json"))
        config = {"eos_token": {"content": eos, "lstrip": False}, "bos_token": "<s>", "cls_token": "[CLS]"}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "config.json").write_text('{"model_type": "llama"}')
    given, before = make(str(folder), iter(())), {f.name: f.read_bytes() for f in folder.iterdir()}
    ids = given.encode(text)
    assert given.eos == eos
    assert [given.backend.id_to_token(i) for i in ids] == expected or expected is None
    if kind == "merges":
        assert given.decode(given.encode(TEXTS[1])) == TEXTS[1]
    assert use(folder, tmp_path).tokenizer.encode(text) == ids  # by way of the cache
    use(folder, tmp_path).tokenizer.save(again)
    kept = {f.name: f.read_bytes() for f in again.iterdir()}
    before.pop("config.json", None)  # the model's own
    assert {name: kept[name] for name in before} == before
    assert "config.json" not in kept and "tokenizer.json" in kept
    assert Tokenizer.load(again).encode(text) == ids


@pytest.mark.parametrize("name", ["vocab.json", "merges.txt", "vocab.txt"])
def test_one_file_of_a_pair_finds_the_other(tmp_path: Path, name: str) -> None:
    (word_pieces if name == "vocab.txt" else byte_bpe)(tmp_path)
    assert make(str(tmp_path / name), iter(())).encode("plain") == make(str(tmp_path), iter(())).encode("plain")


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_broken_folder_is_one_line(tmp_path: Path, name: str, content: bytes) -> None:
    OWN[1].save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError) as error:
        make(str(tmp_path), iter(()))
    assert str(tmp_path) in str(error.value) and "\n" not in str(error.value) and len(str(error.value)) < 500


def test_a_folder_of_version_1_has_the_key_it_had(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "chat_template.jinja").write_text("x")
    assert identify(str(tmp_path), 1)["sha256"].startswith("7a3d56e7b73a0c73")  # by the first version
    assert identify(str(tmp_path), 1) != identify(str(tmp_path), 2)


# The tokenizer of a run


def test_a_model_folder_brings_its_tokenizer(tmp_path: Path) -> None:
    model, bare = tmp_path / "model", tmp_path / "bare"
    OWN[1].save(model)
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    shutil.copytree(model, tmp_path / "copy")
    assert choose("", str(model)) == (str(model), "")
    assert choose("", "llama-1m") == ("bpe:4096", "")
    assert choose("bytes", "llama-1m") == choose("bytes", str(bare)) == ("bytes", "")
    assert choose(str(tmp_path / "copy"), str(model))[1] == ""  # the same, from elsewhere
    spec, warning = choose("bytes", str(model))
    assert spec == "bytes" and "has its own tokenizer" in warning
    with pytest.raises(UserError, match="has no tokenizer: name one"):
        choose("", str(bare))


def test_vocabulary_is_known_without_text(tmp_path: Path) -> None:
    OWN[1].save(tmp_path)
    own = OWN[1].vocab_size
    assert (vocabulary("bytes"), vocabulary("bpe:999"), vocabulary(str(tmp_path))) == (
        (258,) * 2,
        (258, 999),
        (own,) * 2,
    )


# Long words


WORDS: dict[str, Callable[[int], str]] = {
    "dna": lambda n: "".join("ACGT"[int(x)] for x in np.random.default_rng(0).integers(4, size=n)),
    "chinese": lambda n: "".join(chr(0x4E00 + int(x)) for x in np.random.default_rng(0).integers(3000, size=n)),
    "base64": lambda n: "".join("AbC9+/xYz"[int(x)] for x in np.random.default_rng(0).integers(9, size=n)),
    "one letter": lambda n: "a" * n,
    "blanks": lambda n: " " * (n - 1) + "x",
}


@pytest.mark.parametrize("kind", WORDS)
def test_a_bpe_learns_from_long_words_in_parts(kind: str) -> None:
    text = WORDS[kind](4000)
    cut = make("bpe:300", iter([text]))
    assert cut.decode(cut.encode(text)) == text
    assert len(cut.encode(text)) < len(text.encode())
    if kind == "dna":  # parts of 256 letters teach nearly what the whole does
        whole = make("bpe:300", iter([text]), version=1)
        assert len(cut.encode(text)) < 1.03 * len(whole.encode(text))


def test_words_of_usual_length_are_learnt_whole() -> None:
    text = ["x" * 200 + " and more words of text, as usual. "] * 3 + TEXTS
    assert make("bpe:320", iter(text)).backend.to_str() == make("bpe:320", iter(text), version=1).backend.to_str()


def test_training_a_bpe_is_reported_and_ctrl_c_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work goes on in a thread of its own; whoever waits is free to be interrupted."""
    told: list[int] = []

    def interrupt() -> None:
        told.append(1)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        make("bpe:2000", iter([WORDS["dna"](100_000)]), waiting=interrupt)
    assert told == [1]

    def broken() -> Iterator[str]:
        yield "text"
        raise OSError("the disk is gone")

    with pytest.raises(Exception, match="the disk is gone"):  # what fails in the thread fails here
        make("bpe:300", broken())
