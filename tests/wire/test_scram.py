"""SCRAM-SHA-256: the RFC's example, both ends against each other, and every way to be wrong."""

import contextlib
from base64 import b64decode, b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import errors
from gateway.wire import scram

# RFC 7677, section 3.
SALT = b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
CLIENT_FIRST = b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
SERVER_NONCE = b"%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
SERVER_FIRST = b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
CLIENT_FINAL = (
    b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
)
SERVER_FINAL = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="

KEYS = scram.derive("pencil", SALT, 4096)
STORED = scram.store(KEYS, SALT, 4096)
BINDING = b"hash of a certificate"
NONCE = b"fyko+d2lbbFgONRv9qkxdawL"


def challenged(plus: bool = False, channel_binding: bytes = b"") -> tuple[scram.Client, scram.Server, bytes]:
    """Both ends after server-first-message, and that message."""
    client = scram.Client(NONCE, plus=plus, channel_binding=channel_binding)
    server = scram.Server(STORED, SERVER_NONCE, plus=plus, channel_binding=channel_binding)
    return client, server, server.first(client.first())


def test_server_given_the_example_of_the_rfc_answers_as_it_does():
    server = scram.Server(STORED, SERVER_NONCE)
    assert server.first(CLIENT_FIRST) == SERVER_FIRST
    assert server.final(CLIENT_FINAL) == SERVER_FINAL
    assert server.client_key == KEYS.client_key


@pytest.mark.parametrize(("plus", "binding"), [(False, b""), (True, BINDING)])
@pytest.mark.parametrize("secret", ["pencil", KEYS])
def test_both_ends_that_know_the_secret_agree(plus, binding, secret):
    client, server, challenge = challenged(plus, binding)
    answer = server.final(client.final(challenge, secret, {}))
    assert answer is not None
    client.verify(answer)
    assert server.client_key == KEYS.client_key


def test_client_with_another_password_is_not_admitted():
    client, server, challenge = challenged()
    assert server.final(client.final(challenge, "pen", {})) is None
    assert server.client_key == b""


def test_client_key_learnt_logs_in_to_a_server_with_the_same_secret():
    client, server, challenge = challenged()
    server.final(client.final(challenge, "pencil", {}))
    learnt = scram.keys_of(server.client_key, STORED.server_key)
    client, server, challenge = challenged()
    assert server.final(client.final(challenge, learnt, {})) is not None


def test_client_derives_keys_once_for_password_salt_and_iterations(monkeypatch):
    client, _, challenge = challenged()
    cache: scram.Cache = {}
    client.final(challenge, "pencil", cache)
    assert cache == {("pencil", SALT, 4096): KEYS}
    monkeypatch.delattr(scram, "derive")
    client, server, challenge = challenged()
    assert server.final(client.final(challenge, "pencil", cache)) is not None


def test_cache_that_is_full_starts_again(monkeypatch):
    # A server that sends another salt each time must not fill the memory.
    monkeypatch.setattr(scram, "_CACHE_SIZE", 2)
    cache: scram.Cache = {}
    for number in range(3):
        scram.derive_once("pencil", bytes([number]), 1, cache)
    assert list(cache) == [("pencil", b"\x02", 1)]


@pytest.mark.parametrize(
    ("first", "error"),
    [
        (b"", errors.SCRAM_MALFORMED),
        (b"n,,n=,r=a\0b", errors.SCRAM_NONCE),
        (b"n,,n=,r=a b", errors.SCRAM_NONCE),
        (b"n,,n=,r=\xe9", errors.SCRAM_NONCE),
        (b"n,,r=abc", errors.SCRAM_MALFORMED),
        (b"n,,x=,r=abc", errors.SCRAM_MALFORMED),
        (b"n,,n=,x=abc", errors.SCRAM_MALFORMED),
        (b"n=,r=abc", errors.SCRAM_MALFORMED),
        (b"x,,n=,r=abc", errors.SCRAM_MALFORMED),
        (b"n,x,n=,r=abc", errors.SCRAM_MALFORMED),
        (b"n,a=root,n=,r=abc", errors.SCRAM_AUTHORIZATION),
        (b"n,,m=ext,n=,r=abc", errors.SCRAM_EXTENSION),
        (b"p=tls-server-end-point,,n=,r=abc", errors.SCRAM_MALFORMED),
    ],
)
def test_server_refuses_a_client_first_message_of_another_form(first, error):
    with pytest.raises(error):
        scram.Server(STORED, SERVER_NONCE).first(first)


@pytest.mark.parametrize("first", [b"y,,n=,r=abc", b"n,,n=user,r=abc,x=1", b"n,,n=\xff,r=abc"])
def test_server_takes_any_user_and_unknown_extensions(first):
    assert scram.Server(STORED, b"def").first(first).startswith(b"r=abcdef,s=")


