"""Tests of the findings of `gpujob doctor`: for each check, a table of observations and expected findings."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.core.errors import (
    LINK,
    NO_PLAIN_FILE,
    OWNER,
    UNSEEN,
    WRITERS,
    Exposure,
    FileTrouble,
    SchedulerError,
    UsageError,
    word,
)
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.gpu_snapshot import GpuProcess, GpuSnapshot
from scheduler.doctor import clock, disks, gpus, inotify, inputs, leftovers, logout, private_files, screen, store
from scheduler.doctor.clock import ClockSeen
from scheduler.doctor.disks import FolderSeen
from scheduler.doctor.examination import StoreSeen
from scheduler.doctor.finding import DoctorUser, Finding, Mark, worst
from scheduler.doctor.gpus import DriverSeen
from scheduler.doctor.inotify import InotifySeen
from scheduler.doctor.leftovers import Leftover, LeftSeen
from scheduler.doctor.logout import LoginSeen, Place
from scheduler.doctor.private_files import FilesSeen
from scheduler.doctor.screen import ScreenSeen
from scheduler.doctor.store import SchedulerSeen
from scheduler.intake.tail import cannot_be_read
from scheduler.system.filesystems import file_system
from tests.builders import T0, a_gpu

EVE, ROOT = DoctorUser(1000, "eve", "apt-get"), DoctorUser(0, "root", "dnf")
OK, WARN, BAD, UNKNOWN = Mark.OK, Mark.WARN, Mark.BAD, Mark.UNKNOWN


def whole(finding: Finding) -> None:
    """Assert the rules that each finding must obey.

    A finding with the mark OK proposes no command. The text of a finding with the mark UNKNOWN begins with "unknown: ".
    A finding with another mark says what is wrong.
    """
    assert finding.seen
    assert (finding.mark is OK) == (not finding.wrong) or finding.mark is UNKNOWN
    assert finding.mark is not UNKNOWN or finding.seen.startswith("unknown: ")
    assert finding.mark is not OK or not finding.mend
    assert "\n" not in finding.mend
    subprocess.run(["bash", "-n", "-c", finding.mend], check=True, capture_output=True)


@pytest.mark.parametrize(
    "text", ["/a b/c'd", "/x;rm -rf ~", "/new\nline", "/tab\t'\\$x", "/数据/é", "/\x1b[31m", "/bad\udcff", "-rf", ""]
)
def test_a_word_of_a_proposed_command_is_quoted_for_the_shell_on_one_line(text: str) -> None:
    quoted = word(text)
    assert "\n" not in quoted and "\x1b" not in quoted
    done = subprocess.run(["bash", "-c", f"printf %s {quoted}"], capture_output=True, check=True)
    assert done.stdout == text.encode("utf-8", "surrogateescape")


# -- screen -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "said, version",
    [("Screen version 4.09.00 (GNU) 30-Jan-22", (4, 9, 0)), ("Screen version 5.0.1 (build on …) \n", (5, 0, 1)),
     ("Screen version 4.00.03jw4 (FAU) 2-May-06", (4, 0, 3)), ("Screen version 5.1", (5, 1, 0)), ("", ()),
     ("bash: screen: not found", ())],
)  # fmt: skip
def test_s10_versions_of_screen_are_parsed(said: str, version: tuple[int, ...]) -> None:
    assert screen.screen_version(said) == version


@pytest.mark.parametrize(
    "version, setuid, mark",
    [("4.09.00", False, OK), ("4.09.00", True, BAD), ("5.0.0", True, BAD), ("5.0.0", False, OK), ("5.0.1", True, OK),
     ("5.1.0", True, OK), ("", True, UNKNOWN), ("", False, UNKNOWN)],
)  # fmt: skip
def test_s10_a_setuid_screen_before_5_0_1_is_reported_as_bad(version: str, setuid: bool, mark: Mark) -> None:
    """S10: GNU Screen before 5.0.1 with the setuid bit gets the mark BAD, because of CVE-2025-23395.

    The proposed command clears the setuid bit. If `screen` is a link, the command names the file to which the link
    leads.
    """
    said = f"Screen version {version} (GNU)" if version else "Segmentation fault"
    found = screen.judge(ScreenSeen("/usr/bin/screen", "/usr/bin/screen-4", said, setuid), EVE)
    whole(found)
    assert found.mark is mark and "/usr/bin/screen, which is /usr/bin/screen-4" in found.seen
    assert found.mend == ("sudo chmod u-s /usr/bin/screen-4" if setuid and mark is not OK else "")


@pytest.mark.parametrize(
    "who, wanted, mark, mend",
    [(EVE, False, OK, ""), (EVE, True, BAD, "sudo apt-get install -y screen"), (ROOT, True, BAD, "dnf install -y screen"),
     (DoctorUser(5, "x"), True, BAD, "")],
)  # fmt: skip
def test_s10_a_missing_screen_is_reported_only_if_needed(who: DoctorUser, wanted: bool, mark: Mark, mend: str) -> None:
    found = screen.judge(ScreenSeen(wanted=wanted), who)
    whole(found)
    assert (found.mark, found.mend) == (mark, mend)


# -- logging out ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cgroups, place, unit",
    [("0::/user.slice/user-1000.slice/session-3.scope\n", Place.SESSION, ""),
     ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/run-r1.scope\n", Place.MANAGER, ""),
     ("0::/user.slice/user-1000.slice/user@1000.service/app.slice/gpujob.service\n", Place.MANAGER, "gpujob.service"),
     ("0::/system.slice/gpujob.service\n", Place.SERVICE, "gpujob.service"),
     ("9:name=systemd:/user.slice/user-0.slice/session-c2.scope\n8:pids:/\n0::/\n", Place.SESSION, ""),
     ("8:pids:/system.slice/x.service\n0::/\n", Place.HIDDEN, ""), ("0::/\n", Place.HIDDEN, ""), ("", Place.HIDDEN, "")],
)  # fmt: skip
def test_h11_the_place_of_a_process_is_read_from_its_control_group(cgroups: str, place: Place, unit: str) -> None:
    assert logout.place_of(cgroups) == (place, unit)


IN_SESSION = LoginSeen(True, True, ("root",), (), False, Place.SESSION, start="gpujob start --detach")
LOGOUTS = [
    (LoginSeen(False), EVE, OK, ""),
    (replace(IN_SESSION, kills=False), EVE, OK, ""),
    (replace(IN_SESSION, kills=None), EVE, UNKNOWN, ""),
    (IN_SESSION, ROOT, OK, ""),
    (replace(IN_SESSION, exclude=("eve",)), EVE, OK, ""),
    (replace(IN_SESSION, only=("adam",)), EVE, OK, ""),
    (replace(IN_SESSION, only=("eve", "adam")), EVE, BAD, "enable-linger"),
    (IN_SESSION, EVE, BAD, "loginctl enable-linger && systemd-run --user --scope gpujob start --detach"),
    (replace(IN_SESSION, lingers=True), EVE, BAD, "systemd-run --user --scope"),  # lingering does not protect a session
    (replace(IN_SESSION, daemon=True), EVE, BAD, "KillUserProcesses=no"),  # a running process stays in its scope
    (replace(IN_SESSION, place=Place.HIDDEN), EVE, WARN, "systemd-run --user --scope"),
    (replace(IN_SESSION, place=Place.MANAGER, kills=False), EVE, BAD, "loginctl enable-linger"),
    (replace(IN_SESSION, place=Place.MANAGER, lingers=True), EVE, OK, ""),
    (replace(IN_SESSION, place=Place.MANAGER, lingers=None), EVE, UNKNOWN, ""),
]


@pytest.mark.parametrize("seen, who, mark, mend", LOGOUTS)
def test_h11_a_scheduler_ended_by_a_logout_is_reported(seen: LoginSeen, who: DoctorUser, mark: Mark, mend: str) -> None:
    """H11: Doctor reports whether a logout ends the scheduler.

    There are two cases. A scheduler that was started in the login session is ended by a logout if
    KillUserProcesses=yes is set; lingering does not prevent this. A scheduler that systemd's user manager runs is ended
    when the user's last session ends; lingering prevents this.
    """
    found = logout.judge(seen, who)
    whole(found)
    assert found.mark is mark and mend in found.mend and bool(mend) == bool(found.mend)
    assert found.mark is OK or found.wrong or found.mark is UNKNOWN


@pytest.mark.parametrize(
    "place, kill_mode, daemon, mark, mend",
    [(Place.SERVICE, "control-group", True, BAD, "sudo sh -c 'mkdir -p /etc/systemd/system/g.service.d && "),
     (Place.SERVICE, "mixed", False, WARN, "daemon-reload"), (Place.SERVICE, "process", True, OK, ""),
     (Place.SERVICE, "", True, UNKNOWN, ""), (Place.MANAGER, "control-group", True, BAD, "mkdir -p ~/.config/systemd/user/g.s"),
     (Place.MANAGER, "process", True, OK, "")],
)  # fmt: skip
def test_h12_a_unit_whose_stop_ends_all_jobs_is_reported(
    place: Place, kill_mode: str, daemon: bool, mark: Mark, mend: str
) -> None:
    """H12: If stopping the scheduler's systemd unit would end all jobs, Doctor proposes KillMode=process."""
    seen = replace(IN_SESSION, place=place, unit="g.service", kill_mode=kill_mode, daemon=daemon, lingers=True)
    found = logout.judge(seen, EVE)
    whole(found)
    assert found.mark is mark and mend in found.mend


