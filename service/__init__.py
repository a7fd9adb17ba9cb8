"""gradserve: gradient kernels and gradient accumulation as an HTTP service."""

__version__ = "0.4.0"
