"""Runs one batch through each layout of a config, and compares it with Hugging Face on one process (`mrl check`)."""
