from __future__ import annotations

from pathlib import Path

import pytest

from services.router.http.api_keys import ApiKeys, load_api_keys
from shared.config import load_settings
from shared.errors import AuthenticationError, ConfigurationError


def keys_of(**environ: str) -> ApiKeys:
    return load_api_keys(load_settings("router", environ))


def is_accepted(keys: ApiKeys, authorization: bytes | None, path: str = "/v1/completions") -> bool:
    try:
        keys.check(path, authorization)
    except AuthenticationError:
        return False
    return True


def test_without_keys_everybody_may_ask() -> None:
    assert is_accepted(keys_of(), None)
    assert is_accepted(keys_of(), b"Basic x")


@pytest.mark.parametrize(
    ("authorization", "accepted"),
    [
        (b"Bearer first", True),
        (b"bearer second", True),
        (b"Bearer  second ", True),
        ("Bearer schlüssel".encode(), True),
        (b"Bearer fir", False),
        (b"Bearer firstsecond", False),
        (b"Bearer first,second", False),
        (b"Bearer ", False),
        (b"Bearer", False),
        (b"Basic first", False),
        (b"first", False),
        (b"\xff\xfe", False),
        (None, False),
    ],
)
def test_any_of_the_keys_opens_and_nothing_else(authorization: bytes | None, accepted: bool) -> None:
    keys = keys_of(PAGEWIRE_API_KEYS="first, second,schlüssel")
    assert is_accepted(keys, authorization) is accepted


def test_probes_and_the_documentation_need_no_key_and_all_else_does() -> None:
    keys = keys_of(PAGEWIRE_ROUTER_API_KEYS="k")
    for path in ("/", "/health", "/ready", "/ping", "/version", "/metrics", "/docs", "/docs/swagger-ui.css", "/openapi.json"):
        assert is_accepted(keys, None, path)
    for path in ("/v1/models", "/tokenize", "/detokenize", "/v1/responses", "/nothing", "/health/../v1/models", "//health", "/documents"):
        assert not is_accepted(keys, None, path)


def test_keys_come_from_a_file_too(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nalpha\n\n  beta  \r\n")
    keys = keys_of(PAGEWIRE_API_KEYS="gamma", PAGEWIRE_API_KEYS_FILE=str(file))
    assert all(is_accepted(keys, f"Bearer {key}".encode()) for key in ("alpha", "beta", "gamma"))
    assert not is_accepted(keys, b"Bearer # ours")


@pytest.mark.parametrize("value", ["sesame,,x", " ", "ses ame", "sesame\n"[:-1] + "\u0000"])
def test_unusable_keys_are_refused_without_being_shown(value: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        keys_of(PAGEWIRE_API_KEYS=value)
    assert "sesame" not in caught.value.message


def test_a_file_that_is_missing_or_empty_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="api_keys_file"):
        keys_of(PAGEWIRE_API_KEYS_FILE=str(tmp_path / "none"))
    (tmp_path / "empty").write_text("\n# nothing\n")
    with pytest.raises(ConfigurationError, match="holds no key"):
        keys_of(PAGEWIRE_API_KEYS_FILE=str(tmp_path / "empty"))


def test_settings_never_show_keys() -> None:
    settings = load_settings("router", {"PAGEWIRE_API_KEYS": "sesame"})
    assert "sesame" not in f"{settings!r} {settings} {settings.model_dump()} {settings.model_dump_json()}"
