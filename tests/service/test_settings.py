"""The sources of settings and of the keys of commands, their precedence, and the errors that stop the start."""

from __future__ import annotations

import os
from http.client import HTTPMessage
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.request import HTTPRedirectHandler, Request

import pytest

from service import settings
from service.client_access import ClientAccess
from service.errors import SettingsError
from service.settings import Settings, as_toml, load


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file with three settings."""
    made = tmp_path / "seqserve.toml"
    made.write_text('host = "from.file"\nport = 1001\nfrontends = 3\n')
    return made


def refusal(flags: dict[str, Any], environment: dict[str, str]) -> str:
    with pytest.raises(SettingsError) as caught:
        load(flags, environment)
    return str(caught.value)


def test_flags_override_variables_and_variables_the_file(file: Path) -> None:
    assert load({}, {}) == Settings()
    environment = {"SEQSERVE_HOST": "from.environment", "SEQSERVE_PORT": "1002", "PATH": "/bin", "OTHER_PORT": "1"}
    settings = load({"config": str(file), "host": "from.flag", "frontends": None}, environment)
    assert (settings.host, settings.port, settings.frontends) == ("from.flag", 1002, 3)
    missing = file.with_name("missing.toml")
    assert load({}, {"SEQSERVE_CONFIG": str(file)}).port == 1001
    assert str(missing) in refusal({"config": str(missing)}, {"SEQSERVE_CONFIG": str(file)})
    every = {f"SEQSERVE_{name.upper()}": str(getattr(Settings(), name)) for name in Settings.model_fields}
    assert load({}, every) == Settings()


def test_service_links_of_kubernetes_are_no_settings() -> None:
    """For the Services seqserve and seqserve-grpc, in a pod with enableServiceLinks. A configured port overrides them."""
    links = {
        "SEQSERVE_SERVICE_HOST": "10.96.0.7",
        "SEQSERVE_SERVICE_PORT": "8000",
        "SEQSERVE_SERVICE_PORT_HTTP": "8000",
        "SEQSERVE_PORT": "tcp://10.96.0.7:8000",
        "SEQSERVE_PORT_8000_TCP": "tcp://10.96.0.7:8000",
        "SEQSERVE_PORT_8000_TCP_PROTO": "tcp",
        "SEQSERVE_PORT_8000_TCP_PORT": "8000",
        "SEQSERVE_PORT_8000_TCP_ADDR": "10.96.0.7",
        "SEQSERVE_GRPC_SERVICE_HOST": "10.96.0.8",
        "SEQSERVE_GRPC_PORT": "tcp://10.96.0.8:8001",
    }
    assert load({}, links) == Settings()
    assert load({}, {**links, "SEQSERVE_PORT": "9000"}).port == 9000
    for variable in ("SEQSERVE_PORT", "SEQSERVE_PORT_8000", "SEQSERVE_SERVICE", "SEQSERVE_HOST_PORT_TCP"):
        assert variable in refusal({}, {variable: "http://10.96.0.7"}), "it only looks like a link"


@pytest.mark.parametrize(
    "variable, hint",
    [
        ("SEQSERVE_PROT", "did you mean port?"),
        ("SEQSERVE_FRONT", "did you mean frontends?"),
        ("SEQSERVE_", f"known are {', '.join(Settings.model_fields)}"),
    ],
)
def test_unknown_variable_is_refused_with_the_nearest_name(variable: str, hint: str) -> None:
    assert refusal({}, {variable: "1"}) == f"unknown setting {variable}: {hint}"


def test_unknown_key_is_refused_with_the_file(file: Path) -> None:
    file.write_text("prot = 1")
    assert refusal({"config": str(file)}, {}) == f"unknown setting prot in {file}: did you mean port?"


@pytest.mark.parametrize(
    "variable, value, why",
    [
        ("SEQSERVE_PORT", "eighty", "valid integer"),
        ("SEQSERVE_PORT", "65536", "less than or equal to 65535"),
        *(("SEQSERVE_FRONTENDS", value, "use auto, or a number from 1 to 9999") for value in ("0", "1.5", "many", "10000", "")),
        ("SEQSERVE_RELOAD", "on", "'request', 'poll' or 'off'"),
        *(("SEQSERVE_GRPC_PORT", value, "use off, or a port from 0 to 65535") for value in ("on", "65536", "")),
        *(("SEQSERVE_DEVICE", value, "use auto, or the device") for value in ("gpu", "cuda:-1", "cuda:01", "cpu\n", "")),
        *(("SEQSERVE_DEVICE", value, "use auto, or the device") for value in ("cpu, cpu", "cpu,", "auto,cpu")),
        ("SEQSERVE_DEVICE", "cuda:0,cuda:1,cuda:0", "cuda:0 is named twice"),
        ("SEQSERVE_DRAIN_SECONDS", "0", "greater than 0"),
        ("SEQSERVE_DRAIN_SECONDS", "nan", "finite number"),
        ("SEQSERVE_LAME_DUCK_SECONDS", "inf", "finite number"),
        ("SEQSERVE_LAME_DUCK_SECONDS", "-0.1", "greater than or equal to 0"),
    ],
)
def test_impossible_value_is_refused_with_variable_and_value(variable: str, value: str, why: str) -> None:
    said = refusal({}, {variable: value})
    assert said.startswith(f"{variable} is {value!r}: ")
    assert why in said


@pytest.mark.parametrize(
    "said, devices", [("auto", ("auto",)), ("cuda:10,cpu,cuda:1,cpu", ("cuda:10", "cpu", "cuda:1", "cpu"))]
)
def test_device_lists_one_device_per_engine(said: str, devices: tuple[str, ...]) -> None:
    assert load({"device": said}, {}).devices == devices
    for frontends, number in (("auto", "auto"), ("1", 1), (16, 16), ("9999", 9999)):
        settings = load({"frontends": frontends}, {})
        assert settings.frontends == number and Settings.model_validate_json(settings.model_dump_json()) == settings


def test_impossible_value_is_refused_with_its_source(file: Path) -> None:
    assert refusal({"port": "x"}, {}).startswith("--port is 'x': ")
    assert refusal({"grpc_port": "x"}, {}).startswith("--grpc-port is 'x': ")
    file.write_text("port = 70000")
    assert refusal({"config": str(file)}, {}).startswith(f"port in {file} is 70000: ")
    file.write_text("[limits]\nmax_inputs = 5000")
    assert refusal({"config": str(file)}, {}).startswith(f"limits.max_inputs in {file} is 5000: ")


@pytest.mark.parametrize(
    "said, names",
    [
        ({"port": 8001}, ("port and grpc_port are both 8001", "change one")),
        ({"grpc_port": 9, "health_port": 9}, ("grpc_port and health_port are both 9", "change one")),
        ({"max_inputs": 9, "max_waiting": 8}, ("max_inputs is 9", "max_waiting is 8", "raise max_waiting")),
        (
            {"default_deadline_ms": 2, "max_deadline_ms": 1},
            ("default_deadline_ms is 2", "max_deadline_ms is 1", "lower the default or raise the maximum"),
        ),
    ],
)
def test_conflicting_limits_are_refused_with_both_values(said: dict[str, int], names: tuple[str, ...]) -> None:
    message = refusal({}, {f"SEQSERVE_{name.upper()}": str(value) for name, value in said.items()})
    assert all(name in message for name in names)
    both = refusal({}, {"SEQSERVE_PORT": "x", "SEQSERVE_FRONTENDS": "0"})
    assert "SEQSERVE_PORT is 'x'" in both and "SEQSERVE_FRONTENDS is '0'" in both
    same = load(
        {"max_inputs": 8, "max_waiting": 8, "default_deadline_ms": 1, "max_deadline_ms": 1, "port": 0, "grpc_port": 0}, {}
    )
    assert same.max_inputs == same.max_waiting == 8, "values at the border are accepted"
    assert "Value error" not in message


def test_limits_are_a_table_of_the_file_and_flat_elsewhere(file: Path) -> None:
    file.write_text("port = 1001\n[limits]\nmax_inputs = 7\nmax_waiting = 70\nmax_sessions = 700")
    settings = load({"config": str(file), "max_sessions": 3}, {"SEQSERVE_MAX_WAITING": "30"})
    assert (settings.port, settings.max_inputs, settings.max_waiting, settings.max_sessions) == (1001, 7, 30, 3)


@pytest.mark.parametrize(
    "text, message",
    [
        ("max_inputs = 7", "max_inputs in {} is a limit: move it below a line [limits]"),
        ("[limits]\nport = 1", "limits.port in {} is no limit: move it above the line [limits]"),
        ("[limits]\nmax_input = 7", "unknown setting limits.max_input in {}: did you mean max_inputs?"),
        ("limits = 7", "limits in {} is 7: it is a table, which begins with a line [limits]"),
        ("[limit]\nmax_inputs = 7", "unknown table [limit] in {}: the only table is [limits]"),
    ],
)
def test_key_of_the_wrong_table_is_refused(file: Path, text: str, message: str) -> None:
    file.write_text(text)
    assert refusal({"config": str(file)}, {}).startswith(message.format(file))


def test_printed_settings_are_a_file_of_settings(file: Path) -> None:
    settings = load({"device": "cpu,cpu", "max_inputs": 7, "strict": True, "batch_budget_ms": 0.5, "grpc_port": "off"}, {})
    file.write_text(as_toml(settings, {}))
    assert load({"config": str(file)}, {}) == settings
    assert "# Most sequences in one request.\n# Default: 64. Set by: default.\nmax_inputs = 7\n" in file.read_text()


@pytest.mark.parametrize(
    "content", [b"port = ", b"port 8000", b"port = 1\nport = 2", b"port = " + b"9" * 5000, b'host = "\xff"']
)
def test_invalid_toml_is_refused_with_the_file(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert refusal({"config": str(file)}, {}).startswith(f"settings file {file}: ")


def test_key_comes_from_the_file_or_else_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    file.write_text(" from.file\n")
    assert ClientAccess.read(None, None).headers == {}
    monkeypatch.setenv(settings.CLIENT_KEY, "from.environment")
    assert ClientAccess.read(None, None).headers == {"Authorization": "Bearer from.environment"}
    assert ClientAccess.read(file, None).key == "from.file"
    assert settings.load({}, os.environ) == settings.Settings(), "the service starts with the variable"


def test_only_the_named_server_gets_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def urlopen(request: Request, **_: object) -> BytesIO:
        assert request.has_header("Authorization")
        sent_on = HTTPRedirectHandler().redirect_request(request, BytesIO(), 302, "", HTTPMessage(), "http://elsewhere/")
        assert sent_on is not None and not sent_on.has_header("Authorization")
        return BytesIO(b"reply")

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    assert ClientAccess("a.key").fetch("http://127.0.0.1:1/") == b"reply"


@pytest.mark.parametrize("content", [b"", b"two words", b"a\r\nX-Header: injected", b"\xff", "sécret".encode()])
def test_file_without_one_key_is_refused(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(content)
    for wrong in (file, tmp_path / "missing"):
        with pytest.raises(SettingsError, match=r"^key file ") as raised:
            ClientAccess.read(wrong, None)
        assert "injected" not in str(raised.value)
