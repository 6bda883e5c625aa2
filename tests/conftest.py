"""Settings of all tests: marks, order, Hypothesis profiles, and a check that tests leave this process unchanged.

`make test` runs all tests without the mark ``long``. `make quick` runs a part of these tests: the tests with the mark
``smoke`` and the tests without the mark ``story``. `make test-long` runs the tests with the mark ``long``, and runs the
property tests (mark ``long_form``) with more examples.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from hypothesis import HealthCheck

from scheduler.warm import client
from tests.environ import NO_CONFIG

# If this variable is set, each of thousands of interpreters compiles the whole program again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Each worker collects thousands of tests, which stay: the garbage collector need not visit them again and again.
gc.disable()

# A usual warm process would outlive the test that started it, so it is switched off; `tests/warm` tests it. With
# GPUJOB_TESTS_WARM=1 (`make test-warm`), the commands of all tests run in the warm processes of a folder of this worker.
WARM_FOLDER = tempfile.mkdtemp(prefix="gpujob-warm-") if os.environ.get("GPUJOB_TESTS_WARM") == "1" else ""
os.environ["GPUJOB_WARM"] = WARM_FOLDER or "0"

# Schedulers of tests do not share bookings with those of the machine; each worker has a folder of its own.
BOOKINGS_FOLDER = tempfile.mkdtemp(prefix="gpujob-bookings-")
os.environ["GPUJOB_BOOKINGS_FOLDER"] = BOOKINGS_FOLDER
os.environ["GPUJOB_MACHINE_CONFIG"] = NO_CONFIG  # the settings of this machine do not matter
atexit.register(shutil.rmtree, BOOKINGS_FOLDER, ignore_errors=True)

# `python` in a job is the tested interpreter, not a script of pyenv, which starts ten shells for each job.
os.environ["PATH"] = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH") or os.defpath))

# A shell that starts the tests in the background makes them, and so their children, ignore Ctrl-C.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
for number in (signal.SIGHUP, signal.SIGQUIT):
    signal.signal(number, signal.SIG_DFL)  # ignored, if nohup or a shell in the background starts the tests

# Tests must not create anything directly in this folder: Python looks for libraries here, so a running warm process
# would take the changed folder for a changed program, and end. Hypothesis (`.hypothesis`) and the screenshots of a failed
# test in the browser (`.build`) need a folder there: both are created now.
ROOT = Path(__file__).parent.parent
for name in (".hypothesis", ".build"):
    (ROOT / name).mkdir(exist_ok=True)
KNOWN_NAMES = set(os.listdir(ROOT))

# `make test` draws the same examples in every run; `make test-long` draws ten times as many, different in each run.
hypothesis.settings.register_profile(
    "test", max_examples=100, derandomize=True, deadline=None, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)  # fmt: skip
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("test"), max_examples=1000, derandomize=False, print_blob=True
)
hypothesis.settings.load_profile("long" if os.environ.get("GPUJOB_LONG") == "1" else "test")

# A test with one of these fixtures starts the program, a browser or a traced machine.
STORY_FIXTURES = frozenset(
    "browser daemon_of disks forge graphics house lab machine other_boots page pages plain_screens quiet scheduler screens spooler"
    " traced_forge tracing tracked users".split()
)
PR_SET_CHILD_SUBREAPER, PR_GET_CHILD_SUBREAPER = 36, 37
_LIBC = ctypes.CDLL(None)
STORY_FOLDERS = ("tests/stories/", "tests/web/", "tests/breaking/")


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Mark the stories, let pytest select the tests by their marks, and change the order of the selected tests.

    The last worker begins with the tests that wait for a long time. Meanwhile the other workers run the other tests.
    """
    for item in items:
        if hypothesis.is_hypothesis_test(getattr(item, "obj", None)):
            item.add_marker("long_form")
        fixtures = getattr(item, "fixturenames", ())
        uses_a_folder = item.nodeid.startswith(STORY_FOLDERS) and "tmp_path" in fixtures
        if uses_a_folder or not STORY_FIXTURES.isdisjoint(fixtures):
            item.add_marker("story")
    yield
    waits = [item for item in items if item.get_closest_marker("waits")]
    others = [item for item in items if not item.get_closest_marker("waits")]
    # xdist gives each worker an equal part of the selected tests, in order: the last worker begins with those that wait.
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    last = len(items) * (workers - 1) // workers
    items[:] = [*others[:last], *waits, *others[last:]]


def pytest_sessionfinish() -> None:
    """End the warm processes of this worker."""
    if WARM_FOLDER:
        for path in Path(WARM_FOLDER).glob("warm-*"):
            with contextlib.suppress(OSError):  # it has ended
                made = client.connect(str(path))
                if made is not None:
                    with contextlib.closing(made):
                        os.kill(client.peer_of(made)[0], signal.SIGKILL)
        shutil.rmtree(WARM_FOLDER)


def pytest_collection_finish() -> None:
    """Enable the garbage collector after the tests are collected.

    The garbage collector never examines the objects that exist at this moment.
    """
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True)
def _state_of_this_process() -> Iterator[None]:
    """After each test, undo its changes of this process. Fail if the test changed the umask or wrote into the checkout.

    A runner makes its process a subreaper: this process then becomes the parent of orphans. If the test process stayed
    a subreaper, it would get the orphans of later tests, and they would stay zombies, because nothing reaps them.
    """
    before = os.umask(0o022)
    os.umask(before)
    yield
    after = os.umask(before)
    if _is_subreaper():
        _LIBC.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    created = set(os.listdir(ROOT)) - KNOWN_NAMES
    KNOWN_NAMES.update(created)  # reported once
    assert not created, f"this test, or one that ran beside it, has created {created} in {ROOT}"
    assert after == before, f"the umask is {after:o}, was {before:o}"


def _is_subreaper() -> bool:
    found = ctypes.c_int()
    _LIBC.prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(found), 0, 0, 0)
    return bool(found.value)
