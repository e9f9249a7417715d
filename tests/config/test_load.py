"""Arms resolve by scale, ancestors and overrides; seeds have roles; targets name runs. (Mistakes: tests/test_cli.py.)"""

from pathlib import Path

import pytest
import yaml

from qkpipe.config import RunKey, load_study
from qkpipe.config.claims import check_arms, load_claims
from qkpipe.config.load import _read
from qkpipe.errors import BadInput

TINY = Path(__file__).parents[1] / "tiny"


@pytest.fixture
def study(tmp_path):
    """The tiny study with further arms."""

    def build(**arms):
        known = yaml.safe_load((TINY / "arms.yaml").read_text())
        (tmp_path / "arms.yaml").write_text(yaml.safe_dump(known | arms, sort_keys=False))
        (tmp_path / "study.yaml").write_text((TINY / "study.yaml").read_text())
        return load_study(tmp_path)

    return build


def test_an_arm_overrides_its_ancestor_which_overrides_the_scale(study):
    arms = study(child={"extends": "faulty", "attention": {"tile": 4, "precision": {"io": 9}}})
    scale, parent, child = (arms.resolve(name, 0).attention for name in ("fp32", "faulty", "child"))
    assert (scale.tile, parent.tile, child.tile) == (8, 8, 4)
    assert (parent.precision.uniform, child.precision.uniform) == (2, 2)
    assert (parent.precision.io, child.precision.io) == (7, 9)


def test_lists_replace_and_an_empty_one_removes(study):
    arms = study(
        other={"extends": "guard", "interventions": [{"kind": "guard", "threshold": 5}]},
        none={"extends": "guard", "interventions": []},
    )
    assert [act.threshold for act in arms.resolve("other", 0).interventions] == [5]
    assert arms.resolve("none", 0).interventions == []
    assert arms.resolve("none", 0).config_hash == arms.resolve("faulty", 0).config_hash


def test_words_are_the_arms_own(study):
    arms = study(child={"extends": "faulty"})
    run = arms.resolve("child", 0)
    assert (run.twin, run.group) == (None, "study")


def test_abstract_arms_are_never_run(study):
    arms = study(base={"abstract": True, "attention": {"tile": 2}}, leaf={"extends": "base"})
    assert "base" not in arms.runnable
    assert arms.resolve("leaf", 0).attention.tile == 2
    with pytest.raises(BadInput, match="unknown name 'base'"):
        arms.resolve("base", 0)


def test_a_target_is_arms_times_seeds_and_seeds_can_be_replaced():
    tiny = load_study(TINY)
    assert tiny.requested("core")[:3] == [RunKey("fp32", 0), RunKey("fp32", 1), RunKey("faulty", 0)]
    assert {run.seed for run in tiny.requested("core", [7, 7, 8])} == {7, 8}
    assert len(tiny.requested("all")) == 4 * 3


def test_headline_arms_get_every_seed_of_the_role(study, tmp_path):
    def target(**changes):
        folder = tmp_path / "headline"
        folder.mkdir(exist_ok=True)
        known = yaml.safe_load((TINY / "study.yaml").read_text())
        known["targets"]["core"] |= changes
        (folder / "study.yaml").write_text(yaml.safe_dump(known))
        (folder / "arms.yaml").write_text((TINY / "arms.yaml").read_text())
        return load_study(folder)

    found = target(headline=["faulty"])
    assert [key.seed for key in found.requested("core") if key.arm == "faulty"] == [0, 1, 2]
    assert [key.seed for key in found.requested("core") if key.arm == "fp32"] == [0, 1]
    assert {key.seed for key in found.requested("core", iter([7]))} == {7}
    with pytest.raises(BadInput, match=r"targets\.core\.headline: unknown name 'falty'"):
        target(headline=["falty"])


def test_a_role_holds_only_for_its_arms():
    real = load_study()
    healthy = next(iter(real.config.roles["calibration"].arms))
    seed = real.config.roles["calibration"].seeds[0]
    assert real.role(healthy, seed) == "calibration"
    assert real.role("faulty", seed) == "extra"
    assert real.role("faulty", 0) == "tuning"
    assert real.role("faulty", 99_999) == "extra"


