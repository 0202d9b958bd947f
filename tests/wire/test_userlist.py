"""PgBouncer's auth_file, and the forms of a stored password."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.wire import scram, userlist
from gateway.wire.userlist import Secret, SecretKind

SCRAM = scram.build_secret("pencil", b"salt", 1)
MD5 = "md5" + "0123456789abcdef" * 2


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("pencil", SecretKind.PLAIN),
        ("", SecretKind.PLAIN),
        (MD5, SecretKind.MD5),
        (MD5.upper(), SecretKind.PLAIN),
        (MD5[:-1], SecretKind.PLAIN),
        (MD5 + "\n", SecretKind.PLAIN),
        (SCRAM, SecretKind.SCRAM),
        (SCRAM[:-1], SecretKind.PLAIN),
        ("SCRAM-SHA-256$", SecretKind.PLAIN),
    ],
)
def test_secret_is_of_the_kind_it_looks_like(text, kind):
    secret = Secret.of(text)
    assert (secret.kind, secret.text) == (kind, text)
    assert secret.stored == (scram.parse_secret(SCRAM) if kind is SecretKind.SCRAM else None)


def test_secret_does_not_show_in_its_repr():
    assert repr(Secret.of("pencil")) == "Secret(kind=<SecretKind.PLAIN: 'plain'>)"


def test_userlist_with_all_forms_is_read():
    text = f'''; a comment
# another

"plain" "pencil"
  "md5"\t"{MD5}"  and the rest of the line
"scram" "{SCRAM}"\r
"nobody" ""
"q""uote" "a "" b"
'''
    secrets, faults = userlist.parse(text)
    assert faults == []
    assert {user: (secret.kind, secret.text) for user, secret in secrets.items()} == {
        "plain": (SecretKind.PLAIN, "pencil"),
        "md5": (SecretKind.MD5, MD5),
        "scram": (SecretKind.SCRAM, SCRAM),
        "nobody": (SecretKind.PLAIN, ""),
        'q"uote': (SecretKind.PLAIN, 'a " b'),
    }


def test_userlist_with_faults_tells_each_with_its_line():
    text = '"a" "1"\nb 2\n"a" "3"\n"" "4"\n"c" "5\n"d""6"\n' + f'"{"é" * 32}" "7"\n"e" "8"'
    secrets, faults = userlist.parse(text)
    assert [(user, secret.text) for user, secret in secrets.items()] == [("a", "1"), ("e", "8")]
    assert faults == [
        'line 2: expected "user" "secret", both in double quotes',
        'line 3: user "a" is there already',
        "line 4: user name is not of 1 to 63 bytes",
        'line 5: expected "user" "secret", both in double quotes',
        'line 6: expected "user" "secret", both in double quotes',
        "line 7: user name is not of 1 to 63 bytes",
    ]


WORD = st.text(st.characters(exclude_characters="\n", exclude_categories=["Cs"]), max_size=15)


@given(st.dictionaries(WORD.filter(bool), WORD))
def test_userlist_of_any_words_is_read_back(words):
    quoted = ['"{}" "{}"'.format(user.replace('"', '""'), text.replace('"', '""')) for user, text in words.items()]
    secrets, faults = userlist.parse("\n".join(quoted))
    assert {user: secret.text for user, secret in secrets.items()} == words
    assert faults == []


@given(st.text())
def test_userlist_of_garbage_raises_nothing(text):
    userlist.parse(text)
