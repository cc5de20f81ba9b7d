"""The plug-in's entry: it waits until vLLM imports its loaders, and then stands beside them.

vLLM's server process never does, nor is anything of vLLM's imported here: to import its loaders takes seconds.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

_LOADERS = "vllm.model_executor.model_loader"


def register() -> None:
    """Make vLLM's loaders look for what was asked of ftw; whoever asks nothing gets what vLLM does without it.

    vLLM calls this in each of its processes, and may call it again.
    """
    loaders = sys.modules.get(_LOADERS)
    spec = getattr(loaders, "__spec__", None)
    if loaders is not None and not getattr(spec, "_initializing", False):
        _install(loaders)
    elif not any(isinstance(finder, AfterImport) and finder.name == _LOADERS for finder in sys.meta_path):
        sys.meta_path.insert(0, AfterImport(_LOADERS, _install))


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function with a module once that has been imported; it finds no module itself, and is used once."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]) -> None:
        self.name = name
        self._action = action

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the module's own spec, whose loader calls the function in the end; None for all other modules."""
        if fullname != self.name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._action(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _install(loaders: ModuleType) -> None:
    from ftw.integrations.vllm.hooks import install

    install(loaders)
