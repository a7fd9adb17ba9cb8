"""Speed and memory, measured beside peers.

OpenBLAS reads its settings when NumPy is loaded. Here OpenBLAS chooses its instructions by the processor, as the peers
do, even if the environment names an older processor.
"""

import os

LEFT_OUT = {name: os.environ.pop(name) for name in sorted(os.environ) if name.startswith("OPENBLAS_")}
"""OpenBLAS's environment variables, removed for the benchmarks and their servers."""
