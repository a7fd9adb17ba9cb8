"""Answers of other implementations to questions about every operator, and how to ask them.

The operators of `service/kernels/NAME.py` have their questions in `questions/NAME.py`. Nothing lists these modules:

- `ask()` yields a `Case` for each question. Its `source` says who answers: "onnxruntime", or "torch" where that is not
  right. Each operator has its own file of answers for each of them.
- `tolerance(case, output)` says how far the kernel may be from the answer. Without it, no bit may differ.
- `REASONS` maps the text of a refusal, as a pattern, to the class of our error. The pattern sees `NAME OF CASE: TEXT`.
- `torch_NAME.py`, if PyTorch answers, has `run(operator, inputs, attributes)`, which returns outputs by name. It
  computes in float64; the test rounds them to the dtype of the kernel's answer.

Names are ours: `weights.fc1.bias` is the tensor `fc1.bias` of the group `weights`. `asked` names whole sequences, but
each output of SplitTraining. Attributes are numbers, texts or lists; a float is rounded to float32, as ONNX keeps it.
`ort.py` knows domains, opsets, and inputs that ONNX Runtime does not have.

`python -m tests.golden.make NAME` asks the questions of a family, each in a process of its own, and stores the answers.
A process that ends, or that does not answer, is a refusal, too; `child.py` has its text. All files together have a few
megabytes, so a file has less than 100 KiB: ask few large questions, with a `sample` of the answer or `drawn` inputs.
"""
