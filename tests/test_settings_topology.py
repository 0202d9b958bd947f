"""A topology file: what it may say, and what is told of each thing that is wrong with it."""

import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from gateway import topology
from gateway.settings import PARAMETERS, AuthType, Listen, Parameter, PoolMode, Settings
from gateway.topology import Fault, SettingsError

EXAMPLE = Path(__file__).parents[1] / "topology.toml"

MINIMAL = """
[front]
listen = ["127.0.0.1:6432"]
[front.auth]
type = "trust"
[cluster.main]
[[cluster.main.node]]
name = "a"
host = "10.0.0.1"
[database."*"]
cluster = "main"
"""


@pytest.fixture
def write(tmp_path: Path):
    """Write the topology file and return where."""

    def write(text: str | bytes) -> Path:
        path = tmp_path / "topology.toml"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


@pytest.fixture
def load(write):
    """Load MINIMAL with lines added at the end, or with one table's lines added below its header."""

    def load(*lines: str, into: str = "") -> Settings:
        return topology.load(write(_with(*lines, into=into)))

    return load


@pytest.fixture
def faults(write):
    """Tell the faults of MINIMAL with lines added, as text."""

    def faults(*lines: str, into: str = "") -> list[str]:
        return [str(fault) for fault in topology.check(write(_with(*lines, into=into)))]

    return faults


def _with(*lines: str, into: str = "") -> str:
    added = "\n".join(lines)
    return MINIMAL.replace(f"{into}\n", f"{into}\n{added}\n", 1) if into else MINIMAL + added + "\n"


# What a file may say


def test_minimal_file_gives_defaults(load, tmp_path):
    settings = load()
    assert settings.front.listen == (Listen(host="127.0.0.1", port=6432),)
    assert settings.front.pool_mode is PoolMode.TRANSACTION
    assert settings.cluster["main"].node[0].port == 5432
    assert settings.database["*"].cluster == "main"
    assert settings.path == str(tmp_path / "topology.toml")
    assert settings.warnings == ()


def test_values_of_every_kind_arrive_as_their_types(load):
    front = load("workers = 4", 'pool_mode = "session"', "server_login_retry = 3", into="[front]").front
    assert (front.workers, front.pool_mode, front.server_login_retry) == (4, PoolMode.SESSION, 3.0)
    assert isinstance(front.server_login_retry, float)


def test_paths_are_taken_relative_to_the_file(load, tmp_path, monkeypatch):
    (tmp_path / "users").mkdir()
    (tmp_path / "users" / "list.txt").touch(mode=0o600)
    monkeypatch.chdir("/")
    assert load('file = "users/../users/list.txt"', into="[front.auth]").front.auth.file == f"{tmp_path}/users/list.txt"


@pytest.mark.parametrize(
    ("text", "listen"),
    [
        ("0.0.0.0:6432", Listen(host="0.0.0.0", port=6432)),
        ("[::]:6432", Listen(host="::", port=6432)),
        ("[fe80::1%eth0]:6432", Listen(host="fe80::1%eth0", port=6432)),
        ("db.example.com:1", Listen(host="db.example.com", port=1)),
        ("unix:/run/gateway", Listen(host="/run/gateway", port=7000)),
    ],
)
def test_listen_in_each_form_is_taken_apart(write, text, listen):
    settings = topology.load(
        write(MINIMAL.replace("[front]", "[front]\nunix_port = 7000").replace("127.0.0.1:6432", text))
    )
    assert settings.front.listen == (listen,)


def test_listen_on_a_relative_directory_is_next_to_the_file(write, tmp_path):
    settings = topology.load(write(MINIMAL.replace("127.0.0.1:6432", "unix:run")))
    assert settings.front.listen[0].unix_path == f"{tmp_path}/run/.s.PGSQL.6432"


