"""The commands of `muxkit.pipeline`: pages about captures, and simulations by the thousand."""
