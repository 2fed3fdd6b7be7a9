"""The Trio side of bpmux/rel: sessions, and the channels and requests that applications hold."""
