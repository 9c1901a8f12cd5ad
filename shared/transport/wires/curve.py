"""CurveZMQ: who may open a KV transfer, and that nobody else reads or changes it on the way.

A decode worker has a key of its own for each process; its public half stands in its record, so a prefill worker knows whom it speaks to.
With a key file (`pagewire keys`) prefill workers show the deployment's key, and decode lets nobody else in.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from shared.errors import ConfigurationError

_DOMAIN = "pagewire"


@dataclass(frozen=True)
class CurveKeys:
    """A pair, in Z85. The secret half is shown nowhere."""

    public: bytes
    secret: bytes

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"

    @classmethod
    def new(cls) -> CurveKeys:
        return cls(*zmq.curve_keypair())


def load_key_file(path: str) -> list[CurveKeys]:
    """The pairs of a file, the one in use first; others (while keys are changed) are let in too. Raises ConfigurationError."""
    try:
        mode = os.stat(path).st_mode
        lines = Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"setting kv_key_file: cannot read {path!r}: {error}") from error
    # What a container is given as a secret nobody else sees, whatever its mode.
    if mode & stat.S_IRWXO and not path.startswith("/run/secrets/"):
        raise ConfigurationError(f"setting kv_key_file: {path!r} can be read by everybody on this machine; chmod 600 it")
    pairs = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        secret = words[0].encode()
        try:
            pairs.append(CurveKeys(zmq.curve_public(secret), secret))
        except (zmq.ZMQError, ValueError) as error:
            raise ConfigurationError(
                f"setting kv_key_file: line {number} of {path!r} is not a key; make one with `pagewire keys`"
            ) from error
    if not pairs:
        raise ConfigurationError(f"setting kv_key_file: {path!r} holds no key; make one with `pagewire keys FILE`")
    return pairs


def write_key_file(path: Path) -> CurveKeys:
    """A new pair, in front of those that stand in the file already: they are let in until their lines are deleted.

    Raises ConfigurationError for a file that is there and is not one of keys, OSError when it cannot be written.
    """
    earlier = [keys.secret.decode() for keys in load_key_file(str(path))] if path.exists() else []
    keys = CurveKeys.new()
    temporary = path.with_name(path.name + ".new")
    with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        lines = ["# Keys of pagewire's KV transfer, the one in use first. Keep this file secret.", keys.secret.decode(), *earlier]
        file.write("\n".join(lines) + "\n")
    temporary.replace(path)
    return keys


def serve_with(sock: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Before it binds: only those who know our public key get through, and those that the context's DoorKeeper lets in."""
    sock.setsockopt(zmq.CURVE_SERVER, 1)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
    sock.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN.encode())


def connect_with(sock: zmq.Socket[bytes], keys: CurveKeys, server: bytes) -> None:
    """Before it connects: speak to the holder of `server`'s secret half and to nobody else."""
    sock.setsockopt(zmq.CURVE_SERVERKEY, server)
    sock.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
    sock.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)


class DoorKeeper:
    """Lets clients with one of `public_keys` into the CURVE sockets of a context; without any, whoever knows the server's key.

    ZeroMQ asks it by its protocol for this (ZAP), over a thread of pyzmq's.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], public_keys: Sequence[bytes]) -> None:
        self._public_keys = frozenset(public_keys)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain=_DOMAIN, credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """`key`: the client's public one, in Z85."""
        return not self._public_keys or key in self._public_keys

    def close(self) -> None:
        self._authenticator.stop()
