"""A training loop of one's own, which saves the network and loads it again."""

import torch

from nestdata import AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer, microbatches
from nestmodel import NestNetwork, export_model, load_network, loss_stats, save_network

corpus = Corpus.open("speech.corpus")
plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=10, microbatches_per_step=1))
dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open("noise.corpus")), SpeakerNoiseMixer())
network = NestNetwork(load_network("last.ckpt").config).train()
optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3)
for batch in dataset.loader(microbatches(plan, num_steps=2)):
    loss = loss_stats(network(batch)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
save_network(network, "mine.ckpt")
loaded = load_network("mine.ckpt")
same = all(torch.equal(weights, loaded.state_dict()[name]) for name, weights in network.state_dict().items())
print(f"equal weights: {same}, in training mode: {loaded.training}")
print("exported:", export_model(network, "nemo", "mine.nemo"))
