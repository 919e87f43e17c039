"""`mrl check`: one batch through each layout of a config, held against Hugging Face on one process."""
