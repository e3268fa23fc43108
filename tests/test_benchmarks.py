"""The benchmarks' own code, at sizes that take seconds: what they write, and what they notice."""

import dataclasses
import functools
import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, autotune, decoding, device_check, efficiency, encodings, timing
from benchmarks.device_check import Case
from pallas_kernels import IMPLEMENTATIONS, gpu, tape_attention, tiles
from pallas_kernels.tiles import Tile

# --- timing ---------------------------------------------------------------------------------------


def test_rounds_are_interleaved_and_a_failure_stops_nobody_else():
    order = []

    def fails():
        if len(order) > 3:
            raise RuntimeError("out of memory\nand pages more")

    times = timing.interleaved(
        {"a": lambda: order.append("a"), "b": lambda: order.append("b"), "c": fails}, rounds=3
    )
    assert order == ["a", "b"] * 4  # one to warm up
    assert times["a"] > 0 and times["b"] > 0
    assert timing.summary(times["c"]) == "RuntimeError: out of memory"


def test_short_runs_are_queued_and_waited_for_once():
    runs, waits = [], []
    timing.interleaved({"a": lambda: runs.append(0)}, 1, waits.append, shortest=1e-3)
    assert len(waits) == 3  # to warm up, to see how short it is, and for the round
    assert len(runs) > 10


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "x.json"
    timing.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        timing.write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


# --- attention ------------------------------------------------------------------------------------

FEW = (Case(7, 7, 16, 16, heads=4, packed=True), Case(1, 20, 16, 8, cached=True))


def small(tmp_path, **fields):
    sizes = {"lengths": (32,), "widths": (16,), "heads": (2,), "rounds": 2, "out": tmp_path}
    return attention.Benchmark(**sizes | fields)


def sabotaged(name, factor=1.001):
    """An implementation whose position states come out a little too large."""
    right = IMPLEMENTATIONS[name]

    def attend(*arrays, **arguments):
        out, mixed, lse = right.attend(*arrays, **arguments)
        return out, mixed * factor, lse

    return dataclasses.replace(right, attend=attend)


def broken(*_, **__):
    raise RuntimeError("ptxas exited with status 1")


@pytest.mark.slow
def test_attention_writes_times_and_ratios(tmp_path):
    attention.run(small(tmp_path, lengths=(32, 64)))
    report = json.loads((tmp_path / "attention.json").read_text())
    assert report["platform"] == "cpu" and report["jax"] == jax.__version__
    assert report["settings"]["dtype"] == "float32" and "out" not in report["settings"]
    seconds = {
        (r["length"], r["pass"], r["implementation"], r["states"]): r["seconds"]
        for r in report["rows"]
    }
    assert len(seconds) == len(report["rows"]) >= 2 * 2 * 3 * 2
    for row in report["rows"]:
        where = row["length"], row["pass"]
        assert row["error"] is None and row["of_matmul"] is None
        plain = seconds[*where, row["implementation"], False]
        assert row["over_plain"] == pytest.approx(row["seconds"] / plain)
        assert row["over_three_calls"] == pytest.approx(
            row["seconds"] / seconds[*where, "jax.nn", True]
        )
        products = (3 if row["states"] else 2) + (
            0 if row["pass"] == "forward" else 7 if row["states"] else 5
        )
        operations = 2 * 2 * row["length"] ** 2 * 16 * products / 2
        assert row["tflops"] == pytest.approx(operations / row["seconds"] / 1e12)
    assert (tmp_path / "attention.png").read_bytes()[:4] == b"\x89PNG"


