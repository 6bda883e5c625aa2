"""The tests of this folder need a real Ray: only `make test-ray` collects them."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("GPUJOB_TEST_RAY") else ["test_ray_story.py"]
