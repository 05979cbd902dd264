"""The commands, as a user types them."""

from __future__ import annotations

import errno
import json
import os
import shlex
import signal
from pathlib import Path

import pytest

from service import __main__
from service.cli import _curl, _example, main
from service.settings import CLIENT_KEY, Settings
from service.supervisor.repository import Repository
from tests import models
from tests.serving import Server

QUESTIONS = ["how far is the sea ?", "who was first"]


@pytest.mark.parametrize("texts", [QUESTIONS, ["", *QUESTIONS], [""]])
def test_infer_command_answers_as_the_server_does(
    texts: list[str], models_folder: Path, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["infer", "--models", str(models_folder), "--device", "cpu", "--model", "words", *texts]) == 0
    printed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert server.client.post("/infer", json=_example(Repository(models_folder).manifest())).status_code == 200
    served = server.infer("words", texts).json()["outputs"]
    for one, other in zip(printed, served, strict=True):
        assert one["label"] == other["label"]
        assert one["scores"] == pytest.approx(other["scores"], rel=1e-5)


@pytest.mark.parametrize("place", ["words", "words/2"])
def test_commands_read_the_folder_of_one_model(
    place: str, models_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is also known by the alias of the service. No command adds a model there."""
    folder = str(models_folder / place)
    assert main(["models", "--models", folder]) == 0
    assert "words  version " in capsys.readouterr().out
    monkeypatch.setenv("SEQSERVE_ALIAS", "my-service")
    answers = []
    for root, name in ((str(models_folder), "words"), (folder, "words"), (folder, "my-service")):
        assert main(["infer", "--models", root, "--device", "cpu", "--model", name, *QUESTIONS]) == 0
        answers.append(capsys.readouterr().out)
    assert answers[0] == answers[1] == answers[2]
    assert main(["compress", "words", "--precision", "int8", "--models", folder]) == 1
    assert "is the folder of one model, to which none can be added" in capsys.readouterr().err


def test_one_bad_folder_keeps_no_other_model_from_its_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its name is shown with escapes: it could change the title of a terminal, or hide a line."""
    models.words(tmp_path)
    (tmp_path / "\x1b]0;title\x07" / "1").mkdir(parents=True)
    (tmp_path / "aliases.toml").write_text('spoken = "words"')
    (tmp_path / "broken" / "1").mkdir(parents=True)
    (tmp_path / "broken" / "1" / "model.toml").write_text("name = 3")
    assert main(["models", "--models", str(tmp_path)]) == 1
    printed = capsys.readouterr()
    assert "words  version 1" in printed.out and str(tmp_path / "broken" / "1") in printed.err
    assert f"{tmp_path}/\\u001b]0;title\\u0007: a model name has" in printed.err
    command = ["infer", "--models", str(tmp_path), "--device", "cpu", "--model"]
    assert main([*command, "words", *QUESTIONS]) == 0
    assert main(["export", "spoken", *command[1:3], "--format", "pytorch", "--out", str(tmp_path / "words.pt")]) == 0
    assert main(["compress", "spoken", *command[1:3], "--precision", "int8", "--name", "small"]) == 0
    assert main([*command, "broken", *QUESTIONS]) == 1
    assert "broken version 1 cannot be served: " in capsys.readouterr().err


def test_ready_line_sends_the_key_and_a_text_that_suits_the_model(tmp_path: Path) -> None:
    models.words(tmp_path)
    manifest = Repository(tmp_path).manifest()
    asked = json.loads(shlex.split(_curl("http://here:1", Settings(), manifest))[-1])
    assert asked == {"model": "words", "inputs": ["This is a text."]}
    file = tmp_path / "words" / "1" / "model.toml"
    file.write_text(file.read_text().replace("[input]", '[input]\nexample = "how far\'s the sea ?"'))
    command = shlex.split(_curl("http://here:1", Settings(keys="keys.toml"), Repository(tmp_path).manifest()))
    assert json.loads(command[-1])["inputs"] == ["how far's the sea ?"]
    assert f"Authorization: Bearer ${CLIENT_KEY}" in command


def test_compress_command_writes_a_version_and_prints_its_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    models.words(tmp_path / "models")
    data = tmp_path / "texts.txt"
    data.write_text("near how far is the sea ?\nfar who was first\n")
    command = ["compress", "words", "--precision", "int8", "--models", str(tmp_path / "models"), "--version", "1"]
    assert main([*command, "--name", "small", "--data", str(data)]) == 0
    folder = tmp_path / "models" / "small" / "1"
    first, _, section = capsys.readouterr().out.partition("\n\n")
    assert first == f"{folder} is complete. Its card says:"
    assert (folder / "card.md").read_text() == f"made up\n\n{section}"
    assert "| precision | float32 | int8 |" in section and "answered 2 texts of texts.txt" in section
    assert main(["models", "--models", str(tmp_path / "models")]) == 0
    assert "small  version 1  text > embedding > lstm > classify  int8" in capsys.readouterr().out
    assert main([*command, "--name", "small"]) == 1
    assert "small exists in" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([*command[:2], "--precision", "int4"])


@pytest.mark.parametrize(
    ("command", "status", "message"),
    [
        (["infer", "--models", "{models}", "--model", "nobody", "status"], 1, "served are sensors, words"),
        (["models", "--models", "{empty}"], 1, "{empty}"),
        (["serve", "--models", "{empty}/nowhere"], 1, "does not exist"),
        (["serve", "--port", "70000"], 2, "--port is '70000'"),
    ],
)
def test_refused_command_says_why(
    command: list[str], status: int, message: str, models_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"models": models_folder, "empty": tmp_path}
    assert main([word.format_map(names) for word in command]) == status
    assert message.format_map(names) in capsys.readouterr().err


def test_folder_that_may_not_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(root: Path) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(root))

    monkeypatch.setattr("service.modeling.spec.named_folders", refuse)
    for command in ("models", "serve"):
        assert main([command, "--models", str(tmp_path)]) == 1
        assert capsys.readouterr().err == f"seqserve: [Errno 13] Permission denied: '{tmp_path}'\n"


