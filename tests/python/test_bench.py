"""The benchmark's names, tables, counts and files; nothing here depends on how fast anything is."""

import json
import pathlib
import random
import re
import subprocess
import sys

import pytest
import torch

ROOT = pathlib.Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import contest  # noqa: E402
import kernels  # noqa: E402
import packings  # noqa: E402
import results  # noqa: E402
import table  # noqa: E402
import targets  # noqa: E402
import ways  # noqa: E402
from table import Problem  # noqa: E402

FIELDS = {"bench", "case", "value", "unit", "peak", "of_peak", "peer", "peer_value", "ratio"}


@pytest.fixture
def seed():
    number = random.randrange(2**32)
    print("seed", number)  # shown when a test fails
    return number


def documents_of(generator, rows):
    taken = []
    while sum(taken) < rows:
        taken.append(min(generator.randint(1, 40), rows - sum(taken)))
    return taken


def test_every_case_has_a_name_of_its_own_that_parses():
    cases = table.full() + table.quick()
    assert all(table.parse(case.name) == case for case in cases)
    full = {case.name for case in table.full()}
    assert len(table.full()) == len(full) == 6 * 4 * 2 * 2 * 2 * 2
    assert {"long/d128/h8-2/fp32/forward/causal", "gsm8k/d64/h8-8/bf16/backward/w1024"} <= full


@pytest.mark.parametrize(
    "name",
    [
        "long",
        "short/d64/h8-2/fp32/forward/causal",
        "long/64/h8-2/fp32/forward/causal",
        "long/d0/h8-2/fp32/forward/causal",
        "long/d64/h8-3/fp32/forward/causal",
        "long/d64/h8-2/fp64/forward/causal",
        "long/d64/h8-2/fp32/both/causal",
        "long/d64/h8-2/fp32/forward/w0",
    ],
)
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match=re.escape(f"but is '{name}'")):
        table.parse(name)


def test_the_quick_table_is_what_targets_speak_of():
    wanted = [f"long/d{dim}/h8-2/fp32" for dim in (64, 128, 256, 512)]
    wanted += [f"{packing}/d128/h8-2/fp32" for packing in ("book", "code", "gsm8k", "pretraining", "one")]
    wanted += [f"{packing}/d128/h8-2/bf16" for packing in ("long", "book", "code", "gsm8k")]
    wanted += ["long/d128/h8-8/fp32", "one/d128/h4-1/fp32"]
    expected = {f"{prefix}/{direction}/causal" for prefix in wanted for direction in table.PASSES}
    expected |= {f"one/d128/h8-2/fp32/{direction}/w1024" for direction in table.PASSES}
    names = [case.name for case in table.quick()]
    assert set(names) == expected and len(names) == len(expected)


@pytest.mark.parametrize("bf16", [True, False])
@pytest.mark.parametrize("instructions", targets.INSTRUCTIONS)
def test_the_quick_table_decides_every_target(instructions, bf16):
    names = [case.name for case in table.quick()]

    def verdicts(row):
        rows = {name: {field: row(name, field) for field in ("value", "of_peak", "ratio")} for name in names}
        return [target.verdict for target in targets.targets(rows, instructions, bf16)]

    good = {"value": 1.0, "of_peak": 0.99, "ratio": 4.0}
    assert set(verdicts(lambda name, field: good[field] * (2 if "bf16" in name else 1))) == {"met"}
    bad = {"value": 1.0, "of_peak": 0.2, "ratio": 1.0}
    worse = {"bf16": 0.5, "w1024": 0.5, "h8-8": 0.5, "h4-1": 0.5}

    def slow(name, field):
        return bad[field] * next((factor for text, factor in worse.items() if text in name), 1)

    assert set(verdicts(slow)) == {"missed"}
    assert {target.verdict for target in targets.targets({}, instructions, bf16)} == {"not measured"}


def test_targets_are_those_of_the_processor():
    def needed(instructions, bf16, what):
        return {t.case.name: t.needed for t in targets.targets({}, instructions, bf16) if t.what == what}

    assert needed("AVX-512", True, "share of the FMA peak")["long/d512/h8-2/fp32/backward/causal"] == 0.82
    assert needed("AVX2", True, "share of the FMA peak")["long/d512/h8-2/fp32/backward/causal"] == 0.74
    assert needed("AVX2", False, "bf16 over our fp32")["gsm8k/d128/h8-2/bf16/forward/causal"] == 0.93
    assert not any("bf16" in name for name in needed("AVX-512", False, "over the best of torch"))


