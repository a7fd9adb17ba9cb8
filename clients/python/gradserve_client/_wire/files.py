"""Tensors in files: .npy and .npz by the suffix, otherwise safetensors."""

from __future__ import annotations

import errno
import lzma
import shutil
import tokenize
import uuid
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, TypeAlias

import numpy as np

from gradserve_client._wire.tensors import DTYPES, Array, as_array, decode, encode
from gradserve_client.errors import InvalidInput
from gradserve_client.rows import Gradient, Rows

Write: TypeAlias = Callable[[Mapping[str, Array] | bytes], None]


def read_all(path: Path) -> dict[str, Array]:
    """Return the tensors of a safetensors or .npz file by name. Raises `InvalidInput` and `OSError`."""
    if path.suffix == ".npz":
        return _read_npz(path)
    with path.open("rb") as file:
        body = bytearray(file.read())
    try:
        return decode(body)[0]
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        detail = f"{path} cannot be read as a safetensors file: {type(error).__name__}: {error}"
        raise InvalidInput(detail, code="invalid_file") from error


def read_one(path: Path, tensor: str | None) -> Array:
    """Return the only tensor of the file, or the tensor of this name. Raises `InvalidInput` and `OSError`."""
    return _chosen(path, tensor, _tensors(path))


def read_gradient(path: Path, tensor: str | None) -> Gradient:
    """Return the only gradient of the file, or the gradient of this name. Raises `InvalidInput` and `OSError`.

    The tensors `NAME/indices` and `NAME/rows` are the sparse gradient `NAME`.
    """
    tensors = _tensors(path)
    name = min(tensors).removesuffix("/indices") if tensor is None and len(tensors) == 2 else tensor
    indices, rows = f"{name}/indices", f"{name}/rows"
    if indices in tensors and rows in tensors:
        return Rows(tensors[indices], tensors[rows])
    return _chosen(path, tensor, tensors)


def read_gradients(path: Path) -> dict[str, Gradient]:
    """Return all gradients of the file by name. Raises `InvalidInput` and `OSError`.

    The tensors `NAME/indices` and `NAME/rows` are the sparse gradient `NAME`.
    """
    tensors: dict[str, Any] = {**_tensors(path)}
    if not tensors:
        raise InvalidInput(f"{path} has no tensor with a name: name its buffer before it", code="unknown_tensor")
    sparse = {name.removesuffix("/rows") for name in tensors if name.endswith("/rows")}
    sparse &= {name.removesuffix("/indices") for name in tensors if name.endswith("/indices")}
    for name in sparse:
        tensors |= {name: Rows(tensors.pop(f"{name}/indices"), tensors.pop(f"{name}/rows"))}
    return tensors


def _tensors(path: Path) -> dict[str, Array]:
    """Return the tensors that have names."""
    return {} if is_npy(path) else read_all(path)


def _chosen(path: Path, tensor: str | None, tensors: dict[str, Array]) -> Array:
    if is_npy(path):
        if tensor is not None:
            raise InvalidInput(f"{path} has a single tensor without a name: omit --tensor", code="unknown_tensor")
        return _read_npy(path)
    if tensor is None and len(tensors) == 1:
        return next(iter(tensors.values()))
    if tensor in tensors:
        return tensors[tensor]
    names = ", ".join(tensors) or "none"
    if tensor is None:
        raise InvalidInput(f"Name a tensor of {path} with --tensor; it has: {names}", code="unknown_tensor")
    raise InvalidInput(f"{path} has no tensor {tensor}; it has: {names}", code="unknown_tensor")


def is_npy(path: Path) -> bool:
    """Whether the file has a single array in NumPy's own format."""
    return path.suffix == ".npy"


@contextmanager
def writing(path: Path | None) -> Iterator[Write]:
    """Return a function that writes the tensors, or bytes, to the file, or to none.

    A file that cannot be written raises `OSError` now, before the tensors come. The old file stays until the new file
    is whole.
    """
    if path is None:
        yield lambda tensors: None
    elif path.exists() and (_is_device(path) or not (path.is_file() or path.is_dir())):  # or a pipe
        yield lambda tensors: _write(path, path, tensors)
    else:
        target = path.resolve()  # follow links
        part = target.with_name(f"{target.name}.{uuid.uuid4().hex}.part")
        with _errors_name(path):
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, "Is a directory")
            part.touch(exist_ok=False)
            if target.exists():
                shutil.copymode(target, part)
        try:
            yield lambda tensors: _write(target, part, tensors)
        finally:
            part.unlink(missing_ok=True)


def _is_device(path: Path) -> bool:
    """Whether it is a file like /dev/stdout, or a link to it, even if that leads to a plain file."""
    while path.is_symlink():
        if path.parent.resolve().parts[1:2] in (("dev",), ("proc",)):
            return True
        path = path.parent / path.readlink()
    return False


def _write(path: Path, part: Path, tensors: Mapping[str, Array] | bytes) -> None:
    with _errors_name(path):
        with part.open("wb") as file:
            if isinstance(tensors, bytes):
                file.write(tensors)
            elif is_npy(path):
                (array,) = tensors.values()
                _write_npy(file, array)
            elif path.suffix == ".npz":
                with zipfile.ZipFile(file, "w") as archive:
                    for name, array in tensors.items():
                        with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                            _write_npy(member, array)
            else:
                file.writelines(encode({name: as_array(array, name) for name, array in tensors.items()}))
        if part != path:
            part.replace(path)


def _write_npy(file: IO[bytes], array: Array) -> None:
    """Write an array. The format has no bfloat16, and float32 holds each of its values."""
    np.lib.format.write_array(file, array.astype(np.float32) if array.dtype == DTYPES["BF16"] else array)


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Raise each `OSError` with the name of this file."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error


def _read_npy(path: Path) -> Array:
    with path.open("rb") as file, _errors_of(path, ".npy"):
        return _array(file)


def _read_npz(path: Path) -> dict[str, Array]:
    with path.open("rb") as file, _errors_of(path, ".npz"), zipfile.ZipFile(file) as archive:
        members = {name.removesuffix(".npy"): archive.open(name) for name in archive.namelist()}
        return {name: _array(member) for name, member in members.items()}


def _array(file: IO[bytes]) -> Array:
    return np.asarray(np.lib.format.read_array(file, allow_pickle=False))


@contextmanager
def _errors_of(path: Path, kind: str) -> Iterator[None]:
    """Raise `InvalidInput` for what is wrong in a file of NumPy."""
    damage = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, NotImplementedError, RuntimeError, MemoryError)
    try:
        yield
    except (*damage, ValueError, SyntaxError, TypeError, tokenize.TokenError) as error:
        raise InvalidInput(f"{path} cannot be read as an {kind} file: {error}", code="invalid_file") from error
