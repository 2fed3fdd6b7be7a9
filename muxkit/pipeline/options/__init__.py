"""The options of the source and of the sink, read from text."""
