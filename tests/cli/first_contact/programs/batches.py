"""From a folder of audio to batches."""

from nestdata import (
    AudioNoiseDataset,
    BatchPlan,
    Corpus,
    NoiseSampler,
    PlanConfig,
    SpeakerNoiseMixer,
    microbatches,
    prepare_corpus,
)

if __name__ == "__main__":
    prepare_corpus("talks", "mine.corpus")
    prepare_corpus("noises", "hiss.corpus")
    corpus = Corpus.open("mine.corpus")
    plan = BatchPlan.of(corpus, PlanConfig(max_batch_seconds=10, microbatches_per_step=2))
    dataset = AudioNoiseDataset(corpus, plan, NoiseSampler(Corpus.open("hiss.corpus")), SpeakerNoiseMixer())
    for batch in dataset.loader(microbatches(plan, num_steps=1)):
        print(f"step {batch.key.step}, microbatch {batch.key.microbatch}: {len(batch.sample_id)} cuts")
