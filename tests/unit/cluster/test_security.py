"""Secrets stay out of what is written, and Ray's token is its owner's alone."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from cluster import security

CLEARED = (
    "RAY_AUTH_MODE",
    "RAY_AUTH_TOKEN",
    "RAY_AUTH_TOKEN_PATH",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER",
    "GLOO_SOCKET_IFNAME",
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in CLEARED:
        monkeypatch.setenv(name, "")  # so that what the code sets is taken back
        monkeypatch.delenv(name)
    return tmp_path / ".ray" / "auth_token"


def test_redact_hides_values_by_key_and_passwords_in_urls() -> None:
    config = {
        "reward": {
            "options": {
                "custom": {
                    "mine": {
                        "url": "https://me:hunter2@host/score",
                        "kwargs": {
                            "api_key": "k1",
                            "openai-api-key": "k2",
                            "Token": "k3",
                            "auth": ["a"],
                            "passwords": "kept",
                            "secret": ["k4"],
                        },
                    }
                }
            }
        },
        "model": {"tokenizer": "character", "path": "hub/name"},
        "rollout": {"max_tokens": 64},
        "empty": {"token": ""},
    }
    mine = {
        "url": "https://(hidden)@host/score",
        "kwargs": {
            "api_key": "(hidden)",
            "openai-api-key": "(hidden)",
            "Token": "(hidden)",
            "auth": ["a"],
            "passwords": "kept",
            "secret": ["(hidden)"],
        },
    }
    assert security.redact(config) == {**config, "reward": {"options": {"custom": {"mine": mine}}}}


@pytest.mark.parametrize(
    "given, hidden",
    [
        ("a.b.api_key=abc def", "a.b.api_key=(hidden)"),
        ("+x={k: 1, token: 'a,b', n: 2}", "+x={k: 1, token: (hidden), n: 2}"),
        ('x={"hf-token":"abc"}', 'x={"hf-token":(hidden)}'),
        ("url=https://me:pw@host/p", "url=https://(hidden)@host/p"),
        ("rollout.max_tokens=24", "rollout.max_tokens=24"),
        ("model.tokenizer=path", "model.tokenizer=path"),
        ("secrets=abc", "secrets=abc"),
        ("mytoken=abc", "mytoken=abc"),
    ],
)
def test_redact_text(given: str, hidden: str) -> None:
    assert security.redact_text(given) == hidden


def test_a_token_is_made_once_for_its_owner(home: Path) -> None:
    security.secure_local_cluster()
    token = home.read_text()
    assert len(token) == 64 and home.stat().st_mode & 0o777 == 0o600
    assert (
        os.environ["RAY_AUTH_MODE"] == "token"
        and os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    )
    assert security.token_source() == str(home)
    home.chmod(0o644)  # as Ray itself writes it
    security.secure_local_cluster()
    assert home.read_text() == token and home.stat().st_mode & 0o777 == 0o600


def test_what_the_user_has_set_stands(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    security.secure_local_cluster()
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and not home.exists()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    security.secure_local_cluster()
    assert security.token_source() == "RAY_AUTH_TOKEN" and not home.exists()


def test_a_failed_write_of_tensors_is_an_os_error(tmp_path: Path) -> None:
    """safetensors' own error is none, and a full disk must cost a checkpoint only."""
    import torch

    from actors.modeling.safetensor_files import write_tensors

    with pytest.raises(OSError, match="x.safetensors: "):
        write_tensors(tmp_path / "missing" / "x.safetensors", {"a": torch.zeros(2)})
    write_tensors(tmp_path / "x.safetensors", {"a": torch.zeros(2)})
    assert (tmp_path / "x.safetensors").stat().st_size > 8
