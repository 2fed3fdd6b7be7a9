"""restream."""
