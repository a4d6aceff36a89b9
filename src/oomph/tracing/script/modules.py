"""Which module an allocation belongs to, where a script has several models."""

from __future__ import annotations

from typing import Any

from oomph.tracing.modules import ModuleStack


class ScriptModules(ModuleStack):
    """Learns the names of modules when a model is first called."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}
        self._stack, self._modules = [""], [""]
        self._numbers = [0]
        self._handles: list[Any] = []

    def know(self, model: Any) -> None:
        for name, module in model.named_modules():
            self._names.setdefault(id(module), name)
