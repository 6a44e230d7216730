"""What is looked at before Ray is started or joined."""

from pathlib import Path

import pytest

from tests.refused import refused
from tltlab.errors import ConfigError
from tltlab.runtime.ray.start import start_ray


@pytest.mark.parametrize("ours", [True, False])
def test_a_token_that_others_may_read_is_refused(tmp_path, monkeypatch, ours):
    token = tmp_path / "token"
    token.write_text("secret")
    token.chmod(0o640)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    # Joining there fails: what comes first says what was looked at first.
    monkeypatch.setenv("RAY_ADDRESS", "nowhere://")
    monkeypatch.setattr("ray.is_initialized", lambda: False)

    def of_somebody_else(path, mode):
        raise PermissionError(f"{path} is not yours")

    if not ours:
        monkeypatch.setattr(Path, "chmod", of_somebody_else)
    with refused(ConfigError, naming=("nowhere://",) if ours else (token, 640)):
        start_ray()
    assert token.stat().st_mode & 0o777 == (0o600 if ours else 0o640)
