"""What a .pxd declares, its source binds: no C variable of a module is left at zero.

Read from the text alone, so that it holds for both variants.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "gateway"
DECLARED = re.compile(r"^cdef (?!class |extern |enum |struct )(?:\w+ )+(\w+(?:, *\w+)*)$", re.MULTILINE)
IMPORTED = re.compile(r"^from \S+ import (\([^)]*\)|.+)$", re.MULTILINE)
ASSIGNED = re.compile(r"^(?:cdef \w+ )?(\w+(?:, *\w+)*)(?: *:[^=\n]+)? *=", re.MULTILINE)


def declared(text: str) -> set[str]:
    """The C variables of a .pxd."""
    return names(DECLARED, text)


def bound(text: str) -> set[str]:
    """What a source imports or assigns in the first column, that is, at its top level and whatever the variant."""
    return names(IMPORTED, text) | names(ASSIGNED, text)


def names(pattern: re.Pattern[str], text: str) -> set[str]:
    """The names that the pattern's group lists; `a as b` is b."""
    lists = pattern.findall(re.sub(r"#.*", "", text))
    return set(re.findall(r"\w+", re.sub(r"\w+ as ", "", " ".join(lists))))


@pytest.mark.parametrize("pxd", sorted(PACKAGE.rglob("*.pxd")), ids=lambda pxd: str(pxd.relative_to(PACKAGE)))
def test_variables_of_a_module_are_all_bound_by_each_source(pxd: Path) -> None:
    # A forgotten import is no error when compiled: the variable is 0.
    for source in (pxd.with_suffix(".py"), pxd.with_suffix(".pyx")):
        if source.exists():
            assert declared(pxd.read_text()) - bound(source.read_text()) == set()


@pytest.mark.parametrize("module", sorted(path.stem for path in (PACKAGE / "worker").glob("[a-z]*.py")))
def test_each_module_of_the_worker_can_be_the_first_that_is_imported(module: str) -> None:
    # Compiled, they name one another's types in circles: whatever begins, no name may be asked for before it is there.
    command = [sys.executable, "-c", f"import gateway.worker.{module}"]
    assert subprocess.run(command, capture_output=True, text=True, check=False).stderr == ""


def test_variables_are_found_in_every_form() -> None:
    assert declared("cdef int A\ncdef long long B, C\ncdef class D:\n    cdef int e\ncdef int f(int g)\n") == {*"ABC"}
    imports = "from m import A, x as B  # F\nfrom m import (\n    C,  # G\n    D,\n)\n"
    assignments = "H = 1\nI: int = 2\nJ, K = 3, 4\ncdef int L = 5\nif x:\n    M = 6\n"
    assert bound(imports) == {*"ABCD"}
    assert bound(assignments) == {*"HIJKL"}
