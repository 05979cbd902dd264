"""`seqserve infer --npz`: every output and every final state of a model, and refused inputs."""

from __future__ import annotations

import copy
import io
import struct
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.lib import format as npy
from numpy.typing import NDArray
from torch import nn

from service.cli import main
from service.modeling import spec, store
from service.modeling.encoder import Encoder
from service.modeling.npz import read_npz, write_npz
from tests import models

Array = NDArray[Any]
LENGTHS = [5, 3, 9]
OUTPUTS = {
    "words": {"embedding", "sequence", "logits", "scores"},
    "tagger": {"sequence", "logits", "probabilities"},
    "halver": {"sequence"},
}
"""The outputs of models, besides states and the offsets of packed steps."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model of every head, and a model with states in two levels and two directions."""
    folder = tmp_path_factory.mktemp("models")
    for write in models.OF_EVERY_HEAD.values():
        write(folder)
    lstm = {"kind": "lstm", "hidden": 4, "depth": 2, "bidirectional": True}
    head = {"kind": "classify", "pool": "last", "labels": models.LABELS}
    models.made_up(folder, "both", {"kind": "features", "features": 3, "max_steps": 64}, lstm, head=head)
    return folder


def infer(root: Path, model: str, arrays: Mapping[str, Any], folder: Path) -> dict[str, Array]:
    """Run the command on arrays, and return the arrays that it writes."""
    inputs, outputs = folder / "inputs.npz", folder / "outputs.npz"
    write_npz(inputs, {name: np.asarray(values) for name, values in arrays.items()})
    command = ["infer", "--models", str(root), "--device", "cpu", "--model", model]
    assert main([*command, "--npz", str(inputs), "--out", str(outputs)]) == 0
    return read_npz(outputs)


def rows_of(description: spec.ModelSpec) -> list[Array]:
    """Return sequences of a model's input."""
    random = np.random.default_rng(3)
    if description.input.features is None:
        return [random.integers(0, description.input.vocabulary or 0, length).astype(np.int64) for length in LENGTHS]
    return [random.normal(size=(length, description.input.features)).astype(np.float32) for length in LENGTHS]


@pytest.mark.parametrize("model", OUTPUTS)
def test_forms_of_the_inputs_give_the_same_outputs(root: Path, tmp_path: Path, model: str) -> None:
    """Padded with lengths, and packed with offsets. The padding is a valid input, which does not count."""
    description = spec.read(root / model / "1")
    rows, name = rows_of(description), "inputs" if description.input.features else "ids"
    padded = np.ones((len(rows), max(LENGTHS) + 2, *rows[0].shape[1:]), rows[0].dtype)
    for index, row in enumerate(rows):
        padded[index, : len(row)] = row
    packed = infer(root, model, {name: np.concatenate(rows), "offsets": np.cumsum([0, *LENGTHS])}, tmp_path)
    whole = infer(root, model, {name: padded, "lengths": np.array(LENGTHS, np.int32)}, tmp_path)
    states = {f"state.{state}" for state in description.states}
    assert packed.keys() >= OUTPUTS[model] | states | {"offsets"}
    counts = np.diff(packed["offsets"])
    for output in packed.keys() - {"offsets"}:
        values = whole[output]
        assert packed[output].dtype == np.float32
        if len(packed[output]) == counts.sum():
            is_step = np.arange(values.shape[1]) < counts[:, None]
            assert not values[~is_step].any()
            values = values[is_step]
        np.testing.assert_allclose(values, packed[output], atol=1e-6)


def torch_lstm(root: Path) -> nn.LSTM:
    arrays = store.read_arrays(root / "both" / "1", spec.read(root / "both" / "1"))
    lstm = nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True)
    state: dict[str, torch.Tensor] = {}
    for level in range(2):
        for direction, suffix in (("forward", f"_l{level}"), ("backward", f"_l{level}_reverse")):
            place = f"layers.0.{level}.{direction}"
            state |= {f"weight_ih{suffix}": arrays[f"{place}.input"].T, f"weight_hh{suffix}": arrays[f"{place}.recurrent"].T}
            state |= {f"bias_ih{suffix}": arrays[f"{place}.bias"], f"bias_hh{suffix}": torch.zeros(16)}
    lstm.load_state_dict(state)
    return lstm


