"""Data that all checks share: settings, user, results on the store, and commands that start or repair the scheduler."""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from scheduler.core.config import Config
from scheduler.core.errors import SchedulerError, word
from scheduler.core.gpu import Gpu, gpu_ids_text
from scheduler.core.gpu_faults import GpuFault
from scheduler.core.job import Holding, Job
from scheduler.doctor.driver import Driver
from scheduler.doctor.finding import DoctorUser, name_of, status_of
from scheduler.doctor.programs import Programs, installer
from scheduler.gpus.monitor import DECLARED
from scheduler.store.paths import Places, check_not_for_another

LIMIT_S = 10.0  # seconds for all checks together
ANSWER_S = 5.0  # seconds for the store, and for external programs


@dataclass(frozen=True, slots=True)
class StoreSeen:
    """Results of the examination of the store. The examination writes nothing."""

    there: bool = False
    jobs: int = 0
    trouble: str = ""  # what is wrong with the store; empty: nothing
    kind: str = ""  # kind of trouble: damaged, moved, newer, outdated, elsewhere, denied, late
    start: str = ""  # command that starts the scheduler, which migrates an older store
    recover: str = ""  # command that rebuilds the store, or adopts a copied one
    host: str = ""  # the machine on which its scheduler runs, if that is another machine
    again: str = ""  # command that repeats this examination
    python: str = "python3"  # interpreter that runs gpujob


@dataclass(slots=True)
class StateDirSeen:
    """Contents of the store and of the daemon lock, read once for all checks."""

    alive: bool = False
    hidden: bool = False  # this user may not read the state folder
    pid: int | None = None
    running: dict[str, tuple[Any, str]] = field(default_factory=dict)  # setting in force → (value, origin)
    jobs: int = 0
    in_hand: list[Job] | None = None  # jobs that are starting, running or stopping; None: not known
    holdings: list[tuple[Holding, str]] = field(default_factory=list)
    gpus: list[Gpu] = field(default_factory=list)
    faults: dict[str, GpuFault] = field(default_factory=dict)  # by UUID
    store: StoreSeen = field(default_factory=StoreSeen)


class Examination:
    """One run of `gpujob doctor`: the input of all checks, and the results that later checks use.

    ``errors``: mistakes in the settings; if there are any, ``config`` holds only defaults. ``suffix``: options that a
    proposed command needs to address this scheduler.
    """

    def __init__(
        self,
        state_file: str,
        config: Config,
        config_file: str,
        errors: Sequence[SchedulerError],
        environ: Mapping[str, str],
        suffix: str,
    ) -> None:
        self.places, self.config, self.config_file, self.errors = Places(state_file), config, config_file, errors
        self.environ, self.suffix = environ, suffix
        self.who = DoctorUser(os.getuid(), name_of(os.getuid()), installer())
        self.owner = self.who.uid  # until `check_store` finds the scheduler's owner
        self.again = f"gpujob doctor{suffix}"
        self.said_gpus = config.gpus is not None or config.gpu_ids is not None
        self.dir_seen = StateDirSeen()
        self.until = time.monotonic() + LIMIT_S
        self.programs = Programs(environ, self.who.name, ANSWER_S)
        self.driver = Driver(environ)

    def whose(self) -> int:
        """Return the user id of the scheduler's owner.

        This is the owner of most of the scheduler's files, because a single file may have the wrong owner. If there are
        no files yet, this is the user who may start the scheduler here.
        """
        above = os.path.dirname(self.places.state_dir)
        tops = (self.places.state_dir, self.places.state_file, self.places.store, self.places.attempts)
        owners = Counter(status.st_uid for status in map(status_of, tops) if status is not None)
        if not owners:
            try:
                check_not_for_another(above)
            except SchedulerError:
                return os.stat(above).st_uid
            except OSError:
                return self.who.uid
            status = status_of(above)
            may = status is None or os.access(above, os.W_OK | os.X_OK, effective_ids=True)
            return self.who.uid if may or status is None else status.st_uid
        if not self.who.uid and (status := status_of(above)) is not None:
            owners[status.st_uid] += 1
        most = max(owners.values())
        return self.who.uid if owners[self.who.uid] == most else owners.most_common(1)[0][0]

    @property
    def others(self) -> bool:
        """Whether the user who runs `gpujob doctor` is not the owner of the scheduler.

        If so, `gpujob doctor` must not create files in the state folder when it runs as root. When it does not run as
        root, it cannot change anything in the state folder anyway.
        """
        return self.owner != self.who.uid

    @property
    def sudo(self) -> str:
        """The prefix of commands that only the owner may run; empty if the owner runs `gpujob doctor`."""
        return f"sudo -u {word(name_of(self.owner))} " if self.others else ""

    @property
    def recover(self) -> str:
        """The command that rebuilds the store, or adopts a copied store."""
        return f"{self.sudo}gpujob recover{self.suffix}"

    @property
    def upgrade(self) -> str:
        """The command that starts the scheduler, which migrates an older store."""
        return f"{self.sudo}gpujob start --detach{self.suffix}"

    @property
    def may_start(self) -> bool:
        """Whether state file, store and owner permit a start of the scheduler."""
        status = status_of(self.places.state_file)
        plain = status is None or stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
        return (
            plain and not self.dir_seen.hidden and not self.dir_seen.store.kind and not (self.others and self.who.uid)
        )

    @property
    def apart(self) -> str:
        """The command that starts the scheduler, without options for GPUs; empty if a start would be refused."""
        return f"{self.sudo}gpujob start --detach{self.suffix}" if self.may_start else ""

    @property
    def start(self) -> str:
        """The command that starts the scheduler; empty if a start would be refused.

        If the GPUs were declared on an earlier command line, and no setting declares them, the command declares the
        same GPUs.
        """
        ids = sorted(gpu.index for gpu in self.dir_seen.gpus)
        if (
            not self.apart
            or self.said_gpus
            or not ids
            or not all(g.uuid.startswith(DECLARED) for g in self.dir_seen.gpus)
        ):
            return self.apart
        number = ids == list(range(len(ids)))
        return f"{self.apart} {f'--gpus {len(ids)}' if number else f'--gpu-ids {gpu_ids_text(ids)}'}"

    def close(self) -> None:
        """End the GPU reader and the programs that have not answered."""
        self.driver.close()
        self.programs.close()
