"""The failure of a pod in the status and in the local command."""

from __future__ import annotations

import json

import pytest

from megatron_operator.api.parse import parse_resource
from megatron_operator.failures import FIELD_OF_FLAG, read_failure
from megatron_operator.render.command import arguments


def test_invalid_input_is_reported_with_fields_of_the_resource() -> None:
    words = {"reason": "InvalidSpec", "message": "--kv-cache-memory 9Ti: too much; lower it or --dtype", "exitCode": 2}
    failure = read_failure(2, "Error", json.dumps(words))
    assert failure.reason == "InvalidSpec"
    assert failure.message == "spec.engine.kvCacheMemory 9Ti: too much; lower it or spec.model.dtype"
    assert failure.bad_input


def test_a_broken_checkpoint_is_reported_with_the_field_of_its_source() -> None:
    words = {"reason": "CheckpointError", "message": "/models/a.gguf: cut off; fetch it again", "rank": 1}
    failure = read_failure(2, "Error", json.dumps(words))
    assert failure.message == "spec.model.source: /models/a.gguf: cut off; fetch it again"
    assert failure.rank == 1


@pytest.mark.parametrize(
    ("code", "message", "words"),
    [
        (1, "Traceback: no", "Traceback: no"),
        (137, "", "perhaps because memory ran out"),
        (139, "", "ended by signal 11"),
        (3, "", "exit code 3"),
        (None, "", "without an exit code"),
        (1, "[1]", "[1]"),
    ],
)
def test_a_failure_without_a_termination_message_has_the_log_or_the_exit_code(
    code: int | None, message: str, words: str
) -> None:
    failure = read_failure(code, "Error", message)
    assert words in failure.message
    assert failure.exit_code == code


def test_every_rendered_flag_has_a_field() -> None:
    resource = parse_resource(
        {
            "apiVersion": "inference.megatron.dev/v1alpha1",
            "kind": "MegatronInference",
            "metadata": {"name": "chat"},
            "spec": {
                "model": {"source": {"huggingFace": {"repo": "a/b"}}, "maxSequenceLength": 8},
                "engine": {"offloadWeights": True},
            },
        }
    )
    flags = {word.partition("=")[0] for word in arguments(resource, max_restarts=1)}
    assert flags - FIELD_OF_FLAG.keys() == set()
