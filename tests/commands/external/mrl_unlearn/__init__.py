"""A command of another package: `mrl unlearn CONFIG`."""
