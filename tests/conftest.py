"""One thread a test process, also in the processes that tests start: two workers do not fight for two cores."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
