"""The benchmark: both sides do the same work, ratios follow from times, and nothing unmeasured is claimed."""

import json
from dataclasses import replace
from functools import cache, partial

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import model.cpu as cpu
from model.attention import set_attention_backend
from model.common import UserError
from model.config import PRESETS
from model.generate import CompiledStep, generate
from model.images import load_image
from tests.runs import SERVER
from train.benchmark import command as benchmark
from train.benchmark import growth, pictures, sections, timing
from train.benchmark import work as works_module
from train.benchmark.sections import SECTIONS
from train.benchmark.setup import Setup, matmul_flops, our_model, prompt, random_state, their_model
from train.benchmark.timing import COMPILED, OURS, THEIRS, Measurement, in_own_process, spell_seconds, table, take_turns
from train.benchmark.work import Work, decode_steps
from train.data.batches import load_batches

CPU = torch.device("cpu")
SMALL = replace(
    PRESETS["tiny"],
    vision=replace(PRESETS["tiny"].vision, num_hidden_layers=1, image_size=56),
    text=replace(PRESETS["tiny"].text, num_hidden_layers=2),
)


@pytest.fixture
def setup(monkeypatch):
    monkeypatch.setitem(PRESETS, "tiny", SMALL)
    monkeypatch.setattr(works_module, "ANSWER", 6)
    monkeypatch.setattr(works_module, "STEPS", 5)
    return Setup(SMALL, CPU, torch.float32, batch=2)


def run(tmp_path, *arguments) -> dict:
    benchmark.main(
        ["--geometry", "tiny", "--device", "cpu", "--no-memory", "--rounds", "1", *arguments, "--out", str(tmp_path)]
    )
    return json.loads((tmp_path / "benchmark.json").read_text())


def test_ratios_are_taken_within_a_round():
    """Breaks when a ratio is that of medians, so that a slow minute counts for one side, or is upside down."""
    row = Measurement("train", "step", {OURS: [1.0, 20.0, 3.0], THEIRS: [2.0, 80.0, 4.0]}, peak={OURS: 30, THEIRS: 40})
    assert row.ratio(OURS) == (0.5, 0.375, 0.625) and row.ratio(THEIRS) is None
    assert row.median(OURS) == 3.0 and row.peak_ratio(OURS) == 0.75 and row.peak_ratio(THEIRS) is None
    sides = row.to_dict()["sides"]
    assert sides[OURS]["ratio"] == 0.5 and sides[OURS]["ratio_quartiles"] == [0.375, 0.625]
    assert sides[THEIRS]["ratio"] is None and sides[THEIRS]["peak_bytes"] == 40
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table([row]).splitlines()]
    assert lines[2] == ["step", "ours", "3.00 s", "0.50 [0.38, 0.62]", "0 MiB", "0.75", ""]
    assert lines[3][:4] == ["step", "transformers", "4.00 s", ""]
    assert spell_seconds(0.01234) == "12.3 ms"


def test_sides_take_turns():
    """Breaks when one side runs all its rounds at once, always first, or the warm-up counts."""
    order = []
    seconds = take_turns({name: lambda name=name: order.append(name) for name in "ab"}, 3, warmup=1)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    assert {name: len(of_side) for name, of_side in seconds.items()} == {"a": 3, "b": 3}


@pytest.mark.long
@pytest.mark.parametrize("section", ["prefill", "decode", "train", "eval"])
def test_both_sides_do_the_same_work(section, setup):
    """Breaks when the peers have other weights, inputs or adapters: then their times say nothing about each other."""
    state = random_state(setup.config, setup.dtype, CPU)
    make = SECTIONS[section].make
    ours, theirs = (make(setup, side, state) for side in (OURS, THEIRS))
    assert [name for name in ours if "alone" not in name] == list(theirs)
    for name in list(theirs)[:2]:
        mine, other = ours[name].run(), theirs[name].run()
        if section in ("decode", "eval"):
            assert len(mine) and [*map(str, mine)] == [*map(str, other)]
            assert section == "eval" or mine.shape[1] == works_module.ANSWER
        else:
            assert torch.allclose(mine, other, atol=1e-4)
    if section == "train":  # B = 0 at first: after a step, LoRA itself is compared
        again = [works[name].run() for works in (ours, theirs) for name in works]
        assert again[0] != mine and again[0].item() == pytest.approx(again[1].item(), abs=1e-4)


def test_the_weights_are_shared_not_copied(setup):
    """Breaks when each side holds its own copy: two models of 3B, twice, would not fit."""
    state = random_state(setup.config, setup.dtype, CPU)
    ours, theirs = our_model(setup, state), their_model(setup, state)
    for name, parameter in ours.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()
        assert theirs.get_parameter(f"model.{name}").data_ptr() == state[name].data_ptr()
    assert not any(t.is_meta for t in (*theirs.parameters(), *theirs.buffers()))


