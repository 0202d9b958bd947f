"""State between clients: what one sets it keeps, and nobody else gets.

Manual: SET, "Asynchronous Operations" (ParameterStatus).
"""

from __future__ import annotations

import pytest

from .client import count, eventually, login, types, value
from .messages import bind, execute, parse, query, run, sync
from .unbuilt import session_state

ZONES = {"one": "Asia/Kathmandu", "two": "America/Lima", "three": "Africa/Cairo"}

# What a client can leave behind on a server, how the next client would see it, and how it is undone.
LEFT_BEHIND = {
    "reported setting": ("set timezone to 'Asia/Kathmandu'", "show timezone", "reset timezone"),
    "reported in newer versions": ("set search_path to pg_catalog", "show search_path", "reset search_path"),
    "read only": ("set default_transaction_read_only to on", "show transaction_read_only", "reset all"),
    "plain setting": ("set statement_timeout to '5s'", "show statement_timeout", "reset statement_timeout"),
    "setting of a transaction that commits": (
        "begin; select 1; set statement_timeout to '5s'; commit",
        "show statement_timeout",
        "reset all",
    ),
    "set_config": ("select set_config('work_mem', '5MB', false)", "show work_mem", "reset work_mem"),
    "setting of one's own": (
        "set my.setting to 'x'",
        "select coalesce(current_setting('my.setting', true), '')",
        "discard all",
    ),
    "session characteristics": (
        "set session characteristics as transaction isolation level serializable",
        "show default_transaction_isolation",
        "reset all",
    ),
    "setting in a function": (
        "do $$ begin perform set_config('work_mem', '6MB', false); end $$",
        "show work_mem",
        "discard all",
    ),
    "role": ("set role bob", "select current_user", "reset role"),
    "session authorization": ("set session authorization bob", "select session_user", "reset session authorization"),
    "temporary table": (
        "create temp table left_behind (a int)",
        "select to_regclass('left_behind') is null",
        "discard temp",
    ),
    "advisory lock": (
        "select pg_advisory_lock_shared(42)",
        "select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()",
        "select pg_advisory_unlock_shared(42)",
    ),
    "listen": ("listen left_behind", "select count(*) from pg_listening_channels()", "unlisten *"),
    "cursor with hold": (
        "declare left_behind cursor with hold for select 1",
        "select count(*) from pg_cursors where is_holdable",
        "close left_behind",
    ),
    "SQL prepare": (
        "prepare left_behind as select 1",
        "select count(*) from pg_prepared_statements where name = 'left_behind'",
        "deallocate left_behind",
    ),
    "currval": (
        "create temp sequence left_behind; select nextval('left_behind')",
        "select to_regclass('left_behind') is null",
        "discard all",
    ),
}
REPORTED = {"reported setting", "read only"}


def leftovers(*marks: pytest.MarkDecorator) -> pytest.MarkDecorator:
    """Try each of LEFT_BEHIND; `marks` are for those that no ParameterStatus tells of."""
    cases = [
        pytest.param(*case, id=name, marks=() if name in REPORTED else marks) for name, case in LEFT_BEHIND.items()
    ]
    return pytest.mark.parametrize(("leave", "look", "undo"), cases)


@pytest.mark.both
@leftovers(session_state)
def test_state_of_a_client_that_left_is_gone_for_the_next(relay, postgres, leave, look, undo):
    clean = value(postgres.port, look)
    with login(relay.port) as client:
        assert count(client.ask(query(leave)), "E") == 0
    assert value(relay.port, look) == clean


@leftovers(session_state)
def test_state_set_by_extended_protocol_is_gone_for_the_next(relay, postgres, leave, look, undo):
    if ";" in leave:
        pytest.skip("several statements go by simple queries only")
    with login(relay.port) as client:
        assert count(client.ask(run(leave) + sync()), "E") == 0
    assert value(relay.port, look) == value(postgres.port, look)


@leftovers(session_state)
def test_state_is_kept_for_its_client_and_hidden_from_others(gateway, postgres, leave, look, undo):
    relay = gateway(default_pool_size=3)
    clean = value(postgres.port, look)
    with login(relay.port) as one, login(relay.port) as two, login(postgres.port) as direct:
        for client in (one, direct):
            client.ask(query(leave))
        for _ in range(3):
            assert one.value(look) == direct.value(look)
            assert two.value(look) == clean
            assert value(relay.port, look) == clean


@leftovers()
def test_client_that_undid_its_state_shares_its_server_again(relay, postgres, leave, look, undo):
    clean = value(postgres.port, look)
    with login(relay.port) as client:
        client.ask(query(leave))
        client.ask(query(undo))
        with login(relay.port) as other:
            other.mark()
            other.write(query(look))
            seen = other.until(lambda seen: count(seen, "Z") > 0, 3.0)
            assert [row.values for row in seen if row.type == "D"] == [[(clean or "").encode()]]
        assert client.value("select 1") == "1"


