import math

import pyarrow as pa
import pytest
import yaml

from qkpipe.analysis import runs
from qkpipe.analysis.regime import REGIMES, build, regimes, setting_of, split_arm
from qkpipe.config.claims import RegimeCriterion
from qkpipe.config.load import DEFAULT_CONFIG, load_study
from qkpipe.paths import StudyPaths
from qkpipe.store.parquet import read_table
from qkpipe.telemetry.schema import RUNS, TABLES
from store.synthetic import write_runs, write_study

CRITERION = RegimeCriterion.model_validate(
    {
        "collapse": ["faulty", "probe_off"],
        "healthy": ["fp32"],
        "separate": [{"treated": "quantized", "control": "base"}],
        "collapse_before": 0.8,
        "max_logit": 30,
        "separation": 0.1,
    }
)
COLLAPSED = {"collapsed": True, "collapsed_paper": True, "collapse_step": 40, "collapse_step_paper": 50}
GOOD = {
    "faulty": COLLAPSED,
    "probe_off": COLLAPSED,
    "fp32": {"peak_logit": 20.0},
    "quantized": {"sigma": 4.0, "logit": 40.0},
    "base": {"sigma": 2.0, "logit": 10.0},
}


class Data:
    def __init__(self):
        self.runs, self.layers, self.heads = [], [], []

    def run(self, arm, seed, sigma=2.0, logit=10.0, role="tuning", **more):
        run_id = f"{arm}-{seed}"
        row = {"run_id": run_id, "scale": "micro", "arm": arm, "seed": seed, "seed_role": role}
        row |= {"collapsed": False, "collapsed_paper": False, "censored": False, "steps_planned": 100}
        self.runs.append(row | {"peak_logit": logit} | more)
        self.layers.append({"run_id": run_id, "step": 90, "layer": 0, "sigma_q_1": sigma})
        self.heads.append({"run_id": run_id, "step": 90, "layer": 0, "head": 0, "max_logit": logit})

    def regime(self, name="", seeds=(0, 1), **changes):
        """A good regime in every seed, but for ``arm={column: value}`` in the last one."""
        prefix = f"{name}." if name else ""
        for arm, outcome in GOOD.items():
            for seed in seeds:
                self.run(prefix + arm, seed, **outcome | (changes.get(arm, {}) if seed == seeds[-1] else {}))
        return self

    def rows(self, criterion=CRITERION, **options):
        layers = pa.Table.from_pylist(self.layers, TABLES["layers"])
        heads = pa.Table.from_pylist(self.heads, TABLES["heads"])
        table = regimes(criterion, pa.Table.from_pylist(self.runs, RUNS), layers, heads, **options)
        assert table.schema.equals(REGIMES)
        return table.to_pylist()


def test_a_regime_that_meets_the_criterion():
    row = Data().regime().rows()[0]
    assert row["passes"] and (row["regime"], row["rank"], row["seeds"]) == ("study", 1, "0,1")
    assert row["collapse_margin"] == pytest.approx(0.8 - 0.5)
    assert (row["n_collapsed"], row["n_collapsed_paper"], row["n_collapse"]) == (4, 4, 4)
    assert row["healthy_margin"] == pytest.approx(math.log(30 / 20)) and row["healthy_peak_logit"] == 20
    assert row["separate_margin"] == pytest.approx(math.log(4) - 0.1)
    assert row["separate_outcome"] == "log_max_logit"


@pytest.mark.parametrize(
    ("criterion", "changes"),
    [
        ("collapse", {"probe_off": {"collapsed": False}}),
        ("collapse", {"faulty": {"collapsed_paper": False}}),
        ("collapse", {"faulty": {"collapse_step_paper": 81}}),
        ("healthy", {"fp32": {"peak_logit": 30.0}}),
        ("healthy", {"fp32": {"peak_logit": None}}),
        ("healthy", {"fp32": {"censored": True}}),
        ("healthy", {"fp32": {"collapsed_paper": True}}),
        ("separate", {"quantized": {"sigma": 2.0, "logit": 10.0}}),
        ("separate", {"base": {"sigma": math.nan, "logit": math.nan}}),
    ],
)
def test_one_seed_that_fails_one_criterion_fails_the_regime(criterion, changes):
    row = Data().regime(**changes).rows()[0]
    assert not row["passes"]
    failed = [name for name in ("collapse", "healthy", "separate") if not row[f"{name}_passes"]]
    assert failed == [criterion]
    assert row[f"{criterion}_margin"] <= 0


