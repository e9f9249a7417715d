import pandas as pd
import pytest

from qkpipe.analysis import probe
from qkpipe.store.parquet import read_table


def test_probed_arms_and_their_references_with_energies(synthetic):
    paths, study = synthetic
    path, controls = probe.build(paths, study)
    table = read_table(path)
    assert table.schema.equals(probe.PROBE_CURVES)
    assert read_table(controls).schema.equals(probe.PROBE_CONTROLS)
    frame = table.to_pandas()
    assert set(frame["arm"]) == {"fp32_stream", "faulty", "probe_on", "probe_off"}
    on = frame[frame["arm"] == "probe_on"].dropna(subset=["on_fraction"])
    assert on["on_fraction"].unique() == pytest.approx([0.2])
    assert len(on) == 2 * 40
    assert frame.loc[frame["arm"] == "faulty", "on_fraction"].isna().all()


def test_energy_fractions_are_ratios_of_sums():
    telemetry = pd.DataFrame(
        {
            "run_id": "a",
            "step": [0, 0, 10],
            "energy_total": [1.0, 3.0, 0.0],
            "energy_on": [1.0, 0.0, 0.0],
            "energy_removed": [0.5, 0.5, 0.0],
        }
    )
    found = probe.energy_fractions(telemetry).set_index("step")
    assert found.loc[0, ["on_fraction", "removed_fraction"]].tolist() == [0.25, 0.25]
    assert pd.isna(found.loc[10, "on_fraction"])


def test_study_without_probes_gives_an_empty_table(synthetic, tmp_path):
    from qkpipe.analysis import runs
    from qkpipe.paths import StudyPaths

    _, study = synthetic
    paths = StudyPaths("tiny", tmp_path)
    runs.aggregate(paths, study, [])
    assert [read_table(path).num_rows for path in probe.build(paths, study)] == [0, 0]


def test_controls_by_what_they_are_and_against_the_unprobed_arm(synthetic):
    paths, study = synthetic
    rows = {row["arm"]: row for row in read_table(probe.build(paths, study)[1]).to_pylist()}
    on, off = rows["probe_on"], rows["probe_off"]
    assert (on["control"], on["action"], on["k"], on["unprobed"], on["unprobed_n"]) == (
        *("probe", "on_target", 3, "faulty"),
        2,
    )
    assert (on["collapsed"], off["collapsed"], on["unprobed_collapsed"]) == (0, 2, 2)
    assert on["log_sigma_ratio_max"] < 0 < off["log_sigma_ratio_min"]
    assert on["removed_fraction_median"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "probe"),
        ({"probe_action": "observe"}, "observed"),
        ({"source": "none"}, "healthy twin"),
        ({"probe_action": "isotropic"}, "isotropic"),
        ({"probe_directions": "next"}, "next directions"),
        ({"probe_start_step": 200}, "late start"),
    ],
)
def test_what_a_probed_run_is_there_for(changes, name):
    run = {"source": "s", "probe_action": "on_target", "probe_directions": "leading", "probe_start_step": 0}
    assert probe.control(pd.Series(run | changes)) == name
