"""`python -m ftw.cli`, the same as the command `ftw`."""

from .main import run

run()
