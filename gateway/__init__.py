"""One endpoint in front of a PostgreSQL primary and its streaming standbys.

Every module of the hot path exists twice under one name: compiled (an extension beside the source) and plain. Python
prefers the extension; ``GATEWAY_IMPL=pure`` makes this package, and it alone, load its sources instead. The choice is
made here, once, before any submodule is imported.
"""

import os
import sys
from collections.abc import Sequence
from importlib.machinery import FileFinder, ModuleSpec, SourceFileLoader
from types import ModuleType

__version__: str


def __getattr__(name: str) -> str:
    # Looked up by who asks: what reads it is a third of what a worker would import.
    if name != "__version__":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("gateway")
    except PackageNotFoundError:  # run from a source tree that was never installed
        return "0+unknown"


class _SourcesOnly:
    """A meta path finder that knows only the .py files of this package."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("gateway.") or path is None:
            return None
        for folder in path:
            spec = FileFinder(folder, (SourceFileLoader, [".py"])).find_spec(name)
            if spec is not None and spec.loader is not None:
                return spec
        return None


if os.environ.get("GATEWAY_IMPL") == "pure":
    sys.meta_path.insert(0, _SourcesOnly)


def variant() -> str:
    """Return "compiled" or "pure": which twin of the hot modules this process runs."""
    from gateway.worker import sock

    return "pure" if (sock.__file__ or "").endswith(".py") else "compiled"
