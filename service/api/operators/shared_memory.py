"""Shared memory: `/v2/systemsharedmemory`, with which clients on the same machine register it, and tensors in it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from service.api.buffers.request import Received, parse_model
from service.api.http.answer import JSON, Answer, JsonAnswer
from service.api.http.body import ALIGNMENT_BYTES, read_body
from service.api.http.call import Call, CurrentCall
from service.api.http.negotiation import check_no_query
from service.api.http.routing import access, body
from service.api.operators.job import Job
from service.codecs.parts import MAX_BYTES, Part, SharedInput, bytes_for
from service.dtypes import Array
from service.errors import GradserveError, NotFound, RegionUnusable, UnknownRegion, shown
from service.host.shared_memory import Region, Regions

SCOPE = "shared_memory"
"""The scope of an API key for tensors in shared memory."""

router = APIRouter(prefix="/v2/systemsharedmemory", tags=["open inference protocol"])

cuda = APIRouter(prefix="/v2/cudasharedmemory", include_in_schema=False)
"""Triton's extension for the memory of GPUs, which clients of NVIDIA call on any server. Here it never has a region."""

MAX_REGION_BYTES = 1 << 16
"""Bytes of the body that describes a region."""


class NewRegion(BaseModel):
    """A region to register."""

    model_config = ConfigDict(extra="forbid", json_schema_extra={"example": {"key": "/gradients", "byte_size": 4096}})

    key: str = Field(description="The name of the object in /dev/shm, as clients give it to shm_open.")
    offset: int = Field(0, ge=0, le=MAX_BYTES, strict=True, description="Where the region begins in the object.")
    byte_size: int = Field(ge=1, le=MAX_BYTES, strict=True, description="The bytes of the region.")


class RegionStatus(TypedDict):
    """A registered region."""

    name: str
    key: str
    offset: int
    byte_size: int


@router.get("/status", summary="List the regions")
@access(SCOPE)
async def regions(call: CurrentCall) -> JsonAnswer[list[RegionStatus]]:
    """The regions of the caller's namespace. 404 unless GRADSERVE_SHARED_MEMORY is true, as for all requests here."""
    return JsonAnswer(list(map(_described, regions_of(call).all(call.caller.namespace))))


@router.get("/region/{name}/status", summary="Describe a region")
@access(SCOPE)
async def region(call: CurrentCall, name: str) -> JsonAnswer[list[RegionStatus]]:
    """A list of one region. Raises `unknown_region`."""
    return JsonAnswer([_described(regions_of(call).find(call.caller.namespace, name))])


@router.post(
    "/region/{name}/register", summary="Register a region", dependencies=[body(NewRegion)], response_class=Response
)
@access(SCOPE)
async def register_region(call: CurrentCall, name: str) -> Answer:
    """The object must be a regular file in /dev/shm that the server may open. Raises `region_exists`,
    `too_many_regions` and `region_unusable`.
    """
    regions = regions_of(call)
    check_no_query(call)
    body = await read_body(call)
    new = parse_model(Received(body, JSON, JSON, None), NewRegion, MAX_REGION_BYTES)
    regions.register(call.caller.namespace, name, new.key, new.offset, new.byte_size)
    return Answer()


@router.post("/region/{name}/unregister", summary="Unregister a region", response_class=Response)
@access(SCOPE)
async def unregister_region(call: CurrentCall, name: str) -> Answer:
    """The object stays. An unknown name is no error."""
    regions_of(call).unregister(call.caller.namespace, name)
    return Answer()


@router.post("/unregister", summary="Unregister all regions", response_class=Response)
@access(SCOPE)
async def unregister_regions(call: CurrentCall) -> Answer:
    """All regions of the caller's namespace."""
    regions_of(call).unregister(call.caller.namespace)
    return Answer()


@cuda.get("/status")
@access(SCOPE)
async def cuda_regions(call: CurrentCall) -> JsonAnswer[list[RegionStatus]]:
    """No regions."""
    regions_of(call)
    return JsonAnswer([])


@cuda.get("/region/{name}/status")
@access(SCOPE)
async def cuda_region(call: CurrentCall, name: str) -> Answer:
    """Raise `UnknownRegion`."""
    regions_of(call)
    raise UnknownRegion(f"There is no region {shown(name)} of CUDA; this server has none")


@cuda.post("/region/{name}/register")
@access(SCOPE)
async def register_cuda_region(call: CurrentCall, name: str) -> Answer:
    """Raise `RegionUnusable`."""
    regions_of(call)
    raise RegionUnusable(f"This server has no CUDA; register {shown(name)} at {router.prefix}")


@cuda.post("/unregister")
@cuda.post("/region/{name}/unregister")
@access(SCOPE)
async def unregister_cuda_regions(call: CurrentCall) -> Answer:
    """Nothing is left to do."""
    regions_of(call)
    return Answer()


def _described(region: Region) -> RegionStatus:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}


def regions_of(call: Call) -> Regions:
    """Return the regions of shared memory. Raises `NotFound` if the server does not offer shared memory."""
    if call.regions is None:
        raise NotFound("This server does not offer shared memory; GRADSERVE_SHARED_MEMORY=true lets it do so")
    return call.regions


def read_inputs(call: Call, job: Job, shared: Mapping[str, SharedInput]) -> Job:
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
    return job._replace(size=job.size + len(memory), tensors=tensors, shared=memory)


def write_outputs(call: Call, parts: Mapping[str, Part], outputs: Mapping[str, Array]) -> None:
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