@pytest.mark.parametrize("place", [Place.SERVICE, Place.MANAGER])
def test_h12_the_proposed_command_keeps_a_backslash_in_the_unit_name(place: Place, tmp_path: Path) -> None:
    """H12: In a unit name, systemd writes a dash as ``\\x2d``. The proposed command keeps this backslash."""
    unit = r"my\x2djobs.service"
    seen = replace(IN_SESSION, place=place, unit=unit, kill_mode="control-group", daemon=True, lingers=True)
    mend = logout.judge(seen, DoctorUser(0, "root")).mend.replace("/etc/", f"{tmp_path}/")
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >{tmp_path}/asked\n')
    (tmp_path / "systemctl").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run(["bash", "-c", mend], check=True, env=environ)
    folder = ".config/systemd/user" if place is Place.MANAGER else "systemd/system"
    assert (tmp_path / folder / f"{unit}.d" / "gpujob.conf").read_text() == "[Service]\nKillMode=process\n"
    assert "daemon-reload" in (tmp_path / "asked").read_text()


# -- inotify, clock ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seen, mark, mend",
    [(InotifySeen("", 128, 128, 8192, 8192, 3), OK, ""),
     (InotifySeen("instance", 128, 128, 8192, 8192, 128), WARN, "sudo sysctl -w fs.inotify.max_user_instances=1024"),
     (InotifySeen("instance", 4096, 4096, 1, 1, 4096), WARN, "sudo sysctl -w fs.inotify.max_user_instances=8192"),
     (InotifySeen("instance", 128, 0, 8192, 8192, 0), WARN, "sudo sysctl -w user.max_inotify_instances=1024"),
     (InotifySeen("instance", 128, 128, 1, 1, 9, "inotify"), BAD, "max_user_instances"),
     (InotifySeen("instance", None, None, None, None, None), WARN, "max_user_instances=1024"),
     (InotifySeen("watch", 128, 128, 8192, 8192, 3), WARN, "sudo sysctl -w fs.inotify.max_user_watches=524288"),
     (InotifySeen("watch", 128, 128, 8192, 10, 3), WARN, "sudo sysctl -w user.max_inotify_watches=524288"),
     (InotifySeen("", 128, 128, 8192, 8192, 120), WARN, "max_user_instances=1024"),
     (InotifySeen("", None, None, 8192, 8192, 120), UNKNOWN, ""), (InotifySeen("", 128, 128, 8192, 8192, None), UNKNOWN, ""),
     (InotifySeen("instance", 128, 128, 1, 1, 128, "poll"), OK, "")],
)  # fmt: skip
def test_an_exhausted_inotify_limit_is_reported(seen: InotifySeen, mark: Mark, mend: str) -> None:
    """If no inotify instance or no inotify watch is left, the proposed command raises the limit that is reached.

    The machine and the user namespace each have such a limit. The lower limit counts.
    """
    found = inotify.judge(seen, EVE)
    whole(found)
    assert found.mark is mark and mend in found.mend and bool(mend) == bool(found.mend)


