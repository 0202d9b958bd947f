"""The files around the code hold together: build, licence, Makefile, containers.

No Docker is needed: the compose file is read, and the scripts that it mounts are looked up.
"""

import importlib
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import metadata
from pathlib import Path
from typing import Any

import pytest
import yaml

from gateway.topology import check

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
IS_PURE = os.environ.get("GATEWAY_IMPL") == "pure"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"])


def module_name(file: Path) -> str:
    return ".".join((*file.relative_to(ROOT).parent.parts, file.name.split(".")[0]))


def test_hot_modules_when_imported_are_of_the_chosen_variant() -> None:
    suffix = ".py" if IS_PURE else ".so"
    modules = [importlib.import_module(module_name(pxd)) for pxd in (ROOT / "gateway").rglob("*.pxd")]
    assert modules
    assert [module.__file__ for module in modules if not (module.__file__ or "").endswith(suffix)] == []


def test_hot_modules_with_a_plain_source_never_lack_it() -> None:
    assert [pxd for pxd in (ROOT / "gateway").rglob("*.pxd") if not pxd.with_suffix(".py").exists()] == []


def test_extensions_in_the_tree_all_have_their_declarations() -> None:
    # An extension whose .pxd is gone would go on hiding the .py beside it.
    extensions = {module_name(file) for file in (ROOT / "gateway").rglob("*.so")}
    assert extensions <= {module_name(file) for file in (ROOT / "gateway").rglob("*.pxd")}


def test_setup_with_unknown_build_variant_ends_in_one_sentence() -> None:
    environment = {**os.environ, "GATEWAY_BUILD": "fast"}
    command = [sys.executable, "setup.py", "--name"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, "GATEWAY_BUILD is 'fast': it may be release, debug or pure\n")


def test_version_when_installed_is_the_one_of_pyproject() -> None:
    assert metadata("gateway")["Version"] == PROJECT["version"]


def test_licence_is_the_one_that_pyproject_names() -> None:
    assert (ROOT / "LICENSE").read_text().startswith(f"{PROJECT['license']} License")


@pytest.mark.parametrize("target", ["build", "demo", "test", "bench", "lint", "format", "clean"])
def test_makefile_target_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_ci_is_an_executable_strict_script_that_runs_the_tests() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert {"set -euo pipefail", "make test"} <= set(script.read_text().splitlines())


def test_compose_has_a_primary_two_standbys_and_the_gateway(services: dict[str, Any]) -> None:
    assert set(services) == {"pg1", "pg2", "pg3", "gateway"}
    assert services["gateway"]["build"] == "."
    assert {services[name]["image"] for name in ("pg1", "pg2", "pg3")} == {"postgres:17"}


def test_compose_services_all_have_a_bounded_health_check(services: dict[str, Any]) -> None:
    for service in services.values():
        assert service["healthcheck"]["test"][0] == "CMD"
        assert {"interval", "timeout", "retries"} <= set(service["healthcheck"])


def test_compose_services_start_when_what_they_need_is_healthy(services: dict[str, Any]) -> None:
    needed = {name: set(service.get("depends_on", {})) for name, service in services.items()}
    assert needed == {"pg1": set(), "pg2": {"pg1"}, "pg3": {"pg1"}, "gateway": {"pg1", "pg2", "pg3"}}
    assert all(
        condition == {"condition": "service_healthy"}
        for service in services.values()
        for condition in service.get("depends_on", {}).values()
    )


def test_compose_mounts_only_files_that_exist(services: dict[str, Any]) -> None:
    mounts = [mount.split(":")[0] for service in services.values() for mount in service["volumes"]]
    files = [mount for mount in mounts if mount.startswith(".")]
    assert files
    assert [file for file in files if not (ROOT / file).is_file()] == []


def test_compose_topology_is_valid_and_names_every_node(services: dict[str, Any]) -> None:
    file = ROOT / "docker" / "topology.toml"
    assert check(file) == []
    nodes = tomllib.loads(file.read_text())["cluster"]["main"]["node"]
    assert {node["host"] for node in nodes} == set(services) - {"gateway"}


@pytest.mark.parametrize("script", sorted((ROOT / "docker").glob("*.sh")), ids=lambda path: path.name)
def test_container_script_parses_and_is_strict(script: Path) -> None:
    assert subprocess.run(["bash", "-n", script], timeout=10, check=False).returncode == 0
    assert "set -euo pipefail" in script.read_text()
