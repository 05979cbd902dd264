"""The recipe for keywords: events and their comparison with the speech, frames, the streams of espeak-ng, and the whole recipe."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from service.modeling import spec
from tests.serving import serving

pytestmark = pytest.mark.usefixtures("examples")


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def speech() -> Any:
    """The module that speaks, where its program is installed."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is missing: make speech")
    return module("training.speech")


def test_event_needs_frames_in_a_row_and_then_rests() -> None:
    detector = module("training.spotting").Detector(threshold=0.5, in_a_row=3, rest=5)
    assert detector.add([0.9, 0.9, 0.4, 0.5, 0.9, 0.9]) == [5], "two frames are too few, and the threshold itself is enough"
    assert detector.add([0.9, 0.9, 0.9, 0.9]) == [], "the event before is four frames ago"
    assert detector.add([0.9, 0.9, 0.1, 0.9, 0.9, 0.9]) == [10, 15]


@pytest.mark.parametrize("size", [1, 2, 4, 7])
def test_events_do_not_depend_on_the_chunks(size: int) -> None:
    spotting = module("training.spotting")
    probabilities = np.random.default_rng(0).random(400).tolist()
    whole = spotting.Detector(0.3, 3, 10).add(probabilities)
    detector = spotting.Detector(0.3, 3, 10)
    parts = [frame for first in range(0, 400, size) for frame in detector.add(probabilities[first : first + size])]
    assert parts == whole and len(whole) > 5


def test_latency_is_from_the_end_of_the_word_to_the_event() -> None:
    compare = module("training.spotting").compare
    score = compare([1.0, 5.0, 9.0], [1.12, 4.95, 7.0, 9.6], 36.0)
    assert score.latencies == pytest.approx((0.12, -0.05)) and score.misses == 1
    assert score.false_alarms == 2 and score.false_alarms_an_hour == pytest.approx(200.0)


def test_second_event_of_a_word_is_a_false_alarm() -> None:
    score = module("training.spotting").compare([1.0], [1.1, 1.3], 10.0)
    assert len(score.latencies) == 1 and score.false_alarms == 1 and score.misses == 0


def test_scores_of_streams_add_up() -> None:
    spotting = module("training.spotting")
    total = spotting.compare([1.0], [1.25], 1800.0) + spotting.compare([2.0], [30.0], 1800.0)
    assert (total.keywords, total.misses, total.latencies, total.false_alarms_an_hour) == (2, 1, (0.25,), 1.0)


def test_frames_after_the_keyword_are_positive() -> None:
    data = module("training.keyword_data")
    labels, weights = data.marks((1.0,), 200)
    [positive] = np.nonzero(labels.numpy())
    known = positive * 0.01 + 0.025
    assert known.min() == pytest.approx(1.035, abs=0.006) and known.max() == pytest.approx(1.145, abs=0.006)
    assert weights[105].item() == data.WEIGHT and weights[90].item() == 0.0 and weights[115].item() == 0.0
    assert weights[70].item() == weights[120].item() == 1.0


def test_windows_leave_out_keywords_that_they_may_cut() -> None:
    data = module("training.keyword_data")
    frames = np.zeros((2, 400, 40), np.float16)
    windows = data.Windows([data.Corpus(frames[:1], [(1.0,)]), data.Corpus(frames[1:], [(3.0,)])], 100)
    batches = list(windows.epoch(3, 1.0))
    assert sorted(int(number) for batch in batches for number in batch.numbers) == list(range(8))
    for batch in batches:
        assert batch.labels.shape == batch.weights.shape
        assert not batch.weights[:, : data.CUT_FRAMES][batch.labels[:, : data.CUT_FRAMES] == 1].any()


