"""The layout of a segment: what its file is named, how long it is, and the header that says what it holds.

    0            the table, up to a whole page
    size - page  header: magic 8 bytes | version u32 | state u32 | table's nbytes u64 | identity's nbytes u32 | identity

Integers are in the machine's order, the identity is UTF-8. The state is 0 while the table is being filled, and 1 when
it is ready; it is written last.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ftw.errors import SharedMemoryError, printable
from ftw.host.memory import PAGE_NBYTES
from ftw.host.shared.tmpfs import free_nbytes, is_tmpfs
from ftw.sizes import align_up, format_size

if TYPE_CHECKING:
    from pathlib import Path

_MAGIC = b"FTWTABLE"
_VERSION = 1
_FILLING, _READY = 0, 1
_HEADER = struct.Struct("=8sIIQI")
_MAX_HEADER_NBYTES = 4096
_MAX_IDENTITY_NBYTES = _MAX_HEADER_NBYTES - _HEADER.size
_NAME_DIGITS = 32  # of SHA-256; the header has the whole identity
_STATE = struct.Struct("=I")
_STATE_OFFSET = 12  # in the header
_OVERFLOW_UID, _USUAL_OVERFLOW_UID = "/proc/sys/kernel/overflowuid", 65534
_MODE = 0o600
DO_NOT_SHARE = "load with share=None"  # what always helps


@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """What a segment has to hold, and where.

    Attributes:
        name: The table's, for messages.
        identity: What tells its content from any other's.
        nbytes: Its size.
        folder: A tmpfs.
    """

    name: str
    identity: str
    nbytes: int
    folder: Path

    @property
    def path(self) -> Path:
        """The name that all processes of this user find the segment under."""
        return self.folder / f"{name_prefix()}{hashlib.sha256(self.identity.encode()).hexdigest()[:_NAME_DIGITS]}"

    @property
    def table_nbytes(self) -> int:
        """Size of the table in whole pages, and the offset of the header."""
        return align_up(self.nbytes, PAGE_NBYTES)

    @property
    def file_nbytes(self) -> int:
        """Size of the file."""
        return self.table_nbytes + PAGE_NBYTES

    def error(self, problem: str) -> SharedMemoryError:
        """Return the error that tells a problem with this segment."""
        return SharedMemoryError(f"{printable(str(self.path))}: {printable(self.name)}: {problem}")

    def no_space(self, descriptor: int) -> SharedMemoryError:
        """Return the error that tells how much is free beside an open file, and what to do."""
        free = free_nbytes(descriptor)
        return self.error(
            f"needs {format_size(self.file_nbytes)} of shared memory, {format_size(free)} free; "
            f"enlarge {printable(str(self.folder))} "
            f"(docker run --shm-size=SIZE, or mount -o remount,size=SIZE), or {DO_NOT_SHARE}"
        )


def name_prefix() -> str:
    """Return what the names of all segments of this user begin with; 32 hexadecimal digits follow."""
    return f"ftw-{os.geteuid()}-"


def check_user(spec: SegmentSpec) -> None:
    """Check that files of this process's user can be told from those of others.

    The kernel shows one number, the overflow id, for all users that a container has no number for. A process that runs
    under that number would take the files of all of them for its own.

    Raises:
        SharedMemoryError: They cannot.
    """
    overflow = _overflow_uid()
    if os.geteuid() == overflow:
        found = f"this process runs as user {overflow}, which stands for all users that have no number here"
        raise spec.error(f"{found}, so nobody's file can be trusted; run it as another user, or {DO_NOT_SHARE}")


def find_distrust(status: os.stat_result) -> str:
    """Return why a file cannot be a segment that this user made, and that nobody else can open; "" if it can.

    A name that is removed meanwhile leaves 0.
    """
    if not stat.S_ISREG(status.st_mode):
        return "is not a regular file; remove it"
    if status.st_uid != os.geteuid():
        trusted = f"only a file of user {os.geteuid()} is trusted"
        return f"belongs to user {status.st_uid}, {trusted}; have it removed, or {DO_NOT_SHARE}"
    if stat.S_IMODE(status.st_mode) != _MODE:
        return f"has mode {stat.S_IMODE(status.st_mode):o}, only a file of mode {_MODE:o} is trusted; remove it"
    if status.st_nlink > 1:
        return f"has {status.st_nlink} names, only a file of one name is trusted; remove it"
    return ""


def check_kind(spec: SegmentSpec, descriptor: int) -> None:
    """Check that an open file is in memory, and this user's alone.

    Raises:
        SharedMemoryError: It is not.
    """
    problem = find_distrust(os.fstat(descriptor))
    if problem:
        raise spec.error(problem)
    if not is_tmpfs(descriptor):
        raise spec.error("is not on a tmpfs, whose files are memory; remove it")


def _overflow_uid() -> int:
    try:
        with open(_OVERFLOW_UID, encoding="ascii") as file:
            return int(file.read())
    except (OSError, ValueError):  # no /proc
        return _USUAL_OVERFLOW_UID


def missing_nbytes(spec: SegmentSpec, descriptor: int) -> int:
    """Return how much memory the file still lacks: pages that were made are kept, whoever made them."""
    return max(0, spec.file_nbytes - os.fstat(descriptor).st_blocks * 512)  # blocks of 512 bytes, whatever the page


def check_free_space(spec: SegmentSpec, descriptor: int) -> None:
    """Check that the pages that the file still lacks fit.

    Raises:
        SharedMemoryError: They do not.
    """
    if missing_nbytes(spec, descriptor) > free_nbytes(descriptor):
        raise spec.no_space(descriptor)


def check_header(spec: SegmentSpec, descriptor: int) -> None:
    """Check that an open segment is the one that is wanted, complete or not.

    Raises:
        SharedMemoryError: It is another one, or none.
    """
    size = os.fstat(descriptor).st_size
    header = os.pread(descriptor, _MAX_HEADER_NBYTES, max(size - PAGE_NBYTES, 0)).ljust(_HEADER.size, b"\0")
    magic, version, _, nbytes, identity_nbytes = _HEADER.unpack_from(header)
    identity = header[_HEADER.size :][:identity_nbytes]
    if (magic, version) != (_MAGIC, _VERSION):
        found = f"{size} bytes that are no table of this version of ftw"
    elif (nbytes, identity) != (spec.nbytes, spec.identity.encode()):
        found = f"{nbytes} bytes of {printable(identity.decode(errors='replace'))}"
    elif size != spec.file_nbytes:
        found = f"a file of {size} bytes instead of {spec.file_nbytes}"
    else:
        return
    needed = f"{spec.nbytes} bytes of {printable(spec.identity)}"
    raise spec.error(f"holds {found}, {needed} are needed; end the processes that use it, or remove it")


def write_header(spec: SegmentSpec, descriptor: int) -> None:
    """Give a new file its size and its header.

    Raises:
        OSError: The header's page does not fit.
        SharedMemoryError: The identity is too long.
    """
    identity = spec.identity.encode()
    if len(identity) > _MAX_IDENTITY_NBYTES:
        raise spec.error(f"its identity has {len(identity)} bytes, {_MAX_IDENTITY_NBYTES} are allowed")
    os.ftruncate(descriptor, spec.file_nbytes)
    os.pwrite(
        descriptor, _HEADER.pack(_MAGIC, _VERSION, _FILLING, spec.nbytes, len(identity)) + identity, spec.table_nbytes
    )


def is_ready(spec: SegmentSpec, descriptor: int) -> bool:
    """Tell whether the table is complete."""
    return _STATE.unpack(os.pread(descriptor, _STATE.size, spec.table_nbytes + _STATE_OFFSET)) == (_READY,)


def mark_ready(spec: SegmentSpec, descriptor: int) -> None:
    """Say that the table is complete, for good."""
    os.pwrite(descriptor, _STATE.pack(_READY), spec.table_nbytes + _STATE_OFFSET)
