"""SCRAM-SHA-256 and SCRAM-SHA-256-PLUS, both ends of it, over messages without their framing.

1. A nonce is passed in: printable ASCII without commas. Nothing is kept from one login to the next but in a Cache.
2. A proof is verified against what is stored, without PBKDF2 (2 ms for 4,096 iterations); the ClientKey that it
   reveals logs in to a server that stores the same secret.
3. Server raises what PostgreSQL would say to a client; Client raises SERVER_UNPROVEN.

Called by login; `build_secret` by the command `gateway hash`.
Manual: "SASL Authentication"; RFC 5802, 7677, 4013; source: auth-scram.c, fe-auth-scram.c, scram-common.c, saslprep.c.
"""

from __future__ import annotations

import hashlib
import hmac
import stringprep
import unicodedata
from binascii import a2b_base64, b2a_base64
from typing import Final, NamedTuple

from gateway import errors

MECHANISM: Final = "SCRAM-SHA-256"
MECHANISM_PLUS: Final = "SCRAM-SHA-256-PLUS"
MAX_MESSAGE_SIZE: Final = 1024  # PG_MAX_SASL_MESSAGE_LENGTH in auth-sasl.h
MAX_ITERATIONS: Final = 1_000_000  # 0.5 s of PBKDF2: a hostile server must not stop us for longer

_KEY_SIZE = 32
_SALT_SIZE = 16
_CACHE_SIZE = 10_000  # far more than passwords in use; a peer that changes its salt each time must not fill the memory
_BINDING_TYPE = b"tls-server-end-point"
_INNER = bytes(byte ^ 0x36 for byte in range(256))
_OUTER = bytes(byte ^ 0x5C for byte in range(256))
_NONCE = bytes(range(0x21, 0x7F)).replace(b",", b"")


class Keys(NamedTuple):
    """What a password becomes with some salt and number of iterations; as good as the password."""

    client_key: bytes
    server_key: bytes
    stored_key: bytes


class Hmac:
    """HMAC-SHA-256 with a key of at most 64 bytes that comes again: half the time of hmac.digest, 4 us less each."""

    def __init__(self, key: bytes) -> None:
        block = key.ljust(64, b"\0")
        self._inner, self._outer = hashlib.sha256(block.translate(_INNER)), hashlib.sha256(block.translate(_OUTER))

    def digest(self, message: bytes) -> bytes:
        """Return the code of a message."""
        inner, outer = self._inner.copy(), self._outer.copy()
        inner.update(message)
        outer.update(inner.digest())
        return outer.digest()


class StoredKeys:
    """What is stored of a password: enough to verify a client, not to be one."""

    def __init__(self, iterations: int, salt: bytes, stored_key: bytes, server_key: bytes) -> None:
        self.iterations = iterations
        self.salt = salt
        self.stored_key = stored_key
        self.server_key = server_key
        # What each login with them needs, made for the first one.
        self.cost = b""
        self.stored_hmac: Hmac = None  # type: ignore[assignment]
        self.server_hmac: Hmac = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredKeys) and (self.iterations, self.salt, self.stored_key, self.server_key) == (
            other.iterations,
            other.salt,
            other.stored_key,
            other.server_key,
        )

    def __hash__(self) -> int:
        return hash(self.stored_key)

    def prepare(self) -> None:
        """Make what a login needs of them."""
        self.cost = b",s=%b,i=%d" % (_encode(self.salt), self.iterations)
        self.stored_hmac, self.server_hmac = Hmac(self.stored_key), Hmac(self.server_key)


Cache = dict[tuple[str, bytes, int], Keys]
"""Keys by password, salt and iterations. Owned by the caller, who clears it when secrets change."""


def derive(password: str, salt: bytes, iterations: int) -> Keys:
    """Derive the keys of a password: PBKDF2, slow on purpose."""
    salted = hashlib.pbkdf2_hmac("sha256", prepare(password), salt, iterations)
    return keys_of(hmac.digest(salted, b"Client Key", "sha256"), hmac.digest(salted, b"Server Key", "sha256"))


def keys_of(client_key: bytes, server_key: bytes) -> Keys:
    """Return a pair of keys with what is stored of the first."""
    return Keys(client_key, server_key, hashlib.sha256(client_key).digest())


def derive_once(password: str, salt: bytes, iterations: int, cache: Cache) -> Keys:
    """Derive the keys of a password, or find them in the cache."""
    keys = cache.get((password, salt, iterations))
    if keys is None:
        keys = derive(password, salt, iterations)
        remember(password, salt, iterations, keys, cache)
    return keys


def remember(password: str, salt: bytes, iterations: int, keys: Keys, cache: Cache) -> None:
    """Keep derived keys in the cache."""
    if len(cache) >= _CACHE_SIZE:
        cache.clear()
    cache[password, salt, iterations] = keys


def store(keys: Keys, salt: bytes, iterations: int) -> StoredKeys:
    """Return what to store of the keys that a password has with this salt and number of iterations."""
    return StoredKeys(iterations, salt, keys.stored_key, keys.server_key)


