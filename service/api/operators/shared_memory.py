"""`/v2/systemsharedmemory`: Triton's extension with which clients on the same machine register shared memory."""

from __future__ import annotations

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response
from typing_extensions import TypedDict

from service.api.buffers.request import Received, parse_model
from service.api.http.answer import JSON, Answer, JsonAnswer
from service.api.http.body import read_body
from service.api.http.call import CurrentCall
from service.api.http.negotiation import check_no_query
from service.api.http.openapi import body
from service.api.http.routing import access
from service.api.operators.shared_tensors import SCOPE, regions_of
from service.codecs.parts import MAX_BYTES
from service.host.shared_memory import Region

router = APIRouter(prefix="/v2/systemsharedmemory", tags=["open inference protocol"])

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


@router.get("/status", summary="List the regions", operation_id="regions")
@access(SCOPE)
async def statuses(call: CurrentCall) -> JsonAnswer[list[RegionStatus]]:
    """The regions of the caller's namespace. 404 unless GRADSERVE_SHARED_MEMORY is true, as for all requests here."""
    return JsonAnswer(list(map(_described, regions_of(call).all(call.caller.namespace))))


@router.get("/region/{name}/status", summary="Describe a region", operation_id="region")
@access(SCOPE)
async def status(call: CurrentCall, name: str) -> JsonAnswer[list[RegionStatus]]:
    """A list of one region. Raises `unknown_region`."""
    return JsonAnswer([_described(regions_of(call).find(call.caller.namespace, name))])


@router.post(
    "/region/{name}/register",
    summary="Register a region",
    operation_id="register_region",
    dependencies=[body(NewRegion)],
    response_class=Response,
)
@access(SCOPE)
async def register(call: CurrentCall, name: str) -> Answer:
    """The object must be a regular file in /dev/shm that the server may open. Raises `region_exists`,
    `too_many_regions` and `region_unusable`.
    """
    regions = regions_of(call)
    check_no_query(call)
    body = await read_body(call)
    new = parse_model(Received(body, JSON, JSON, None), NewRegion, MAX_REGION_BYTES)
    regions.register(call.caller.namespace, name, new.key, new.offset, new.byte_size)
    return Answer()


@router.post(
    "/region/{name}/unregister",
    summary="Unregister a region",
    operation_id="unregister_region",
    response_class=Response,
)
@access(SCOPE)
async def unregister(call: CurrentCall, name: str) -> Answer:
    """The object stays. An unknown name is no error."""
    regions_of(call).unregister(call.caller.namespace, name)
    return Answer()


@router.post(
    "/unregister", summary="Unregister all regions", operation_id="unregister_regions", response_class=Response
)
@access(SCOPE)
async def unregister_all(call: CurrentCall) -> Answer:
    """All regions of the caller's namespace."""
    regions_of(call).unregister(call.caller.namespace)
    return Answer()


def _described(region: Region) -> RegionStatus:
    return {"name": region.name, "key": region.key, "offset": region.offset, "byte_size": region.byte_size}
