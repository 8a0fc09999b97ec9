"""Access tokens: made, kept, shown and checked; what is in files, in errors and in representations of them."""

import inspect
import os
from datetime import UTC, datetime

import pytest

from kvstore import access
from kvstore.access import NOBODY, SCOPES, Access, Token, Tokens, bearer, everything, hashed, new_token
from kvstore.client.credential import Credential
from kvstore.clock import SeededIds
from kvstore.config import AuthSettings, StorageUrl, TlsSettings, load
from kvstore.errors import Denied, Invalid
from kvstore.server.auth import check_exposed

IDS = SeededIds(5)
END = datetime(2027, 1, 31, tzinfo=UTC)


def file_of(**found):
    return Tokens({token_id: token for _, token_id, token in found.values()}).text()


def refused(tokens, text, now=0.0):
    with pytest.raises(Denied) as caught:
        tokens.of(text, now)
    assert caught.value.kind == "unauthenticated"
    assert not text or text not in str(caught.value.problem())
    return caught.value.message


def test_a_token_is_known_by_its_digest_and_says_whom_it_acts_for():
    made = new_token(IDS, 'tenant "x" ü', ("read", "metrics"), END)
    text, token_id, _ = made
    tokens = Tokens.parse(file_of(one=made))
    assert tokens.of(text, END.timestamp() - 1) == Access('tenant "x" ü', frozenset({"read", "metrics"}), token_id)
    assert "expired" in refused(tokens, text, END.timestamp())
    secret = text.rpartition("_")[2]
    assert len(secret) == 64
    assert secret not in tokens.text()
    assert hashed(text) in tokens.text()


def test_what_is_no_token_of_ours_is_refused_without_repeating_it():
    text, token_id, made = new_token(IDS, "acme", SCOPES)
    tokens = Tokens({token_id: made})
    other = new_token(IDS, "acme", SCOPES)[0]
    for wrong in (text[:-1] + "g", text[:-1], text + "0", text.upper(), " " + text, "kvt__", "\udce9", "x" * 10_000, text + "\n"):
        assert "malformed" in refused(tokens, wrong)
    changed = text[:-1] + ("1" if text[-1] == "0" else "0")
    assert refused(tokens, changed) == refused(tokens, other)  # which of the two parts is wrong is not said


def test_every_token_is_compared_in_constant_time_unknown_ones_too(monkeypatch):
    text, token_id, made = new_token(IDS, "acme", SCOPES)
    compared = []

    def compare(one, other):
        compared.append((one, other))
        return False

    monkeypatch.setattr("kvstore.access.hmac.compare_digest", compare)
    refused(Tokens({token_id: made}), text)
    refused(Tokens({}), text)
    assert [one for one, _ in compared] == [hashed(text)] * 2
    assert compared[0][1] == made.hash
    assert len(compared[1][1]) == len(made.hash)
    # Nothing else decides: with a comparison that always agrees, only an id that exists lets anybody in.
    monkeypatch.setattr("kvstore.access.hmac.compare_digest", lambda one, other: True)
    assert Tokens({token_id: made}).of(text, 0.0).tenant == "acme"
    refused(Tokens({}), text)
    assert ".hash ==" not in inspect.getsource(access)


@pytest.mark.parametrize(
    ("header", "token"), [("", ""), ("Bearer abc", "abc"), ("bearer  abc ", "abc"), ("BEARER abc", "abc"), ("Bearer a b", "a b")]
)
def test_a_header_holds_a_token(header, token):
    assert bearer(header) == token


@pytest.mark.parametrize("header", ["Bearer", "Bearer ", "Basic abc", "abc", "Bearer\tabc"])
def test_other_headers_are_refused(header):
    with pytest.raises(Denied) as caught:
        bearer(header)
    assert "abc" not in str(caught.value.problem())


def test_scopes():
    assert [scope for scope in SCOPES if Access("t", frozenset({"write"})).may(scope)] == ["write"]
    assert all(Access("t", frozenset({"admin"})).may(scope) for scope in SCOPES)
    assert all(everything("t").may(scope) for scope in (*SCOPES, "open"))
    assert NOBODY.may("open")
    with pytest.raises(Denied, match="token") as caught:
        NOBODY.check("read")
    assert caught.value.kind == "unauthenticated"
    with pytest.raises(Denied, match="'admin'") as caught:
        Access("t", frozenset({"read"})).check("admin")
    assert caught.value.kind == "denied"


GOOD = 'hash = "sha256:' + "a" * 64 + '"\ntenant = "t"\nscopes = ["read"]\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[tokens", "TOML"),
        ("x = 1", "tables only"),
        ("tokens = 5", "tables only"),
        ("[tokens.short]\n" + GOOD, "16 lower-case"),
        ("[tokens.0123456789abcdef]\n" + GOOD + "secret = 1", "unknown field 'secret'"),
        ("[tokens.0123456789abcdef]\n" + GOOD.replace("sha256:", "md5:"), "hash"),
        ("[tokens.0123456789abcdef]\n" + GOOD.replace('"read"', '"root"'), "root"),
        ("[tokens.0123456789abcdef]\n" + GOOD.replace('"t"', '".."'), "tenant"),
        ("[tokens.0123456789abcdef]\n" + GOOD + "expires = 2027-01-01T00:00:00", "time zone"),
        ("[tokens.0123456789abcdef]\n" + GOOD + 'expires = "never"', "expires"),
        ("[tokens]\n0123456789abcdef = 5", "no table"),
    ],
)
def test_a_file_that_is_wrong_says_where_and_never_repeats_a_digest(text, says):
    with pytest.raises(Invalid) as caught:
        Tokens.parse(text, "tokens.toml")
    assert says in caught.value.message
    assert "a" * 64 not in caught.value.message


