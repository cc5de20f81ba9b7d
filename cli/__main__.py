"""`python -m ftw.cli`, the same as the command `ftw`.

Python looks for all modules in the current folder first then, before a line of ours runs; of the command it does not.
"""

from .main import run

run()
