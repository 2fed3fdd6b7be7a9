"""Files over channels: the transfer of one file, and the commands `muxkit send` and `muxkit recv`."""
