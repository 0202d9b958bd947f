"""Login, from either side: ClientLogin admits a client of ours, ServerLogin gets us admitted by PostgreSQL.

1. Both take one whole message at a time and return the bytes to send back; whatever is random is passed in.
2. A failed login says the same, and costs the same, whether the user exists or not.
3. Keys derived from a password are kept in the caller's cache, so that PBKDF2 runs once for each password.

Called by worker.front, which owns the caches, and by session for its own connections.
Manual: "Message Flow", "Start-up"; "SASL Authentication"; source: auth.c, auth-sasl.c, crypt.c, fe-auth.c.
"""

from __future__ import annotations

import enum
import hashlib
import hmac
from binascii import b2a_base64
from typing import Final

from gateway import errors
from gateway.wire import messages, scram
from gateway.wire.messages import PASSWORD_MESSAGE, authentication_sasl_continue, authentication_sasl_final
from gateway.wire.userlist import Secret, SecretKind

MAX_PASSWORD_SIZE: Final = 65_535  # PG_MAX_AUTH_TOKEN_LENGTH in auth.h

_OFFER = messages.authentication_sasl([scram.MECHANISM])
_OFFER_PLUS = messages.authentication_sasl([scram.MECHANISM_PLUS, scram.MECHANISM])
_MECHANISM = scram.MECHANISM.encode()
_MECHANISM_PLUS = scram.MECHANISM_PLUS.encode()
_UNSUPPORTED = {2: "Kerberos V5", 6: "SCM credential", 7: "GSSAPI", 9: "SSPI"}


class Method(enum.StrEnum):
    """How a client proves who it is; a certificate is checked before, and is TRUST here."""

    TRUST = "trust"
    PASSWORD = "password"
    MD5 = "md5"
    SCRAM = "scram-sha-256"


_SCRAM = Method.SCRAM
_TRUST = Method.TRUST


class ServerRefused(Exception):  # noqa: N818  it is the server's error, not ours
    """The server ended the login with an ErrorResponse: its fields, and the whole message as it came."""

    def __init__(self, body: bytes) -> None:
        self.fields = messages.error_fields(body)
        self.raw = messages.message(messages.ERROR_RESPONSE, body)
        super().__init__(self.fields["message"])


# What a client owes us next; numbers, because every login compares them.
_START = 0
_PASSWORD = 1
_SASL_INITIAL = 2
_SASL_FIRST = 3  # it chose a mechanism and has said nothing else
_SASL_FINAL = 4


