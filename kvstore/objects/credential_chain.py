"""The standard AWS credential chain, without asking the instance-metadata address unless that was configured.

Where botocore is installed (extra `node`) it walks the whole chain, SSO and chained roles included, in a fresh session each time so
that rotated files are seen. Otherwise (extra `embed`) the sources below are asked in the same order: environment, web identity,
profile files (static keys, `credential_process`, web identity), container credentials, and instance metadata if permitted. A
profile that needs more says that botocore is missing.
"""

from __future__ import annotations

import configparser
import http.client
import json
import os
import re
import shlex
import subprocess
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode, urlsplit

from kvstore.errors import Denied
from kvstore.objects.credentials import Credentials

_TIMEOUT_S: Final = 5.0
_PROCESS_S: Final = 30.0
_MOST_BYTES: Final = 64 << 10
_CONTAINER_HOSTS: Final = {"127.0.0.1", "localhost", "::1", "169.254.170.2", "169.254.170.23", "fd00:ec2::23"}

Environment = Mapping[str, str]


def chain(region: str, *, instance_metadata: bool, environment: Environment | None = None) -> Callable[[], Credentials]:
    """A look-up through the chain, for :class:`kvstore.objects.credentials.Rotation`. It blocks, and raises `Denied` at its end."""

    def look_up() -> Credentials:
        if environment is None and (resolver := _botocore(instance_metadata)) is not None:
            return resolver()
        return small_chain(environment or os.environ, region, instance_metadata=instance_metadata)

    return look_up


def small_chain(environment: Environment, region: str, *, instance_metadata: bool) -> Credentials:
    """The sources that need no botocore.

    Raises:
        Denied: kind `no_credentials`; the message says which source was broken, or that all were empty.
    """
    try:
        found = (
            _environment(environment)
            or _web_identity(environment, environment, region)
            or _profile(environment, region)
            or _container(environment)
            or (_instance(environment) if instance_metadata else None)
        )
    except (configparser.Error, subprocess.SubprocessError) as error:
        # Their texts quote lines of the file and the command, which may hold a secret.
        raise Denied(f"a source of S3 credentials is broken: {type(error).__name__}", kind="no_credentials") from None
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise Denied(f"a source of S3 credentials is broken: {type(error).__name__}: {error}", kind="no_credentials") from error
    if found is None:
        raise Denied("no S3 credentials in the environment, the profile files or the container", kind="no_credentials")
    return found


def _botocore(instance_metadata: bool) -> Callable[[], Credentials] | None:
    try:
        import botocore.exceptions  # noqa: PLC0415  only there with the extra `node`
        import botocore.session  # noqa: PLC0415  as above
    except ImportError:
        return None

    def resolve() -> Credentials:
        try:
            session = botocore.session.Session()
            resolver = session.get_component("credential_provider")
            if not instance_metadata:
                resolver.remove("iam-role")
            found = resolver.load_credentials()
            if found is None:
                raise Denied("no S3 credentials anywhere in the AWS chain", kind="no_credentials")
            keys = found.get_frozen_credentials()
        except botocore.exceptions.BotoCoreError as error:
            raise Denied(f"the AWS credential chain is broken: {error}", kind="no_credentials") from error
        expiry = getattr(found, "_expiry_time", None)  # refreshable credentials have no public word for it
        return Credentials(keys.access_key, keys.secret_key, keys.token or "", expiry.timestamp() if expiry else None)

    return resolve


def _environment(environment: Environment) -> Credentials | None:
    access, secret = environment.get("AWS_ACCESS_KEY_ID"), environment.get("AWS_SECRET_ACCESS_KEY")
    return Credentials(access, secret, environment.get("AWS_SESSION_TOKEN", "")) if access and secret else None


def _web_identity(source: Environment, environment: Environment, region: str) -> Credentials | None:
    """Trade a service account's token for keys, as Kubernetes sets it up."""
    token_file = source.get("AWS_WEB_IDENTITY_TOKEN_FILE") or source.get("web_identity_token_file")
    role = source.get("AWS_ROLE_ARN") or source.get("role_arn")
    if not token_file or not role:
        return None
    query = urlencode(
        {
            "Action": "AssumeRoleWithWebIdentity",
            "Version": "2011-06-15",
            "RoleArn": role,
            "RoleSessionName": source.get("AWS_ROLE_SESSION_NAME") or source.get("role_session_name") or "kvtier",
            "WebIdentityToken": Path(token_file).read_text().strip(),
        }
    )
    sts = environment.get("AWS_ENDPOINT_URL_STS") or f"https://sts.{region}.amazonaws.com"
    body = _fetch("POST", f"{sts}/", {"content-type": "application/x-www-form-urlencoded"}, query.encode()).decode()
    fields = dict(re.findall(r"<(AccessKeyId|SecretAccessKey|SessionToken|Expiration)>([^<]+)<", body))
    return _from_fields(fields)


