"""Audio as frames of log-mel energies. The arithmetic needs `pip install kaldi-native-fbank`."""

from __future__ import annotations

import numpy as np
from kaldi_native_fbank import FbankOptions, OnlineFbank
from numpy.typing import NDArray

from training.speech import RATE, Samples
from training.spotting import BANDS

FULL_SCALE = 32768
"""The energies are computed from 16-bit samples, as in Kaldi."""


def frames(samples: Samples) -> NDArray[np.float32]:
    """Return the frames of audio, (frames, BANDS). Frame n covers the seconds from n * 0.01 to n * 0.01 + 0.025."""
    options = FbankOptions()
    options.frame_opts.samp_freq = RATE
    options.frame_opts.dither = 0.0
    options.mel_opts.num_bins = BANDS
    bank = OnlineFbank(options)
    bank.accept_waveform(RATE, samples * FULL_SCALE)
    rows = [bank.get_frame(index) for index in range(bank.num_frames_ready)]
    return np.array(rows, np.float32).reshape(len(rows), BANDS)
