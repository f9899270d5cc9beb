"""Fine-tunes an exported `.nemo` file to a CTC recogniser in NeMo, as `finetune.py` does in transformers.

    python with_nemo.py nest.nemo recogniser/train.corpus recogniser/test.corpus -o nemo_recogniser

Runs in an environment with nemo_toolkit[asr] 3.0.0, without this project. The first file is what
`nestmodel export --to nemo` wrote; the corpora are those of `finetune.py` or of `nestdata prepare`. OUTPUT receives the
tokeniser, NeMo's manifests, `recogniser.nemo` and `test.jsonl`.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
from nemo.collections.asr.models import EncDecCTCModelBPE, EncDecDenoiseMaskedTokenPredModel
from nemo.collections.common.tokenizers.sentencepiece_tokenizer import create_spt_model
from omegaconf import DictConfig, OmegaConf


def main() -> None:
    """Trains, saves and applies a recogniser."""
    args = parse_arguments()
    args.output.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(args.seed)
    texts = {
        name: write_manifest(corpus, args.output / f"{name}.json")
        for name, corpus in (("train", args.train), ("test", args.test))
    }
    (args.output / "texts.txt").write_text("\n".join(texts["train"]) + "\n")
    create_spt_model(
        str(args.output / "texts.txt"), args.vocabulary, -1, False, "bpe", output_dir=str(args.output / "tokenizer")
    )
    trainer = pl.Trainer(
        max_steps=args.steps,
        accelerator="auto",
        devices=1,
        logger=False,
        enable_checkpointing=False,
        gradient_clip_val=1.0,
        limit_val_batches=0,
        num_sanity_val_steps=0,
    )
    model = EncDecCTCModelBPE(cfg=model_section(args), trainer=trainer)
    model.maybe_init_from_pretrained_checkpoint(
        OmegaConf.create({"init_from_nemo_model": {"nest": {"path": str(args.nest), "include": ["encoder"]}}})
    )
    trainer.fit(model)
    print(f"loss of the last step: {trainer.callback_metrics['train_loss']:.3f}")
    model.save_to(str(args.output / "recogniser.nemo"))

    lines = [json.loads(line) for line in (args.output / "test.json").read_text().splitlines()]
    found = model.transcribe([line["audio_filepath"] for line in lines], batch_size=8)
    with (args.output / "test.jsonl").open("w") as file:
        for line, hypothesis in zip(lines, found, strict=True):
            file.write(json.dumps({"text": line["text"], "recognised": hypothesis.text}, ensure_ascii=False) + "\n")


def write_manifest(corpus: Path, manifest: Path) -> list[str]:
    """Writes a corpus as a manifest of NeMo with lower-case texts without punctuation, and returns the texts."""
    lines = []
    for cut in map(json.loads, (corpus / "cuts.jsonl").open()):
        text = " ".join(supervision.get("text") or "" for supervision in cut["supervisions"])
        text = " ".join(re.sub(r"[^\w\s]|_", " ", text.lower()).split())
        if text:
            audio = {"audio_filepath": cut["recording"]["sources"][0]["source"], "offset": cut["start"]}
            lines.append({**audio, "duration": cut["duration"], "text": text})
    manifest.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    return [line["text"] for line in lines]


def model_section(args: argparse.Namespace) -> DictConfig:
    """Returns the `model` section: preprocessor and encoder of the pretrained model, and what CTC adds."""
    pretrained = EncDecDenoiseMaskedTokenPredModel.restore_from(str(args.nest), return_config=True)
    data: dict[str, Any] = {"sample_rate": pretrained.preprocessor.sample_rate, "num_workers": 0, "pin_memory": False}
    return OmegaConf.create(
        {
            "sample_rate": pretrained.preprocessor.sample_rate,
            "preprocessor": pretrained.preprocessor,
            "encoder": pretrained.encoder,
            "spec_augment": {
                "_target_": "nemo.collections.asr.modules.SpectrogramAugmentation",
                **{"freq_masks": 2, "freq_width": 15, "time_masks": 2, "time_width": 0.05},
            },
            "tokenizer": {"dir": str(args.output / "tokenizer"), "type": "bpe"},
            "decoder": {
                "_target_": "nemo.collections.asr.modules.ConvASRDecoder",
                **{"feat_in": None, "num_classes": -1, "vocabulary": []},
            },
            "train_ds": {
                **data,
                **{
                    "manifest_filepath": str(args.output / "train.json"),
                    "shuffle": True,
                    "batch_size": args.batch_size,
                },
            },
            "validation_ds": {
                **data,
                **{
                    "manifest_filepath": str(args.output / "test.json"),
                    "shuffle": False,
                    "batch_size": args.batch_size,
                },
            },
            "optim": {
                **{"name": "adamw", "lr": args.lr, "betas": [0.9, 0.98], "weight_decay": 0.01},
                "sched": {"name": "CosineAnnealing", "warmup_steps": min(100, args.steps // 2), "min_lr": 0.0},
            },
        }
    )


def parse_arguments() -> argparse.Namespace:
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("nest", type=Path, help="file of `nestmodel export --to nemo`")
    add("train", type=Path, help="prepared corpus with transcripts")
    add("test", type=Path, help="prepared corpus with transcripts")
    add("-o", "--output", type=Path, required=True, help="directory to write")
    add("--vocabulary", type=int, default=128, help="number of tokens")
    add("--steps", type=int, default=2000, help="optimizer steps")
    add("--batch-size", type=int, default=8, help="utterances in a batch")
    add("--lr", type=float, default=1e-3, help="largest learning rate")
    add("--seed", type=int, default=0, help="seed of weights, order and augmentation")
    return parser.parse_args()


if __name__ == "__main__":
    main()
