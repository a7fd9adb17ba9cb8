"""Speed and memory, measured beside peers.

OpenBLAS reads its settings when NumPy is loaded. Peers choose their instructions by the processor; so does it here,
though the environment name an older one.
"""

import os

LEFT_OUT = {name: os.environ.pop(name) for name in sorted(os.environ) if name.startswith("OPENBLAS_")}
"""What the environment told OpenBLAS, and the benchmarks and their servers do without."""
