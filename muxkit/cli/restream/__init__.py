"""The commands of `muxkit restream`."""
