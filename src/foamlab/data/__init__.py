"""Text to batches: sources of documents, tokenizing, the token cache, rows."""

from .corpus import IGNORED, VERSION, Corpus, Split, prepare, settle

__all__ = ["IGNORED", "VERSION", "Corpus", "Split", "prepare", "settle"]
