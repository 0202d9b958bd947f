"""Prepared statements in transaction mode: the bytes that a server gets, and answers as of a session of one's own."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.wire import messages
from gateway.wire.messages import PORTAL, STATEMENT, Flush, Sync, bind, close, describe, execute, parse, query
from gateway.worker.endpoint import Client
from gateway.worker.rewrite import own_names
from tests.worker.relays import Relay
from tests.worker.sessions import Session

RUN = execute("")
NAMES = {
    getattr(messages, name): name.title().replace("_", "")
    for name in ("BIND", "CLOSE", "DESCRIBE", "EXECUTE", "FLUSH", "PARSE", "QUERY", "SYNC")
}


def shown(data: bytes) -> list[str]:
    """Messages as a word and their texts: Parse gateway_t_1 select 1."""
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big") + 1
        texts = data[5:size].split(b"\0")[: 1 if data[0] in (messages.CLOSE, messages.DESCRIBE) else 2]
        words = [text.decode() for text in texts] if data[0] not in (messages.EXECUTE, messages.SYNC) else []
        found.append(" ".join([NAMES[data[0]], *filter(None, words)]))
        data = data[size:]
    return found


@contextmanager
def relay_of(clients: int = 1, servers: int = 1, capacity: int = 100) -> Iterator[Relay]:
    relay = Relay(clients, servers, capacity)
    try:
        yield relay
    finally:
        relay.close()


@pytest.fixture
def relay() -> Iterator[Relay]:
    """Two clients and one server."""
    with relay_of(clients=2) as made:
        yield made


def out(relay: Relay, client: Client, data: bytes, server: int = 0) -> list[str]:
    """What a server gets when a client sends this, before it answers; then all is answered."""
    relay.send(client, data)
    sent = relay.sent(relay.servers[server])
    relay.answer(relay.servers[server], relay.sessions[relay.servers[server]].receive(sent))
    relay.settle()
    return shown(sent)


def told(relay: Relay, client: Client) -> list[str]:
    """What a client has been sent: types, and the texts of errors and rows."""
    found, data = [], relay.peers[client].received()
    while data:
        size = int.from_bytes(data[1:5], "big") + 1
        kind, body = chr(data[0]), data[5:size]
        if data[0] == messages.ERROR_RESPONSE:
            fields = messages.error_fields(body)
            kind += f" {fields['sqlstate']} {fields['message']}"
        elif data[0] == messages.DATA_ROW:
            kind += f" {messages.row_values(body)[0]}"
        found.append(kind)
        data = data[size:]
    return found


def test_parse_with_a_name_goes_out_under_ours(relay):
    client, _ = relay.clients
    group = parse("a", "select 1") + describe(STATEMENT, "a") + bind("", "a", ["x"]) + RUN + Sync
    assert out(relay, client, group) == [
        "Parse gateway_t_1 select 1",
        "Describe Sgateway_t_1",
        "Bind gateway_t_1",
        "Execute",
        "Sync",
    ]
    assert told(relay, client) == ["1", "t", "T", "2", "D select 1", "C", "Z"]


def test_parse_of_the_same_text_by_another_client_goes_out_under_the_same_name(relay):
    one, other = relay.clients
    out(relay, one, parse("a", "select 1") + Sync)
    # It is closed first, for only PostgreSQL can tell whether it is still valid.
    sent = out(relay, other, parse("b", "select 1") + Sync)
    assert sent == ["Close Sgateway_t_1", "Parse gateway_t_1 select 1", "Sync"]
    assert out(relay, one, bind("", "a") + RUN + Sync) == ["Bind gateway_t_1", "Execute", "Sync"]
    assert (told(relay, one)[-3:], told(relay, other)) == (["D select 1", "C", "Z"], ["1", "Z"])


def test_parse_of_the_same_text_with_other_types_is_another_statement(relay):
    client, _ = relay.clients
    assert out(relay, client, parse("a", "select 1") + parse("b", "select 1", [messages.INT4]) + Sync) == [
        "Parse gateway_t_1 select 1",
        "Parse gateway_t_2 select 1",
        "Sync",
    ]


def test_bind_of_a_statement_that_the_server_lacks_has_it_prepared_unseen():
    with relay_of(clients=2, servers=2) as relay:
        client, other = relay.clients
        out(relay, client, parse("a", "select 1") + Sync, server=1)
        told(relay, client)
        out(relay, other, query("begin"), server=1)
        group = bind("", "a") + RUN + Sync
        assert out(relay, client, group) == ["Parse gateway_t_1 select 1", "Bind gateway_t_1", "Execute", "Sync"]
        assert out(relay, client, group) == ["Bind gateway_t_1", "Execute", "Sync"]
        assert told(relay, client) == ["2", "D select 1", "C", "Z"] * 2
        assert relay.pool.server_parses == 1


def test_bind_keeps_portal_values_and_what_was_sent_before_it(relay):
    client, _ = relay.clients
    out(relay, client, parse("name", "select 1") + Sync)
    relay.send(client, parse("", "select 2") + bind("portal", "name", ["v\0", None]) + Sync)
    expected = parse("", "select 2") + bind("portal", "gateway_t_1", ["v\0", None]) + Sync
    assert relay.sent(relay.servers[0]) == expected


def test_describe_of_a_portal_and_close_of_a_portal_pass_untouched(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    relay.send(client, describe(PORTAL, "a") + close(PORTAL, "a") + Flush)
    assert relay.sent(relay.servers[0]) == describe(PORTAL, "a") + close(PORTAL, "a") + Flush


def test_close_is_answered_here_and_the_server_keeps_the_statement(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    assert out(relay, client, close(STATEMENT, "a") + Sync) == ["Sync"]
    assert told(relay, client) == ["1", "Z", "3", "Z"]
    assert out(relay, client, bind("", "a") + Sync) == ["Bind a", "Sync"]
    assert told(relay, client) == ['E 26000 prepared statement "a" does not exist', "Z"]
    assert list(relay.sessions[relay.servers[0]].prepared) == [b"gateway_t_1"]


def test_close_with_flush_is_answered_at_once(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    told(relay, client)
    assert out(relay, client, close(STATEMENT, "a") + Flush) == ["Flush"]
    assert told(relay, client) == ["3"]
    out(relay, client, Sync)
    assert told(relay, client) == ["Z"]


def test_close_of_a_name_that_there_is_not_is_postgresql_s_to_answer(relay):
    client, _ = relay.clients
    assert out(relay, client, close(STATEMENT, "a") + Sync) == ["Close Sa", "Sync"]
    assert told(relay, client) == ["3", "Z"]


@pytest.mark.parametrize("names", [("a", "a"), ("a", "gateway_t_1")])
def test_name_of_another_client_is_unknown(relay, names):
    one, other = relay.clients
    out(relay, one, parse(names[0], "select 1") + Sync)
    out(relay, other, parse("b", "select 2") + Sync)
    told(relay, other)
    out(relay, other, bind("", names[0]) + Sync)
    assert told(relay, other) == [f'E 26000 prepared statement "{names[0]}" does not exist', "Z"]


def test_name_that_is_taken_is_refused_by_postgresql_and_nothing_is_left_behind(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    told(relay, client)
    group = parse("a", "select 2") + bind("", "a") + RUN + Sync
    assert out(relay, client, group)[:2] == ["Parse a", "Parse a select 2"]
    assert told(relay, client) == ['E 42P05 prepared statement "a" already exists', "Z"]
    assert list(relay.sessions[relay.servers[0]].prepared) == [b"gateway_t_1"]
    out(relay, client, bind("", "a") + RUN + Sync)
    assert told(relay, client) == ["2", "D select 1", "C", "Z"]


def test_name_that_is_taken_and_a_text_that_is_wrong_is_refused_for_the_text(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    told(relay, client)
    out(relay, client, parse("a", "bad") + Sync)
    assert told(relay, client) == ['E 42601 syntax error at or near "bad"', "Z"]
    assert list(relay.sessions[relay.servers[0]].prepared) == [b"gateway_t_1"]


def test_statement_that_was_refused_gives_its_name_back(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "bad") + bind("", "a") + Sync)
    out(relay, client, parse("a", "select 1") + bind("", "a") + RUN + Sync)
    assert told(relay, client) == ['E 42601 syntax error at or near "bad"', "Z", "1", "2", "D select 1", "C", "Z"]


def test_server_that_is_full_closes_the_statement_used_least_recently():
    with relay_of(capacity=2) as relay:
        (client,) = relay.clients
        out(relay, client, parse("a", "select 1") + parse("b", "select 2") + Sync)
        out(relay, client, bind("", "a") + RUN + Sync)
        assert out(relay, client, parse("c", "select 3") + Sync)[:2] == [
            "Close Sgateway_t_2",
            "Parse gateway_t_3 select 3",
        ]
        assert out(relay, client, bind("", "b") + RUN + Sync)[:3] == [
            "Close Sgateway_t_1",
            "Parse gateway_t_2 select 2",
            "Bind gateway_t_2",
        ]
        assert "D select 2" in told(relay, client)
        assert set(relay.sessions[relay.servers[0]].prepared) == {b"gateway_t_2", b"gateway_t_3"}


def test_capacity_that_was_lowered_is_come_down_to(relay):
    client, _ = relay.clients
    out(relay, client, b"".join(parse(name, f"select {name}") for name in "abcd") + Sync)
    relay.link.rewriter.capacity = 2
    out(relay, client, parse("e", "select e") + Sync)
    assert set(relay.sessions[relay.servers[0]].prepared) == {b"gateway_t_4", b"gateway_t_5"}


def test_unnamed_statement_behind_another_client_s_is_prepared_again_unseen(relay):
    one, other = relay.clients
    group = bind("", "") + RUN + Sync
    assert out(relay, one, parse("", "select 1") + group) == ["Parse select 1", "Bind", "Execute", "Sync"]
    assert out(relay, one, group) == ["Bind", "Execute", "Sync"]
    out(relay, other, parse("", "select 2") + group)
    assert out(relay, one, group) == ["Parse select 1", "Bind", "Execute", "Sync"]
    assert out(relay, other, describe(STATEMENT, "") + group)[:2] == ["Parse select 2", "Describe S"]
    assert told(relay, one) == ["1", *["2", "D select 1", "C", "Z"] * 3]
    assert told(relay, other) == ["1", "2", "D select 2", "C", "Z", "t", "T", "2", "D select 2", "C", "Z"]


@pytest.mark.parametrize("gone", [b"", query("select 9"), parse("", "select 9") + close(STATEMENT, "") + Sync])
def test_unnamed_statement_that_a_client_has_not_is_not_another_s(relay, gone):
    one, other = relay.clients
    if gone:
        out(relay, other, gone)
        told(relay, other)
    out(relay, one, parse("", "select 1") + Sync)
    assert out(relay, other, bind("", "") + RUN + Sync)[0] == "Close S"
    assert told(relay, other) == ["E 26000 unnamed prepared statement does not exist", "Z"]


def test_unnamed_statement_that_was_refused_does_not_exist_on_any_server(relay):
    # Another server was asked to prepare the bad text, and the client was told of a syntax error again.
    one, other = relay.clients
    out(relay, one, parse("", "bad") + Sync)
    out(relay, other, parse("", "select 1") + Sync)
    told(relay, one)
    out(relay, one, bind("", "") + Sync)
    assert told(relay, one) == ["E 26000 unnamed prepared statement does not exist", "Z"]


def test_unnamed_statement_whose_parse_was_skipped_is_not_another_s(relay):
    # The client ran the other one's statement.
    one, other = relay.clients
    out(relay, other, parse("", "select 2") + Sync)
    out(relay, one, bind("", "nobody's") + parse("", "select 1") + Sync)
    told(relay, one)
    out(relay, one, bind("", "") + RUN + Sync)
    assert "D select 2" not in told(relay, one)


@pytest.mark.parametrize("skipped", [query("select 9"), close(STATEMENT, ""), bind("", "")])
def test_unnamed_statement_that_was_not_closed_is_not_run_by_another(relay, skipped):
    # The other client, who had none, ran it.
    one, other = relay.clients
    out(relay, one, parse("", "select 1") + Sync)
    who = other if skipped == bind("", "") else one
    out(relay, who, bind("", "nobody's") + skipped + Sync)
    told(relay, other)
    out(relay, other, bind("", "") + RUN + Sync)
    assert told(relay, other) == ["E 26000 unnamed prepared statement does not exist", "Z"]


@pytest.mark.parametrize("text", ["execute a", "EXECUTE  A ;", '/* x */ execute "a"'])
def test_query_that_executes_a_statement_names_ours(relay, text):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    (sent,) = out(relay, client, query(text))
    assert "gateway_t_1" in sent


def test_query_that_executes_what_the_server_lacks_has_it_prepared_in_a_group_of_ours():
    with relay_of(clients=2, servers=2) as relay:
        client, other = relay.clients
        out(relay, client, parse("a", "select 1") + Sync, server=1)
        out(relay, other, query("begin"), server=1)
        told(relay, client)
        sent = out(relay, client, query("execute a"))
        assert sent == ["Parse gateway_t_1 select 1", "Sync", "Query execute gateway_t_1"]
        assert told(relay, client) == ["D select 1", "C", "Z"]


def test_query_that_names_no_statement_of_the_client_passes_untouched(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    for text in ("execute b", "deallocate b", "explain execute a", "select 'execute a'"):
        assert out(relay, client, query(text)) == [f"Query {text}"]


def test_query_that_deallocates_a_statement_takes_it_from_client_and_server(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    told(relay, client)
    assert out(relay, client, query("deallocate a")) == ["Query deallocate gateway_t_1"]
    assert out(relay, client, bind("", "a") + Sync) == ["Bind a", "Sync"]
    assert told(relay, client) == ["C", "Z", 'E 26000 prepared statement "a" does not exist', "Z"]
    assert relay.sessions[relay.servers[0]].prepared == {}


@pytest.mark.parametrize("text", ["deallocate all", "discard all"])
def test_query_that_deallocates_all_takes_all_of_this_client_and_of_the_server(relay, text):
    one, other = relay.clients
    out(relay, one, parse("a", "select 1") + Sync)
    out(relay, other, parse("b", "select 2") + Sync)
    assert out(relay, one, query(text)) == [f"Query {text}"]
    assert relay.servers[0].statements == {}
    assert out(relay, other, bind("", "b") + RUN + Sync)[:2] == ["Parse gateway_t_2 select 2", "Bind gateway_t_2"]
    assert out(relay, one, bind("", "a") + Sync) == ["Bind a", "Sync"]


@pytest.mark.parametrize("text", ["deallocate a", "deallocate all"])
def test_deallocate_by_the_extended_protocol_does_what_it_says_when_it_is_executed(relay, text):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    group = parse("", text) + bind("", "") + RUN + Sync
    assert out(relay, client, group)[0] == f"Parse {text.replace(' a', ' gateway_t_1') if text[-1] == 'a' else text}"
    told(relay, client)
    assert relay.sessions[relay.servers[0]].prepared.keys() == {b""}
    out(relay, client, bind("", "a") + Sync)
    assert told(relay, client) == ['E 26000 prepared statement "a" does not exist', "Z"]


def test_plan_that_does_not_fit_has_every_statement_prepared_again_before_its_next_use(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + parse("b", "select 2") + Sync)
    relay.link.rewriter.generation += 1  # as the front does on 0A000
    assert out(relay, client, bind("", "a") + RUN + Sync) == [
        "Close Sgateway_t_1",
        "Parse gateway_t_1 select 1",
        "Bind gateway_t_1",
        "Execute",
        "Sync",
    ]
    assert out(relay, client, bind("", "a") + RUN + Sync) == ["Bind gateway_t_1", "Execute", "Sync"]
    assert out(relay, client, bind("", "b") + RUN + Sync)[:2] == ["Close Sgateway_t_2", "Parse gateway_t_2 select 2"]


def test_name_whose_parse_may_yet_fail_is_waited_for_by_the_next_group(relay):
    client, _ = relay.clients
    server = relay.servers[0]
    relay.send(client, parse("a", "select 1") + Sync + bind("", "a") + RUN + Sync)
    assert shown(relay.sent(server)) == ["Parse gateway_t_1 select 1", "Sync"]
    assert client.stalled
    relay.send(client, query("select 2"))
    assert relay.sent(server) == b"", "what follows waits too"
    relay.answer(server, messages.ParseComplete + messages.ready_for_query(messages.IDLE))
    assert shown(relay.sent(server)) == ["Bind gateway_t_1", "Execute", "Sync", "Query select 2"]


@pytest.mark.parametrize("behind", [parse("b", "select 1"), bind("", "a")])
def test_request_behind_a_failure_leaves_what_the_server_has(relay, behind):
    # The server was asked to prepare it again, and said that it exists.
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    relay.link.rewriter.generation += 1
    out(relay, client, bind("", "nobody's") + Flush)
    out(relay, client, behind + Sync)
    told(relay, client)
    out(relay, client, bind("", "a") + RUN + Sync)
    assert told(relay, client) == ["2", "D select 1", "C", "Z"]


def test_stall_behind_an_answer_that_is_made_here_ends_with_the_group_that_it_waits_for():
    # Neither side sent anything any more.
    with relay_of(capacity=1) as relay:
        (client,) = relay.clients
        group = parse("a", "select 1") + close(STATEMENT, "a") + parse("a", "select 2") + Sync
        relay.send(client, parse("b", "select 2") + Sync + group)
        relay.settle()
        assert told(relay, client) == ["1", "Z", "1", "3", "1", "Z"]


def test_query_behind_a_group_that_may_not_prepare_its_statement_waits():
    # The group failed, its Parse of ours with it, and the statement of the Query did not exist.
    with relay_of(2, capacity=1) as relay:
        client, other = relay.clients
        out(relay, client, parse("a", "select 1") + Sync)
        out(relay, other, parse("b", "select 2") + Sync)
        told(relay, client)
        relay.send(client, bind("", "nobody's") + bind("", "a") + RUN + Sync + query("execute a"))
        relay.settle()
        assert told(relay, client) == [
            'E 26000 prepared statement "nobody\'s" does not exist',
            "Z",
            "D select 1",
            "C",
            "Z",
        ]


def test_query_that_executes_a_statement_in_a_failed_transaction_gets_one_error(relay):
    client, _ = relay.clients
    out(relay, client, parse("a", "select 1") + Sync)
    relay.link.rewriter.generation += 1
    out(relay, client, query("begin"))
    out(relay, client, query("bad"))
    told(relay, client)
    out(relay, client, query("execute a"))
    assert [line[:7] for line in told(relay, client)] == ["E 25P02", "Z"]


def test_deallocate_all_that_fails_gives_no_name_back_that_never_was(relay):
    client, _ = relay.clients
    relay.send(client, query("begin") + parse("a", "bad") + Sync + query("deallocate all") + query("rollback"))
    relay.settle()
    assert client.statements == {}


def test_rewriting_is_left_alone_in_session_mode(relay):
    client, _ = relay.clients
    relay.pool.rewrites = False
    group = parse("a", "select 1") + describe(STATEMENT, "a") + bind("", "a") + RUN + close(STATEMENT, "a") + Sync
    relay.send(client, group)
    assert relay.sent(relay.servers[0]) == group


def test_error_about_a_statement_names_the_client_s(relay):
    client, _ = relay.clients
    out(relay, client, parse("my own", "select 1") + Sync)
    error = messages.error_response({"message": 'no "gateway_t_1", "gateway_t_2", "gateway_t_1"'})
    expected = messages.error_response({"message": 'no "my own", "gateway_t_2", "my own"'})
    assert own_names(client, relay.servers[0], error) == expected
    assert own_names(relay.clients[1], relay.servers[0], error) == error


def test_error_about_a_statement_under_deallocation_names_the_client_s(relay):
    client, _ = relay.clients
    out(relay, client, parse("my own", "select 1") + Sync)
    relay.send(client, query('deallocate "my own"'))
    error = messages.error_response({"message": '"gateway_t_1" is gone'})
    assert b'"my own" is gone' in own_names(client, relay.servers[0], error)
    relay.settle()


TEXTS = st.sampled_from(["select 1", "select 2", "bad"])
KEYS = st.sampled_from(["a", "b"])
NAMED = st.one_of(
    st.builds(parse, KEYS, TEXTS),
    st.builds(lambda name, text: parse(name, text) + bind("", name) + RUN, KEYS, TEXTS),
    st.builds(lambda name: bind("", name) + RUN, KEYS),
    st.builds(lambda name: close(STATEMENT, name), KEYS),
    st.builds(lambda name: describe(STATEMENT, name), KEYS),
    TEXTS.map(lambda text: parse("", text) + bind("", "") + RUN),
    st.just(Sync),
)
QUERIES = st.sampled_from(
    ["select 1", "bad", "begin", "commit", "rollback", "execute a", "deallocate b", "deallocate all", "discard all"]
).map(query)

Script = list[tuple[int, bytes, str]]


def scripts(messages: st.SearchStrategy[bytes]) -> st.SearchStrategy[Script]:
    """Who speaks, a group or a query, and how much is answered before the next one speaks."""
    groups = st.lists(messages, min_size=1, max_size=5).map(lambda group: b"".join(group) + Sync)
    paces = st.sampled_from(["settle", "answer", "wait"])
    return st.lists(st.tuples(st.integers(0, 1), groups | QUERIES, paces), max_size=15)


def check_against_own_sessions(script: Script, servers: int, capacity: int) -> None:
    """Compare what two clients are told over shared servers with what each would be told by a session of its own."""
    with relay_of(2, servers, capacity) as relay:
        own = {client: Session() for client in relay.clients}
        expected = dict.fromkeys(relay.clients, b"")
        for which, group, pace in [*script, *[(which, query("rollback"), "settle") for which in (0, 1)]]:
            client = relay.clients[which]
            expected[client] += own[client].receive(group)
            relay.send(client, group)
            if pace == "answer":
                for server in relay.servers:
                    relay.answer(server, relay.sessions[server].receive(relay.sent(server)))
            elif pace == "settle":
                relay.settle()
        relay.settle()
        for client in relay.clients:
            assert plain(relay.peers[client].received()) == plain(expected[client])
            names = client.statements or {}
            assert {name: statement.body for name, statement in names.items()} == bodies(own[client])
        for server in relay.servers:
            there = bodies(relay.sessions[server])
            valid = {statement.name: statement.body for statement, valid in server.statements.items() if valid}
            assert valid.items() <= there.items()
            assert there.keys() <= {statement.name for statement in server.statements}
            assert len(server.statements) <= capacity
            assert server.cycle.is_free()


@settings(max_examples=100, deadline=None)
@given(script=scripts(NAMED), servers=st.integers(1, 2), capacity=st.integers(1, 3))
def test_named_statements_of_any_pipelines_are_those_of_a_session_of_one_s_own(script, servers, capacity):
    check_against_own_sessions(script, servers, capacity)


WORDS = st.sampled_from(["parse", "parse bad", "close", "query", "bind"])
PHRASES = st.lists(WORDS, min_size=1, max_size=2) | WORDS.map(lambda word: ["bind nobody's", word])
UNNAMED = st.lists(st.tuples(st.integers(0, 1), PHRASES), min_size=5, max_size=30)


@settings(max_examples=100, deadline=None)
@given(groups=UNNAMED, servers=st.integers(1, 2))
def test_unnamed_statement_of_any_pipelines_is_never_another_client_s(groups, servers):
    with relay_of(2, servers) as relay:
        for which, words in groups:
            known = {
                "parse": parse("", f"select {which}"),
                "parse bad": parse("", "bad"),
                "bind": bind("", "") + RUN,
                "bind nobody's": bind("", "nobody's"),
                "close": close(STATEMENT, ""),
                "query": query(f"select {which}"),
            }
            relay.send(relay.clients[which], b"".join(known[word] for word in words) + Sync)
            relay.settle()
        for which, client in enumerate(relay.clients):
            rows = [line for line in told(relay, client) if line.startswith("D")]
            assert set(rows) <= {f"D select {which}"}


def bodies(session: Session) -> dict[bytes, bytes]:
    """The named statements of a session, as they stand in Parse."""
    return {name: text + b"\0\0\0" for name, text in session.prepared.items() if name}


def plain(data: bytes) -> list[tuple[str, bytes]]:
    """Messages as types and bodies; whose name an error tells is the subject of other tests."""
    found = []
    while data:
        size = int.from_bytes(data[1:5], "big") + 1
        found.append((chr(data[0]), re.sub(rb'statement "\w+"', b"statement", data[5:size])))
        data = data[size:]
    return found
