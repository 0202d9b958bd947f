"""What the documents say exists: commands, targets, settings, files; and the generated pages are current.

What operators read names a setting by the path of its key, in backticks.
"""

import re
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

from docs.generate import PAGES, SHOWN, VERBS, WITHOUT_EFFECT
from gateway.cli import app
from gateway.console.commands import COMMANDS
from gateway.console.tables import TABLES
from gateway.settings import PARAMETERS
from gateway.topology import check

ROOT = Path(__file__).parents[1]
OPERATORS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DOCUMENTS = [*OPERATORS, ROOT / "ARCHITECTURE.md", ROOT / "tests" / "README.md"]
SETTINGS = {f"{p.section}.{p.name}": p for p in PARAMETERS}

CODE = re.compile(r"```.*?```|`[^`\n]+`|^ {4,}.+$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"(?:(?<=[`/])|(?<=^    )|(?<=\n    ))gateway (?P<name>[a-z]+|--[a-z]+)(?P<rest>[^`\n]*)")
TARGET = re.compile(r"(?:(?<=`)|(?<=\n    ))make ([a-z]+)")
SETTING = re.compile(r"`((?:front|cluster|database|user|console|metrics)\.[\w.]+)`")
TOML = re.compile(r"```toml\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)\)")

every_document = pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))


def code(document: Path) -> str:
    """All that stands in a document as code."""
    return "\n".join(CODE.findall(document.read_text()))


@pytest.mark.parametrize("page", PAGES)
def test_generated_page_is_what_the_generator_writes(page: str):
    assert (ROOT / "docs" / page).read_text() == PAGES[page](), "run python docs/generate.py"


def test_generator_has_words_for_every_table_and_command():
    assert (set(SHOWN), set(VERBS)) == (set(TABLES), set(COMMANDS))


@pytest.mark.parametrize("setting", sorted(WITHOUT_EFFECT - {"cluster.NAME.node.weight"}))
def test_setting_told_to_be_without_effect_is_read_nowhere(setting: str):
    # A weight is handed to health and shown by the console, and decides nothing yet.
    assert setting in SETTINGS
    name = setting.rpartition(".")[2]
    readers = [file for package in ("gateway", "health") for file in (ROOT / package).rglob("*.py")]
    found = [str(file.relative_to(ROOT)) for file in readers if re.search(rf"\.{name}\b", file.read_text())]
    assert found == [], f"{setting} has an effect now: take it off the list in docs/generate.py"


@every_document
def test_commands_in_document_exist_with_their_options(document: Path):
    group = typer.main.get_command(app)
    for found in COMMAND.finditer(code(document)):
        name, options = found["name"], set(re.findall(r"--[a-z]+", found["rest"]))
        arguments = [name, "--help"] if not name.startswith("-") else [name]
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, f"gateway {name}"
        command = getattr(group, "commands", {}).get(name, group)
        assert options <= {option for parameter in command.params for option in parameter.opts}, f"gateway {name}"


@every_document
def test_make_targets_in_document_exist(document: Path):
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(TARGET.findall(code(document))) <= targets


def test_readme_begins_with_the_two_commands_and_they_are_found():
    assert TARGET.findall(code(ROOT / "README.md"))[:2] == ["demo", "test"]
    assert {found["name"] for found in COMMAND.finditer(code(ROOT / "README.md"))} >= {"serve", "check"}


@pytest.mark.parametrize("document", OPERATORS, ids=lambda path: path.name)
def test_settings_in_document_exist(document: Path):
    known = SETTINGS.keys() | {parameter.section for parameter in PARAMETERS}
    assert [name for name in SETTING.findall(document.read_text()) if name not in known] == []


@every_document
def test_topology_in_document_has_no_faults(document: Path, tmp_path: Path):
    (tmp_path / "userlist.txt").touch(mode=0o600)
    for number, text in enumerate(TOML.findall(document.read_text())):
        file = tmp_path / f"{number}.toml"
        file.write_text(text)
        assert check(file) == []


@every_document
def test_links_in_document_lead_to_files(document: Path):
    links = LINK.findall(document.read_text())
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_migration_tells_every_name_that_pgbouncer_has_for_a_setting():
    rows = re.findall(r"^\| (.+?) \| (.+?) \|", (ROOT / "docs" / "migration.md").read_text(), re.MULTILINE)
    told = {name: set(re.findall(r"`(\w+)`", theirs)) for theirs, ours in rows for name in SETTING.findall(ours)}
    assert {name for name, setting in SETTINGS.items() if not set(setting.pgbouncer) <= told.get(name, set())} == set()


def test_architecture_lists_every_module_once_and_no_other():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    listed = []
    for folder, table in re.findall(r"^### `(\S+)`\n\n((?:\|.*\n)+)", text, re.MULTILINE):
        listed += [f"{folder}/{name}" for name in re.findall(r"^\| `(\w+\.pyx?)` \|", table, re.MULTILINE)]
    found = [
        str(file.relative_to(ROOT))
        for package in ("gateway", "health")
        for file in (ROOT / package).rglob("*.py*")
        if file.suffix in (".py", ".pyx") and (file.name != "__init__.py" or file.parent.name == "gateway")
    ]
    assert sorted(listed) == sorted(found)
