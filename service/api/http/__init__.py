"""The HTTP connection: bytes of a client become requests of the application, and its answers become bytes."""
