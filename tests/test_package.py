"""What is shipped, what an import costs, and which way imports point."""

from __future__ import annotations

import ast
import graphlib
import importlib
import json
import os
import re
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import tunedqk

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "tunedqk"
SOURCES = sorted(PACKAGE.rglob("*.py"))

# A module imports from its own layer, without a cycle, or from one below it.
LAYERS = (
    {"config", "device", "errors", "exits", "tensors"},
    {"kernels", "records", "db"},
    {"compiler", "compile_pool", "variant"},
    {
        "launch", "arrangement", "inputs", "offsets", "validate", "accept", "arguments", "call", "dense", "timing",
        "floor", "workload",
    },
    {"builder", "choice", "tune"},
    {"resolve", "ready", "compute", "sharding", "op", "score", "serving", "pretune", "isolation"},
    {"report", "cli"},
)  # fmt: skip
# What `import tunedqk.score` may load on top of torch and triton, besides the standard library.
LOADED_WITH_SCORE = {"msgspec", "triton", "tunedqk"}


def _python(code, *, cwd, **env):
    """Run `code` in a fresh Python outside the checkout; what it prints is JSON."""
    clean = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "TRITON_INTERPRET"}}
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=clean | env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def _tool(*arguments, cwd=None):
    """Run a Python tool; nothing here needs the network."""
    run = subprocess.run(
        [sys.executable, "-m", *map(str, arguments)], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


def _build(target, source, out):
    _tool("hatchling", "build", "-t", target, "-d", out, cwd=source)
    (built,) = out.glob("*.tar.gz" if target == "sdist" else "*.whl")
    return built


def _files(folder):
    return sorted(path.relative_to(folder).as_posix() for path in Path(folder).rglob("*") if path.is_file())


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """The sdist, unpacked."""
    out = tmp_path_factory.mktemp("sdist")
    _tool("tarfile", "-e", _build("sdist", ROOT, out), out)
    (folder,) = (path for path in out.iterdir() if path.is_dir())
    return folder


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    return _build("wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A folder that holds the installed wheel and nothing else."""
    target = tmp_path_factory.mktemp("installed")
    _tool("pip", "install", "-q", "--no-deps", "--no-index", "--target", target, wheel)
    return target


def test_sdist_holds_what_a_developer_needs(sdist):
    for name in ("tests", "scripts", "docs", "tuning_db", "tunedqk"):
        expected = [file for file in _files(ROOT / name) if "__pycache__" not in file and not file.endswith(".lock")]
        assert _files(sdist / name) == expected, name
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "pyproject.toml"} <= {
        path.name for path in sdist.iterdir()
    }


def test_wheel_holds_the_package_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
    assert tops == {"tunedqk", f"tunedqk-{tunedqk.__version__}.dist-info"}


def test_installed_wheel_finds_the_tuning_db(installed, tmp_path):
    answer = _python(
        "import json, tunedqk.db as db; folder = db.shipped_directory()\n"
        "files = [f.relative_to(folder).as_posix() for f in folder.rglob('*') if f.is_file()]\n"
        "print(json.dumps([db.__file__, str(folder), sorted(files)]))",
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    expected = _files(ROOT / "tuning_db")
    assert expected
    assert answer == [str(installed / "tunedqk" / "db.py"), str(installed / "tunedqk" / "tuning_db"), expected]


def test_installed_wheel_is_typed_and_has_its_command(installed, tmp_path):
    assert (installed / "tunedqk" / "py.typed").is_file()
    answer = _python(
        "import json; from importlib import metadata\n"
        "(command,) = metadata.distribution('tunedqk').entry_points.select(group='console_scripts')\n"
        "main = command.load()\n"
        "print(json.dumps([command.name, main.__module__, main.__name__, callable(main)]))",
        cwd=tmp_path,
        PYTHONPATH=str(installed),
    )
    assert answer == ["tunedqk", "tunedqk.cli", "main", True]


def test_this_install_finds_the_tuning_db(tmp_path):
    code = "import json, tunedqk.db as db; print(json.dumps([db.__file__, str(db.shipped_directory())]))"
    module, folder = _python(code, cwd=tmp_path)
    editable = Path(module) == PACKAGE / "db.py"
    assert Path(folder) == (ROOT if editable else Path(module).parent) / "tuning_db"
    assert _files(folder) == _files(ROOT / "tuning_db")


def test_version_is_that_of_the_install():
    assert tunedqk.__version__ == metadata.version("tunedqk")


def test_package_alone_loads_neither_torch_nor_triton(tmp_path):
    code = "import json, sys, tunedqk; tunedqk.__version__, dir(tunedqk); print(json.dumps(list(sys.modules)))"
    loaded = set(_python(code, cwd=tmp_path))
    assert "tunedqk" in loaded
    assert not loaded & {"torch", "triton", "numpy", "msgspec", "tunedqk.config", "tunedqk.score"}


@pytest.mark.parametrize("module", ["config", "device", "errors", "db"])
def test_plain_data_modules_load_neither_torch_nor_triton(module, tmp_path):
    code = f"import json, sys, tunedqk.{module}; print(json.dumps(list(sys.modules)))"
    assert not {"torch", "triton"} & set(_python(code, cwd=tmp_path))


def test_score_loads_little_on_top_of_torch_and_triton_and_no_gpu(tmp_path):
    # Importing few modules is what keeps the import below 50 ms; a measured time would only be flaky.
    answer = _python(
        "import json, sys, torch, triton, triton.language\n"
        "before = set(sys.modules)\n"
        "import tunedqk.score\n"
        "print(json.dumps([type(tunedqk.score).__name__, torch.cuda.is_initialized(), "
        "sorted(set(sys.modules) - before)]))",
        cwd=tmp_path,
        CUDA_VISIBLE_DEVICES="",
    )
    kind, initialized, added = answer
    assert (kind, initialized) == ("module", False)
    allowed = LOADED_WITH_SCORE | sys.stdlib_module_names
    assert [name for name in added if name.partition(".")[0] not in allowed] == []
    assert {"tunedqk.tune", "tunedqk.validate"} & set(added) == set()


def test_public_names():
    score = importlib.import_module("tunedqk.score")
    config = importlib.import_module("tunedqk.config")
    assert tunedqk.score is score
    assert tunedqk.qk_score is score.qk_score
    assert tunedqk.KernelConfig is config.KernelConfig
    assert tunedqk.TuningKey is config.TuningKey
    assert {"qk_score", "KernelConfig", "TuningKey", "__version__"} <= set(dir(tunedqk))
    assert "score" not in tunedqk.__all__
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = tunedqk.no_such_name


def _top_module(path):
    """`tunedqk/kernels/loop.py` belongs to `kernels`, `tunedqk/db.py` is `db`."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def _imports(path):
    """The top modules of tunedqk that a file imports, at its top, in functions, for types, or as `tunedqk.name`."""
    package = ("tunedqk", *path.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            origin = ".".join(part for part in (base, node.module) if part)
            names = [f"{origin}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names = [f"{node.value.id}.{node.attr}"]
        for name in names:
            top, _, rest = name.partition(".")
            module = rest.partition(".")[0]
            if top == "tunedqk" and module not in {"", "__version__"}:
                yield module


def _import_graph():
    graph = {}
    for path in SOURCES:
        if path != PACKAGE / "__init__.py":
            module = _top_module(path)
            graph.setdefault(module, set()).update(set(_imports(path)) - {module})
    return graph


def test_imports_point_one_way():
    layer = {module: rank for rank, modules in enumerate(LAYERS) for module in modules}
    graph = _import_graph()
    assert sorted(set(graph) - set(layer)) == [], "a new module needs its place in LAYERS"
    upward = [f"{a} -> {b}" for a, targets in graph.items() for b in targets if layer.get(b, len(LAYERS)) > layer[a]]
    assert upward == []
    list(graphlib.TopologicalSorter(graph).static_order())  # raises on a cycle within a layer


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_source_is_short_and_keeps_the_rules(path):
    text = path.read_text(encoding="utf-8")
    # tl.view may permute elements, and can_reorder allows it; tuning uses triton.autotune, not a copy of it.
    assert re.findall(r"tl\.view|can_reorder|class .*Autotuner", text) == []
    assert len(text.splitlines()) <= 300
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            lines = body[-1].end_lineno - body[0].lineno + 1 if body else 0
            assert lines <= 60, f"{node.name}: {lines} lines"
