"""Audio as frames of log-mel energies, while it arrives. The arithmetic needs `pip install kaldi-native-fbank`."""

from __future__ import annotations

import numpy as np
from kaldi_native_fbank import FbankOptions, OnlineFbank
from numpy.typing import NDArray

from training.speech import RATE, Samples

BANDS = 40
FRAME_SECONDS, WINDOW_SECONDS = 0.010, 0.025
"""Seconds between frames, and the seconds of audio that a frame covers."""
FULL_SCALE = 32768
"""The energies are computed from 16-bit samples, as in Kaldi."""

Frames = NDArray[np.float32]
"""(frames, BANDS)"""


class FrameStream:
    """Turns the audio of one stream into frames, chunk by chunk. Frame n covers the seconds from n * 0.01 to n * 0.01 + 0.025."""

    def __init__(self) -> None:
        options = FbankOptions()
        options.frame_opts.samp_freq = RATE
        options.frame_opts.dither = 0.0
        options.mel_opts.num_bins = BANDS
        self._bank = OnlineFbank(options)
        self._returned = 0

    def add(self, samples: Samples) -> Frames:
        """Add the next samples, and return the frames that they complete."""
        self._bank.accept_waveform(RATE, samples * FULL_SCALE)
        frames = [self._bank.get_frame(index) for index in range(self._returned, self._bank.num_frames_ready)]
        self._returned += len(frames)
        copied = np.array(frames, np.float32).reshape(len(frames), BANDS)
        self._bank.pop(len(frames))  # frees the memory that the frames view
        return copied


def frames(samples: Samples) -> Frames:
    """Return the frames of whole audio."""
    return FrameStream().add(samples)


def known_at(frame: int) -> float:
    """Return the second at which a frame is complete."""
    return frame * FRAME_SECONDS + WINDOW_SECONDS