def test_one_that_fails_and_one_that_is_too_large_are_rows(tmp_path, monkeypatch):
    failing = dataclasses.replace(IMPLEMENTATIONS["xla"], attend=broken)
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", failing)
    monkeypatch.setattr(attention, "PASSES", {"forward": False})
    monkeypatch.setattr(attention, "MOST_SCORES", 1)
    shape = attention.Shape(1, 32, 2, 16)
    rows = attention.measure(shape, attention.resolve(small(tmp_path)), None)
    errors = {row["error"] for row in rows}
    assert "RuntimeError: ptxas exited with status 1" in errors
    assert any("left out: its scores" in error for error in errors)
    monkeypatch.setattr(attention, "MOST_SCORES", 2**30)
    rows = attention.measure(shape, attention.resolve(small(tmp_path)), 1e12)
    for row in rows:
        assert (row["error"] is not None) == (row["implementation"] == "xla")
        if row["error"] is None:
            assert row["of_matmul"] == pytest.approx(row["tflops"])
    attention.show(rows)


def test_three_calls_give_what_one_gives():
    q, k, v, e = attention.Shape(2, 20, 2, 16).arrays("float32")
    outs = attention._jax_nn("xla", *attention._three(q, k, v, e), causal=True)
    out, mixed = tape_attention(q, k, v, e, implementation="reference")
    np.testing.assert_allclose(outs[0], out, atol=1e-5)
    np.testing.assert_allclose(outs[1][..., :8], mixed[..., :8], atol=1e-5)
    np.testing.assert_allclose(outs[2][..., 8:], mixed[..., 8:], atol=1e-5)


@pytest.mark.slow
def test_device_check_passes_and_notices_a_small_fault(monkeypatch):
    rows = device_check.check(["reference", "xla"], FEW)
    assert len(rows) == 2 * (2 + 2)
    assert all(row["passed"] for row in rows) and not device_check.failures(rows)
    assert set(rows[0]["errors"]) == set(device_check.QUANTITIES)
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", sabotaged("xla"))
    rows = device_check.check(["reference", "xla"], FEW)
    failed = [(row["implementation"], row["dtype"]) for row in rows if not row["passed"]]
    assert failed == [("xla", "float32")] * 2
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", sabotaged("xla", math.nan))
    rows = device_check.check(["xla"], FEW[:1])
    assert not any(row["passed"] for row in rows)
    device_check.show(rows)


def test_device_check_rows_of_refusals_and_crashes(monkeypatch):
    crashing = dataclasses.replace(IMPLEMENTATIONS["xla"], attend=broken)
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", crashing)
    rows = device_check.check(["xla", "cudnn"], [dataclasses.replace(FEW[0], dtypes=("float32",))])
    assert [row["passed"] for row in rows] == [False, None]
    assert "ptxas" in rows[0]["note"] and rows[1]["note"].startswith("refuses segment_ids")
    assert len(device_check.failures(rows)) == 1


def test_the_cases_cover_what_they_should():
    cases = device_check.CASES
    assert {c.n_k for c in cases} >= {1, 7, 63, 65, 200, 1000}
    assert {c.width for c in cases} >= {16, 32, 48, 64, 72, 80, 96, 128}
    assert any(c.n_q == 1 and c.n_k > 1 and c.cached for c in cases)
    assert any(c.heads > c.kv_heads and c.packed for c in cases)
    assert {dtype for c in cases for dtype in c.dtypes} == set(device_check.LIMITS)
    call = device_check.make_call(Case(70, 70, 16, 16, packed=True), "float32")
    padding = np.asarray(call.segment_ids[0]) < 0
    assert padding.any() and not call.mask()[padding].any()


@pytest.mark.slow
def test_a_failed_check_ends_the_command_after_all_was_measured(tmp_path, monkeypatch):
    monkeypatch.setitem(IMPLEMENTATIONS, "xla", sabotaged("xla"))
    few = functools.partial(device_check.check, cases=FEW[:1])
    monkeypatch.setattr(device_check, "check", few)
    arguments = "--lengths 16 --widths 16 --heads 1 --rounds 1 --device-check --out"
    with pytest.raises(SystemExit, match="device check FAILED:\nxla, float32") as stop:
        command(attention, monkeypatch, *arguments.split(), str(tmp_path))
    assert stop.value.code not in (0, None)
    report = json.loads((tmp_path / "attention.json").read_text())
    assert {row["passed"] for row in report["check"]} == {True, False}
    assert len(report["rows"]) >= 12


def command(module, monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["benchmark", *arguments])
    module.main()


