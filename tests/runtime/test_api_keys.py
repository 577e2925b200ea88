"""The file of API keys: changes take effect, and a missing file keeps the last keys."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.server.api_keys import ApiKeys
from megatron_runtime.server.errors import ApiError


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys"
    path.write_text("# ours\nfirst\n")
    return path


def lets_in(keys: ApiKeys, key: str) -> bool:
    try:
        keys.check(f"Bearer {key}")
    except ApiError as refusal:
        if refusal.status != 401:
            raise
        return False
    return True


def replace(file: Path, content: bytes) -> None:
    """As the kubelet and most editors do it: another file under the same name."""
    other = file.with_suffix(".new")
    other.write_bytes(content)
    other.replace(file)


def test_added_and_removed_keys_take_effect_at_once(file: Path) -> None:
    keys = ApiKeys(file)
    assert [lets_in(keys, key) for key in ("first", "second", "# ours", "")] == [True, False, False, False]
    replace(file, b"second\n")
    assert [lets_in(keys, key) for key in ("first", "second")] == [False, True]
    replace(file, b"")
    assert not lets_in(keys, "second")


def test_each_key_has_a_cache_salt_of_its_own_whichever_header_carries_it(file: Path) -> None:
    replace(file, b"first\nsecond\n")
    keys, others = ApiKeys(file), ApiKeys(file)
    first, second = keys.names("Bearer first").cache_salt, keys.names("bearer second").cache_salt
    assert first != second
    assert others.names("Basic of-a-proxy", "first").cache_salt == first
    assert "first" not in first
    assert keys.names("Bearer first").tenant == others.names(None, "first").tenant != keys.names("Bearer second").tenant
    assert keys.names("Bearer first").tenant not in first
    replace(file, b"second\n")
    assert not lets_in(keys, "first")
    assert keys.names("Bearer first").cache_salt != second


@pytest.mark.parametrize("loss", ["it vanishes", "it is no text"])
def test_while_the_file_can_not_be_read_the_last_keys_stay_valid_with_one_warning(
    loss: str, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = ApiKeys(file)
    if loss == "it vanishes":
        file.unlink()
    else:
        replace(file, b"\xff\xfe")
    with caplog.at_level(logging.WARNING):
        assert [lets_in(keys, key) for key in ("first", "second", "first")] == [True, False, True]
    (record,) = caplog.records
    assert f"{file}: can't be read" in record.getMessage()
    assert "the keys that were read last stay valid" in record.getMessage()
    replace(file, b"second\n")
    assert [lets_in(keys, key) for key in ("first", "second")] == [False, True]
    file.unlink()
    with caplog.at_level(logging.WARNING):
        assert lets_in(keys, "second")
    assert len(caplog.records) == 2


def test_an_unreadable_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--api-keys-file .*nowhere: can't be read: No such file"):
        ApiKeys(tmp_path / "nowhere")


def test_a_key_is_also_accepted_in_x_api_key(file: Path) -> None:
    keys = ApiKeys(file)
    keys.check(None, "first")
    keys.check("Bearer someone-elses", "first")
    keys.check("Bearer first", "someone-elses")
    for authorization, key in ((None, None), (None, "second"), ("Basic first", None), ("Bearer ", "")):
        with pytest.raises(ApiError, match="X-Api-Key"):
            keys.check(authorization, key)
