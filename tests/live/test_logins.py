"""Who may log in, by which method, on both sides of the gateway.

Manual: "SASL Authentication", "Password Authentication".
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Iterator
from contextlib import contextmanager

import asyncpg
import psycopg
import pytest

from .client import Client, count, error, eventually, types, value
from .endpoints import ADMIN_PASSWORD
from .messages import WHO, password, query, startup

METHODS = ["md5", "scram-sha-256", "password"]


def md5_secret(user: str, text: str) -> str:
    return "md5" + hashlib.md5((text + user).encode(), usedforsecurity=False).hexdigest()


def scram_secret(plain: str, salt: bytes = b"0123456789abcdef", iterations: int = 4096) -> str:
    salted = hashlib.pbkdf2_hmac("sha256", plain.encode(), salt, iterations)
    stored = hashlib.sha256(hmac.digest(salted, b"Client Key", "sha256")).digest()
    server = hmac.digest(salted, b"Server Key", "sha256")
    text = [base64.b64encode(part).decode() for part in (salt, stored, server)]
    return f"SCRAM-SHA-256${iterations}:{text[0]}${text[1]}:{text[2]}"


# Of every kind that a userlist may hold, long ones (#1215, #1520, #1310), and one with unicode and quotes.
PASSWORDS = {
    **dict.fromkeys(["alice", "bob", "carol"], "wonderland"),
    "dave": "p" * 5000,
    "erin": "p" * 60_000,
    "frank": "pä\"ss wörd\u00a0'\\",
}
SECRETS = {
    **{user: password.replace('"', '""') for user, password in PASSWORDS.items()},
    "bob": md5_secret("bob", "wonderland"),
    "carol": scram_secret("wonderland"),
}


@contextmanager
def server_asks(postgres, method: str, password_encryption: str = "scram-sha-256") -> Iterator[None]:
    """PostgreSQL asks alice for a password by `method`, which it stores so."""
    postgres.psql(f"set password_encryption to '{password_encryption}'; alter role alice password 'wonderland'")
    postgres.hba([f"host all alice 127.0.0.1/32 {method}", "host all all 127.0.0.1/32 trust"])
    try:
        eventually(lambda: _is_asked(postgres.port), "the new rules")
        yield
    finally:
        postgres.hba(["host all all 127.0.0.1/32 trust"])
        eventually(lambda: not _is_asked(postgres.port), "the old rules")


def _is_asked(port: int) -> bool:
    with Client(port) as client:
        client.write(startup(user="alice", database="postgres"))
        seen = client.until(lambda seen: count(seen, "R") + count(seen, "E") > 0)
        return seen[0].body != bytes(4)


def user_of(relay, secret: str, user: str = "alice", **more: object) -> str:
    with psycopg.connect(relay.dsn(user=user, password=secret, **more)) as connection:
        return str(connection.execute("select current_user").fetchone())


@pytest.mark.both
@pytest.mark.parametrize("method", METHODS)
def test_client_login_by_every_method_with_every_secret(gateway, method):
    # md5 with a SCRAM secret asks for SCRAM; a secret in md5 cannot serve SCRAM.
    relay = gateway(auth={"type": method}, userlist=SECRETS)
    for user, right in PASSWORDS.items():
        if (method, user) == ("scram-sha-256", "bob"):
            with pytest.raises(psycopg.OperationalError):
                user_of(relay, right, user)
        else:
            assert user in user_of(relay, right, user)
        with pytest.raises(psycopg.OperationalError, match="authentication failed"):
            user_of(relay, "wrong", user)


@pytest.mark.parametrize("method", METHODS)
def test_unknown_user_looks_like_a_wrong_password(gateway, method):
    # The same requests and the same error: no list of users can be made.
    known = "bob" if method == "md5" else "carol"
    relay = gateway(auth={"type": method}, userlist=SECRETS)
    asked, errors = [], []
    for user in (known, "nobody"):
        with Client(relay.port) as client:
            client.write(startup(user=user, database="postgres"))
            asked.append([seen.body[:12] for seen in client.until(lambda seen: count(seen, "R") > 0)])
        with pytest.raises(psycopg.OperationalError) as refused:
            psycopg.connect(relay.dsn(user=user, password="wrong"))
        errors.append(str(refused.value).replace(user, "USER"))
    if method != "md5":  # its salt is in the first twelve bytes
        assert asked[0] == asked[1]
    assert errors[0] == errors[1]


def test_wrong_password_is_28p01_and_fatal(gateway):
    relay = gateway(auth={"type": "password"})
    with Client(relay.port) as client:
        client.write(startup(user="alice", database="postgres"))
        client.until(lambda seen: count(seen, "R") > 0)
        client.write(password("wrong"))
        seen = client.wait_closed()
        fields = error(seen)
        assert (fields["C"], fields["S"]) == ("28P01", "FATAL")
        assert fields["M"] == 'password authentication failed for user "alice"'


@pytest.mark.parametrize("method", METHODS)
def test_empty_password_is_refused(gateway, method):
    # By asyncpg, as libpq does not even send one.
    relay = gateway(auth={"type": method}, userlist={"alice": ""})
    login = asyncpg.connect(host="127.0.0.1", port=relay.port, user="alice", password="", database="postgres")
    with pytest.raises(asyncpg.InvalidPasswordError):
        asyncio.run(login)


def test_asyncpg_logs_in_by_scram(gateway):
    relay = gateway(auth={"type": "scram-sha-256"})

    async def work() -> object:
        connection = await asyncpg.connect(
            host="127.0.0.1", port=relay.port, user="alice", password="wonderland", database="postgres"
        )
        try:
            return await connection.fetchval("select current_user")
        finally:
            await connection.close()

    assert asyncio.run(work()) == "alice"


def test_scram_client_that_requires_channel_binding_is_refused(gateway):
    relay = gateway(auth={"type": "scram-sha-256"})
    with pytest.raises(psycopg.OperationalError, match="channel binding"):
        user_of(relay, "wonderland", channel_binding="require")


@pytest.mark.both
@pytest.mark.parametrize("server", METHODS)
def test_server_login_by_every_method_with_a_plain_secret(gateway, postgres, server):
    with server_asks(postgres, server, "md5" if server == "md5" else "scram-sha-256"):
        relay = gateway(auth={"type": "scram-sha-256"})
        assert "alice" in user_of(relay, "wonderland")


@pytest.mark.both
def test_scram_pass_through_with_scram_secrets_only(gateway, postgres):
    # The userlist holds what PostgreSQL stores; the client's own proof opens the server connection.
    with server_asks(postgres, "scram-sha-256"):
        secret = postgres.psql("select rolpassword from pg_authid where rolname = 'alice'").strip()
        relay = gateway(auth={"type": "scram-sha-256"}, userlist={"alice": secret})
        for _ in range(3):
            assert "alice" in user_of(relay, "wonderland")


def test_md5_pass_through_with_md5_secrets_only(gateway, postgres):
    with server_asks(postgres, "md5", "md5"):
        relay = gateway(auth={"type": "md5"}, userlist={"alice": md5_secret("alice", "wonderland")})
        assert "alice" in user_of(relay, "wonderland")


def test_server_that_refuses_our_password_is_reported_to_the_client(gateway, postgres):
    # One error with the server's SQLSTATE, at login or at the first query; others are undisturbed.
    with server_asks(postgres, "scram-sha-256"):
        relay = gateway(auth={"type": "trust"}, userlist={"alice": "stale"}, query_wait_timeout=2.0)
        with Client(relay.port) as client:
            client.write(startup(user="alice", database="postgres") + query("select 1"))
            seen = client.until(lambda seen: count(seen, "E") > 0)
            assert error(seen)["C"] in ("28P01", "28000", "57P03", "08006")
        assert value(relay.port, "select 1") == "1"


def test_password_change_at_the_server_new_logins_follow_after_reload(gateway, postgres):
    # #1432, #1504: keys that were cached must go with the old password.
    with server_asks(postgres, "scram-sha-256"):
        relay = gateway(auth={"type": "scram-sha-256"}, server_lifetime=0.2)
        assert "alice" in user_of(relay, "wonderland")
        postgres.psql("alter role alice password 'changed'")
        try:
            (relay.directory / "userlist.txt").write_text(f'"alice" "changed"\n"postgres" "{ADMIN_PASSWORD}"\n')
            relay.reload()
            eventually(lambda: _logs_in(relay, "changed"), "the new password")
            with pytest.raises(psycopg.OperationalError):
                user_of(relay, "wonderland")
        finally:
            postgres.psql("alter role alice password 'wonderland'")


def test_trust_lets_known_users_in_without_a_password(gateway):
    relay = gateway()
    assert value(relay.port, "select current_user", user="alice") == "alice"


def test_console_is_for_admin_users(gateway):
    # CVE-2026-6667: a command without the right to it.
    relay = gateway(auth={"type": "md5"}, userlist={"alice": "wonderland"})
    with pytest.raises(psycopg.Error):
        psycopg.connect(relay.dsn("gateway", user="alice", password="wonderland"), autocommit=True).execute(
            "show pools"
        )
    with relay.connect(relay.console_database, password=ADMIN_PASSWORD) as connection:
        assert psycopg.ClientCursor(connection).execute("show pools").description


def test_many_logins_at_once_by_scram(gateway):
    relay = gateway(auth={"type": "scram-sha-256"}, default_pool_size=4)

    async def one() -> object:
        connection = await psycopg.AsyncConnection.connect(relay.dsn(user="alice", password="wonderland"))
        async with connection:
            cursor = await connection.execute("select 1")
            return await cursor.fetchone()

    async def all_of_them() -> list[object]:
        return await asyncio.gather(*(one() for _ in range(50)))

    assert asyncio.run(all_of_them()) == [(1,)] * 50


def test_login_messages_of_an_answered_client_are_complete(gateway):
    relay = gateway(auth={"type": "trust"})
    with Client(relay.port) as client:
        client.write(startup(**WHO))
        seen = client.until(lambda seen: count(seen, "Z") > 0)
        assert types(seen).strip("S").replace("S", "") == "RKZ"


def _logs_in(relay, secret: str) -> bool:
    try:
        return "alice" in user_of(relay, secret)
    except psycopg.OperationalError:
        return False
