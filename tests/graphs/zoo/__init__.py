"""Small models of the kinds that people train, each with fixed weights, and their exports from PyTorch.

`example.py` says what a model of the zoo is, `exports.py` how it becomes ONNX, and `check.py` what a server has to give
for it. The other modules have the models. `make graphs` checks all of them, and `make test` a dozen.
"""
