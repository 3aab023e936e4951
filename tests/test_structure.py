"""Rules for the code of neondist/, checked on its syntax trees."""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

import pytest

import neondist

ROOT = Path(neondist.__file__).parent


def trees_of(root):
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


@cache
def all_trees():
    return trees_of(ROOT)


FRAMES = {"_current_frames", "_getframe", "currentframe", "f_back", "f_locals", "tb_frame"}
OLD = """
Way Fetch Home home way_back Courier courier parted Carrier Exact Border border booked books bytes_given
Frame Frames forget_frames Room Rooms Span Spans Dependents dependents received_cells
keeps_view input_place Taker writes_early Entry kept_values Part Trouble trouble Notices ROOM Run proceed
together Rival rival Solo solo solo_grid SoloTransport Alone rank_alone limits spread
Ahead seal SturdyFile Gatherer gatherer rectify rectify_back rectifier
orphan quiet leftovers swept attend guards
Wires Parcels Letter OfProgram of_program said_with hear hearer hear_requests
thinnest _paces sparing no_recompute by_place found judged WayBack saves_beside tell_mpi tell_import
"""
WORDS = set(OLD.split())
"""no identifier of any kind"""
DEFINED = WORDS | {"position", "seen", "same", "carry", "copies", "ahead", "borders", "entry"}
"""no module, class or function; the rest of a program may well use such words"""
PHRASES = re.compile(
    r"travels? home|\bcouriers?\b|\bbooked\b|said is above|defect of neondist|goes with --|words of the script"
    r"|cannot be used; give|has to return|\beager's|\b[Nn]obody\b|\banew\b"
)


@cache
def by_kind(tree):
    """Return the nodes of a tree by their class, each tree walked through once."""
    found = {}
    for node in ast.walk(tree):
        found.setdefault(type(node), []).append(node)
    return found


def nodes(tree, *kinds):
    return [node for kind in kinds for node in by_kind(tree).get(kind, ())]


def targets(node):
    """Return what an assignment assigns to, tuples taken apart."""
    found = node.targets if isinstance(node, ast.Assign) else [node.target]
    return [part for one in found for part in ast.walk(one) if isinstance(part, (ast.Name, ast.Attribute))]


def own(target):
    return isinstance(target.value, ast.Name) and target.value.id in ("self", "cls")


def assignments(tree):
    return [
        (node, target)
        for node in nodes(tree, ast.Assign, ast.AnnAssign, ast.AugAssign)
        for target in targets(node)
        if isinstance(target, ast.Attribute) and isinstance(target.ctx, ast.Store)
    ]


@cache
def methods():
    """Return the names that are methods of classes, and attributes of none."""
    bodies = [part for tree in all_trees().values() for one in nodes(tree, ast.ClassDef) for part in one.body]
    plain = {part.name for part in bodies if isinstance(part, ast.FunctionDef) and not part.decorator_list}
    fields = {part.target.id for part in bodies if isinstance(part, ast.AnnAssign)}
    fields |= {one.id for part in bodies if isinstance(part, ast.Assign) for one in targets(part) if hasattr(one, "id")}
    own_fields = {target.attr for tree in all_trees().values() for _, target in assignments(tree) if own(target)}
    return plain - fields - own_fields | {"forward", "backward"}


def replaced(tree, names):
    """Return the lines that put a callable in the place of another object's method."""
    in_classes = {id(part) for one in nodes(tree, ast.ClassDef) for part in one.body}
    functions = {node.name for node in nodes(tree, ast.FunctionDef) if id(node) not in in_classes}
    for node, target in assignments(tree):
        value = node.value
        callable_ = isinstance(value, ast.Lambda) or (isinstance(value, ast.Name) and value.id in functions)
        callable_ |= isinstance(value, ast.Call) and ast.unparse(value.func).endswith("partial")
        hook = ast.unparse(target) in ("sys.excepthook", "threading.excepthook", "sys.unraisablehook")
        arguments = ast.unparse(target.value) == "arguments"  # argparse's
        if not own(target) and not hook and not arguments and (callable_ or target.attr in names):
            yield node.lineno
    inside = {
        id(part)
        for node in nodes(tree, ast.FunctionDef)
        if node.name == "__init_subclass__"  # a class may complete itself while it is made
        for part in ast.walk(node)
    }
    for call in nodes(tree, ast.Call):
        sets = ast.unparse(call.func) in ("setattr", "delattr", "object.__setattr__") and id(call) not in inside
        known = isinstance(call.args[1], ast.Constant) and call.args[1].value not in names if sets else True
        if not known and ast.unparse(call.args[0]) != "self":  # frozen dataclasses set their own fields so
            yield call.lineno


