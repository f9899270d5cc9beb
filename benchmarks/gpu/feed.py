"""Section `feeding`: what the loader delivers from FLAC and from PCM, and what the steps of each model take."""

from benchmarks.gpu.context import Context
from benchmarks.gpu.report import Section
from nestmodel import NestModel
from nestmodel.preflight.feeding import check_feeding
from nestmodel.preflight.measure.loader_speed import own_cores

_LONGEST_S = 12.0
"""More than the longest cut of the demo corpus lasts."""

_MOST_S = 240.0
"""A corpus of five minutes gives no larger batches."""


def measure_feeding(context: Context, section: Section) -> None:
    """Adds a row for each model and format: the audio-seconds a second that arrive, over those that steps take."""
    num_cores = max(1, len(own_cores()[1]) // max(1, context.num_local_ranks)) if context.is_cuda else 1
    cases = [(name, source) for name in reversed(context.extent.models) for source in ("FLAC", "PCM")]
    for name, source in context.pending(section, cases, ", ".join):
        budget = max(_LONGEST_S, min(_MOST_S, context.extent.budgets[name]))
        data = context.demo_data(
            pcm=source == "PCM", num_workers=min(8, num_cores) if context.is_cuda else 0, seconds=budget
        )
        model, trainer = NestModel(context.extent.models[name]), context.single_trainer()
        found = check_feeding(model, data, trainer, num_cores, context.extent.feed_seconds).figures
        delivered = {key: rate for key, rate in found.items() if key.startswith("delivered_")}
        best = max(delivered, key=lambda key: delivered[key])
        section.add(
            {
                "row": f"{name}, {source}",
                "budget, s": budget,
                "steps take, audio-s/s": found["step_audio_s_per_s"],
                "delivered, audio-s/s": delivered[best],
                "workers": int(best.split("_")[1]),
                "feed ratio": delivered[best] / found["step_audio_s_per_s"],
                "cores": num_cores,
            }
        )
    section.notes.append("The demo corpus, in the page cache.")
