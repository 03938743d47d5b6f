"""Where fine-tuning begins: small pre-trained models, and files of rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from labelled import FILES, KINDS, sentences, words, write

from foamlab.data.tokenizer import make


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    home = tmp_path_factory.mktemp("home")
    for kind, (name, shape) in KINDS.items():
        torch.manual_seed(1)
        made = getattr(transformers, name)
        made(made.config_class(**shape)).save_pretrained(home / kind)
        if "vocab" in shape or shape["vocab_size"] == 258:
            make("bytes", iter(())).save(home / kind)
        else:
            words(home / kind)
        for file, content in FILES.items():
            (home / kind / file).write_text(content)
    write(home / "train.jsonl", sentences(48))
    write(home / "dev.jsonl", sentences(13, 1))
    write(home / "test.jsonl", sentences(11, 2))
    return home
