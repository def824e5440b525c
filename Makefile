# The targets that people use. `make help` lists them.
PYTHON ?= python3
LAB = .venv/bin/python -m lab
PARTS = .venv/bin/python -m tests.parts

.DEFAULT_GOAL := help
.PHONY: help env lab lab-down lab-status converge-cost lint unit molecule lab-test test-gpu test-drivers test-vm engine-lock test-engines test-rolling test lock

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## host packages that are missing, and .venv from requirements.lock
	@command -v $(PYTHON) >/dev/null || { echo "installing host package: python3"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get -q -y install python3; else sudo apt-get -q -y install python3; fi; }
	@$(PYTHON) -m lab env

lab: env  ## boxes on this machine, provisioned, and a question to each lane; repairs what is half made (3 min, first time 10)
	@$(LAB) up

lab-status:  ## what the lab's boxes and lanes answer
	@$(LAB) status

lab-down:  ## remove the lab's boxes, network and state; the cache stays
	@$(PYTHON) -m lab down

converge-cost: env  ## run site.yml twice and print calls_per_box=N changed=0 wall_s=T of the second run (1 min)
	@$(LAB) converge-cost

lint: env  ## ruff, mypy, yamllint, ansible-lint, profile production (1 min)
	@$(PARTS) lint

unit: env  ## unit tests, public bug reports as cases, modules through Ansible (3 min)
	@$(PARTS) unit

molecule: env  ## each role in a box of its own, then the whole box; one of them: make molecule S=serve (18 min)
	@$(PARTS) molecule$(if $(S),:$(S))

lab-test: env  ## the lab end to end: both lanes, changes, kills, interrupted runs (15 min)
	@$(PARTS) lab

test-gpu:  ## a lane on real GPUs: make test-gpu ENGINE=/venv/of/vllm [CARDS=N] [REPORT=FILE]; no ENGINE: in the lab (3 min)
ifdef ENGINE
	@PYTHONPATH=module_utils:. $(firstword $(wildcard .venv/bin/python) $(PYTHON)) -m tests.gpu --engine "$(ENGINE)" \
	  $(if $(CARDS),--tensor-parallel-max $(CARDS)) $(if $(REPORT),--report "$(REPORT)")
else
	@$(MAKE) --no-print-directory env
	@$(PARTS) gpu
endif

test-vm: env  ## drivers and reboots on a virtual machine with a kernel of its own; not part of test (15 min, first time 20)
	@$(PARTS) vm

test-rolling: lab  ## rollouts, rollbacks and kills under load, every request counted; some of them: S="constant_load" (25 min)
	@PYTHONPATH=module_utils .venv/bin/python -m tests.rolling $(S)

test: env  ## all of it, cheapest first: what CI runs (40 min)
	@$(PARTS) lint unit molecule lab

test-drivers: env  ## drivers, really: Debian's packages and DKMS build, a signed repository, the CoreX installer; not part of test (25 min)
	@$(PARTS) drivers

engine-lock: env  ## an engine's wheels with their hashes: make engine-lock E=ENGINE [R=requirements.txt of its release] (1 min)
	@$(LAB) engine-lock $(E) $(if $(R),--requirements $(R))

test-engines: env  ## engines in the lab: a build from a git tree, wrong bytes, one build for two boxes, rollback (20 min)
	@$(PARTS) engines

lock: env  ## requirements.lock from pyproject.toml
	@.venv/bin/uv pip compile pyproject.toml --group dev --universal --python-version 3.11 --generate-hashes \
	  --no-emit-index-url --no-header --quiet --output-file requirements.lock
