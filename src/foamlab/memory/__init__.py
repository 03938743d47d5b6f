"""The memory a run needs, before it is run, and what fits a GPU."""
