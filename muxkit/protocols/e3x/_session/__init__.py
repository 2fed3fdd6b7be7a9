"""The Trio side of e3x: sessions, and the channels and receipts that applications hold.

The folder is not called `session`, because that is the name of a function of the package above.
"""
