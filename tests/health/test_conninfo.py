"""primary_conninfo: what libpq reads we read alike, and what we write libpq takes as it is meant."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import Error
from psycopg.conninfo import conninfo_to_dict

from health import conninfo

NOWHERE = "/no-primary-while-the-gateway-fails-over"

TEXTS = [
    "",
    "host=pg1",
    "host=pg1 port=5433 user=replicator application_name=pg2",
    "  host = pg1\tport\n=\n5433  ",
    "host='pg 1' password='it\\'s \\\\ here'",
    "host=pg1 password=a\\ b\\'c\\\\d",
    "host=pg1 password=a'b",  # a quote is one at the start of a value alone
    "password='a'host='b'",
    "host=pg1 password=",
    "password= host=pg1",  # blanks before a value are skipped: this is a password of host=pg1
    "password='' host=pg1",
    "host=pg1 password=a\\",
    "host=pg1,pg2 port=5432,5433",
    "host=pg1,pg2 hostaddr=10.0.0.1,10.0.0.2",
    "host=pg1 host=pg2",
    "host=/var/run/postgresql",
    "host=pg1 password=a\u00a0b",  # no blank to libpq
    "postgresql://",
    "postgres://pg1",
    "postgres://pg1:5433/db",
    "postgres://replicator@pg1/",
    "postgres://replicator:secret@pg1:5433/db?application_name=pg2&sslmode=require",
    "postgres://a%40b:x%3Ay%2Fz@pg1/d%20b",
    "postgres://u:p?w@pg1/db",
    "postgres://u:p:w@pg1/db",
    "postgres://:secret@pg1",
    "postgres://u@pg1?application_name=pg2",
    "postgres://pg1:1,pg2:2,pg3/db",
    "postgres://pg1,pg2/db",
    "postgres://[::1]:5433,[fd00::2]/db",
    "postgres://%2Fvar%2Frun:5433/db",
    "postgres:///db?host=/var/run&port=5433",
    "postgres://pg1/db?host=pg2",
    "postgres://pg1/?application_name=a+b%20c",  # a plus is a plus
    "postgres://pg1/?ssl=true",
    "postgres://pg1/?password=",
]
FAULTY = ["host", "host=pg1 port", "=pg1", "host='pg1", "host='pg1\\'", "host pg1", "postgres://pg1/?port"]

NAMES = st.sampled_from(["user", "password", "application_name", "dbname", "options", "passfile", "sslcert"])
VALUES = st.text(st.characters(codec="utf-8", exclude_characters="\0"))
PARAMETERS = st.dictionaries(NAMES, VALUES)
TEXT = st.one_of(
    st.lists(st.sampled_from(["host=", "password=", "user =", "a", "'", "\\", " ", "\n", "="]), max_size=9).map(
        "".join
    ),
    st.lists(st.sampled_from(["pg1", ":", "@", "/", "?", "&", ",", "5", "user=", "%41", "[::1]"]), max_size=9).map(
        lambda parts: "postgres://" + "".join(parts)
    ),
)
HOSTS = st.lists(st.sampled_from(["pg1", "10.0.0.1", "fd00::1", "/var/run/postgresql"]), min_size=1, max_size=3)


def leads_nowhere(text: str) -> bool:
    """Does libpq try the directory alone that does not exist?"""
    found = conninfo_to_dict(text)
    return found["host"] == NOWHERE and not found["hostaddr"]


@pytest.mark.parametrize("text", TEXTS)
def test_parse_text_is_read_as_libpq_does(text):
    assert conninfo.parse(text) == conninfo_to_dict(text)


@pytest.mark.parametrize("text", FAULTY)
def test_parse_faulty_text_is_refused_as_by_libpq(text):
    with pytest.raises(Error):
        conninfo_to_dict(text)
    with pytest.raises(ValueError, match="primary_conninfo is not understood"):
        conninfo.parse(text)
    assert conninfo.upstream(text) is None


@settings(max_examples=100, deadline=None)
@given(PARAMETERS)
def test_build_any_parameters_come_back_from_libpq(parameters):
    text = conninfo.build(parameters)
    assert conninfo_to_dict(text) == parameters == conninfo.parse(text)


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_parse_random_text_is_read_as_libpq_does_or_refused(text):
    try:
        expected = conninfo_to_dict(text)
    except (Error, UnicodeDecodeError):
        return
    assert conninfo.parse(text) == expected


@settings(max_examples=100, deadline=None)
@given(PARAMETERS, HOSTS, st.integers(1, 65535))
def test_parse_random_uri_is_read_as_libpq_does(parameters, hosts, port):
    def escape(value: str) -> str:
        return "".join(f"%{byte:02x}" for byte in value.encode())

    names = ",".join(f"[{host}]:{port}" if ":" in host else escape(host) for host in hosts)
    query = "&".join(f"{key}={escape(value)}" for key, value in parameters.items())
    text = f"postgresql://{names}/?{query}"
    assert conninfo.parse(text) == conninfo_to_dict(text)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("host=pg1", ("pg1", 5432)),
        ("host=pg1 port=5433", ("pg1", 5433)),
        ("host=pg1 port=''", ("pg1", 5432)),
        ("host=pg1 hostaddr=10.0.0.1", ("10.0.0.1", 5432)),
        ("hostaddr=10.0.0.1 port=5433", ("10.0.0.1", 5433)),
        ("host=pg1 host=pg2", ("pg2", 5432)),
        ("host=/tmp port=5433", ("/tmp", 5433)),
        ("postgres://u:p@[fd00::1]:5433/db", ("fd00::1", 5433)),
        ("postgres://u@pg1", ("pg1", 5432)),
        ("", None),
        ("user=replicator", None),
        ("host=pg1,pg2", None),
        ("postgres://pg1:5432,pg2:5432/", None),
        ("host=pg1 port=x", None),
        ("host=pg1 port", None),
    ],
)
def test_upstream_is_the_only_place_that_a_text_leads_to(text, place):
    assert conninfo.upstream(text) == place


@pytest.mark.parametrize("text", TEXTS)
def test_freeze_leads_libpq_nowhere_and_thaw_back(text):
    frozen = conninfo.freeze(text)
    assert leads_nowhere(frozen)
    assert conninfo.is_frozen(frozen)
    assert not conninfo.is_frozen(text)
    assert conninfo_to_dict(conninfo.thaw(frozen)) == conninfo_to_dict(text)


@pytest.mark.parametrize("text", TEXTS)
def test_freeze_shows_still_what_is_frozen(text):
    frozen = conninfo.freeze(text)
    assert conninfo.freeze(frozen) == frozen
    assert conninfo.parse(frozen) == conninfo.parse(text)
    assert conninfo.upstream(frozen) == conninfo.upstream(text)


def test_freeze_of_pairs_is_undone_to_the_byte():
    text = "host=pg1  port = 5433 password='it\\'s'"
    assert conninfo.thaw(conninfo.freeze(text)) == text == conninfo.thaw(text)


@settings(max_examples=100, deadline=None)
@given(TEXT)
def test_freeze_random_text_leads_libpq_nowhere(text):
    try:
        before = conninfo_to_dict(text)
    except (Error, UnicodeDecodeError):
        return
    frozen = conninfo.freeze(text)
    assert leads_nowhere(frozen)
    assert conninfo_to_dict(conninfo.thaw(frozen)) == before


@settings(max_examples=100, deadline=None)
@given(PARAMETERS, st.sampled_from(["host=a,b hostaddr=10.0.0.1,10.0.0.2 port=1,2", "host=a", ""]))
def test_lead_changes_the_place_and_nothing_else(parameters, place):
    text = f"{place} {conninfo.build(parameters)}"
    for known in (text, conninfo.freeze(text)):
        led = conninfo.lead(known, "pg9", 5439)
        assert conninfo_to_dict(led) == parameters | {"host": "pg9", "port": "5439"}
        assert conninfo.upstream(led) == ("pg9", 5439)


@pytest.mark.parametrize("text", [*TEXTS, "host=pg1 password=a\\ ", "host=pg1  ", "host=pg1\t"])
def test_rouse_says_the_same_in_other_words_each_time(text):
    said = text
    for _ in range(3):
        roused = conninfo.rouse(said)
        assert roused != said
        assert conninfo_to_dict(roused) == conninfo_to_dict(text)
        said = roused
