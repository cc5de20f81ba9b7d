"""How much memory this process holds, and held at most, as Linux says it in /proc."""

from __future__ import annotations

from ftw.errors import FtwError
from ftw.host.memory import PAGE_NBYTES


def resident_nbytes() -> int:
    """Return the resident memory of this process, shared pages included.

    Raises:
        FtwError: The system does not say.
    """
    return int(_read("statm").split()[1]) * PAGE_NBYTES


def max_resident_nbytes() -> int:
    """Return the most that it ever was; 0 if the kernel does not say.

    Raises:
        FtwError: The system does not say.
    """
    lines = _read("status").splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def _read(name: str) -> str:
    path = f"/proc/self/{name}"
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError as error:
        problem = f"cannot be read: {error.strerror}; what loading costs is measured by Linux's /proc"
        raise FtwError(f"{path}: resident memory: {problem}") from error
