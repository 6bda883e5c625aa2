"""GPUs, lists of GPU ids, and resource requests; shares are whole thousandths of a GPU."""

from __future__ import annotations

import functools
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from scheduler.core.errors import BACKWARDS, Refused, UsageError

WHOLE = 1000  # one GPU in thousandths
BY_MEMORY = 1  # thousandths booked by a job that books memory: so few that only memory limits the jobs per GPU
ANY_DEVICE = "*"  # profile of a request that a GPU or a MIG instance fulfills
HIGHEST_GPU_ID = 4095  # limits the memory that a list such as `0-999999999` would need
_INSTANCE = re.compile(r"\s*(?:([0-9]{1,4})\s*[xX*]\s*)?mig-([0-9][0-9a-z.+_-]{1,30})\s*", re.IGNORECASE)


def _is_plain(text: str) -> bool:
    """Return whether ``text`` is a whole number of at most 3 digits, which needs no decimal arithmetic."""
    return text.isascii() and text.isdigit() and len(text) < 4


def parts_of(text: str) -> int:
    """Return the thousandths of a GPU that a decimal text stands for, rounded up (``0.3334`` → 334).

    Raises UsageError if the text is no number, and Refused if it is below 0 or above HIGHEST_GPU_ID:
    no server has that many GPUs.
    """
    if _is_plain(text):
        return int(text) * WHOLE
    from decimal import ROUND_CEILING, Decimal, InvalidOperation, localcontext  # imported here: slow and rarely needed

    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        number = Decimal("NaN")
    if not number.is_finite():
        raise UsageError(f"the need for GPUs must be a number, not {text!r}", do="write 0.5, 1, 2 or 2x0.5")
    if number < 0:
        raise Refused(f"the need for GPUs cannot be below 0: {text}", do="write 0.5, 1, 2 or 2x0.5")
    if number > HIGHEST_GPU_ID:
        raise Refused(f"no server has {text} GPUs", do="write 0.5, 1, 2 or 2x0.5")
    with localcontext() as exact:
        exact.prec = len(text) + 10
        return int((number * WHOLE).to_integral_value(rounding=ROUND_CEILING))


