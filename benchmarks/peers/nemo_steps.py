"""Training steps of NeMo's NEST models; `benchmarks/gpu/nemo.py` and `benchmarks/model/step.py` run it.

    python benchmarks/peers/nemo_steps.py cuda|cpu [REQUESTS]

Reads requests from a file or from standard input, and answers on standard output, one JSON object a line:

    {"do": "build", "section": ARGUMENTS, "encoder": SETTINGS, "audio": FILE}    {"parameters": NUMBER}
    {"do": "steps", "warm_up": NUMBER, "number": NUMBER}                         times, memory, loss

The model has NeMo's own settings, except where the request sets them. On a GPU, autocast is bf16, the optimizer is
fused as on our side, and audio comes from page-locked memory. Memory that no tensor uses goes back to the GPU after
each turn.
Needs nemo_toolkit[asr] 3.0.0, but not this package.
"""

import gc
import json
import os
import resource
import sys
import time
import warnings
from typing import Any

import torch
from nemo_model import build, section
from torch import Tensor

warnings.filterwarnings("ignore")


class Turns:
    """A model, its audio and its optimizer."""

    def __init__(self, device: str, request: dict[str, Any]) -> None:
        """Builds the model, and reads the audio: clean, noisy, lengths."""
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        config = section(**request["section"])
        config["encoder"].update(request["encoder"])
        self._model = build(config).to(self._device)
        trained = [parameter for parameter in self._model.parameters() if parameter.requires_grad]
        self.num_trained = sum(parameter.numel() for parameter in trained)
        self._optimizer = torch.optim.AdamW(trained, 1e-4, fused=True)
        audio = torch.load(request["audio"])
        self._audio = [each.pin_memory() for each in audio] if self._is_cuda else audio

    def steps(self, request: dict[str, Any]) -> dict[str, Any]:
        """Makes steps, and returns the milliseconds of each, the peak memory in GB, and the last loss."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(request["warm_up"]):
            self._step()
        times = [self._step() for _ in range(request["number"])]
        found = {
            "step_ms": [each[0] for each in times],
            "host_ms": [each[1] for each in times],
            "loss": times[-1][2],
            "peak_gb": self._peak_bytes() / 1e9,
        }
        self._optimizer.zero_grad()
        free(self._is_cuda)
        return found

    def _step(self) -> tuple[float, float, float]:
        self._wait()
        started = time.perf_counter()
        # A CPU gets copies, too: NeMo writes into its input.
        audio, noisy, lens = (each.to(self._device, non_blocking=True, copy=True) for each in self._audio)
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._is_cuda):
            loss = self._loss(audio, noisy, lens)
        loss.backward()
        host_s = time.perf_counter() - started
        self._optimizer.step()
        self._optimizer.zero_grad()
        self._wait()
        return 1000 * (time.perf_counter() - started), 1000 * host_s, loss.item()

    def _loss(self, audio: Tensor, noisy: Tensor, lens: Tensor) -> Tensor:
        log_probs, encoded_len, masks, tokens = self._model.forward(
            input_signal=audio,
            input_signal_length=lens,
            noisy_input_signal=noisy,
            noisy_input_signal_length=lens,
            apply_mask=True,
        )
        loss: Tensor = self._model.loss(
            masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=encoded_len
        )
        return loss

    def _wait(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    def _peak_bytes(self) -> int:
        if self._is_cuda:
            return torch.cuda.max_memory_reserved()
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def free(is_cuda: bool) -> None:
    """Gives memory that no tensor uses back to the GPU, for the other process."""
    gc.collect()
    if is_cuda:
        torch.cuda.empty_cache()


def main() -> int:
    """Answers requests until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NeMo prints to standard output
    device, turns = sys.argv[1], None
    for line in open(sys.argv[2]) if len(sys.argv) > 2 else sys.stdin:
        request = json.loads(line)
        try:
            if request["do"] == "build":
                turns = None
                free(device == "cuda")
                turns = Turns(device, request)
                answer = {"parameters": turns.num_trained}
            else:
                assert turns is not None
                answer = turns.steps(request)
        except torch.OutOfMemoryError:
            answer = {"out_of_memory": True}
        if "out_of_memory" in answer:  # after the handler, which keeps the tensors of its frames alive
            turns = None
            free(device == "cuda")
        print(json.dumps(answer), file=answers, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