@pytest.mark.parametrize("first", [b"n,,n=,r=abc", b"y,,n=,r=abc"])
def test_server_asked_for_plus_refuses_a_message_without_channel_binding(first):
    with pytest.raises(errors.SCRAM_MALFORMED) as caught:
        scram.Server(STORED, SERVER_NONCE, plus=True, channel_binding=BINDING).first(first)
    assert "SCRAM-SHA-256-PLUS" in caught.value.detail


def test_server_asked_for_plus_refuses_another_type_of_channel_binding():
    with pytest.raises(errors.SCRAM_BINDING_TYPE, match='channel-binding type "tls-unique"'):
        scram.Server(STORED, SERVER_NONCE, plus=True, channel_binding=BINDING).first(b"p=tls-unique,,n=,r=abc")


def test_server_that_offered_plus_refuses_a_client_that_did_not_see_it():
    with pytest.raises(errors.SCRAM_BINDING_DOWNGRADE):
        scram.Server(STORED, SERVER_NONCE, channel_binding=BINDING).first(b"y,,n=,r=abc")


def test_server_refuses_a_client_bound_to_another_channel():
    client = scram.Client(NONCE, plus=True, channel_binding=b"hash of another certificate")
    server = scram.Server(STORED, SERVER_NONCE, plus=True, channel_binding=BINDING)
    with pytest.raises(errors.SCRAM_BINDING_CHECK):
        server.final(client.final(server.first(client.first()), KEYS, {}))


PROOF = b64encode(bytes(32))


@pytest.mark.parametrize(
    ("final", "error"),
    [
        (b"", errors.SCRAM_MALFORMED),
        (b"c=biws", errors.SCRAM_MALFORMED),
        (b"c=biws,r=abcdef", errors.SCRAM_MALFORMED),
        (b"c=biws,r=abcdef,p=", errors.SCRAM_MALFORMED),
        (b"c=biws,r=abcdef,p=%%%", errors.SCRAM_MALFORMED),
        (b"c=biws,r=abcdef,p=AAAA", errors.SCRAM_MALFORMED),
        (b"x=biws,r=abcdef,p=" + PROOF, errors.SCRAM_MALFORMED),
        (b"c=biws,x=1,r=abcdef,p=" + PROOF, errors.SCRAM_MALFORMED),
        (b"c=eSws,r=abcdef,p=" + PROOF, errors.SCRAM_BINDING_ATTRIBUTE),
        (b"c=biws,r=abcdeg,p=" + PROOF, errors.SCRAM_RESPONSE),
        (b"c=biws,r=abcdef,p=" + PROOF + b",x=1", errors.SCRAM_MALFORMED),
    ],
)
def test_server_refuses_a_client_final_message_of_another_form(final, error):
    server = scram.Server(STORED, b"def")
    server.first(b"n,,n=,r=abc")
    with pytest.raises(error):
        server.final(final)


@pytest.mark.parametrize(
    "challenge",
    [
        b"",
        b"r=" + NONCE + b"x,s=AAAA",
        b"r=" + NONCE + b",s=AAAA,i=4096",  # the server adds nothing to the nonce
        b"r=another,s=AAAA,i=4096",
        b"r=" + NONCE + b"x" * 2000 + b",s=AAAA,i=4096",  # CVE-2026-6665
        b"r=" + NONCE + b"x,s=%,i=4096",
        b"r=" + NONCE + b"x,s=AAAA,i=0",
        b"r=" + NONCE + b"x,s=AAAA,i=-1",
        b"r=" + NONCE + b"x,s=AAAA,i=10000001",
        b"r=" + NONCE + b"x,s=AAAA,i=" + b"9" * 900,
        b"r=" + NONCE + b"x,s=AAAA,i=1e3",
        b"m=ext,r=" + NONCE + b"x,s=AAAA,i=4096",
        b"e=other-error",
    ],
)
def test_client_refuses_a_challenge_that_is_malformed_or_out_of_bounds(challenge):
    with pytest.raises(errors.SERVER_UNPROVEN):
        scram.Client(NONCE).final(challenge, KEYS, {})


def test_client_refuses_a_second_challenge():
    client, _, challenge = challenged()
    client.final(challenge, KEYS, {})
    with pytest.raises(errors.SERVER_UNPROVEN, match="second"):
        client.final(challenge, KEYS, {})


@pytest.mark.parametrize("signature", [b"", b"v=", b"v=%", b"v=AAAA", b"v=" + PROOF, b"e=other-error", b"v=\xff"])
def test_client_refuses_a_server_that_does_not_prove_itself(signature):
    client, _, challenge = challenged()
    client.final(challenge, KEYS, {})
    with pytest.raises(errors.SERVER_UNPROVEN, match="signature"):
        client.verify(signature)


