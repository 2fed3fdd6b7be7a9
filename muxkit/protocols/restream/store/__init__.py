"""Where sessions live: the protocol of a store, and the three that come with muxkit."""
