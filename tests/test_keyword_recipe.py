"""The recipe for keywords: events and their comparison with the speech, frames, the streams of espeak-ng, and recordings."""

from __future__ import annotations

import argparse
import importlib
import shutil
import wave
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.usefixtures("examples")


def module(name: str) -> Any:
    return importlib.import_module(name)


@pytest.fixture
def speech() -> Any:
    """The module that speaks, where its program is installed."""
    if shutil.which("espeak-ng") is None:
        pytest.skip("espeak-ng is missing: make programs PROGRAMS=speech")
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
    windows = data.Windows([data.Spoken(frames[0], (1.0,)), data.Spoken(frames[1], (3.0,))], 100)
    cuts = windows.epoch(3, 1.0)
    assert sorted(int(number) for cut in cuts for number in cut.numbers) == list(range(8))
    for _, labels, weights in map(windows.batch, cuts):
        assert not weights[:, : data.CUT_FRAMES][labels[:, : data.CUT_FRAMES] == 1].any()


def test_part_of_the_windows_has_those_with_large_losses() -> None:
    data = module("training.keyword_data")
    windows = data.Windows([data.Spoken(np.zeros((400, 40), np.float16), ())] * 50, 100)
    windows.losses[:] = torch.where(torch.arange(200) % 10 == 3, 100.0, 1e-6)
    numbers = torch.cat([cut.numbers for cut in windows.epoch(8, 0.2)])
    assert len(numbers) == len(set(numbers.tolist())) == 40
    assert (numbers % 10 == 3).sum() >= 15, "20 of the 40 would be all of them, and four a sample without preference"


def test_threshold_has_few_misses_among_those_with_few_false_alarms() -> None:
    spotting = module("training.spotting")

    def development(misses: dict[float, int], alarms: dict[float, int]) -> Any:
        spoken = {
            threshold: spotting.Score(10, (0.1,) * (10 - misses.get(threshold, 9)), 0, 60.0)
            for threshold in spotting.THRESHOLDS
        }
        babble = {threshold: spotting.Score(0, (), alarms.get(threshold, 50), 8 * 3600.0) for threshold in spotting.THRESHOLDS}
        return spoken, babble

    few = {0.9: 4, 0.95: 3, 0.98: 0}
    assert spotting.best(*development({0.5: 0, 0.9: 1, 0.95: 2, 0.98: 3}, few)) == 0.9
    assert spotting.best(*development({0.5: 0, 0.9: 1, 0.95: 1, 0.98: 3}, few)) == 0.95, "the highest of equals"
    assert spotting.best(*development({0.5: 0, 0.98: 8}, {0.98: 20})) == 0.98, (
        "the fewest false alarms when there are always too many"
    )


@pytest.mark.parametrize("family", ["sru", "qrnn", "lstm", "gru", "cnn", "tcn"])
def test_every_family_learns_with_matrices_of_bfloat16(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processors that multiply them fast. The loss is the keyword in every frame of a loud window."""
    recipe, data = module("train_keyword"), module("training.keyword_data")
    monkeypatch.setattr(recipe, "MIXED", True)
    torch.manual_seed(0)
    frames = np.random.default_rng(0).normal(size=(6, 300, 40)).astype(np.float16)
    streams = [data.Spoken(rows, ((1.0,), ())[number % 2]) for number, rows in enumerate(frames)]
    losses: list[float] = []

    def fit(model: Any, epochs: int, rate: float, batches: Any, backward: Any, **more: Any) -> Any:
        optimizer = torch.optim.Adam([value for value in model.parameters() if value.requires_grad], 0.01)
        for _ in range(12):
            for cut in batches(0):
                optimizer.zero_grad()
                losses.append(float(backward(cut)))
                optimizer.step()
        return module("training.fitting").Fitted(1, None, 0.0)

    monkeypatch.setattr(recipe, "fit", fit)
    keyword = recipe.KeywordRecipe()
    keyword.options = argparse.Namespace(threshold=0.5)
    settings = recipe.Settings(family, hidden=8, window=100, batch=6, loudness=0.0, warp=0.0, tilt=0.0)
    parts = module("training.parts").Parts(streams, [], [])
    keyword.train("computer", parts, settings, torch.device("cpu"))
    assert np.mean(losses[-6:]) < 0.9 * np.mean(losses[:6])


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
    made = data.corpus(tmp_path, "computer", data.TEST, [(0,), (1,)], 8.0)
    monkeypatch.setattr(data.speech, "stream", None)
    stored = data.corpus(tmp_path, "computer", data.TEST, [(0,), (1,)], 8.0)
    assert [stream.ends for stream in stored] == [stream.ends for stream in made] and any(stream.ends for stream in made)
    assert all(np.array_equal(one.frames, other.frames) for one, other in zip(made, stored, strict=True))


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