def through_dictionaries(tree):
    """Return the lines that look at, or change, an object's attributes by its dictionary.

    Namespaces of argparse are told so how to be copied; classes and modules have no other way.
    """
    for attribute in nodes(tree, ast.Attribute):
        if attribute.attr == "__dict__":
            yield attribute.lineno
    for call in nodes(tree, ast.Call):
        if ast.unparse(call.func) == "vars":
            of = ast.unparse(call.args[0]) if call.args else ""
            if of not in ("arguments", "cls", "base") and not of.startswith("sys.modules["):
                yield call.lineno


def layer_questions(tree, layers):
    """Return the lines that ask which layer something is."""
    for call in nodes(tree, ast.Call):
        if ast.unparse(call.func) in ("isinstance", "issubclass"):
            asked = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(call.args[1])}
            if asked & layers:
                yield call.lineno


def frames(tree):
    """Return the lines that look at stack frames."""
    for node in nodes(tree, ast.Attribute, ast.Name):
        if (node.attr if isinstance(node, ast.Attribute) else node.id) in FRAMES:
            yield node.lineno
    for node in nodes(tree, ast.Call):
        if ast.unparse(node.func) == "inspect.stack":
            yield node.lineno


@cache
def layer_classes():
    """Return the names of all layers; what a user gives in their place may be told apart from a Node."""
    found = {"Layer"}
    while True:
        more = {
            one.name
            for tree in all_trees().values()
            for one in nodes(tree, ast.ClassDef)
            if {getattr(base, "id", getattr(base, "attr", "")) for base in one.bases} & found
        }
        if more <= found:
            return found
        found |= more


def old_words(tree):
    """Return the lines with names of the first edition, or its words in texts."""
    for node in ast.walk(tree):
        names = {getattr(node, field, None) for field in ("id", "attr", "arg", "name")}
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in DEFINED:
            yield node.lineno
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if names & WORDS or PHRASES.search(text):
            yield getattr(node, "lineno", 0)


COMPUTES = ("layers", "costs", "optim", "runtime", "parallel", "halo")
ON_HOST = (
    "costs/labels.py",
    "parallel/compressed.py",
    "parallel/compressors.py",
    "parallel/flags.py",
    "parallel/rows.py",
    "parallel/shard.py",
    "runtime/debug/",
    "runtime/observers/",
)
"""what targets, flags, messages and whole arrays are made of stays on the host, and what is watched"""
KINDS = {"ndarray", "dtype", "float64", "finfo", "iinfo", "shape"}


def numpy_functions(tree):
    """Return the lines that call NumPy, and not the namespace of the arrays at hand."""
    for node in nodes(tree, ast.Attribute):
        if isinstance(node.value, ast.Name) and node.value.id == "np" and node.attr not in KINDS:
            yield node.lineno


READS = {"read_text", "read_bytes", "fromfile", "memmap", "genfromtxt", "loadtxt", "imread"}
OPENS = {"np.load", "h5py.File", "Image.open", "tifffile.TiffFile", "tarfile.open", "gzip.open", "zipfile.ZipFile",
         "nibabel.load", "zarr.open", "package.safe_open", "torch.load", "netCDF4.Dataset"}  # fmt: skip
AFTER_A_LOOK = {  # by name, once `open_regular` or `check_regular` has had the file; or files of this process's own
    "data/datasets/download.py", "formats/nifti.py", "formats/pictures.py", "io/checkpoint/read.py",
    "io/environment.py", "io/hdf5/reader.py", "io/hdf5/writer.py", "io/regular_file.py", "torch/module/weights.py",
}  # fmt: skip
PRINTERS = ("terminal/console.py", "terminal/rich_console.py", "launcher/mpi_probe.py", "plan/report.py")
READERS = ("cli/", "config/", "data/", "formats/", "io/", "system/machine.py", "torch/", "train/")


