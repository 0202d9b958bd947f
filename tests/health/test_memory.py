"""The state file: what was saved comes back, or who starts is told; half a file is never there."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from health.memory import MemoryFile, MemoryFileError
from health.view import Epoch, Memory

MEMORY = Memory(
    epoch=Epoch("pg1", 7714020726602855821, 3, 5),
    synchronous_standby_names='ANY 1 ("pg-2", *)',
    synchronous_standbys=2,
    promoting="pg2",
    promoted_at=1764552924.25,
    former=("pg3",),
    usurpers=("pg4",),
    paused=True,
)
OTHER = Memory(epoch=Epoch("pg2", 7714020726602855821, 4, 6))

needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may read and write everything")


@pytest.fixture
def file(tmp_path) -> MemoryFile:
    return MemoryFile(tmp_path / "main.state")


def test_memory_saved_comes_back(file):
    file.save(MEMORY)
    assert file.load() == MEMORY


def test_memory_saved_again_is_the_last_one(file):
    file.save(MEMORY)
    file.save(OTHER)
    assert file.load() == OTHER
    assert os.listdir(file.path.parent) == ["main.state"]


@settings(max_examples=50, deadline=None)
@given(st.builds(Memory, paused=st.booleans(), promoting=st.none() | st.text(), former=st.lists(st.text()).map(tuple)))
def test_memory_of_any_kind_comes_back(tmp_path_factory, memory):
    file = MemoryFile(tmp_path_factory.getbasetemp() / "any.state")
    file.save(memory)
    assert file.load() == memory


def test_memory_file_is_for_its_owner_and_for_eyes(file):
    file.save(MEMORY)
    assert stat.S_IMODE(file.path.stat().st_mode) == 0o600
    assert '"primary": "pg1"' in file.path.read_text()


def test_memory_without_a_file_is_empty(file):
    assert file.load() == Memory()


def test_memory_of_an_older_version_lacks_nothing(file):
    file.path.write_text('{"epoch": {"primary": "pg1", "timeline": 2}, "of": "a newer one"}')
    assert file.load() == Memory(epoch=Epoch("pg1", timeline=2))


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"epoch": 1}', b'{"promoting": "\xff"}', b"{}{}", b"\0" * 512]
)
def test_memory_of_garbage_stops_the_start(file, content):
    file.path.write_bytes(content)
    with pytest.raises(MemoryFileError, match=r"main\.state is no state file .*: move it away to begin anew"):
        file.load()
    assert file.path.read_bytes() == content


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 400))
def test_memory_cut_short_is_never_taken_for_a_whole_one(tmp_path_factory, size):
    file = MemoryFile(tmp_path_factory.getbasetemp() / "cut.state")
    file.save(MEMORY)
    content = file.path.read_bytes()
    file.path.write_bytes(content[: min(size, len(content) - 3)])
    with pytest.raises(MemoryFileError):
        file.load()


def test_memory_that_is_a_directory_cannot_be_read_nor_written(file):
    file.path.mkdir()
    with pytest.raises(MemoryFileError, match="cannot be read: Is a directory"):
        file.load()
    with pytest.raises(MemoryFileError, match="cannot be written: Is a directory"):
        file.save(MEMORY)


@needs_permissions
def test_memory_that_may_not_be_read_stops_the_start(file):
    file.save(MEMORY)
    file.path.chmod(0)
    with pytest.raises(MemoryFileError, match="cannot be read: Permission denied"):
        file.load()


@needs_permissions
def test_memory_in_a_directory_that_may_not_be_written_is_told(file):
    file.save(MEMORY)
    file.path.parent.chmod(0o500)
    try:
        with pytest.raises(MemoryFileError, match="cannot be written: Permission denied"):
            file.save(OTHER)
    finally:
        file.path.parent.chmod(0o700)
    assert file.load() == MEMORY


def test_memory_in_a_directory_that_is_not_there_is_told(tmp_path):
    file = MemoryFile(tmp_path / "gone" / "main.state")
    assert file.load() == Memory()
    with pytest.raises(MemoryFileError, match="cannot be written: No such file or directory"):
        file.save(MEMORY)


class PowerLossError(BaseException):
    """The machine ends here."""


@pytest.mark.parametrize("last", ["fsync", "replace"])
def test_memory_after_a_crash_before_the_rename_is_the_old_one(file, monkeypatch, last):
    file.save(MEMORY)

    def crash(*_: object) -> None:
        raise PowerLossError

    with monkeypatch.context() as patched:
        patched.setattr(os, last, crash)
        with pytest.raises(PowerLossError):
            file.save(OTHER)
    assert file.load() == MEMORY
    file.save(OTHER)  # what the crash has left is in nobody's way
    assert file.load() == OTHER


def test_memory_is_on_disk_before_it_has_its_name(file, monkeypatch):
    done = []
    sync, replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        done.append("directory" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "content")
        sync(descriptor)

    def rename(old: Path, new: Path) -> None:
        done.append("name")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", rename)
    file.save(MEMORY)
    assert done == ["content", "name", "directory"]


def test_memory_on_a_full_disk_is_told_and_keeps_the_old_one(file, monkeypatch):
    file.save(MEMORY)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(MemoryFileError, match="cannot be written: No space left on device"):
            file.save(OTHER)
    assert file.load() == MEMORY
