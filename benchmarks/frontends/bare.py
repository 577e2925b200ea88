"""A minimal FastAPI and uvicorn application with the same request and response bodies."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import socket
import time
import uuid
from collections.abc import AsyncIterator
from multiprocessing.connection import Connection
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel

from coordinators.engines import STEP_SECONDS
from frontends.protocol import TOKEN_TEXT, FrontendDeployment, serve

BACKLOG = 2048
app = FastAPI()


class GenerationRequest(BaseModel):
    model: str
    max_tokens: int
    stream: bool = False


class MinimalMessage(BaseModel):
    role: str
    content: str


class ChatRequest(GenerationRequest):
    messages: list[MinimalMessage]


class CompletionRequest(GenerationRequest):
    prompt: str


@app.post("/v1/chat/completions")
async def chat(body: ChatRequest) -> Response:
    if body.stream:
        pieces = [{"delta": {"content": TOKEN_TEXT}}] * body.max_tokens
        ends = [{"delta": {"role": "assistant", "content": ""}}], [{"delta": {}, "finish_reason": "length"}]
        return stream(body, "chat.completion.chunk", [*ends[0], *pieces, *ends[1]])
    return whole(body, "chat.completion", {"message": {"role": "assistant", "content": TOKEN_TEXT * body.max_tokens}})


@app.post("/v1/completions")
async def complete(body: CompletionRequest) -> Response:
    if body.stream:
        return stream(body, "text_completion", [{"text": TOKEN_TEXT}] * body.max_tokens)
    return whole(body, "text_completion", {"text": TOKEN_TEXT * body.max_tokens})


def whole(body: GenerationRequest, kind: str, content: dict[str, Any]) -> Response:
    """A complete answer."""
    choice = {"index": 0, **content, "logprobs": None, "finish_reason": "length"}
    usage = {"prompt_tokens": 1, "completion_tokens": body.max_tokens, "total_tokens": body.max_tokens + 1}
    return JSONResponse({**head(body, kind), "choices": [choice], "usage": usage})


def stream(body: GenerationRequest, kind: str, pieces: list[dict[str, Any]]) -> Response:
    """A streamed answer, at the rate of the simulated engines."""

    async def events() -> AsyncIterator[bytes]:
        common = head(body, kind)
        for piece in pieces:
            choice = {"index": 0, "logprobs": None, "finish_reason": None, **piece}
            chunk = json.dumps({**common, "choices": [choice]}, ensure_ascii=False, separators=(",", ":"))
            yield f"data: {chunk}\n\n".encode()
            await asyncio.sleep(STEP_SECONDS)
        yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream")


def head(body: GenerationRequest, kind: str) -> dict[str, Any]:
    """The metadata of an answer and of all chunks of a stream."""
    return {"id": f"echo-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": body.model}


def work(pipe: Connection) -> None:
    """The frontend's process: sends its port, and serves until it is killed."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=BACKLOG)
    pipe.send(listening.getsockname()[1])
    uvicorn.Server(uvicorn.Config(app, access_log=False, log_level="warning")).run(sockets=[listening])


async def deploy() -> FrontendDeployment:
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=work, args=(there,), daemon=True)
    process.start()
    assert process.pid
    return FrontendDeployment(process.pid, await asyncio.to_thread(here.recv))


if __name__ == "__main__":
    serve(deploy, "fastapi", "starlette", "uvicorn", "uvloop", "httptools")
