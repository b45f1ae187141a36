"""How a Ray cluster that exists already is reached: its address, and the token that it asks for.

Imports no Ray: what is said here must be in the environment before Ray is imported.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from flowrl.errors import BackendError

ADDRESS = "RAY_ADDRESS"
AUTH_MODE = "RAY_AUTH_MODE"
_TOKEN, _TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
_CONNECT_S = 5.0


def use_token() -> None:
    """Shows the token of this user to clusters, unless `RAY_AUTH_MODE` says otherwise.

    Ray 2.60 itself shows none when it joins a cluster, even if there is one.
    """
    if _token() is not None:
        os.environ.setdefault(AUTH_MODE, "token")
    # Ray tries 20 times, a second each, also where the token is a wrong one.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", f"{_CONNECT_S:g}")


def _token() -> str | None:
    """Returns where the token comes from; None without one."""
    for name in (_TOKEN, _TOKEN_PATH):
        if os.environ.get(name):
            return name
    home = Path("~/.ray/auth_token").expanduser()
    return str(home) if home.is_file() else None


def require_listening(address: str) -> None:
    """Checks that something listens at `HOST:PORT`, for which Ray would wait long.

    Raises:
        BackendError: nothing does.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return  # `auto`, or a form that is Ray's affair
    try:
        with socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S):
            pass
    except OSError as reason:
        raise BackendError(
            "no Ray cluster can be joined: nothing listens at its address",
            where=f"{ADDRESS}={address}",
            found=str(reason),
            hint="start the head with `ray start --head --port=PORT`, or give its address",
        ) from reason


def why_refused(address: str, reason: Exception) -> BackendError:
    """Returns the error of a cluster that listens and cannot be joined."""
    source, mode = _token(), os.environ.get(AUTH_MODE, "disabled")
    shown = f"the token of {source}" if source is not None and mode == "token" else "no token"
    return BackendError(
        "the Ray cluster does not let this run in; most often its token is another one",
        where=f"{ADDRESS}={address}",
        found=f"{AUTH_MODE}={mode}, {shown}: {' '.join(str(reason).split())[:200]}",
        expected="the token with which the cluster was started",
        hint=f"set {_TOKEN_PATH} to a file with the cluster's token (`ray get-auth-token` prints "
        "it on the head), and give all nodes the same version of Ray",
    )
