"""The simulations that come with muxkit."""
