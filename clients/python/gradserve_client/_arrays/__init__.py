"""Trees of NumPy and JAX arrays as buffers."""
