import subprocess
import sys

import pytest
import yaml

from qkpipe.config.claims import check_arms, load_claims
from qkpipe.config.load import DEFAULT_CONFIG, load_study
from qkpipe.errors import BadInput

PART = {"treated": "faulty", "control": "fp32", "outcome": "collapse", "statistic": "mcnemar"}
PART |= {"alternative": "greater"}
REGIME = {
    "collapse": ["faulty"],
    "healthy": ["fp32"],
    "separate": [],
    "collapse_before": 0.8,
    "max_logit": 30,
}
REGIME |= {"separation": 0.1}


def write(folder, part=None, **claim):
    claim = {"statement": "s", "source": "paper section 2", "parts": [PART | (part or {})], **claim}
    text = yaml.safe_dump({"claims": {"a": claim}, "regime": REGIME})
    (folder / "claims.yaml").write_text(text)
    return folder


def test_the_shipped_claims_are_in_their_fixed_order():
    config = load_claims(DEFAULT_CONFIG)
    ranked = sorted((claim.rank, name) for name, claim in config.claims.items() if claim.rank)
    assert [name for _, name in ranked] == [
        "fault_collapses",
        "fp32_carries_repair",
        "delta_from_p_repairs",
        "qk_splice_rescues",
        "mlp_splice_does_not_rescue",
        "probe_dissociates",
        "guard_contains",
        "guard_matches_qk_norm",
        "mlp_quantizer_drives_qk",
        "coherence_drives_qk",
    ]
    assert config.alpha == 0.05


def test_claims_are_immutable(tmp_path):
    with pytest.raises(ValueError, match="frozen"):
        load_claims(write(tmp_path)).alpha = 0.1


@pytest.mark.parametrize(
    ("part", "message"),
    [
        ({"control": "faulty"}, "treated and control are both 'faulty'"),
        (
            {"statistic": "sign_flip"},
            "statistic=sign_flip does not fit outcome=collapse; allowed: mcnemar, rescue",
        ),
        (
            {"outcome": "log_sigma"},
            "statistic=mcnemar does not fit outcome=log_sigma; allowed: sign_flip, equivalence",
        ),
        ({"statistic": "rescue"}, "statistic=rescue takes a margin"),
        ({"statistic": "rescue", "margin": 1.0}, "a share below 1"),
        ({"margin": 0.5}, "statistic=mcnemar takes no margin"),
        (
            {"alternative": "equivalent"},
            "alternative=equivalent does not fit statistic=mcnemar; allowed: greater, less",
        ),
        ({"at": 100}, "at=100 needs outcome log_sigma or log_max_logit"),
        ({"outcome": "loss"}, "claims.a.parts.0.outcome"),
        ({"treatd": "x"}, "unknown key; did you mean 'treated'?"),
    ],
)
def test_a_mistake_is_one_line_naming_file_and_key(tmp_path, part, message):
    with pytest.raises(BadInput) as error:
        load_claims(write(tmp_path, part))
    assert message in str(error.value)
    assert str(error.value).startswith(f"{tmp_path / 'claims.yaml'}: claims.a.parts.0")
    assert "\n" not in str(error.value)


def test_ranks_leave_no_gap(tmp_path):
    with pytest.raises(BadInput, match=r"ranks must be 1, 2, 3, ... without gap or repeat, got \[2\]"):
        load_claims(write(tmp_path, rank=2))


def test_missing_file(tmp_path):
    with pytest.raises(BadInput, match=r"claims\.yaml: no such file"):
        load_claims(tmp_path)


def test_an_unknown_arm_is_named(tmp_path):
    with pytest.raises(
        BadInput, match=r"claims\.a\.parts\.0\.treated: unknown name 'fautly'; did you mean 'faulty'"
    ):
        check_arms(load_claims(write(tmp_path, {"treated": "fautly"})), load_study(DEFAULT_CONFIG))


@pytest.mark.parametrize("arm", ["guard", "qk_norm"])
def test_the_logit_is_no_outcome_where_qk_norm_bounds_it(tmp_path, arm):
    part = {"treated": arm, "outcome": "log_max_logit", "statistic": "sign_flip"}
    study = load_study(DEFAULT_CONFIG)
    with pytest.raises(BadInput, match=f"log_max_logit with arm '{arm}'"):
        check_arms(load_claims(write(tmp_path, part)), study)
    check_arms(load_claims(write(tmp_path, part | {"outcome": "log_sigma"})), study)


def test_reading_claims_imports_no_torch_and_no_scipy():
    code = (
        "import sys, qkpipe.config.claims as c; c.load_claims(); print({'torch', 'scipy'} & set(sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "set()\n"
