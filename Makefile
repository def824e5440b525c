# The targets that people use. `make help` lists them.
PYTHON ?= python3
LAB = .venv/bin/python -m lab
PARTS = .venv/bin/python -m tests.parts

.DEFAULT_GOAL := help
.PHONY: help env lab lab-down lab-status converge-cost lint unit molecule lab-test test

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

env:  ## host packages that are missing, and .venv from requirements.lock
	@command -v $(PYTHON) >/dev/null || { echo "installing host package: python3"; \
	  if [ "$$(id -u)" = 0 ]; then apt-get -q -y install python3; else sudo apt-get -q -y install python3; fi; }
	@$(PYTHON) -m lab env

lab: env  ## boxes on this machine, provisioned, and a question to each lane; repairs what is half made
	@$(LAB) up

lab-status:  ## what the lab's boxes and lanes answer
	@$(LAB) status

lab-down:  ## remove the lab's boxes, network and state; the cache stays
	@$(PYTHON) -m lab down

converge-cost: env  ## run site.yml twice and print calls_per_box=N changed=0 wall_s=T of the second run
	@$(LAB) converge-cost

lint: env  ## ruff, mypy, yamllint, ansible-lint (profile production)
	@$(PARTS) lint

unit: env  ## unit tests, public bug reports as cases, modules through Ansible
	@$(PARTS) unit

molecule: env  ## each role in a box of its own, then the whole box; one of them: make molecule S=serve
	@$(PARTS) molecule$(if $(S),:$(S))

lab-test: env  ## the lab end to end: both lanes, changes, kills, interrupted runs
	@$(PARTS) lab

test: env  ## all of it, cheapest first: what CI runs
	@$(PARTS) lint unit molecule lab
