"""Settings: defaults, environment, roles, overrides, errors."""

from __future__ import annotations

import pytest

from shared.config import Settings, load_settings
from shared.errors import ConfigurationError


def test_role_beats_environment_and_overrides_beat_both() -> None:
    environ = {"PAGEWIRE_NUM_BLOCKS": "10", "PAGEWIRE_DECODE_NUM_BLOCKS": "20"}
    assert load_settings("prefill", environ).num_blocks == 10
    assert load_settings("decode", environ).num_blocks == 20
    assert load_settings("decode", environ, num_blocks=30).num_blocks == 30
    assert load_settings("decode", environ, num_blocks=None).num_blocks == 20


def test_empty_variables_count_as_unset() -> None:
    assert load_settings("router", {"PAGEWIRE_PORT": "", "REDIS_URL": ""}) == Settings()


def test_redis_url_is_read_and_our_own_variable_wins() -> None:
    assert load_settings(None, {"REDIS_URL": "redis://a"}).redis_url == "redis://a"
    assert load_settings(None, {"REDIS_URL": "redis://a", "PAGEWIRE_REDIS_URL": "redis://b"}).redis_url == "redis://b"


@pytest.mark.parametrize(
    ("name", "value"), [("PORT", "x"), ("BLOCK_SIZE", "0"), ("KV_FAILURE_POLICY", "maybe"), ("MAX_STEP_MS", "nan"), ("MAX_STEP_MS", "inf")]
)
def test_a_bad_value_names_the_setting(name: str, value: str) -> None:
    with pytest.raises(ConfigurationError, match=name.lower()):
        load_settings("router", {f"PAGEWIRE_{name}": value})
