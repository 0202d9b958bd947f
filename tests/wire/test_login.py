"""Login from both sides: against each other, and against peers that are wrong, out of order or hostile."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.wire import login, messages, scram
from gateway.wire.login import ClientLogin, Method, ServerLogin, ServerRefused
from gateway.wire.userlist import Secret

PLAIN = Secret.of("pencil")
MD5 = Secret.of(login.md5_secret("app", "pencil"))
SCRAM = Secret.of(scram.build_secret("pencil", b"salt of 16 bytes", 16))
EMPTY = Secret.of("")
BINDING = b"hash of a certificate"

STORED = SCRAM.stored
assert STORED is not None
KEYS = scram.derive("pencil", STORED.salt, STORED.iterations)


def client(
    method: Method, secret: Secret | None, cache: scram.Cache | None = None, binding: bytes = b""
) -> ClientLogin:
    """The side of the gateway that a client called app meets."""
    return ClientLogin(
        method,
        "app",
        secret,
        mock_key=b"mock",
        nonce=b"n" * 18,
        salt=b"salt",
        cache={} if cache is None else cache,
        iterations=16,
        channel_binding=binding,
    )


def server(
    password: str | None = "pencil", keys: scram.Keys | None = None, binding: bytes = b"", encrypted: bool = True
) -> ServerLogin:
    """The side of the gateway that a server meets."""
    client_key, server_key = keys[:2] if keys else (None, None)
    return ServerLogin(
        "app",
        password,
        client_key,
        server_key,
        nonce=b"m" * 18,
        cache={},
        encrypted=encrypted,
        channel_binding=binding,
    )


def split(data: bytes) -> list[tuple[int, bytes]]:
    """Take messages apart into types and bodies."""
    parts = []
    while data:
        end = 1 + int.from_bytes(data[1:5], "big")
        parts.append((data[0], data[5:end]))
        data = data[end:]
    return parts


def converse(asking: ClientLogin, answering: ServerLogin) -> None:
    """Let the two sides log in to each other."""
    question = asking.start()
    while not asking.done:
        [message] = split(question)
        [message] = split(answering.receive(*message))
        question = asking.receive(*message)
    for message in split(question + messages.AuthenticationOk + messages.ready_for_query(messages.IDLE)):
        assert answering.receive(*message) == b""
    assert answering.done


@pytest.mark.parametrize(
    ("method", "secret"),
    [
        (Method.TRUST, None),
        (Method.TRUST, PLAIN),
        (Method.PASSWORD, PLAIN),
        (Method.PASSWORD, MD5),
        (Method.PASSWORD, SCRAM),
        (Method.MD5, PLAIN),
        (Method.MD5, MD5),
        (Method.MD5, SCRAM),
        (Method.SCRAM, PLAIN),
        (Method.SCRAM, SCRAM),
    ],
)
def test_client_with_the_password_is_admitted(method, secret):
    asking = client(method, secret)
    converse(asking, server())
    assert asking.done
    assert asking.password == ("pencil" if method is Method.PASSWORD else None)


@pytest.mark.parametrize(
    ("method", "secret", "password"),
    [
        (Method.PASSWORD, PLAIN, "pen"),
        (Method.PASSWORD, MD5, "pen"),
        (Method.PASSWORD, SCRAM, "pen"),
        (Method.PASSWORD, None, "pencil"),
        (Method.PASSWORD, EMPTY, "pencil"),
        (Method.MD5, PLAIN, "pen"),
        (Method.MD5, MD5, "pen"),
        (Method.MD5, SCRAM, "pen"),
        (Method.MD5, None, "pencil"),
        (Method.MD5, EMPTY, ""),
        (Method.SCRAM, PLAIN, "pen"),
        (Method.SCRAM, SCRAM, "pen"),
        (Method.SCRAM, MD5, "pencil"),
        (Method.SCRAM, None, "pencil"),
        (Method.SCRAM, EMPTY, ""),
    ],
)
def test_client_without_the_password_is_refused_in_the_same_words(method, secret, password):
    cache: scram.Cache = {}
    asking = client(method, secret, cache)
    with pytest.raises(errors.INVALID_PASSWORD, match=r'^password authentication failed for user "app"$'):
        converse(asking, server(password))
    assert not asking.done
    assert (asking.password, asking.client_key) == (None, None)
    assert all(known == "pencil" for known, _, _ in cache)  # a guess is not remembered


def test_unknown_user_is_asked_as_a_known_one_is():
    first = messages.sasl_initial_response(scram.MECHANISM, b"n,,n=,r=abc")[5:]
    challenges = []
    for secret in (None, PLAIN, MD5):
        asking = client(Method.SCRAM, secret)
        asking.start()
        challenges.append(asking.receive(messages.PASSWORD_MESSAGE, first))
    assert len(set(challenges)) == 1


def test_client_key_learnt_from_scram_logs_in_to_the_server():
    front = client(Method.SCRAM, SCRAM)
    converse(front, server())
    assert front.client_key == KEYS.client_key
    converse(client(Method.SCRAM, SCRAM), server(None, KEYS))


def test_login_with_scram_again_derives_nothing(monkeypatch):
    cache: scram.Cache = {}
    converse(client(Method.SCRAM, PLAIN, cache), server())
    monkeypatch.delattr(scram, "derive")
    asking = client(Method.SCRAM, PLAIN, cache)
    asking.start()
    assert asking.receive(
        messages.PASSWORD_MESSAGE, messages.sasl_initial_response(scram.MECHANISM, b"n,,n=,r=abc")[5:]
    )


@pytest.mark.parametrize("secret", [PLAIN, SCRAM])
def test_login_with_password_again_derives_nothing(monkeypatch, secret):
    cache: scram.Cache = {}
    converse(client(Method.PASSWORD, secret, cache), server())
    monkeypatch.delattr(scram, "derive")
    converse(client(Method.PASSWORD, secret, cache), server())


def test_login_over_tls_on_both_sides_is_bound_to_the_channel():
    asking = client(Method.SCRAM, SCRAM, binding=BINDING)
    assert asking.start() == messages.authentication_sasl([scram.MECHANISM_PLUS, scram.MECHANISM])
    converse(client(Method.SCRAM, SCRAM, binding=BINDING), server(binding=BINDING))
    converse(client(Method.SCRAM, SCRAM), server(binding=BINDING))
    converse(client(Method.SCRAM, SCRAM, binding=BINDING), server())
    with pytest.raises(errors.SCRAM_BINDING_CHECK):
        converse(client(Method.SCRAM, SCRAM, binding=BINDING), server(binding=b"another"))


@pytest.mark.parametrize("size", [1_000, 5_000, 65_534])
def test_password_up_to_64_kb_is_taken(size):
    password = "x" * size
    converse(client(Method.PASSWORD, Secret.of(password)), server(password))
    converse(client(Method.SCRAM, Secret.of(password)), server(password))


@pytest.mark.parametrize("body", [b"", b"pencil", b"pencil\0\0", b"pen\0cil\0", b"x" * 65_535 + b"\0"])
@pytest.mark.parametrize("method", [Method.PASSWORD, Method.MD5])
def test_password_that_is_no_string_or_too_long_is_refused(method, body):
    asking = client(method, PLAIN)
    asking.start()
    with pytest.raises(errors.PASSWORD_LENGTH):
        asking.receive(messages.PASSWORD_MESSAGE, body)


@pytest.mark.parametrize("method", [Method.PASSWORD, Method.MD5])
def test_password_that_is_empty_is_refused(method):
    asking = client(method, EMPTY)
    asking.start()
    with pytest.raises(errors.EMPTY_PASSWORD):
        asking.receive(messages.PASSWORD_MESSAGE, b"\0")


def test_password_in_any_encoding_is_compared_by_its_bytes():
    asking = client(Method.PASSWORD, Secret.of("\udce9"))
    asking.start()
    asking.receive(messages.PASSWORD_MESSAGE, b"\xe9\0")
    assert asking.password == "\udce9"


@pytest.mark.parametrize(
    ("method", "error"),
    [
        (Method.PASSWORD, errors.PASSWORD_EXPECTED),
        (Method.MD5, errors.PASSWORD_EXPECTED),
        (Method.SCRAM, errors.SASL_EXPECTED),
    ],
)
def test_client_that_sends_another_message_than_its_password_is_refused(method, error):
    asking = client(method, PLAIN)
    asking.start()
    with pytest.raises(error, match="got message type 81"):
        asking.receive(messages.QUERY, b"select 1\0")


@pytest.mark.parametrize("method", Method)
def test_client_that_sends_its_password_unasked_is_refused(method):
    # A password before StartupMessage ended another pooler's process.
    asking = client(method, PLAIN)
    if method is Method.TRUST:
        asking.start()
    with pytest.raises(errors.MESSAGE_TYPE, match="invalid frontend message type 112"):
        asking.receive(messages.PASSWORD_MESSAGE, b"pencil\0")


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"", errors.SASL_MECHANISM),
        (b"GS2-KRB5\0\0\0\0\x00", errors.SASL_MECHANISM),
        (b"SCRAM-SHA-256-PLUS\0\0\0\0\x0bn,,n=,r=abc", errors.SASL_MECHANISM),
        (b"SCRAM-SHA-256", errors.MESSAGE_CUT),
        (b"SCRAM-SHA-256\0", errors.MESSAGE_CUT),
        (b"SCRAM-SHA-256\0\0\0\0", errors.MESSAGE_CUT),
        (b"SCRAM-SHA-256\0\0\0\0\x0cn,,n=,r=abc", errors.MESSAGE_CUT),
        (b"SCRAM-SHA-256\0\0\0\0\x0an,,n=,r=abc", errors.MESSAGE_FORMAT),
        (b"SCRAM-SHA-256\0\xff\xff\xff\xfen,,n=,r=abc", errors.MESSAGE_CUT),
        (b"SCRAM-SHA-256\0\xff\xff\xff\xffn,,n=,r=abc", errors.MESSAGE_FORMAT),
        (b"SCRAM-SHA-256\0\0\0\0\0", errors.SCRAM_MALFORMED),
        (messages.sasl_initial_response(scram.MECHANISM, b"n,,n=,r=" + b"x" * 1024)[5:], errors.MESSAGE_LENGTH),
    ],
)
def test_sasl_initial_response_of_another_form_is_refused(body, error):
    # A length of 0xffffffff made another pooler read past its buffer (CVE-2026-6664).
    asking = client(Method.SCRAM, SCRAM)
    asking.start()
    with pytest.raises(error) as caught:
        asking.receive(messages.PASSWORD_MESSAGE, body)
    assert caught.value.severity is errors.Severity.FATAL


def test_sasl_initial_response_without_a_first_word_is_asked_for_it():
    asking = client(Method.SCRAM, SCRAM)
    asking.start()
    answer = asking.receive(messages.PASSWORD_MESSAGE, b"SCRAM-SHA-256\0\xff\xff\xff\xff")
    assert answer == messages.authentication_sasl_continue(b"")
    assert b"r=abc" in asking.receive(messages.PASSWORD_MESSAGE, b"n,,n=,r=abc")


WELCOME = [
    (messages.NEGOTIATE_PROTOCOL_VERSION, b"\0\x03\0\0\0\0\0\0"),
    (messages.NOTICE_RESPONSE, b"SNOTICE\0Mearly\0\0"),
    (messages.AUTHENTICATION, b"\0\0\0\0"),
    (messages.PARAMETER_STATUS, b"TimeZone\0UTC\0"),
    (messages.PARAMETER_STATUS, b"TimeZone\0CET\0"),
    (messages.NOTICE_RESPONSE, b"SNOTICE\0Mlate\0\0"),
    (messages.BACKEND_KEY_DATA, b"\0\0\0\x07" + b"k" * 32),
    (messages.READY_FOR_QUERY, b"T"),
]


def test_server_that_trusts_tells_all_it_has_to_say():
    answering = server(None)
    assert not answering.done
    assert [answering.receive(*message) for message in WELCOME] == [b""] * len(WELCOME)
    assert answering.done
    assert answering.parameters == {"TimeZone": "CET"}
    assert (answering.pid, answering.key) == (7, b"k" * 32)
    assert answering.status == messages.IN_TRANSACTION


def test_server_without_backend_key_data_is_logged_in_to():
    answering = server(None)
    answering.receive(messages.AUTHENTICATION, b"\0\0\0\0")
    answering.receive(messages.READY_FOR_QUERY, b"I")
    assert answering.done
    assert (answering.pid, answering.key) == (0, b"")


def test_server_that_refuses_is_quoted():
    response = messages.error_response({"severity": "FATAL", "sqlstate": "3D000", "message": "no such thing"})
    with pytest.raises(ServerRefused, match="no such thing") as caught:
        server().receive(*split(response)[0])
    assert caught.value.fields["sqlstate"] == "3D000"
    assert caught.value.raw == response


def test_server_that_refuses_without_saying_why_is_quoted():
    with pytest.raises(ServerRefused) as caught:
        server().receive(messages.ERROR_RESPONSE, b"")
    assert caught.value.fields == {"severity": "ERROR", "sqlstate": "XX000", "message": ""}


@pytest.mark.parametrize(
    ("request_", "method"),
    [(7, "GSSAPI"), (9, "SSPI"), (2, "Kerberos V5"), (99, "99"), (8, "8"), (11, "11"), (12, "12")],
)
def test_server_that_asks_for_an_unsupported_method_is_refused(request_, method):
    with pytest.raises(errors.SERVER_LOGIN_METHOD, match=f"unsupported authentication method: {method}$"):
        server().receive(messages.AUTHENTICATION, request_.to_bytes(4, "big"))


def test_server_that_asks_for_an_unsupported_mechanism_is_refused():
    with pytest.raises(errors.SERVER_LOGIN_METHOD, match="method: OAUTHBEARER, OTHER"):
        server().receive(*split(messages.authentication_sasl(["OAUTHBEARER", "OTHER"]))[0])


def test_server_that_asks_for_the_password_in_clear_gets_it_over_encryption_alone():
    [question] = split(messages.AuthenticationCleartextPassword)
    assert server().receive(*question) == messages.password_message("pencil")
    with pytest.raises(errors.SERVER_PASSWORD_IN_CLEAR):
        server(encrypted=False).receive(*question)


def test_server_that_asks_for_md5_is_answered_with_the_stored_hash():
    [question] = split(messages.authentication_md5_password(b"salt"))
    assert server(MD5.text).receive(*question) == server("pencil").receive(*question)


@pytest.mark.parametrize(
    ("password", "question"),
    [
        (None, messages.AuthenticationCleartextPassword),
        (MD5.text, messages.AuthenticationCleartextPassword),
        (SCRAM.text, messages.AuthenticationCleartextPassword),
        (None, messages.authentication_md5_password(b"salt")),
        (SCRAM.text, messages.authentication_md5_password(b"salt")),
    ],
)
def test_server_that_asks_for_what_is_not_known_is_refused(password, question):
    with pytest.raises(errors.SERVER_LOGIN_SECRET):
        server(password).receive(*split(question)[0])


@pytest.mark.parametrize("password", [None, MD5.text, SCRAM.text])
def test_server_that_asks_for_scram_without_a_usable_secret_is_refused(password):
    with pytest.raises(errors.SERVER_LOGIN_SECRET):
        converse(client(Method.SCRAM, SCRAM), server(password))


@pytest.mark.parametrize(
    "question",
    [
        messages.AuthenticationOk,
        messages.authentication_sasl_final(b"v="),
        messages.authentication_sasl_continue(b"r=x,s=AAAA,i=1"),
    ],
)
def test_server_that_leaves_scram_before_its_end_is_refused(question):
    answering = server()
    answering.receive(*split(messages.authentication_sasl([scram.MECHANISM]))[0])
    with pytest.raises(errors.SERVER_UNPROVEN):
        answering.receive(*split(question)[0])


@pytest.mark.parametrize(
    ("type_", "body"),
    [
        (messages.READY_FOR_QUERY, b"I"),  # nobody has said that we are admitted
        (messages.AUTHENTICATION, b""),
        (messages.AUTHENTICATION, b"\0\0\0"),
        (messages.AUTHENTICATION, b"\0\0\0\nSCRAM-SHA-256"),
        (messages.PARAMETER_STATUS, b"TimeZone"),
        (messages.PARAMETER_STATUS, b"TimeZone\0"),
        (messages.BACKEND_KEY_DATA, b"\0\0\0\x07"),
        (messages.BACKEND_KEY_DATA, b"\0" * 261),
        (messages.DATA_ROW, b"\0\0"),
    ],
)
def test_server_that_breaks_the_protocol_is_refused(type_, body):
    with pytest.raises(errors.SERVER_CONNECT, match="during login"):
        server().receive(type_, body)


GARBAGE = st.one_of(
    st.binary(max_size=60),
    st.lists(
        st.sampled_from(
            [
                b"SCRAM-SHA-256",
                b"\0",
                b"\0\0\0",
                b"\x0b",
                b"\xff\xff\xff\xff",
                b"n,,",
                b"n=,r=abc",
                b"c=biws",
                b",p=",
                b"v=",
            ]
        )
    ).map(b"".join),
)


@given(
    st.sampled_from(Method),
    st.sampled_from([None, PLAIN, MD5, SCRAM]),
    st.lists(st.tuples(st.sampled_from(b"ppppQX"), GARBAGE), max_size=4),
)
def test_client_sending_garbage_is_never_admitted_and_raises_nothing_but_gateway_error(method, secret, received):
    asking = client(method, secret)
    asking.start()
    for type_, body in received:
        with contextlib.suppress(errors.GatewayError):
            asking.receive(type_, body)
    assert asking.done == (method is Method.TRUST)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(b"RRRRSKNvEZD"),
            st.one_of(
                GARBAGE,
                st.tuples(st.sampled_from([0, 3, 5, 7, 10, 11, 12]), GARBAGE).map(
                    lambda t: t[0].to_bytes(4, "big") + t[1]
                ),
            ),
        ),
        max_size=6,
    )
)
def test_server_sending_garbage_raises_nothing_but_gateway_error_or_server_refused(received):
    answering = server()
    for message in received:
        with contextlib.suppress(errors.GatewayError, ServerRefused):
            answering.receive(*message)
