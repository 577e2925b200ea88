"""LoRA adapters over HTTP: chosen by the model of a request, loaded and unloaded while others are answered."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from runtime_support.adapters import merged, write_adapter
from runtime_support.reference_models import assert_most_likely
from transformers import AutoModelForCausalLM

PROMPT = list(range(40, 60))
FLAGS = ("--dtype", "float32", "--kv-cache-memory", "32Mi", "--replica-groups", "2", "--max-loras", "3")


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_checkpoint, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def folders(base: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, base, seed=seed) for seed, name in enumerate(("static", "dynamic"))}


@pytest.fixture(scope="module")
def references(base: Any, folders: dict[str, Path]) -> dict[str, Any]:
    """The model with each adapter merged, and without one."""
    return {"chat": base} | {name: merged(base, folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def pod(
    tiny_checkpoint: Path, folders: dict[str, Path], pod_type: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Any]:
    """Two replica groups with one adapter from the start."""
    given = ("--model", str(tiny_checkpoint), "--lora-modules", f"static={folders['static']}")
    pod = pod_type(tmp_path_factory.mktemp("pod"), *given, *FLAGS)
    try:
        pod.wait_for(lambda state: state["ready"] and len(state["replicaGroups"]) == 2)
        yield pod
    finally:
        pod.end()


def change(pod: Any, action: str, **body: Any) -> httpx.Response:
    token = {"authorization": pod.control.headers["authorization"]}
    answer: httpx.Response = pod.http.post(f"/v1/{action}_lora_adapter", json=body, headers=token)
    return answer


@contextlib.contextmanager
def loaded(pod: Any, name: str, path: Path) -> Iterator[None]:
    answer = change(pod, "load", lora_name=name, lora_path=str(path))
    assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' added successfully.")
    try:
        yield
    finally:
        answer = change(pod, "unload", lora_name=name)
        assert (answer.status_code, answer.text) == (200, f"Success: LoRA adapter '{name}' removed successfully.")


def tokens_of(pod: Any, model: str, count: int = 16) -> list[int]:
    completion = pod.openai.completions.create(
        model=model,
        prompt=PROMPT,
        max_tokens=count,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True},
    )
    assert completion.model == model
    tokens: list[int] = completion.choices[0].token_ids
    return tokens


def models(pod: Any) -> list[str]:
    return [model.id for model in pod.openai.models.list()]


def test_requests_of_all_adapters_are_answered_together(
    pod: Any, folders: dict[str, Path], references: dict[str, Any]
) -> None:
    with loaded(pod, "dynamic", folders["dynamic"]), ThreadPoolExecutor(9) as pool:
        names = ["static", "dynamic", "chat"] * 3
        answers = list(pool.map(lambda name: tokens_of(pod, name), names))
        for name, tokens in zip(names, answers, strict=True):
            assert_most_likely(references[name], PROMPT, tokens)
        assert len({tuple(tokens) for tokens in answers}) == 3


def test_the_models_are_listed_as_in_vllm(pod: Any, folders: dict[str, Path]) -> None:
    assert models(pod) == ["chat", "static"]
    with loaded(pod, "dynamic", folders["dynamic"]):
        listed = pod.openai.models.list().data[1]
        assert (listed.id, listed.parent, listed.root) == ("dynamic", "chat", str(folders["dynamic"]))
        assert pod.openai.models.retrieve("static").parent == "chat"
        assert models(pod) == ["chat", "dynamic", "static"]
    assert models(pod) == ["chat", "static"]


def test_chats_streams_messages_and_embeddings_use_adapters(pod: Any, references: dict[str, Any]) -> None:
    body = {"model": "static", "messages": [{"role": "user", "content": "a"}], "max_tokens": 4}
    assert pod.http.post("/v1/messages", json=body).json()["model"] == "static"
    stream = pod.openai.completions.create(model="static", prompt=PROMPT, max_tokens=4, temperature=0, stream=True)
    streamed = "".join(chunk.choices[0].text for chunk in stream)
    whole = pod.openai.completions.create(model="static", prompt=PROMPT, max_tokens=4, temperature=0)
    assert streamed == whole.choices[0].text
    vectors = [pod.openai.embeddings.create(model=name, input=PROMPT).data[0].embedding for name in ("chat", "static")]
    hidden = references["static"].model(torch.tensor([PROMPT])).last_hidden_state[0, -1]
    torch.testing.assert_close(torch.tensor(vectors[1]), hidden / hidden.norm(), atol=1e-4, rtol=0.0)
    assert vectors[0] != vectors[1]


def test_names_that_are_not_loaded_are_not_found(pod: Any) -> None:
    with pytest.raises(
        openai.NotFoundError, match="model: 'dynamic' is not served here; the served model is 'chat', 'static'"
    ):
        tokens_of(pod, "dynamic")
    assert pod.http.get("/v1/models/dynamic").status_code == 404
    answer = change(pod, "unload", lora_name="dynamic")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "adapter_not_found")


def test_changes_need_the_control_token_and_come_from_no_other_page(pod: Any, folders: dict[str, Path]) -> None:
    body = {"lora_name": "dynamic", "lora_path": str(folders["dynamic"])}
    assert pod.http.post("/v1/load_lora_adapter", json=body).status_code == 401
    assert pod.http.post("/v1/unload_lora_adapter", json={"lora_name": "static"}).status_code == 401
    elsewhere = {"authorization": pod.control.headers["authorization"], "origin": "http://elsewhere.example"}
    assert pod.http.post("/v1/load_lora_adapter", json=body, headers=elsewhere).status_code == 403
    assert models(pod) == ["chat", "static"]


def test_refused_changes_name_the_field_and_the_remedy(pod: Any, folders: dict[str, Path]) -> None:
    with loaded(pod, "dynamic", folders["dynamic"]):
        cases = [
            ("load", {"lora_name": "dynamic", "lora_path": "/x"}, "lora_name", "set load_inplace to replace it"),
            ("load", {"lora_name": "chat", "lora_path": "/x"}, "lora_name", "the model itself; choose another one"),
            ("load", {"lora_name": "static", "lora_path": "/x"}, "lora_name", "is one of --lora-modules"),
            ("load", {"lora_name": "other", "lora_path": "/x"}, "lora_path", "give the folder"),
            ("load", {"lora_name": "", "lora_path": "/x"}, "lora_name", "at least 1 character"),
            ("unload", {"lora_name": "static"}, "lora_name", "is one of --lora-modules"),
        ]
        for action, body, field, remedy in cases:
            answer = change(pod, action, **body)
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == field
            assert remedy in answer.json()["error"]["message"]
        with loaded(pod, "third", folders["dynamic"]):
            answer = change(pod, "load", lora_name="fourth", lora_path=str(folders["dynamic"]))
            assert "more than --max-loras 3" in answer.json()["error"]["message"]


def test_an_adapter_is_replaced_in_place(pod: Any, folders: dict[str, Path], references: dict[str, Any]) -> None:
    with loaded(pod, "dynamic", folders["static"]):
        assert_most_likely(references["static"], PROMPT, tokens_of(pod, "dynamic"))
        body = {"lora_name": "dynamic", "lora_path": str(folders["dynamic"]), "load_inplace": True}
        assert change(pod, "load", **body).status_code == 200
        for _ in range(4):
            assert_most_likely(references["dynamic"], PROMPT, tokens_of(pod, "dynamic"))


def test_lost_processes_lose_neither_requests_nor_adapters(
    pod: Any, folders: dict[str, Path], references: dict[str, Any]
) -> None:
    with loaded(pod, "dynamic", folders["dynamic"]), ThreadPoolExecutor(6) as pool:
        answers = pod.begin(pool, [lambda: tokens_of(pod, "dynamic", 300)] * 6)
        os.kill(pod.child("megatron_runtime.rank"), signal.SIGKILL)
        for answer in answers:
            assert_most_likely(references["dynamic"], PROMPT, answer.result(60))
        pod.wait_for(lambda state: len(state["replicaGroups"]) == 2)
        os.kill(pod.child("coordinator_process"), signal.SIGKILL)
        pod.wait_for(lambda state: state["ready"])
        answers = [pool.submit(tokens_of, pod, "dynamic") for _ in range(6)]
        for answer in answers:
            assert_most_likely(references["dynamic"], PROMPT, answer.result(60))
        assert models(pod) == ["chat", "dynamic", "static"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--lora-modules", "name"), "--lora-modules name: use name=folder"),
        (("--lora-modules", "a=/nowhere"), "a=/nowhere: /nowhere: has no adapter_config.json"),
        (("--lora-modules", "chat={static}"), "the model has this name; choose another one"),
        (("--lora-modules", "a={static}", "--lora-modules", "a={static}"), "a is given twice"),
        (("--lora-modules", "a={static}", "--max-lora-rank", "2"), "r=3 is more than --max-lora-rank 2; raise it"),
        (("--lora-modules", '{{"name": "a"}}'), "with a name of up to 255 characters"),
    ],
)
def test_flags_are_checked_before_the_start(
    flags: tuple[str, ...], message: str, tiny_checkpoint: Path, folders: dict[str, Path], start_pod: Any
) -> None:
    given = [flag.format(static=folders["static"]) for flag in flags]
    pod = start_pod("--model", str(tiny_checkpoint), *given)
    assert pod.process.wait(60) != 0
    assert message in pod.words()