@pytest.mark.parametrize(
    ("module", "arguments", "says"),
    [
        (attention, ["--lengths", "0"], "attention.lengths"),
        (attention, ["--widths", "33"], "must be even"),
        (attention, ["--implementations", "referenc"], "did you mean reference"),
        (attention, ["--implementations", "pallas"], "on cpu"),
        (decoding, ["--context", "0"], "decoding.context"),
        (efficiency, ["--layers", "0"], "efficiency.layers"),
        (encodings, ["--layers", "1"], "encodings.layers=1 must be >= 2"),
        (encodings, ["--encodings", "fier"], "did you mean fire"),
        (autotune, ["--widths", "48"], "autotune.widths"),
        (autotune, ["--out", "/nowhere/tiles.json"], "autotune.out"),
        (autotune, [], "on a GPU, and JAX found only cpu"),
    ],
)
def test_bad_input_ends_with_the_field_and_a_fix(module, arguments, says, monkeypatch, capsys):
    with pytest.raises(SystemExit) as stop:
        command(module, monkeypatch, *arguments)
    assert stop.value.code not in (0, None)
    assert says in f"{capsys.readouterr().err} {stop.value}"


# --- autotune -------------------------------------------------------------------------------------

LIMIT = tiles.SHARED_MEMORY["9.0"]
BEST = Tile(64, 32, 8, 1)
WRONG, FAILING = Tile(64, 64, 8, 1), Tile(32, 32, 8, 1)


def fake_build(problem, those):
    results = {WRONG: jnp.asarray([1.0, 2.5]), FAILING: RuntimeError("ptxas")}
    right = jnp.asarray([1.0, 2.0])
    runs = {tile: results.get(tile, right) for tile in those}
    return {
        tile: x if isinstance(x, Exception) else functools.partial(lambda x: x, x)
        for tile, x in runs.items()
    }


def fake_timer(runs):
    """WRONG and FAILING would be the fastest, BEST comes next."""
    fast = {WRONG: 0.1, FAILING: 0.1, BEST: 0.5}
    return {tile: fast.get(tile, 1.0) for tile in runs}


def tune(settings, capability="9.0", timer=fake_timer, said=None):
    report = [].append if said is None else said.append
    return autotune.tune(settings, capability, LIMIT, fake_build, timer, report)


def test_the_fastest_right_tile_is_taken_and_all_other_entries_stay(tmp_path):
    out, said = tmp_path / "tiles.json", []
    settings = autotune.Settings(widths=(64,), dtypes=("bfloat16",), out=out)
    table, before = tune(settings, said=said), tiles.load()
    assert tiles.load(out) == table
    for kernel in tiles.KERNELS:
        assert Tile(*table["9.0"]["bfloat16"]["64"].pop(kernel)) == BEST
        before["9.0"]["bfloat16"]["64"].pop(kernel)
    assert table == before
    assert len(said) == 3 and "1 failed, 1 wrong" in said[0]
    assert list(tmp_path.iterdir()) == [out]


def test_noise_changes_no_tile(tmp_path):
    settings = autotune.Settings(widths=(64,), out=tmp_path / "tiles.json")
    almost = lambda runs: {t: 0.99 if t == BEST else 1.0 for t in runs}  # noqa: E731
    assert tune(settings, timer=almost) == tiles.load()


def test_a_new_gpu_gets_every_entry_and_choose_finds_its_own(tmp_path, monkeypatch):
    out = tmp_path / "tiles.json"
    table = tune(autotune.Settings(widths=(32,), dtypes=("float32",), out=out), "10.0")
    old = tiles.load()
    assert table["9.0"] == old["9.0"]
    assert table["10.0"]["bfloat16"] == old["9.0"]["bfloat16"]
    monkeypatch.setattr(tiles, "_table", lambda: tiles.load(out))
    assert tiles.choose(32, 32, "float32", "10.0").forward == BEST
    assert tiles.choose(64, 64, "bfloat16", "10.0") == tiles.choose(64, 64, "bfloat16", "9.0")