@pytest.mark.parametrize("host", ["pg1", "pg_1.example.com", "10.0.0.2", "::1", "fe80::1%eth0", "/var/run/postgresql"])
def test_node_host_of_each_kind_is_kept(load, host):
    settings = load("[[cluster.main.node]]", 'name = "b"', f'host = "{host}"')
    assert settings.cluster["main"].node[1].host == host


def test_file_with_byte_order_mark_and_crlf_is_read(write):
    assert topology.check(write(b"\xef\xbb\xbf" + MINIMAL.replace("\n", "\r\n").encode())) == []


# Files that cannot be read at all


def test_missing_file_is_one_fault(tmp_path):
    path = tmp_path / "absent.toml"
    assert topology.check(path) == [Fault(str(path), "no such file or directory")]


def test_directory_in_place_of_a_file_is_one_fault(tmp_path):
    assert topology.check(tmp_path) == [Fault(str(tmp_path), "is a directory")]


def test_syntax_error_tells_line_and_column(write):
    assert [str(f) for f in topology.check(write("[front]\nlisten = 3 4\n"))] == [
        "line 2, column 12: expected newline or end of document after a statement"
    ]


def test_syntax_error_at_the_end_says_so(write):
    (fault,) = topology.check(write('a = "'))
    assert fault.path in ("end of document", "line 1, column 6")


@pytest.mark.parametrize(
    "text",
    [b"\xff\xfe", b"a = " + b"[" * 100_000, b"a = " + b"9" * 10_000, b"a = 2024-99-99"],
    ids=["not utf-8", "deep", "long number", "no such date"],
)
def test_malformed_file_of_each_kind_is_one_fault(write, text):
    assert len(topology.check(write(text))) == 1


# Values that do not fit


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("max_client_conn = -1", "-1 is not valid (expected integer (0 .. 2147483647))"),
        ("max_client_conn = true", "true is not valid (expected integer (0 .. 2147483647))"),
        (
            "max_client_conn = 99999999999999999999",
            "99999999999999999999 is not valid (expected integer (0 .. 2147483647))",
        ),
        ('query_wait_timeout = "2 min"', '"2 min" is not valid (expected number (0 .. 2147483647), in seconds)'),
        ("query_wait_timeout = inf", "Infinity is not valid (expected number (0 .. 2147483647), in seconds)"),
        ("query_wait_timeout = nan", "NaN is not valid (expected number (0 .. 2147483647), in seconds)"),
        ("tcp_user_timeout = 30000", "30000 is not valid (expected number (0 .. 3600), in seconds)"),
        ('pool_mode = "transction"', '"transction" is not valid (expected session | transaction | statement)'),
        ("server_round_robin = 1", "1 is not valid (expected true | false)"),
        ("workers = 65", "65 is not valid (expected auto | integer (1 .. 64))"),
        ('unix_socket_mode = "0789"', '"0789" is not valid (expected octal mode as text, such as "0770")'),
        ("server_check_query = {}", "a table is not valid (expected text)"),
        ("server_check_query = 2024-01-01", '"2024-01-01" is not valid (expected text)'),
        ('server_check_query = "select\\u0000 1"', '"select\\u0000 1" is not valid (expected text)'),
        ('ignore_startup_parameters = "a"', "is not a list (expected list of text, not empty)"),
    ],
)
def test_value_that_does_not_fit_tells_what_would(faults, line, told):
    assert faults(line, into="[front]") == [f"front.{line.split()[0]}: {told}"]


def test_item_that_does_not_fit_is_counted_from_zero(faults):
    assert faults('ignore_startup_parameters = ["a", 3]', into="[front]") == [
        "front.ignore_startup_parameters[1]: 3 is not valid (expected text, not empty)"
    ]


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1", ":6432", "*:6432", "::1:6432", "[::1]", "a:0", "a:65536", "a:99999999", "unix:", "a b:1"]
)
def test_listen_that_is_no_address_tells_the_forms(write, text):
    told = topology.check(write(MINIMAL.replace("127.0.0.1:6432", text)))
    assert told == [
        Fault(
            "front.listen[0]",
            f'"{text}" is not valid',
            'expected "host:port", "[address]:port" or "unix:/directory"',
        )
    ]


