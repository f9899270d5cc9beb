"""The limits of torch's compiler, which are settings of the whole process."""

import torch._dynamo as dynamo


def allow_graphs(num_graphs: int) -> None:
    """Lets torch compile each function at least this number of times; never lowers a limit.

    After as many as the limit, torch runs a function for new shapes without compiling it.
    """
    dynamo.config.recompile_limit = max(dynamo.config.recompile_limit, num_graphs)
    dynamo.config.accumulated_recompile_limit = max(dynamo.config.accumulated_recompile_limit, num_graphs)
