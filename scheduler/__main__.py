"""Makes `python -m scheduler` equivalent to the command `gpujob`."""

import os
import sys

if __name__ == "__main__":
    # Python searches the current folder first: a user's scheduler.py or queue.py there must not replace our modules.
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if not getattr(sys.flags, "safe_path", False) and sys.path[0] != root:
        del sys.path[0]
    if root not in sys.path:
        sys.path.insert(0, root)

    from scheduler.entrypoint import entry

    entry()
