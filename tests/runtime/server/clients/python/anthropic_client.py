"""Uses Anthropic's client with an endpoint: `anthropic_client.py URL`; prints the results as JSON."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from anthropic import Anthropic, APIStatusError

FRANCE = {"role": "user", "content": [{"type": "text", "text": "What is the capital of France?"}]}
ASKED = {"role": "user", "content": "What is the weather in Paris?"}
SYSTEM = [{"type": "text", "text": "You are short.", "cache_control": {"type": "ephemeral"}}]
CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"name": "weather", "description": "The weather of a city", "input_schema": CITY}
GREEDY = {"temperature": 0}


def stream(client: Any, **asked: Any) -> dict[str, Any]:
    """The types of the events without repetitions, and the message that the client joins from them."""
    with client.stream(model="chat", extra_body=GREEDY, **asked) as events:
        kinds = [event.type for event in events if event.type.startswith(("message", "content"))]
        order = [kind for at, kind in enumerate(kinds) if at == 0 or kind != kinds[at - 1]]
        return {"order": order, "message": events.get_final_message().to_dict()}


def refusal(client: Anthropic, **changed: Any) -> list[Any]:
    """The error of an invalid request."""
    try:
        client.messages.create(**{"model": "chat", "max_tokens": 5, "messages": [FRANCE], **changed})
    except APIStatusError as error:
        return [type(error).__name__, error.body["type"], error.body["error"]["type"], bool(error.request_id)]
    return []


def main() -> None:
    client = Anthropic(base_url=sys.argv[1], api_key="none", max_retries=0)

    def create(**asked: Any) -> Any:
        return client.messages.create(model="chat", extra_body=GREEDY, **asked)

    short = {"messages": [FRANCE], "system": SYSTEM, "max_tokens": 12}
    one = {"type": "any", "disable_parallel_tool_use": True}
    calling = {"messages": [ASKED], "max_tokens": 60, "tools": [WEATHER], "tool_choice": one}
    begun = [FRANCE, {"role": "assistant", "content": "The capital of"}]
    with ThreadPoolExecutor(5) as pool:  # The engine answers many requests in little more time than one.
        asked = {
            "whole": pool.submit(create, **short, metadata={"user_id": "someone"}),
            "called": pool.submit(create, **calling),
            "begun": pool.submit(create, messages=begun, max_tokens=20_000, stop_sequences=["Paris"]),
        }
        streamed = {
            # Claude Code uses the beta version of the client, whose requests have the query beta=true.
            "streamed": pool.submit(stream, client.beta.messages, **short),
            "call_streamed": pool.submit(stream, client.messages, **calling),
        }
    called = asked["called"].result()
    result = {"type": "tool_result", "tool_use_id": called.content[-1].id, "content": [{"type": "text", "text": "Sun"}]}
    turns = [ASKED, {"role": "assistant", "content": called.content}, {"role": "user", "content": [result]}]
    found = {
        **{name: answer.result().to_dict() for name, answer in asked.items()},
        **{name: answer.result() for name, answer in streamed.items()},
        "counted": client.messages.count_tokens(model="chat", messages=[FRANCE], system=SYSTEM).input_tokens,
        "continued": create(messages=turns, max_tokens=8, tools=[WEATHER]).to_dict(),
        "refusals": [
            refusal(client, model="other"),
            refusal(client, messages=[{"role": "user", "content": [{"type": "image", "source": {"type": "url"}}]}]),
        ],
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
