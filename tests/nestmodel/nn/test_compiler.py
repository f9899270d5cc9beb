import torch._dynamo as dynamo

from nestmodel.nn.compiler import allow_graphs


def test_limits_are_raised_and_never_lowered() -> None:
    with dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        limits = []
        for num_graphs in (5, 20, 10, 300):
            allow_graphs(num_graphs)
            limits.append((dynamo.config.recompile_limit, dynamo.config.accumulated_recompile_limit))
    assert limits == [(8, 256), (20, 256), (20, 256), (300, 300)]
