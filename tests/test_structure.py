"""Rules for the code of neondist/, checked on its syntax trees."""

import ast
import graphlib
import re
from functools import cache
from pathlib import Path

import pytest

import neondist

ROOT = Path(neondist.__file__).parent


def parse_trees(root):
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in sorted(root.rglob("*.py"))}


@cache
def parse_package():
    return parse_trees(ROOT)


FRAMES = {"_current_frames", "_getframe", "currentframe", "f_back", "f_locals", "tb_frame"}
BANNED_IDENTIFIERS = """
Way Fetch Home home way_back Courier courier parted Carrier Exact Border border booked books bytes_given
Frame Frames forget_frames Room Rooms Span Spans Dependents dependents received_cells
keeps_view input_place Taker writes_early Entry kept_values Part Trouble trouble Notices ROOM Run proceed
together Rival rival Solo solo solo_grid SoloTransport Alone rank_alone limits spread
Ahead seal SturdyFile Gatherer gatherer rectify rectify_back rectifier
orphan quiet leftovers swept attend guards
Wires Parcels Letter OfProgram of_program said_with hear hearer hear_requests
thinnest _paces sparing no_recompute by_place found judged WayBack saves_beside tell_mpi tell_import
terms_per_sample reduced_per_sample LocalView RowConvolution CropPositions as_distributed share_gradient segment_seconds
conv_back_into max_pool_back_into alone_seconds needer needs_along needs_others rereads counted_runs good_steps
numpy_words PlacedSink GuardedTask Demand head_start_index class_of_tile kinds_of_tiles clear_sides
explain_unpinned has_room _max_windows run_computed LiveNorm live_norms can_add_live_norm inside_rule
place_ranges Unaligned refuse_unless_boxes SideMeasurements _SideMeasurement TorchSide NEONDIST_SIDES TORCH_SIDES
cool_down HOST_COOL_DOWN_SECONDS excluded_hosts usable_hosts was_refused refused refuse_too_many_ranks
CutRanges cut_ranges cut_ids first_cut extend_cut
set_idle_callback largest_block_candidates ObservedEvent
ValueHolder holders _weights_slots check_run_length reduced_forward reduced_backward sent_overlaps has_sample_axis
AxesError BlockFilters DeferredErrorFile DimView GroupInfo HalfPrecision HostSpeed JobFolders LayerTable LocalWindow
MemoryEntry NarrowCudaTorchKernels NarrowCupyKernels NarrowCupyTorchKernels NarrowHostKernels NarrowOperandKernels
NarrowTorchKernelMixin NarrowTorchKernels NeondistUpdater OwnedTotals PaddedArray PartKinds PassError PlanError
ProfileCounter ProtocolError RegionConversion RowTable SCHEME_MEMORY_GROUP SCHEME_MEMORY_TEXT_NAME SavedSchemeState
SchemeMemory SplitRecords StagePictures StepList TableRecords TableSpec TorchVariants _BufferOwner _FieldMeter
_NormalisedMeter _TensorArguments _activation_traffic _add_bound_step _add_channels _backward_steps _by_address
_bytes_are_complete _bytes_before_and_after _bytes_by_step _check_name _check_resumable _check_supported
_column_chunks _confirm_version _copy_message _count_lines _cut_count _cut_strips _dependent_ids
_describe_slower_grid _detect_format _draw_initial_noise _encode_keys _equal_keys _estimate_product _extent_key
_fill_by_order _fill_curvilinear _fill_rows_columns _find_differences _find_recomputing_step
_find_unshared_gradients _fold_mode _fold_source_cells _fork_guard _forward_bytes _full_key _gather_message_sizes
_gather_message_sizes_of _gradient_before_clip _image_zeros _import_modules _is_empty_region _is_faster _is_file
_is_small _launch_errors _layer_models _least_step_seconds _locate_group _measure_size _merge_costs _message_key
_move_and_announce _move_gradient _name_in_errors _new_slot _nn_module_items _no_autocast _no_validation _node_count
_number_for _numpy_bytes _own_files _part_seconds _read_agreeing_versions _read_count _read_group_arrays
_redirect_to_null _register_mean_array _reject_foreign_random_draws _relaunch_script _release_line _remaining_flips
_report_text _return_message_sizes _return_message_sizes_of _run_guard _sample_norm _scale_rows _split_memory
_split_units _storage_errors _unit_box _unpack_handle _uses_narrow_conv _verify_block _wait_for_permission
_wait_for_ranks _with_buffer _write_output as_single_atom axis_orders cell_seconds cell_table check_compatible
check_folder check_outputs check_parameters check_tile clip_negative collect_scheme_memory computes_in_parts
count_profiles create_job_folders cut_strip_count cut_strips describe_parameters describe_slot_users describe_users
empty_view expect_parts expected_image factors_and_denominators find_names for_update has_memory has_run
has_unshared_gradient hash_array includes_own_part is_loss_counted is_placeholder is_replaced_by_module
is_structural labels_for last_write_time least_seconds_of_parts least_step_seconds local_contribution loss_text
max_plane_count max_ratios may_halve_memory mean_array mean_square_array narrow_calls num_last num_uncompressed
numpy_bytes open_when_free output_zeros pad_whole parameter_owner profile_rank read_value recomputing_step
record_agreement_of_servers record_items_after record_items_before released_at remains_in_place remove_all
report_loss reread_times restore_scheme_memory rotate_dim run_nonempty scatter_leaf scheme_names seconds_of
select_own servers_agree steps_and_nodes stopped_for_hosts strip_grid sum_ranges sum_sizes summed_in_place
sums_partial_results switch_generators sync_times tile_kinds track_values unfilled_cache_bytes unshared_gradients
validate_step_bench view_index wait_turn whole_process wide_tiles world_ranks_of
replicated_vector label_values _read_values allocate_view _spans_by_layer new_array _update_rule UpdateRule
update_rule RULE_VARIABLE mask_of_marks count_rounds _views_of_real_tensors _has_fixed_groups owned_names function_at
to_image_cells estimate_node batch_source BatchSource _split_consecutive_layers are_class_targets
gradient_gather_seconds all_handle_stop _add_file_options previous_graph _remaining_work
"""
WORDS = set(BANNED_IDENTIFIERS.split())
"""banned for all identifiers"""
DEFINED = WORDS | {"position", "seen", "same", "carry", "copies", "ahead", "borders", "entry"}
"""banned for definitions, allowed for variables"""
PHRASES = re.compile(
    r"travels? home|\bcouriers?\b|\bbooked\b|said is above|defect of neondist|goes with --|words of the script"
    r"|cannot be used; give|has to return|started again|waits for no |\beager's|\b[Nn]obody\b|\banew\b|^remembered$"
    r"|copies around messages|needs most memory|checkpoint of servers"
)


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
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name in DEFINED:
            yield node.lineno
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        if names & WORDS or PHRASES.search(text):
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


RULES = {
    "opens files through one function": find_unchecked_opens,
    "prints through one module": find_prints,
    "no replaced methods": lambda tree: find_replaced_methods(tree, list_methods()),
    "no attribute dictionaries": find_attribute_dictionaries,
    "no checks of layer classes": lambda tree: find_layer_checks(tree, list_layer_classes()),
    "no access to stack frames": find_stack_frames,
    "no code between fork and exec": find_forked_code,
    "documents parameters that exist": find_unknown_parameters,
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
    assert names & DEFINED == set()


CLAUSE = re.compile(r"(What|Which|Where|When|How|Who|That|Whether)\b")


def test_docstrings_of_modules_and_classes_begin_with_a_noun():
    repository = Path(__file__).parents[1]
    for folder in ("neondist", "tests", "tools", "examples", "docs/drawings"):
        for path, tree in parse_trees(repository / folder).items():
            for node in (tree, *select(tree, ast.ClassDef)):
                assert not CLAUSE.match(ast.get_docstring(node) or ""), f"{folder}/{path}:{getattr(node, 'name', 1)}"


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