def salt_for(user: str, mock_key: bytes) -> bytes:
    """Return the salt shown for a user without stored keys: always the same one, as if it were stored."""
    return hmac.digest(mock_key, user.encode("utf-8", "surrogateescape"), "sha256")[:_SALT_SIZE]


def mock(user: str, mock_key: bytes, iterations: int) -> StoredKeys:
    """Return stored keys that no password has, so that an unknown user looks like any other and always fails."""
    salt = salt_for(user, mock_key)
    return StoredKeys(
        iterations, salt, hmac.digest(mock_key, b"stored" + salt, "sha256"), hmac.digest(mock_key, salt, "sha256")
    )


def build_secret(password: str, salt: bytes, iterations: int) -> str:
    """Return the text that PostgreSQL stores for a password, and that parse_secret reads."""
    stored = store(derive(password, salt, iterations), salt, iterations)
    keys = b"%b:%b" % (_encode(stored.stored_key), _encode(stored.server_key))
    return f"{MECHANISM}${iterations}:{_encode(salt).decode()}${keys.decode()}"


def parse_secret(text: str) -> StoredKeys | None:
    """Read SCRAM-SHA-256$iterations:salt$StoredKey:ServerKey; None for text that is not of this form."""
    try:
        mechanism, cost, keys = text.split("$")
        iterations, salt = cost.split(":")
        stored_key, server_key = (_decode(key.encode()) for key in keys.split(":"))
        stored = StoredKeys(_iterations(iterations.encode()), _decode(salt.encode()), stored_key, server_key)
    except ValueError:
        return None
    if mechanism != MECHANISM or len(stored_key) != _KEY_SIZE or len(server_key) != _KEY_SIZE:
        return None
    return stored


def prepare(password: str) -> bytes:
    """Return the bytes of a password after SASLprep (RFC 4013), or as they are where it does not allow them.

    Going on with what is not allowed is PostgreSQL's way, as the password may be in another encoding than UTF-8.
    """
    raw = password.encode("utf-8", "surrogateescape")
    if password.isascii():
        return raw
    mapped = "".join(
        [
            " " if stringprep.in_table_c12(character) else character
            for character in password
            if not stringprep.in_table_b1(character)
        ]
    )
    return raw if _prohibited(mapped) else unicodedata.normalize("NFKC", mapped).encode()


def _prohibited(text: str) -> bool:
    # Before NFKC, where the RFC says after: PostgreSQL does it so, and both ends must agree.
    if not text or any(stringprep.in_table_a1(c) or any(table(c) for table in _PROHIBITED) for c in text):
        return True
    # Text in one direction only: with a right-to-left character, nothing left-to-right, and one at either end.
    if not any(map(stringprep.in_table_d1, text)):
        return False
    ends = stringprep.in_table_d1(text[0]) and stringprep.in_table_d1(text[-1])
    return not ends or any(map(stringprep.in_table_d2, text))


_PROHIBITED = (
    stringprep.in_table_c12,
    stringprep.in_table_c21_c22,
    stringprep.in_table_c3,
    stringprep.in_table_c4,
    stringprep.in_table_c5,
    stringprep.in_table_c6,
    stringprep.in_table_c7,
    stringprep.in_table_c8,
    stringprep.in_table_c9,
)