def _profile(environment: Environment, region: str) -> Credentials | None:
    name = environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE") or "default"
    home = Path(environment.get("HOME", "~")).expanduser()
    config = _section(Path(environment.get("AWS_CONFIG_FILE", home / ".aws/config")), {f"profile {name}", name})
    keys = _section(Path(environment.get("AWS_SHARED_CREDENTIALS_FILE", home / ".aws/credentials")), {name})
    profile = {**config, **keys}
    if not profile and name != "default":
        raise Denied(f"profile {name!r} is in neither AWS profile file", kind="no_credentials")
    if "aws_access_key_id" in profile:
        return Credentials(
            profile["aws_access_key_id"], profile["aws_secret_access_key"], profile.get("aws_session_token", "")
        )  # fmt: skip
    if "credential_process" in profile:
        done = subprocess.run(shlex.split(profile["credential_process"]), capture_output=True, timeout=_PROCESS_S, check=True)
        return _from_fields(json.loads(done.stdout[:_MOST_BYTES]))
    if found := _web_identity(profile, environment, region):
        return found
    if any(word in profile for word in ("sso_session", "sso_start_url", "source_profile", "credential_source")):
        raise Denied(
            f"profile {name!r} uses SSO or another profile's role, which needs botocore",
            kind="no_credentials",
            remedy="install kvtier[node], or give this process keys by environment or `credential_process`",
        )
    return None


def _section(path: Path, names: set[str]) -> dict[str, str]:
    if not path.is_file():
        return {}
    parser = configparser.RawConfigParser(strict=False)
    parser.read_string(path.read_text())
    return {k: v for name in names if parser.has_section(name) for k, v in parser.items(name)}


def _container(environment: Environment) -> Credentials | None:
    """ECS and EKS: an agent on this host hands keys out."""
    uri = environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI", "")
    if relative := environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"):
        uri = f"http://169.254.170.2{relative}"
    if not uri:
        return None
    if not uri.startswith("https://") and urlsplit(uri).hostname not in _CONTAINER_HOSTS:
        raise Denied(f"container credentials at {urlsplit(uri).netloc} would travel unprotected", kind="no_credentials")
    token = environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN", "")
    if token_file := environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"):
        token = Path(token_file).read_text().strip()
    return _from_fields(json.loads(_fetch("GET", uri, {"authorization": token} if token else {})))


def _instance(environment: Environment) -> Credentials | None:
    """EC2, version 2 of the metadata protocol only."""
    base = environment.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", "http://169.254.169.254").rstrip("/")
    token = _fetch("PUT", f"{base}/latest/api/token", {"x-aws-ec2-metadata-token-ttl-seconds": "300"}).decode()
    headers = {"x-aws-ec2-metadata-token": token}
    role = _fetch("GET", f"{base}/latest/meta-data/iam/security-credentials/", headers).decode().split()[0]
    return _from_fields(json.loads(_fetch("GET", f"{base}/latest/meta-data/iam/security-credentials/{role}", headers)))


def _from_fields(fields: Mapping[str, Any]) -> Credentials:
    expiry = fields.get("Expiration")
    return Credentials(
        str(fields["AccessKeyId"]),
        str(fields["SecretAccessKey"]),
        str(fields.get("SessionToken") or fields.get("Token") or ""),
        datetime.fromisoformat(str(expiry)).timestamp() if expiry else None,
    )


def _fetch(method: str, url: str, headers: Mapping[str, str], body: bytes = b"") -> bytes:
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.netloc, timeout=_TIMEOUT_S)
    try:
        connection.request(method, f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}", body or None, dict(headers))
        answer = connection.getresponse()
        content = answer.read(_MOST_BYTES)
    finally:
        connection.close()
    if answer.status != http.client.OK:
        raise ValueError(f"{parts.netloc} answered {answer.status} to the request for credentials")
    return content