def test_pairs_are_counted_as_by_hand(seed):
    generator = random.Random(seed)
    for _ in range(50):
        documents = documents_of(generator, generator.randint(1, 200))
        window = generator.choice([None, generator.randint(1, 50)])
        by_hand = sum(min(i + 1, window or n) for n in documents for i in range(n))
        assert packings.pairs(documents, window) == by_hand, seed


@pytest.mark.parametrize("name", packings.NAMES)
def test_packings_are_the_same_each_time_and_fill_any_number_of_rows(name):
    for rows in (1, 64, 16384, 400_000):
        documents = packings.lengths(name, rows)
        assert sum(documents) == rows and min(documents) >= 1
        assert documents == packings.lengths(name, rows)
    assert len(packings.lengths("one", 16384)) == 1
    assert packings.lengths("long", 16384) == [8192, 8192]


def visible(documents, window):
    rows = sum(documents)
    document = [d for d, n in enumerate(documents) for _ in range(n)]
    return torch.tensor(
        [[document[i] == document[j] and 0 <= i - j < (window or rows) for j in range(rows)] for i in range(rows)]
    )


@pytest.mark.parametrize("window", [None, 1, 7, 1000])
def test_all_ways_see_the_same_pairs(window, seed, monkeypatch):
    documents = documents_of(random.Random(seed), 90)
    monkeypatch.setattr(packings, "lengths", lambda name, rows: documents)
    problem, seen = Problem("gsm8k", dim=16, heads=(4, 2), window=window), visible(documents, window)
    q, k, v = contest.Contest(problem, 90).inputs
    scores = q.double() @ k.double().repeat_interleave(2, 1).transpose(2, 3) / 4
    expected = scores.masked_fill(~seen, -torch.inf).softmax(3) @ v.double().repeat_interleave(2, 1)
    for make in (ways.ours, ways.loop, ways.masked):
        out = make(problem, 90).attend(q, k, v)
        # fp32 sums of at most 90 terms: a few 1e-7 of the norm; another mask differs by far more.
        assert (out - expected).norm() < 1e-5 * expected.norm(), (make, seed)
    ways.block_mask.cache_clear()
    row = torch.arange(90)
    assert torch.equal(ways.block_mask("gsm8k", 90, window).mask_mod(0, 0, row[:, None], row), seen), seed
    ways.block_mask.cache_clear()


def test_a_way_that_computes_something_else_stops_the_run(monkeypatch):
    def one_key_less(problem, rows):
        wrong = Problem(problem.packing, problem.dim, problem.heads, problem.dtype, problem.window - 1)
        return ways.loop(wrong, rows)

    monkeypatch.setitem(ways.PEERS, "loop", one_key_less)
    match = contest.Contest(Problem("one", dim=16, window=1024), 1200)
    with pytest.raises(ValueError, match="all ways must compute the same, but out of SDPA per document"):
        match.measure("forward", 1, ["loop"], peak=100)


def test_a_peer_that_fails_is_left_out_and_said_to_be(monkeypatch, capsys):
    def broken(problem, rows):
        raise RuntimeError("no compiler\nand a long trace")

    monkeypatch.setitem(ways.PEERS, "flex", broken)
    match = contest.Contest(Problem("gsm8k", dim=16), 64)
    _, peers = match.measure("forward", 1, ["loop", "flex"], peak=100)
    assert [peer.name for peer in peers] == ["SDPA per document"]
    case = "gsm8k/d16/h8-2/fp32/forward/causal"
    assert capsys.readouterr().err == f"[bench] flex is left out of {case}, since it failed: no compiler\n"


# The first one warms up unless it takes a second; short ones go on for two seconds.
@pytest.mark.parametrize(("seconds", "runs"), [(20.0, 5), (0.5, 5), (0.1, 20), (1.0, 5)])
def test_a_way_runs_as_often_as_it_is_asked_or_for_two_seconds(seconds, runs, monkeypatch):
    clock = iter(range(1000))
    monkeypatch.setattr(contest.time, "perf_counter", lambda: next(clock) * seconds)
    way = contest.Runs("peer", lambda: None, repeat=5)
    way.go()
    way.warmed()
    while way.wants_more:
        way.go()
    assert len(way.seconds) == runs and way.median == pytest.approx(seconds)


def test_peers_that_lose_are_not_run_again():
    fast, slow, fresh = (contest.Runs(name, lambda: None, 5) for name in ("fast", "slow", "fresh"))
    fast.seconds, slow.seconds = [1.0, 1.1], [1.4]
    peers = [fast, slow, fresh]
    assert [contest.Contest.is_distant(peer, peers) for peer in peers] == [False, True, False]
    assert not contest.Contest.is_distant(contest.Runs(ways.OURS, lambda: None, 5), peers)


