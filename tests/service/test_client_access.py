"""Commands that talk to a running service read their key and their authority from files, and the key from the environment too."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from service import settings
from service.client_access import ClientAccess
from service.errors import SettingsError


def test_key_comes_from_the_file_or_else_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(" from.file\n")
    assert ClientAccess.read(None, None).headers == {}
    monkeypatch.setenv(settings.CLIENT_KEY, "from.environment")
    assert ClientAccess.read(None, None).headers == {"Authorization": "Bearer from.environment"}
    assert ClientAccess.read(file, None).key == "from.file"
    assert settings.load({}, os.environ) == settings.Settings(), "the service starts with the variable"


@pytest.mark.parametrize("content", [b"", b"two words", b"a\r\nX-Header: injected", b"\xff", "sécret".encode()])
def test_file_without_one_key_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    for wrong in (file, tmp_path / "missing"):
        with pytest.raises(SettingsError, match=r"^key file ") as raised:
            ClientAccess.read(wrong, None)
        assert "injected" not in str(raised.value)
