"""The commands that talk to a running service: with the key and the authority that it needs, and with a clear error without them."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from loadtest import bench
from loadtest.__main__ import main as loadtest
from loadtest.discovery import CannotMeasure, fetch
from loadtest.scenarios import perf_analyzer
from loadtest.scenarios.perf_analyzer import GRPC, REST, STREAM
from service import cli, settings
from service.access.keys import create
from service.access.scopes import Scope
from service.client_access import ClientAccess
from tests.certificates import Authority
from tests.serving import serving

EVALUATE = Path(__file__).parents[2] / "examples" / "evaluate.py"


class Guarded(NamedTuple):
    """A server that needs a key, with and without TLS: the address, and flags that name a file with the key and the authority."""

    url: str
    models: Path
    key_file: Path
    weak_key_file: Path
    ca: Path | None

    @property
    def flags(self) -> list[str]:
        return ["--url", self.url, "--key-file", str(self.key_file), *(["--ca", str(self.ca)] if self.ca else [])]

    def key(self) -> str:
        return self.key_file.read_text().strip()


@pytest.fixture(scope="module", params=["plain", "tls"])
def guarded(request: pytest.FixtureRequest, models_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    scratch = tmp_path_factory.mktemp("guarded")
    file, key_file, weak_key_file = scratch / "keys.toml", scratch / "key", scratch / "weak"
    scopes = [Scope.INFER, Scope.SESSION, Scope.METRICS]
    key_file.write_text(create(file, "measuring", scopes, "measuring") + "\n")
    weak_key_file.write_text(create(file, "weak", [Scope.METRICS], "weak"))
    authority = Authority(scratch) if request.param == "tls" else None
    flags = ["--keys", str(file)]
    if authority is not None:
        certificate, key = authority.sign("service")
        flags += ["--tls-cert", str(certificate), "--tls-key", str(key)]
    with serving(models_folder, scratch, *flags) as server:
        yield Guarded(server.address, models_folder, key_file, weak_key_file, authority.certificate if authority else None)


@pytest.fixture(autouse=True)
def _no_key_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(settings.CLIENT_KEY, raising=False)


def test_bench_sends_the_key(guarded: Guarded, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench, "WARM_UP_SECONDS", 0.1)
    words = ["--models", str(guarded.models), "--model", "words", "--callers", "2", "--seconds", "0.3"]
    assert cli.main(["bench", *guarded.flags, *words]) == 0, capsys.readouterr().err
    capsys.readouterr()
    assert cli.main(["bench", *[word for word in guarded.flags if word not in ("--key-file", str(guarded.key_file))]]) == 1
    advice = f"Bearer KEY; name its file with --key-file, or set {settings.CLIENT_KEY}"
    assert "401: the request has no key" in (error := capsys.readouterr().err) and advice in error


def test_locust_sends_the_key(guarded: Guarded, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert loadtest(["locust", *guarded.flags, "--users", "3", "--seconds", "2", "--out", str(tmp_path)]) == 0
    assert "OneText is skipped: the server has no model for it, or --models" in capfd.readouterr().err
    assert guarded.key() not in "".join(file.read_text(errors="ignore") for file in tmp_path.iterdir())


def test_evaluation_sends_the_key(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "trec.test.txt").write_text("4 Where is Ayers Rock ?\n")
    monkeypatch.syspath_prepend(str(EVALUATE.parent))
    evaluate = runpy.run_path(str(EVALUATE))["main"]
    line = ["text", "--data", str(tmp_path), "--model", "words"]
    assert evaluate([*line, *guarded.flags]) == 0
    assert "| words " in capsys.readouterr().out
    flags = ["--ca", str(guarded.ca)] if guarded.ca else []
    assert evaluate([*line, "--url", guarded.url, *flags]) == 1
    assert "answers 401" in capsys.readouterr().err


def test_perf_analyzer_sends_the_key_over_each_protocol(
    guarded: Guarded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(perf_analyzer, "QUESTIONS", "words")
    monkeypatch.setattr(perf_analyzer, "SENSOR", "sensors")
    if guarded.ca is None:
        cases = list(perf_analyzer.cases(tmp_path, guarded.url, "there:1", [1], ClientAccess.read(guarded.key_file, None)))
        assert {case.protocol for case in cases} == {REST, GRPC, STREAM}
        for command in [case.command(tmp_path) for case in cases]:
            assert command[command.index("-H") + 1] == f"authorization:Bearer {guarded.key()}"
    else:
        monkeypatch.setattr(perf_analyzer, "BINARY", EVALUATE)
        assert loadtest(["perf-analyzer", *guarded.flags, "--out", str(tmp_path)]) == 2
        assert "measures without TLS" in capsys.readouterr().err


def test_key_without_the_scope_is_named(guarded: Guarded) -> None:
    access = ClientAccess.read(guarded.weak_key_file, guarded.ca)
    assert b"seqserve_" in fetch(f"{guarded.url}/metrics", access)
    with pytest.raises(CannotMeasure, match=r"403: the key weak does not have the scope infer.* another key with --key-file"):
        fetch(f"{guarded.url}/models", access)


def test_missing_authority_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--url", "https://127.0.0.1:9", "--ca", str(tmp_path / "missing"), "--out", str(tmp_path)]
    assert loadtest(["locust", *flags]) == 2
    assert f"authority {tmp_path / 'missing'}: " in capsys.readouterr().err
