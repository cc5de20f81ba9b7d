"""Bindings to other libraries, one package for each; none is imported with ftw, and none is needed by it.

`dispatch` decides what `ftw.offload` was given. Imports: `ftw.offloading`, `ftw.loading` and what they import.
"""

from ftw.integrations.dispatch import offload

__all__ = ["offload"]
