"""What is looked at before Ray is started or joined."""

from __future__ import annotations

from pathlib import Path

import pytest

from tltlab.errors import ConfigError
from tltlab.runtime.ray.start import start_ray


def test_a_token_that_others_may_read_is_refused_before_ray_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    # Joining there fails: what comes first says what was looked at first.
    monkeypatch.setenv("RAY_ADDRESS", "nowhere://")
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with pytest.raises(ConfigError, match=r"token, Ray's token, can be read by others \(its mode is 640\): chmod 600"):
        start_ray()