class Server:
    """The side that asks: first(), then final()."""

    def __init__(self, stored: StoredKeys, nonce: bytes, plus: bool = False, channel_binding: bytes = b"") -> None:
        """Set plus when the client chose SCRAM-SHA-256-PLUS; channel_binding is not empty when it was offered."""
        if not stored.cost:
            stored.prepare()
        self._stored = stored
        self._nonce = nonce
        self._plus = plus
        self._binding = channel_binding
        self.client_key = b""

    def first(self, message: bytes) -> bytes:
        """Answer client-first-message; raises 08P01, 0A000 and 28000."""
        _refuse_empty(message)
        try:
            flag, authorization, bare = message.split(b",", 2)
            user, nonce, *_ = bare.split(b",", 2)
        except ValueError:
            raise errors.SCRAM_MALFORMED from None
        self._check_binding(flag)
        if authorization.startswith(b"a="):
            raise errors.SCRAM_AUTHORIZATION
        if user.startswith(b"m="):
            raise errors.SCRAM_EXTENSION
        if authorization or not user.startswith(b"n=") or not nonce.startswith(b"r="):
            raise errors.SCRAM_MALFORMED
        if nonce.translate(None, _NONCE):
            raise errors.SCRAM_NONCE
        self._header = flag + b",,"
        self._bare = bare
        self._nonce = nonce + self._nonce
        self._first = self._nonce + self._stored.cost
        return self._first

    def final(self, message: bytes) -> bytes | None:
        """Answer client-final-message, with None when its proof is wrong; raises 08P01 and 28000."""
        _refuse_empty(message)
        unproven, _, encoded_proof = message.rpartition(b",p=")
        try:
            binding, nonce, *_ = unproven.split(b",", 2)
            proof = _decode(encoded_proof)
        except ValueError:
            raise errors.SCRAM_MALFORMED from None
        if not binding.startswith(b"c=") or not nonce.startswith(b"r=") or len(proof) != _KEY_SIZE:
            raise errors.SCRAM_MALFORMED
        if binding[2:] != _encode(self._header + self._binding if self._plus else self._header):
            raise errors.SCRAM_BINDING_CHECK if self._plus else errors.SCRAM_BINDING_ATTRIBUTE
        if nonce != self._nonce:
            raise errors.SCRAM_RESPONSE(detail="Nonce does not match.")
        auth_message = b"%b,%b,%b" % (self._bare, self._first, unproven)
        client_key = _xor(proof, self._stored.stored_hmac.digest(auth_message))
        if not hmac.compare_digest(hashlib.sha256(client_key).digest(), self._stored.stored_key):
            return None
        self.client_key = client_key
        return b"v=" + _encode(self._stored.server_hmac.digest(auth_message))

    def _check_binding(self, flag: bytes) -> None:
        if flag.startswith(b"p="):
            if not self._plus:
                raise errors.SCRAM_MALFORMED(
                    detail="The client selected SCRAM-SHA-256 without channel binding,"
                    " but the SCRAM message includes channel binding data."
                )
            if flag[2:] != _BINDING_TYPE:
                raise errors.SCRAM_BINDING_TYPE(type=flag[2:].decode("ascii", "backslashreplace"))
        elif flag not in (b"n", b"y"):
            raise errors.SCRAM_MALFORMED(detail="Unexpected channel-binding flag.")
        elif self._plus:
            raise errors.SCRAM_MALFORMED(
                detail="The client selected SCRAM-SHA-256-PLUS,"
                " but the SCRAM message does not include channel binding data."
            )
        elif flag == b"y" and self._binding:
            raise errors.SCRAM_BINDING_DOWNGRADE(
                detail="The client supports SCRAM channel binding but thinks the server does not."
                "  However, this server does support channel binding."
            )


class Client:
    """The side that answers: first(), then final(), then verify()."""

    __slots__ = ("_bare", "_binding", "_header", "_nonce", "_server_signature")

    def __init__(self, nonce: bytes, *, plus: bool = False, channel_binding: bytes = b"") -> None:
        """Set plus for SCRAM-SHA-256-PLUS; channel_binding without it tells that the server did not offer it."""
        self._nonce = nonce
        self._bare = b"n=,r=" + nonce  # PostgreSQL takes the user from StartupMessage
        self._header = b"p=%b,," % _BINDING_TYPE if plus else b"y,," if channel_binding else b"n,,"
        self._binding = channel_binding if plus else b""
        self._server_signature = b""

    def first(self) -> bytes:
        """Return client-first-message."""
        return self._header + self._bare

    def final(self, message: bytes, secret: str | Keys, cache: Cache) -> bytes:
        """Answer server-first-message with a proof that secret, a password or its keys, is known."""
        if self._server_signature:
            raise errors.SERVER_UNPROVEN(reason="a second SCRAM challenge")
        try:
            nonce, salt, iterations, *_ = message.split(b",", 3)
            if not (nonce.startswith(b"r=") and salt.startswith(b"s=") and iterations.startswith(b"i=")):
                raise ValueError
            salt = _decode(salt[2:])
            count = _iterations(iterations[2:])
        except ValueError:
            raise errors.SERVER_UNPROVEN(reason="malformed SCRAM message") from None
        if len(message) > MAX_MESSAGE_SIZE or not nonce[2:].startswith(self._nonce) or nonce[2:] == self._nonce:
            raise errors.SERVER_UNPROVEN(reason="invalid SCRAM nonce")
        keys = derive_once(secret, salt, count, cache) if isinstance(secret, str) else secret
        unproven = b"c=%b,%b" % (_encode(self._header + self._binding), nonce)
        auth_message = b"%b,%b,%b" % (self._bare, message, unproven)
        proof = _xor(keys.client_key, Hmac(keys.stored_key).digest(auth_message))
        self._server_signature = Hmac(keys.server_key).digest(auth_message)
        return b"%b,p=%b" % (unproven, _encode(proof))

    def verify(self, message: bytes) -> None:
        """Check server-final-message: the server knows the secret too."""
        expected = b"v=" + _encode(self._server_signature)
        if not self._server_signature or not hmac.compare_digest(message.partition(b",")[0], expected):
            raise errors.SERVER_UNPROVEN(reason="incorrect server signature")


def _refuse_empty(message: bytes) -> None:
    if not message:
        raise errors.SCRAM_MALFORMED(detail="The message is empty.")


def _xor(left: bytes, right: bytes) -> bytes:
    return (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).to_bytes(_KEY_SIZE, "big")


def _encode(data: bytes) -> bytes:
    return b2a_base64(data, newline=False)


def _decode(data: bytes) -> bytes:
    return a2b_base64(data, strict_mode=True)


def _iterations(digits: bytes) -> int:
    if not digits.isdigit() or not 1 <= int(digits) <= MAX_ITERATIONS:
        raise ValueError("iteration count is out of range")
    return int(digits)
