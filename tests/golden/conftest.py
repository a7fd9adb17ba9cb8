"""pytest imports every module for its doctests; these need ONNX Runtime or PyTorch, which the tests do without."""

collect_ignore = ["make.py", "ort.py", "torch_activations.py", "torch_gru.py"]
