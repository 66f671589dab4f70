"""What keeps a run to its owner: Ray's token, listening on the loopback, no secrets in files.

Standard library only. An environment variable that the user has set is kept.
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
_SECRET_KEY = re.compile(rf"(?:^|[_-]){_WORDS}$", re.IGNORECASE)
# KEY=VALUE or KEY: VALUE in a text, where the key looks secret.
_SECRET_PAIR = re.compile(
    rf"""(?<![\w-])((?:[\w-]*[_-])?{_WORDS}['"]?\s*[:=]\s*)("[^"]*"|'[^']*'|[^,}}\]]+)""",
    re.IGNORECASE,
)
_URL_LOGIN = re.compile(r"(\w://)[^/@\s]+@")  # USER:PASSWORD@ of a URL


def redact(value: Any, key: str = "") -> Any:
    """Return `value` with its secrets replaced by "(hidden)".

    value: nested dicts and lists of plain values. Secrets are the texts of keys such as "api_key",
    and logins in URLs. key: the key under which `value` stands.
    """
    if isinstance(value, dict):
        return {k: redact(v, str(k)) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [redact(v, key) for v in value]
    if isinstance(value, str) and value:
        return HIDDEN if _SECRET_KEY.search(key) else _URL_LOGIN.sub(rf"\1{HIDDEN}@", value)
    return value


def redact_text(text: str) -> str:
    """Return an argument of the command line with its secrets replaced by "(hidden)", such as
    a.api_key=VALUE or a={token: VALUE}."""
    return _URL_LOGIN.sub(rf"\1{HIDDEN}@", _SECRET_PAIR.sub(rf"\1{HIDDEN}", text))


def token_file() -> Path:
    """Return the file that Ray reads its token from if RAY_AUTH_TOKEN is not set."""
    named = os.environ.get("RAY_AUTH_TOKEN_PATH")
    return Path(named).expanduser() if named else _usual_token_file()


def _usual_token_file() -> Path:
    return Path.home() / ".ray" / "auth_token"


def token_source() -> str:
    """Return where Ray's token comes from: RAY_AUTH_TOKEN, the path of its file, or "" if there is
    no token."""
    if os.environ.get("RAY_AUTH_TOKEN"):
        return "RAY_AUTH_TOKEN"
    file = token_file()
    return str(file) if file.is_file() and file.stat().st_size else ""


def token() -> str:
    """Return Ray's token, or "" if there is none."""
    given = os.environ.get("RAY_AUTH_TOKEN")
    if given:
        return given
    return token_file().read_text().strip() if token_source() else ""


def secure_local_cluster() -> None:
    """Prepare the environment for a Ray cluster of this machine alone. Call it before Ray is
    imported.

    Every client must then show a token, and every port is on the loopback. The token is Ray's usual
    one; it is made here if there is none. Only its owner may read its file.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    # This is Ray's switch for a cluster of one node. Without it, Ray's services listen on every
    # network interface.
    os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "")
    if loopback:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback)  # for PyTorch between the ranks
    if os.environ["RAY_AUTH_MODE"].lower() == "token" and not os.environ.get("RAY_AUTH_TOKEN"):
        _ensure_token_file()


def _ensure_token_file() -> None:
    """Make a token if there is none, and let only its owner read it."""
    file = token_file()
    if token_source():
        if file == _usual_token_file():
            file.chmod(0o600)  # Ray lets everybody read a file that it makes
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):  # another run has made it in this moment
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
            out.write(secrets.token_hex(32))
