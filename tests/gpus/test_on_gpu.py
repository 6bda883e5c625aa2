"""The checks on a GPU (`benchmarks/on_gpu.py`), run against the stub library, and the page that they write."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_job
from benchmarks.gpu_job import ordinal_of
from benchmarks.gpu_page import BEGIN, END, NEW_PAGE, NOT_RUN, STUB, NotWritten, Row, part, with_part, written
from benchmarks.on_gpu import CHECKS
from scheduler.core.failure_classes import classify
from scheduler.core.failure_signs import OUT_OF_MEMORY
from scheduler.core.gpu import ResourceRequest
from tests.gpus.stub import FLAGS, LIBRARY, FakeDriver, compiled
from tests.stories.harness import wait_for
from tests.stories.machine import processes_with

ROOT = Path(__file__).resolve().parents[2]
ROWS = [Row("one", "3 | 4\nGiB", True), Row("other", "nothing", False)]
STUB_PART, REAL_PART = part(True, "Simulated.", ROWS), part(False, "NVIDIA H100.", ROWS)
UUID = "GPU-f0f1f2f3-f4f5-f6f7-f8f9-fafbfcfdfeff"  # of the fake of libcuda


def on_gpu(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `python -m benchmarks.on_gpu`, and return what it printed."""
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.on_gpu", *words], cwd=ROOT, env={**os.environ, **environ}, capture_output=True,
        text=True, timeout=170, check=False,
    )  # fmt: skip