@pytest.mark.parametrize(
    "seen, mark",
    [(ClockSeen(2026, True), OK), (ClockSeen(2026, False), WARN), (ClockSeen(2026, None), UNKNOWN), (ClockSeen(1970, True), BAD),
     (ClockSeen(2026, True, "/s.json", 61.0), WARN), (ClockSeen(2026, True, "/s.json", 59.0), OK)],
)  # fmt: skip
def test_a_wrong_or_unsynchronized_clock_is_reported(seen: ClockSeen, mark: Mark) -> None:
    found = clock.judge(seen, EVE)
    whole(found)
    assert found.mark is mark
    assert found.mend == ("sudo timedatectl set-ntp true" if mark in (WARN, BAD) else "")
    other = clock.judge(replace(seen, timedated=False), EVE)
    assert other.mend == ("sudo apt-get install -y chrony" if mark in (WARN, BAD) else "")


# -- folders ----------------------------------------------------------------------------------------------

FINE = FolderSeen(
    "state folder", "/srv/a b", True, file_system(0xEF53), 50_000, 9_000, again="gpujob doctor", move="mv it"
)
FOLDERS = [
    (FINE, OK, ""),
    (replace(FINE, there=False), BAD, "mkdir -p '/srv/a b'"),
    (replace(FINE, read_only=True, mount="/srv"), BAD, "sudo mount -o remount,rw /srv"),
    (replace(FINE, writable=False), BAD, "chmod u+rwx '/srv/a b'"),
    (replace(FINE, writable=False, owner="adam"), BAD, "sudo -u adam gpujob doctor"),
    (replace(FINE, owner="adam"), OK, ""),
    (replace(FINE, free_mib=15), BAD, "sudo du -xh / | sort -h | tail -n 20"),
    (replace(FINE, free_mib=16), WARN, "sudo du -xh / | sort -h | tail -n 20"),
    (replace(FINE, free_inodes=63), BAD, "sudo du -x --inodes / | sort -n | tail -n 20"),
    (replace(FINE, free_inodes=None, free_mib=1024), OK, ""),
    (replace(FINE, system=file_system(0x6969)), WARN, "mv it"),
    (replace(FINE, system=file_system(0x01021994)), WARN, "mv it"),
    (replace(FINE, system=file_system(0x4D44)), BAD, "mv it"),
    (replace(FINE, system=file_system(0xABCDEF)), UNKNOWN, ""),
    (replace(FINE, system=None), UNKNOWN, ""),
]


