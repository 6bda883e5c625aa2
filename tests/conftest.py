"""For all tests: the state of this process that what it starts would inherit."""

from __future__ import annotations

import signal

# A shell that starts the tests in the background has Ctrl-C ignored for them, and so for every child.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