@pytest.mark.parametrize("expires", [None, END])
def test_no_part_of_a_file_lets_in_more_than_the_whole(expires):
    """Whatever was written of it before the disk was full, or while it is being copied."""
    made = [new_token(IDS, "acme", ("read",), expires) for _ in range(2)]
    text = file_of(one=made[0], two=made[1])
    whole = Tokens.parse(text).known
    fewer = 0
    for length in range(len(text)):
        try:
            part = Tokens.parse(text[:length]).known
        except Invalid:
            continue
        assert part.items() <= whole.items(), text[:length]
        fewer += len(part) < len(whole)
    assert fewer < 10  # what ends between two entries cannot be told from a whole one


# --- where it may listen ---

TLS = TlsSettings(cert="c", key="k")
FILE = AuthSettings(tokens_file="f")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.7", "node.example"])
def test_beyond_loopback_it_is_said_who_may_come_and_how(host):
    for auth, tls, says in [
        (AuthSettings(), TlsSettings(), "loopback only"),
        (AuthSettings(), TLS, "loopback only"),
        (AuthSettings(plaintext=True), TlsSettings(), "loopback only"),
        (FILE, TlsSettings(), "TLS"),
        (AuthSettings(anonymous=True), TlsSettings(), "TLS"),
        (AuthSettings(tokens_file="f", anonymous=True), TLS, "exclude"),
    ]:
        with pytest.raises(Invalid, match=says) as caught:
            check_exposed(host, 7878, auth, tls, field="node.listen")
        assert "auth." in caught.value.remedy or says == "exclude"
    for auth in (FILE, AuthSettings(anonymous=True)):
        check_exposed(host, 7878, auth, TLS, field="node.listen")
    check_exposed(host, 7878, AuthSettings(tokens_file="f", plaintext=True), TlsSettings(), field="node.listen")


def test_on_loopback_nothing_needs_to_be_said():
    for auth in (AuthSettings(), FILE):
        check_exposed("127.0.0.1", 7878, auth, TlsSettings(), field="node.listen")


@pytest.mark.parametrize("text", ['cert = "c"', 'key = "k"', 'client_ca = "a"'])
def test_half_of_tls_is_refused(text):
    with pytest.raises(Invalid, match="tls"):
        load(toml=f"[tls]\n{text}\n")


# --- what a client shows ---


def shown(credential):
    return credential.headers().get("Authorization", "")


def test_where_a_client_finds_its_token(tmp_path):
    path, url = tmp_path / "token", StorageUrl.parse("kvtier://h?allow_http=true")
    path.write_text("kvt_file\n")
    named = StorageUrl.parse(f"kvtier://h?allow_http=true&token_file={path}")
    assert shown(Credential.find(url, {})) == ""
    assert not Credential.find(url, {})
    assert shown(Credential.find(url, {"KVTIER_TOKEN_FILE": str(path)})) == "Bearer kvt_file"
    assert shown(Credential.find(url, {"KVTIER_TOKEN_FILE": str(path), "KVTIER_TOKEN": "kvt_env"})) == "Bearer kvt_env"
    assert shown(Credential.find(named, {"KVTIER_TOKEN": "kvt_env"})) == "Bearer kvt_file"


def test_a_clients_token_is_renewed_with_its_file(tmp_path):
    path = tmp_path / "token"
    path.write_text("kvt_one")
    credential = Credential(file=str(path))
    fresh = tmp_path / "fresh"
    fresh.write_text("kvt_two")
    os.utime(fresh, (1, 1))
    fresh.replace(path)
    assert shown(credential) == "Bearer kvt_two"
    path.unlink()
    assert shown(credential) == "Bearer kvt_two"


@pytest.mark.parametrize("text", ["", "two words", "kvt_x\r\nX-Other: 1", "ü", "k" * 513])
def test_what_no_header_can_carry_is_refused_without_repeating_it(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    for make in (lambda: Credential(file=str(path)), lambda: Credential(text=text or " ")):
        with pytest.raises(Denied) as caught:
            make()
        assert not text or text not in str(caught.value.problem())
    with pytest.raises(Denied, match="No such file"):
        Credential(file=str(tmp_path / "nowhere"))


def test_no_token_is_in_a_representation():
    credential = Credential("kvt_very_secret")
    assert "secret" not in repr(credential) + str(credential) + repr(vars(credential).keys())
    text, _, made = new_token(IDS, "acme", ("read",))
    assert text not in repr(made) + repr(Tokens({"a": made}))
    assert Token.__struct_fields__ == ("hash", "tenant", "scopes", "expires")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3://b?token_file=/t", "kvtier://"),
        ("kvtier+unix:///s?tls=true", "kvtier://"),
        ("memory://m?client_cert=/c", "kvtier://"),
        ("kvtier://h?ca_bundle=/c", "tls=true"),
        ("kvtier://h?client_cert=/c&client_key=/k", "tls=true"),
        ("kvtier://h?tls=true&client_cert=/c", "together"),
        ("kvtier://user:secret@h", "credentials"),
        ("kvtier://h?token=secret", "unknown"),
    ],
)
def test_urls_say_where_a_token_is_and_never_hold_one(url, says):
    with pytest.raises(Invalid, match=says) as caught:
        StorageUrl.parse(url)
    assert "secret" not in caught.value.message