@pytest.mark.parametrize("seen, mark, mend", FOLDERS)
def test_e16_problems_of_the_disk_of_the_state_folder_are_reported(seen: FolderSeen, mark: Mark, mend: str) -> None:
    """E16, E08, E11, E19: Doctor reports problems of the state folder's disk, with the command that fixes each.

    The problems: the file system is read-only or full, has no inodes left, is in memory or on the network, or stores no
    file modes.
    """
    found = disks.judge(seen, EVE)
    whole(found)
    assert (found.mark, found.mend) == (mark, mend)


# -- GPUs -------------------------------------------------------------------------------------------------

DRIVER = DriverSeen("nvml", gpus=2, start="gpujob start --detach", python="/v/bin/python", imports=("", ""))
WITHOUT = "NVML: nvidia-ml-py cannot be imported: No module named 'pynvml'"
NO_PYNVML = ("pynvml cannot be imported: No module named 'pynvml'", "")
DRIVERS = [
    (DRIVER, OK, ""),
    (replace(DRIVER, gpus=0), WARN, "sudo reboot"),
    (replace(DRIVER, unread=True, way="", late_s=6), OK, ""),
    (replace(DRIVER, way="", late_s=6.0), BAD, "sudo reboot"),
    (replace(DRIVER, way="smi", imports=NO_PYNVML), WARN, "/v/bin/python -m pip install nvidia-ml-py"),
    (replace(DRIVER, way="smi"), WARN, "sudo apt-get install -y libnvidia-ml1"),
    (replace(DRIVER, way="", absent=True), WARN, "gpujob start --detach --gpus 1"),
    (replace(DRIVER, way="", absent=True, start=""), WARN, ""),
    (replace(DRIVER, way="", absent=True, declared=True), OK, ""),
    (
        replace(DRIVER, way="", problem="NVML: driver/library version mismatch: …"),
        BAD,
        "sudo sh -c 'modprobe -r nvidia_uvm",
    ),
    (replace(DRIVER, way="", problem="NVML: Driver Not Loaded"), BAD, "sudo modprobe nvidia"),
    (replace(DRIVER, way="", problem="NVML: Insufficient Permissions"), BAD, "sudo usermod -aG video eve"),
    (
        replace(DRIVER, way="", problem=WITHOUT, package="nvidia-ml-py", imports=(None, None), smi=False),
        BAD,
        "/v/bin/python -m pip install nvidia-ml-py",
    ),
    (replace(DRIVER, way="", problem="NVML: Unknown Error"), BAD, "sudo reboot"),
    (replace(DRIVER, way="", problem="NVML: its reader cannot be started", unasked=True), UNKNOWN, ""),
]


