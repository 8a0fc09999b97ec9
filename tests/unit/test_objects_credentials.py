"""The credential chain, rotation, and that no secret is shown."""

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from kvstore.clock import VirtualClock
from kvstore.errors import Denied, Unavailable
from kvstore.objects.credential_chain import chain, small_chain
from kvstore.objects.credentials import RECHECK_S, Credentials, Rotation

EXPIRY = "2026-11-29T12:00:00Z"


def found(environment, **options):
    return small_chain({"HOME": "/nonexistent", **environment}, "eu-west-1", **{"instance_metadata": False, **options})


@pytest.fixture
def agent():
    """A loopback server that answers like STS, a container agent and the instance-metadata service."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def reply(self):
            body = self.rfile.read(int(self.headers.get("content-length", "0"))).decode()
            seen.append((self.command, self.path, dict(self.headers), body))
            keys = {"AccessKeyId": "agent", "SecretAccessKey": "hush", "Token": "tok", "Expiration": EXPIRY}
            answers = {
                "/latest/api/token": "imds-token",
                "/latest/meta-data/iam/security-credentials/": "role-x",
                "/latest/meta-data/iam/security-credentials/role-x": json.dumps(keys),
                "/container": json.dumps(keys),
                "/": "<R><Credentials><AccessKeyId>sts</AccessKeyId><SecretAccessKey>hush</SecretAccessKey>"
                f"<SessionToken>tok</SessionToken><Expiration>{EXPIRY}</Expiration></Credentials></R>",
            }
            answer = answers.get(self.path)
            self.send_response(200 if answer else 404)
            self.end_headers()
            self.wfile.write((answer or "").encode())

        do_GET = do_POST = do_PUT = reply  # noqa: N815  names that http.server looks for

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    server.seen, server.url = seen, f"http://127.0.0.1:{server.server_address[1]}"
    yield server
    server.shutdown()
    server.server_close()


def test_the_environment_comes_first(tmp_path):
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=file\naws_secret_access_key=s\n")
    files = {"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys"), "AWS_CONFIG_FILE": str(tmp_path / "none")}
    assert found(files).access_key == "file"
    both = {**files, "AWS_ACCESS_KEY_ID": "env", "AWS_SECRET_ACCESS_KEY": "s", "AWS_SESSION_TOKEN": "t"}
    assert found(both) == Credentials("env", "s", "t")


def test_profiles_are_read_from_both_files_anew_each_time(tmp_path):
    keys, config = tmp_path / "keys", tmp_path / "config"
    environment = {"AWS_PROFILE": "work", "AWS_SHARED_CREDENTIALS_FILE": str(keys), "AWS_CONFIG_FILE": str(config)}
    keys.write_text("[default]\naws_access_key_id=other\naws_secret_access_key=x\n")
    config.write_text("[profile work]\naws_access_key_id=one\naws_secret_access_key=s1\naws_session_token=t1\n")
    assert found(environment) == Credentials("one", "s1", "t1")
    keys.write_text("[work]\naws_access_key_id=two\naws_secret_access_key=s2\naws_session_token=t2\n")
    assert found(environment) == Credentials("two", "s2", "t2")
    with pytest.raises(Denied, match="'gone'") as error:
        found({**environment, "AWS_PROFILE": "gone"})
    assert error.value.kind == "no_credentials"


def test_a_credential_process(tmp_path):
    script = tmp_path / "give.py"
    script.write_text(f'print(\'{{"Version":1,"AccessKeyId":"p","SecretAccessKey":"s","Expiration":"{EXPIRY}"}}\')')
    (tmp_path / "config").write_text(f"[default]\ncredential_process = {sys.executable} {script}\n")
    environment = {"AWS_CONFIG_FILE": str(tmp_path / "config")}
    given = found(environment)
    assert (given.access_key, given.expires) == ("p", 1795953600.0)
    script.write_text("import sys; sys.exit('secret-in-stderr')")
    with pytest.raises(Denied) as error:
        found(environment)
    assert "secret-in-stderr" not in repr(error.value)


def test_web_identity_by_environment_and_by_profile(tmp_path, agent):
    (tmp_path / "token").write_text("jwt\n")
    environment = {
        "AWS_WEB_IDENTITY_TOKEN_FILE": str(tmp_path / "token"),
        "AWS_ROLE_ARN": "arn:aws:iam::1:role/x",
        "AWS_ENDPOINT_URL_STS": agent.url,
    }
    assert found(environment) == Credentials("sts", "hush", "tok", 1795953600.0)
    method, _, _, body = agent.seen[0]
    assert method == "POST"
    assert "WebIdentityToken=jwt" in body
    assert "RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fx" in body
    (tmp_path / "config").write_text(f"[default]\nrole_arn=arn\nweb_identity_token_file={tmp_path / 'token'}\n")
    assert found({"AWS_CONFIG_FILE": str(tmp_path / "config"), "AWS_ENDPOINT_URL_STS": agent.url}).access_key == "sts"


def test_container_credentials(tmp_path, agent):
    (tmp_path / "token").write_text("Bearer x\n")
    environment = {
        "AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{agent.url}/container",
        "AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE": str(tmp_path / "token"),
    }
    assert found(environment) == Credentials("agent", "hush", "tok", 1795953600.0)
    assert agent.seen[0][2]["authorization"] == "Bearer x"
    with pytest.raises(Denied, match="unprotected"):
        found({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://192.0.2.1/x"})


def test_instance_metadata_is_asked_only_when_permitted(agent):
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": agent.url}
    with pytest.raises(Denied) as error:
        found(environment)
    assert error.value.kind == "no_credentials"
    assert agent.seen == []
    assert found(environment, instance_metadata=True).access_key == "agent"
    assert agent.seen[1][2]["x-aws-ec2-metadata-token"] == "imds-token"


def test_a_profile_that_needs_botocore_says_so(tmp_path):
    (tmp_path / "config").write_text("[default]\nsso_session = corp\n")
    with pytest.raises(Denied, match="botocore") as error:
        found({"AWS_CONFIG_FILE": str(tmp_path / "config")})
    assert "kvtier[node]" in error.value.remedy


def test_broken_sources_do_not_quote_secrets(tmp_path):
    (tmp_path / "keys").write_text("[default]\naws_secret_access_key: TOPSECRET\nTOPSECRET line\n")
    with pytest.raises(Denied) as error:
        found({"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "keys")})
    assert "TOPSECRET" not in str(error.value) + repr(error.value.__cause__)
    assert "hush" not in repr(Credentials("id", "hush", "hush"))


@pytest.mark.parametrize("instance_metadata", [False, True])
def test_where_botocore_is_there_it_walks_the_chain_without_instance_metadata(tmp_path, monkeypatch, agent, instance_metadata):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "keys"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_SERVICE_ENDPOINT", agent.url)
    look_up = chain("us-east-1", instance_metadata=instance_metadata)
    if instance_metadata:
        assert look_up().access_key == "agent"
    else:
        with pytest.raises(Denied):
            look_up()
    assert bool(agent.seen) == instance_metadata
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=one\naws_secret_access_key=s\n")
    assert look_up() == Credentials("one", "s")
    (tmp_path / "keys").write_text("[default]\naws_access_key_id=two\naws_secret_access_key=s\n")
    assert look_up() == Credentials("two", "s")


class Source:
    def __init__(self, *given):
        self.given, self.calls = list(given), 0

    def __call__(self):
        self.calls += 1
        answer = self.given[min(self.calls, len(self.given)) - 1]
        if isinstance(answer, Exception):
            raise answer
        return answer


async def test_permanent_keys_are_looked_up_again_every_few_minutes():
    clock, source = VirtualClock(), Source(Credentials("a", "s"), Credentials("b", "s"))
    rotation = Rotation(source, clock)
    assert [(await rotation.get()).access_key for _ in range(5)] == ["a"] * 5
    clock.advance(RECHECK_S - 1)
    assert (await rotation.get()).access_key == "a"
    clock.advance(2)
    assert (await rotation.get()).access_key == "b"
    assert source.calls == 2


async def test_temporary_keys_are_renewed_minutes_before_they_expire():
    clock = VirtualClock()
    source = Source(Credentials("a", "s", "t", clock.now() + 400), Credentials("b", "s", "t", clock.now() + 4000))
    rotation = Rotation(source, clock)
    assert (await rotation.get()).access_key == "a"
    clock.advance(99)
    assert (await rotation.get()).access_key == "a"
    clock.advance(2)
    assert (await rotation.get()).access_key == "b"


async def test_a_source_that_is_away_does_not_take_valid_keys_with_it():
    clock = VirtualClock()
    away = Denied("away", kind="no_credentials")
    rotation = Rotation(Source(Credentials("a", "s", "t", clock.now() + 3600), away), clock)
    await rotation.get()
    clock.advance(3500)
    assert (await rotation.get()).access_key == "a"
    clock.advance(200)
    with pytest.raises(Denied):
        await rotation.get()


async def test_many_rejected_requests_make_one_look_up():
    clock, source = VirtualClock(), Source(Credentials("a", "s"), Credentials("b", "s"))
    rotation = Rotation(source, clock)
    old = await rotation.get()
    renewed = await asyncio.gather(*(rotation.get(rejected=old) for _ in range(50)))
    assert {keys.access_key for keys in renewed} == {"b"}
    assert source.calls == 2
    for _ in range(5):
        await rotation.get(rejected=renewed[0])
    assert source.calls == 2
    clock.advance(5)
    await rotation.get(rejected=renewed[0])
    assert source.calls == 3


async def test_another_error_of_a_source_is_not_swallowed():
    rotation = Rotation(Source(Unavailable("no")), VirtualClock())
    with pytest.raises(Unavailable):
        await rotation.get()