@pytest.mark.parametrize("host", ["", "10.0.0.1:5432", "a,b", "[::1]", "a b", "postgres://a"])
def test_node_host_that_is_none_is_a_fault(faults, host):
    assert faults("[[cluster.main.node]]", 'name = "b"', f'host = "{host}"') == [
        f'cluster.main.node[1].host: "{host}" is not valid (expected host name, address or "/directory")'
    ]


def test_faulty_secret_is_not_shown(faults):
    assert faults("probe_password = 12345678", into="[cluster.main]") == [
        "cluster.main.probe_password: its value is not valid (expected text, not empty)"
    ]


def test_connection_string_in_place_of_a_table_is_not_shown(faults):
    assert faults("[database]", 'shop = "host=a password=hunter2"') == [
        "database.shop: is not a table (write [database.shop])"
    ]


def test_value_in_place_of_a_table_or_list_of_tables_tells_the_header(write):
    text = 'front = 3\n[cluster.main]\nnode = "a"\n[database]\n"a b" = 1\n'
    assert [str(f) for f in topology.check(write(text))] == [
        "front: is not a table (write [front])",
        "cluster.main.node: is not a list (write [[cluster.main.node]])",
        'database."a b": is not a table (write [database."a b"])',
        'front.listen: is empty (expected list of "host:port", "[address]:port" or "unix:/directory")',
        "front.auth.file: is missing (scram-sha-256 needs the users' secrets)",
        'database: is missing (write [database."*"] and its cluster)',
    ]


# Keys that are missing or unknown


def test_empty_file_tells_all_that_is_missing(write):
    assert [str(f) for f in topology.check(write(""))] == [
        'front.listen: is empty (expected list of "host:port", "[address]:port" or "unix:/directory")',
        "front.auth.file: is missing (scram-sha-256 needs the users' secrets)",
        "cluster: is missing (write [cluster.main] and its [[cluster.main.node]])",
        'database: is missing (write [database."*"] and its cluster)',
    ]


def test_missing_keys_of_a_table_are_told_once_each(faults):
    assert faults("[[cluster.main.node]]", "[[cluster.main.node]]", 'name = "b"', "[database.shop]") == [
        "cluster.main.node[1].name: is missing (expected text, not empty)",
        'cluster.main.node[1].host: is missing (expected host name, address or "/directory")',
        'cluster.main.node[2].host: is missing (expected host name, address or "/directory")',
        "database.shop.cluster: is missing (expected text, not empty)",
    ]


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("max_client_con = 3", "did you mean max_client_conn?"),
        ("so_reuseport = 1", "did you mean workers?"),
        ("auth_type = 'md5'", "did you mean type in [front.auth]?"),
        ("server_tls_sslmode = 'prefer'", "did you mean mode in [front.tls] or mode in [cluster.NAME.tls]?"),
        ("pool_size = 3", "did you mean pool_size in [database.NAME] or pool_size in [user.NAME]?"),
        ("zzz = 3", ""),
    ],
)
def test_unknown_key_names_the_nearest(write, line, hint):
    told = topology.check(write(_with(line, into="[front]")))
    assert told == [Fault(f"front.{line.split()[0]}", "is unknown", hint)]


def test_unknown_table_names_the_nearest(faults):
    assert faults("[databases]") == ["databases: is unknown (did you mean database?)"]


@pytest.mark.parametrize("name", ["path", "warnings"])
def test_key_that_only_the_program_sets_is_unknown(faults, write, name):
    (fault,) = topology.check(write(f"{name} = 'x'\n{MINIMAL}"))
    assert (fault.path, fault.message) == (name, "is unknown")


# Values that contradict each other


