"""An engine for mrl in a package of its own; see docs/backends.md."""
