import pandas as pd
import pytest

from qkpipe.analysis import probe
from qkpipe.store.parquet import read_table


def test_probed_arms_and_their_references_with_energies(synthetic):
    paths, study = synthetic
    (path,) = probe.build(paths, study)
    table = read_table(path)
    assert table.schema.equals(probe.PROBE_CURVES)
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
    (path,) = probe.build(paths, study)
    assert read_table(path).num_rows == 0
