"""What is generated follows from the code, and is valid in its own language."""

import re
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import jsonschema
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from kvstore.api import CALLS
from kvstore.errors import KINDS, Conflict
from kvstore.ids import Namespace
from kvstore.model import MAX_EPOCH
from kvstore.server.app import application
from kvstore.server.auth import need_of
from kvstore.server.limits import Limits
from kvstore.server.metrics import Metrics
from kvstore.server.visitors import Visitors

ROOT = Path(__file__).parents[2]
SCHEMAS = sorted((ROOT / "schema").glob("*.schema.json"))


def read(path):
    return msgspec.json.decode(path.read_bytes())


def test_nothing_has_drifted_from_the_code():
    done = subprocess.run([sys.executable, "scripts/gen-schema", "--check"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", SCHEMAS, ids=lambda path: path.name)
def test_every_schema_is_a_schema(path):
    jsonschema.Draft202012Validator.check_schema(read(path))


def test_schemas_say_what_the_code_says():
    validator = {path.name.split(".")[0]: jsonschema.Draft202012Validator(read(path)) for path in SCHEMAS}
    assert set(validator) == {"epoch", "format", "head", "manifest", "name", "namespace", "problem"}
    digest = {"digest": "0" * 64}
    assert validator["epoch"].is_valid({**digest, "v": 1, "epoch": 0})
    assert not validator["epoch"].is_valid({"v": 1, "epoch": 0})
    assert not validator["epoch"].is_valid({**digest, "epoch": 0})
    assert not validator["epoch"].is_valid({**digest, "v": 2, "epoch": 0})
    assert validator["epoch"].is_valid({**digest, "v": 1, "epoch": MAX_EPOCH})
    assert not validator["epoch"].is_valid({**digest, "v": 1, "epoch": MAX_EPOCH + 1})
    fields = msgspec.json.decode(Namespace(model="m", revision="1", layers=1, kv_heads=1, head_dim=1).canonical_json())
    assert validator["namespace"].is_valid(fields)
    assert not validator["namespace"].is_valid({**fields, "more": 1})
    assert not validator["namespace"].is_valid({key: value for key, value in fields.items() if key != "lora"})
    assert validator["problem"].is_valid(msgspec.to_builtins(Conflict("moved", current=7).problem()))


def openapi():
    return msgspec.yaml.decode((ROOT / "schema" / "openapi.yaml").read_bytes())


def test_openapi_is_valid():
    OpenAPIV31SpecValidator(openapi()).validate()


def test_openapi_has_every_call_and_every_parameter():
    document = openapi()
    for call in CALLS:
        operation = document["paths"][call.path][call.method.lower()]
        assert operation["operationId"] == call.name
        asked = {parameter["name"] for parameter in operation.get("parameters", [])}
        if "requestBody" in operation:
            ref = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"]
            asked |= set(document["components"]["schemas"][ref.rpartition("/")[2]]["properties"])
        assert asked == {field.encode_name for field in msgspec.structs.fields(call.request)}
        assert {p["name"] for p in operation.get("parameters", []) if p["in"] == "path"} == set(re.findall(r"{(\w+)}", call.path))
        assert str(call.status) in operation["responses"]


async def test_openapi_has_every_route_of_the_server():
    app = application(Mock(), Mock(), Limits(), Metrics(), Mock(), Visitors(Limits()), bound="127.0.0.1")
    served = {
        (route.method.lower(), route.resource.canonical)
        for route in app.router.routes()
        if route.resource and route.method != "HEAD"
    }
    documented = {
        (method, path) for path, item in openapi()["paths"].items() for method in item if method in {"get", "put", "post", "delete"}
    }
    assert documented <= served
    needs = {(route.method.lower(), route.resource.canonical): need_of(route.handler) for route in app.router.routes()}
    for method, path in documented:
        (scheme,) = openapi()["paths"][path][method]["security"] or [{"access": ["open"]}]
        assert scheme == {"access": [needs[method, path]]}, path
    assert {route for route in served if route[1].startswith("/v1/")} <= documented


def test_openapi_errors_are_problem_documents_for_every_status():
    document = openapi()
    assert set(document["components"]["responses"]) == {str(kind.http) for kind in KINDS.values()} | {"413", "415"}  # of bodies
    for status, response in document["components"]["responses"].items():
        assert response["content"]["application/problem+json"]["schema"] == {"$ref": "#/components/schemas/Problem"}
        for kind in re.findall(r"(\w+)[,.]", response["description"].partition(":")[2]):
            assert KINDS[kind].http == int(status)


def test_the_errors_page_lists_every_kind_with_its_remedy():
    page = (ROOT / "docs" / "errors.md").read_text()
    for kind, known in KINDS.items():
        assert f"| `{kind}` | `{known.error.__name__}` | {known.http} | {known.exit} | {known.remedy} |" in page
