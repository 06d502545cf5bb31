"""The benchmark of the memory: its scheduler by hand, its model against the verbs, a tiny run."""

import json
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

import kvpool as kv

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import memory
from memory_books import KvBooks, ModelBooks
from memory_replay import Clock, replay
from memory_splits import best_split
from memory_traffic import Traffic, generated, traffics

CLOCK = Clock(decode=4, chunk=16, seconds=1.0)
SPEC = kv.CacheSpec.from_layers(
    [
        kv.FullAttention(1, 4),
        kv.SlidingWindow(8, 1, 4),
        kv.RecurrentState({"ssm": ((64,), "float32")}),
    ],
    block_size=4,
)
LIMITS = {"max_seqs": 12, "max_seq_len": 128, "max_step_tokens": 16}


def requests(*lengths) -> Traffic:
    prompts, outputs = np.array(lengths, np.int64).T
    return Traffic("by hand", np.zeros(len(lengths)), prompts, outputs)


def random_requests(count: int) -> Traffic:
    random = np.random.default_rng(0)
    return requests(*random.integers(1, 60, (count, 2)).tolist())


def full_attention(rows: int) -> kv.Plan:
    """Five blocks of 4 tokens, 64 bytes each."""
    spec = kv.CacheSpec.from_layers([kv.FullAttention(1, 4)], block_size=4)
    limits = {**LIMITS, "max_seqs": rows}
    return kv.plan(spec, num_blocks={"full": 5}, **limits)


def modelled(plan: kv.Plan, traffic: Traffic):
    return replay(ModelBooks.of(plan), traffic, plan.spec.groups, CLOCK, plan.max_seqs)


def served(plan: kv.Plan, traffic: Traffic):
    """Replays with kvpool's verbs and with the model, which must agree in everything."""
    books = KvBooks(plan)
    run = replay(books, traffic, plan.spec.groups, CLOCK, plan.max_seqs)
    kv.check(books.state)
    assert not books.state.live.any()
    model = modelled(plan, traffic)
    for one, other in zip(run.ticks, model.ticks, strict=True):
        assert one[:2] == other[:2]
        assert one.tokens.tolist() == other.tokens.tolist()
    assert (run.preempted, run.rejected) == (model.preempted, model.rejected)
    return run, books


def test_requests_enter_in_order_and_wait_for_memory():
    """Three of 4 + 4 tokens, each a block and soon a second, in 5 blocks: two run, then one."""
    run, books = served(full_attention(rows=4), requests((4, 4), (4, 4), (4, 4)))
    assert [tick.running for tick in run.ticks] == [2, 1, 0]
    assert [tick.waiting for tick in run.ticks] == [1, 0, 0]
    assert (run.concurrency, run.peak, run.preempted) == (2, 2, 0)
    assert books.refused == {"full": 1}
    assert run.use(5 * 64) == 8 / 20  # 4 tokens each of the 20 that the blocks hold