def test_node_repeated_by_name_or_address_is_a_fault(faults):
    assert faults("[[cluster.main.node]]", 'name = "a"', 'host = "10.0.0.1"') == [
        "cluster.main.node[1].name: a is used already (by cluster.main.node[0].name)",
        "cluster.main.node[1].host: 10.0.0.1 port 5432 is used already (by cluster.main.node[0].host)",
    ]


def test_node_of_the_same_host_on_another_port_is_fine(faults):
    assert faults("[[cluster.main.node]]", 'name = "b"', 'host = "10.0.0.1"', "port = 5433") == []


def test_listen_repeated_is_a_fault(write):
    text = MINIMAL.replace('["127.0.0.1:6432"]', '["127.0.0.1:6432", "127.0.0.1:6432"]')
    assert [str(f) for f in topology.check(write(text))] == [
        "front.listen[1]: 127.0.0.1:6432 is used already (by front.listen[0])"
    ]


def test_listen_on_a_path_too_long_for_the_kernel_is_a_fault(write):
    told = topology.check(write(MINIMAL.replace("127.0.0.1:6432", "unix:/" + "d" * 100)))
    assert told == [Fault("front.listen[0]", "the path of the socket is longer than 107 bytes")]


def test_cluster_without_node_is_a_fault(faults):
    assert faults("[cluster.spare]") == [
        "cluster.spare.node: is missing (write [[cluster.spare.node]] and its name and host)"
    ]


def test_database_of_unknown_cluster_or_node_names_the_known(faults):
    assert faults("[database.a]", 'cluster = "man"', "[database.b]", 'cluster = "main"', 'node = "z"') == [
        'database.a.cluster: there is no [cluster.man] (expected "main")',
        'database.b.node: there is no node "z" in its cluster (expected "a")',
    ]


@pytest.mark.parametrize("name", ["gateway", "pgbouncer"])
def test_database_named_as_the_console_is_a_fault(faults, name):
    assert faults(f"[database.{name}]", 'cluster = "main"') == [
        f"database.{name}: is the name of the console (choose another name and set dbname)"
    ]


def test_database_password_without_user_is_a_fault(faults):
    assert faults('password = "x"', into='[database."*"]') == [
        'database."*".password: is set without user (a password belongs to the user that it logs in)'
    ]


def test_auth_file_that_cannot_be_read_is_a_fault(faults, tmp_path):
    assert faults('file = "absent"', into="[front.auth]") == [
        f"front.auth.file: {tmp_path}/absent is not a file that can be read"
    ]
    assert faults('file = "."', into="[front.auth]") == [f"front.auth.file: {tmp_path} is not a file that can be read"]


def test_auth_without_file_is_a_fault_unless_everyone_is_trusted(write):
    (fault,) = topology.check(write(MINIMAL.replace("trust", "md5")))
    assert str(fault) == "front.auth.file: is missing (md5 needs the users' secrets)"


def test_all_faults_of_a_file_are_told_at_once(write):
    text = MINIMAL.replace("127.0.0.1:6432", "nowhere").replace("10.0.0.1", "a b").replace('"main"', '"man"')
    with pytest.raises(SettingsError) as caught:
        topology.load(write(text))
    assert str(caught.value).splitlines() == [
        'front.listen[0]: "nowhere" is not valid (expected "host:port", "[address]:port" or "unix:/directory")',
        'cluster.main.node[0].host: "a b" is not valid (expected host name, address or "/directory")',
        'database."*".cluster: there is no [cluster.man] (expected "main")',
    ]
    assert [fault.path for fault in caught.value.faults] == [
        "front.listen[0]",
        "cluster.main.node[0].host",
        'database."*".cluster',
    ]


# What is not available yet