def test_flops_are_those_of_the_products(setup, monkeypatch):
    """Breaks when a share of the peak counts products that are not done, such as the head at every position."""
    monkeypatch.setattr(cpu, "MIN_OPERATIONS", 1 << 60)  # the counter knows PyTorch's own products
    model = our_model(setup, random_state(setup.config, setup.dtype, CPU))
    set_attention_backend(model, "eager")  # nor does it know the kernel of a CPU
    inputs = prompt(setup, 3)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(**inputs, positions_to_keep=1)
    counted = sum(counter.get_flop_counts()["Global"].values())
    length = inputs["input_ids"].shape[1]
    vision, text = setup.config.vision, setup.config.text
    patches = setup.config.num_image_tokens
    # neither the projector nor the patches' embedding is counted as a layer
    counted -= 2 * 3 * patches * vision.hidden_size * (text.hidden_size + 3 * vision.patch_size**2)
    assert matmul_flops(setup, 3, length, 3, False) == counted
    with_backward = matmul_flops(setup, 3, length, 3, True)
    tower = matmul_flops(setup, 3, 0, 0, False)
    assert tower + 2 * (counted - tower) < with_backward < tower + 3 * (counted - tower)
    works = SECTIONS["prefill"].make(setup, OURS, random_state(setup.config, setup.dtype, CPU))
    assert works[f"batch 1, {length} tokens"].flops == pytest.approx(counted / 3)


@pytest.mark.long
def test_decoding_steps_start_anew(setup):
    """Breaks when a second run of the steps goes on behind the first, past the cache, or counts too few bytes."""
    torch._dynamo.reset()
    state = random_state(setup.config, setup.dtype, CPU)
    model, inputs = our_model(setup, state), prompt(setup, 2)
    last = torch.stack(generate(model, **inputs, max_new_tokens=works_module.STEPS + 1))[:, -1]
    weights = sum(t.numel() * 4 for name, t in state.items() if name.startswith("language_model"))
    for compiled in (CompiledStep(model, backend="eager"), None):
        work = decode_steps(model, compiled, inputs)
        assert torch.equal(work.run(), last) and torch.equal(work.run(), last)
        assert weights < work.moved / works_module.STEPS < 1.5 * weights


