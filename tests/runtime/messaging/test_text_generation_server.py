"""The HTTP server of an engine with a coordinator, started as Megatron's scripts start it."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest
from megatron_runtime.text_generation_server.dynamic_text_gen_server import start_text_gen_server, stop_text_gen_server
from messaging_support.fleet import Fleet
from suite_support.worker import free_port

from megatron_runtime.engine.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.errors import ConfigurationError
from megatron_runtime.inference_client import InferenceClient

SECONDS = 60.0


async def first_answer(url: str, body: dict[str, Any]) -> httpx.Response:
    """The answer of a frontend, once it accepts requests."""
    async with httpx.AsyncClient(timeout=SECONDS) as http, asyncio.timeout(SECONDS):
        while True:
            answer = await http.post(url, json=body)
            if answer.status_code != 503:
                return answer
            await asyncio.sleep(0.1)


async def test_an_engine_that_listens_is_served_over_http(
    fleet: Fleet, tiny_parts: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    engine = DynamicInferenceEngine.build(tiny_parts["model"], tiny_parts["tokenizer"], tiny_parts["inference_config"])
    address = await engine.start_listening_to_data_parallel_coordinator(fleet.port, launch_inference_coordinator=False)
    client = InferenceClient(address)
    await client.start()
    port = free_port()
    try:
        start_text_gen_server(
            coordinator_addr=address,
            tokenizer=engine.controller.tokenizer,
            rank=0,
            server_port=port,
            parsers=[],
            num_replicas=1,
            hostname="127.0.0.1",
        )
        with caplog.at_level(logging.WARNING):
            start_text_gen_server(address, engine.controller.tokenizer, 0, port)
        assert "already running" in caplog.text
        body = {"prompt": [5, 6, 7], "max_tokens": 4, "top_p": 0.0, "ignore_eos": True}
        answer = await first_answer(f"http://127.0.0.1:{port}/v1/completions", body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
    finally:
        await asyncio.to_thread(stop_text_gen_server)
        await client.stop_engines()
        await engine.stopped.wait()
        client.stop()
    async with httpx.AsyncClient() as http:
        with pytest.raises(httpx.ConnectError):
            await http.get(f"http://127.0.0.1:{port}/health")
    stop_text_gen_server()


def test_a_coordinator_without_an_engine_here_needs_the_length_of_its_sequences(tiny_parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="max_sequence_length"):
        start_text_gen_server("tcp://127.0.0.1:9", tiny_parts["tokenizer"], 0, 0)


def test_a_parser_that_does_not_exist_is_refused_at_once(tiny_parts: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="no-parser"):
        start_text_gen_server("tcp://127.0.0.1:9", tiny_parts["tokenizer"], 0, 0, parsers=["no-parser"])
