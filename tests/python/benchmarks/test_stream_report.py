"""What makes a record of streamed training worthless is reported; a sound one has its table and its peaks."""

import copy
import pathlib
import sys

import pytest

HARNESS = pathlib.Path(__file__).resolve().parents[3] / "benchmarks" / "harness"
sys.path.insert(0, str(HARNESS))
import stream_report as report  # noqa: E402

MIB = 1 << 20
PATHS = {"streamed": ["hopper"], "streamed_dequant": ["dequant"], "resident": ["hopper"], "resident_bnb": []}


def row(arm: str, tokens: int) -> dict:
    return dict(
        arm=arm,
        tokens=tokens,
        garbage=False,
        step_ms=100.0,
        host_ms=50.0,
        rounds_ms=[99.0, 100.0, 101.0],
        tok_s=10.0 * tokens,
        ratio_resident=0.99,
        ratio_link=0.5 if arm.startswith("streamed") else None,
        peak_allocated_mib={"resident": 5000.0, "streamed": 1725.0, "streamed_dequant": 1835.0}.get(arm, 5100.0),
        peak_reserved_mib=6000.0,
        spread=0.02,
        clock_mhz=1980,
        gradient_norm=0.5,
        adapters_moved=3,
        loss_first=9.5,
        loss_last=9.4,
        paths={path: {"forward": 7, "grad_input": 7} for path in PATHS[arm]},
    )


def sound() -> dict:
    cell = dict(equal=449, compared=449, zero=0)
    case = dict(
        shape="8b",
        adapters="all",
        rows=[row(arm, tokens) for tokens in (512, 8192) for arm in PATHS],
        memory=dict(layers=32, layer_bytes=110 * MIB, slot_bytes=220 * MIB, host_bytes=32 * 110 * MIB),
        exact={name: dict(cell) for name in ("again", "streamed", "streamed_keep")}
        | {"streamed_dequant": cell | {"equal": 3}},
        h2d_gb_s=55.0,
        pageable_gb_s=17.0,
        gemm_tflops=780.0,
        stack=[dict(tokens=512, step_ms=140.0, no_copies_ms=60.0, ratio_link=0.98)],
    )
    return dict(machine=dict(device="card", command="c", torch="2"), seconds=1.0, cases=[case])


def test_a_sound_record_has_no_fault_and_says_what_it_found():
    record = sound()
    assert report.faults(record) == []
    text = report.markdown(record)
    assert "copies of a layer at 55.0 GB/s, pageable ones at 17.0, a bf16 multiply of 8192^3 at 780 TFLOP/s" in text
    assert (
        "| 512 | streamed | 3 | 50.0 | 100.0 | 5120 | 0.990 | 0.500 | 1725 | 6000 | 0.020 | - | 1980 | - | - |" in text
    )
    assert "resident - base + slots 1700 MiB (+25); the dequantise arm +110 MiB (+1.00 layers)" in text
    assert "0.980 of the link" in text and "!" not in text.split("`!`")[0]


def test_the_training_of_every_honest_arm_is_in_the_record_with_driver_and_power_limit():
    record = sound()
    record["machine"].update(driver="580.1", power_limit="700.00 W")
    rows = record["cases"][0]["rows"]
    rows[1].update(gradient_norm=2.0, adapters_moved=2, loss_last=8.5)
    rows.append(row("streamed", 512) | dict(arm="no_copies", garbage=True, gradient_norm=77.0))
    text = report.markdown(record)
    assert "gradient norms 0.5 to 2, adapters changed in 23 of 24 rounds" in text
    assert "loss of the last round less the first's -1.000 to -0.100" in text and "77" not in text
    assert "torch 2, driver 580.1, power limit 700.00 W, 1 s" in text


def test_a_case_of_a_merged_record_names_what_made_it():
    record = sound()
    case = record["cases"][0] | dict(command="c", commit="abc")
    record["cases"] = [case, case | dict(command="other --rounds 5", commit="def")]
    text = report.markdown(record)
    assert text.count("`c`") == 1 and "Commit abc.\n" in text and "`other --rounds 5`, commit def." in text


