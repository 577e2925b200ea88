"""Checks an endpoint with llm-comply: `compliance.py URL MODEL`.

Prints JSON: by API, the errors and the warnings of every test that was not skipped.

The requests are those of llm-comply, at temperature 0 and with at most one call of a tool. It sets neither, and answers
of a small model may be endless. All are sent together, because the engine computes many in little more time than one.
"""

import dataclasses
import functools
import json
import sys
from concurrent.futures import ThreadPoolExecutor
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
LONGEST_ANSWER = 150.0
"""Seconds. Each request takes as long as all together, on a busy machine a minute."""


def request_of(case: TestCase, config: ComplianceConfig) -> dict[str, Any]:
    request = {**case.build_request(config), "temperature": 0}
    if case.endpoint == "/messages" and "tool_choice" in request:
        request["tool_choice"]["disable_parallel_tool_use"] = True
    elif "tools" in request:
        request["parallel_tool_calls"] = False
    return request


def main() -> None:
    config = ComplianceConfig(base_url=sys.argv[1], api_key="none", model=sys.argv[2], timeout=LONGEST_ANSWER)
    runs = {}
    for api, specification in APIS.items():
        cases = [
            dataclasses.replace(case, build_request=functools.partial(request_of, case)) for case in get_tests(api)
        ]
        spec = SpecLoader(str(SPECIFICATIONS / f"{specification}.json"))
        runs[api] = TestRunner(config, cases, spec), cases
    found: dict[str, dict[str, Any]] = {}
    with ThreadPoolExecutor(sum(len(cases) for _, cases in runs.values())) as pool:
        results = {api: pool.map(runner.run_one, cases) for api, (runner, cases) in runs.items()}
        for api, each_of in results.items():
            found[api] = {each.id: [each.errors, each.warnings] for each in each_of if each.status.value != "skipped"}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