def opened_by_name(tree):
    """Return the lines that read a file whatever it is; writers open 'xb', 'ab' and so on."""
    checked = {node.id for node in nodes(tree, ast.Name)} & {"open_regular", "FolderStore"}
    for node in nodes(tree, ast.Call):
        name, called = ast.unparse(node.func), getattr(node.func, "attr", "")
        mode = str(([one.value for one in node.args if isinstance(one, ast.Constant)] or [""])[-1])
        by_name = (name == "open" and not {*mode} & {*"xaw+"}) or (called == "open" and mode in ("r", "rb"))
        if by_name or called in READS or (name in OPENS and not checked):
            yield node.lineno


def prints(tree):
    """Return the lines that print, or make a console of rich, themselves."""
    for node in nodes(tree, ast.Call):
        if ast.unparse(node.func) == "print":
            yield node.lineno
    for node in nodes(tree, ast.ImportFrom):
        if node.module == "rich.console" and any(one.name == "Console" for one in node.names):
            yield node.lineno


def forked_code(tree):
    """Return the lines that let a child run code before exec, which threads of gRPC let crash or hang."""
    return [node.lineno for node in nodes(tree, ast.keyword) if node.arg == "preexec_fn"]


RULES = {
    "opens files through one function": opened_by_name,
    "prints through one module": prints,
    "replaces no methods": lambda tree: replaced(tree, methods()),
    "no dictionaries of objects": through_dictionaries,
    "does not ask layers what they are": lambda tree: layer_questions(tree, layer_classes()),
    "looks at no stack frames": frames,
    "runs no code between fork and exec": forked_code,
    "no words of the first edition": old_words,
}


def trees(rule):
    return {
        path: tree
        for path, tree in all_trees().items()
        if not (rule.startswith("opens files") and (path in AFTER_A_LOOK or not path.startswith(READERS)))
        and not (rule.startswith("prints") and path in PRINTERS)
        and not (rule.startswith("runs no code") and path == "launcher/supervise.py")  # of mpirun; it calls no service
        # they look for what changes in users' modules
        # while a module is captured, of PyTorch's metaclass: what applies a Function is compiled, and tells nobody
        and not (rule == "replaces no methods" and path == "torch/ir/custom_gradients.py")
        # PyTorch's l1_loss leaves its weight out of what it tells those that override it
        and not (rule == "looks at no stack frames" and path == "torch/rules/loss.py")
        and not (
            rule == "no dictionaries of objects" and path in ("torch/capture/module_state.py", "torch/capture/watch.py")
        )
    }


@pytest.mark.parametrize("rule", RULES)
def test_never(rule):
    assert [f"{path}:{line}" for path, tree in trees(rule).items() for line in RULES[rule](tree)] == []


def test_no_module_has_a_name_of_the_first_edition():
    names = {part.strip("_") for path in all_trees() for part in Path(path).with_suffix("").parts}
    assert names & DEFINED == set()


QUESTION = re.compile(r"(What|Which|Where|When|How|Who|That|Whether)\b")


def test_docstrings_of_modules_and_classes_begin_with_a_noun():
    repository = Path(__file__).parents[1]
    for folder in ("neondist", "tests", "tools", "examples", "docs/drawings"):
        for path, tree in trees_of(repository / folder).items():
            for node in (tree, *nodes(tree, ast.ClassDef)):
                assert not QUESTION.match(ast.get_docstring(node) or ""), f"{folder}/{path}:{getattr(node, 'name', 1)}"


def test_arrays_are_computed_with_by_their_own_namespace():
    trees = {
        path: tree for path, tree in all_trees().items() if path.startswith(COMPUTES) and not path.startswith(ON_HOST)
    }
    assert [f"{path}:{line}" for path, tree in trees.items() for line in numpy_functions(tree)] == []
    assert list(numpy_functions(ast.parse("a = np.float64(1)\nb = np.maximum(a, 0)"))) == [2]


