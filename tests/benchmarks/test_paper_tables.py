"""Targets, tables and pictures of the papers' suites, from results that were made up."""

from __future__ import annotations

import json

import pytest


def _measured(baseline, median_us, sparsity=None, **changes):
    return {
        "baseline": baseline,
        "variant": "graph",
        "sparsity": sparsity,
        "kernel": "cuda.generated(sm_90)" if baseline == "sparse" else "",
        "median_us": median_us,
        "burst_us": median_us and median_us * 0.9,
        "problem": "",
        "details": {},
        **changes,
    }


def _record(layer, batch, dtype, measurements):
    from suite_rows import canonical

    return {
        "layer": {"name": canonical(layer).name},
        "setting": {"batch": batch, "dtype": dtype},
        "measurements": measurements,
        "commit": "0123456789abcdef-dirty",
    }


def _content(records, started="2030-01-01T00:00:00Z"):
    return {
        "started": started,
        "environment": {"versions": {"onnxruntime-gpu": "9.9"}},
        "gpu_before": {"name": "a GPU", "driver_version": "1.2"},
        "floor": {"graph": {"burst_us": 5.0}},
        "libraries": {"cudnn": "8", "cupy": "14", "built_for": "13.0"},
        "layers": records,
    }


def _full(gain=3.0, lowered=4.0, half=1.5, crossing=0.7):
    """Every layer of the targets, twice as slow at 60% as at the crossing it should have."""
    from paper_results import target_layers
    from papers import SUB_BATCHES

    records = []
    for layer in target_layers().values():
        for dtype in ("float16", "float32"):
            low = crossing - 0.1
            sparse = {low: 200.0, crossing + 0.1: 50.0, 0.9: 100 / gain}
            measurements = [
                _measured("dense", 100.0),
                _measured("dense", 120.0, variant="nhwc+graph"),
                _measured("half-in", half * 100 / gain),
                _measured("half-out", 90.0),
                _measured("half-both", 30.0),
                _measured("cublas", lowered * 100 / gain),
                *(_measured("sparse", time_us, sparsity) for sparsity, time_us in sparse.items()),
                *(_measured("csr", 3 * time_us, sparsity) for sparsity, time_us in sparse.items()),
                *(_measured("cusparse", lowered * time_us, sparsity) for sparsity, time_us in sparse.items()),
                *(_measured(f"csr-{n}", 400.0 / n, 0.9) for n in SUB_BATCHES),
                _measured("csr-unified", 4 * 100 / gain, 0.9, details={"stored": 150, "nonzeros": 100}),
            ]
            records.append(_record(layer, 64, dtype, measurements))
    return _content(records)


def _outcomes(**changes):
    from paper_results import PaperResults
    from paper_targets import outcomes

    return outcomes(PaperResults([_full(**changes)]))


def _verdicts(**changes):
    return [outcome.verdict for outcome in _outcomes(**changes)]


def test_targets_that_are_met():
    found = _outcomes()
    assert [outcome.verdict for outcome in found] == ["met"] * 9
    assert [(outcome.num_layers, outcome.num_wanted) for outcome in found] == [
        *((11, 11), (11, 11), (11, 11)),
        *((23, 23),) * 4,
        *((9, 9),) * 2,
    ]
    assert found[0].got == "70.0%"
    assert (found[1].got, found[2].got) == ("3.00x", "3.00x")
    assert found[3].got == "4.00x and more, 23 of 23 over it"
    assert found[-1].got == "9 of 10"


@pytest.mark.parametrize(
    ("changes", "missed"),
    [
        ({"crossing": 0.78}, [0]),
        ({"gain": 2.2}, [1]),
        ({"gain": 1.9}, [1, 2]),
        ({"lowered": 2.8}, [5, 6]),
        ({"lowered": 2.5}, [3, 4, 5, 6]),
        ({"half": 0.95}, [7, 8]),
    ],
)
def test_targets_that_are_missed(changes, missed):
    assert [index for index, verdict in enumerate(_verdicts(**changes)) if verdict != "met"] == missed
    assert {_verdicts(**changes)[index] for index in missed} == {"missed"}


def test_what_was_not_measured_leaves_targets_incomplete():
    from paper_results import PaperResults
    from paper_targets import outcomes, summary

    content = _full()
    content["layers"] = [r for r in content["layers"] if r["layer"]["name"] != "3x3_64-64@56"]
    assert {outcome.verdict for outcome in outcomes(PaperResults([content]))} == {"incomplete"}
    empty = PaperResults([_content([])])
    assert all(outcome.verdict == "incomplete" and outcome.got == "-" for outcome in outcomes(empty))
    assert summary(empty).count("incomplete") == 9