def test_the_newest_is_preempted_and_computed_again():
    """Two of 4 + 12 grow to 4 blocks each; in 5 the second gives way, and enters when there is
    room for what it had and the next tick."""
    run, _ = served(full_attention(rows=4), requests((4, 12), (4, 12)))
    assert [tick.running for tick in run.ticks] == [2, 2, 1, 1, 1, 0]
    assert run.preempted == 1
    assert (run.held.sum(axis=1) // 64).tolist() == [2, 4, 3, 2, 3, 0]


def test_a_request_that_cannot_be_served_is_rejected():
    run, _ = served(full_attention(rows=4), requests((40, 4), (4, 40), (8, 4)))
    assert run.rejected == 2
    assert run.ticks[-1].running == 0


def test_too_few_rows_are_noticed():
    run = modelled(full_attention(rows=1), requests((4, 4), (4, 4)))
    assert run.without_row == 1


def test_the_model_of_independent_pools_is_what_the_verbs_do():
    sizes = {"full": 75, "window8": 22, "state": 6}
    run, books = served(kv.plan(SPEC, num_blocks=sizes, **LIMITS), random_requests(60))
    assert run.preempted > 0
    assert all(books.refused.values())


def test_the_best_split_is_below_the_bound_and_better_than_others():
    traffic, budget = random_requests(120), 12_000
    best = best_split(SPEC, traffic, budget, CLOCK, LIMITS)
    assert 0.9 * budget < best.total_bytes <= budget
    books = ModelBooks.bound(SPEC.groups, budget, 12, CLOCK.chunk)
    bound = replay(books, traffic, SPEC.groups, CLOCK, 12)
    other = kv.plan(SPEC, budget, ratio="1:1:1", **LIMITS)
    worse, reached = (modelled(plan, traffic).concurrency for plan in (other, best))
    assert worse < reached < bound.concurrency


def test_traces_are_read_in_the_order_of_arrival(tmp_path):
    lines = [
        {"timestamp": 5000, "input_length": 7, "output_length": 0, "hash_ids": [3]},
        {"timestamp": 1000, "input_length": 9, "output_length": 2, "hash_ids": [1]},
    ]
    path = tmp_path / "some.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    (trace,) = traffics(str(tmp_path), 0)
    assert trace.name == "some"
    assert [trace.seconds.tolist(), trace.prompts.tolist()] == [[0, 4], [9, 7]]
    assert trace.outputs.tolist() == [2, 1]
    assert len(generated(100).every(10)) == 10
    with pytest.raises(SystemExit, match=r"no \.jsonl"):
        traffics(str(tmp_path.parent), 0)


def tiny_run(tmp_path, *memories, options=()) -> dict:
    """{memory: its row in the report} of a run on generated traffic."""
    path = tmp_path / "memory.json"
    given = ["--models", "kimi-linear-48b-a3b", "--requests", "40", "--gib", "1.5", *options]
    files = ["--json", str(path), "--picture", str(tmp_path / "memory.png")]
    memory.main([*given, *files, "--memories", *memories])
    return {row["what"].split(", ")[-1]: row for row in json.loads(path.read_text())["rows"]}


def test_a_tiny_run(tmp_path, capsys):
    rows = tiny_run(tmp_path, "first half")
    assert "kimi-linear-48b-a3b, 40 requests of generated" in capsys.readouterr().out
    static, bound = rows["first half"], rows["bound"]
    assert 1 < static["value"] <= bound["value"]
    assert 0 < static["use"] <= bound["use"] < 1
    assert set(static["num_blocks"]) == {"state", "latent"}
    assert static["command"].startswith("python benchmarks/memory.py --models kimi-linear-48b-a3b")
    assert matplotlib.image.imread(tmp_path / "memory.png").shape[1] == 1560


def test_the_model_serves_pools_as_the_verbs_do_and_a_file_keeps_what_it_has(tmp_path):
    of_verbs = tiny_run(tmp_path, "first half")
    options = ("--modelled", "first half", "--keep")
    rows = tiny_run(tmp_path, "first half", "all seen", options=options)
    assert list(rows) == ["first half", "all seen", "bound"]
    assert (of_verbs["first half"]["books"], rows["first half"]["books"]) == ("kvpool", "model")
    same = ("value", "peak", "preempted", "use", "loaded_ticks", "num_blocks")
    assert [rows["first half"][key] for key in same] == [
        of_verbs["first half"][key] for key in same
    ]
    rows = tiny_run(tmp_path, "all seen", options=("--keep",))
    assert list(rows) == ["first half", "all seen", "bound"]
    assert rows["first half"]["command"] != rows["all seen"]["command"]


def verdict_of(bound: float, seen: float) -> list[str]:
    """The cells of a summary of one model whose elastic memory serves 95 requests."""
    figures = {"all seen": seen, "elastic": 95.0, "bound": bound}
    rows = [{"what": f"some, 9 requests of b, {which}", "value": n} for which, n in figures.items()]
    for other, least in memory.LEAST.items():
        ratio = 95.0 / figures[other]
        what = f"some, 9 requests of b, elastic / {other}"
        rows.append({"what": what, "value": ratio, "holds": ratio >= least})
    return memory.summary(rows).splitlines()[1].split()[5:]


def test_elastic_is_held_against_the_bound_and_the_split_that_saw_it_all():
    assert verdict_of(100, 95) == ["-", "95.0", "-", "95.0", "100.0", "0.950", "1.000", "holds"]
    assert verdict_of(101, 95)[-3:] == ["0.941", "1.000", "MISSED"]
    assert verdict_of(100, 96)[-3:] == ["0.950", "0.990", "MISSED"]


@pytest.mark.slow
def test_a_tiny_run_of_every_pooling(tmp_path):
    rows = tiny_run(tmp_path, *memory.MEMORIES)
    for which in memory.MEMORIES:
        assert rows[which]["use"] <= rows["bound"]["use"]
    assert rows["elastic / bound"]["holds"]