def test_separation_in_either_outcome_is_enough():
    row = Data().regime(quantized={"logit": 5.0}).rows()[0]
    assert row["passes"] and row["separate_outcome"] == "log_sigma"
    assert row["separate_margin"] == pytest.approx(math.log(2) - 0.1)


def test_separation_by_one_outcome_in_one_seed_and_the_other_in_the_next_is_not_enough():
    data = Data().regime(quantized={"logit": 10.0})
    for row in data.layers:
        if row["run_id"] == "quantized-0":
            row["sigma_q_1"] = 2.0
    row = data.rows()[0]
    assert not row["separate_passes"] and row["separate_margin"] == pytest.approx(-0.1)


@pytest.mark.parametrize(("n_seeds", "passes"), [(2, True), (3, False)])
def test_a_regime_passes_on_no_fewer_than_the_declared_seeds(n_seeds, passes):
    strict = CRITERION.model_copy(update={"n_seeds": n_seeds})
    (row,) = Data().regime(seeds=(0, 1)).rows(criterion=strict)
    assert (row["passes"], row["n_seeds"]) == (passes, 2)


def test_a_missing_run_is_named_and_fails():
    data = Data().regime()
    data.runs = [row for row in data.runs if (row["arm"], row["seed"]) != ("probe_off", 1)]
    row = data.rows()[0]
    assert (row["passes"], row["missing"]) == (False, "probe_off/seed=1")
    assert not Data().regime().rows(seeds=[2])[0]["passes"]


def test_only_tuning_seeds_decide():
    data = Data().regime()
    data.run("faulty", 10, role="confirmatory")
    assert data.rows() == Data().regime().rows()


def test_regimes_are_ranked_passing_first_then_by_their_worst_margin():
    data = Data().regime("late", faulty={"collapse_step_paper": 75}).regime("good")
    data.regime("none", faulty={"collapsed": False}).regime("hot", fp32={"peak_logit": 33.0})
    settings = {"good": {"lr": 3e-3, "dose": "uniform(2)", "gain": 1.0, "tile": 16, "steps": 700}}
    rows = data.rows(settings=settings)
    assert [(row["rank"], row["regime"]) for row in rows] == [
        (1, "good"),
        (2, "late"),
        (3, "hot"),
        (4, "none"),
    ]
    assert (rows[0]["lr"], rows[0]["dose"], rows[1]["lr"]) == (3e-3, "uniform(2)", None)
    assert rows[3]["collapse_margin"] == -math.inf


def test_arm_names():
    assert split_arm("lr5e-3_m2.faulty") == ("lr5e-3_m2", "faulty")
    assert split_arm("faulty") == ("study", "faulty")


def test_settings_come_from_the_resolved_config():
    setting = setting_of(load_study(DEFAULT_CONFIG, "micro"), "faulty")
    assert setting.keys() == {"lr", "dose", "gain", "tile", "steps"}
    assert setting["dose"].startswith("uniform(") and setting["tile"] >= 1


def test_no_runs_no_rows():
    assert Data().rows() == []


def test_build_judges_the_tuning_runs_on_disk(tmp_path):
    study, paths = write_study(tmp_path / "config"), StudyPaths("tiny", tmp_path)
    criterion = CRITERION.model_copy(update={"separate": ()}).model_dump(mode="json")
    (study.folder / "claims.yaml").write_text(yaml.safe_dump({"claims": {}, "regime": criterion}))
    keys = study.requested("core")
    write_runs(paths, study, keys)
    runs.aggregate(paths, study, keys)
    (written,) = build(paths, study)
    (row,) = read_table(written).to_pylist()
    assert (row["n_collapsed"], row["n_collapse"], row["seeds"]) == (4, 4, "0,1")
    assert (row["lr"], row["dose"], row["tile"], row["steps"]) == (3e-3, "uniform(2)", 16, 400)
