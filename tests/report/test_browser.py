"""The page in a real browser: it sorts, filters, fetches nothing, and fits phones and paper."""

from __future__ import annotations

import http.server
import threading

import pytest

from onnx_sparseconv.report import read_report, report_page
from tests.report import documents
from tests.support.browser import DARK, LIGHT, ask, chromium, needs_browser

pytestmark = needs_browser
ROWS = "Array.from(document.querySelector('tbody').rows, (r) => r.cells[1].textContent.trim().split('64')[0].trim())"
CLICK = "const click = (n) => document.querySelectorAll('thead th')[n].querySelector('button').click();\n"


@pytest.fixture
def profile(tmp_path):
    return tmp_path / "profile"


@pytest.fixture
def page(tmp_path):
    """A page of layers whose order in the model is that of no column."""
    names = ["b", "c10", "c9", "a"]
    layers = [
        documents.layer(name, sparsity=sparsity, sparse=number != 1)
        for number, (name, sparsity) in enumerate(zip(names, (0.9, 0.8, 0.95, None), strict=True))
        if sparsity is not None
    ]
    layers.append(documents.layer("a", sparsity=0.5) | {"sparsity": None, "nonzeros": None})
    tuned = [
        documents.decision(name, sparse=name != "c10", dense_us=(100.0 * n,)) for n, name in enumerate(names, start=1)
    ]
    return _write(tmp_path, documents.conversion(layers, documents.decisions(tuned)))


def _write(directory, document):
    path = directory / "page.html"
    path.write_text(report_page(read_report(document)), encoding="utf-8")
    return path


def _column(title):
    return f"Array.from(document.querySelectorAll('thead th')).findIndex((h) => h.textContent === '{title}')"


@pytest.mark.parametrize(
    ("title", "clicks", "expected"),
    [
        ("Layer", 1, "a,b,c9,c10 ascending"),
        ("Layer", 2, "c10,c9,b,a descending"),
        ("Zeros", 1, "c9,b,c10,a descending"),
        ("Zeros", 2, "c10,b,c9,a ascending"),
        ("Dense", 1, "a,c9,c10,b descending"),
        ("#", 2, "b,c10,c9,a ascending"),
        ("Runs", 1, "c10,b,c9,a ascending"),
    ],
)
def test_a_click_on_a_header_sorts(page, profile, title, clicks, expected):
    script = (
        f"{CLICK}const n = {_column(title)};\nfor (let i = 0; i < {clicks}; i++) click(n);\n"
        f"answer({ROWS} + ' ' + document.querySelectorAll('thead th')[n].getAttribute('aria-sort') + ' '"
        " + document.querySelectorAll('thead th[aria-sort=none]').length);"
    )
    assert ask(page, profile, script) == f"{expected} 8"


def test_the_filter_leaves_the_rows_with_a_text(tmp_path, profile):
    page = _write(tmp_path, documents.many(40))
    script = (
        "const box = document.querySelector('.filter input');\nbox.value = 'CONV3';\n"
        "box.dispatchEvent(new Event('input'));\n"
        "answer(Array.from(document.querySelector('tbody').rows).filter((r) => r.offsetHeight > 0).length"
        " + ' ' + document.querySelector('.filter output').textContent);"
    )
    assert ask(page, profile, script) == "11 11 of 40"


def test_hostile_names_do_not_run_and_nothing_is_fetched(tmp_path, profile):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    names = [*documents.HOSTILE, f'<img src="{address}/name"><script src="{address}/script"></script>']
    page = _write(tmp_path, documents.many(0, names=names))
    script = (
        "let blocked = 0;\ndocument.addEventListener('securitypolicyviolation', () => { blocked += 1; });\n"
        f"new Image().src = '{address}/image';\nfetch('{address}/fetch').catch(() => 0);\n"
        "const foreign = document.createElement('script');\nforeign.textContent = 'document.title = \"broken\"';\n"
        "document.body.append(foreign);\n"
        "setTimeout(() => answer(blocked + ' ' + document.querySelectorAll('img').length + ' ' + document.title), 300);"
    )
    try:
        answer = ask(page, profile, script, "--virtual-time-budget=2000")
    finally:
        server.shutdown()
        server.server_close()
    blocked, images, title = answer.split(" ", 2)
    assert (int(blocked), int(images)) == (3, 0)
    assert title.startswith("net.onnx")
    assert asked == []


@pytest.mark.parametrize("number", [1, 30])
@pytest.mark.parametrize("width", [500, 900, 1400])
def test_nothing_but_tables_is_wider_than_the_window(tmp_path, profile, number, width):
    page = _write(tmp_path, documents.many(number, names=["n" * 300] if number == 1 else None))
    script = "answer(document.documentElement.scrollWidth - document.documentElement.clientWidth);"
    assert int(ask(page, profile, script, f"--window-size={width},900")) <= 0


def test_light_and_dark_follow_the_system(page, profile):
    script = "const s = getComputedStyle(document.body);\nanswer(s.backgroundColor + ' ' + s.color);"
    light, dark = ask(page, profile, script, LIGHT), ask(page, profile, script, DARK)
    assert light.startswith("rgb(251")
    assert dark.startswith("rgb(20,")


def test_it_prints(tmp_path, profile):
    page = _write(tmp_path, documents.many(60))
    paper = tmp_path / "page.pdf"
    chromium(page, profile, "--no-pdf-header-footer", f"--print-to-pdf={paper}", DARK)
    assert paper.read_bytes().startswith(b"%PDF")
