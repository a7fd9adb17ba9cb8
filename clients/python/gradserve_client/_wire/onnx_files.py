"""Files of ONNX models. A model may have its weights in files beside it."""

from __future__ import annotations

from pathlib import Path

from gradserve_client.errors import InvalidInput

MAX_BYTES = 1 << 31
"""A model in one file has fewer bytes: protobuf allows no more."""

_REFERENCE = b"\n\x08location"
"""What a model has for each tensor in another file."""


def read_model(path: Path) -> bytes:
    """Return a model as one file. The package onnx reads the files beside it; without it, the server says what to do.

    Raises `InvalidInput` for files that are missing, in another folder, or too large together.
    """
    content = path.read_bytes()
    if _REFERENCE not in content:
        return content
    try:
        import onnx
    except ModuleNotFoundError:
        return content
    try:
        model = onnx.load_from_string(content)
        entries = [entry for one in model.graph.initializer for entry in one.external_data]
        size = len(content) + sum(int(entry.value) for entry in entries if entry.key == "length")
        if size < MAX_BYTES:
            onnx.load_external_data_for_model(model, str(path.parent))
            whole: bytes = model.SerializeToString()
            return whole
    except Exception as error:  # those of ONNX and protobuf have many classes
        raise InvalidInput(f"{path} has weights in other files, which cannot be read: {error}") from error
    raise InvalidInput(
        f"{path} has {size} bytes with the files beside it, but a model must have fewer than {MAX_BYTES}"
    )
