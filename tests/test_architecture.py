"""Checks the sources with `ast`: private names of other objects, and circular imports within a folder."""

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest
import pytorch_lightning as pl

REPOSITORY = Path(__file__).parents[1]
PRIVATE = REPOSITORY / "nestmodel" / "training" / "lightning_private.py"
LIGHTNING = {"pytorch_lightning", "lightning_fabric", "lightning"}
SOURCES = sorted(
    path
    for folder in ("nestguard", "nestdata", "nestmodel", "cli", "benchmarks")
    for path in (REPOSITORY / folder).rglob("*.py")
    if path != PRIVATE
)

# Private names that may be read from other objects than `self` and `cls`.
ALLOWED = {
    "_asdict": "public part of named tuples",
    "_fields": "public part of named tuples",
    "_replace": "public part of named tuples",
    "_exit": "os._exit and the C library's _exit",
    "_C": "torch's extension module, for the flight recorder, which has no public interface",
    "_distributed_c10d": "the part of `torch._C` with the flight recorder",
    "_execution_engine": "torch's autograd engine, which has no public way to run code at the end of a backward pass",
    "_foreach_copy_": "torch's copy of many tensors in one call, which has no public name",
    "_sleep": "torch's only kernel that runs for a given time",
    "_foreach_norm": "the norms of many tensors in one call, which have no public name",
    "_collected": "the sums of batch norm, which a function of its module reads",
    "_foreach_add_": "torch's sum of many tensors in one call, which has no public name",
    "_foreach_div_": "torch's division of many tensors in one call, which has no public name",
    "_foreach_mul_": "torch's product of many tensors in one call, which has no public name",
    "_foreach_zero_": "torch's zeros for many tensors in one call, which have no public name",
    "_cuda_endAllocateToPool": "what torch does not do at the end of an invalid capture, in `step_graph`",
    "_cuda_releasePool": "what torch does not do at the end of an invalid capture, in `step_graph`",
    "_setup_dataloader_from_config": "NeMo's own choice of its loaders, for benchmarks/peers/nemo_loading.py",
    "_workers": "torch keeps the processes of a loader only there",
    "_option_string_actions": "argparse has no public list of its options",
}

# Private names that a class may use from a base class outside of the project.
INHERITED = {"_actions": "argparse has no public list of the arguments of a parser"}


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def own_names(node: ast.ClassDef) -> set[str]:
    """Returns the names that a class defines: methods, class attributes, slots, and attributes set on `self`."""
    names = {inner.name for inner in node.body if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef)}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
            if isinstance(inner.value, ast.Name) and inner.value.id in ("self", "cls"):
                names.add(inner.attr)
        elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Store):
            names.add(inner.id)
        elif isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            names.add(inner.value)  # of __slots__ and register_buffer
    return names


def classes() -> dict[str, tuple[set[str], list[str]]]:
    """Returns (own names, names of the bases) of every class of the project, by the name of the class."""
    found: dict[str, tuple[set[str], list[str]]] = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                bases = [ast.unparse(base).split("[")[0].split(".")[-1] for base in node.bases]
                names, others = found.get(node.name, (set(), []))
                found[node.name] = (names | own_names(node), others + bases)
    return found


CLASSES = classes()


def names_with_bases(name: str) -> set[str]:
    names, bases = CLASSES.get(name, (set(), []))
    return names.union(*(names_with_bases(base) for base in bases if base != name))


def private_uses(tree: ast.AST, class_name: str | None = None) -> Iterator[str]:
    """Yields every use of a private attribute that the project does not define, as `line: expression`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            of_self = isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") and class_name is not None
            known = names_with_bases(str(class_name)) | INHERITED.keys() if of_self else ALLOWED.keys()
            if node.attr not in known:
                yield f"{node.lineno}: {ast.unparse(node)}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr", "hasattr", "delattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and isinstance(name.value, str) and is_private(name.value):
                yield f"{node.lineno}: {ast.unparse(node)}"
        yield from private_uses(node, node.name if isinstance(node, ast.ClassDef) else class_name)


def private_imports(tree: ast.AST) -> Iterator[str]:
    """Yields every import of a private module or name of Lightning, as `line: statement`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names for part in alias.name.split(".")]
        else:
            continue
        if LIGHTNING & set(names) and any(is_private(name) for name in names):
            yield f"{node.lineno}: {ast.unparse(node)}"


def test_private_names_of_lightning_are_used_in_one_module_only() -> None:
    used = {}
    for path in SOURCES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        used[path.relative_to(REPOSITORY)] = [*private_uses(tree), *private_imports(tree)]
    assert {path: uses for path, uses in used.items() if uses} == {}


@pytest.mark.parametrize(
    "source",
    [
        "trainer._logger_connector.update_train_step_metrics()",
        "getattr(trainer, '_val_check_time_interval', None)",
        "class Handler(Callback):\n    def setup(self, trainer):\n        return trainer._get('trainer')",
        "from pytorch_lightning.trainer.connectors.signal_connector import _SignalConnector",
        "import lightning_fabric._private",
    ],
)
def test_uses_of_private_names_are_found(source: str) -> None:
    tree = ast.parse(source)
    assert len([*private_uses(tree), *private_imports(tree)]) == 1


def lightning_subclasses() -> list[type]:
    modules = [
        importlib.import_module(".".join(path.relative_to(REPOSITORY).with_suffix("").parts))
        for path in sorted((REPOSITORY / "nestmodel" / "training").rglob("*.py"))
        if path.stem != "__init__"
    ]
    found = {member for module in modules for member in vars(module).values() if inspect.isclass(member)}
    bases = (pl.LightningModule, pl.LightningDataModule, pl.Callback, pl.Trainer)
    return sorted(
        (cls for cls in found if issubclass(cls, bases) and cls.__module__.startswith("nestmodel")),
        key=lambda cls: cls.__name__,
    )


def test_no_private_name_of_a_lightning_class_is_overridden() -> None:
    subclasses = lightning_subclasses()
    assert subclasses
    for subclass in subclasses:
        # torch and abc also set private attributes on the subclass: those are not methods of ours.
        foreign = [base for base in subclass.__mro__ if not base.__module__.startswith("nestmodel")]
        names, _ = CLASSES[subclass.__name__]
        theirs = {name for base in foreign for name in vars(base)}
        assert {name for name in names if is_private(name) and name in theirs} == set(), subclass


def imported_modules(path: Path, root: str) -> set[str]:
    """Returns the modules below a package that a file imports, also those imported inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and (node.module or "").startswith(root):
            found.add(str(node.module))
    return found


@pytest.mark.parametrize("folder", ["nestmodel/training", "nestmodel/evaluate", "nestguard"])
def test_modules_of_a_folder_import_each_other_in_one_direction(folder: str) -> None:
    root = folder.replace("/", ".")
    graph = {}
    for path in sorted((REPOSITORY / folder).rglob("*.py")):
        module = ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__")
        graph[module] = imported_modules(path, root) - {module}
    while graph:
        free = [module for module, imports in graph.items() if not imports & graph.keys()]
        assert free, f"circular imports among {sorted(graph)}"
        graph = {module: imports for module, imports in graph.items() if module not in free}


def test_of_the_network_only_encoder_and_network_import_code_for_gpus() -> None:
    paths = sorted((REPOSITORY / "nestmodel" / "nn").glob("*.py"))
    assert {path.stem for path in paths if imported_modules(path, "nestmodel.nn.gpu")} == {"encoder", "network"}