@dataclass(frozen=True, slots=True, order=True)
class ResourceRequest:
    """The resources that a job needs, in one of four forms.

    - ``count`` different GPUs of one server, ``parts`` thousandths of each.
    - No GPU (``count`` 0): ``parts`` is the number of slots that the job takes; 0 stands for one slot. Slots limit how
      many jobs without GPUs run at the same time.
    - One MIG instance with the profile ``profile`` (such as ``1g.10gb``; ``count`` 1, ``parts`` 1000). A job that asks
      only for memory has the profile `ANY_DEVICE` if there are instances: it gets ``parts`` of a GPU or of an instance.
    - ``count`` GPUs that the job itself names (``parts`` 0): the job starts there even if other jobs and processes use
      these GPUs. Nothing is booked on them. While the job runs, only jobs that name the same GPUs are placed there.
    """

    count: int
    parts: int
    profile: str = ""

    @classmethod
    @functools.lru_cache(maxsize=1024)
    def parse(cls, text: str) -> ResourceRequest:
        """Read ``0.5``, ``2``, ``1.5`` (rounded up to 2 whole GPUs), ``2x0.5`` or ``mig-1g.10gb``.

        Raises UsageError if the text is no GPU need, and Refused if no server can have these GPUs.
        """
        instance = _INSTANCE.fullmatch(text)
        if instance:
            if instance[1]:
                what = f"a job cannot have several MIG instances: {text.strip()}"
                raise Refused(what, do=f"write mig-{instance[2]}: a process can use only one instance")
            return cls(1, WHOLE, instance[2].lower())
        match = re.fullmatch(r"\s*([0-9]{1,4})\s*[xX*]\s*(\S+)\s*", text)
        if match:
            count, parts = int(match.group(1)), parts_of(match.group(2))
            if not count:
                raise UsageError(
                    f"cannot read the need for GPUs {text.strip()!r}: it asks for 0 GPUs",
                    do="write 0, 0.5, 1, 2 or 2x0.5",
                )
            if parts > WHOLE:
                raise Refused(f"a part of one GPU cannot be above 1: {text}", do="write 2x0.5")
            return cls(count, parts) if count and parts else cls(0, 0)
        return cls.from_parts(parts_of(text))

    @classmethod
    def from_parts(cls, total: int) -> ResourceRequest:
        """Return the request for ``total`` thousandths of a GPU; more than one GPU is rounded up to whole GPUs."""
        if total <= 0:
            return cls(0, 0)
        if total <= WHOLE:
            return cls(1, total)
        return cls(-(-total // WHOLE), WHOLE)

    @classmethod
    def of_slots(cls, slots: int) -> ResourceRequest:
        """Return the request of a job that needs no GPU and takes this number of slots."""
        return cls(0, slots if slots > 1 else 0)

    @property
    def slots(self) -> int:
        """Number of slots that a job without GPUs takes; 0 if the job requests GPUs."""
        return 0 if self.count else max(1, self.parts)

    @property
    def instance(self) -> str:
        """The profile of the MIG instance that the job needs; empty if it does not ask for an instance."""
        return "" if self.profile == ANY_DEVICE else self.profile

    @property
    def by_name(self) -> bool:
        """True if the request lists the ids of its GPUs (option `on`), so that the scheduler does not choose them."""
        return self.count > 0 and self.parts == 0

    def __str__(self) -> str:
        if self.instance:
            return f"mig-{self.instance}"
        if self.by_name:
            return f"{self.count} by name"
        if self.slots > 1:
            return f"{self.slots} slots"
        if self.count <= 1:
            return decimal_text(self.count * self.parts)
        if self.parts == WHOLE:
            return str(self.count)
        return f"{self.count}x{decimal_text(self.parts)}"

    @property
    def total(self) -> int:
        """Thousandths of a GPU that the request books on all GPUs together; 0 if it books nothing."""
        return self.count * self.parts

    def in_words(self) -> str:
        """Return the request in words: ``0.5 of one GPU``, ``4 whole GPUs of one server``."""
        if self.count == 0:
            return "no GPU" if self.slots == 1 else f"no GPU and {self.slots} slots"
        if self.by_name:
            return f"{self.count} GPU{'s' * (self.count > 1)} that it names"
        if self.instance:
            return f"one MIG instance {self.instance}"
        if self.count == 1:
            return "one whole GPU" if self.parts == WHOLE else f"{decimal_text(self.parts)} of one GPU"
        if self.parts == WHOLE:
            return f"{self.count} whole GPUs of one server"
        return f"{decimal_text(self.parts)} of each of {self.count} GPUs of one server"


@functools.lru_cache(maxsize=1024)
def rounding_note(text: str) -> str:
    """Return the note that a need such as 1.5 was rounded up to whole GPUs; empty if the need was not rounded."""
    if _is_plain(text):
        return ""
    from decimal import Decimal, InvalidOperation

    try:
        need = ResourceRequest.parse(text)
        number = Decimal(text.strip())
    except (UsageError, Refused, InvalidOperation):
        return ""
    return (
        f"the request for {text.strip()} GPUs is rounded up to {need.count} whole GPUs"
        if need.count > 1 and number != need.count
        else ""
    )


def decimal_text(parts: int) -> str:
    """Return thousandths as the shortest decimal text: 500 → ``0.5``, 1000 → ``1``."""
    text = f"{parts // WHOLE}.{parts % WHOLE:03d}".rstrip("0").rstrip(".")
    return text


GPU_STATES = ("AVAILABLE", "BUSY", "PAUSED", "STALE", "GONE", "UNHEALTHY", "FOREIGN", "DRAINING")


def gpu_state(*, paused: bool, admission: str, booked: bool, outside: bool = False) -> str:
    """Return the state of a GPU, one of `GPU_STATES`. ``outside``: other schedulers have booked the whole GPU.

    ``admission``: the state according to the readings of the GPU (`core/gpu_admission.py: GpuAdmission.state`); empty if
    the readings do not block the GPU.
    """
    return "PAUSED" if paused else admission or ("BUSY" if booked else "FOREIGN" if outside else "AVAILABLE")


def parse_gpu_ids(text: str) -> tuple[int, ...] | None:
    """Read a list such as ``2``, ``0,2``, ``0-3`` or ``0-1,5``. Return the ids ascending and without duplicates.

    An empty text gives None, which means any GPU. Raises UsageError if the text is no such list, and Refused for an id
    above HIGHEST_GPU_ID.
    """
    if not text.strip():
        return None
    ids: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9}))?\s*", piece)
        if not match:
            raise UsageError(f"{text.strip()!r} is not a GPU list", do="write 2 or 0,2 or 0-3 or 0-1,5")
        low = int(match.group(1))
        high = int(match.group(2)) if match.group(2) else low
        if high < low:
            what = f"the GPU range {piece.strip()} is backwards"
            raise UsageError(what, do=f"write {high}-{low}", code=BACKWARDS)
        if high > HIGHEST_GPU_ID:
            raise Refused(f"there is no GPU {high}", do=f"GPU ids go from 0 to {HIGHEST_GPU_ID} at most")
        ids.update(range(low, high + 1))
    return tuple(sorted(ids))


