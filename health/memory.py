"""The small file that keeps a Memory: a gateway that starts again knows what it knew.

1. A save is whole or not there: written beside the file, forced to disk, renamed.
2. A file that cannot be read stops the start; one that cannot be written is told, and what hung on it is not done.

Called by health.keeper and by who starts it. Manual: none; see rename(2), fsync(2).
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from health.view import Memory


class MemoryFileError(Exception):
    """A state file that cannot be used; the text is one sentence for the operator."""


class MemoryFile:
    """The state file of one cluster."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Memory:
        """Return what was saved last, an empty memory where there is no file. Raises MemoryFileError."""
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=Memory)
        except FileNotFoundError:
            return Memory()
        except OSError as error:
            raise MemoryFileError(f"{self.path} cannot be read: {error.strerror}") from None
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise MemoryFileError(f"{self.path} is no state file ({error}): move it away to begin anew") from None

    def save(self, memory: Memory) -> None:
        """Save a memory; blocks until it is on disk. Raises MemoryFileError."""
        beside = self.path.with_name(f"{self.path.name}.new")
        try:
            with open(beside, "wb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
                file.write(msgspec.json.format(msgspec.json.encode(memory)) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(beside, self.path)
            directory = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(directory)
            finally:
                os.close(directory)
        except OSError as error:
            raise MemoryFileError(f"{self.path} cannot be written: {error.strerror}") from None