@pytest.mark.parametrize("seen, mark, mend", DRIVERS)
def test_problems_of_the_gpu_driver_are_reported(seen: DriverSeen, mark: Mark, mend: str) -> None:
    found = gpus.judge_driver(seen, EVE)
    whole(found)
    assert found.mark is mark and mend in found.mend and bool(mend) == bool(found.mend)


@pytest.mark.parametrize(
    "trouble, mark", [("", OK), (None, UNKNOWN), ("GPUtil cannot be imported: No module named 'distutils'", WARN)]
)
def test_a_gputil_that_cannot_be_imported_is_reported_with_the_fix(trouble: str | None, mark: Mark) -> None:
    """If GPUtil cannot be imported, the proposed command installs GPUtil and setuptools.

    GPUtil imports distutils, which Python 3.12 has removed and setuptools provides.
    """
    found = gpus.judge_gputil(replace(DRIVER, imports=("", trouble)))
    whole(found)
    assert found.mark is mark
    assert found.mend == ("/v/bin/python -m pip install gputil setuptools" if mark is WARN else "")
    assert gpus.judge_gputil(replace(DRIVER, smi=False, imports=(None, None))).mark is OK, "nothing to be asked by it"


def reading(used: int | None, *processes: GpuProcess, told: bool = True, **more: object) -> GpuSnapshot:
    values: dict[str, object] = {"uuid": "GPU-a", "ordinal": 3, "name": "H100", "memory_total_mib": 80_000}
    return GpuSnapshot(**{**values, "memory_used_mib": used, "processes": processes if told else None, **more})  # type: ignore[arg-type]


GHOSTS = [
    (reading(500), set(), None, ""),
    (reading(4000), set(), None, ""),  # 5 % of the memory: counted as used by driver and display
    (reading(4001), set(), BAD, "no process owns 3.9 GiB"),
    (reading(30_000, GpuProcess(7, 29_000)), set(), None, ""),
    (reading(30_000, GpuProcess(7, 20_000)), set(), BAD, "no process owns 9.8 GiB"),
    (reading(30_000, GpuProcess(7, 29_000)), {7}, BAD, "ended processes: pid 7"),
    (reading(30_000, GpuProcess(7, None)), set(), UNKNOWN, "how much memory each process uses"),
    (reading(30_000, told=False), set(), UNKNOWN, "shows no processes"),
    (reading(900, told=False), set(), None, ""),
    (reading(30_000), None, UNKNOWN, "outside of this container"),
    (reading(30_000, GpuProcess(7, 29_000)), None, None, ""),
    (reading(None), set(), UNKNOWN, ""),
]


@pytest.mark.parametrize("seen, dead, mark, wrong", GHOSTS)
def test_gpu_memory_without_a_living_process_is_reported(
    seen: GpuSnapshot, dead: set[int] | None, mark: Mark | None, wrong: str
) -> None:
    """If GPU memory in use belongs to no living process, Doctor reports this with the mark BAD.

    In a container, or without NVML, the processes are not known. Then the finding has the mark UNKNOWN.
    """
    (found,) = gpus.judge_gpus([seen], dead, EVE)
    whole(found)
    assert found.mark is (mark or OK) and wrong in found.wrong
    assert found.mend == ("sudo nvidia-smi --gpu-reset -i 3" if mark is BAD else "")


