"""The rules of a link, without Trio, clocks or sockets."""