def gpu_ids_text(ids: Iterable[int]) -> str:
    """Return ids as a short list that `parse_gpu_ids` can read: (0, 1, 2, 5) → ``0-2,5``."""
    runs: list[list[int]] = []
    for gpu in sorted(ids):
        if runs and gpu == runs[-1][1] + 1:
            runs[-1][1] = gpu
        else:
            runs.append([gpu, gpu])
    pieces = []
    for low, high in runs:
        if high - low >= 2:
            pieces.append(f"{low}-{high}")
        else:
            pieces.extend(str(gpu) for gpu in range(low, high + 1))
    return ",".join(pieces)


def named_gpus(ids: Collection[int]) -> str:
    """Return ``GPU 2`` for one id, and ``GPUs 0,2`` for several."""
    return f"GPU{'s' * (len(ids) > 1)} {gpu_ids_text(ids)}"


def is_are(ids: Collection[object]) -> str:
    """Return the verb that agrees with `named_gpus`."""
    return "is" if len(ids) == 1 else "are"


def mask_of(ids: Iterable[int]) -> int:
    """Return the bit mask in which the bit of each id is set."""
    mask = 0
    for gpu in ids:
        mask |= 1 << gpu
    return mask


def ids_of(mask: int) -> tuple[int, ...]:
    """Return the ids whose bits are set in ``mask``, ascending."""
    ids = []
    while mask:
        low = mask & -mask
        ids.append(low.bit_length() - 1)
        mask ^= low
    return tuple(ids)


Links = tuple[tuple[int, int], ...]  # index of another GPU, link to it


@dataclass(frozen=True, slots=True)
class Gpu:
    """A managed GPU: its index, UUID, name, server, and total memory in MiB (None: the size is not known).

    ``node``, ``partition``: on a cluster, the names of the server and of its partition; else empty. ``links``: indexes
    of other GPUs, each with its link (`core/topology.py: Link`); a GPU that is not listed counts as `Link.SYSTEM`.
    ``profile``: the GPU is a MIG instance with this profile, such as ``1g.10gb``; its index is (index of its card + 1) *
    100 + its number on the card.
    """

    index: int
    uuid: str
    name: str = "declared"
    server: int = 0
    memory_mib: int | None = None
    node: str = ""
    partition: str = ""
    links: Links = ()
    profile: str = ""
