"""A whole ONNX model as an operator: read and checked, planned, run, differentiated."""
