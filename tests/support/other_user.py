"""Another user of the same machine, whom nothing binds but the file system: what it does must not matter."""

import os
import subprocess
import sys
import textwrap

import pytest

OTHER_UID = 65533  # no user has it, and it is not the overflow id (65534)

_BECOME_OTHER = """
import os
os.setgroups([])
os.setresgid({uid}, {uid}, {uid})
os.setresuid({uid}, {uid}, {uid})
os.umask({umask})
"""

needs_other_user = pytest.mark.skipif(
    not hasattr(os, "setresuid") or os.geteuid() != 0, reason="needs root, which can act as another user"
)


def run_as_other(code: str, *arguments: str, before: str = "", umask: int = 0o022) -> str:
    """Run Python code as another user, in a process of its own; return what it prints.

    Args:
        code: What runs as the other user, with `arguments` in `sys.argv[1:]`.
        arguments: Its arguments.
        before: What runs before, as root: imports of files that the other user may not be able to read.
        umask: Of the other user.
    """
    become = _BECOME_OTHER.format(uid=OTHER_UID, umask=umask)
    program = "\n".join(("import sys", textwrap.dedent(before), become, textwrap.dedent(code)))
    process = subprocess.run(
        [sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False, timeout=120
    )
    assert process.returncode == 0, process.stderr
    return process.stdout