def test_part_of_the_windows_has_those_with_large_losses() -> None:
    data, torch = module("training.keyword_data"), importlib.import_module("torch")
    windows = data.Windows([data.Corpus(np.zeros((50, 400, 40), np.float16), [()] * 50)], 100)
    windows.losses[:] = torch.where(torch.arange(200) % 10 == 3, 100.0, 1e-6)
    numbers = torch.cat([batch.numbers for batch in windows.epoch(8, 0.2)])
    assert len(numbers) == len(numbers.unique()) == 40
    assert (numbers % 10 == 3).sum() >= 15, "20 of the 40 would be all of them, and four a sample without preference"


def test_threshold_has_few_misses_among_those_with_few_false_alarms() -> None:
    fitting, spotting = module("training.keyword_fitting"), module("training.spotting")

    def development(misses: dict[float, int], alarms: dict[float, int]) -> Any:
        spoken = {
            threshold: spotting.Score(10, (0.1,) * (10 - misses.get(threshold, 9)), 0, 60.0) for threshold in fitting.THRESHOLDS
        }
        babble = {threshold: spotting.Score(0, (), alarms.get(threshold, 50), 8 * 3600.0) for threshold in fitting.THRESHOLDS}
        return spoken, babble

    few = {0.9: 4, 0.95: 3, 0.98: 0}
    assert fitting.best(*development({0.5: 0, 0.9: 1, 0.95: 2, 0.98: 3}, few)) == 0.9
    assert fitting.best(*development({0.5: 0, 0.9: 1, 0.95: 1, 0.98: 3}, few)) == 0.95, "the highest of equals"
    assert fitting.best(*development({0.5: 0, 0.98: 8}, {0.98: 20})) == 0.98, (
        "the fewest false alarms when there are always too many"
    )


