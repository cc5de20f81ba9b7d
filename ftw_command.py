"""The command `ftw`, up to where an interrupt is its own to handle.

Importing the command line takes a tenth of a second, in which Ctrl-C would be a traceback out of some import. Until
`ftw.cli.main` takes over, SIGINT does what it does to any program: it ends the process without a word. This module is
outside of the package, since what is inside imports all of it first, which is most of that time.
"""

from __future__ import annotations

import signal


def run() -> None:
    """Run the command line and exit with its status."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # a shell ignores it for jobs in the background
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ftw.cli.main import run as run_command_line

    run_command_line()
