from nestmodel.nn.gpu.kernel_choice import default_kernels
from nestmodel.tuning.cache import Result
from nestmodel.tuning.race import Row
from nestmodel.tuning.table import format_table


def test_a_table_shows_each_form_with_its_verdict() -> None:
    rows = (
        Row(part="blocks", form="torch", verdict="slower", seconds=0.002, error=0.01, allowed=0.03),
        Row(part="blocks", form="compiled", verdict="taken", seconds=0.001, error=0.01, allowed=0.03),
        Row(part="features", form="torch", verdict="wrong", error=0.5, allowed=0.03),
        Row(part="features", form="compiled", verdict="failed", reason="out of \x1b[31mmemory"),
    )
    result = Result(device="a GPU", kernels=default_kernels("cuda"), rows=rows)
    assert format_table(result).splitlines() == [
        "part      form      time      error    verdict",
        "blocks    torch     2.000 ms  1.0e-02  slower",
        "blocks    compiled  1.000 ms  1.0e-02  taken",
        "features  torch               5.0e-01  wrong: error 5.0e-01, allowed 3.0e-02",
        "features  compiled                     failed: out of  [31mmemory",
    ]
