"""Example job that fails on purpose, so that the demo shows a failed job."""

import sys
import time

time.sleep(1)
print("RuntimeError: CUDA error: invalid device ordinal")
sys.exit(3)