def test_the_real_study_resolves_and_twins_differ_from_their_arms():
    real = load_study()
    for name in real.runnable:
        run = real.resolve(name, 0)
        if run.twin is not None:
            assert real.resolve(run.twin, 0).config_hash != run.config_hash, name


def test_patterns_of_a_target_keep_candidate_regimes_apart(study):
    arms = study(**{"hot.faulty": {"extends": "faulty", "optimizer": {"lr": 0.1}}})
    assert "hot.faulty" not in {run.arm for run in arms.requested("core")}
    target = arms.config.targets["core"].model_copy(update={"arms": ["*.*", "faulty"]})
    arms.config.targets["core"] = target
    assert {run.arm for run in arms.requested("core")} == {"faulty", "hot.faulty"}


def test_a_calibrated_threshold_is_the_scales_and_the_papers_where_it_has_none(study, tmp_path):
    arm = {"extends": "faulty", "interventions": [{"kind": "guard", "threshold": "calibrated"}]}
    assert study(own=arm).resolve("own", 0).interventions[0].threshold == 30.0
    record = {"tau": 21.5, "arm": "fp32", "config_hash": "0" * 64, "calibration_runs": 19}
    config = yaml.safe_load((TINY / "study.yaml").read_text())
    config["thresholds"] = {"tiny": record | {"held_out_runs": 0, "held_out_fired": 0}}
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(config))
    assert load_study(tmp_path).resolve("own", 0).interventions[0].threshold == 21.5


def test_the_studys_thresholds_belong_to_its_healthy_arms():
    """A changed healthy arm has other logits: calibrate again (`snakemake calibration held_out`), then write the new numbers."""
    study = load_study()
    for scale, threshold in study.config.thresholds.items():
        run = load_study(study.folder, scale).resolve(threshold.arm, 0)
        assert run.config_hash == threshold.config_hash, (
            f"thresholds.{scale} was calibrated on another config"
        )


def test_the_studys_claims_name_its_arms():
    study = load_study()
    claims = load_claims(study.folder)
    check_arms(claims, study)
    runs = study.requested("core")
    assert {(arm, seed) for arm in claims.arms for seed in range(30, 35)} <= {
        (run.arm, run.seed) for run in runs
    }
    assert {study.role(run.arm, run.seed) for run in runs} == {"confirmatory"}


def test_a_dataset_is_a_corpus_and_a_tokenizer_of_the_study_and_an_arm_may_name_its_own(study):
    real = load_study()
    assert real.dataset(None) == ("shakespeare", "bytes")
    assert real.dataset("shakespeare-bpe512") == ("shakespeare", "bpe512")
    with pytest.raises(BadInput, match=r"dataset: unknown name 'shakespeare-bpe'; did you mean"):
        real.dataset("shakespeare-bpe")
    run = real.resolve("bpe-faulty", 0)
    assert (run.tokenizer_name, run.tokenizer.vocab_size) == ("bpe512", 512)
    with pytest.raises(BadInput, match=r"arms.yaml: own.tokenizer: unknown name 'words'; .*allowed: bytes"):
        study(own={"extends": "faulty", "tokenizer": "words"})


def test_merged_anchors_may_be_overridden_but_a_key_given_twice_is_refused(study, tmp_path):
    text = (
        "a: { faults: [&x { kind: quantizer, routes: [mlp] }] }\nb: { faults: [{ <<: *x, routes: [qk] }] }\n"
    )
    (tmp_path / "arms.yaml").write_text(text)
    assert _read(tmp_path / "arms.yaml")["b"]["faults"] == [{"kind": "quantizer", "routes": ["qk"]}]
    (tmp_path / "arms.yaml").write_text("a: { group: x, group: y }\n")
    with pytest.raises(BadInput, match="'group' is given twice"):
        _read(tmp_path / "arms.yaml")
