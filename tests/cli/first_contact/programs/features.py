"""Features of one file, and of samples that are in memory."""

import soundfile

from nestmodel import encode, load_network

print("from a file:", tuple(encode("last.ckpt", "talk.wav").values.shape))
network = load_network("last.ckpt")
samples, rate = soundfile.read("talk.wav")
print("from samples:", tuple(encode(network, samples, sampling_rate=rate).values.shape))