@pytest.mark.both
def test_reported_settings_of_three_clients_on_one_server(relay):
    # ParameterStatus that the client last saw must equal SHOW, for everyone.
    clients = {name: login(relay.port) for name in ZONES}
    settings = {
        "timezone": ZONES,
        "application_name": {name: name * 12 for name in ZONES},
        "datestyle": {"one": "German, DMY", "two": "SQL, MDY", "three": "Postgres, DMY"},
    }
    for name, client in clients.items():
        for setting, values in settings.items():
            client.ask(query(f"set {setting} to {values[name] if setting == 'datestyle' else repr(values[name])}"))
    for _ in range(3):
        for name, client in clients.items():
            for setting, values in settings.items():
                assert client.value(f"show {setting}") == values[name]
            seen = {key.lower(): status for key, status in client.parameters.items()}
            assert all(seen[setting] == values[name] for setting, values in settings.items())
    for client in clients.values():
        client.close()


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "it''s",
        '"',
        '""',
        "a,b",
        "\\",
        "\\'' or 1",
        "x" * 63,
        "é" * 20,
        "''''",
        "; select 1/0",
        "$1",
        "%s",
        "\t",
    ],
    ids=repr,
)
def test_reported_value_of_any_quoting_is_kept(relay, postgres, text):
    # apply_var in PgBouncer quotes into 128 bytes; lists, quotes and '' broke others.
    with login(relay.port) as one, login(relay.port) as two, login(postgres.port) as direct:
        for client in (one, direct):
            assert count(client.ask(query(f"set application_name to '{text}'")), "E") == 0
        for _ in range(2):
            assert two.value("show application_name") == ""
            assert one.value("show application_name") == direct.value("show application_name")
        assert one.parameters == direct.parameters


@session_state
def test_search_path_of_many_kinds_is_kept(relay, postgres):
    path = ", ".join(f'"Schema {number} with a long ""name"""' for number in range(20)) + ", pg_catalog"
    with login(relay.port) as client, login(postgres.port) as direct:
        for one in (client, direct):
            one.ask(query(f"set search_path to {path}"))
        assert client.value("show search_path") == direct.value("show search_path")


@pytest.mark.both
@pytest.mark.parametrize(
    "setting",
    [
        "timezone to 'Asia/Tokyo'",
        pytest.param("statement_timeout to '7s'", marks=session_state),
        "application_name to 'x'",
    ],
)
@pytest.mark.parametrize(
    "statements",
    [
        ["begin", "set {}", "rollback"],
        ["begin", "set {}", "select 1/0", "commit"],
        ["begin", "set {}", "commit"],
        ["begin", "set local {}", "commit"],
        ["set local {}"],
        ["begin", "savepoint s", "set {}", "rollback to s", "commit"],
        ["begin; set {}; rollback"],
        ["set {}; select 1/0"],
        ["set {}", "begin", "set {}", "reset all", "rollback"],
        ["set {}", "reset all"],
        ["set {}", "discard all"],
    ],
    ids=" - ".join,
)
def test_set_in_transaction_sticks_exactly_when_it_commits(same, statements, setting):
    # ParameterStatus comes where PostgreSQL sends it, and SHOW agrees afterwards.
    name = setting.split()[0]
    same(
        [
            *([query(text.format(setting))] for text in statements),
            [query(f"show {name}")],
            [query("begin")],
            [query(f"show {name}"), query("commit")],
        ],
        ways=["whole", "at random, seed 1"],
    )


@pytest.mark.parametrize("setting", ["timezone to 'Asia/Tokyo'", "statement_timeout to '7s'"])
def test_set_rolled_back_is_not_replayed_on_another_server(gateway, setting):
    relay = gateway(default_pool_size=2)
    name = setting.split()[0]
    with login(relay.port) as client, login(relay.port) as holder:
        before = client.value(f"show {name}")
        for text in ("begin", f"set {setting}", "rollback", "begin", f"set local {setting}", "commit"):
            client.ask(query(text))
        holder.ask(query("begin"))
        assert client.value(f"show {name}") == before
        holder.ask(query("rollback"))


def test_settings_in_other_spellings_are_the_same(same):
    # Equivalent spellings caused a SET before every transaction (#776, #879).
    same(
        [
            [query("set datestyle to 'iso, us'")],
            [query("show datestyle")],
            [query("set client_encoding to 'utf-8'")],
            [query("show client_encoding")],
            [query("set TIME ZONE 'utc'")],
            [query("show timezone")],
            [query("set names 'latin1'")],
            [query("show client_encoding")],
        ]
    )


