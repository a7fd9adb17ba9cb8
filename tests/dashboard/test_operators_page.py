"""The view of the operators: it runs examples, shows the same call for a shell and for Python, and draws curves."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from playwright.sync_api import Locator, Page, expect

from service.api.operators.onnx_names import NOT_SERVED
from service.kernels import OPERATORS
from tests.dashboard.conftest import EVIL, LOOKS, PHONE, Faults, Open, asked_by, findings, sign_in

CURVES = ["ReluGrad", "LeakyReluGrad", "SigmoidGrad", "TanhGrad", "QuickGeluGrad"]

ANSWER = """panel => Object.fromEntries([...panel.querySelectorAll(".tensor")].map(tensor => [
  tensor.querySelector("h3 code").textContent,
  [...tensor.querySelectorAll("td:not(:empty)")].map(td => td.textContent)]))"""

RUN_ALL = """async names => {
  const main = document.querySelector("main"), all = [], parts = { childList: true, subtree: true };
  const change = () => new Promise(
    done => new MutationObserver((_, watch) => done(watch.disconnect())).observe(main, parts));
  for (const name of names) {
    location.hash = `#/operators/${name}`;
    while (main.querySelector("h1")?.textContent !== name) await change();
    const panel = main.querySelector(".answer"), status = panel.querySelector("[role=status]");
    const before = status.textContent;
    main.querySelector("button.main").click();
    while (status.textContent === before) await change();
    all.push([status.textContent, panel.textContent, (ANSWER)(panel)]);
  }
  return all; }""".replace("ANSWER", ANSWER)
"""Press Run at each operator, and return what its panel shows. One program costs less than a step for each."""


def show(open_page: Open, server: str, name: str, **options: Any) -> Page:
    page = open_page(f"{server}#/operators/{name}", **options)
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    return page


def go(page: Page, name: str) -> None:
    """Show another operator. The page is not loaded again, which costs less."""
    page.evaluate("name => { location.hash = `#/operators/${name}` }", name)
    expect(page.get_by_role("heading", level=1)).to_have_text(name)


def panel(page: Page) -> Locator:
    return page.get_by_role("region", name="Answer")


def run(page: Page, status: int = 200) -> dict[str, list[str]]:
    """Press Run and return the numbers shown, by output."""
    said = panel(page).get_by_role("status")
    before = said.inner_text()  # it has the id of a request
    page.get_by_role("button", name="Run").click()
    expect(said).not_to_have_text(before)
    expect(said).to_contain_text(f"{status} in ")
    shown: dict[str, list[str]] = panel(page).evaluate(ANSWER)
    return shown


def text_of(page: Page, title: str) -> str:
    return page.get_by_role("group", name=title).inner_text()


def numbers(texts: list[str]) -> list[float]:
    return [float({"true": "1", "false": "0"}.get(text, text)) for text in texts]


def test_the_list_has_every_operator_by_family_and_a_search(open_page: Open, server: str) -> None:
    page = open_page(f"{server}#/operators")
    main = page.get_by_role("main")
    links, headings = main.get_by_role("link"), main.get_by_role("heading", level=2)
    by_family = sorted(OPERATORS.values(), key=lambda operator: operator.family)
    expect(links).to_have_text([operator.name for operator in by_family])
    sizes = Counter(operator.family for operator in by_family)
    expect(headings).to_have_text(
        [*(f"{family}{size}" for family, size in sizes.items()), f"Not served{len(NOT_SERVED)}"]
    )
    expect(main).to_contain_text("dX = dY * (1 - Y * Y)")
    page.get_by_role("searchbox").fill("softmax")
    expect(links.filter(visible=True)).to_have_text([each.name for each in by_family if "Softmax" in each.name])
    expect(headings.filter(visible=True)).to_have_text(["Losses8", "Softmax4", "Not served3"])
    page.get_by_role("searchbox").fill("lambo")
    expect(headings.filter(visible=True)).to_have_text("Not served1")
    expect(main).to_contain_text(f"LambOptimizer{NOT_SERVED['LambOptimizer']}")
    page.get_by_role("searchbox").fill("1 + alpha * X")
    links.filter(visible=True).click()
    expect(page.get_by_role("heading", level=1)).to_have_text("QuickGeluGrad")
    beside = page.get_by_role("navigation", name="Operators")
    family = [each.name for each in by_family if each.family == "Activations"]
    expect(beside.get_by_role("link")).to_have_text(["All operators", *family])
    beside.locator("summary", has_text="Recurrent networks").press("Enter")
    beside.get_by_role("link", name="LSTMGrad").press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text("LSTMGrad")


def test_no_word_overlaps_another_on_a_phone(open_page: Open, server: str) -> None:
    """The names and types of tensors and attributes stay in their cells."""
    page = open_page(f"{server}#/operators", PHONE)
    cut = """() => [...document.querySelectorAll("table.signature :is(th, td)")].filter(cell => {
      const text = document.createRange();
      text.selectNodeContents(cell);
      return text.getBoundingClientRect().right > cell.getBoundingClientRect().right; }).map(cell => cell.innerText)"""
    for name in ["GRUTraining", "ResizeGrad", "AdamOptimizer", "SoftmaxCrossEntropyLossInternalGrad"]:
        go(page, name)
        assert page.evaluate(cut) == []
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_every_example_runs_and_shows_the_numbers_of_the_api(open_page: Open, server: str, http: httpx.Client) -> None:
    page = open_page(f"{server}#/operators")
    found = page.wait_for_function(RUN_ALL, arg=list(OPERATORS), timeout=60_000).json_value()
    for (name, operator), (status, text, shown) in zip(OPERATORS.items(), found, strict=True):
        assert status.startswith("200 in "), name
        params = dict(operator.example_attributes)
        answer = http.post(f"/v1/ops/{name}", json=dict(operator.example), params=params).raise_for_status().json()
        tensors = flat(answer)
        assert shown.keys() == tensors.keys()
        for output, tensor in tensors.items():
            assert numbers(shown[output]) == np.ravel(np.asarray(tensor["data"], float)).tolist()
            shape = f" [{', '.join(map(str, tensor['shape']))}]" if tensor["shape"] else ", a scalar"
            assert tensor["dtype"] + shape in text, name


def test_an_operator_says_its_formula_types_shapes_and_defaults(open_page: Open, server: str) -> None:
    page = show(open_page, server, "GRUTraining")
    expect(page.get_by_role("main")).to_contain_text("H' = (1 - z) * h + z * H at every step")
    table = page.get_by_role("group", name="Tensors and attributes")
    expect(table.get_by_role("row", name="W T [1, 3, 1]")).to_be_visible()
    expect(table.get_by_role("row", name="SL optional TSize [1]")).to_be_visible()
    expect(table.get_by_role("row", name="T float32, float16, bfloat16, float64")).to_be_visible()
    expect(table.get_by_role("row", name="HAll T [2, 1, 1, 1]")).to_be_visible()
    expect(table.get_by_role("row", name="linear_before_reset int 0")).to_be_visible()
    expect(table.get_by_role("row", name="clip float | None left out")).to_be_visible()
    expect(page.get_by_label("direction")).to_have_value("forward")


def test_the_answer_has_the_id_of_its_request(open_page: Open, server: str) -> None:
    page = show(open_page, server, "GatherGrad")
    with page.expect_response("**/v1/ops/GatherGrad?*") as answered:
        page.get_by_role("button", name="Run").click()
    answer = answered.value
    expect(panel(page).get_by_role("status")).to_contain_text(f"request {answer.headers['x-request-id']}")
    assert answer.request.headers["x-request-id"] == answer.headers["x-request-id"]


def curl(text: str, **environment: str) -> Any:
    done = subprocess.run(
        ["sh", "-c", text], capture_output=True, text=True, timeout=30, env={**os.environ, **environment}
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def python(text: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Run a program and return its variables."""
    for name in ("GRADSERVE_URL", "http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    space: dict[str, Any] = {}
    exec(compile(text, "page", "exec"), space)
    return space


def flat(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return results without groups: the tensor b of the group weights is weights.b."""
    found = {}
    for name, one in results.items():
        if isinstance(one, list):
            found.update({f"{name}.{number}": each for number, each in enumerate(one)})
        elif isinstance(one, dict) and not isinstance(one.get("dtype"), str):
            found.update({f"{name}.{member}": each for member, each in one.items()})
        else:
            found[name] = one
    return found


OTHERS = ["SGDOptimizerV2", "ConcatTraining", "SplitTraining", "AdamOptimizer", "AveragePoolGrad"]
"""Operators with groups, or with attributes that are required, lists, or words of Python."""


def test_the_calls_for_a_shell_and_for_python_give_the_same_answer(
    open_page: Open, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_page(f"{server}#/operators")
    for operator in ["GRUGrad", "InPlaceAccumulatorV2", "GatherGrad", *OTHERS]:
        go(page, operator)
        shown = run(page)
        by_curl = flat(curl(text_of(page, "curl")))
        variables = python(text_of(page, "Python"), monkeypatch)
        by_python = flat({name: variables[name] for name in OPERATORS[operator].output_names})
        assert by_curl.keys() == shown.keys() == by_python.keys(), operator
        for output, texts in shown.items():
            value = by_python[output]
            assert numbers(texts) == np.ravel(np.asarray(by_curl[output]["data"], float)).tolist(), operator
            assert value.dtype.name == by_curl[output]["dtype"], operator
            assert value.tolist() == np.asarray(by_curl[output]["data"], value.dtype).tolist(), operator


def test_the_calls_have_what_the_reader_wrote(open_page: Open, server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    page = show(open_page, server, "LeakyReluGrad")
    page.get_by_label("dtype of dY").select_option("bfloat16")
    expect(page.get_by_label("dtype of Y")).to_have_value("bfloat16")
    page.get_by_label("dY", exact=True).fill('[1.5,\n "NaN", "-Infinity", -2e3]')
    page.get_by_label("Y", exact=True).fill('{"dtype": "bfloat16", "shape": [4], "base64": "gD+APwAAAAA="}')
    page.get_by_label("alpha", exact=True).first.fill("0.25")
    shown = run(page)["dX"]
    assert shown == ["1.5", "NaN", "-Infinity", "-500"]
    assert "alpha=0.25" in text_of(page, "curl")
    by_curl = curl(text_of(page, "curl"))["dX"]
    bits = np.frombuffer(base64.b64decode(by_curl["base64"]), "<u2").astype(np.uint32) << 16
    assert by_curl["dtype"] == "bfloat16"
    assert bits.view(np.float32).astype(str).tolist() == ["1.5", "nan", "-inf", "-500.0"]
    found = python(text_of(page, "Python"), monkeypatch)["dX"]
    assert found.dtype.name == "bfloat16"
    assert found.astype(float).tolist()[::3] == [1.5, -500.0]
    assert np.isnan(found.astype(float)[1])


def test_whole_numbers_keep_their_digits(open_page: Open, server: str) -> None:
    page = show(open_page, server, "BroadcastGradientArgs")
    page.get_by_label("A_shape", exact=True).fill("[9007199254740993]")
    page.get_by_label("B_shape", exact=True).fill("[9007199254740993]")
    page.get_by_role("button", name="Run").click()
    expect(panel(page).get_by_role("status")).to_contain_text("200 in ")  # ...2 and ...3 would not broadcast
    assert text_of(page, "curl").count("9007199254740993") == 2
    assert text_of(page, "Python").count("9007199254740993") == 2


def test_no_text_leaves_its_quotes(
    open_page: Open, server: str, faults: Faults, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.statuses = {422}
    monkeypatch.chdir(tmp_path)
    page = show(open_page, server, "GRUTraining")
    for word in ["it's", "$(touch hacked)", "`touch hacked`", "'; touch hacked; '", '"\\', EVIL]:
        page.get_by_label("activations", exact=False).fill(word)
        run(page, status=422)
        detail = panel(page).get_by_role("alert").locator("p").inner_text()
        assert curl(text_of(page, "curl"))["detail"] == detail
        with pytest.raises(ValueError, match="activations") as raised:
            python(text_of(page, "Python"), monkeypatch)
        assert str(raised.value) == detail
        assert list(tmp_path.iterdir()) == [], word
    assert page.locator("img[src=x], main script").count() == 0
    assert page.title() == "GRUTraining – gradserve"


def test_an_error_stands_beside_the_field_that_it_names(open_page: Open, server: str, faults: Faults) -> None:
    faults.statuses = {422}
    page = show(open_page, server, "ReluGrad")
    page.get_by_label("X", exact=True).fill("[1, 2, 3]")
    run(page, status=422)
    words = "X has shape [3], but must have the shape of dY, [2, 2]"
    expect(page.get_by_label("X", exact=True)).to_have_accessible_description(words)
    expect(page.get_by_label("X", exact=True)).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_label("dY", exact=True)).not_to_have_attribute("aria-invalid", "true")
    expect(panel(page).get_by_role("alert")).to_contain_text("Tensor shapes do not fit together")
    page.get_by_label("X", exact=True).fill("[[1, 2], [3, -4]]")
    expect(page.get_by_label("X", exact=True)).to_have_accessible_description("")
    assert run(page) == {"dX": ["1", "-2", "3", "0"]}


def test_an_attribute_that_the_server_refuses_is_marked(open_page: Open, server: str, faults: Faults) -> None:
    faults.statuses = {422}
    page = show(open_page, server, "LeakyReluGrad")
    alpha = page.get_by_role("textbox", name="alpha")
    alpha.fill(EVIL)
    run(page, status=422)
    expect(alpha).to_have_attribute("aria-invalid", "true")
    expect(panel(page).get_by_role("alert")).to_contain_text("but must be a number")
    assert page.locator("img[src=x], main script").count() == 0


def test_what_is_not_json_is_not_sent(open_page: Open, server: str) -> None:
    page = show(open_page, server, "SoftmaxGrad")
    asked = asked_by(page)
    page.get_by_label("Y", exact=True).fill('1, "dY": 2')
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".field", has=page.get_by_label("Y", exact=True))).to_contain_text("This is not JSON")
    expect(page.get_by_role("group", name="curl")).to_have_text("An input is not JSON yet.")
    expect(page.get_by_role("button", name="Copy curl")).to_be_disabled()
    page.get_by_label("Y", exact=True).fill("")
    page.get_by_role("button", name="Run").click()
    expect(page.locator(".field", has=page.get_by_label("Y", exact=True))).to_contain_text("Y is empty")
    assert asked == []


def test_a_required_attribute_and_a_tensor_of_a_group_are_told(open_page: Open, server: str, faults: Faults) -> None:
    faults.statuses = {422}
    page = show(open_page, server, "ConcatTraining")
    axis, inputs = page.get_by_role("textbox", name="axis"), page.get_by_role("textbox", name="inputs")
    axis.fill("")
    page.get_by_role("button", name="Run").click()
    expect(panel(page)).to_contain_text("Nothing was sent.")
    expect(axis).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("main")).to_contain_text("axis is empty, but required")
    axis.fill("0")
    inputs.fill('{"a": [1], "b": ["x"]}')
    run(page, status=422)
    expect(inputs).to_have_attribute("aria-invalid", "true")
    expect(panel(page).get_by_role("alert")).to_contain_text("inputs.b[0] is 'x'")


def test_the_example_comes_back(open_page: Open, server: str) -> None:
    page = show(open_page, server, "TanhGrad")
    page.get_by_label("Y", exact=True).fill("[1]")
    page.get_by_role("button", name="Fill in the example").click()
    assert json.loads(page.get_by_label("Y", exact=True).input_value()) == OPERATORS["TanhGrad"].example["Y"]


def test_a_large_answer_is_cut_and_says_so(open_page: Open, server: str) -> None:
    page = show(open_page, server, "ReluGrad")
    for name in ("dY", "X"):
        page.get_by_label(name, exact=True).fill(json.dumps(np.ones((300, 15)).tolist()))
    assert len(run(page)["dX"]) == 24 * 12
    expect(panel(page)).to_contain_text("276 more rows and 3 more columns are not shown")


def test_the_copy_button_copies_the_call(open_page: Open, server: str) -> None:
    page = show(open_page, server, "ReluGrad", permissions=["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy curl").click()
    expect(page.get_by_role("status").filter(has_text="curl: copied")).to_be_attached()
    assert page.evaluate("navigator.clipboard.readText()") == page.get_by_role("group", name="curl").text_content()


def points(page: Page) -> dict[float, float]:
    """Return the curve by the table of its points."""
    cells = page.locator("td[data-x]").evaluate_all("all => all.map(cell => [cell.dataset.x, cell.textContent])")
    return {float(x): float(y) for x, y in cells}


def test_the_curve_is_that_of_the_server(open_page: Open, server: str, http: httpx.Client) -> None:
    page = open_page(f"{server}#/operators")
    some = [-5.0, -1.0, 0.0, 0.25, 1.0, 5.0]
    x = np.array(some)
    forward = {
        "LeakyReluGrad": np.where(x > 0, x, 0.01 * x),
        "SigmoidGrad": 1 / (1 + np.exp(-x)),
        "TanhGrad": np.tanh(x),
    }
    for name in CURVES:
        go(page, name)
        page.get_by_role("button", name="As numbers").click()
        expect(page.locator("td[data-x]")).to_have_count(41)
        shown = points(page)
        given = {"Y": forward[name]} if name in forward else {"X": x}
        tensors = {"dY": np.ones_like(x), **given}
        body = {key: {"dtype": "float64", "data": value.tolist()} for key, value in tensors.items()}
        answer = http.post(f"/v1/ops/{name}", json=body).raise_for_status().json()["dX"]["data"]
        np.testing.assert_allclose([shown[each] for each in some], answer, rtol=1e-12, atol=1e-15, err_msg=name)
        page.get_by_role("button", name="As numbers").click()
        label = page.get_by_role("img", name="dX over X").get_attribute("aria-label")
        assert f"{float(f'{shown[1.0]:.3g}'):g} at 1" in str(label)
        page.locator(".curve .u-over").hover(position={"x": 1, "y": 20})
        said = page.locator(".reading").inner_text()
        assert float(said.removeprefix("X = -5   dX = ")) == shown[-5.0]
    go(page, "SoftmaxGrad_13")  # not element-wise
    assert page.locator(".curve").count() == 0


def test_the_curve_follows_the_attribute_and_its_slider(open_page: Open, server: str) -> None:
    page = show(open_page, server, "LeakyReluGrad")
    page.get_by_role("button", name="As numbers").click()
    page.get_by_role("textbox", name="alpha").fill("0.5")
    expect(page.locator('td[data-x="-1"]')).to_have_text("0.5")
    slider = page.get_by_role("slider", name="alpha")
    expect(slider).to_have_value("0.5")
    slider.press("ArrowRight")
    expect(page.locator('td[data-x="-1"]')).to_have_text("0.51")
    expect(page.get_by_role("textbox", name="alpha")).to_have_value("0.51")
    assert "alpha=0.51" in text_of(page, "curl")


def test_an_operator_that_does_not_exist(open_page: Open, server: str) -> None:
    page = open_page(f"{server}#/operators/{EVIL}")
    expect(page.get_by_role("alert")).to_contain_text("Operator not found")
    expect(page.get_by_role("alert")).to_contain_text(EVIL)
    assert page.locator("img[src=x], main script").count() == 0


def test_a_call_names_the_key_only_by_its_variable(
    open_page: Open, locked: str, keys: dict[str, str], faults: Faults, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults.statuses = {401}
    key = keys["ops"]
    page = open_page(f"{locked}#/operators/ReluGrad")
    sign_in(page, key)
    assert run(page) == {"dX": ["1", "0", "3", "0"]}
    text = text_of(page, "curl")
    assert '-H "Authorization: Bearer $GRADSERVE_API_KEY"' in text
    assert key not in page.content()
    assert curl(text, GRADSERVE_API_KEY=key)["dX"]["data"] == [[1, 0], [3, 0]]
    monkeypatch.setenv("GRADSERVE_API_KEY", key)
    assert python(text_of(page, "Python"), monkeypatch)["dX"].tolist() == [[1, 0], [3, 0]]


def test_a_key_without_the_scope_learns_so(open_page: Open, locked: str, keys: dict[str, str], faults: Faults) -> None:
    faults.statuses = {401, 403}
    page = open_page(f"{locked}#/operators")
    sign_in(page, keys["reader"])
    expect(page.get_by_role("alert")).to_contain_text("needs ops")


@LOOKS
def test_axe_finds_nothing(open_page: Open, server: str, scheme: str, size: tuple[int, int], faults: Faults) -> None:
    faults.statuses = {422}
    page = open_page(f"{server}#/operators", size, color_scheme=scheme)
    expect(page.get_by_role("main").get_by_role("link")).to_have_count(len(OPERATORS))
    assert findings(page) == []
    go(page, "LeakyReluGrad")
    page.get_by_label("Y", exact=True).fill("[1]")
    run(page, status=422)
    assert findings(page) == []
    go(page, "GRUGrad")
    run(page)
    assert findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