class ClientLogin:
    """We ask, a client answers: start(), then receive() until done.

    AuthenticationOk is left to the caller, who sends it together with what follows it.
    """

    def __init__(
        self,
        method: Method,
        user: str,
        secret: Secret | None,
        *,
        mock_key: bytes,
        nonce: bytes,
        salt: bytes,
        cache: scram.Cache,
        known: dict[str, scram.StoredKeys] | None = None,
        iterations: int = 4096,
        channel_binding: bytes = b"",
    ) -> None:
        """Prepare to admit a user, whose secret is None when the user or the password is not known.

        The mock_key is any secret, lasting and the same in all processes, that makes unknown users look known. The
        nonce is 18 random bytes, the salt of MD5 is 4. What was made of users' passwords is in known, and is added to
        it: the caller clears it when passwords change. The channel_binding is the tls-server-end-point of our
        certificate (RFC 5929), which offers SCRAM-SHA-256-PLUS.
        """
        # An empty secret means that the user has no password; SCRAM must not take it for the empty password.
        self._secret = secret if secret and secret.text else None
        # As PostgreSQL, "md5" does what the stored secret can: SCRAM when it is that.
        scrams = self._secret is not None and self._secret.kind is SecretKind.SCRAM
        self._method = Method.SCRAM if method is Method.MD5 and scrams else method
        self._user = user
        self._mock_key = mock_key
        self._nonce = nonce
        self._salt = salt
        self._cache = cache
        self._known = {} if known is None else known
        self._iterations = iterations
        self._binding = channel_binding
        self._exchange: scram.Server = None  # type: ignore[assignment]  # from SASL_FIRST on
        self._step = _START
        self.done = False  # is the client admitted?
        self.client_key: bytes | None = None
        self.password: str | None = None

    def start(self) -> bytes:
        """Return the message that asks for proof: nothing for TRUST, which is done at once."""
        if self._method is _SCRAM:
            self._step = _SASL_INITIAL
            return _OFFER_PLUS if self._binding else _OFFER
        if self._method is _TRUST:
            self.done = True
            return b""
        self._step = _PASSWORD
        if self._method is Method.PASSWORD:
            return messages.AuthenticationCleartextPassword
        return messages.authentication_md5_password(self._salt)

    def receive(self, type_: int, body: bytes) -> bytes:
        """Take one message of the client and return the answer, perhaps nothing.

        Raises 28P01 for a wrong or empty password, 08P01 and 28000 and 0A000 for what PostgreSQL would.
        """
        step = self._step
        if step == _START or self.done:
            raise errors.MESSAGE_TYPE(type=type_)
        if type_ != PASSWORD_MESSAGE:
            raise errors.PASSWORD_EXPECTED(type=type_) if step == _PASSWORD else errors.SASL_EXPECTED(type=type_)
        if step == _PASSWORD:
            self._check_password(body)
            return b""
        if step == _SASL_INITIAL:
            return self._begin_exchange(body)
        return self._continue_exchange(body)

    def _check_password(self, body: bytes) -> None:
        if not 0 < len(body) <= MAX_PASSWORD_SIZE or body.find(0) != len(body) - 1:
            raise errors.PASSWORD_LENGTH
        if len(body) == 1:
            raise errors.EMPTY_PASSWORD
        password = body[:-1].decode("utf-8", "surrogateescape")
        if self._method is Method.MD5:
            secret = self._secret
            correct = secret is not None and _equal(password, md5_response(self._user, secret, self._salt))
        elif self._secret and self._secret.kind is SecretKind.MD5:
            correct = _equal(md5_secret(self._user, password), self._secret.text)
        else:
            correct = self._has_stored_keys(password)
        if not correct:
            raise errors.INVALID_PASSWORD(user=self._user)
        if self._method is Method.PASSWORD:
            self.password = password
        self.done = True

    def _has_stored_keys(self, password: str) -> bool:
        stored = self._stored_keys()
        key = (password, stored.salt, stored.iterations)
        keys = self._cache.get(key) or scram.derive(*key)
        if not hmac.compare_digest(scram.store(keys, stored.salt, stored.iterations).stored_key, stored.stored_key):
            return False
        scram.remember(*key, keys, self._cache)  # only now: guesses must not fill the cache
        return True

    def _stored_keys(self) -> scram.StoredKeys:
        secret = self._secret
        if secret is None or secret.kind is SecretKind.MD5:
            return scram.mock(self._user, self._mock_key, self._iterations)
        if secret.stored is not None:
            return secret.stored
        stored = self._known.get(self._user)
        if stored is None:
            salt = scram.salt_for(self._user, self._mock_key)
            keys = scram.derive_once(secret.text, salt, self._iterations, self._cache)
            stored = self._known[self._user] = scram.store(keys, salt, self._iterations)
        return stored

    def _begin_exchange(self, body: bytes) -> bytes:
        mechanism, terminated, rest = body.partition(b"\0")
        plus = bool(self._binding) and mechanism == _MECHANISM_PLUS
        if not plus and mechanism != _MECHANISM:
            raise errors.SASL_MECHANISM
        if not terminated or len(rest) < 4:
            raise errors.MESSAGE_CUT(fatal=True)
        size = int.from_bytes(rest[:4], "big", signed=True)  # -1 when the first word is to come in the next message
        left = len(rest) - 4
        if size != left and (size != -1 or left):
            raise errors.MESSAGE_FORMAT(fatal=True) if -1 <= size < left else errors.MESSAGE_CUT(fatal=True)
        nonce = b2a_base64(self._nonce, newline=False)
        self._exchange = scram.Server(self._stored_keys(), nonce, plus, self._binding)
        self._step = _SASL_FIRST
        return self._continue_exchange(rest[4:]) if size >= 0 else authentication_sasl_continue(b"")

    def _continue_exchange(self, body: bytes) -> bytes:
        if len(body) > scram.MAX_MESSAGE_SIZE:
            raise errors.MESSAGE_LENGTH
        if self._step == _SASL_FIRST:
            challenge = self._exchange.first(body)
            self._step = _SASL_FINAL
            return authentication_sasl_continue(challenge)
        answer = self._exchange.final(body)
        if answer is None:
            raise errors.INVALID_PASSWORD(user=self._user)
        self.client_key = self._exchange.client_key
        self.done = True
        return authentication_sasl_final(answer)


