"""The declarations: what PARAMETERS, the schema and the wire to the workers make of the structs."""

import json

import msgspec
import pytest

from gateway import settings
from gateway.settings import PARAMETERS, Front, Listen, Parameter, Settings


def _parameter(section: str, name: str) -> Parameter:
    (found,) = [p for p in PARAMETERS if (p.section, p.name) == (section, name)]
    return found


def test_parameters_of_every_section_are_described():
    assert {p.section for p in PARAMETERS} == {
        "front",
        "front.auth",
        "front.tls",
        "cluster.NAME",
        "cluster.NAME.node",
        "cluster.NAME.failover",
        "cluster.NAME.tls",
        "database.NAME",
        "user.NAME",
        "console",
        "metrics",
    }
    assert [p for p in PARAMETERS if not p.doc or p.doc.endswith(".")] == []


def test_parameter_with_a_range_and_a_unit_tells_both():
    assert _parameter("front", "query_wait_timeout") == Parameter(
        section="front",
        name="query_wait_timeout",
        type="number (0 .. 2147483647)",
        unit="s",
        default=120.0,
        required=False,
        reloadable=True,
        pgbouncer=(),
        doc="Longest wait of a client for a server",
    )


@pytest.mark.parametrize(
    ("section", "name", "words"),
    [
        ("front", "workers", "auto | integer (1 .. 64)"),
        ("front", "pool_mode", "session | transaction | statement"),
        ("front", "server_round_robin", "true | false"),
        ("front", "server_check_query", "text"),
        ("front", "unix_socket_mode", 'octal mode as text, such as "0770"'),
        ("front", "listen", 'list of "host:port", "[address]:port" or "unix:/directory"'),
        ("front.auth", "file", "path"),
        ("cluster.NAME.node", "host", 'host name, address or "/directory"'),
        ("database.NAME", "pool_size", "integer (0 .. 2147483647)"),
        ("console", "admin_users", "list of text, not empty"),
    ],
)
def test_parameter_type_of_each_kind_is_in_words(section, name, words):
    assert _parameter(section, name).type == words


def test_parameter_known_to_pgbouncer_by_another_name_tells_it():
    assert _parameter("front", "listen").pgbouncer == ("listen_addr", "listen_port", "unix_socket_dir")
    assert _parameter("front.auth", "type").pgbouncer == ("auth_type",)


def test_parameters_that_need_a_restart_are_those_of_sockets_and_processes():
    assert {p.name for p in PARAMETERS if not p.reloadable} == {
        "listen",
        "listen_backlog",
        "unix_port",
        "unix_socket_mode",
        "workers",
        "read_buffer_size",
    }


def test_defaults_of_every_struct_satisfy_their_own_types():
    structs = [s for s in vars(settings).values() if isinstance(s, type) and issubclass(s, msgspec.Struct)]
    for struct in structs:
        for field in msgspec.structs.fields(struct):
            if field.default is not msgspec.NODEFAULT:
                msgspec.convert(msgspec.to_builtins(field.default), field.type)


def test_settings_sent_as_msgpack_arrive_equal():
    sent = Settings(
        front=Front(listen=(Listen(host="::1", port=6432), Listen(host="/run/gateway", port=6432))),
        cluster={"main": settings.Cluster(node=(settings.Node(name="a", host="10.0.0.1"),))},
        database={"*": settings.Database(cluster="main", password="secret")},
        user={"app": settings.User(reads=settings.Reads.PRIMARY)},
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(sent), type=Settings) == sent


def test_settings_once_made_cannot_be_changed():
    with pytest.raises(AttributeError):
        Settings().front.max_client_conn = 1  # type: ignore[misc]


@pytest.mark.parametrize(
    ("listen", "text", "unix_path"),
    [
        (Listen(host="0.0.0.0", port=6432), "0.0.0.0:6432", None),
        (Listen(host="::", port=6432), "[::]:6432", None),
        (Listen(host="/tmp", port=5432), "/tmp/.s.PGSQL.5432", "/tmp/.s.PGSQL.5432"),
    ],
)
def test_listen_of_each_family_reads_as_its_address(listen, text, unix_path):
    assert (str(listen), listen.unix_path) == (text, unix_path)


def test_schema_of_the_file_refuses_unknown_keys_and_takes_addresses_as_text():
    schema = json.loads(json.dumps(settings.schema()))
    definitions = schema["$defs"]
    assert set(definitions["Settings"]["properties"]) == set(settings.keys(Settings))
    assert definitions["Front"]["additionalProperties"] is False
    assert definitions["Front"]["properties"]["default_pool_size"]["default"] == 20
    assert definitions["Listen"]["type"] == "string"
