"""Checks an endpoint with llm-comply: `compliance.py URL MODEL`.

Prints JSON: by API, the errors and the warnings of every test that was not skipped.

The requests are those of llm-comply, at temperature 0 and with at most one call of a tool. It sets neither, and answers
of a small model may be endless.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path
from typing import Any

import llm_comply
from llm_comply.config import ComplianceConfig
from llm_comply.runner import TestRunner
from llm_comply.schema import SpecLoader
from llm_comply.test_case import TestCase
from llm_comply.tests import get_tests

SPECIFICATIONS = Path(llm_comply.__file__).parent / "specs"
APIS = {"openai-chat": "openai_chat", "open-responses": "openresponses", "anthropic": "anthropic"}
"""The APIs, and their specifications."""


def request_of(case: TestCase, config: ComplianceConfig) -> dict[str, Any]:
    request = {**case.build_request(config), "temperature": 0}
    if case.endpoint == "/messages" and "tool_choice" in request:
        request["tool_choice"]["disable_parallel_tool_use"] = True
    elif "tools" in request:
        request["parallel_tool_calls"] = False
    return request


def main() -> None:
    config = ComplianceConfig(base_url=sys.argv[1], api_key="none", model=sys.argv[2])
    found = {}
    for api, specification in APIS.items():
        cases = [
            dataclasses.replace(case, build_request=functools.partial(request_of, case)) for case in get_tests(api)
        ]
        spec = SpecLoader(str(SPECIFICATIONS / f"{specification}.json"))
        results = TestRunner(config, cases, spec).run_all().results
        found[api] = {each.id: [each.errors, each.warnings] for each in results if each.status.value != "skipped"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