def job(*words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run the job of the checks, and return what it printed."""
    return subprocess.run(
        [sys.executable, gpu_job.__file__, *words], env={**os.environ, **environ}, capture_output=True, text=True, timeout=60,
        check=False,
    )  # fmt: skip


# -- the whole run --------------------------------------------------------------------------------------------


@pytest.mark.story
@pytest.mark.waits
def test_all_checks_hold_against_the_stub_library(tmp_path: Path) -> None:
    """All checks hold, the page says that no real GPU was used, and no process and no folder is left."""
    page = tmp_path / "gpu.md"
    done = on_gpu("--stub", "--out", str(page), TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text()
    assert text.startswith(NEW_PAGE.partition(BEGIN)[0]) and STUB in text
    rows = re.findall(r"^\| (.*) \| (.*) \| yes \|$", text, re.M)
    assert [row[0] for row in rows] == list(CHECKS), text
    assert f"{len(CHECKS)} of {len(CHECKS)} checks hold" in text
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("gpujob-on-gpu")] == []
    wait_for(lambda: not processes_with(str(tmp_path)), "the end of all processes")


@pytest.mark.story
def test_without_a_gpu_one_line_says_so(tmp_path: Path) -> None:
    """Without a driver, with a busy GPU or with an unknown index nothing is checked: exit code 2, and the page stays."""
    driver = FakeDriver(tmp_path)
    driver.gpu("GPU-a", total=80_000, used=70_000)
    page = tmp_path / "gpu.md"
    environ = {**driver.environ(), "TMPDIR": str(tmp_path)}
    for words, changed, text in (
        ((), {"NVML_STUB_FILE": str(tmp_path / "none")}, "NVML Shared Library Not Found|Driver Not Loaded"),
        ((), {}, "GPU 0 is in use"),
        (("--gpu", "3"), {}, "no GPU 3; there are 0"),
    ):
        done = on_gpu("--out", str(page), *words, **environ | changed)
        assert done.returncode == 2 and re.search(text, done.stderr) and done.stderr.count("\n") == 1, done
        assert done.stdout == "" and not page.exists()


@pytest.mark.story
def test_a_page_with_figures_of_a_real_gpu_is_refused_before_the_checks(tmp_path: Path) -> None:
    """With --stub, such a page is refused at once, and stays as it is."""
    page = tmp_path / "gpu.md"
    page.write_text(with_part(NEW_PAGE, REAL_PART))
    before = page.read_bytes()
    done = on_gpu("--stub", "--out", str(page), TMPDIR=str(tmp_path))
    assert done.returncode == 2 and "never replaces them" in done.stderr and done.stdout == ""
    assert page.read_bytes() == before


# -- the page -------------------------------------------------------------------------------------------------


def test_a_run_replaces_only_its_part_of_the_page() -> None:
    """The text around the part stays. The cells of the table are one line each, and a bar in them is escaped."""
    page = f"# Title\n\nmeasured by hand\n\n{BEGIN}\n{NOT_RUN}\n{END}\n\nmore\n"
    changed = with_part(page, STUB_PART)
    assert changed == f"# Title\n\nmeasured by hand\n\n{BEGIN}\n{STUB_PART}\n{END}\n\nmore\n"
    assert r"| one | 3 \| 4 GiB | yes |" in changed and "| other | nothing | **no** |" in changed
    assert "1 of 2 checks hold." in changed


@pytest.mark.parametrize(
    ("old", "new", "replaced"),
    [
        (NOT_RUN, STUB_PART, True),
        (NOT_RUN, REAL_PART, True),
        (STUB_PART, STUB_PART, True),
        (STUB_PART, REAL_PART, True),
        (REAL_PART, REAL_PART, True),
        (REAL_PART, STUB_PART, False),
    ],
)
def test_figures_of_a_real_gpu_are_never_replaced_by_the_stub(old: str, new: str, replaced: bool) -> None:
    """Only a run on a real GPU replaces the figures of a real GPU."""
    page = NEW_PAGE.replace(NOT_RUN, old)
    if replaced:
        assert new in with_part(page, new)
    else:
        with pytest.raises(NotWritten):
            with_part(page, new)


def test_a_page_without_the_comments_is_not_changed(tmp_path: Path) -> None:
    """A page without the two comments has no place for the part; neither has a folder that does not exist."""
    page = tmp_path / "page.md"
    page.write_text("# Title\n")
    for path in (page, tmp_path / "none" / "page.md", tmp_path):
        with pytest.raises(NotWritten):
            written(str(path), STUB_PART)
    assert STUB_PART in written(str(tmp_path / "new.md"), STUB_PART)


def test_the_page_of_the_project_has_a_place_for_the_figures() -> None:
    """A run on a real GPU can write its figures into docs/gpu.md, and what was measured by hand stays."""
    page = (ROOT / "docs/gpu.md").read_text()
    changed = with_part(page, REAL_PART)
    assert REAL_PART in changed and changed.partition(BEGIN)[0] == page.partition(BEGIN)[0]


def test_the_page_names_all_packages_that_a_machine_without_a_network_needs() -> None:
    """The packages in docs/gpu.md are the dependencies in pyproject.toml, except GPUtil, which has no wheel."""
    listed = re.search(r"(?s)\ndependencies = \[(.*?)\n\]", (ROOT / "pyproject.toml").read_text())
    assert listed
    names = {name.lower() for name in re.findall(r'(?m)^ +"([\w-]+)', listed[1])} - {"gputil"}
    lines = [line for line in (ROOT / "docs/gpu.md").read_text().splitlines() if "filelock" in line]
    assert len(lines) == 2
    for line in lines:
        words = line[line.index("filelock") :].replace("'", "").split()
        assert {re.split("[<>=]", word)[0] for word in words} == names
        assert "typer<0.29" in line.replace(">=0.16,", "")


# -- the job --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("style", "cuda", "ordinal", "visible"),
    [("visible", "3", 0, "3"), ("device", "1", 1, "7"), ("first", None, 0, "7"), ("visible", None, 0, "7")],
)
def test_each_style_takes_its_device_from_its_argument(
    monkeypatch: pytest.MonkeyPatch, style: str, cuda: str | None, ordinal: int, visible: str
) -> None:
    """A script that sets CUDA_VISIBLE_DEVICES then uses device 0; one that does not uses the number that it was given."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert ordinal_of(style, cuda) == ordinal and os.environ["CUDA_VISIBLE_DEVICES"] == visible


def test_without_torch_a_job_takes_memory_by_the_cuda_driver(tmp_path: Path) -> None:
    """The job loads libcuda, reports the UUID as NVML writes it, and fails where its share or the GPU ends."""
    flags = tuple(flag.replace(LIBRARY, "libcuda.so.1") for flag in FLAGS)
    library = compiled(Path(__file__).with_name("cuda_stub.c"), "libcuda.so.1", flags)
    environ = {
        "LD_LIBRARY_PATH": str(library.parent), "ON_GPU_BACKEND": "driver", "ON_GPU_FOLDER": str(tmp_path),
        "ON_GPU_TOTAL_MIB": "1000", "GPUJOB_SHARE": "0.25", "CUDA_STUB_MIB": "1000", "CUDA_VISIBLE_DEVICES": "0",
    }  # fmt: skip
    (tmp_path / "one.end").touch()
    done = job("one", "--mib", "250", "--within-share", "--cuda", "0", **environ)
    assert done.returncode == 0 and done.stdout.startswith(gpu_job.REPORT), done
    report = json.loads(done.stdout[len(gpu_job.REPORT) :])
    assert report["uuid"] == UUID and report["visible"] == "0" and "without torch" in report["backend"]
    for words, text in (
        (("--mib", "270", "--within-share"), "CUDA out of memory. Tried to allocate 10.00 MiB"),
        (("--mib", "1001"), "CUDA error: out of memory (cuMemAlloc_v2)"),
    ):
        done = job("one", *words, **environ)
        assert done.returncode == 1 and text in done.stderr
        found = classify(done.stderr, ResourceRequest.parse("0.25"), 1, None)
        assert found is not None and found.kind == OUT_OF_MEMORY
    done = job("one", "--style", "device", "--cuda", "2", **environ)
    assert done.returncode == 1 and "CUDA error: invalid device ordinal" in done.stderr
