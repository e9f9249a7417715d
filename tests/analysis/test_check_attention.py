"""Qualifying attention functions: what passes, what does not and why, and what could not be run."""

import argparse
import json
import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from qkpipe.analysis.check_attention import BUILT_IN, add_arguments, attend, check_attention, resolve, run
from qkpipe.errors import BadInput

SMALL = {"batches": 3, "shape": (1, 2, 96, 16)}


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def rounded(x):
    return x.bfloat16().to(x.dtype)


class _Written(torch.autograd.Function):
    """fp32 attention with its backward written out, and one thing done to it."""

    @staticmethod
    def forward(ctx, q, k, v, carry, delta_shift):
        T, scale = q.shape[2], q.shape[3] ** -0.5
        S = (q @ k.mT * scale).masked_fill(torch.ones(T, T, dtype=torch.bool).triu(1), -math.inf)
        m = torch.full((*q.shape[:3], 1), -math.inf)
        l, acc = torch.zeros_like(m), torch.zeros_like(q)
        for start in range(0, T, 8):
            tile = S[..., start : start + 8]
            m_new = torch.maximum(m, tile.amax(-1, keepdim=True))
            P, rescale = torch.exp(tile - m_new), torch.exp(m - m_new)
            l = carry(l * rescale + P.sum(-1, keepdim=True))
            acc = carry(acc * rescale + P @ v[:, :, start : start + 8])
            m = m_new
        out = acc / l
        ctx.save_for_backward(q, k, v, out, S)
        ctx.delta_shift = delta_shift
        return out

    @staticmethod
    def backward(ctx, do):
        q, k, v, out, S = ctx.saved_tensors
        P, scale = S.softmax(-1), q.shape[3] ** -0.5
        dS = P * (do @ v.mT - (do * out).sum(-1, keepdim=True) - ctx.delta_shift)
        return dS @ k * scale, dS.mT @ q * scale, P.mT @ do, None, None


def written(carry=lambda x: x, delta_shift=0.0):
    return lambda q, k, v: _Written.apply(q, k, v, carry, delta_shift)


def failed(report):
    return {check.name for check in report.checks if not check.passed}


def values(report):
    return {check.name: check.value for check in report.checks}


