"""The reaper: a small process that waits until nobody uses a segment of shared memory, and removes its name then.

It is run as a program, `python reaper_program.py DESCRIPTOR PATH OWN_LOCK USERS_LOCK`, so it imports nothing
but the standard library. The locks are `struct flock` in hexadecimal. A second reaper of one segment ends at once.
"""

from __future__ import annotations

import fcntl
import os
import signal
import sys

READY = b"ready"  # told through standard output once the descriptor that came with the call is closed


def reap(inherited: int, path: str, own_lock: bytes, users_lock: bytes) -> None:
    """Detach from the parent, wait for the users' lock, and remove `path` if it still names the segment.

    Args:
        inherited: A descriptor of the segment. It shares its parent's locks, so it is closed in favour of one's own.
        path: The name that the segment has, or will get.
        own_lock: Held by the one reaper of a segment.
        users_lock: Free for exclusive use when no user is left.
    """
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.fork():
        os._exit(0)  # init adopts the child, so it never becomes a zombie of a parent that runs on
    descriptor = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR)
    os.close(inherited)
    is_needed = _try_lock(descriptor, own_lock)
    os.write(sys.stdout.fileno(), READY)
    os.close(sys.stdout.fileno())
    if not is_needed:
        return
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLKW, users_lock)
    try:
        if os.path.samestat(os.fstat(descriptor), os.lstat(path)):
            os.unlink(path)
    except FileNotFoundError:
        pass  # the last user removed it, or its maker ended before it had a name


def _try_lock(descriptor: int, lock: bytes) -> bool:
    try:
        fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, lock)
    except BlockingIOError:
        return False
    return True


if __name__ == "__main__":
    reap(int(sys.argv[1]), sys.argv[2], bytes.fromhex(sys.argv[3]), bytes.fromhex(sys.argv[4]))
