"""What is known of a user's password, and PgBouncer's auth_file that holds one for each user.

1. A secret is what it looks like, as in PostgreSQL (get_password_type in crypt.c): SCRAM, else MD5, else the password.
2. A secret never shows in a repr.

Called by supervisor.accounts, for the file and for the answers of auth_query, and by login.
Manual: PgBouncer's "Authentication file format".
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field

from gateway.wire import scram

_MD5 = re.compile(r"md5[0-9a-f]{32}")
_ENTRY = re.compile(r'"((?:[^"]|"")*)"\s+"((?:[^"]|"")*)"')  # the rest of the line is ignored, as PgBouncer does
_MAX_NAME_SIZE = 63  # NAMEDATALEN - 1


class SecretKind(enum.Enum):
    """In what form a password is stored."""

    PLAIN = "plain"
    MD5 = "md5"
    SCRAM = "scram-sha-256"


@dataclass(frozen=True, slots=True)
class Secret:
    """A password as it is stored."""

    kind: SecretKind
    text: str = field(repr=False)
    stored: scram.StoredKeys | None = field(default=None, repr=False)  # of SCRAM alone

    @property
    def password(self) -> str | None:
        """What logs in to a server by password or md5; a secret of SCRAM's does not."""
        return None if self.kind is SecretKind.SCRAM else self.text

    @classmethod
    def of(cls, text: str) -> Secret:
        """Recognize the form of a stored password."""
        if _MD5.fullmatch(text):
            return cls(SecretKind.MD5, text)
        stored = scram.parse_secret(text)
        return cls(SecretKind.SCRAM if stored else SecretKind.PLAIN, text, stored)


def parse(text: str) -> tuple[dict[str, Secret], list[str]]:
    """Read the lines `"user" "secret"` of an auth_file; return the secrets by user, and the faults with their lines.

    A quote within quotes is doubled. Empty lines and those that begin with ; or # are skipped.
    """
    secrets: dict[str, Secret] = {}
    faults = []
    for number, line in enumerate(text.split("\n"), start=1):
        entry = line.strip()
        if not entry or entry.startswith((";", "#")):
            continue
        match = _ENTRY.match(entry)
        if match is None:
            faults.append(f'line {number}: expected "user" "secret", both in double quotes')
            continue
        user, secret = (part.replace('""', '"') for part in match.groups())
        if not 0 < len(user.encode("utf-8", "surrogateescape")) <= _MAX_NAME_SIZE:
            faults.append(f"line {number}: user name is not of 1 to {_MAX_NAME_SIZE} bytes")
        elif user in secrets:
            faults.append(f'line {number}: user "{user}" is there already')
        else:
            secrets[user] = Secret.of(secret)
    return secrets, faults
