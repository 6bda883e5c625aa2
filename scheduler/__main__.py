"""`python -m scheduler` is `gpujob`."""

import sys

from scheduler.faces.front import main

if __name__ == "__main__":
    sys.exit(main())