@pytest.mark.parametrize("family", ["sru", "qrnn", "lstm", "gru", "cnn", "tcn"])
def test_every_family_learns_with_matrices_of_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors that multiply them fast."""
    fitting, data, model = module("training.keyword_fitting"), module("training.keyword_data"), module("training.signal_model")
    monkeypatch.setattr(fitting, "MIXED", True)
    torch.manual_seed(0)
    frames = torch.randn(4, 30, 6)
    labels = (frames[..., 0] > 0).long()
    batch = data.Batch(torch.arange(4), frames, labels, torch.ones(4, 30))
    learner = model.SignalModel(family, frames.flatten(0, 1), 8, 2, causal=True, front=5)
    optimizer = torch.optim.Adam([value for value in learner.parameters() if value.requires_grad], 0.01)
    first, *_, last = (float(fitting.learn(learner, batch, optimizer).sum()) for _ in range(30))
    assert last < 0.9 * first


def test_processor_time_of_a_process_has_that_of_its_children() -> None:
    """The child process ends when its standard input does."""
    busy = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {busy!r}])"
    with subprocess.Popen([sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        assert module("training.service").cpu_seconds(process.pid) >= 0.25
        process.communicate("\n")


def test_frames_do_not_depend_on_the_chunks() -> None:
    frames = module("training.frames")
    samples = np.random.default_rng(0).normal(scale=0.1, size=16_000).astype(np.float32)
    stream = frames.FrameStream()
    parts = [stream.add(samples[first : first + 640]) for first in range(0, len(samples), 640)]
    assert [len(part) for part in parts[:3]] == [2, 4, 4]
    assert np.array_equal(np.concatenate(parts), frames.frames(samples))
    assert frames.known_at(len(frames.frames(samples)) - 1) <= 1.0 < frames.known_at(len(frames.frames(samples)))


def test_resampled_tone_keeps_its_frequency() -> None:
    speech = module("training.speech")
    tone = np.sin(2 * np.pi * 1000 * np.arange(speech.SPOKEN_RATE) / speech.SPOKEN_RATE).astype(np.float32)
    resampled = speech.resample(tone)[: speech.RATE]
    expected = np.sin(2 * np.pi * 1000 * np.arange(speech.RATE) / speech.RATE)
    assert np.abs(resampled - expected)[1000:-1000].max() < 0.01


def test_babble_has_no_keyword_and_no_two_near_misses_in_a_row() -> None:
    speech = module("training.speech")
    words = speech.phrase(np.random.default_rng(0), "computer", 0.05, 20_000, 20_001).split()
    near = set(speech.near_misses("computer"))
    assert "computer" not in words and len(near & set(words)) == len(near)
    assert not any(word in near and following in near for word, following in pairwise(words))


def test_speakers_of_the_test_are_heard_nowhere_else() -> None:
    speakers = module("training.speakers")
    assert not set(speakers.TEST) & {*speakers.TRAINING, *speakers.DEVELOPMENT}
    assert not set(speakers.DEVELOPMENT) & set(speakers.TRAINING)


def test_every_speaker_sounds_different(speech: Any) -> None:
    """espeak-ng speaks with an ordinary voice, without an error, when it lacks a speaker."""
    speakers = module("training.speakers")
    names = [*speakers.NAMED, *speakers.DEVELOPMENT, *speakers.TEST, *speakers.INVENTED[::20], speakers.INVENTED[-1], "missing"]
    with ThreadPoolExecutor(4) as pool:
        spoken = list(pool.map(lambda name: speech.say("oh", speech.Voice(f"en-us+{name}", 170, 50)).tobytes(), names))
    assert len(set(spoken)) == len(names)


def test_missing_program_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert module("train_keyword").main(["--quick", "--models", str(tmp_path)]) == 2
    assert "make speech" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


def test_keyword_ends_where_the_stream_says(speech: Any) -> None:
    """A stream of keywords alone is silent from an end to the end of the pause, but for its noise."""
    stream = speech.speech(np.random.default_rng(1), module("training.speakers").TEST, 12.0, "computer", 1.0, 0.0)
    assert len(stream.samples) == 12 * speech.RATE and len(stream.ends) >= 4
    for end in stream.ends:
        last = int(end * speech.RATE)
        assert np.abs(stream.samples[last - 200 : last]).max() > 0.01
        assert not stream.samples[last : last + 800].any()


def test_corpus_comes_back_from_its_folder(speech: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = module("training.keyword_data")
    made = data.corpus(tmp_path, "computer", data.TEST, 2, 8.0)
    monkeypatch.setattr(data.speech, "stream", None)
    stored = data.corpus(tmp_path, "computer", data.TEST, 2, 8.0)
    assert np.array_equal(made.frames, stored.frames) and stored.ends == [tuple(ends) for ends in made.ends]
    assert sum(map(len, made.ends)) > 0


@pytest.fixture
def trained(speech: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Path]:
    """A models folder with a small model."""
    models = tmp_path / "models"
    line = ["--quick", "--encoder", "qrnn", "--models", str(models), "--data", str(tmp_path / "data")]
    assert module("train_keyword").main(line) == 0
    assert "keywords missed" in capsys.readouterr().out
    yield models


@pytest.mark.slow
def test_recipe_trains_and_evaluates_through_the_service(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The small model hears little, so only the counts are checked. The service must have the probabilities of PyTorch."""
    folder = trained / "computer-qrnn" / "1"
    card = (folder / spec.CARD).read_text()
    assert "--keyword computer --quick" in card and "$" not in card
    live, evaluation, results = module("training.live"), module("evaluate_keyword"), tmp_path / "r.jsonl"
    with serving(trained, tmp_path) as server:
        line = ["--model", "computer-qrnn", "--url", server.address, "--hours", "0.005", "--keyword-hours", "0.03"]
        line += ["--streams", "3", "--seconds", "2", "--threshold", "0.01", "--results", str(results)]
        line += ["--service-pid", str(server.process.pid), "--data", str(tmp_path / "data")]
        assert evaluation.main(line) == 0
        assert evaluation.main(["--model", "other", "--url", server.address]) == 1
        rows = np.random.default_rng(0).normal(16, 2, (60, 40)).astype(np.float32)
        asyncio = importlib.import_module("asyncio")
        outputs = asyncio.run(live.outputs(server.address, "computer-qrnn", [rows[:7], rows[7:]]))
    [record] = module("training.records").read(results)
    assert record["chunks"] == 3 * 50 and 0 <= record["late_chunks"] <= 150 and record["keywords"] > 0
    assert 0 <= record["streams_behind_at_end"] <= record["late_streams"] <= min(3, record["late_chunks"])
    assert record["service_core_percent"] > 0 and record["generator_core_percent"] > 0
    assert record["chunk_ms_max"] >= record["chunk_ms_p99"] >= record["chunk_ms_p50"] > 0
    assert record["misses"] <= record["keywords"] and record["false_alarms_an_hour"] >= 0
    printed = capsys.readouterr()
    assert f"misses: {record['misses']}" in printed.out and "has no model 'other'" in printed.err
    torch = importlib.import_module("torch")
    model = module("training.signal_model").SignalModel("qrnn", torch.zeros(2, 40), 16, 2, causal=True, front=5).eval()
    model.load(folder)
    with torch.no_grad():
        expected = model(torch.from_numpy(rows)[None], torch.tensor([60])).softmax(-1)[0, :, 1]
    served = [value for output in outputs for value in evaluation.probabilities(output, "computer")]
    assert served == pytest.approx(expected.tolist(), abs=1e-4)


