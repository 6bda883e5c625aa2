"""Fails on purpose, so that the demo has a failure to show."""

import sys
import time

time.sleep(1)
print("RuntimeError: CUDA error: invalid device ordinal")
sys.exit(3)
