"""The thread pool that runs kernels: their checks, their memory, and the queue that shares threads out by namespace."""