@pytest.mark.slow
def test_keyword_is_heard_in_recordings(speech: Any, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The service hears what PyTorch hears in the same frames, in a WAV file and in bare samples."""
    stream = speech.stream(np.random.default_rng(3), module("training.speakers").TEST, 6.0, "computer", 1.0)
    samples = (32768 * stream.samples).clip(-32768, 32767).astype("<i2")
    write_wav(tmp_path / "spoken.wav", samples.tobytes())
    (tmp_path / "spoken.raw").write_bytes(samples.tobytes())
    silence = np.zeros(speech.RATE // 2, np.float32)
    rows = torch.from_numpy(module("training.frames").frames(np.concatenate([samples.astype(np.float32) / 32768, silence])))
    model = module("training.signal_model").SignalModel("qrnn", torch.zeros(2, 40), 16, 2, causal=True, front=5).eval()
    model.load(trained / "computer-qrnn" / "1")
    with torch.no_grad():
        scores = model(rows[None], torch.tensor([len(rows)])).softmax(-1)[0, :, 1]
    threshold = float(scores.quantile(0.6))
    events = module("training.spotting").Detector(threshold).add(scores.tolist())
    assert events, "a threshold below which four tenths of the frames lie has events"
    expected = ", ".join(f"{module('training.frames').known_at(frame):.2f} s" for frame in events)
    files = [str(tmp_path / name) for name in ("spoken.wav", "spoken.raw")]
    with serving(trained, tmp_path) as server:
        line = ["--model", "computer-qrnn", "--url", server.address, "--threshold", str(threshold)]
        capsys.readouterr()
        assert module("hear_keyword").main([*line, *files]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert module("hear_keyword").main([*files, "--model", "other", "--url", server.address]) == 1
    assert printed[:2] == [f"spoken.{kind}, 6.0 s: {expected}" for kind in ("wav", "raw")]
    assert printed[2] == f"'computer' heard {2 * len(events)} times in 12.0 s"


def write_wav(file: Path, samples: bytes, rate: int = 16_000) -> None:
    with wave.open(str(file), "wb") as recording:
        recording.setnchannels(1)
        recording.setsampwidth(2)
        recording.setframerate(rate)
        recording.writeframes(samples)


def test_recording_in_another_format_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_wav(tmp_path / "fast.wav", bytes(100), rate=44_100)
    (tmp_path / "text.wav").write_text("no sound")
    for name, said in (("fast.wav", "44100 samples a second"), ("text.wav", "no WAV file"), ("none.wav", "No such file")):
        assert module("hear_keyword").main(["--model", "any", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
