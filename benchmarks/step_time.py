"""Time optimizer steps: `python benchmarks/step_time.py [flags]` is `foamlab bench step [flags]`."""

import sys

from foamlab.cli import main

sys.exit(main(["bench", "step", *sys.argv[1:]]))
