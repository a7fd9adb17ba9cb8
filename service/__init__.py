"""gradserve: gradient kernels and gradient accumulation as an HTTP service."""
