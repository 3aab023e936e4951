"""Rules for the code of neondist/, checked on its syntax trees."""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

import pytest
from banned_words import BANNED_DEFINITIONS, BANNED_PHRASES, BANNED_WORDS

import neondist

ROOT = Path(neondist.__file__).parent


def parse_trees(root):
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


@cache
def parse_package():
    return parse_trees(ROOT)


FRAMES = {"_current_frames", "_getframe", "currentframe", "f_back", "f_locals", "tb_frame"}


@cache
def group_by_class(tree):
    """Return the nodes of a tree by their class, each tree walked through once."""
    groups = {}
    for node in ast.walk(tree):
        groups.setdefault(type(node), []).append(node)
    return groups


def select(tree, *kinds):
    return [node for kind in kinds for node in group_by_class(tree).get(kind, ())]


def list_targets(node):
    """Return the targets of an assignment, including those in tuples."""
    assigned = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for target in assigned for part in ast.walk(target) if isinstance(part, (ast.Name, ast.Attribute))]


def is_own(target):
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def list_assignments(tree):
    return [
        (node, target)
        for node in select(tree, ast.Assign, ast.AnnAssign, ast.AugAssign)
        for target in list_targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    ]


@cache
def list_methods():
    """Return the names of methods that no class also uses as an attribute."""
    bodies = [part for tree in parse_package().values() for node in select(tree, ast.ClassDef) for part in node.body]
    plain = {part.name for part in bodies if isinstance(part, ast.FunctionDef) and not part.decorator_list}
    fields = {part.target.id for part in bodies if isinstance(part, ast.AnnAssign)}
    fields |= {
        node.id for part in bodies if isinstance(part, ast.Assign) for node in list_targets(part) if hasattr(node, "id")
    }
    own_fields = {
        target.attr for tree in parse_package().values() for _, target in list_assignments(tree) if is_own(target)
    }
    return plain - fields - own_fields | {"forward", "backward"}


def find_replaced_methods(tree, names):
    """Yield the numbers of lines that replace a method of another object by a callable."""
    in_classes = {id(part) for node in select(tree, ast.ClassDef) for part in node.body}
    functions = {node.name for node in select(tree, ast.FunctionDef) if id(node) not in in_classes}
    for node, target in list_assignments(tree):
        value = node.value
        callable_ = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)
        callable_ |= isinstance(value, ast.Call) and ast.unparse(value.func).endswith("partial")
        hook = ast.unparse(target) in ("sys.excepthook", "threading.excepthook", "sys.unraisablehook")
        arguments = ast.unparse(target.value) == "arguments"  # argparse's
        if not is_own(target) and not hook and not arguments and (callable_ or target.attr in names):
            yield node.lineno
    inside = {
        id(part)
        for node in select(tree, ast.FunctionDef)
        if node.name == "__init_subclass__"  # a class may complete itself during its creation
        for part in ast.walk(node)
    }
    for call in select(tree, ast.Call):
        sets = ast.unparse(call.func) in ("setattr", "delattr", "object.__setattr__") and id(call) not in inside
        known = isinstance(call.args[1], ast.Constant) and call.args[1].value not in names if sets else True
        if not known and ast.unparse(call.args[0]) != "self":  # frozen dataclasses set their own fields this way
            yield call.lineno


def find_attribute_dictionaries(tree):
    """Yield the numbers of lines that read or change attributes of an object through its dictionary.

    Namespaces of argparse are copied this way; classes and modules have no alternative.
    """
    for attribute in select(tree, ast.Attribute):
        if attribute.attr == "__dict__":
            yield attribute.lineno
    for call in select(tree, ast.Call):
        if ast.unparse(call.func) == "vars":
            argument = ast.unparse(call.args[0]) if call.args else ""
            if argument not in ("arguments", "cls", "base") and not argument.startswith("sys.modules["):
                yield call.lineno


def find_layer_checks(tree, layers):
    """Yield the numbers of lines that check the class of a layer."""
    for call in select(tree, ast.Call):
        if ast.unparse(call.func) in ("isinstance", "issubclass"):
            classes = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(call.args[1])}
            if classes & layers:
                yield call.lineno


def find_stack_frames(tree):
    """Yield the numbers of lines that access stack frames."""
    for node in select(tree, ast.Attribute, ast.Name):
        if (node.attr if isinstance(node, ast.Attribute) else node.id) in FRAMES:
            yield node.lineno
    for node in select(tree, ast.Call):
        if ast.unparse(node.func) == "inspect.stack":
            yield node.lineno