BAD = {
    "opens files through one function": [
        "open(path)",
        "path.open('rb')",
        "path.read_text()",
        "np.load(path)",
        "h5py.File(path, 'r')",
        "open(p, 'rb')",
    ],
    "prints through one module": ["print(x)", "from rich.console import Console"],
    "replaces no methods": [
        "layer.forward = watched",
        "layer.anything = lambda: 1",
        "def f(): pass\nlayer.anything = f",
        "layer.anything, y = functools.partial(f), 1\nlayer.anything = functools.partial(f)",
        "setattr(layer, name, f)",
    ],
    "no dictionaries of objects": ["vars(self).update(x)", "self.__dict__['a'] = 1", "vars(layer)"],
    "does not ask layers what they are": ["isinstance(x, ConvLayer)", "isinstance(x, (int, layers.FCLayerDist))"],
    "looks at no stack frames": ["sys._current_frames()", "inspect.currentframe()", "frame.f_back", "inspect.stack()"],
    "runs no code between fork and exec": ["subprocess.Popen(words, preexec_fn=f)"],
    "no words of the first edition": [
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
}


@pytest.mark.parametrize(("rule", "code"), [(rule, code) for rule, codes in BAD.items() for code in codes])
def test_the_rules_find_what_they_are_for(rule, code):
    assert list(RULES[rule](ast.parse(code)))


def public_methods(body):
    """Return the names of a class's own methods that others may call; properties are attributes."""
    marked = ("property", "setter")
    own = [one for one in body.body if isinstance(one, ast.FunctionDef) and not one.name.startswith("_")]
    return {one.name for one in own if not any(ast.unparse(mark).endswith(marked) for mark in one.decorator_list)}


def test_no_class_offers_more_than_20_methods():
    classes = [one for tree in all_trees().values() for one in nodes(tree, ast.ClassDef)]
    assert [one.name for one in classes if len(public_methods(one)) > 20] == []
    code = "class A:\n    def a(self): ...\n    def _b(self): ...\n    @property\n    def c(self): ..."
    assert public_methods(ast.parse(code).body[0]) == {"a"}


def circle(package, trees):
    """Return 'a -> b -> a' where modules import each other, for type hints alone or inside of functions too."""
    names = {path: ".".join((package, *Path(path).with_suffix("").parts)).removesuffix(".__init__") for path in trees}
    known, graph = set(names.values()), {}
    for path, name in names.items():
        found = [one.name for node in nodes(trees[path], ast.Import) for one in node.names]
        for node in nodes(trees[path], ast.ImportFrom):
            up = node.level - (Path(path).name == "__init__.py")
            above = name.rsplit(".", up)[0] if node.level else ""
            base = ".".join(filter(None, [above, node.module]))
            found += [whole if (whole := f"{base}.{one.name}") in known else base for one in node.names]
        graph[name] = {one for one in found if one in known} - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        ring = error.args[1][:0:-1]
        first = ring.index(min(ring))
        return " -> ".join([*ring[first:], *ring[:first], ring[first]])
    return ""


def test_no_file_imports_what_imports_it():
    assert circle("neondist", all_trees()) == ""


CIRCLES = [
    ({"__init__.py": "from .a import x", "a.py": "import sys, made"}, "made -> made.a -> made"),
    (
        {"a.py": "from .in_.b import x", "in_/b.py": "if TYPE_CHECKING:\n from ..a import X"},
        "made.a -> made.in_.b -> made.a",
    ),
    (
        {"c.py": "from . import b", "b.py": "import made.a", "a.py": "def f():\n from made import c"},
        "made.a -> made.c -> made.b -> made.a",
    ),
    (
        {"a/__init__.py": "from . import b", "a/b.py": "", "b.py": "from .a import c, b"},
        "",
    ),
    (
        {"a/__init__.py": "from .b import x", "a/b.py": "from .. import c", "c.py": "from .a import x"},
        "made.a -> made.a.b -> made.c -> made.a",
    ),
]


@pytest.mark.parametrize(("files", "found"), CIRCLES)
def test_circles_are_found(tmp_path, files, found):
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    assert circle("made", trees_of(tmp_path)) == found
