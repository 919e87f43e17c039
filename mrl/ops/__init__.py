"""Attention, the cache of keys and values, and the device, for every engine. It needs torch and no megatron-core."""
