"""The files of a model or tokenizer: a local folder, or OWNER/NAME on the Hugging Face hub, downloaded to its cache."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import UserError

CONFIGS = ("tokenizer_config.json", "special_tokens_map.json")
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "merges.txt")
TEMPLATES = ("added_tokens.json", "chat_template.jinja", "chat_template.json")
TOKENIZER = (*VOCABULARIES, *CONFIGS, *TEMPLATES)
OURS = ("config.json", "generation_config.json", *TOKENIZER)
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


def is_hub(name: str) -> bool:
    """Whether this is a name on the hub, and no local path."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name) is not None and not Path(name).exists()


def local(name: str, weights: bool = False) -> Path:
    """The folder of `name`, downloaded from the hub if needed.

    Args:
        name: a local folder, or OWNER/NAME on the hub.
        weights: download the weights too.

    Raises:
        UserError: no such model, no access to it, or no network, in one line.
    """
    if not is_hub(name):
        return Path(name).expanduser()
    import huggingface_hub
    from huggingface_hub.utils import disable_progress_bars

    disable_progress_bars()
    wanted = [*OURS, *(WEIGHTS if weights else ())]
    try:
        return Path(huggingface_hub.snapshot_download(name, allow_patterns=wanted, etag_timeout=5))
    except Exception as e:  # network, access, names: whatever the library and its client raise
        cause = e.__cause__ or e
        why = " ".join(str(cause).split()).split(". ")[0][:160] or type(cause).__name__
        raise UserError(
            f"cannot fetch {name} from the Hugging Face hub: {why}; check the name and the network, or give a folder"
        ) from None
