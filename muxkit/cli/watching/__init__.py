"""Commands that watch sessions and read what they left."""
