"""The fields that an activator reads from a body."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_operator.activator.envelope import MAX_NAME_BYTES, Envelope

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda values: st.lists(values, max_size=3) | st.dictionaries(st.text(), values, max_size=3),
    max_leaves=10,
)
LARGE = {
    "numbers": b'{"a":[' + b"1," * (8 << 20),
    "objects": b'{"a":[' + b"{}," * (5 << 20),
    "fields": b'{"a":[' + b'{"a":1},' * (2 << 20),
    "the model": b'{"model":[' + b"{}," * (5 << 20),
    "stream": b'{"stream":[' + b"{}," * (5 << 20),
}
PEAK = """
import resource, sys
from megatron_operator.activator.envelope import Envelope
with open(sys.argv[1], "rb") as file:
    body = bytearray(17 << 20)
    del body[file.readinto(body):]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
assert Envelope.parse(body) == Envelope(None, False)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@given(st.dictionaries(st.sampled_from(["model", "stream", "messages", "model "]), JSON), st.booleans())
def test_the_fields_are_those_of_the_document(body: dict[str, object], ascii_only: bool) -> None:
    content = json.dumps(body, ensure_ascii=ascii_only).encode(errors="surrogatepass")
    model = body.get("model")
    expected = Envelope(model if isinstance(model, str) else None, body.get("stream") is True)
    assert Envelope.parse(content) == expected


@given(st.binary(max_size=8), st.binary(max_size=8))
def test_no_bytes_fail(value: bytes, rest: bytes) -> None:
    for content in (value, b'{"model":' + value + b"}" + rest, b'{"model":"' + value + b'","stream":' + rest + b"}"):
        envelope = Envelope.parse(content)
        assert envelope is None or isinstance(envelope.stream, bool)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b'{"model": "a", "model": "b"}', Envelope("b", False)),
        (b' {"mod\\u0065l" : "\\u0061", "stream" : true } ', Envelope("a", True)),
        (b'{"x": {"model": "b", "stream": true}, "model": "a"}', Envelope("a", False)),
        (b'{"stream": "true"}', Envelope(None, False)),
        (b'{"model": "a\xff"}', Envelope(None, False)),
        (b'{"model": "\\ud800"}', None),
        (b'{"model": "' + b"a" * MAX_NAME_BYTES + b'"}', Envelope(None, False)),
        (b'{"model": "a", "x": NaN}', None),
        (b'{"model": "a"} {}', None),
        (b'{"model": "a", "x": ' + b"[" * 100_000, None),
        (b'["model"]', None),
        (b"", None),
    ],
)
def test_unusual_bodies(content: bytes, expected: Envelope | None) -> None:
    assert Envelope.parse(content) == expected


@pytest.mark.parametrize("name", LARGE)
def test_a_large_body_takes_no_memory_besides_its_own(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("bodies") / "body.json"
    path.write_bytes(LARGE[name][:-1] + b"]}")
    done = subprocess.run([sys.executable, "-c", PEAK, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 << 10  # KiB; the document would take at least 160 MiB
