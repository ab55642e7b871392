"""The description of the API is true: schemathesis sends what it allows, and what it does not."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, settings

schemathesis = pytest.importorskip("schemathesis")

MODES = schemathesis.GenerationMode


@pytest.mark.parametrize("mode", list(MODES), ids=lambda mode: mode.value)
def test_no_request_breaks_the_server(server, mode):
    schema = schemathesis.openapi.from_dict(server.json("/openapi.json"))
    schema.config.update(base_url=server.url)
    # Known only once a schema was loaded.
    conforms = schemathesis.checks.CHECKS.get_one("response_schema_conformance")
    tried = []
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=20,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.explicit, Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            answer = case.call()
            assert answer.status_code < 500, (case.as_curl_command(), answer.text)
            if answer.status_code >= 400 and answer.headers.get("content-type"):
                assert "error" in answer.json()
            if answer.status_code == 200:
                case.validate_response(answer, checks=[conforms])

        try:
            check()
        except Exception as error:
            if "Unsatisfiable" not in type(error).__name__:
                raise
            continue  # nothing wrong can be sent where there are no parameters
        tried.append(operation.path)
    assert "/api/search" in tried
    assert server.json("/healthz")["status"] == "ok"
