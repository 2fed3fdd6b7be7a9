"""The Trio side of bpmux; not called `session`, because that is the name of a function of the package above."""
