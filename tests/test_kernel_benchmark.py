"""The benchmark of the kernels: without a GPU it predicts, and all its code but the GPU's runs."""

import json
import sys
from pathlib import Path

import pytest

import pallas_kernels
from pallas_kernels.mosaic_gpu.versions import interpreted

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import kernels
from kernel_moves import moves_of
from shapes import SHAPES, Scale


def test_without_a_gpu_floors_are_predicted(tmp_path, capsys):
    path = tmp_path / "floors.json"
    kernels.main(["--only", "gemma3-27b full", "--json", str(path)])
    assert "predicted floors, no kernel was run" in capsys.readouterr().out
    rows = {row["what"]: row for row in json.loads(path.read_text())["rows"]}
    assert len(rows) == 6
    row = rows["gemma3-27b full: decode scatter of 256 rows"]
    assert row["MB"] == 2 * 256 * 16 * 128 * 2 * 2 / 1e6
    assert row["H200 us"] == pytest.approx(4.194304 / 4.8 + 2.5)
    assert row["B200 us"] == pytest.approx(4.194304 / 8 + 2.5)
    assert row["wanted"] == "empty <= 1.5 x"
    assert rows["gemma3-27b full: gather"]["KB"] == 16 * 16 * 128 * 2 / 1e3


def test_moves_are_compared_with_the_reference(capsys):
    kernels.main(["--check", "--only", "mimo.* window: (w|s)|csa.*decode|lfm2.*(read|write|copy)"])
    assert "checked: 6 moves by XLA" in capsys.readouterr().out


def test_a_wrong_result_ends_the_run(monkeypatch):
    monkeypatch.setattr(pallas_kernels, "copy_blocks_reference", lambda blocks, src, dst: blocks)
    with pytest.raises(SystemExit, match=r"lfm2-1.2b state: copy of 3 blocks, xla: .* are wrong"):
        kernels.main(["--check", "--only", "lfm2.*copy"])


def test_what_a_gpu_would_be_asked(monkeypatch, tmp_path, capsys):
    """In the interpreter, whose times say nothing: the figures, the limits and the table."""
    monkeypatch.setattr(kernels, "LEAST_SECONDS", 0)
    shape = next(shape for shape in SHAPES if shape.name == "one layer, one head of 64")
    moves = moves_of(shape, Scale.tiny())
    with interpreted():
        (row,) = [kernels.measured(move, Scale.tiny(), 1) for move in moves if "rows" in move.name]
    assert row["holds"] == (row["x empty"] <= 1.5)
    assert row["GB/s"] == pytest.approx(2 * 5 * 256 / row["us"] / 1e3)
    kernels.show("kernels", kernels.heading(), [row], tmp_path / "kernels.json")
    assert {"card", "driver", "runtime", "jax", "command"} < json.loads(
        (tmp_path / "kernels.json").read_text()
    ).keys()
    assert "of copy" in capsys.readouterr().out


def test_an_expression_that_no_move_has_is_refused():
    with pytest.raises(SystemExit):
        kernels.main(["--only", "no such model"])
