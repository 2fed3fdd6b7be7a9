"""The Trio side of a link: senders and receivers, and the common channels."""