@cache
def list_layer_classes():
    """Return the names of all layer classes; their base Node may be checked for."""
    classes = {"Layer"}
    while True:
        derived = {
            node.name
            for tree in parse_package().values()
            for node in select(tree, ast.ClassDef)
            if {getattr(base, "id", getattr(base, "attr", "")) for base in node.bases} & classes
        }
        if derived <= classes:
            return classes
        classes |= derived


def find_old_words(tree):
    """Yield the numbers of lines with banned identifiers, or banned phrases in texts."""
    for node in ast.walk(tree):
        names = {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in BANNED_DEFINITIONS:
            yield node.lineno
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if names & BANNED_WORDS or BANNED_PHRASES.search(text):
            yield getattr(node, "lineno", 0)


ARRAY_CODE = ("layers", "costs", "optim", "runtime", "parallel", "halo")
HOST_CODE = (
    "costs/labels.py",
    "parallel/compressed.py",
    "parallel/compressors.py",
    "parallel/flags.py",
    "parallel/rows.py",
    "parallel/shard.py",
    "runtime/debug/",
    "runtime/observers/",
)
"""labels, flags, messages, compressed arrays and observers stay on the host"""
ALLOWED_NUMPY_NAMES = {"ndarray", "dtype", "float64", "finfo", "iinfo", "shape"}


def find_numpy_calls(tree):
    """Yield the numbers of lines that call NumPy instead of the namespace of the arrays."""
    for node in select(tree, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "np" and node.attr not in ALLOWED_NUMPY_NAMES:
            yield node.lineno


READS = {"read_text", "read_bytes", "fromfile", "memmap", "genfromtxt", "loadtxt", "imread"}
OPENS = {"np.load", "h5py.File", "Image.open", "tifffile.TiffFile", "tarfile.open", "gzip.open", "zipfile.ZipFile",
         "nibabel.load", "zarr.open", "package.safe_open", "torch.load", "netCDF4.Dataset"}  # fmt: skip
CHECKED_BEFORE = {  # opened by name after `open_regular` or `check_regular`, or files of this process
    "data/datasets/download.py", "formats/nifti.py", "formats/pictures.py", "io/checkpoint/read.py",
    "io/environment.py", "io/hdf5/reader.py", "io/hdf5/writer.py", "io/regular_file.py", "torch/module/weights.py",
}  # fmt: skip
PRINTERS = ("terminal/console.py", "terminal/rich_console.py", "launcher/mpi_probe.py", "plan/report.py")
READERS = ("cli/", "config/", "data/", "formats/", "io/", "system/machine.py", "torch/", "train/")


def find_unchecked_opens(tree):
    """Yield the numbers of lines that read a file of any kind; writers open 'xb', 'ab' and so on."""
    checked = {node.id for node in select(tree, ast.Name)} & {"open_regular", "FolderStore"}
    for node in select(tree, ast.Call):
        name, method = ast.unparse(node.func), getattr(node.func, "attr", "")
        mode = str(([argument.value for argument in node.args if isinstance(argument, ast.Constant)] or [""])[-1])
        by_name = (name == "open" and not {*mode} & {*"xaw+"}) or (method == "open" and mode in ("r", "rb"))
        if by_name or method in READS or (name in OPENS and not checked):
            yield node.lineno


def find_prints(tree):
    """Yield the numbers of lines that print, or create a console of rich."""
    for node in select(tree, ast.Call):
        if ast.unparse(node.func) == "print":
            yield node.lineno
    for node in select(tree, ast.ImportFrom):
        if node.module == "rich.console" and any(alias.name == "Console" for alias in node.names):
            yield node.lineno


def find_unknown_parameters(tree):
    """Yield the numbers of lines of functions and classes that document parameters that they do not have."""
    owners = {id(part): node for node in select(tree, ast.ClassDef) for part in node.body}
    for function in select(tree, ast.FunctionDef):
        node = owners.get(id(function)) if function.name == "__init__" else function
        _, heading, section = ((node and ast.get_docstring(node)) or "").partition("Parameters\n----------\n")
        entries = re.findall(r"^(\w[^:\n]*)", re.split(r"\n\n\w+\n-{3}", section)[0], re.M)
        arguments = function.args
        known = {
            each.arg
            for each in (*arguments.posonlyargs, *arguments.args, arguments.vararg, *arguments.kwonlyargs)
            if each is not None
        }
        documented = {name.strip() for entry in entries for name in entry.split(",")}
        if heading and not arguments.kwarg and documented - known:
            yield node.lineno


def find_forked_code(tree):
    """Return the numbers of lines that run code between fork and exec, which may crash or hang next to gRPC threads."""
    return [node.lineno for node in select(tree, ast.keyword) if node.arg == "preexec_fn"]


def find_expansions_that_may_fail(tree):
    """Yield the numbers of lines that expand '~' with pathlib, which raises RuntimeError for an unknown user."""
    for node in select(tree, ast.Attribute):
        if node.attr == "expanduser" and ast.unparse(node.value) != "os.path":
            yield node.lineno


RULES = {
    "opens files through one function": find_unchecked_opens,
    "prints through one module": find_prints,
    "no replaced methods": lambda tree: find_replaced_methods(tree, list_methods()),
    "no attribute dictionaries": find_attribute_dictionaries,
    "no checks of layer classes": lambda tree: find_layer_checks(tree, list_layer_classes()),
    "no access to stack frames": find_stack_frames,
    "no code between fork and exec": find_forked_code,
    "documents parameters that exist": find_unknown_parameters,
    "expands ~ of unknown users": find_expansions_that_may_fail,
    "no banned words": find_old_words,
}


def select_trees(rule):
    return {
        path: tree
        for path, tree in parse_package().items()
        if not (rule.startswith("opens files") and (path in CHECKED_BEFORE or not path.startswith(READERS)))
        and not (rule.startswith("prints") and path in PRINTERS)
        # starts mpirun, and calls no service
        and not (rule.startswith("no code between") and path == "launcher/supervision.py")
        # replaces a method of PyTorch's metaclass during capture, as the application of a Function is compiled
        and not (rule == "no replaced methods" and path == "torch/ir/custom_gradients.py")
        # PyTorch's l1_loss does not pass its weight to overrides
        and not (rule == "no access to stack frames" and path == "torch/rules/loss.py")
        # they watch users' modules for changes
        and not (
            rule == "no attribute dictionaries" and path in ("torch/capture/module_state.py", "torch/capture/watch.py")
        )
    }


@pytest.mark.parametrize("rule", RULES)
def test_rules(rule):
    assert [f"{path}:{line}" for path, tree in select_trees(rule).items() for line in RULES[rule](tree)] == []


def test_module_names():
    names = {part.strip("_") for path in parse_package() for part in Path(path).with_suffix("").parts}
    assert names & BANNED_DEFINITIONS == set()


CLAUSE = re.compile(r"(What|Which|Where|When|How|Who|That|Whether)\b")


def test_docstrings_of_modules_classes_and_attributes_begin_with_a_noun():
    repository = Path(__file__).parents[1]
    for folder in ("neondist", "tests", "tools", "examples", "docs/drawings"):
        for path, tree in parse_trees(repository / folder).items():
            for node in (tree, *select(tree, ast.ClassDef)):
                assert not CLAUSE.match(ast.get_docstring(node) or ""), f"{folder}/{path}:{getattr(node, 'name', 1)}"
                for expression in (item.value for item in node.body if isinstance(item, ast.Expr)):  # of attributes
                    text = str(getattr(expression, "value", ""))
                    assert not CLAUSE.match(text) or text.startswith("Whether"), f"{folder}/{path}:{expression.lineno}"


def test_arrays_are_computed_in_their_own_namespace():
    trees = {
        path: tree
        for path, tree in parse_package().items()
        if path.startswith(ARRAY_CODE) and not path.startswith(HOST_CODE)
    }
    assert [f"{path}:{line}" for path, tree in trees.items() for line in find_numpy_calls(tree)] == []
    assert list(find_numpy_calls(ast.parse("a = np.float64(1)\nb = np.maximum(a, 0)"))) == [2]


VIOLATIONS = {
    "opens files through one function": [
        "open(path)", "path.open('rb')", "path.read_text()", "np.load(path)", "h5py.File(path, 'r')", "open(p, 'rb')",
    ],
    "prints through one module": ["print(x)", "from rich.console import Console"],
    "no replaced methods": [
        "layer.forward = watched",
        "layer.anything = lambda: 1",
        "def f(): pass\nlayer.anything = f",
        "layer.anything, y = functools.partial(f), 1\nlayer.anything = functools.partial(f)",
        "setattr(layer, name, f)",
    ],
    "no attribute dictionaries": ["vars(self).update(x)", "self.__dict__['a'] = 1", "vars(layer)"],
    "no checks of layer classes": ["isinstance(x, ConvLayer)", "isinstance(x, (int, layers.FCLayerDist))"],
    "no access to stack frames": ["sys._current_frames()", "inspect.currentframe()", "frame.f_back", "inspect.stack()"],
    "no code between fork and exec": ["subprocess.Popen(words, preexec_fn=f)"],
    "expands ~ of unknown users": ["Path(text).expanduser()"],
    "documents parameters that exist": [
        "def f(a):\n    '''Return.\n\n    Parameters\n    ----------\n    a, b : int\n    '''",
        "class A:\n    '''A.\n\n    Parameters\n    ----------\n    b\n    '''\n    def __init__(self, a): pass",
    ],
    "no banned words": [
        "class Way: pass",
        "def courier(self): pass",
        "array.border.scheme",
        "'it travels home'",
        "'waits for nobody'",
        "def same(a, b): pass",
        "class Entry: pass",
        "spread = 1",
        "from .bench import rival",
    ],
}  # fmt: skip


@pytest.mark.parametrize(("rule", "code"), [(rule, code) for rule, codes in VIOLATIONS.items() for code in codes])
def test_rules_detect_violations(rule, code):
    assert list(RULES[rule](ast.parse(code)))


def list_public_methods(body):
    """Return the names of public methods defined in a class; properties are attributes."""
    marked = ("property", "setter")
    methods = [node for node in body.body if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
    return {
        node.name for node in methods if not any(ast.unparse(mark).endswith(marked) for mark in node.decorator_list)
    }


def test_classes_have_at_most_20_methods():
    classes = [node for tree in parse_package().values() for node in select(tree, ast.ClassDef)]
    assert [node.name for node in classes if len(list_public_methods(node)) > 20] == []
    code = "class A:\n    def a(self): ...\n    def _b(self): ...\n    @property\n    def c(self): ..."
    assert list_public_methods(ast.parse(code).body[0]) == {"a"}


def find_import_cycle(package, trees):
    """Return 'a -> b -> a' if modules import each other, including imports for type hints and in functions."""
    names = {path: ".".join((package, *Path(path).with_suffix("").parts)).removesuffix(".__init__") for path in trees}
    known, graph = set(names.values()), {}
    for path, module in names.items():
        imported = [alias.name for node in select(trees[path], ast.Import) for alias in node.names]
        for node in select(trees[path], ast.ImportFrom):
            up = node.level - (Path(path).name == "__init__.py")
            above = module.rsplit(".", up)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            imported += [full if (full := f"{base}.{alias.name}") in known else base for alias in node.names]
        graph[module] = {name for name in imported if name in known} - {module}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        ring = error.args[1][:0:-1]
        first = ring.index(min(ring))
        return " -> ".join([*ring[first:], *ring[:first], ring[first]])
    return ""


def test_imports_have_no_cycles():
    assert find_import_cycle("neondist", parse_package()) == ""


IMPORT_CYCLES = [
    ({"__init__.py": "from .a import x", "a.py": "import sys, made"}, "made -> made.a -> made"),
    (
        {"a.py": "from .in_.b import x", "in_/b.py": "if TYPE_CHECKING:\n from ..a import X"},
        "made.a -> made.in_.b -> made.a",
    ),
    (
        {"c.py": "from . import b", "b.py": "import made.a", "a.py": "def f():\n from made import c"},
        "made.a -> made.c -> made.b -> made.a",
    ),
    ({"a/__init__.py": "from . import b", "a/b.py": "", "b.py": "from .a import c, b"}, ""),
    (
        {"a/__init__.py": "from .b import x", "a/b.py": "from .. import c", "c.py": "from .a import x"},
        "made.a -> made.a.b -> made.c -> made.a",
    ),
]


@pytest.mark.parametrize(("files", "expected"), IMPORT_CYCLES)
def test_import_cycles_are_detected(tmp_path, files, expected):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert find_import_cycle("made", parse_trees(tmp_path)) == expected
