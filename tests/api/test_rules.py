"""The table of rules: a request and a file of `import` may have the same values of each rule, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file

from service.api.buffers.models import Metadata
from service.api.buffers.receipt_models import Receipt
from service.buffers.specs import RULES
from service.buffers.transfer import read
from service.errors import MalformedBody
from service.limits import Limits
from tests.api.calls import add, create, fresh

NUMBERS = ["null", "true", '"1"', "-1", "0", "0.5", "1", "1.5", "1e400", "1000", "1001", "1000000000", "1000000001"]
NAMES = ["[]", '["a"]', '["a", "a"]', '[""]', "[3]", "{}", json.dumps([str(number) for number in range(1001)])]
WORDS = ['"allow"', '"reject"', '"maybe"', '["allow"]']

LIMITS = Limits(max_tensor_bytes=1 << 20)


def imported(path: Path, spec: str) -> dict[str, Any] | None:
    """Return the specification that the file has after its import; None if it is refused."""
    state = f'{{"spec": {spec}, "step": 0, "version": 0, "count": 0, "weight": 0, "created": 1}}'
    save_file({"a": np.zeros(2, np.float32)}, path, {"buffers": f'{{"a": {state}}}'})
    try:
        (restored,) = read(path, LIMITS, 200).buffers
    except MalformedBody:
        return None
    return restored.record.spec.as_json()


@pytest.mark.parametrize("name", RULES)
def test_requests_and_files_keep_to_the_table(client: httpx.Client, name: str, tmp_path: Path) -> None:
    rule, taken = RULES[name], []
    needed = ', "deadline_seconds": 1' if name == "min_count" else ""  # the only rule that asks for another
    for text in [*NUMBERS, *NAMES, *WORDS]:
        spec = f'{{"shape": [2], "dtype": "float32", "{name}": {text}{needed}}}'
        answer = client.put(f"/v1/buffers/{fresh('rule')}", content=spec)
        known = imported(tmp_path / "file", spec)
        assert (answer.status_code == 201) is (known is not None), text
        value = json.loads(text)
        if known is None:
            assert answer.json()["code"] == "invalid_parameter"
            assert not rule.allows(value) or text == '["a", "a"]' or text == '[""]'
        else:
            assert known == {member: answer.json()[member] for member in known}
            assert rule.allows(value) or (value is None and rule.default is None)
            taken.append(text)
    assert taken
    assert len(taken) < len([*NUMBERS, *NAMES, *WORDS])


def test_a_rule_that_can_change_keeps_to_the_table(client: httpx.Client) -> None:
    name = create(client, fresh("rule"))
    for member in RULES.keys() - {"nonfinite", "keep", "life"}:
        for text in ("null", '"1"', "0", "[]", '[""]'):
            status = client.patch(f"/v1/buffers/{name}", content=f'{{"{member}": {text}}}').status_code
            assert status == (200 if text == "null" and RULES[member].default is None else 422), (member, text)


def test_a_file_with_more_contributors_than_a_step_takes_is_refused(tmp_path: Path) -> None:
    names = [str(number) for number in range(1001)]
    spec = {"shape": [2], "dtype": "float32", "keep": 2000, "contributors": names}
    assert imported(tmp_path / "file", json.dumps(spec)) is None
    assert imported(tmp_path / "file", json.dumps({**spec, "contributors": names[1:]})) is not None


def test_metadata_and_receipts_have_the_members_of_their_models(client: httpx.Client) -> None:
    name = create(client, fresh("rule"))
    assert client.get(f"/v1/buffers/{name}").json().keys() == Metadata.model_fields.keys()
    add(client, name, [1, 2])
    taken = client.post(f"/v1/buffers/{name}/take").json()
    assert taken.keys() == Receipt.model_fields.keys() - {"created", "coded"}  # these are for `set`, and for 8 bits
