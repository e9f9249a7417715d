"""The guard's cost on a model that knows nothing of it is measured for every setting."""

from qkpipe.bench import guard
from qkpipe.bench.plain_loop import GPT


def test_every_setting_is_timed_and_the_model_left_without_a_guard():
    model = GPT(64, 16, 32, 2, 4, 64)
    took = guard.compare(model, 64, 2, 16, settings=list(guard.SETTINGS), blocks=1, steps=2)
    assert took.keys() == guard.SETTINGS.keys()
    assert all(0 < p20 <= p50 <= p80 for p20, p50, p80 in took.values())
    assert not model._forward_hooks and "qk_guard" not in model.state_dict()
