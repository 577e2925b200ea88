"""Large request bodies delay no other request."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
import weakref

import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response
from httpx import ASGITransport, AsyncClient
from pydantic import BaseModel

from megatron_runtime.model.tokenizer import Tokenizer, load_tokenizer
from megatron_runtime.server.bodies.protocol import ChatCompletionBody
from megatron_runtime.server.bodies.sampling import check_characters, check_tokens
from megatron_runtime.server.body_route import body_route, end_turn
from megatron_runtime.server.errors import ApiError, install_error_handlers
from megatron_runtime.server.json_response import JsonResponse
from megatron_runtime.server.large_bodies import LARGE_BODY_BYTES, LargeBodies
from megatron_runtime.server.openai.tokenization import MAX_CHARACTERS, TokenizeBody, tokenize

BODIES = 3


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: str) -> Tokenizer:
    return load_tokenizer(tiny_checkpoint)


class Body(BaseModel):
    text: str = ""


@pytest.fixture
def client() -> AsyncClient:
    app = FastAPI()
    install_error_handlers(app, {})
    app.router.route_class = body_route(LargeBodies())

    @app.post("/length")
    async def length(body: Body, request: Request) -> Response:
        return JsonResponse([len(body.text), len(await request.body())])

    @app.get("/nothing")
    async def nothing() -> str:
        return "nothing"

    return AsyncClient(transport=ASGITransport(app), base_url="http://here")


async def test_large_bodies_are_worked_on_one_by_one_beside_the_event_loop() -> None:
    bodies, running, go_on = LargeBodies(), 0, threading.Event()
    most, threads = 0, set()

    def work(number: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        threads.add(threading.current_thread())
        go_on.wait(20)
        running -= 1
        return number

    large = [asyncio.create_task(bodies.run(LARGE_BODY_BYTES + 1, work, number)) for number in range(4)]
    await asyncio.sleep(0)
    assert await bodies.run(LARGE_BODY_BYTES, threading.current_thread) is threading.current_thread()
    assert not any(task.done() for task in large)
    go_on.set()
    assert await asyncio.gather(*large) == [0, 1, 2, 3]
    assert most == 1
    assert threading.current_thread() not in threads


async def test_the_shortest_body_that_waits_is_worked_on_first() -> None:
    """A body of 40 KB waited for all of 15 MiB that others had sent before."""
    bodies, started, go_on, order = LargeBodies(), threading.Event(), threading.Event(), []

    def work(size: int) -> None:
        order.append(size)
        started.set()
        go_on.wait(20)

    sizes = [3 * 2**20, 15 * 2**20, 2**20, 14 * 2**20, 40_000]
    waiting = [asyncio.create_task(bodies.run(size, work, size)) for size in sizes]
    assert await asyncio.to_thread(started.wait, 20)
    waiting[3].cancel()
    await asyncio.wait(waiting[3:4])
    go_on.set()
    await asyncio.gather(*waiting, return_exceptions=True)
    assert order == [3 * 2**20, 40_000, 2**20, 15 * 2**20]


async def test_a_large_body_has_its_turn_until_all_work_on_it_is_done() -> None:
    """Bodies that had been parsed waited for their grammars together, with several times their bytes each."""
    go_on, all_done, at_once = asyncio.Event(), asyncio.Event(), [0]
    app = FastAPI()
    app.router.route_class = body_route(LargeBodies())

    @app.post("/work")
    async def work(body: Body, request: Request) -> Response:
        at_once.append(at_once[-1] + 1)
        await go_on.wait()
        at_once.append(at_once[-1] - 1)
        end_turn(request)
        if len(at_once) == 1 + 2 * BODIES:
            all_done.set()
        await all_done.wait()
        return JsonResponse(len(body.text))

    @app.post("/small")
    async def small(body: Body, request: Request) -> Response:
        end_turn(request)
        return JsonResponse(len(body.text))

    async with AsyncClient(transport=ASGITransport(app), base_url="http://here") as client:
        sent = [client.post("/work", json={"text": "x" * LARGE_BODY_BYTES}) for _ in range(BODIES)]
        large = [asyncio.create_task(each) for each in sent]
        assert (await client.post("/small", json={"text": "x"})).json() == 1
        go_on.set()
        answers = await asyncio.gather(*large)
    assert [answer.json() for answer in answers] == [LARGE_BODY_BYTES] * BODIES
    assert max(at_once) == 1


async def test_the_smallest_body_that_waits_has_the_next_turn() -> None:
    bodies, order = LargeBodies(), []

    async def work(size: int) -> None:
        turn = await bodies.turn(size)
        order.append(size)
        await asyncio.sleep(0)
        turn.end()
        turn.end()

    first = await bodies.turn(2**20)
    tasks = [asyncio.create_task(work(size)) for size in (3 * 2**20, 2**20, 40_000, 2 * 2**20)]
    await asyncio.sleep(0)
    (await bodies.turn(LARGE_BODY_BYTES)).end()
    tasks[1].cancel()
    await asyncio.wait(tasks[1:2])
    first.end()
    tasks[2].cancel()  # when it has its turn already
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [2 * 2**20, 3 * 2**20]
    (await bodies.turn(2**20)).end()


@pytest.mark.parametrize("text", [1, "x"], ids=["parsed", "prepared"])
async def test_a_body_that_is_refused_ends_its_turn(text: object) -> None:
    app = FastAPI()
    install_error_handlers(app, {})
    app.router.route_class = body_route(LargeBodies())

    @app.post("/refuse")
    async def refuse(body: Body, _: Request) -> Response:
        raise ApiError(400, body.text)

    async with AsyncClient(transport=ASGITransport(app), base_url="http://here") as client:
        for _ in range(2):
            answer = await client.post("/refuse", json={"text": text, "rest": "x" * LARGE_BODY_BYTES})
            assert answer.status_code == 400


async def test_a_grammar_is_never_checked_in_the_event_loop() -> None:
    """The check of an expression of 22 KB kept all clients waiting for 0.2 s."""
    bodies, go_on = LargeBodies(), threading.Event()
    large = asyncio.create_task(bodies.run(LARGE_BODY_BYTES + 1, go_on.wait, 20))
    small = await bodies.run_with_grammar(10, threading.current_thread)
    assert small is not threading.current_thread()
    go_on.set()
    assert await large
    assert await bodies.run_with_grammar(LARGE_BODY_BYTES + 1, threading.current_thread) is not small
    with pytest.raises(ZeroDivisionError):
        await bodies.run_with_grammar(10, lambda: 1 // 0)


async def test_the_memory_of_a_refused_body_is_released_at_once() -> None:
    """Bodies of 1 MB that were refused kept 430 MiB until the collector of reference cycles ran."""

    class Content:
        """Stands for a parsed body."""

    bodies, kept = LargeBodies(), []

    def refuse() -> None:
        content = Content()
        kept.append(weakref.ref(content))
        raise ApiError(400, "refused", param="x")

    gc.disable()
    try:
        for run in (bodies.run, bodies.run_with_grammar):
            with contextlib.suppress(ApiError):
                await run(LARGE_BODY_BYTES + 1, refuse)
        await bodies.run(LARGE_BODY_BYTES + 1, int)  # The thread has ended the work before.
        assert [reference() for reference in kept] == [None, None]
    finally:
        gc.enable()


def test_a_body_knows_whether_it_has_a_grammar() -> None:
    def has_grammar(**fields: object) -> bool:
        messages = [{"role": "user", "content": "x"}]
        return ChatCompletionBody.model_validate({"model": "m", "messages": messages, **fields}).has_grammar

    assert not has_grammar()
    tool = {"type": "function", "function": {"name": "f"}}
    for fields in (
        {"guided_regex": "a"},
        {"guided_json": {}},
        {"guided_choice": ["a"]},
        {"guided_grammar": "start: A"},
        {"structured_outputs": {"regex": "a"}},
        {"response_format": {"type": "json_object"}},
        {"tools": [tool]},
    ):
        assert has_grammar(**fields), fields


async def test_an_error_about_a_large_body_is_that_about_a_small_one(client: AsyncClient) -> None:
    async def refusal(size: int) -> tuple[int, str]:
        answer = await client.post("/length", json={"text": [1] * size})
        return answer.status_code, answer.json()["error"]["param"]

    assert await refusal(1) == await refusal(LARGE_BODY_BYTES) == (400, "text")


@pytest.mark.parametrize("size", [10, 100_000, 3 * 2**20])
async def test_bodies_of_any_size_are_read(client: AsyncClient, size: int) -> None:
    answer = await client.post("/length", json={"text": "x" * size})
    assert answer.json() == [size, size + len('{"text":""}')]


@pytest.mark.parametrize("size", [10, 100_000, 3 * 2**20])
@pytest.mark.parametrize("end", ['"', '"}}', "", '"}\xff'])
async def test_bodies_of_any_size_that_are_not_json_are_refused(client: AsyncClient, size: int, end: str) -> None:
    content = b'{"text": "' + b"x" * size + end.encode("latin-1")
    answer = await client.post("/length", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


@pytest.mark.parametrize("size", [2_000, 600_000])
async def test_deeply_nested_bodies_are_refused(client: AsyncClient, size: int) -> None:
    content = '{"text": ' + "[" * size + "]" * size + "}"
    answer = await client.post("/length", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400


async def test_routes_without_a_body_are_served(client: AsyncClient) -> None:
    assert (await client.get("/nothing")).json() == "nothing"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token is not None
    fitting = "a" * (100 * tokenizer.longest_token)
    check_characters(fitting, tokenizer, 100, param="prompt")
    with pytest.raises(ApiError, match=r"prompt: .* can.t fit. This .* context length is 100 tokens") as caught:
        check_characters(fitting + "a", tokenizer, 100, param="prompt")
    assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")
    check_characters(fitting + "a", tokenizer, None, param="prompt")


def test_a_text_beyond_the_limit_of_tokenize_is_refused(tokenizer: Tokenizer) -> None:
    """15 MiB took 1.4 GiB of memory."""
    assert tokenize(TokenizeBody(prompt="a" * MAX_CHARACTERS), tokenizer, 100)["count"] > 100
    with pytest.raises(ApiError, match=f"prompt: .* send at most {MAX_CHARACTERS}"):
        tokenize(TokenizeBody(prompt="a" * (MAX_CHARACTERS + 1)), tokenizer, 100)


def test_no_token_is_longer_than_the_longest_one(tokenizer: Tokenizer) -> None:
    assert tokenizer.longest_token is not None
    for token in range(tokenizer.vocab_size):
        assert len(tokenizer.detokenize([token], skip_special_tokens=False)) <= tokenizer.longest_token


def test_the_first_token_outside_the_vocabulary_is_named() -> None:
    check_tokens([], 10, param="prompt")
    check_tokens([9, 0], 10, param="prompt")
    with pytest.raises(ApiError, match="token 10 is outside the vocabulary of 10 tokens"):
        check_tokens([1, 10, 11], 10, param="prompt")
