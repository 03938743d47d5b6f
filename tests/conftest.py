"""One thread a test process, here and in the processes that tests start: two workers on two cores do not fight for them."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