@pytest.mark.parametrize("groups", [1, 2])
def test_the_reference_is_attention(groups):
    g = torch.Generator().manual_seed(0)
    q, do = (torch.randn(2, 4, 7, 6, generator=g, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(2, 4 // groups, 7, 6, generator=g, dtype=torch.float64) for _ in range(2))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=groups > 1)
    expected = (out, *torch.autograd.grad(out, leaves, do))
    with torch.no_grad():
        for got, want in zip(attend(q, k, v, do, operand=torch.float64), expected):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_sdpa_qualifies(dtype):
    report = check_attention(sdpa, dtype=dtype, **SMALL)
    assert report.qualified, report.table()
    assert len(report.reasons) == 1 and report.dtype == dtype


def test_written_out_attention_qualifies():
    report = check_attention(written(), **SMALL)
    assert report.qualified, report.table()


def test_bf16_carries_do_not_qualify():
    report = check_attention(written(carry=rounded), **SMALL)
    assert not report.qualified
    assert {"output error", "residual r"} <= failed(report)
    # P and dP are exact in this fault: all of the residual comes from the returned output.
    assert values(report)["residual r"] == pytest.approx(values(report)["implied by O"], rel=1e-3)


def test_bf16_carries_do_not_qualify_in_bf16_either():
    """Over many tiles the error of a bf16 accumulator outgrows that of rounding the output once."""
    faulty = written(carry=rounded)
    report = check_attention(
        lambda q, k, v: faulty(q.float(), k.float(), v.float()).to(q.dtype),
        dtype="bfloat16",
        batches=3,
        shape=(1, 2, 256, 16),
    )
    assert not report.qualified, report.table()


def test_the_residual_is_read_out_of_dq():
    """A known shift of delta: rows of dS sum to minus it, though the output is exact and implies nothing."""
    shift = 2.0**-6
    report = check_attention(written(delta_shift=shift), **SMALL)
    found = values(report)
    assert {"residual r", "residual mean", "sign repetition"} <= failed(report)
    assert "output error" not in failed(report)
    assert found["residual r"] == pytest.approx(-found["residual mean"], rel=1e-4)
    assert found["sign repetition"] == pytest.approx(1.0, abs=1e-3)
    assert found["implied by O"] < 1e-5 < found["residual r"]
    doubled = values(check_attention(written(delta_shift=2 * shift), **SMALL))
    assert doubled["residual r"] == pytest.approx(2 * found["residual r"], rel=1e-4)


def test_forgetting_the_mask_does_not_qualify():
    report = check_attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v), **SMALL)
    assert "output error" in failed(report)


def test_nan_does_not_qualify():
    report = check_attention(lambda q, k, v: sdpa(q, k, v) * math.nan, **SMALL)
    assert not report.qualified
    json.dumps(report.to_dict(), allow_nan=False)


@pytest.mark.parametrize(
    "fn, message",
    [
        (lambda q, k, v: sdpa(q, k, v)[..., :-1], "returned"),
        (lambda q, k, v: (sdpa(q, k, v),), "returned tuple"),
        (lambda q, k, v: sdpa(q, k, v).detach(), "backward raised"),
        (lambda q, k, v: q / [], "raised TypeError"),
        (lambda q, k, v: v * 1.0, "backward raised"),  # q and k have no influence
    ],
)
def test_could_not_run(fn, message):
    with pytest.raises(BadInput, match=message):
        check_attention(fn, **SMALL)


@pytest.mark.parametrize(
    "bad",
    [
        {"batches": 0},
        {"shape": (1, 2, 1, 16)},
        {"shape": (1, 2, 8)},
        {"dtype": "float64"},
        {"device": "abacus"},
    ],
)
def test_bad_options(bad):
    with pytest.raises(BadInput, match=next(iter(bad))):
        check_attention(sdpa, **{**SMALL, **bad})


def test_same_seed_same_report():
    assert check_attention(sdpa, **SMALL).to_dict() == check_attention(sdpa, **SMALL).to_dict()
    assert check_attention(sdpa, **SMALL) != check_attention(sdpa, seed=1, **SMALL)


def captured(batches=(2,), heads=4, kv_heads=2):
    g = torch.Generator().manual_seed(0)
    shapes = {"q": heads, "k": kv_heads, "v": kv_heads, "do": heads}
    return {key: torch.randn(*batches, 1, h, 32, 16, generator=g) for key, h in shapes.items()}


def test_captured_inputs(tmp_path):
    tensors = captured()
    torch.save(tensors, tmp_path / "c.pt")
    np.savez(tmp_path / "c.npz", **{key: x.numpy() for key, x in tensors.items()})
    reports = [check_attention(resolve("sdpa"), inputs=tmp_path / name) for name in ("c.pt", "c.npz")]
    assert reports[0].checks == reports[1].checks
    assert reports[0].qualified and reports[0].batches == 2 and reports[0].shape == (1, 4, 32, 16)
    assert reports[0].source == "c.pt"
    single = {key: x[0] for key, x in tensors.items() if key != "do"}
    torch.save(single, tmp_path / "single.pt")
    report = check_attention(resolve("sdpa"), inputs=tmp_path / "single.pt")
    assert report.batches == 1 and "sign repetition" not in values(report)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t.pop("v"), "q, k, v"),
        (lambda t: t.update(k=t["k"].double()), "k must be"),
        (lambda t: t.update(v=t["v"][..., :-1]), "v has shape"),
        (lambda t: t.update(do=t["do"][:1]), "do has shape"),
        (lambda t: t.update(q=t["q"][:, :, :3], do=t["do"][:, :, :3]), "a multiple of key heads"),
        (lambda t: t["q"].fill_(math.inf), "q holds NaN or infinity"),
    ],
)
def test_captured_inputs_that_cannot_be_used(tmp_path, change, message):
    tensors = captured()
    change(tensors)
    torch.save(tensors, tmp_path / "c.pt")
    with pytest.raises(BadInput, match=message):
        check_attention(sdpa, inputs=tmp_path / "c.pt")


@pytest.mark.parametrize("name", ["missing.pt", "missing.npz", "c.csv", "garbage.pt"])
def test_captured_files_that_cannot_be_read(tmp_path, name):
    (tmp_path / "c.csv").write_text("q,k,v")
    (tmp_path / "garbage.pt").write_bytes(b"no tensors")
    with pytest.raises(BadInput, match=name):
        check_attention(sdpa, inputs=tmp_path / name)


def command(*argv):
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return run(parser.parse_args([*argv, "--batches", "2", "--shape", "1", "2", "64", "16"]))


def test_command_exit_statuses(capsys, tmp_path, monkeypatch):
    assert command("sdpa") == 0
    assert "\nqualified\n" in capsys.readouterr().out
    (tmp_path / "mine.py").write_text(
        "import torch.nn.functional as F\n"
        "def half(q, k, v):\n"
        "    return F.scaled_dot_product_attention(q, k, v, is_causal=True).bfloat16().float()\n"
        "def broken(q, k, v):\n"
        "    raise RuntimeError('no kernel image')\n"
    )
    monkeypatch.chdir(tmp_path)
    assert command("mine:half") == 1
    assert "NOT qualified" in capsys.readouterr().out
    for target in ("mine:broken", "mine:absent", "absent:fn", "sdpaa"):
        assert command(target) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith("qkpipe: error: ") and err.count("\n") == 1


def test_json_is_all_there_is_on_stdout(capsys):
    assert command("sdpa", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["qualified"] is True and report["target"] == "sdpa"
    assert {"name", "value", "stock", "limit", "passed", "meaning"} == set(report["checks"][0])
    assert command("nothing:here", "--json") == 2
    assert json.loads(capsys.readouterr().out)["qualified"] is None


@pytest.mark.parametrize(
    "name, qualified", [("sdpa-math", True), ("streaming-fp32", True), ("streaming-m2", False)]
)
def test_built_in_names(name, qualified):
    report = check_attention(resolve(name), **SMALL)
    assert report.qualified == qualified, report.table()


def test_built_ins_resolve():
    assert all(callable(resolve(name)) for name in BUILT_IN)
