"""Encodes audio chunk by chunk with NeMo's cache-aware streaming; streaming.py runs it.

Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import argparse
import json
import logging
import sys
import time
import warnings

import torch

warnings.filterwarnings("ignore")


def main() -> int:
    """Writes the frames, and prints the seconds of each chunk as JSON; the features are computed before."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help=".nemo file")
    parser.add_argument("audio", help="torch file: samples, shape (samples,)")
    parser.add_argument("frames", help="torch file to write: frames, shape (enc_frames, dim)")
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)

    from nemo.collections.asr.models import EncDecDenoiseMaskedTokenPredModel
    from nemo.collections.asr.parts.utils.streaming_utils import CacheAwareStreamingAudioBuffer
    from nemo.utils import logging as nemo_logging

    nemo_logging.setLevel(logging.ERROR)
    model = EncDecDenoiseMaskedTokenPredModel.restore_from(arguments.model, map_location="cpu").eval()
    encoder = model.encoder
    encoder.setup_streaming_params()
    audio = torch.load(arguments.audio)
    chunks = CacheAwareStreamingAudioBuffer(model)
    with torch.inference_mode():
        feats, feat_lens = model.preprocessor(input_signal=audio.unsqueeze(0), length=torch.tensor([len(audio)]))
        chunks.append_processed_signal(feats[:, :, : feat_lens[0]])
        channel, last, channel_len = encoder.get_initial_cache_state(batch_size=1)
        frames, seconds = [], []
        for number, (chunk, lengths) in enumerate(chunks):
            began = time.perf_counter()
            encoded, encoded_len, channel, last, channel_len = encoder.cache_aware_stream_step(
                processed_signal=chunk,
                processed_signal_length=lengths,
                cache_last_channel=channel,
                cache_last_time=last,
                cache_last_channel_len=channel_len,
                keep_all_outputs=chunks.is_buffer_empty(),
                drop_extra_pre_encoded=0 if number == 0 else encoder.streaming_cfg.drop_extra_pre_encoded,
            )
            seconds.append(time.perf_counter() - began)
            frames.append(encoded[0, :, : encoded_len[0]].T)
    torch.save(torch.cat(frames), arguments.frames)
    print(json.dumps(seconds))
    return 0


if __name__ == "__main__":
    sys.exit(main())
