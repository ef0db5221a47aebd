"""Checkpoints: sharded safetensors that any layout can load and any Hugging Face tool can open (see `format`)."""
