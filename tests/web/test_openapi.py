"""The description of the API is true: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

MODES = schemathesis.GenerationMode


def try_everything(served, mode, *, examples, headers=None):
    """Send requests to every operation; returns the operations that were tried."""
    schema = schemathesis.openapi.from_dict(served.json("/openapi.json"))
    schema.config.update(base_url=served.url)
    # Known only once a schema was loaded.
    conforms = schemathesis.checks.CHECKS.get_one("response_schema_conformance")
    tried = set()
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=examples,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            answer = case.call(headers=headers)
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400 and answer.headers.get("content-type"):
                assert "error" in answer.json()
            if answer.status_code in (200, 201):
                case.validate_response(answer, checks=[conforms])

        try:
            check()
        except Exception as error:
            if "Unsatisfiable" not in type(error).__name__:
                raise
            continue  # nothing wrong can be sent where there are no parameters
        tried.add((operation.method.upper(), operation.path))
    assert served.json("/healthz")["status"] == "ok"
    return tried


@pytest.mark.parametrize("mode", list(MODES), ids=lambda mode: mode.value)
def test_no_request_breaks_the_server(server, mode):
    tried = try_everything(server, mode, examples=20)
    assert {("GET", "/api/search"), ("POST", "/api/search"), ("GET", "/api/items")} <= tried


def test_no_change_breaks_a_writable_server(new_collection, serve, tmp_path):
    made = new_collection(tmp_path)
    token = "of this test only"
    with serve(made.index, writable=True, token=token) as served:
        headers = {"Authorization": f"Bearer {token}"}
        tried = try_everything(served, MODES.POSITIVE, examples=5, headers=headers)
        assert {("POST", "/api/items"), ("DELETE", "/api/items/{id}")} <= tried
