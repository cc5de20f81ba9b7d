"""Bindings to other libraries, one package for each; none is imported with ftw, and none is needed by it.

`dispatch` decides what `ftw.offload` was given. It is imported when that is first asked for, since vLLM imports this
package in each of its processes. Imports: `ftw.offloading`, `ftw.loading` and what they import.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftw.integrations.dispatch import offload

__all__ = ["offload"]


def __getattr__(name: str) -> Any:
    if name != "offload":
        raise AttributeError(f"module 'ftw.integrations' has no attribute '{name}'")
    from ftw.integrations.dispatch import offload

    return offload