def test_what_failed_or_was_wrong_does_not_count_and_the_fastest_does():
    from paper_results import cells_of
    from suite_rows import read_suite

    layer = read_suite("dong2020")[5]
    record = _record(
        layer,
        64,
        "float16",
        [
            _measured("dense", 50.0, problem="wrong"),
            _measured("dense", None, problem="failed"),
            _measured("dense", 100.0),
            _measured("dense", 90.0, variant="nhwc"),
            _measured("sparse", 40.0, 0.9),
            _measured("csr", 30.0, 0.9),
            _measured("sparse", 60.0, 0.8),
            _measured("cusparse", 500.0, 0.8),
        ],
    )
    low, high = cells_of(record)
    assert (low.sparsity, high.sparsity) == (0.8, 0.9)
    assert (low.best["dense"]["median_us"], low.gain("dense")) == (90.0, 1.5)
    assert high.gain("dense") == 3.0
    assert low.gain("cusparse", "burst_us") == pytest.approx(500 / 60)
    assert high.gain("cusparse") is None
    assert cells_of({"layer": {"name": "x"}, "setting": record["setting"], "problem": "died"}) == []


def test_of_several_files_the_newest_counts(tmp_path):
    from paper_results import PaperResults
    from suite_rows import read_suite

    layer = read_suite("dong2020")[5]
    assert PaperResults.load(tmp_path) is None
    for name, started, time_us in (("papers-a", "2031", 25.0), ("papers-b", "2030", 50.0)):
        records = [_record(layer, 64, "float16", [_measured("dense", 100.0), _measured("sparse", time_us, 0.9)])]
        (tmp_path / f"{name}.json").write_text(json.dumps(_content(records, started)))
    assert PaperResults.load(tmp_path).gains(layer, 64, "float16") == {0.9: 4.0}


def test_what_is_short_over_a_lowering_stands_beside_its_floor():
    """Of a layer of which the memory takes longer than a launch, and one of which a launch does."""
    from paper_results import PaperResults
    from paper_tables import lowered_short_table

    content = _full(gain=3.0, lowered=2.8)
    assert {row[-1] for row in _rows(lowered_short_table(PaperResults([content])))[2:]} == {"-"}
    content["gpu_before"]["name"] = "NVIDIA H200"
    rows = _rows(lowered_short_table(PaperResults([content])))[2:]
    assert {(row[2], row[6]) for row in rows} == {("cuSPARSE", "3.07x")}
    by_layer = {tuple(row[:2]): row[3:] for row in rows}
    assert len(by_layer) == len(rows) == 46
    # 64 images of 64 channels, 56 x 56, in and out: 51.4 MB.
    assert by_layer["3x3_64-64@56", "float16"] == ["84.0 us", "30.0 us", "2.80x", "3.07x", "10.7 us", "7.85x"]
    assert by_layer["5x5_1-20@28p0", "float16"] == ["84.0 us", "30.0 us", "2.80x", "3.07x", "5.0 us", "16.80x"]
    assert lowered_short_table(PaperResults([_full(lowered=4.0)])) == "None."


def test_break_even_is_between_what_was_measured():
    from paper_results import PaperResults
    from paper_tables import break_even_text
    from suite_rows import read_suite

    layer = read_suite("dong2020")[5]

    def results(times):
        measured = [_measured("sparse", time_us, sparsity) for sparsity, time_us in times.items()]
        return PaperResults([_content([_record(layer, 64, "float16", [_measured("dense", 100.0), *measured])])])

    for times, bound, text in (
        ({0.7: 200, 0.9: 50}, 0.8, "80%"),
        ({0.7: 90, 0.9: 50}, 0.7, "below 70%"),
        ({0.7: 300, 0.9: 200}, 1.0, "above 90%"),
        # Faster at first, then slower, then faster: what counts is from where on it stays so.
        ({0.5: 90, 0.7: 200, 0.9: 50}, 0.8, "80%"),
        ({}, None, "-"),
    ):
        made = results(times)
        assert made.break_even_bound(layer, 64, "float16") == (None if bound is None else pytest.approx(bound))
        assert break_even_text(made, layer, 64, "float16") == text


@pytest.fixture
def figures(tmp_path, monkeypatch):
    """The program with results, documents and pictures of its own."""
    import figures
    import paper_results

    monkeypatch.setattr(paper_results, "RESULTS", tmp_path)
    monkeypatch.setattr(figures, "PAPERS_PAGE", tmp_path / "papers.md")
    return figures


def _rows(text):
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]


def test_without_results_there_is_no_page(figures, tmp_path):
    import paper_tables

    assert figures.PAPERS_PAGE not in figures.pages()
    assert {make() for name, make in paper_tables.TABLES.items() if name != "papers-reported-1x1"} == {
        figures.NOT_MEASURED
    }
    assert not list(tmp_path.iterdir())


