"""Inputs that are read from regions of shared memory, and outputs that are written there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from service.api.http.body import ALIGNMENT_BYTES
from service.api.http.call import Call
from service.api.operators.job import Job
from service.codecs.parts import Part, SharedInput, bytes_for
from service.dtypes import Array
from service.errors import GradserveError, NotFound
from service.host.shared_memory import Regions

SCOPE = "shared_memory"
"""The scope of an API key for tensors in shared memory."""


def regions_of(call: Call) -> Regions:
    """Return the regions of shared memory. Raises `NotFound` if the server does not offer shared memory."""
    if call.regions is None:
        raise NotFound("This server does not offer shared memory; GRADSERVE_SHARED_MEMORY=true lets it do so")
    return call.regions


def read(call: Call, job: Job, shared: Mapping[str, SharedInput]) -> Job:
    """Return the job with its inputs from shared memory, in memory that is reserved first.

    Raises `NotFound`, `RegionUnusable`, `InvalidTensor` and `Busy`.
    """
    regions, namespace = regions_of(call), call.caller.namespace
    sizes = [one.part.size + -one.part.size % ALIGNMENT_BYTES for one in shared.values()]
    call.reserve(sum(sizes))
    memory, tensors, start = call.engine.buffer(sum(sizes)), dict(job.tensors), 0
    for (name, one), size in zip(shared.items(), sizes, strict=True):
        end = start + one.part.size
        with _about(name):
            regions.read(namespace, one.part.region, one.part.offset, memory[start:end])
        tensors[name] = one.tensor(name, memory[start:end])
        start += size
        memory[end:start] = bytes(start - end)  # the fingerprint of the request has all bytes
    return job._replace(tensors=tensors, shared=memory)


def write(call: Call, parts: Mapping[str, Part], outputs: Mapping[str, Array]) -> None:
    """Write the outputs of these parts to shared memory. Raises `NotFound`, `RegionUnusable` and `InvalidTensor`."""
    for name, part in parts.items():
        data = bytes_for(name, outputs[name], part)
        with _about(name):
            regions_of(call).write(call.caller.namespace, part.region, part.offset, data)


@contextmanager
def _about(name: str) -> Iterator[None]:
    """Let the errors inside name the tensor."""
    try:
        yield
    except GradserveError as error:
        error.detail, error.context["tensor"] = f"{name}: {error.detail}", name
        raise
