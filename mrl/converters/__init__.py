"""Weight names and tensor algebra between Hugging Face and mcore, both directions; no process group, no megatron.

`families/` holds one table per family, `rules` turns it into what one rank loads and exports,
`safetensors_io` reads and writes folders, `accounting` proves that every name has its place.
"""
