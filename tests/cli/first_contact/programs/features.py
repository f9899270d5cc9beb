"""Features of one file, and of samples that are in memory."""

import soundfile

from nestmodel import encode, load_network

network = load_network("last.ckpt")
print("from a file:", tuple(encode(network, "talk.wav").values.shape))
samples, rate = soundfile.read("talk.wav")
print("from samples:", tuple(encode(network, samples, sampling_rate=rate).values.shape))