def test_states_of_both_directions_and_levels_are_those_of_torch(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder of a version names its model. The second half of a sequence starts from the states of the first."""
    rows = [torch.from_numpy(row) for row in rows_of(spec.read(root / "both" / "1"))]
    places = [f"state.layers.0.{level}.{direction}" for level in range(2) for direction in ("forward", "backward")]
    initial = torch.randn(2, 4, 3, 4, generator=torch.Generator().manual_seed(5))
    given = {
        f"{place}.{name}": initial[index, number].numpy()
        for number, place in enumerate(places)
        for index, name in enumerate(("hidden", "cell"))
    }
    arrays = {"inputs": torch.cat(rows).numpy(), "offsets": np.cumsum([0, *LENGTHS]), "output": np.zeros(3), **given}
    outputs = infer(tmp_path / "nowhere", str(root / "both" / "1"), arrays, tmp_path)
    assert "state.layers.0.1.backward.cell  3 x 4  float32" in capsys.readouterr().out.splitlines()
    with torch.no_grad():
        packed = nn.utils.rnn.pack_sequence(rows, enforce_sorted=False)
        steps, final = torch_lstm(root)(packed, tuple(initial))
        sequence, _ = nn.utils.rnn.pad_packed_sequence(steps, batch_first=True)
    np.testing.assert_allclose(outputs["sequence"], torch.cat([sequence[i, :n] for i, n in enumerate(LENGTHS)]), atol=1e-6)
    for index, name in enumerate(("hidden", "cell")):
        for number, place in enumerate(places):
            np.testing.assert_allclose(outputs[f"{place}.{name}"], final[index][number], atol=1e-6)
    ids = np.arange(24).reshape(2, 12) % 12
    whole, first = (infer(root, "speller", {"ids": part}, tmp_path) for part in (ids, ids[:, :5]))
    states = {name: values for name, values in first.items() if name.startswith("state.")}
    rest = infer(root, "speller", {"ids": ids[:, 5:], **states}, tmp_path)
    for name in ("logits", *states):
        np.testing.assert_allclose(rest[name], whole[name], atol=1e-6)


@pytest.mark.parametrize("model", ["words", "forecaster", "tagger"])
def test_sequences_without_steps_do_not_affect_the_others(root: Path, tmp_path: Path, model: str) -> None:
    description = spec.read(root / model / "1")
    name, row = "inputs" if description.input.features else "ids", rows_of(description)[0]
    alone = infer(root, model, {name: row, "offsets": [0, len(row)]}, tmp_path)
    both = infer(root, model, {name: row, "offsets": [0, 0, len(row)]}, tmp_path)
    for output in both.keys() - {"offsets"}:
        np.testing.assert_allclose(both[output][-len(alone[output]) :], alone[output], atol=1e-6)
    assert both["offsets"].tolist() == [0, 0, len(both["sequence"])]
    encoder = Encoder(description, store.read_arrays(root / model / "1", description), torch.device("cpu"))
    without_steps = encoder.run_without_steps()
    assert without_steps is not None
    head = without_steps.head_output
    for output, values in {"embedding": head.embedding, "scores": head.scores, "value": head.scores}.items():
        if output in both and values is not None:
            np.testing.assert_allclose(both[output][:1], values, atol=1e-6)


def refusal(root: Path, model: str, npz: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of the command for a file that it refuses. It writes no file."""
    out = npz.with_name("outputs.npz")
    assert (
        main(["infer", "--models", str(root), "--device", "cpu", "--model", model, "--npz", str(npz), "--out", str(out)]) == 1
    )
    assert not out.exists()
    return capsys.readouterr().err


@pytest.mark.parametrize(
    "model, arrays, message",
    [
        ("both", {}, "the arrays (none) have no 'inputs', which both takes: add it"),
        ("both", {"inputs": np.ones((1, 4, 3)), "length": [3]}, "'length' is neither an input nor an output of both"),
        ("both", {"inputs": np.ones((1, 4, 2))}, "'inputs' has steps of 2 numbers, and both takes 3"),
        ("both", {"inputs": np.ones((4, 3))}, "'inputs' has the shape (4, 3): send (sequences, steps, features)"),
        ("both", {"inputs": np.ones((1, 4, 3)), "offsets": [0, 4]}, "with 'offsets', send (steps, features)"),
        ("both", {"inputs": np.full((1, 4, 3), "a")}, "'inputs' has the dtype <U1: send numbers"),
        ("both", {"inputs": np.full((1, 4, 3), 1e39)}, "'inputs' has numbers that are not finite in float32"),
        ("both", {"inputs": np.ones((2, 4, 3)), "lengths": [4, 5]}, "'lengths' must be 2 numbers from 0 to 4"),
        ("reader", {"ids": np.ones((2, 4), int), "lengths": [4, 0]}, "the sequence 1 has 0 steps, and reader needs at least 1"),
        ("both", {"inputs": np.ones((2, 4, 3)), "lengths": [4.0, 3.5]}, "'lengths' has the dtype float64: send integers"),
        ("both", {"inputs": np.ones((4, 3)), "offsets": [0, 3, 2, 4]}, "'offsets' must rise from 0 to the 4 steps"),
        ("both", {"inputs": np.ones((4, 3)), "offsets": [[0, 4]]}, "'offsets' must rise from 0 to the 4 steps"),
        ("both", {"inputs": np.ones((4, 3)), "offsets": [0, 4], "lengths": [4]}, "have both 'lengths' and 'offsets'"),
        ("both", {"inputs": np.ones((1, 4, 3)), "state.layers.3.hidden": [[1]]}, "no recurrent layer has the state 'layers.3.hidden'"),
        ("both", {"inputs": np.ones((1, 4, 3)), "state.layers.0.0.forward.cell": [1]}, "has the shape (1,), expected (1, 4)"),
        ("both", {"inputs": np.ones((1, 4, 3)), "state.layers.0.0.forward.cell": [["a"]]}, "has the dtype <U1: send numbers"),
        ("words", {"ids": np.ones((1, 4))}, "'ids' has the dtype float64: send integers"),
        ("words", {"ids": np.full((1, 4), 10)}, "'ids' has ids from 10 to 10, and the vocabulary of words ends at 9"),
        ("words", {"text": ["how far"], "ids": np.ones((1, 4), int)}, "the arrays have both 'text' and 'ids'"),
        ("words", {"text": ["how far"], "lengths": [2]}, "'text' has whole texts, which have no 'lengths'"),
        ("words", {"text": [["how far"]]}, "'text' must be one text for each sequence"),
        ("words", {"text": np.frombuffer(b"\xff" * 4, "<U1")}, "the array 'text' is damaged: it has characters that do not exist"),
        ("tagger", {"text": np.frombuffer(b"\x00\xd8\x00\x00", "<U1")}, "cannot be tokenised"),
        ("halver", {"inputs": np.ones((1, 2, 2))}, "the sequence 0 has 2 steps, and halver needs at least 3"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_are_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, arrays: dict[str, Any], message: str
) -> None:
    file = tmp_path / "inputs.npz"
    write_npz(file, {name: np.asarray(values) for name, values in arrays.items()})
    assert message in refusal(root, model, file, capsys)


def header(shape: str, descr: str = "'<f4'", version: bytes = b"\x01\x00") -> bytes:
    """Return the start of a .npy file that declares this shape."""
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}}}".encode()
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(text))
    return npy.MAGIC_PREFIX + version + size + text


