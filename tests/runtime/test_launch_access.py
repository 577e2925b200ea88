"""The secrets of clients: flags, files and their errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_runtime.errors import ConfigurationError
from megatron_runtime.launch.flags import AccessFlags


def test_secrets_of_clients_are_read_from_files_and_flags(tmp_path: Path) -> None:
    token, environment = tmp_path / "token", {"MEGATRON_CONTROL_TOKEN": "t", "MEGATRON_API_KEYS_FILE": "keys"}
    token.write_text("0123456789abcdef0123456789abcdef\n")
    identity = AccessFlags(api_key=["a", "b"], control_token_file=token).identity(environment)
    assert (identity.api_keys, identity.api_keys_file) == (("a", "b"), Path("keys"))
    assert identity.control_token == "0123456789abcdef0123456789abcdef"
    assert AccessFlags(api_keys_file=token).identity(environment).api_keys_file == token
    assert AccessFlags().identity(environment).control_token == "t"


@pytest.mark.parametrize(
    "content", ["", "short", "0123456789abcdef 0123456789abcdef", "0123456789abcdef0123456789abcdeü"]
)
def test_an_unusable_control_token_is_refused_with_the_flag_and_a_remedy(tmp_path: Path, content: str) -> None:
    file = tmp_path / "token"
    with pytest.raises(ConfigurationError, match=r"--control-token-file .*token: can't be read: No such file"):
        AccessFlags(control_token_file=file).identity({})
    file.write_text(content)
    with pytest.raises(ConfigurationError, match=r"--control-token-file .*token: .*openssl rand -hex 32"):
        AccessFlags(control_token_file=file).identity({})


@pytest.mark.parametrize("key", ["", "two words"])
def test_an_api_key_without_a_value_is_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match="--api-key: must not be empty"):
        AccessFlags(api_key=[key]).identity({})
