"""The command `muxkit demo` and its two processes."""
