"""Deprecated module names of version 0.1 that its docs mention, and their current modules."""

import importlib
import importlib.machinery
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

MOVED = {
    "agentfactory.rollout.parsers": "agentfactory.rollout.text.parsers",
    "agentfactory.rollout.parsers.tags": "agentfactory.rollout.text.parsers.formats.tags",
    "agentfactory.tools.alfworld": "agentfactory.worlds.alfworld",
    "agentfactory.tools.harbor": "agentfactory.worlds.harbor",
    "agentfactory.tools.screens": "agentfactory.worlds.screens",
    "agentfactory.tools.shell": "agentfactory.tools.prebuilt.shell",
    "agentfactory.trainers.sync.checksum_proof": "agentfactory.trainers.sync.content_proof",
    "agentfactory.trainers.sync.file": "agentfactory.trainers.sync.file_sync",
    "agentfactory.trainers.sync.full": "agentfactory.trainers.sync.full_sync",
    "agentfactory.trainers.sync.protocol": "agentfactory.trainers.sync.weight_sync",
}
"""Old module or package -> new one."""


class _Finder:
    """A meta path finder that imports the new module for an old name, and warns with the new name."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        known = next((old for old in sorted(MOVED, reverse=True) if f"{name}.".startswith(f"{old}.")), None)
        if known is None:
            return None
        new = MOVED[known] + name.removeprefix(known)
        warnings.warn(f"{name} has moved: import {new}", FutureWarning, stacklevel=2)
        spec = importlib.machinery.ModuleSpec(name, self, origin=new)  # type: ignore[arg-type]
        # a module that is run by `python -m` is not in a package of this name
        spec.submodule_search_locations = None
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        assert spec.origin is not None
        module = importlib.import_module(spec.origin)
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        # the import system has replaced the module's own spec with that of the old name
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state

    def get_code(self, name: str) -> object:
        """Return the code object that `python -m` runs."""
        spec = self.find_spec(name)
        assert spec is not None
        assert spec.origin is not None
        found = importlib.util.find_spec(spec.origin)
        assert found is not None
        return found.loader.get_code(spec.origin)  # type: ignore[union-attr]


def install() -> None:
    """Register the finder, so that imports find the old names."""
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
