"""`python -m scheduler` is `gpujob`."""

import os
import sys

if __name__ == "__main__":
    # Python looks for modules where one happens to be: a scheduler.py or queue.py of somebody's project is none of ours.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] != root:
        del sys.path[0]
    if root not in sys.path:
        sys.path.insert(0, root)

    from scheduler.entrypoint import entry

    entry()