@pytest.mark.parametrize(
    ("command", "hint"),
    [
        ("serv", "did you mean serve?"),
        ("serve --prot 1", "did you mean --port?"),
        ("infer --modle words", "did you mean --model?"),
        ("serve --grpc_port=off", "did you mean --grpc-port?"),
        ("serve --max-batch-sequences 3", "set the variable SEQSERVE_MAX_BATCH_SEQUENCES"),
        ("export words --format pytroch --out x", "did you mean pytorch?"),
        ("serve models", "see seqserve serve --help"),
    ],
)
def test_mistyped_word_is_answered_with_the_nearest(command: str, hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(command.split())
    assert hint in capsys.readouterr().err


def test_help_and_settings_show_defaults_and_sources(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "which the ready line names (default: 8000)" in shown and "without keys (default: off)" in shown
    monkeypatch.setenv("SEQSERVE_PORT", "9000")
    assert main(["settings"]) == 0
    assert "# Default: 8000. Set by: SEQSERVE_PORT.\nport = 9000\n" in capsys.readouterr().out


def test_sigterm_during_imports_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of a container would not even notice a signal that it does not handle."""
    monkeypatch.setattr("service.cli.main", lambda: signal.raise_signal(signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="143"):
            __main__.main()
    finally:
        signal.signal(signal.SIGTERM, before)


def test_output_that_cannot_be_written_ends_the_command_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that has closed its pipe, such as head, needs no line."""
    monkeypatch.setattr(signal, "getsignal", lambda _: signal.SIG_IGN)  # no handlers are left behind
    monkeypatch.setattr("service.cli.main", lambda: print("a model"))
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    for descriptor, status in ((full, "seqserve: No space left on device"), (writer, 128 + signal.SIGPIPE)):
        with os.fdopen(descriptor, "w") as output:
            monkeypatch.setattr("sys.stdout", output)
            assert __main__.main() == status


def test_state_key_command_adds_secrets_that_the_service_reads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "state-keys"
    command = ["state-key", "new", "--state-keys", str(file)]
    assert main(command) == 0
    assert capsys.readouterr().out == f"{file} has a new secret. Give this file to all replicas.\n"
    assert main(command) == 0
    assert "the last of 2" in (printed := capsys.readouterr().out) and "first line" in printed
    assert not any(line in printed for line in file.read_text().splitlines())
    assert main(command[:2]) == 2
    assert "--state-keys FILE" in capsys.readouterr().err
    file.write_text("secret")
    assert main(["serve", "--state-keys", str(file)]) == 2
    assert f"state key file {file}, line 1" in capsys.readouterr().err
