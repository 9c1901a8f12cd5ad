"""Who may ask: API keys, as OpenAI's clients send them (`Authorization: Bearer KEY`)."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from shared.config import Settings
from shared.errors import AuthenticationError, ConfigurationError

OPEN_PATHS = frozenset({"/", "/health", "/ping", "/ready", "/version", "/metrics", "/openapi.json", "/docs"})
"""What probes, scrapers and browsers read without a key; so are the files of the page (`/docs/...`). All else needs one."""
_SCHEME = b"bearer "


def is_open(path: str) -> bool:
    return path in OPEN_PATHS or path.startswith("/docs/")


class ApiKeys:
    """The keys that are accepted; none: everybody may ask. Only their digests are kept."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in dict.fromkeys(keys)]

    @property
    def are_needed(self) -> bool:
        return bool(self._digests)

    def check(self, path: str, authorization: bytes | None) -> None:
        """Raises AuthenticationError unless `authorization`, the header as it came, holds one of the keys or none is needed."""
        if not self._digests or is_open(path):
            return
        if authorization is None:
            raise AuthenticationError("this server needs an API key: send it in the header Authorization: Bearer KEY")
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            raise AuthenticationError("the Authorization header must have the form: Bearer KEY")
        given = _digest(authorization[len(_SCHEME) :].strip())
        # All are compared, each in constant time: how long it takes says nothing of which key came close.
        if sum(hmac.compare_digest(given, digest) for digest in self._digests) == 0:
            raise AuthenticationError("the API key is not one that this server accepts")


def load_api_keys(settings: Settings) -> ApiKeys:
    """Those of `api_keys` and of the file `api_keys_file` together. Raises ConfigurationError, which quotes no key."""
    keys = settings.api_keys.get_secret_value().split(",") if settings.api_keys is not None else []
    if settings.api_keys_file is not None:
        try:
            lines = Path(settings.api_keys_file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"setting api_keys_file: cannot read {settings.api_keys_file!r}: {error}") from error
        keys += [line for line in lines if line.strip() and not line.lstrip().startswith("#")]
        if not keys:
            raise ConfigurationError(f"setting api_keys_file: {settings.api_keys_file!r} holds no key; leave the setting out to do without")
    stripped = [key.strip() for key in keys]
    for place, key in enumerate(stripped, 1):
        if not key or any(character.isspace() or not character.isprintable() for character in key):
            raise ConfigurationError(f"API key {place} of {len(stripped)} is empty or has white space within; separate keys by commas")
    return ApiKeys(stripped)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
