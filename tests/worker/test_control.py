"""The records between supervisor and worker: each comes out as it went in, wherever the stream is cut."""

from __future__ import annotations

from typing import get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.control import (
    Answer,
    Ask,
    CancelElsewhere,
    Configure,
    ConsoleClosed,
    ConsoleInput,
    ConsoleOpened,
    ConsoleOutput,
    Demand,
    Down,
    Drain,
    Grant,
    Limit,
    Met,
    Ready,
    Records,
    Up,
    View,
    encode,
    first_share,
)
from gateway.settings import Cluster, Console, Database, Front, Listen, Metrics, Node, PoolMode, Reads, Settings, User
from health import view
from health.view import ClusterView, Epoch, NodeView, Role, Status

SETTINGS = Settings(
    front=Front(listen=(Listen(host="::1", port=6432), Listen(host="/run", port=1)), workers=2, query_timeout=0.5),
    cluster={"main": Cluster(node=(Node(name="pg1", host="10.0.0.1", weight=0),), probe_password="hush")},
    database={"*": Database(cluster="main"), "app": Database(cluster="main", pool_mode=PoolMode.SESSION, pool_size=0)},
    user={"bob": User(reads=Reads.STANDBY, query_timeout=1.5)},
    console=Console(admin_users=("é",)),
    metrics=Metrics(listen=Listen(host="127.0.0.1", port=9930)),
    path="/etc/topology.toml",
    warnings=("careful",),
)
VIEW = ClusterView(
    "main",
    3,
    Epoch("pg1", 2**64 - 1, 7, 2),
    "pg1",
    (
        NodeView(view.Node("pg1", "a.example"), ("10.0.0.1", "10.0.0.2"), Role.PRIMARY, Status.UP, "", 1.5, 0.001, 0),
        NodeView(view.Node("pg2", "/run"), (), Role.FALSE_PRIMARY, Status.DOWN, "refused", 0.0),
    ),
)
DOWN: list[Down] = [
    Configure(SETTINGS, {"app": "SCRAM-SHA-256$4096:c2FsdA==$a:b", "é": ""}, 1, 2, bytes(range(256)), 1000),
    Configure(Settings(), None, 0, 1, b"", 0),
    View(VIEW),
    View(ClusterView("main", 0, Epoch(), None, ())),
    Grant(Limit("pool", "app", "bob"), 7),
    Grant(Limit("clients"), 0),
    ConsoleOutput(5, b"\0\xff", True),
    ConsoleOutput(5, b""),
    CancelElsewhere(-1, b"\0" * 32),
    Ask(1, "pools"),
    Drain(0.5),
]
UP: list[Up] = [
    Ready(77),
    Demand(Limit("user", "", "bob"), 20, 10, 9, 2**40),
    Met("main", "pg1", "57P01"),
    ConsoleOpened(5, "é", True),
    ConsoleInput(5, bytes(100_000)),
    ConsoleClosed(5),
    CancelElsewhere(2**31 - 1, b"keyk"),
    Answer(1, [{"database": "app", "sv_idle": 2**40, "replication": False, "addr": None}]),
    Answer(2, []),
]


@pytest.mark.parametrize(("records", "union"), [(DOWN, Down), (UP, Up)], ids=["down", "up"])
def test_samples_hold_every_kind_of_record(records, union):
    assert {type(record) for record in records} == set(get_args(union))


@pytest.mark.parametrize(
    ("record", "union"), [(record, union) for records, union in ((DOWN, Down), (UP, Up)) for record in records]
)
def test_record_comes_out_as_it_went_in(record, union):
    assert list(Records(union).feed(encode(record))) == [record]


@given(st.lists(st.sampled_from(DOWN[2:]), max_size=8), st.lists(st.integers(1, 60), min_size=1))
def test_stream_cut_anywhere_yields_its_records_in_order(records, sizes):
    data = b"".join(map(encode, records))
    reader, at, turn = Records(Down), 0, 0
    found: list[object] = []
    while at < len(data):
        size = sizes[turn % len(sizes)]
        found += reader.feed(data[at : at + size])
        at, turn = at + size, turn + 1
    assert found == records


def test_stream_byte_by_byte_yields_a_record_with_its_last_byte():
    reader = Records(Up)
    data = encode(Ready(1)) + encode(ConsoleClosed(2))
    found = [(at, record) for at in range(len(data)) for record in reader.feed(data[at : at + 1])]
    assert found == [(len(encode(Ready(1))) - 1, Ready(1)), (len(data) - 1, ConsoleClosed(2))]


def test_record_of_the_other_direction_is_refused():
    with pytest.raises(msgspec.ValidationError):
        list(Records(Up).feed(encode(Drain(1.0))))
    with pytest.raises(msgspec.ValidationError):
        list(Records(Down).feed(encode(Ready(1))))


@given(st.integers(0, 10_000), st.integers(1, 64))
def test_first_shares_of_all_workers_are_the_whole(budget, workers):
    shares = [first_share(budget, workers, index) for index in range(workers)]
    assert sum(shares) == budget
    assert max(shares) - min(shares) <= 1
