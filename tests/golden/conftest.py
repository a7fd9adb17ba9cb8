"""pytest imports every module for its doctests; these two need ONNX Runtime, which the tests do without."""

collect_ignore = ["make.py", "ort.py"]