def test_client_refuses_a_signature_before_its_proof():
    with pytest.raises(errors.SERVER_UNPROVEN, match="signature"):
        scram.Client(NONCE).verify(b"v=")


def test_mock_of_a_user_looks_the_same_each_time_and_fails():
    mocked = scram.mock("nobody", b"key", 4096)
    assert mocked == scram.mock("nobody", b"key", 4096)
    assert mocked.salt == scram.salt_for("nobody", b"key")
    assert mocked.salt != scram.mock("somebody", b"key", 4096).salt != scram.mock("somebody", b"other", 4096).salt
    assert len(mocked.salt) == 16
    assert len(mocked.stored_key) == len(mocked.server_key) == 32
    client, server = scram.Client(NONCE), scram.Server(mocked, SERVER_NONCE)
    assert server.final(client.final(server.first(client.first()), "", {})) is None


def test_secret_built_is_read_back():
    text = scram.build_secret("pencil", SALT, 4096)
    assert text == (
        "SCRAM-SHA-256$4096:W22ZaJ0SNY7soEsUEjb6gQ==$"
        "WG5d8oPm3OtcPnkdi4Uo7BkeZkBFzpcXkuLmtbsT4qY=:wfPLwcE6nTWhTAmQ7tl2KeoiWGPlZqQxSrmfPwDl2dU="
    )
    assert scram.parse_secret(text) == STORED


@pytest.mark.parametrize(
    "text",
    [
        "",
        "pencil",
        "SCRAM-SHA-256",
        "SCRAM-SHA-256$4096:AAAA$AAAA:AAAA",
        "SCRAM-SHA-1$4096:AAAA$" + PROOF.decode() + ":" + PROOF.decode(),
        "SCRAM-SHA-256$0:AAAA$" + PROOF.decode() + ":" + PROOF.decode(),
        "SCRAM-SHA-256$x:AAAA$" + PROOF.decode() + ":" + PROOF.decode(),
        "SCRAM-SHA-256$4096:é$" + PROOF.decode() + ":" + PROOF.decode(),
        "SCRAM-SHA-256$4096:AAAA$" + PROOF.decode(),
        "SCRAM-SHA-256$4096:AAAA$" + PROOF.decode() + ":" + PROOF.decode() + ":",
        "SCRAM-SHA-256$4096:\udcff$" + PROOF.decode() + ":" + PROOF.decode(),
    ],
)
def test_secret_of_another_form_is_none(text):
    assert scram.parse_secret(text) is None


@pytest.mark.parametrize(
    ("password", "prepared"),
    [
        ("pencil", b"pencil"),
        ("a\tb", b"a\tb"),
        ("I\u00adX", b"IX"),  # the examples of RFC 4013, section 3
        ("\u00aa", b"a"),
        ("\u2168", b"IX"),
        ("x\u00a0y", b"x y"),
        ("\u0627\u0628", "\u0627\u0628".encode()),
        ("\ufb01", b"fi"),
        ("a\u0007é", "a\u0007é".encode()),  # what is not allowed stays as it is
        ("\u06271", "\u06271".encode()),
        ("\u0627a\u0628", "\u0627a\u0628".encode()),
        ("\u00ad", "\u00ad".encode()),
        ("\u0221", "\u0221".encode()),
        ("a\u2028\u00aa", "a\u2028\u00aa".encode()),
        ("😀\u00aa", "😀\u00aa".encode()),
        ("\udcffx", b"\xffx"),
    ],
)
def test_password_is_prepared_as_postgresql_does(password, prepared):
    assert scram.prepare(password) == prepared


PIECES = st.lists(st.sampled_from([b"n", b"y", b"p=", b",", b"n=", b"r=", b"s=", b"i=", b"c=", b"v=", b"biws", NONCE]))
GARBAGE = st.one_of(st.binary(max_size=100), PIECES.map(b"".join))


@given(GARBAGE, GARBAGE)
def test_server_given_garbage_raises_nothing_but_gateway_error(first, final):
    server = scram.Server(STORED, SERVER_NONCE)
    with contextlib.suppress(errors.GatewayError):
        server.first(first)
    server.first(CLIENT_FIRST)
    with contextlib.suppress(errors.GatewayError):
        assert server.final(final) is None


@given(GARBAGE, GARBAGE)
def test_client_given_garbage_raises_nothing_but_gateway_error(challenge, signature):
    with contextlib.suppress(errors.GatewayError):
        scram.Client(NONCE).final(challenge, KEYS, {})
    with pytest.raises(errors.SERVER_UNPROVEN):
        scram.Client(NONCE).verify(signature)
