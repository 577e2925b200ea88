"""The sampling defaults of a checkpoint's ``generation_config.json``."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from megatron_runtime.errors import CheckpointError, ConfigurationError
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.generation_config import fill, sampling_defaults
from megatron_runtime.server.options import FrontendOptions, HttpOptions

CONFIG = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 100, "do_sample": True, "min_p": None}
DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "max_new_tokens": 100}


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    (tmp_path / "generation_config.json").write_text(json.dumps(CONFIG))
    return str(tmp_path)


def test_the_file_of_the_checkpoint_gives_the_defaults_and_the_log_shows_them(
    checkpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert sampling_defaults(HttpOptions(), checkpoint) == DEFAULTS
    assert "temperature=0.6, top_p=0.95, top_k=20, max_new_tokens=100; --generation-config vllm" in caplog.text
    assert sampling_defaults(HttpOptions(generation_config="vllm"), checkpoint) == {}
    assert sampling_defaults(HttpOptions(megatron_http=True), checkpoint) == {}


def test_a_path_replaces_the_file_of_the_checkpoint(checkpoint: str) -> None:
    for path in (checkpoint, f"{checkpoint}/generation_config.json"):
        options = HttpOptions(generation_config=path, megatron_http=True)
        options.check()
        assert sampling_defaults(options, "/elsewhere/model.gguf") == DEFAULTS
    with pytest.raises(ConfigurationError, match="--generation-config /nowhere: no such file") as caught:
        HttpOptions(generation_config="/nowhere").check()
    assert caught.value.field == "generation_config"


def test_a_checkpoint_without_the_file_has_no_defaults(tmp_path: Path) -> None:
    assert sampling_defaults(HttpOptions(), str(tmp_path)) == {}
    assert sampling_defaults(HttpOptions(), str(tmp_path / "model.gguf")) == {}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", -1), ("temperature", "hot"), ("top_p", 0), ("top_k", 1.5), ("max_new_tokens", 0)],
)
def test_an_invalid_value_is_refused_by_name(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "generation_config.json"
    path.write_text(json.dumps({field: value}))
    with pytest.raises(ConfigurationError, match=f"{path}: {field}: .*--generation-config vllm"):
        sampling_defaults(HttpOptions(), str(tmp_path))
    path.write_text("[")
    with pytest.raises(CheckpointError, match="is not JSON"):
        sampling_defaults(HttpOptions(), str(tmp_path))


def test_a_request_overrides_the_defaults() -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0, "top_k": None}
    chat = ChatCompletionBody.model_validate(body)
    fill(chat, DEFAULTS)
    assert (chat.temperature, chat.top_p, chat.top_k, chat.min_p) == (0, 0.95, 20, 0)


def test_the_defaults_reach_the_frontends() -> None:
    options = FrontendOptions("tcp://a:1", "m", "m", 100, sampling_defaults=DEFAULTS)
    assert FrontendOptions.deserialize(json.loads(json.dumps(options.serialize()))) == options
