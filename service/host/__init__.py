"""The machine: calls that only some systems have, files, the UNIX socket, shared memory."""
