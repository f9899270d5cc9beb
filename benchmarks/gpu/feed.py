"""Section `feeding`: what the loader delivers from FLAC and from PCM, and what the steps of each model take."""

import dataclasses

from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Section
from nestmodel import NestModel
from nestmodel.preflight.feeding import check_feeding, own_cores

_LONGEST_S = 12.0
"""More than the longest cut of the demo corpus lasts."""

_MOST_S = 240.0
"""A corpus of five minutes gives no larger batches."""


def measure_feeding(context: Context, section: Section) -> None:
    """Adds a row for each model and format: the audio-seconds a second that arrive, over those that steps take."""
    num_cores = max(1, len(own_cores()[1]) // max(1, context.num_local_ranks)) if context.is_cuda else 1
    for name, config in reversed(context.extent.models.items()):
        for source in ("FLAC", "PCM"):
            if not context.has_time():
                section.notes.append(f"{name}, {source} and later rows were not measured: the time was over.")
                return
            data = context.demo_data(
                pcm=source == "PCM",
                num_workers=min(8, num_cores) if context.is_cuda else 0,
                seconds=max(_LONGEST_S, min(_MOST_S, context.extent.budgets[name])),
            )
            trainer = context.single_trainer()
            found = check_feeding(NestModel(config), data, trainer, num_cores, context.extent.feed_seconds).figures
            context.free_memory()
            delivered = {key: rate for key, rate in found.items() if key.startswith("delivered_")}
            best = max(delivered, key=lambda key: delivered[key])
            section.rows.append(
                {
                    "row": f"{name}, {source}",
                    "steps take, audio-s/s": found["step_audio_s_per_s"],
                    "delivered, audio-s/s": delivered[best],
                    "workers": int(best.split("_")[1]),
                    "feed ratio": delivered[best] / found["step_audio_s_per_s"],
                    "cores": num_cores,
                }
            )
    plan = dataclasses.asdict(data.train_dataset.plan.config)
    section.notes.append(f"The demo corpus, in the page cache; budget {plan['max_batch_seconds']:g} s in the last row.")