def test_what_each_ablation_takes_off_and_the_ratios_with_their_intervals():
    record = sound()
    rows = record["cases"][0]["rows"]
    rows[0]["ratio_peer"] = [0.8, 0.7, 0.9]
    for arm, ms in (("no_decode", 60.0), ("streamed_keep", 75.0)):
        rows.append(row("streamed", 512) | dict(arm=arm, step_ms=ms, garbage=arm == "no_decode"))
    text = report.markdown(record)
    assert "512 tokens, streamed: 0.800 (0.700 .. 0.900) of the time of soup-cli" in text
    assert "dequantisation's share of the dequantise arm +40.0%" in text and "keep takes off +25.0%" in text
    assert "8192 tokens, streamed" not in text


VERDICTS = {
    "faster": ([0.9, 0.88, 0.92], "holds"),
    "surely slower": ([1.05, 1.03, 1.07], "MISSED"),
    "slower, may be equal": ([1.02, 0.99, 1.04], "holds"),
    "wide, yet surely faster": ([0.6, 0.5, 0.9], "holds"),
    "too wide": ([0.95, 0.7, 1.3], "no verdict, the interval is too wide"),
}


@pytest.mark.parametrize("case", VERDICTS)
def test_targets_are_judged_by_intervals(case):
    ratio, word = VERDICTS[case]
    record = sound()
    record["cases"][0]["rows"][0].update(ratio_peer=ratio, rounds_ms=[100.0] * 5)
    middle, low, high = ratio
    text = report.markdown(record)
    assert f"* Not slower than soup-cli, 512 tokens: {middle:.3f} ({low:.3f} .. {high:.3f}), {word}." in text
    record["cases"][0]["rows"][0]["rounds_ms"] = [100.0] * 4
    assert "Not slower than soup-cli" not in report.markdown(record)


RATES = {
    "fast enough": ([1.01, 1.0, 1.02], "0.990 (0.980 .. 1.000), holds"),
    "surely too slow": ([1.05, 1.04, 1.06], "0.952 (0.943 .. 0.962), MISSED"),
    "too wide": ([1.02, 0.9, 1.2], "0.980 (0.833 .. 1.111), no verdict, the interval is too wide"),
}


@pytest.mark.parametrize("case", RATES)
def test_the_rate_beside_the_resident_model_is_judged_at_lengths_that_compute(case):
    times, words = RATES[case]
    record = sound()
    for streamed in (row for row in record["cases"][0]["rows"] if row["arm"] == "streamed"):
        streamed.update(time_of_resident=times, rounds_ms=[100.0] * 5)
    text = report.markdown(record)
    assert f"* 0.97 of the resident rate, 8192 tokens: {words}." in text
    assert "0.97 of the resident rate, 512 tokens" not in text


def test_the_link_is_judged_where_copies_are_the_limit():
    record = sound()
    record["cases"][0]["rows"].append(row("resident", 512) | dict(arm="no_copies", garbage=True, step_ms=40.0))
    assert "of the link, 512 tokens (" not in report.markdown(record)  # three rounds
    record["cases"][0]["rows"][0]["rounds_ms"] = [100.0] * 5
    assert (
        "* 0.95 of the link, 512 tokens (copies 50 ms, a step without them 40 ms): 0.500, MISSED."
        in report.markdown(record)
    )
    record["cases"][0]["rows"][0]["ratio_link"] = 0.96
    assert "a step without them 40 ms): 0.960, holds." in report.markdown(record)
    record["cases"][0]["rows"][-1]["step_ms"] = 97.0
    assert "of the link, 512 tokens (" not in report.markdown(record)


def test_the_peak_is_judged_against_its_formula():
    record = sound()
    text = "* Peak at most resident - base + slots + 64 MiB, 512 tokens: "
    assert f"{text}+25 MiB, holds." in report.markdown(record)
    record["cases"][0]["rows"][0]["peak_allocated_mib"] += 40
    assert f"{text}+65 MiB, MISSED." in report.markdown(record)


