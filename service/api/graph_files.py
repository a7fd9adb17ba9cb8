"""The files of graphs: as they were uploaded, or with the values of buffers in place of their weights."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, Field

from service.api.buffers.preconditions import known_tag
from service.api.http.answer import Answer
from service.api.http.call import Call
from service.api.http.offload import INLINE_BYTES
from service.api.http.routing import answer_header
from service.api.operators.planned import Planned, planned
from service.api.operators.sources import snapshots_of
from service.buffers.graphs import digest_of
from service.buffers.names import NAME, check_name
from service.errors import InvalidParameter, shown
from service.kernels import Workspace, workspace

MEDIA_TYPES = ("application/octet-stream", "application/onnx", "application/x-onnx")
"""The media types of a model. OpenAPI shows the first: generators of clients know no others."""

VERSION_HEADERS = {
    **answer_header("Parameters-Version", "With `parameters`: the number of changes of its buffers, the least."),
    **answer_header("Statistics-Version", "With `statistics`: the same."),
}


class ModelQuery(BaseModel):
    """Which values a model's file has."""

    parameters: str | None = Field(
        None, description="`net.p.*`: the values of the buffers of this prefix in place of the model's parameters."
    )
    statistics: str | None = Field(None, description="`net.s.*`: the same for its running means and variances.")


async def file_of(call: Call, name: str, query: ModelQuery) -> Answer:
    """Return the answer with a graph's file. Raises `UnknownGraph`, `UnknownBuffer` and what `Graph.overwrite` raises.

    The buffers are read at one moment. Their names begin with a prefix, and end with the name of a weight.
    """
    call.graph, content = name, None
    if prefixes := {group: _prefix(group, text) for group, text in query if text is not None}:
        call.caller.require("buffers:read")
        found = await planned(call, name)
        content, fields = await call.offload(False, _trained, call, found, prefixes)
    else:
        stored = await call.look_up(1, call.store.graph, check_name(name))
        fields = {"ETag": f'"{stored.digest}"'}
    if known_tag(call, fields["ETag"]):
        return Answer(status=304, fields=fields)
    if content is None:
        call.reserve(stored.nbytes)
        at_once = stored.nbytes <= INLINE_BYTES and not call.store.blocks
        content = await call.offload(at_once, call.store.graph_content, stored)
    return Answer([content], MEDIA_TYPES[0], fields)


def _prefix(parameter: str, text: str) -> str:
    if not (text.endswith("*") and NAME.fullmatch(text[:-1] or "-")):
        problem = f"{parameter} is {shown(text)}, but must be a prefix of buffers and *, such as net.p.*"
        raise InvalidParameter(problem, parameter=parameter)
    return text[:-1]


def _trained(call: Call, planned: Planned, prefixes: Mapping[str, str]) -> tuple[memoryview, dict[str, str]]:
    """Return the file with the values of buffers, and the headers of the answer."""
    signature, buffers = planned.graph.signature(), dict[str, str]()
    for group, prefix in prefixes.items():
        if not signature[group]:
            raise InvalidParameter(f"{group} is {shown(prefix)}*, but the model has none", parameter=group)
        buffers |= {f"{group}.{name}": check_name(prefix + name) for name in signature[group]}
    found = dict(zip(buffers, snapshots_of(call, [*buffers.values()], None, 1), strict=True))
    call.reserve(2 * planned.stored.nbytes)
    content = bytearray(call.store.graph_content(planned.stored))
    with workspace(Workspace(claim=call.reserve_in_time)):
        planned.graph.overwrite(content, {name: one.value for name, one in found.items()})
    file = memoryview(content).toreadonly()
    fields = {"ETag": f'"{digest_of(file)}"'}
    for group in prefixes:
        versions = [one.record.version for name, one in found.items() if name.startswith(f"{group}.")]
        fields[f"{group.title()}-Version"] = str(min(versions))
    return file, fields
