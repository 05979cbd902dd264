"""The recipe for keywords: events and their comparison with the speech, windows, the streams of espeak-ng, and recordings."""

from __future__ import annotations

import importlib
import shutil
import wave
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
    spotting = module("training.spotting")
    row = [0.5] * spotting.IN_A_ROW
    found = spotting.events([*row[1:], 0.4, *row, *row, *[0.1] * spotting.REST, *row], 0.5)
    frames = [2 * spotting.IN_A_ROW - 1, 4 * spotting.IN_A_ROW + spotting.REST - 1]
    assert found == pytest.approx([frame * 0.01 + 0.025 for frame in frames])


def test_latency_is_from_the_end_of_the_word_to_the_event() -> None:
    """A second event of a word is a false alarm."""
    latencies = module("training.spotting").latencies
    assert latencies([1.0, 5.0, 9.0], [1.12, 1.3, 4.95, 7.0, 9.6]) == pytest.approx([0.12, -0.05])


def test_frames_after_the_keyword_are_positive() -> None:
    recipe = module("train_keyword")
    targets = recipe.targets((1.0,), 200)
    [positive] = np.nonzero(targets.numpy() == 1)
    known = positive * 0.01 + 0.025
    assert known.min() == pytest.approx(1.035, abs=0.006) and known.max() == pytest.approx(1.145, abs=0.006)
    assert targets[90] == targets[115] == recipe.NO_TARGET and targets[70] == targets[120] == 0


def test_windows_leave_out_keywords_that_they_may_cut() -> None:
    recipe, row = module("train_keyword"), module("training.batches").Row
    targets = torch.zeros(400, dtype=torch.long)
    targets[[120, 260]] = 1
    first, second = recipe.windows(row(torch.zeros(400, 40), targets), 50, 120)
    assert first.targets[70] == recipe.NO_TARGET and second.targets.sum() == 1 and len(first.inputs) == 120


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
    speech = module("training.speech")
    assert not set(speech.TEST) & set(speech.TRAINING)


def test_keyword_ends_where_the_stream_says(speech: Any) -> None:
    """A stream of keywords alone is silent from an end to the end of the pause, but for its noise."""
    stream = speech.speech(np.random.default_rng(1), speech.TEST, 12.0, "computer", 1.0, 0.0)
    assert len(stream.samples) == 12 * speech.RATE and len(stream.ends) >= 4
    for end in stream.ends:
        last = int(end * speech.RATE)
        assert np.abs(stream.samples[last - 200 : last]).max() > 0.01
        assert not stream.samples[last : last + 800].any()


def test_recording_in_another_format_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with wave.open(str(tmp_path / "fast.wav"), "wb") as recording:
        recording.setparams((1, 2, 44_100, 0, "NONE", ""))
        recording.writeframes(bytes(100))
    (tmp_path / "text.wav").write_text("no sound")
    for name, said in (("fast.wav", "44100 samples a second"), ("text.wav", "no WAV file"), ("none.wav", "No such file")):
        assert module("hear_keyword").main(["--model", "any", str(tmp_path / name)]) == 2
        assert said in capsys.readouterr().err
