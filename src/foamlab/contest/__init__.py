"""Contests between optimizers: designed, run, kept on disk, judged."""