def test_what_keep_takes_off_is_judged_where_a_target_names_it():
    record = sound()
    record["cases"][0]["savings"] = {"512": {"keep takes off without copies": [0.19, 0.18, 0.195]}}
    assert "20% or more" not in report.markdown(record)  # three rounds
    for streamed in (row for row in record["cases"][0]["rows"] if row["arm"] == "streamed"):
        streamed["rounds_ms"] = [100.0] * 5
    assert (
        "* Keep takes off without copies 20% or more, 512 tokens: 0.190 (0.180 .. 0.195), MISSED."
        in report.markdown(record)
    )
    record["cases"][0]["savings"] = {"8192": {"keep takes off": [0.27, 0.26, 0.28]}}
    assert "* Keep takes off 20% or more, 8192 tokens: 0.270 (0.260 .. 0.280), holds." in report.markdown(record)


def test_auto_says_how_many_layers_kept_under_which_limit():
    record = sound()
    auto = row("streamed", 512) | dict(arm="streamed_auto", limit_mib=7000.0, layers_that_keep=14)
    record["cases"][0]["rows"].append(auto)
    assert "auto under a limit of 7000 MiB: 14 of 32 layers keep, 6000 MiB reserved" in report.markdown(record)


def test_a_peer_that_cannot_repeat_is_said_not_to_have_been_compared():
    record = sound()
    assert "were not compared" not in report.markdown(record)
    record["cases"][0]["not_compared"] = {"peer": "scatter has no deterministic implementation"}
    assert "* Gradients of peer were not compared: scatter has no deterministic" in report.markdown(record)


def test_a_peer_has_numerics_of_its_own_and_must_not_run_our_kernels():
    record = sound()
    record["cases"][0]["exact"]["peer"] = dict(equal=2, compared=449, zero=0)
    assert report.faults(record) == []
    record["cases"][0]["rows"].append(row("streamed", 512) | dict(arm="peer", paths={"hopper": {}}))
    assert "peer at 512 tokens took the paths ['hopper']" in report.faults(record)[0]


SPOILT = {
    "another gradient": (lambda c: c["exact"]["streamed"].update(equal=448), "gradients of streamed: 448 of 449"),
    "nothing compared": (lambda c: c["exact"]["streamed_keep"].update(equal=0, compared=0), "0 of 0 equal"),
    "zero gradients": (lambda c: c["exact"]["streamed"].update(zero=2), "2 zero"),
    "A against A": (lambda c: c["exact"]["again"].update(equal=400), "no verdict on equality"),
    "a loss that stays": (lambda c: c["rows"][0].update(loss_last=9.5), "did not train"),
    "no gradient": (lambda c: c["rows"][0].update(gradient_norm=0.0), "did not train"),
    "adapters that stay": (lambda c: c["rows"][0].update(adapters_moved=0), "no adapter changed"),
    "NaN": (lambda c: c["rows"][0].update(gradient_norm=float("nan")), "did not train"),
    "one round": (lambda c: c["rows"][0].update(rounds_ms=[100.0]), "no verdict on streamed at 512 tokens: 1 rounds"),
    "a silent dequant": (lambda c: c["rows"][0].update(paths={"dequant": {}}), "took the paths ['dequant']"),
    "a fused dequant arm": (lambda c: c["rows"][1].update(paths={"hopper": {}}), "took the paths ['hopper']"),
    "ours inside bitsandbytes": (lambda c: c["rows"][3].update(paths={"hopper": {}}), "resident_bnb at 512"),
}


@pytest.mark.parametrize("spoil", SPOILT)
def test_each_way_to_be_worthless_is_a_fault(spoil):
    change, words = SPOILT[spoil]
    record = copy.deepcopy(sound())
    change(record["cases"][0])
    found = report.faults(record)
    assert found and any(words in fault for fault in found)


def test_garbage_and_arms_without_memory_are_not_judged():
    record = sound()
    record["cases"][0]["rows"][0].update(garbage=True, gradient_norm=0.0)
    record["cases"][0]["rows"][1] = dict(
        arm="streamed_dequant", tokens=512, garbage=False, out_of_memory=True, paths={}
    )
    assert report.faults(record) == []
    assert "out of memory" in report.markdown(record)