def test_gpus_without_problems_share_one_finding() -> None:
    lost = reading(None, lost=True, problem="GPU is lost", ordinal=1)
    mig = reading(10, ordinal=4, mig=True)
    worn = reading(10, ordinal=5, errors="2 uncorrected memory errors")
    found = gpus.judge_gpus([reading(10, ordinal=0), lost, reading(10, ordinal=2), mig, worn], set(), EVE)
    assert [(one.check, one.mark) for one in found] == [
        ("GPU", OK), ("GPU 1", BAD), ("GPU 4", WARN), ("GPU 5", BAD)
    ]  # fmt: skip
    assert found[0].seen == "0,2: H100, ended processes hold no memory"
    assert [one.mend for one in found[1:]] == [
        "sudo reboot", "sudo nvidia-smi -i 4 -mig 0", "sudo nvidia-smi --gpu-reset -i 5"
    ]  # fmt: skip


def test_a_gpu_that_gets_no_job_because_of_its_errors_is_reported_with_the_command_that_resumes_it() -> None:
    fault = GpuFault("declared:1", "XID 79 (GPU has fallen off the bus)", T0, T0)
    resumed = GpuFault("declared:2", "XID 48 (double-bit memory error)", T0, T0, active=False)
    known = {one.uuid: one for one in (fault, resumed)}
    (found,) = gpus.judge_faults([a_gpu(0), a_gpu(1), a_gpu(2)], known, "gpujob resume {}", T0)
    whole(found)
    assert (found.check, found.mark, found.mend) == ("GPU 1", BAD, "gpujob resume 1")
    assert found.seen.startswith("reported XID 79 (GPU has fallen off the bus) at ")


# -- the scheduler's files --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "seen, mark, mend",
    [(StoreSeen(), OK, ""), (StoreSeen(True, 1), OK, ""), (StoreSeen(True, trouble="torn", kind="damaged"), BAD, "RECOVER"),
     (StoreSeen(True, trouble="a copy", kind="moved"), BAD, "RECOVER"),
     (StoreSeen(True, trouble="newer", kind="newer"), BAD, "python3 -m pip install --upgrade gpujob"),
     (StoreSeen(True, trouble="there", kind="elsewhere", host="gpu 2"), BAD, "ssh 'gpu 2' AGAIN"),
     (StoreSeen(True, trouble="Permission denied", kind="denied"), UNKNOWN, ""), (StoreSeen(True, trouble="locked"), BAD, "")],
)  # fmt: skip
def test_problems_of_the_store_are_reported(seen: StoreSeen, mark: Mark, mend: str) -> None:
    found = store.judge_store(replace(seen, recover="RECOVER", again="AGAIN"))
    whole(found)
    assert (found.mark, found.mend) == (mark, mend)


@pytest.mark.parametrize(
    "seen, marks, mend",
    [(SchedulerSeen(True, 7), [OK], ""), (SchedulerSeen(False), [OK], ""), (SchedulerSeen(True, 7, True), [BAD], "kill -CONT 7"),
     (SchedulerSeen(False, running=2, start="START"), [WARN], "START"), (SchedulerSeen(False, running=None), [OK], ""),
     (SchedulerSeen(True, 7, others=("pid 9 of eve GPU 0",), free="1-3", apart="START"), [OK, WARN],
      "kill 7 && sleep 6 && START --gpu-ids 1-3"),
     (SchedulerSeen(True, 7, others=("pid 9 of eve GPU 0",), free="1", apart="sudo -u adam START", sudo="sudo -u adam "),
      [OK, WARN], "sudo -u adam kill 7 && sleep 6 && sudo -u adam START --gpu-ids 1"),
     (SchedulerSeen(False, others=("pid 9 of eve GPU 0",) * 5, free="1", apart="START"), [OK, WARN], "START --gpu-ids 1"),
     (SchedulerSeen(True, 7, others=("pid 9 of eve GPU 0",), free="", apart="START"), [OK, WARN], ""),
     (SchedulerSeen(True, 7, others=("pid 9 of eve GPU 0",), free="1"), [OK, WARN], ""),
     (SchedulerSeen(True, 7, True, sudo="sudo -u adam "), [BAD], "sudo -u adam kill -CONT 7"),
     (SchedulerSeen(False, running=None, others=("pid 9 of root GPU 0",), hidden="root", apart="START"), [UNKNOWN], "")],
)  # fmt: skip
def test_g04_a_stopped_scheduler_and_schedulers_with_the_same_gpus_are_reported(
    seen: SchedulerSeen, marks: list[Mark], mend: str
) -> None:
    """G04: Doctor reports a suspended scheduler (SIGSTOP), with the command that continues it.

    Doctor also reports other schedulers that manage the same GPUs as this scheduler. If some GPUs are managed by no
    other scheduler, the proposed command starts this scheduler on these GPUs.
    """
    found = store.judge_scheduler(seen)
    for one in found:
        whole(one)
    assert [one.mark for one in found] == marks and found[-1].mend == mend
    assert (
        not seen.others
        or seen.hidden
        or seen.free
        or "the others manage all GPUs that gpujob knows here" in found[-1].wrong
    ), "in words, where no command can help"


