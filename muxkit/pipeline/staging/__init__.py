"""The staging server, its client, its store, and their messages."""