def archive(content: bytes, *, compressed: bool = False, names: Sequence[str] = ("inputs",)) -> bytes:
    """Return a .npz file with one member, which the directory lists under these names."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as opened:
        opened.writestr(f"{names[0]}.npy", content)
        for name in names[1:]:
            opened.filelist.append(copy.copy(opened.filelist[0]))
            opened.filelist[-1].filename = f"{name}.npy"
    return stream.getvalue()


def objects() -> bytes:
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([{}], object), allow_pickle=True)
    return stream.getvalue()


def damaged_stream() -> bytes:
    content = bytearray(archive(header("(64,)") + bytes(range(256)), compressed=True))
    content[80:110] = b"\xff" * 30
    return bytes(content)


@pytest.mark.parametrize(
    "content, message",
    [
        (lambda: b"not an archive", "cannot be read as .npz: File is not a zip file"),
        (lambda: archive(header("(4,)") + bytes(16))[:-30], "cannot be read as .npz"),
        (damaged_stream, "cannot be read as .npz"),
        (lambda: archive(objects()), "the array 'inputs' has the dtype object, which is not read: write numbers or text"),
        (lambda: archive(header("(1,)", "'<c8'") + bytes(8)), "has the dtype complex64, which is not read"),
        (lambda: archive(header(f"({1 << 50}, {1 << 50})") + bytes(16)), "is damaged: it has 16 bytes for the shape"),
        (lambda: archive(header(f"(0, {1 << 62}, 64)")), "the array 'inputs' is damaged"),
        (lambda: archive(header(f"({1 << 40},)", "'<U0'")), "is damaged: it has 0 bytes for the shape"),
        (lambda: archive(header(f"({'1,' * 70})") + bytes(4)), "the array 'inputs' is damaged"),
        (lambda: archive(header("(4,)", version=b"\x09\x00") + bytes(16)), "the array 'inputs' is damaged"),
        (lambda: archive(b"hello"), "the array 'inputs' is damaged"),
        (lambda: archive(header("(4,)") + bytes(16), names=("inputs", "inputs")), "has two arrays of one name"),
        (lambda: archive(header(f"({40 << 20},)") + bytes(160 << 20), compressed=True), "that would expand to"),
    ],
)  # fmt: skip
def test_hostile_files_are_refused(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Callable[[], bytes], message: str
) -> None:
    file = tmp_path / "inputs.npz"
    file.write_bytes(content())
    assert message in refusal(root, "both", file, capsys)


def test_missing_files_and_flags_are_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "nothing.npz" in refusal(root, "both", tmp_path / "nothing.npz", capsys)
    file = tmp_path / "inputs.npz"
    write_npz(file, {"inputs": np.ones((1, 4, 3))})
    assert "unknown model nobody" in refusal(root, "nobody", file, capsys)
    command = ["infer", "--models", str(root), "--model", "both", "--npz", str(file)]
    assert main(command) == 1 and "--npz FILE with --out FILE" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "no" / "out.npz")]) == 1
    assert "out.npz cannot be written: No such file or directory" in capsys.readouterr().err