class ServerLogin:
    """PostgreSQL asks, we answer: the caller has sent StartupMessage, and gives all that comes until done."""

    __slots__ = (
        "_admitted",
        "_binding",
        "_cache",
        "_encrypted",
        "_exchange",
        "_keys",
        "_nonce",
        "_proven",
        "_secret",
        "_user",
        "done",
        "key",
        "parameters",
        "pid",
        "status",
    )

    def __init__(
        self,
        user: str,
        password: str | None = None,
        client_key: bytes | None = None,
        server_key: bytes | None = None,
        *,
        nonce: bytes,
        cache: scram.Cache,
        encrypted: bool,
        channel_binding: bytes = b"",
    ) -> None:
        """Prepare to log in with a password, or with the keys of the SCRAM secret that the server stores as well.

        The password may also be an MD5 hash as it is stored, for a server that asks for MD5. The nonce is 18 random
        bytes. A password goes in clear text only over a connection that is encrypted (TLS, or a unix socket). The
        channel_binding is the tls-server-end-point of the server's certificate (RFC 5929).
        """
        self._user = user
        self._secret = None if password is None else Secret.of(password)
        self._keys = scram.keys_of(client_key, server_key) if client_key and server_key else None
        self._nonce = nonce
        self._cache = cache
        self._encrypted = encrypted
        self._binding = channel_binding
        self._exchange: scram.Client | None = None
        self._proven = True  # until the server begins a SCRAM exchange, at the end of which it has to prove itself
        self._admitted = False
        self.done = False
        self.parameters: dict[str, str] = {}
        self.pid = 0  # and no key: some poolers send no BackendKeyData, so no query can be cancelled
        self.key = b""
        self.status = messages.IDLE

    def receive(self, type_: int, body: bytes) -> bytes:
        """Take one message of the server and return the answer, perhaps nothing.

        Raises ServerRefused for an ErrorResponse, and GatewayError where we cannot or must not go on.
        """
        try:
            match type_:
                case messages.AUTHENTICATION if len(body) >= 4 and not self._admitted:
                    return self._authenticate(int.from_bytes(body[:4], "big"), body[4:])
                case messages.PARAMETER_STATUS:
                    name, value = messages.cstrings(body)
                    self.parameters[name] = value
                case messages.BACKEND_KEY_DATA if 8 <= len(body) <= 260:
                    self.pid, self.key = int.from_bytes(body[:4], "big", signed=True), body[4:]
                case messages.READY_FOR_QUERY if self._admitted and len(body) == 1:
                    self.status = body[0]
                    self.done = True
                case messages.NOTICE_RESPONSE | messages.NOTIFICATION_RESPONSE:
                    pass  # there is nobody yet whom they are for
                case messages.NEGOTIATE_PROTOCOL_VERSION:
                    pass  # it serves us by 3.0: the key is then of 4 bytes, and nothing else differs
                case messages.ERROR_RESPONSE:
                    raise ServerRefused(body)
                case _:
                    raise errors.SERVER_CONNECT(reason=f"unexpected message type {type_} during login")
        except ValueError:
            raise errors.SERVER_CONNECT(reason=f"malformed message of type {type_} during login") from None
        return b""

    def _authenticate(self, request: int, data: bytes) -> bytes:
        match request:
            case messages.AUTHENTICATION_OK:
                if not self._proven:
                    raise errors.SERVER_UNPROVEN(reason="authentication was ended before the server's signature")
                self._admitted = True
                return b""
            case messages.AUTHENTICATION_CLEARTEXT_PASSWORD:
                if not self._encrypted:
                    raise errors.SERVER_PASSWORD_IN_CLEAR
                return messages.password_message(self._plain_password())
            case messages.AUTHENTICATION_MD5_PASSWORD if len(data) == 4:
                if self._secret is None or self._secret.kind is SecretKind.SCRAM:
                    raise errors.SERVER_LOGIN_SECRET(user=self._user)
                return messages.password_message(md5_response(self._user, self._secret, data))
            case messages.AUTHENTICATION_SASL:
                return self._begin_exchange(messages.cstrings(data))
            case messages.AUTHENTICATION_SASL_CONTINUE if self._exchange:
                return messages.sasl_response(
                    self._exchange.final(data, self._keys or self._plain_password(), self._cache)
                )
            case messages.AUTHENTICATION_SASL_FINAL if self._exchange:
                self._exchange.verify(data)
                self._proven = True
                return b""
            case _:
                raise errors.SERVER_LOGIN_METHOD(method=_UNSUPPORTED.get(request, request))

    def _begin_exchange(self, mechanisms: list[str]) -> bytes:
        plus = bool(self._binding) and scram.MECHANISM_PLUS in mechanisms
        mechanism = scram.MECHANISM_PLUS if plus else scram.MECHANISM
        if mechanism not in mechanisms:
            raise errors.SERVER_LOGIN_METHOD(method=", ".join(filter(None, mechanisms)))
        self._proven = False
        nonce = b2a_base64(self._nonce, newline=False)
        self._exchange = scram.Client(nonce, plus=plus, channel_binding=self._binding)
        return messages.sasl_initial_response(mechanism, self._exchange.first())

    def _plain_password(self) -> str:
        if self._secret is None or self._secret.kind is not SecretKind.PLAIN:
            raise errors.SERVER_LOGIN_SECRET(user=self._user)
        return self._secret.text


def md5_secret(user: str, password: str) -> str:
    """Return what PostgreSQL stores for a password by MD5, which is salted with the user."""
    return "md5" + _md5((password + user).encode("utf-8", "surrogateescape"))


def md5_response(user: str, secret: Secret, salt: bytes) -> str:
    """Return the answer to AuthenticationMD5Password, of a secret that is PLAIN or MD5."""
    stored = secret.text if secret.kind is SecretKind.MD5 else md5_secret(user, secret.text)
    return "md5" + _md5(stored[3:].encode() + salt)


def _md5(data: bytes) -> str:
    return hashlib.md5(data, usedforsecurity=False).hexdigest()  # or a system in FIPS mode refuses


def _equal(left: str, right: str) -> bool:
    return hmac.compare_digest(left.encode("utf-8", "surrogateescape"), right.encode())
