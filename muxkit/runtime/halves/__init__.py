"""The sending and receiving halves of channels, and the classes that open channels."""