def test_what_does_not_fit_is_a_row(tmp_path, setup, monkeypatch):
    """Breaks when a GPU too small for one row, side or section ends the whole benchmark, or claims a time for it."""

    def too_large(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    def made(setup, side, state):
        return {"small": Work(lambda: None), "large": Work(too_large if side == OURS else lambda: None)}

    monkeypatch.setitem(SECTIONS, "prefill", replace(SECTIONS["prefill"], make=made))
    monkeypatch.setitem(SECTIONS, "train", replace(SECTIONS["train"], make=too_large))
    monkeypatch.setitem(SECTIONS, "load", replace(SECTIONS["load"], measure=too_large))
    first, last, load, train = run(tmp_path, "--section", "prefill", "load", "train")["rows"]
    assert first["sides"][OURS]["ratio"] > 0 and last["sides"][THEIRS]["median_s"] > 0
    for row, side in ((last, OURS), (load, OURS), (train, OURS), (train, THEIRS)):
        found = row["sides"][side]
        assert found["note"] == "out of memory" and found["median_s"] is found["ratio"] is None
    text = (tmp_path / "benchmark.md").read_text()
    assert text.count("out of memory") == 4 and "nan" not in text


def test_growth_is_of_the_same_work(tmp_path, setup, monkeypatch):
    """Breaks when sides of the growth read other tokens, an amount is missing, or a peak does not grow."""
    values = {"length": (64, 128), "picture": (56,), "cache": (8,)}
    axes = {name: replace(growth.AXES[name], values=of_axis) for name, of_axis in values.items()}
    monkeypatch.setattr(growth, "AXES", axes)
    monkeypatch.setattr(growth, "STEPS", 2)
    monkeypatch.setattr(growth, "installed", cache(growth.installed))
    models = growth.installed(setup)
    for axis in ("length", "rows"):
        first, twin, mamba, theirs = (growth.work(setup, side, models[side], axis, 2)() for side in growth.SIDES)
        assert torch.allclose(first, theirs, atol=1e-5) and torch.equal(first, twin) and mamba.shape == first.shape
    result = run(tmp_path, "--section", "growth")
    assert [row["work"] for row in result["rows"]] == [
        axis.work.format(value) for axis in axes.values() for value in axis.values
    ]
    assert all(list(row["sides"]) == list(growth.SIDES) for row in result["rows"])
    assert (tmp_path / "benchmark-growth.png").stat().st_size > 1000
    monkeypatch.setattr(growth, "reset_peak", lambda device: None)  # this process's own peak is of another test
    counted = iter((15, 25))
    monkeypatch.setattr(growth, "begin_process", lambda *_: 5)
    monkeypatch.setattr(growth, "peak_bytes", lambda *_: next(counted))
    assert growth.peaks(setup, OURS, "length") == [10, 20]


def test_pictures_are_measured_as_training_reads_them(tmp_path, setup, processor, monkeypatch):
    """Breaks when the section reads other pictures than it says, or counts the workers' time as this process's."""
    monkeypatch.setattr(pictures, "load_batches", lambda *args: read.append(args) or load_batches(*args))
    monkeypatch.setattr(pictures.measure, "__defaults__", (3,))
    monkeypatch.setattr(pictures.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(pictures.Processor, "from_source", lambda name: processor)
    read = []
    rows = run(tmp_path, "--section", "data")["rows"]
    assert [row["work"] for row in rows[:2]] == ["224 pixels, 0 workers", "224 pixels, 1 workers"]
    assert {args[2].config.vision.image_size for args in read} == {224, 448} and rows[0]["sides"][OURS]["ratio"] > 0
    assert (
        f"/s a core; 3B learns {pictures.eaten(setup, 224):,.0f}/s" in rows[0]["sides"][OURS]["note"]
        and "core" not in rows[1]["sides"][OURS]["note"]
    )
    assert load_image(pictures.draw(tmp_path, 1)[0]).size == (640, 480)


def test_shares_of_the_limits(monkeypatch):
    """Breaks when a share is computed from other seconds than the row's median, or, on a CPU, of products that another
    path computes faster."""
    monkeypatch.setattr(timing, "read_bandwidth", lambda: 5.0)
    monkeypatch.setattr(timing, "matmul_peak", lambda *given, rounds: {"onednn": 2.0, "torch": 1.0}[cpu.path])
    assert timing.limits_of.__wrapped__(CPU, torch.float32) == (2.0, 5.0)
    row = Measurement("train", "step", {OURS: [0.5, 2.0, 0.5]})
    note = sections.notes(row, OURS, Work(print, flops=2e12, moved=3e11), {}, (8e12, 2e12))
    assert note == f"50 % of 8 TFLOP/s, 30 % of 2000 GB/s, {500 / works_module.STEPS:.2f} ms a step"
    assert sections.notes(row, OURS, Work(print, flops=2e12), {}, None) == ""


@pytest.mark.long
def test_a_compiled_side_is_measured_where_it_is_asked_for(tmp_path, setup, monkeypatch):
    """Breaks when --compile times the eager steps again."""
    monkeypatch.setitem(PRESETS, "tiny", replace(SMALL, text=replace(SMALL.text, num_hidden_layers=1)))
    used = []
    monkeypatch.setattr(
        works_module, "CompiledStep", lambda model: used.append(1) or CompiledStep(model, backend="eager")
    )
    torch._dynamo.reset()
    whole = [row for row in run(tmp_path, "--section", "decode", "--compile")["rows"] if "alone" not in row["work"]]
    assert len(whole) == 3
    for row in whole:
        assert list(row["sides"]) == [OURS, COMPILED, THEIRS] and row["sides"][COMPILED]["ratio"] > 0
        assert row["sides"][COMPILED]["note"].endswith("tokens as transformers")
    assert len(used) == 3


@pytest.mark.long
def test_the_command(tmp_path, setup, monkeypatch, capsys):
    """Breaks when a section cannot run, the default waits for a compiler, a number is missing in the JSON, or the three
    files disagree."""
    monkeypatch.setattr(works_module, "CompiledStep", lambda model: pytest.fail("compiled without --compile"))
    result = run(tmp_path, "--section", "prefill", "decode", "attention", "quantize", "linear", "--threads", "1")
    rows = {(row["section"], row["work"]): row["sides"] for row in result["rows"]}
    assert {section for section, _ in rows} == {"prefill", "decode", "attention", "quantize", "linear"}
    for (section, name), sides in rows.items():
        if "alone" in name:  # of our side only
            assert set(sides) == {OURS}
            continue
        against = SECTIONS[section].against
        assert set(sides) == set(SECTIONS[section].sides)
        for side, found in sides.items():
            assert found["median_s"] > 0 and len(found["seconds"]) == 1
            assert (found["ratio"] is None) == (side == against)
            assert side == against or found["ratio"] == found["seconds"][0] / sides[against]["seconds"][0]
    same = {work: sides[OURS]["note"] for (section, work), sides in rows.items() if section == "decode"}
    assert same["6 tokens, batch 4"] == "24 of 24 tokens as transformers"
    note = next(sides["int8"]["note"] for (section, _), sides in rows.items() if section == "quantize")
    assert "MiB" in note and "nats a token" in note
    assert {"machine", "versions", "date", "commit", "command", "geometry", "device"} <= set(result)
    assert "transformers" in result["versions"]
    text = (tmp_path / "benchmark.md").read_text()
    assert result["command"] in text and "--out" not in text and "### Prefill" in text
    assert (tmp_path / "benchmark.png").stat().st_size > 1000
    assert "### Prefill" in capsys.readouterr().out


@pytest.mark.long
def test_load_and_peaks_are_measured_in_processes_of_their_own(tmp_path, monkeypatch):
    """Breaks when a child cannot build its side, or the peak counts what the imports took."""

    def with_one_process_less(function, *given):
        return (function if function is sections.make_checkpoint else partial(in_own_process, function))(*given)

    with pytest.raises(UserError, match="int, in a process of its own: ValueError: .*no-such"):
        in_own_process(int, "no-such")  # in a new one; the others are forked from one that has imported everything
    monkeypatch.setattr(timing, "get_context", lambda method: SERVER)
    monkeypatch.setattr(sections, "in_own_process", with_one_process_less)
    benchmark.main(
        [
            "--geometry",
            "tiny",
            "--device",
            "cpu",
            "--rounds",
            "1",
            "--section",
            "load",
            "--threads",
            "1",
            "--out",
            str(tmp_path),
        ]
    )
    (row,) = json.loads((tmp_path / "benchmark.json").read_text())["rows"]
    assert set(row["sides"]) == {OURS, THEIRS}
    for side in row["sides"].values():
        assert 1e6 < side["peak_bytes"] < 1.5e8 and " × the weights" in side["note"]
    setup = Setup(PRESETS["tiny"], CPU, torch.float32, threads=1)
    peaks = in_own_process(sections.peaks_of, "train", OURS, setup)
    assert list(peaks) == ["batch 4, 48 tokens"] and 1e6 < peaks["batch 4, 48 tokens"] < 1.5e8


@pytest.mark.long
def test_without_peers_there_is_no_ratio(tmp_path, setup, monkeypatch, capsys):
    """Breaks when a missing transformers ends in a traceback, or a number is claimed that nothing was compared with."""
    monkeypatch.setitem(__import__("sys").modules, "transformers", None)
    result = run(tmp_path, "--section", "prefill", "train")
    assert "transformers is not installed: only our side is measured" in capsys.readouterr().err
    for row in result["rows"]:
        assert set(row["sides"]) == {OURS} and row["sides"][OURS]["ratio"] is None
    assert not (tmp_path / "benchmark.png").exists()
    assert " transformers |" not in (tmp_path / "benchmark.md").read_text()


def test_collected_reports_say_what_is_missing(tmp_path):
    """Breaks when BENCHMARKS.md leaves out a run, or passes over that no GPU was measured."""
    about = {
        "geometry": "tiny",
        "dtype": "fp32",
        "device": "cpu",
        "machine": "M",
        "versions": "V",
        "date": "D",
        "commit": "C",
        "command": "C",
    }
    for name, device in (("a", "cpu"), ("b", "cuda")):
        rows = [Measurement("train", f"step {name}", {OURS: [1.0] * n, THEIRS: [2.0] * n}) for n in (1, 3)]
        benchmark.write_report(rows, about | {"device": device}, tmp_path / name)
    benchmark.main(["--collect", str(tmp_path / "a"), "--out", str(tmp_path)])
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert "## M: tiny, fp32, cpu\n" in text
    assert "[quartiles], 1 to 3 rounds." in text
    assert "step a" in text and text.count("not yet measured") == len(benchmark.GPU_WORK)
    benchmark.main(["--collect", *(str(tmp_path / name) for name in "ab"), "--out", str(tmp_path)])
    text = (tmp_path / "BENCHMARKS.md").read_text()
    assert "step a" in text and "step b" in text and "not yet measured" not in text
    with pytest.raises(UserError, match="not found"):
        benchmark.main(["--collect", str(tmp_path / "nowhere")])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rounds", "0"], "--rounds is 0"),
        (["--device", "no-such"], "--device no-such"),
        (["--threads", "0"], "--threads is 0, expected an integer from 1"),
    ],
)
def test_senseless_flags_are_refused(arguments, message):
    """Breaks when a mistake ends in a traceback."""
    with pytest.raises(UserError, match=message):
        benchmark.main(arguments)
