"""What keeps a run to its owner: Ray's token, listening on the loopback, and secrets left out of files.

Standard library only. What the user has set in the environment wins.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

HIDDEN = "(hidden)"
_WORDS = r"(?:token|secret|password|passwd|credentials?|authorization|api[_-]?key)"
_SECRET = re.compile(rf"(?:^|[_-]){_WORDS}$", re.IGNORECASE)
_GIVEN = re.compile(
    rf"""(?<![\w-])((?:[\w-]*[_-])?{_WORDS}['"]?\s*[:=]\s*)("[^"]*"|'[^']*'|[^,}}\]]+)""",
    re.IGNORECASE,
)
_USERINFO = re.compile(r"(\w://)[^/@\s]+@")


def redact(value: Any, key: str = "") -> Any:
    """`value` (plain dicts, lists, scalars) with the texts of secret-looking keys, and passwords in URLs, hidden."""
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v, key) for v in value]
    if isinstance(value, str) and value:
        return HIDDEN if _SECRET.search(key) else _USERINFO.sub(rf"\1{HIDDEN}@", value)
    return value


def redact_text(text: str) -> str:
    """An argument of the command line, such as a.api_key=VALUE or a={token: VALUE}, with the values hidden."""
    return _USERINFO.sub(rf"\1{HIDDEN}@", _GIVEN.sub(rf"\1{HIDDEN}", text))


def token_file() -> Path:
    """Where Ray looks for its token when RAY_AUTH_TOKEN is not set."""
    return Path(
        os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token"
    ).expanduser()


def token_source() -> str:
    """Where Ray's token comes from, in words; "" where there is none."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    file = token_file()
    return str(file) if file.is_file() and file.stat().st_size else ""


def secure_local_cluster() -> None:
    """Before Ray is imported for a cluster of this machine alone: every client must have a token, every port is on the
    loopback. The token is Ray's usual one, made here if missing, and its file is for its owner's eyes."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # Ray's own switch for "this node is all there is"; without it its services listen on every interface.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # PyTorch's, between ranks
    if os.environ["RAY_AUTH_MODE"].lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    file = token_file()
    if token_source():
        if file == Path.home() / ".ray" / "auth_token":
            file.chmod(0o600)  # Ray writes it for all to read
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another run has just made it
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32))


def token() -> str:
    """Ray's token itself, "" where there is none."""
    return os.environ.get("RAY_AUTH_TOKEN") or (
        token_file().read_text().strip() if token_source() else ""
    )
