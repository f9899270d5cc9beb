"""Model files: NeMo, Hugging Face, safetensors, ONNX, and checkpoints."""
