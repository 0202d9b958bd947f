"""The table of errors: each one well formed, told apart from the others, and encoded as PostgreSQL would."""

import re
import string
from pathlib import Path
from typing import Any

import pytest

from gateway import errors
from gateway.settings import PARAMETERS
from gateway.wire import messages

PACKAGE = Path(errors.__file__).parent
SOURCES = "".join(path.read_text() for path in PACKAGE.rglob("*.py") if path.name != "errors.py")


def filled(kind: type[errors.GatewayError]) -> errors.GatewayError:
    """An error of this kind with a word in each brace."""
    values: dict[str, Any] = {field: "word" for _, field, _, _ in string.Formatter().parse(kind.template) if field}
    return kind(**values)


KINDS = pytest.mark.parametrize("kind", errors.KINDS.values(), ids=errors.KINDS)


@KINDS
def test_kind_bears_the_name_of_its_constant(kind):
    assert getattr(errors, kind.name.upper()) is kind


@KINDS
def test_kind_is_written_in_the_style_of_messages(kind):
    assert re.fullmatch(r"[0-9A-Z]{5}", kind.sqlstate)
    for text in (kind.template, kind.hint):
        assert not text.endswith(".")
        first = text.split(" ")[0]
        # A name that is spelt in capitals may come first; the one notice is PgBouncer's, to the letter.
        assert first == first.lower() or first.isupper() or kind is errors.QUERY_WAIT_NOTIFY


@KINDS
def test_kind_with_a_hint_names_settings_that_exist(kind):
    names = {name for parameter in PARAMETERS for name in (parameter.name, f"{parameter.section}.{parameter.name}")}
    suffixes = {name.split(".NAME.")[-1] for name in names}
    assert set(re.findall(r"[a-z]+(?:[._][a-z]+)+", kind.hint)) <= names | suffixes


@KINDS
def test_kind_with_its_values_is_encoded_with_all_fields(kind):
    error = filled(kind)
    encoded = error.encode()
    assert encoded[0] == (messages.NOTICE_RESPONSE if kind is errors.QUERY_WAIT_NOTIFY else messages.ERROR_RESPONSE)
    expected = {
        "severity": kind.severity,
        "severity_nonlocalized": kind.severity,
        "sqlstate": kind.sqlstate,
        "message": str(error),
    }
    assert messages.error_fields(encoded[5:]) == expected | ({"hint": kind.hint} if kind.hint else {})


def test_define_with_a_name_twice_is_refused():
    with pytest.raises(ValueError, match="no_user is defined twice"):
        errors.define("no_user", errors.FATAL, "28000", "another text")


def test_define_with_the_same_code_and_text_is_refused():
    with pytest.raises(ValueError, match="other is defined twice, first as no_user"):
        errors.define("other", errors.ERROR, errors.NO_USER.sqlstate, errors.NO_USER.template)
    assert "other" not in errors.KINDS


def test_error_raised_by_its_kind_is_caught_by_its_kind():
    with pytest.raises(errors.NO_USER) as caught:
        raise errors.NO_USER
    assert caught.value.encode() == (
        b"E\0\0\0\x4fSFATAL\0VFATAL\0C28000\0Mno PostgreSQL user name specified in startup packet\0\0"
    )


def test_error_with_detail_puts_it_before_the_hint():
    encoded = errors.MAX_CLIENT_CONN(detail="There are 5.").encode()
    assert encoded.endswith(b"\0DThere are 5.\0Hraise max_client_conn\0\0")


def test_error_made_fatal_ends_the_connection_and_leaves_its_kind_alone():
    assert errors.NO_PRIMARY(fatal=True).encode()[5:].startswith(b"SFATAL\0VFATAL\0C57P03\0")
    assert errors.NO_PRIMARY().severity is errors.Severity.ERROR


def test_error_with_braces_in_a_value_keeps_them():
    assert errors.NO_SUCH_DATABASE(database="{0.x}").message == 'database "{0.x}" does not exist'


@KINDS
def test_kind_is_used_somewhere(kind):
    assert re.search(rf"\b{kind.name.upper()}\b", SOURCES)
