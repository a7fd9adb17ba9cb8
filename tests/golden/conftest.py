"""pytest imports every module for its doctests; these need ONNX Runtime or PyTorch, which the tests do without."""

collect_ignore_glob = ["make*.py", "ort.py", "torch_*.py"]
