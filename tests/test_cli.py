"""The command: its tables, JSON, chart, and what it refuses in one line."""

import json
import pathlib
import re
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest

import kvpool as kv
from kvpool.cli import main
from kvpool.cli.report import Question, report

CONFIGS = sorted((pathlib.Path(__file__).parent.parent / "examples" / "configs").glob("*.json"))
GIB = 1 << 30


def run(capsys, *arguments):
    assert main(["plan", *map(str, arguments)]) == 0
    return capsys.readouterr().out


def refused(capsys, *arguments) -> str:
    assert main(["plan", *map(str, arguments)]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("kvpool: ")
    assert error.count("\n") == 1
    return error


def cells(text: str, first: str) -> list[list[str]]:
    """The cells of every line that begins with a word."""
    return [line.split() for line in text.splitlines() if line.split()[:1] == [first]]


def test_the_table_of_gemma_3(capsys):
    text = run(capsys, "gemma3-27b", "--budget", "64GiB", "--compare", "uniform")
    assert cells(text, "full") == [["full", "10", "16", "1,310,720", "49,152", "61,440.0", "94.8%"]]
    request, waste, uniform = cells(text, "32k")
    assert request == ["32k", "2,976.0", "2,976.0", "1.000", "0.998", "3,808.0", "21"]
    assert " ".join(waste) == "32k 0.2% window1024 dead tokens 0.1%, window1024 open block 0.1%"
    assert uniform == ["32k", "15,872.0", "5.33", "4", "21"]
    assert "64,800.5 MiB for 6 rows of up to 128k tokens" in text


def test_rows_and_lengths_make_the_plan(capsys):
    asked = [
        "gpt-oss-120b",
        "--budget",
        "64GiB",
        "--rows",
        64,
        "--lengths",
        "4k,16k",
        "--tail-only",
    ]
    text = run(capsys, *asked, "--step", "1k", "--tp", 4)
    assert "gpt-oss-120b: 36 layers, one of 4 ranks" in text
    assert "in steps of 1k with tail_only" in text
    (line,) = [line for line in cells(text, "16k") if len(line) == 8]
    assert line[-1] == "64"


def test_a_budget_without_room_for_the_longest_length_still_answers(capsys):
    text = run(capsys, "llama-3.1-8b", "--budget", "16GB")
    assert "12,288.0 MiB for 3 rows of up to 32k tokens" in text
    assert [line[-1] for line in cells(text, "128k") if len(line) == 7] == ["0"]


def test_snapshots_take_the_place_of_requests(capsys):
    """313 states of Qwen3-Next, of which 300 are snapshots."""
    text = run(capsys, "qwen3-next-80b-a3b", "--budget", "64GiB", "--snapshots", 300)
    assert "for 13 rows of up to 128k tokens" in text


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_example_configuration(capsys, path):
    text = run(capsys, path, "--budget", "80GiB", "--compare", "uniform")
    spec = kv.CacheSpec.from_hf_config(path)
    for group in spec.groups:
        (line,) = cells(text, group.name)
        assert f"{group.bytes_per_block:,}" in line
    assert len(cells(text, "128k")) == 3


def test_json_holds_the_figures_and_the_plan(capsys):
    text = run(capsys, "gemma3-27b", "--budget", "16GiB", "--lengths", "32k", "--json", "--compare",
               "uniform")  # fmt: skip
    figures = json.loads(text)
    plan = kv.Plan.from_dict(figures["plan"])
    assert plan.spec == kv.preset("gemma3-27b")
    assert [group["blocks"] for group in figures["groups"]] == list(plan.blocks)
    (request,) = figures["requests"]
    assert request["held_bytes"] == request["needed_bytes"] == 2976 << 20
    assert request["requests"] == request["requests_in_plan"] == plan.max_seqs == 5
    assert figures["uniform"][0]["held_bytes"] == 62 * 32768 * 8192


def test_waste_and_need_make_up_what_is_held():
    spec = kv.preset("deepseek-v4-flash-fp8")
    figures = report(Question("x", spec, None, None, (1000, 8192), 512, False))
    for request in figures["requests"]:
        shares = sum(sum(of.values()) for of in request["mean_waste"].values())
        assert shares == pytest.approx(1 - request["mean_efficiency"])
        assert all(share >= 0 for of in request["mean_waste"].values() for share in of.values())


def test_stored_specs_and_plans_are_sources_too(capsys, tmp_path):
    spec = kv.preset("llama-3.1-8b")
    (tmp_path / "spec.json").write_text(json.dumps(spec.to_dict()))
    plan = kv.plan(spec, GIB, max_seqs=1, max_seq_len=1024)
    (tmp_path / "plan.json").write_text(json.dumps(plan.to_dict()))
    (tmp_path / "config.json").write_text(CONFIGS[0].read_text())
    texts = [run(capsys, tmp_path / name) for name in ("spec.json", "plan.json")]
    assert texts[0].split("\n", 1)[1] == texts[1].split("\n", 1)[1]
    assert run(capsys, tmp_path).split("\n", 1)[1] == run(capsys, CONFIGS[0]).split("\n", 1)[1]


@pytest.fixture
def stored(tmp_path):
    """Writes the spec of a preset, in another pooling, to a file."""

    def store(name, pooling):
        path = tmp_path / f"{name}-{pooling}.json"
        path.write_text(json.dumps(kv.with_pooling(kv.preset(name), pooling).to_dict()))
        return path

    return store


def test_groups_that_share_slabs(capsys, stored):
    path = stored("gemma3-27b", "elastic")
    text = run(capsys, path, "--budget", "64GiB", "--compare", "uniform")
    whole = ["65,520.0", "100.0%"]  # 2,016 slabs of 34,078,720 bytes: 5 blocks or 26 in each
    assert cells(text, "full") == [["full", "10", "16", "1,310,720", "52,416", *whole]]
    assert cells(text, "window1024")[0] == ["window1024", "52", "16", "6,815,744", "10,080", *whole]
    assert "65,520.0 MiB for 6 rows of up to 128k tokens\narray 0: window1024, full share" in text
    assert "requests: that grow to this length, in slabs shaped for it alone" in text
    assert [line[-1] for line in cells(text, "32k")] == ["21", "0.1%", "21"]
    ranks = run(capsys, path, "--budget", "64GiB", "--compare", "uniform", "--tp", 4)
    assert "for 24 rows of up to 128k tokens" in ranks
    fixed = run(capsys, path, "--budget", "64GiB", "--rows", 16)
    assert [line[-2:] for line in cells(fixed, "128k") if len(line) == 8] == [["6", "6"]]
    assert [line[-2:] for line in cells(fixed, "32k") if len(line) == 8] == [["21", "16"]]
    assert "ratio: shapes pools" in refused(capsys, path, "--budget", "64GiB", "--ratio", "1:1")


def test_groups_that_share_a_pool(capsys, stored):
    """Blocks of 6,815,744 bytes for all; those of the full group use 6,553,600 of them."""
    path = stored("gemma3-27b", "shared")
    text = run(capsys, path, "--budget", "64GiB")
    whole = ["8,647", "56,205.5", "100.0%"]
    assert cells(text, "full") == [["full", "10", "80", "6,553,600", *whole]]
    assert cells(text, "window1024")[0] == ["window1024", "52", "16", "6,815,744", *whole]
    assert "56,205.5 MiB for 5 rows of up to 128k tokens\narray 0: window1024, full share" in text
    figures = json.loads(run(capsys, path, "--budget", "64GiB", "--json"))
    plan = kv.Plan.from_dict(figures["plan"])
    assert figures["total_bytes"] == plan.total_bytes == 8647 * 6_815_744
    assert [r["requests"] for r in figures["requests"]] == [130, 59, 20, 5]
    assert figures["requests"][-1]["requests_in_plan"] == 5
    # Of 6 requests, 5 hold 1,639 + 65 blocks at most and one 1,639 + 193 in its prefill.
    assert 5 * 1704 + 1832 > (64 << 30) // 6_815_744 >= 4 * 1704 + 1832


def test_a_request_that_fits_by_bytes_but_not_into_slabs(capsys, stored):
    path = stored("gemma3-27b", "elastic")
    error = refused(capsys, path, "--budget", "500MiB")  # 64 blocks of each group: 496 MiB
    assert "one request of 1,024 tokens" in error
    assert "does not fit into 76 slabs of 6,815,744" in error  # 64 + 64 / 5
    error = refused(capsys, path, "--budget", "400MiB")
    assert "one row can hold 65; the smallest budget for it is 443,023,360" in error
    text = run(capsys, path, "--budget", "540MiB")
    assert "for 1 rows of up to 1k tokens" in text
    assert [line[-1] for line in cells(text, "8k") if len(line) == 7] == ["0"]


@pytest.mark.parametrize("pooling", ["shared", "elastic"])
@pytest.mark.parametrize("tokens", [37, 64])
def test_the_requests_that_fit_can_all_be_prefilled(pooling, tokens):
    """One after another, in the plan that is made for them."""
    layers = [kv.FullAttention(2, 8), kv.SlidingWindow(16, 1, 8), kv.RecurrentState(
        {"s": ((100,), "float32")})]  # fmt: skip
    spec = kv.CacheSpec.from_layers(layers, 8, pooling)
    question = Question("x", spec, 20_000, None, (tokens,), 16, False)
    figures = report(question)
    plan = kv.Plan.from_dict(figures["plan"])
    assert figures["requests"][0]["requests"] == plan.max_seqs > 2
    rows = np.arange(plan.max_seqs, dtype=np.int32)
    state, _ = kv.admit(kv.init_state(spec, plan), rows)
    for row in rows:
        for start in range(0, tokens, 16):
            num = np.where(rows == row, min(16, tokens - start), 0).astype(np.int32)
            state, result = kv.reserve(state, num)
            assert result.ok
            state = kv.advance(state, num)
    kv.check(state)


def test_a_dtype_halves_the_bytes(capsys):
    wide, narrow = (
        json.loads(run(capsys, "llama-3.1-8b", "--json", *dtype))["requests"][0]["held_bytes"]
        for dtype in ([], ["--dtype", "float8_e4m3fn"])
    )
    assert wide == 2 * narrow


@pytest.mark.parametrize("budget", [[], ["--budget", "40GiB"]])
def test_the_chart_is_a_picture(capsys, tmp_path, budget):
    path = tmp_path / "chart.png"
    run(capsys, "deepseek-v4-flash", "--chart", path, *budget)
    height, width, _ = matplotlib.image.imread(path).shape
    assert (height, width) == (780, 2040 if budget else 1020)


def test_without_matplotlib_the_chart_names_the_extra(capsys, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    error = refused(capsys, "llama-3.1-8b", "--chart", tmp_path / "chart.png")
    assert "needs matplotlib; install kvpool[chart]" in error
    code = "import sys, kvpool.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gemma3-27"], "no preset 'gemma3-27'; there are gemma3-27b,"),
        (["missing.json"], "missing.json: no such file"),
        (["gemma3-27b", "--budget", "lots"], "--budget: wanted bytes like 64GiB"),
        (["gemma3-27b", "--budget", "100MiB"], "one request of 1,024 tokens needs at least"),
        (["gemma3-27b", "--budget", "1MiB", "--rows", "2"], "one token needs at least 8,126,464"),
        (["gemma3-27b", "--budget", "16GiB", "--rows", "0"], "max_seqs: .* got 0"),
        (["gemma3-27b", "--rows", "2"], "give --budget too"),
        (["gemma3-27b", "--lengths", "8k,,1k"], "--lengths: wanted tokens .* got ''"),
        (["gemma3-27b", "--step", "0"], "--step: wanted tokens like 8192 or 8k, .* got '0'"),
        (["gemma3-27b", "--tp", "3"], "16 heads cannot be divided among 3 ranks"),
        (["gemma3-27b", "--dtype", "fp8"], "no dtype 'fp8'"),
        (["gemma3-27b", "--block-size", "0"], "block_size: .* got 0"),
        (["gemma3-27b", "--budget", "9GB", "--ratio", "1:2:3"], "wanted 2 numbers, .*window1024"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_one_line(capsys, arguments, message):
    error = refused(capsys, *arguments)
    assert re.search(message, error), error


def test_the_module_and_the_listing():
    for arguments in (["presets"], ["plan", "--help"]):
        done = subprocess.run(
            [sys.executable, "-m", "kvpool", *arguments], capture_output=True, text=True, check=True
        )
        assert ("gemma3-27b\n" if arguments == ["presets"] else "--tail-only") in done.stdout
