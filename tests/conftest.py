"""Options and report header of the test suite.

Pure tests need nothing from here; the fixtures of the live ones are in tests/live/conftest.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import hypothesis
import pytest

MEMORY = Path("/dev/shm")
ROOM = 4 << 30  # bytes: what the clusters of all xdist workers take at once, and more


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gateway")
    group.addoption(
        "--postgres", default="16", choices=("15", "16", "18"), help="version of PostgreSQL under the live tests"
    )
    group.addoption(
        "--endpoint",
        default="gateway",
        choices=("gateway", "postgres", "pgbouncer"),
        help="what the live tests examine; the other two prove the tests themselves",
    )
    group.addoption("--soak", action="store_true", help="run the tests marked soak: full sizes, minutes each")


def pytest_report_header(config: pytest.Config) -> str:
    command = [sys.executable, "-m", "gateway", "--version"]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=30)
    lines = (done.stdout.strip() or done.stderr.strip() or "gateway has no version").splitlines()
    version, endpoint = config.getoption("--postgres"), config.getoption("--endpoint")
    return f"{lines[-1]}; live tests: PostgreSQL {version}, endpoint {endpoint}"


def pytest_configure(config: pytest.Config) -> None:
    # Thousands of files are made and thrown away, with which disks of some kinds spend a third of the time.
    has_memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >= 2 * ROOM
    if "TMPDIR" not in os.environ and has_memory and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= ROOM:
        os.environ["TMPDIR"], tempfile.tempdir = str(MEMORY), None
    # The same examples in each run, so that a failure belongs to the change that is tested; chance is for --soak.
    hypothesis.settings.register_profile("same", derandomize=True, database=None)
    hypothesis.settings.register_profile("chance", max_examples=5000, deadline=None, print_blob=True)
    hypothesis.settings.load_profile("chance" if config.getoption("--soak") else "same")
    config.addinivalue_line("markers", "soak: full sizes, minutes; run with --soak")
    config.addinivalue_line("markers", "patient: waits longer than others before it fails")
    config.addinivalue_line("markers", "unbuilt(reason): examines what the gateway does not do yet")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("soak") and not config.getoption("--soak"):
            item.add_marker(pytest.mark.skip(reason="needs --soak"))
        if (mark := item.get_closest_marker("unbuilt")) and config.getoption("--endpoint") == "gateway":
            item.add_marker(pytest.mark.skip(reason=mark.args[0]))