def test_client_encoding_of_two_clients_each_gets_its_own_bytes(relay):
    with login(relay.port) as utf8, login(relay.port, client_encoding="latin1") as latin1:
        for _ in range(3):
            for client, expected in ((utf8, b"\xc3\xa9"), (latin1, b"\xe9")):
                seen = client.ask(query("select chr(233)"))
                assert [row.values for row in seen if row.type == "D"] == [[expected]]


def test_standard_conforming_strings_of_two_clients(relay):
    with login(relay.port) as on, login(relay.port) as off:
        off.ask(query("set standard_conforming_strings to off"))
        assert on.value(r"select '\\'") == r"\\"
        assert off.value(r"select '\\'") == "\\"


def test_set_transaction_outside_and_inside_does_not_stick(same):
    begin_1 = ["begin", "set transaction isolation level serializable", "show transaction_isolation", "commit"]
    begin_2 = ["begin read only", "show transaction_read_only", "commit"]
    after = ["show transaction_isolation", "show transaction_read_only"]
    same([[query(text)] for text in ("set transaction read only", *after, *begin_1, *after, *begin_2, *after)])


def test_transaction_lock_never_pins(relay):
    with login(relay.port) as one:
        one.ask(query("select pg_advisory_xact_lock(1)"))
        one.ask(query("begin; select pg_advisory_xact_lock(2); commit"))
        assert value(relay.port, "select 'served'") == "served"


@session_state
@pytest.mark.both
def test_listen_receives_notifications_while_idle(gateway, database):
    # The client is bound to its server; notifications come without a query, and the state stays idle.
    relay = gateway(default_pool_size=2)
    with login(relay.port) as listener, login(relay.port) as other:
        listener.ask(query("listen news"))
        listener.mark()
        database.execute("notify news, 'first'")
        other.ask(query("notify news, 'second'"))
        other.ask(query("begin; notify news, 'never'; rollback"))
        seen = listener.until(lambda seen: count(seen, "A") == 2)
        assert [one.body[4:] for one in seen] == [b"news\0first\0", b"news\0second\0"]
        assert count(other.messages, "A") == 0
        assert listener.value("select 1") == "1"


def test_listen_in_session_mode_receives_notifications(gateway, database):
    relay = gateway(pool_mode="session", default_pool_size=2)
    with login(relay.port) as listener:
        listener.ask(query("listen news"))
        listener.mark()
        database.execute("notify news, 'hello'")
        assert types(listener.until(lambda seen: count(seen, "A") == 1)) == "A"


def test_setting_changed_on_an_idle_server_reaches_its_next_client_as_postgres_has_it(gateway, postgres, database):
    # ParameterStatus on a server that nobody uses: no harm, and SHOW tells the truth.
    relay = gateway()
    with login(relay.port) as client:
        before = client.value("show timezone")
        database.execute("alter system set timezone to 'Asia/Tokyo'")
        database.execute("select pg_reload_conf()")
        try:
            eventually(lambda: value(postgres.port, "show timezone") == "Asia/Tokyo", "the reload")
            assert value(relay.port, "select 1") == "1"
            assert client.value("show timezone") in (before, "Asia/Tokyo")
            assert client.parameters["TimeZone"] == client.value("show timezone")
        finally:
            database.execute("alter system reset timezone")
            database.execute("select pg_reload_conf()")
            eventually(lambda: value(postgres.port, "show timezone") != "Asia/Tokyo", "the reload back")


@session_state
@pytest.mark.parametrize("state", ["reset", "reject"])
def test_session_state_by_other_rules_does_not_leak_either(gateway, postgres, state):
    relay = gateway(session_state=state)
    with login(relay.port) as one, login(relay.port) as two:
        seen = one.ask(query("set statement_timeout to '5s'"))
        assert count(seen, "E") == (state == "reject")
        assert two.value("show statement_timeout") == "0"


@session_state
def test_cursor_with_hold_is_read_on_its_own_server(gateway):
    relay = gateway(default_pool_size=3)
    with login(relay.port) as client, login(relay.port) as other:
        client.ask(query("begin; declare c cursor with hold for select generate_series(1, 4); commit"))
        for number in range(1, 5):
            other.value("select 1")
            assert client.value("fetch 1 from c") == str(number)
        client.ask(query("close c"))


def test_cursor_fetched_by_extended_protocol(same):
    fetch = parse("fetch all from c", "f") + bind(statement="f") + execute() + sync()
    same([[query("begin; declare c cursor for select 1 as a")], [fetch], [query("commit")]])


@session_state
def test_temp_table_used_across_queries(gateway):
    relay = gateway(default_pool_size=2)
    with login(relay.port) as one, login(relay.port) as two:
        for client, number in ((one, "1"), (two, "2")):
            client.ask(query(f"create temp table mine as select {number} as n"))
        for _ in range(3):
            assert (one.value("select n from mine"), two.value("select n from mine")) == ("1", "2")
