from __future__ import annotations

import base64
import copy
import hashlib
import json
import re
from html.parser import HTMLParser
from importlib import resources

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onnx_sparseconv.errors import ReportError
from onnx_sparseconv.report import folder_page, read_folder, read_report, report_page
from tests.report import documents

_VOID = {"meta", "wbr", "input", "link", "img", "br"}
_FETCHES = {"src", "srcset", "data", "action", "poster", "background"}


class _Page(HTMLParser):
    """Reads a page strictly: every element is closed, in order."""

    def __init__(self, page):
        super().__init__()
        self.open, self.elements, self.ids, self.policy, self.words = [], [], [], "", []
        self.hashes = {}
        self.feed(page)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.elements.append((tag, found))
        self.ids += [found["id"]] if "id" in found else []
        if found.get("http-equiv") == "Content-Security-Policy":
            self.policy = found["content"]
        if tag not in _VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] in ("script", "style"):
            digest = base64.b64encode(hashlib.sha256(data.encode()).digest()).decode()
            self.hashes[self.open[-1]] = f"'sha256-{digest}'"
        else:
            self.words.append(data)

    @property
    def text(self):
        return " ".join("".join(self.words).split())


def _page(document, **more):
    return _Page(report_page(read_report(document, **more)))


def _require_safe(page):
    """Nothing is fetched, nothing foreign runs, and the policy says so."""
    tags = [tag for tag, _ in page.elements]
    assert tags.count("script") == tags.count("style") == 1
    assert not {"link", "img", "iframe", "object", "embed", "form", "base", "image", "use"} & set(tags)
    for tag, attributes in page.elements:
        assert not _FETCHES & attributes.keys(), (tag, attributes)
        assert not [name for name in attributes if name.startswith("on") or name == "style"], (tag, attributes)
    assert page.policy.startswith("default-src 'none';")
    assert f"script-src {page.hashes['script']}" in page.policy
    assert f"style-src {page.hashes['style']}" in page.policy
    assert "unsafe" not in page.policy
    assert len(set(page.ids)) == len(page.ids)


@pytest.mark.parametrize(
    "document",
    [
        documents.conversion(),
        documents.conversion([]),
        documents.conversion(tuned=documents.decisions()),
        documents.conversion(tuned=documents.decisions(batches=(1, 8))),
        documents.conversion(tuned=documents.decisions(whole=False, peaks=None)),
        documents.conversion(model=None, error="bad file"),
        documents.many(500),
        documents.many(0, names=documents.HOSTILE),
    ],
    ids=["no times", "no layer", "tuned", "two cases", "no check", "error", "500 layers", "hostile names"],
)
def test_every_page_is_whole_and_safe(document):
    page = _page(document)
    _require_safe(page)
    assert page.elements[0][0] == "html"
    assert ("meta", {"charset": "utf-8"}) in page.elements


def test_the_gain_stands_at_the_top():
    page = _page(documents.conversion(tuned=documents.decisions()), verify=documents.verification())
    text = page.text
    assert text.index("2.00\u00d7 faster.") < text.index("Time per layer")
    assert "1 of 1 convolution became sparse. A run takes 500 \u00b5s instead of 1.00 ms at x 1x3x224x224." in text
    for words in (
        "1.90\u00d7 to 2.10\u00d7 in 8 of 10 rounds",
        "250 kB",
        "25.0% of 1.00 MB",
        "2e-07",
        "an abacus",
        "0.1.0",
    ):
        assert words in text
    for title in ("Time per layer", "Speed-up against sparsity", "Roofline", "Cumulative gain"):
        assert title in text


def test_no_gain_is_said_as_loudly():
    tuned = documents.decisions()
    tuned["whole_model"] |= {"gain": False, "text": "no gain as a whole: it takes 7 us"}
    text = _page(documents.conversion([documents.layer(sparse=False)], tuned)).text
    assert "No gain as a whole. No convolution became sparse (too dense: 1 layer of 1)" in text
    assert "\u00d7 faster." not in text


def test_without_times_one_sentence_says_how_to_get_them():
    page = _page(documents.conversion())
    assert page.text.count("--tune") == 1
    assert "svg" not in [tag for tag, _ in page.elements]
    assert "Dense" not in [attributes.get("title") for _, attributes in page.elements]


def test_hostile_names_are_shown_and_do_nothing():
    page = _page(documents.many(0, names=documents.HOSTILE))
    _require_safe(page)
    for name in ("<script>alert(1)</script>", 'conv" onmouseover="alert(1)', "&lt;b&gt;", "\u0634\u0628\u0643\u0629"):
        assert name in page.text
    assert "\u202e" not in page.text


