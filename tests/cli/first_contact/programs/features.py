"""Features of one file, and of samples that are in memory."""

import soundfile

from nestmodel import encode, load_network

network = load_network("last.ckpt")
print("from a file:", tuple(encode(network, "talk.wav").shape))
samples, rate = soundfile.read("talk.wav", dtype="float32")
print("from samples:", tuple(encode(network, samples, rate).shape))
