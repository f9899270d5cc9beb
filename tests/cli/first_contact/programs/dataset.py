"""A data set by index, and with the DataLoader of torch."""

from torch.utils.data import DataLoader

from nestdata import AudioNoiseDataset, BatchPlan, Corpus, NoiseSampler, PlanConfig, SpeakerNoiseMixer, microbatches

corpus = Corpus.open("speech.corpus")
plan = BatchPlan.of("speech.corpus", PlanConfig(max_batch_seconds=10, microbatches_per_step=1))
dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open("noise.corpus")), SpeakerNoiseMixer())
print("the first batch:", dataset[0].key.step, dataset[0].key.microbatch)
loader = DataLoader(dataset, batch_size=None, sampler=list(microbatches(plan, num_steps=3)))
print("from a DataLoader:", [batch.key.step for batch in loader])
