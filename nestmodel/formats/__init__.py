"""Model file formats: checkpoints, NeMo, Hugging Face, safetensors and ONNX."""
