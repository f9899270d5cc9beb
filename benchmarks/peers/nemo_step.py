"""Measures a training step of NeMo's NEST model, or of its quantizer alone; benchmarks/model/step.py runs it."""

import json
import sys
import warnings

import torch
from measuring import Stopwatch, batch, parse, quantizer_weights, sizes
from nemo_model import build, section

warnings.filterwarnings("ignore")


def main() -> int:
    """Measures, and prints the result as JSON."""
    arguments = parse(__doc__)
    model = build(section(**sizes(arguments.what)))
    audio, noisy, lens = batch(arguments)
    if arguments.what == "quantizer":
        model.eval()
        model.quantizer.load_state_dict(quantizer_weights(model.quantizer.state_dict()))
        feats, _ = model.preprocessor(input_signal=audio, length=lens)
        run = lambda: model.quantizer(input_signal=feats)[1]  # noqa: E731
    else:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        # Fused as on our side, which NeMo's configuration does not ask for.
        optimizer = torch.optim.AdamW(parameters, 1e-4, fused=True)

        def run() -> torch.Tensor:
            log_probs, encoded_len, masks, tokens = model.forward(
                input_signal=audio.clone(),
                input_signal_length=lens,
                noisy_input_signal=noisy.clone(),
                noisy_input_signal_length=lens,
                apply_mask=True,
            )
            loss: torch.Tensor = model.loss(
                masks=masks, decoder_outputs=log_probs, targets=tokens, decoder_lengths=encoded_len
            )
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

    print(json.dumps(Stopwatch(run, arguments.steps).measured()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