@pytest.mark.parametrize("mode", ["require", "verify-ca", "verify-full"])
def test_tls_that_must_be_used_is_a_fault(faults, mode):
    hint = "is not available yet (use disable and a network that you trust)"
    assert faults("[front.tls]", f'mode = "{mode}"') == [f"front.tls.mode: {mode} {hint}"]
    assert faults("[cluster.main.tls]", f'mode = "{mode}"') == [f"cluster.main.tls.mode: {mode} {hint}"]


@pytest.mark.parametrize("type", ["cert", "hba"])
def test_login_by_certificate_or_hba_is_a_fault(write, type):
    told = topology.check(write(MINIMAL.replace("trust", type)))
    assert told == [Fault("front.auth.type", f"{type} is not available yet", "use scram-sha-256")]


def test_discovery_that_is_no_name_is_a_fault(write):
    text = MINIMAL.replace("[[cluster.main.node]]", 'discover = "srv:x"').replace('name = "a"', "")
    text = text.replace('host = "10.0.0.1"', "")
    assert [str(f) for f in topology.check(write(text))] == [
        (
            "cluster.main.discover: 'x' is not the name of a service: "
            'expected "srv:_postgresql._tcp.NAME" or "dns:NAME:PORT"'
        )
    ]


@pytest.mark.parametrize(
    ("lines", "fault"),
    [
        (
            ['discover = "dns:db.example.com:5432"'],
            "discover: is set beside nodes (remove either it or [[cluster.main.node]])",
        ),
        (['manager = "patroni"'], 'patroni_urls: is for manager patroni, which needs it ("http://10.0.0.11:8008")'),
        (
            ['manager = "patroni"', 'patroni_urls = ["http://a:8008"]', "[cluster.main.failover]", 'mode = "promote"'],
            (
                "failover.mode: promote is not for a cluster that has a manager "
                "(two who promote end in two primaries: use follow)"
            ),
        ),
        (
            ["[cluster.main.failover]", 'mode = "command"'],
            "failover.failover_command: is missing (mode command promotes by it)",
        ),
        (
            ["[[cluster.main.node]]", 'name = "b"', 'host = "b"', 'kind = "gateway"'],
            "node: are of several kinds (a cluster is of servers or of gateways)",
        ),
    ],
)
def test_what_a_cluster_cannot_be_at_once_is_a_fault(write, lines, fault):
    text = MINIMAL.replace("[cluster.main]\n", "[cluster.main]\n" + "\n".join(lines) + "\n")
    assert [str(f) for f in topology.check(write(text))] == [f"cluster.main.{fault}"]


@pytest.mark.parametrize(
    ("lines", "warning"),
    [
        (
            ["[front.tls]", 'mode = "prefer"'],
            "front.tls.mode: prefer is not available yet, connections are not encrypted",
        ),
        (
            ["[cluster.main.failover]", 'mode = "promote"'],
            "cluster.main.failover.quorum: 1 of 1 nodes never answer while the primary is down",
        ),
        (["[user.bi]", 'reads = "standby"'], "user.bi.reads: standby is not available yet, the primary answers reads"),
        (["[metrics]", 'listen = "127.0.0.1:9930"'], "metrics.listen: is not served yet"),
    ],
)
def test_what_cannot_be_kept_is_a_warning(load, lines, warning):
    assert load(*lines).warnings == (warning,)


def test_balanced_reads_are_a_warning(load):
    assert load('reads = "balanced"', into="[cluster.main]").warnings == (
        "cluster.main.reads: balanced is not available yet, the primary answers reads",
    )


# What is legal but dangerous


@pytest.mark.parametrize(
    ("listen", "warned"),
    [("127.0.0.9:1", False), ("[::1]:1", False), ("localhost:1", False), ("unix:/tmp", False), ("0.0.0.0:1", True)],
)
def test_trust_beyond_this_machine_is_a_warning(write, listen, warned):
    warnings = topology.load(write(MINIMAL.replace("127.0.0.1:6432", listen))).warnings
    assert warnings == ((f"front.auth.type: trust lets whoever reaches {listen} be any user",) if warned else ())


