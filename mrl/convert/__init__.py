"""Converts weights between Hugging Face folders and mcore checkpoints: `mrl convert import`, `export` and `verify`."""