def test_files_that_are_not_private_are_reported_with_one_command_for_each_fault() -> None:
    seen = FilesSeen(("/h",), "eve", 9, foreign=("/h/a b",), open=("/h/x", "/h/y"), locked=("/h/z",))
    found = private_files.judge(seen, EVE)
    assert [(one.mark, one.mend) for one in found] == [
        (BAD, "sudo chown -h eve '/h/a b'"), (BAD, "chmod go-rwx /h/x /h/y"), (BAD, "chmod u+rwX /h/z")
    ]  # fmt: skip
    assert found[1].seen == "/h/x and 1 more"
    many = private_files.judge(FilesSeen(("/h h", "/l"), "eve", 99, open=tuple(f"/h h/{n}" for n in range(21))), EVE)
    assert many[0].mend == "find '/h h' /l -xdev ! -type l -perm /077 -exec chmod go-rwx {} +"
    others = private_files.judge(FilesSeen(("/h",), "adam", 9, open=("/h/x",)), DoctorUser(0, "root"))
    assert others[0].mend == "chmod go-rwx /h/x", "root needs no sudo"
    (odd,) = private_files.judge(FilesSeen(owner="root", no_file="/dev/null"), ROOT)
    assert odd.mark is BAD and odd.mend == "" and "--state-file" in odd.wrong, "a device is nothing of ours to change"
    for untold in (FilesSeen(owner="eve", untold="/h/sessions"), FilesSeen(owner="eve", number=9, whole=False)):
        (one,) = private_files.judge(untold, EVE)
        whole(one)
        assert one.mark is UNKNOWN
    assert private_files.judge(FilesSeen(number=9), EVE)[0].mark is OK


def exposed(path: str, exposure: Exposure) -> FileTrouble:
    return FileTrouble(f"not read: {exposure}", where=path, exposure=exposure)


FILES = [
    (None, OK, ""),
    (exposed("/a b/j", Exposure(WRITERS, "everybody may write it", "/a b/j", 0, "chmod o-w '/a b/j'")), BAD, "chmod o-w '/a b/j'"),
    (exposed("/a/j", Exposure(WRITERS, "of its folder, its group may write it", "/a", 0, "chmod g-w /a", " (or …)")), BAD, "chmod g-w /a"),
    (exposed("/a/j", Exposure(OWNER, "it belongs to user 7", "/a/j", 7, "chown it")), BAD, "sudo chown eve /a/j"),
    (exposed("/a $(b)/j", Exposure(OWNER, "it belongs to user 7", "/a $(b)/j", 7)), BAD, "sudo chown eve '/a $(b)/j'"),
    (exposed("/a/j", Exposure(LINK, "the link /a/l belongs to user 7", "/a/l", 7)), BAD, "sudo chown -h eve /a/l"),
    (UsageError("mem_threshold: must be a share", where="/a b/config.yaml:7", do="write 0.8"), BAD,
     "\"${EDITOR:-vi}\" +7 '/a b/config.yaml'"),
    (UsageError("not JSON: x", where="/a/llm.json:3:9"), BAD, '"${EDITOR:-vi}" +3 /a/llm.json'),
    (UsageError("nested too deeply", where="/a/j"), BAD, '"${EDITOR:-vi}" /a/j'),
    (cannot_be_read(OSError(13, "Permission denied"), "/a/j"), BAD, "chmod u+r /a/j"),
    (UsageError("unknown setting", where="GPUJOB_SET_X", do="did you mean GPUJOB_SET_Y?"), BAD, ""),
    (UsageError("unknown key 'screeen'", where="/a/config.yaml:2", do="did you mean screen?"), BAD,
     '"${EDITOR:-vi}" +2 /a/config.yaml'),
    (SchedulerError("is no plain file: nothing is read from it", where="/a/j", code=NO_PLAIN_FILE), BAD, "mv /a/j /a/j.old"),
    (cannot_be_read(OSError(22, "not a plain file"), "/a/config.yaml"), BAD, "mv /a/config.yaml /a/config.yaml.old"),
    (SchedulerError("is no plain file", where="/dev/null", do="name another one", code=NO_PLAIN_FILE), BAD, ""),
    (SchedulerError("cannot be looked at: Permission denied", where="/a/j", code=UNSEEN), BAD, ""),
]  # fmt: skip