def test_file_with_secrets_open_to_all_is_a_warning(load, tmp_path):
    users = tmp_path / "userlist.txt"
    users.touch(mode=0o600)
    lines = ['file = "userlist.txt"', "[database.shop]", 'cluster = "main"', 'user = "u"', 'password = "p"']
    users.chmod(0o604)
    load(*lines, into='type = "trust"')
    (tmp_path / "topology.toml").chmod(0o604)
    told = load(*lines, into='type = "trust"').warnings
    assert told == tuple(
        f"{tmp_path}/{name}: holds secrets and every user of this machine can read it"
        for name in ("topology.toml", "userlist.txt")
    )
    users.chmod(0o640)
    (tmp_path / "topology.toml").chmod(0o640)
    assert load(*lines, into='type = "trust"').warnings == ()


# No file is answered by a traceback


VALUES = st.recursive(
    st.sampled_from(["0", "-1", "1e400", "nan", "true", '""', '"a"', '"127.0.0.1:1"', "2024-01-01", '"\\u0000"']),
    lambda inner: (
        st.lists(inner, max_size=2).map(lambda items: f"[{', '.join(items)}]")
        | st.dictionaries(
            st.sampled_from(["main", "listen", "node", "name", "cluster", "auth", "tls", "mode", '"\\u0007"']),
            inner,
            max_size=3,
        ).map(lambda table: "{" + ", ".join(f"{key} = {value}" for key, value in table.items()) + "}")
    ),
    max_leaves=12,
)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tables=st.dictionaries(st.sampled_from(["front", "cluster", "database", "user", "console", "x"]), VALUES))
def test_any_toml_is_loaded_or_told_as_faults(write, tables):
    path = write("\n".join(f"{key} = {value}" for key, value in tables.items()))
    told = topology.check(path)
    assert told, "none of these can be whole"
    assert all(str(fault).isprintable() for fault in told)


@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40))
def test_any_bytes_are_told_as_faults(write, text):
    assert topology.check(write(text))


# The example


def test_example_is_without_fault_and_shows_what_it_does():
    settings = topology.load(EXAMPLE)
    assert settings.front.auth.type is AuthType.SCRAM_SHA_256
    assert [node.name for node in settings.cluster["main"].node] == ["pg1", "pg2", "pg3"]
    assert all("userlist.txt" in warning for warning in settings.warnings)


def test_example_with_every_line_switched_on_contradicts_itself_only_where_it_must(write, tmp_path):
    (tmp_path / "userlist.txt").touch(mode=0o600)
    text = re.sub(r"^#(?=[a-z\[])", "", EXAMPLE.read_text(), flags=re.MULTILINE)
    assert [fault.path for fault in topology.check(write(text))] == [
        "cluster.main.discover"  # beside nodes
    ]


@pytest.mark.parametrize("parameter", PARAMETERS, ids=lambda p: f"{p.section}.{p.name}")
def test_example_shows_every_setting_with_its_words_and_its_default(parameter: Parameter):
    header = {
        "cluster.NAME.node": "[[cluster.main.node]]",
        "database.NAME": '[database."*"]',
        "user.NAME": "[user.reporting]",
    }
    section = header.get(parameter.section, f"[{parameter.section.replace('NAME', 'main')}]")
    _, _, body = EXAMPLE.read_text().partition(section + "\n")
    body = re.split(r"^#?\[", body, maxsplit=1, flags=re.MULTILINE)[0]
    (line,) = re.findall(rf"^#?{parameter.name} = .*$", body, flags=re.MULTILINE)
    assert parameter.doc in body
    if parameter.default not in (None, ()) and line.startswith("#"):
        default = str(parameter.default).lower() if isinstance(parameter.default, bool) else parameter.default
        shown = f'"{default}"' if isinstance(default, str) and not isinstance(parameter.default, bool) else str(default)
        assert line.split(" = ", 1)[1].startswith(shown)