def interrupted_after(count):
    """A timer that is stopped in its next call."""
    calls = []

    def timer(runs):
        calls.append(len(runs))
        if len(calls) > count:
            raise KeyboardInterrupt
        return fake_timer(runs)

    return timer


def test_an_interrupted_run_is_continued(tmp_path):
    settings = autotune.Settings(widths=(32, 64), dtypes=("bfloat16",), out=tmp_path / "tiles.json")
    with pytest.raises(KeyboardInterrupt):
        tune(settings, timer=interrupted_after(4))  # within the second width
    entries = tiles.load(settings.out)["9.0"]["bfloat16"]
    assert Tile(*entries["32"]["forward"]) == BEST
    assert entries["64"] == tiles.load()["9.0"]["bfloat16"]["64"]
    said = []
    table = tune(settings, said=said)
    assert "done by an earlier run" in said[0] and len(said) == 1 + 3
    assert Tile(*table["9.0"]["bfloat16"]["64"]["queries"]) == BEST
    assert list(tmp_path.iterdir()) == [settings.out]


@pytest.mark.parametrize("change", [{"rounds": 7}, {"length": 2048}])
def test_what_was_measured_otherwise_is_not_continued(tmp_path, change):
    settings = autotune.Settings(widths=(32, 64), dtypes=("bfloat16",), out=tmp_path / "tiles.json")
    with pytest.raises(KeyboardInterrupt):
        tune(settings, timer=interrupted_after(3))
    said = []
    tune(dataclasses.replace(settings, **change), said=said)
    assert len(said) == 6 and not any("earlier run" in line for line in said)


def test_where_no_tile_runs_the_entry_stays(tmp_path):
    settings = autotune.Settings(widths=(64,), dtypes=("float32",), out=tmp_path / "tiles.json")
    none = lambda runs: {tile: RuntimeError("no") for tile in runs}  # noqa: E731
    said = []
    assert tune(settings, timer=none, said=said) == tiles.load()
    assert all("no tile runs" in line for line in said)


def test_the_table_has_one_kernel_a_line():
    table = tiles.load()
    text = autotune.dumps(table)
    assert json.loads(text) == table
    kernels = sum(len(widths) * 3 for dtypes in table.values() for widths in dtypes.values())
    assert sum("[" in line for line in text.splitlines()) == kernels == text.count("[")


def test_candidates_fit_and_include_what_the_table_has():
    for dtype, widths in tiles.load()["9.0"].items():
        for width, entry in widths.items():
            for kernel, tile in entry.items():
                problem = autotune.Problem(kernel, int(width), dtype, 4, 4096, 16)
                found = autotune.candidates(problem, LIMIT)
                assert all(problem.shared_memory(tile) <= LIMIT for tile in found)
                assert 20 < len(found) < 120 and problem.fit(Tile(*tile), LIMIT) in found


@pytest.mark.slow
@pytest.mark.parametrize("kernel", tiles.KERNELS)
def test_what_is_timed_is_the_kernel(kernel, monkeypatch):
    """The kernels' own code, interpreted: two tiles agree, and each gives what `xla` gives."""
    monkeypatch.setattr(gpu, "INTERPRET", True)
    problem = autotune.Problem(kernel, 16, "float32", 1, 48, 2)
    runs = autotune.build(problem, [Tile(16, 32, 4, 1), Tile(32, 16, 4, 1)])
    one, other = (run() for run in runs.values())
    assert autotune.is_close(one, other, 1e-5)
    assert not autotune.is_close(one, jax.tree.map(lambda x: 1.001 * x, other), 1e-5)
    q, k, (v, e), d_outs, *_ = autotune._operands(problem)
    attend = functools.partial(tape_attention, implementation="xla")
    outs, pull = jax.vjp(attend, q, k, v, e)
    dq, dk, dv, de = pull(d_outs)
    want = {"forward": outs, "keys": (dk, (dv, de)), "queries": dq}[kernel]
    got = one[0] if kernel == "forward" else one
    assert autotune.is_close(got, want, 1e-5)