def test_the_page_is_made_once_there_are_results(figures, tmp_path):
    content = _full(gain=3.0)
    for record in content["layers"]:
        if record["layer"]["name"] == "3x3_512-512@14":
            for measured in record["measurements"]:
                measured["median_us"] *= 9 if measured["baseline"] in ("sparse", "csr") else 1
    (tmp_path / "papers.json").write_text(json.dumps(content))
    page = figures.pages()[figures.PAPERS_PAGE]
    assert "a GPU, driver 1.2, onnxruntime-gpu 9.9, cudnn 8, cupy 14; 2030-01-01, commit 0123456789ab-dirty." in page
    tables = {}
    for part in page.split("<!-- table: ")[1:]:
        name, _, rest = part.partition(" -->\n")
        tables[name] = rest.partition("\n<!-- end -->")[0]
    for name, text in tables.items():
        if text.startswith("|"):
            assert len({len(row) for row in _rows(text)}) == 1, name
    targets = _rows(tables["papers-targets"])
    assert len(targets) == 2 + 9
    assert targets[2][-1] in ("met", "missed")
    assert [row[:5] for row in _rows(tables["papers-dense-wins"])[2:]] == [
        ["3x3_512-512@14", dtype, "64", "0.33x", "above 90%"] for dtype in ("float16", "float32")
    ]
    dong = _rows(tables["papers-dong2020"])
    assert len(dong) == 2 + 20
    assert dong[2] == [
        *("lenet_1", "float16", "100 us", "-", "133 us", "-", "133 us", "100 us", "33 us", "cuda.generated(sm_90)"),
        *("3.00x", "4.00x", "4.00x", "3.00x", "70%"),
    ]
    assert tables["papers-dong2020-batch-1"] == figures.NOT_MEASURED
    structured = _rows(tables["papers-structured"])
    assert structured[2][3:] == ["33 us", "50 us", "90 us", "30 us", "1.50x", "2.70x", "0.90x"]
    vgg = {tuple(row[:2]): row for row in _rows(tables["papers-vgg16-v100"])[2:]}
    assert len(vgg) == 18
    assert vgg["64-64@224", "float32"] == [
        *("64-64@224", "float32", "0.9", "64", "100 us", "33 us", "3.00x", "19.07 ms", "Winograd", "60.73 ms", "0.31x")
    ]
    csr = _rows(tables["papers-csr"])[2]
    assert csr[3:] == ["400 us", "200 us", "100 us", "50 us", "100 us", "8.00x", "1.00x", "1.50x", "1.33x"]
    # The sweep's layers are among the others here, at 90% alone.
    assert _rows(tables["papers-sweep"])[2][:2] == ["3x3_64-64@56", "float16"]
    assert len(_rows(tables["papers-reported-1x1"])) == 2 + 12


def test_pruned_layers_stand_beside_the_dense_times_of_the_network_as_it_was(figures, tmp_path):
    from suite_rows import read_suite

    (layer,) = [layer for layer in read_suite("pietron-vgg16") if layer.name == "256-256@56"]
    records = [
        _record(layer, batch, "float32", [_measured("dense", 100.0), _measured("sparse", time_us, 0.908)])
        for batch, time_us in ((64, 50.0), (128, 80.0))
    ]
    (tmp_path / "papers-pruned.json").write_text(json.dumps(_content(records)))
    row = _rows(figures.TABLES["papers-pruned-v100"]())[2]
    assert row == [
        *("256-256@56", "float32", "0.908", "128", "100 us", "80 us", "1.25x", "14.27 ms", "FFT", "21.81 ms", "0.65x")
    ]


def test_a_page_that_is_missing_or_stale_is_told(figures, tmp_path, monkeypatch):
    import sys

    (tmp_path / "papers.json").write_text(json.dumps(_full()))
    monkeypatch.setattr(sys, "argv", ["figures.py", "--check"])
    with pytest.raises(SystemExit, match=r"error: .*papers\.md"):
        figures.main()
    figures.PAPERS_PAGE.write_text(figures.pages()[figures.PAPERS_PAGE])
    stale = {path.name for path, text in figures.pages().items() if path.read_text() != text}
    assert "papers.md" not in stale
    assert not any("<!-- table:" in line and "None" in line for line in figures.PAPERS_PAGE.read_text().splitlines())


def test_pictures_are_drawn(tmp_path):
    mpl = pytest.importorskip("matplotlib")
    mpl.use("svg")
    import paper_tables
    from matplotlib import pyplot as plt
    from paper_results import PaperResults

    paper_tables.draw(PaperResults([_full()]), plt, tmp_path)
    texts = [(tmp_path / name).read_text() for name in ("papers-sweep.svg", "papers-break-even.svg")]
    assert all(text.startswith("<?xml") for text in texts)
    # The name of a layer stands beside its glyphs as a comment.
    assert "<!-- 3x3_512-512@14 -->" in texts[1]


def test_the_program_prints_the_targets(tmp_path, monkeypatch, capsys):
    import sys

    import paper_targets

    path = tmp_path / "r.json"
    for content, code in ((_full(), 0), (_full(half=0.5), 1)):
        path.write_text(json.dumps(content))
        monkeypatch.setattr(sys, "argv", ["paper_targets.py", str(path)])
        assert paper_targets.main() == code
    assert "missed     layers of Dong et al. faster at 90%" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["paper_targets.py", str(tmp_path / "none.json")])
    with pytest.raises(SystemExit):
        paper_targets.main()
    assert "no such file" in capsys.readouterr().err