def _schemes():
    """The colours of each scheme: light, dark, and on paper."""
    style = resources.files("onnx_sparseconv.report").joinpath("page.css").read_text()
    light, dark, paper = (
        dict(re.findall(r"--([\w-]+): (#\w+)", block)) for block in re.findall(r":root \{(.*?)\}", style, re.S)
    )
    assert len({frozenset(light), frozenset(dark), frozenset(paper)}) == 1
    return {"light": light, "dark": dark, "paper": paper}


def _luminance(colour):
    digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
    parts = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark", "paper"])
def test_text_and_marks_stand_out(scheme):
    colours = _schemes()[scheme]

    def contrast(*names):
        low, high = sorted(_luminance(colours[name]) for name in names)
        return (high + 0.05) / (low + 0.05)

    # As WCAG 2 asks for: text, and what has to be told apart in pictures.
    for ink in ("ink", "soft", "sparse", "dense", "good", "bad"):
        for ground in ("paper", "card", "wash"):
            assert contrast(ink, ground) >= 4.5, (ink, ground)
    for fill in ("dense", "sparse-fill", "line"):
        assert contrast(fill, "card") >= 3, fill
    # Dense and sparse bars differ for those who see no colours.
    assert contrast("dense-fill", "sparse-fill") >= 1.15


def test_tables_are_accessible():
    page = _page(documents.many(5))
    heads = [attributes for tag, attributes in page.elements if tag == "th"]
    assert {attributes["scope"] for attributes in heads} == {"col", "row"}
    assert all(attributes["aria-sort"] == "none" for attributes in heads if attributes["scope"] == "col")
    assert [tag for tag, _ in page.elements].count("caption") == 1
    svgs = [attributes for tag, attributes in page.elements if tag == "svg" and "role" in attributes]
    assert len(svgs) == 4
    for attributes in svgs:
        assert set(attributes["aria-labelledby"].split()) <= set(page.ids)


def test_the_table_has_all_layers_with_times_and_reasons():
    page = _page(documents.many(500))
    rows = [attributes for tag, attributes in page.elements if tag == "tr"]
    assert len(rows) == 501
    # What needs JavaScript is made by it.
    assert not {"button", "input"} & {tag for tag, _ in page.elements}
    assert "/stage49/conv499/Conv" in page.text


def test_several_cases_have_charts_and_columns_of_their_own():
    tuned = documents.decisions([documents.decision(dense_us=(100.0, 700.0), sparse_us=(50.0, 90.0))], batches=(1, 8))
    page = _page(documents.conversion(tuned=tuned))
    assert page.text.count("Each layer alone") == 2
    assert "Dense, alone, x 8x3x224x224" in page.text
    assert "700 \u00b5s" in page.text


def test_a_summary_links_to_the_pages_of_its_models():
    bad = documents.conversion(model=None, source="bad.onnx", error="is <not> ONNX")
    old = {**documents.conversion(tuned=documents.decisions()), "up_to_date": True}
    folder = read_folder([old, bad], title="models", pages=["reports/a b#?%.html", ""])
    page = _Page(folder_page(folder))
    _require_safe(page)
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert links == ["reports/a%20b%23%3F%25.html"]
    for words in ("1 of 2 models converted.", "1 failed.", "is <not> ONNX", "nothing has changed since", "2.00\u00d7"):
        assert words in page.text


def test_one_page_for_several_models():
    folder = read_folder([documents.many(3), documents.many(2)], title="models", pages=["#model-1", "#model-2"])
    page = _Page(folder_page(folder, whole=True))
    _require_safe(page)
    links = [attributes["href"] for tag, attributes in page.elements if tag == "a"]
    assert [link[1:] for link in links] == [name for name in page.ids if re.fullmatch(r"model-\d", name)]


JSON = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def _places(value, path=()):
    yield path
    if isinstance(value, (dict, list)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _places(item, (*path, key))


WHOLE = documents.conversion(tuned=documents.decisions(batches=(1, 8)))
PLACES = [path for path in _places(WHOLE) if path]


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(PLACES), JSON)
def test_whatever_stands_in_a_document_it_becomes_a_page_or_is_refused(path, value):
    document = copy.deepcopy(WHOLE)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    owner[path[-1]] = value
    try:
        page = _page(json.loads(json.dumps(document)))
    except ReportError:
        return
    _require_safe(page)
