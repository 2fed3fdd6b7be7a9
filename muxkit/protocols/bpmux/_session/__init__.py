"""The Trio side of bpmux: sessions, and the channels and requests that applications hold.

The folder is not called `session`, because that is the name of a function of the package above.
"""