def test_the_mask_is_not_tried_where_it_cannot_win():
    match = contest.Contest(Problem("gsm8k", dim=16), 64)
    loop = contest.Runs("loop", lambda: None, 1)
    flop = 4 * 8 * 16 * 64**2
    for seconds, hopeless in ((0.9 * flop / 1e9, True), (1.1 * flop / 1e9, False)):
        loop.first = seconds
        assert match.mask_is_hopeless("forward", [None, loop], peak=1) == hopeless


def test_a_tiny_run_writes_whole_rows(tmp_path):
    path = tmp_path / "rows.json"
    command = [sys.executable, ROOT / "bench/kernels.py", "--rows", "64", "--repeat", "1", "--json", path]
    command += ["--peers", "loop", "mask", "--only", "gsm8k/d64/h8-2", "one/d24/h2-1/fp32/forward/w10"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = json.loads(path.read_text())
    shapes = [f"{dtype}/{direction}" for dtype in table.DTYPES for direction in table.PASSES]
    expected = {f"gsm8k/d64/h8-2/{shape}/{mask}" for shape in shapes for mask in ("causal", "w1024")}
    assert {row["case"] for row in rows} == expected | {"one/d24/h2-1/fp32/forward/w10"}
    for row in rows:
        assert FIELDS <= row.keys()
        assert row["bench"] == "kernels" and row["unit"] == "GFLOP/s" and row["peer"].startswith("SDPA")
        assert row["of_peak"] == pytest.approx(row["value"] / row["peak"])
        assert row["ratio"] == pytest.approx(row["value"] / row["peer_value"])
        assert row["case"] in done.stdout
    assert [name for name in tmp_path.iterdir()] == [path]


def test_results_go_where_a_name_leads(tmp_path):
    target, link = tmp_path / "rows.json", tmp_path / "link"
    target.write_text("before")
    link.symlink_to(target)
    path = results.checked(str(link))
    assert target.read_text() == "before"  # until there are rows
    results.write(path, [{"case": "a"}])
    assert link.is_symlink() and json.loads(target.read_text()) == [{"case": "a"}]
    results.write(results.checked("/dev/null"), [])
    assert pathlib.Path("/dev/null").is_char_device()


def test_an_interrupted_run_has_written_its_rows(tmp_path, monkeypatch, capsys):
    def interrupted(cases, options, peaks):
        yield {"case": cases[0].name, "value": 1.0, "peak": 2.0, "of_peak": 0.5, "peer": None}
        raise KeyboardInterrupt

    monkeypatch.setattr(kernels, "measured", interrupted)
    path = tmp_path / "rows.json"
    threads = str(torch.get_num_threads())
    assert kernels.main(["--quick", "--json", str(path), "--threads", threads]) == 130
    assert [row["case"] for row in json.loads(path.read_text())] == [table.quick()[0].name]
    assert f"interrupted after 1 of {len(table.quick())} rows; they are in {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "nowhere"], "'nowhere' is in none of"),
        (["--only", "long/d64/h8-2/fp64/forward/causal"], "is 'long/d64/h8-2/fp64/forward/causal'"),
        (
            ["--json", "/no such folder/rows.json"],
            "but '/no such folder/rows.json' is none: No such file or directory.",
        ),
        (["--json", "."], "but '.' is none: Is a directory."),
        (["--json", ""], "but '' is none: No such file or directory."),
    ],
)
def test_mistakes_are_told_in_one_line(arguments, message, capsys):
    assert kernels.main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("[bench] ") and error.count("\n") == 1


def test_the_peak_grows_with_what_was_seen(monkeypatch):
    speeds = iter([5.0, 9.0, 7.0])
    peaks = kernels.Peaks(1)
    assert peaks.of("fp32") > 0.1 and peaks.of("bf16") > 0.1
    peaks.best, peaks.kind = {}, {"fp32": "scalar"}
    monkeypatch.setattr(kernels.torch.ops.blockcp, "_fma_peak", lambda threads, kind: next(speeds), raising=False)
    seen = []
    for _ in range(3):
        peaks.measure()
        seen.append(peaks.of("bf16"))
    assert seen == [5.0, 9.0, 9.0]


def test_the_op_of_the_peak_refuses_what_is_not_there():
    op = torch.ops.blockcp._fma_peak
    with pytest.raises(ValueError, match="threads must be from 1 to 4096, but is 0"):
        op(0, "scalar")
    with pytest.raises(
        ValueError, match='must be bf16_avx512, fp32_avx512, fp32_avx2, fp32_neon or scalar, but is "sve"'
    ):
        op(1, "sve")
    assert op(1, "scalar") > 0.1