@pytest.mark.parametrize("error, mark, mend", FILES)
def test_c37_input_files_that_others_can_write_are_named(error: SchedulerError | None, mark: Mark, mend: str) -> None:
    """C37: Doctor reports a file that other users can write, with the command that fixes this.

    For a mistake in a file, Doctor proposes an editor command that opens the file at the line of the mistake.
    """
    path = error.where if error is not None and error.where.startswith("/") else "/a/j"
    seen = "/a/j" if path.count(":") else path
    found = inputs.judge("config", seen, error, EVE, True, device=seen.startswith("/dev/"))
    whole(found)
    assert (found.mark, found.mend) == (mark, mend)
    assert not error or not error.do or error.do in found.wrong, "what would be right is said beside the command, too"


def test_h17_root_is_offered_no_chown_of_another_users_files() -> None:
    """H17: If root runs Doctor for another user's scheduler, Doctor does not propose to change a file's owner.

    If the scheduler's owner owns the file, the finding has the mark UNKNOWN, and the proposed command repeats the check
    as this owner. If a third user owns the file, the finding has the mark BAD, and no command is proposed.
    """
    mine = exposed("/a/j", Exposure(OWNER, "it belongs to user 7", "/a/j", 7, "make yourself its owner (chown): /a/j"))
    found = inputs.judge("jobs file", "/a/j", mine, ROOT, True, owner=7, again="sudo -u adam AGAIN")
    whole(found)
    assert (found.mark, found.mend) == (UNKNOWN, "sudo -u adam AGAIN")
    other = inputs.judge("jobs file", "/a/j", mine, ROOT, True, owner=8, again="sudo -u adam AGAIN")
    assert other.mark is BAD and other.mend == "", "nor is it known here whose it should be"


def test_leftover_processes_and_files_are_reported() -> None:
    left = tuple(Leftover(pid, 3, 1, f"python {pid}.py") for pid in (11, 12, 13, 14))
    held, free = (leftovers.judge(LeftSeen(left, held=held), EVE)[0] for held in (True, False))
    assert (held.mark, free.mark) == (WARN, BAD) and free.mend == held.mend == "kill 11 12 13 14"
    assert "and 1 more" in free.seen and "job 3" in free.wrong
    (files,) = leftovers.judge(LeftSeen(files=("/h/attempts/a b",)), EVE)
    theirs = leftovers.judge(LeftSeen(left, files=("/h/x",), sudo="sudo -u adam "), ROOT)
    assert [one.mend for one in theirs] == ["sudo -u adam kill 11 12 13 14", "sudo -u adam rm -r /h/x"]
    assert files.mark is WARN and shlex.split(files.mend) == ["rm", "-r", "/h/attempts/a b"]
    assert leftovers.judge(LeftSeen(untold="which …"), EVE)[0].mark is UNKNOWN
    assert leftovers.judge(LeftSeen(), EVE)[0].mark is OK


@pytest.mark.parametrize(
    "marks, mark", [([], OK), ([OK, UNKNOWN], UNKNOWN), ([UNKNOWN, WARN], WARN), ([WARN, BAD, OK], BAD)]
)
def test_the_worst_mark_is_the_mark_of_all_findings(marks: list[Mark], mark: Mark) -> None:
    assert worst(Finding("x", one, "seen") for one in marks) is mark
