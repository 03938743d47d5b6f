"""`python -m foamlab`, and so `torchrun -m foamlab train ...`."""

import sys

from .cli import main

sys.exit(main())
