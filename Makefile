# One line a verb: what it does stands in python/trainfleet/cli/<verb>.py. `make` alone lists them.
ifneq ($(dir $(lastword $(MAKEFILE_LIST))),./)
$(error This Makefile works on the folder it is in. Type: make -C $(dir $(lastword $(MAKEFILE_LIST))))
endif

# No variable stands in a recipe, and none is exported expanded: Python reads them raw from MAKEFLAGS, so that a value is only
# ever data. That is what the loop is for: make would export (and expand) what stood on its command line.
$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(eval unexport $(name))))
override export PYTHONPATH := python
override export PYTHONSAFEPATH := 1 # a yaml.py or random.py that lies here is a user's, and no package's
override export PYTHONUTF8 := 1
export MAKECMDGOALS
.DEFAULT_GOAL := help
.SUFFIXES: # no rules of make's own, nor those by which it would know what a.c, a.tex and a.out are
%.out: %
%.c: %.w %.ch
%.tex: %.w %.ch
.NOTPARALLEL: # make -j8 train tokenize: one after the other
.PHONY: .force help setup build push doctor recipes config plan tokenize compile train profile scaling rehearse inspect sample runs watch compare status logs stop checkpoints verify eval export report ls clean test drills check

ifeq ($(word 2,$(MAKECMDGOALS)),)
help:
	@echo "trainfleet: from bare nodes to a trained model. Begin with: make train"
	@awk -F ':.*## | +\\[' '/^[a-z]+:.*## / { printf $$3 ? "  make %-11s %-40s [%s\n" : "  make %-11s %s\n", $$1, $$2, $$3 }' Makefile
	@echo "CONFIG=path: another config; RUN=name: a run; SET='train.steps=50' sets any key"
else # `make help train` runs both: Python sees the word help, and tells what train takes
help: ;@:
endif

setup: .venv/.stamp ## make this machine or the fleet ready [NODES YES]
	@.venv/bin/python -m trainfleet setup

build: .venv/.stamp ## build the container image of fleet.stack
	@.venv/bin/python -m trainfleet build

push: .venv/.stamp ## the image to ECR, built where it is not
	@.venv/bin/python -m trainfleet push

doctor: .venv/.stamp ## is the fleet fit to train: health, links [LIFT=host NODES]
	@.venv/bin/python -m trainfleet doctor

recipes: .venv/.stamp ## the complete configs that come with this
	@.venv/bin/python -m trainfleet recipes

config: .venv/.stamp ## write a recipe to config.yaml [RECIPE=name YES=1]
	@.venv/bin/python -m trainfleet config

plan: .venv/.stamp ## what would run, what was derived and why [DAYS USD TOKENS]
	@.venv/bin/python -m trainfleet plan

tokenize: .venv/.stamp ## turn the sources into tokens [NODES]
	@.venv/bin/python -m trainfleet tokenize

compile: .venv/.stamp ## compile ahead what training computes [NODES]
	@.venv/bin/python -m trainfleet compile

train: .venv/.stamp ## tokenize, train, report; again: resumes [NODES]
	@.venv/bin/python -m trainfleet train

profile: .venv/.stamp ## a short run, and where its time goes [NODES]
	@.venv/bin/python -m trainfleet profile

scaling: .venv/.stamp ## one job at several sizes: how it scales [NODES='1 2 4' WEAK]
	@.venv/bin/python -m trainfleet scaling

rehearse: .venv/.stamp ## break a short run on purpose: does it live? [FAULTS YES]
	@.venv/bin/python -m trainfleet rehearse

inspect: .venv/.stamp ## a sample of the training order, as text [SAMPLE=0 VERIFY=1]
	@.venv/bin/python -m trainfleet inspect

sample: .venv/.stamp ## continue a text with the model [PROMPT TEMPERATURE]
	@.venv/bin/python -m trainfleet sample

runs: .venv/.stamp ## all runs here, a line each
	@.venv/bin/python -m trainfleet runs

watch: .venv/.stamp ## the report of a run as it trains, as a web page [PORT]
	@.venv/bin/python -m trainfleet watch

compare: .venv/.stamp ## how runs differ, and their curves [RUNS='one another']
	@.venv/bin/python -m trainfleet compare

status: .venv/.stamp ## how the run stands [RUN=name]
	@.venv/bin/python -m trainfleet status

logs: .venv/.stamp ## what every node wrote [FOLLOW=1]
	@.venv/bin/python -m trainfleet logs

stop: .venv/.stamp ## stop the run at its next step, with a checkpoint
	@.venv/bin/python -m trainfleet stop

checkpoints: .venv/.stamp ## every checkpoint, good or broken
	@.venv/bin/python -m trainfleet checkpoints

verify: .venv/.stamp ## read one through, every byte and number [STEP=200]
	@.venv/bin/python -m trainfleet verify

eval: .venv/.stamp ## loss and perplexity, on validation text [TASKS]
	@.venv/bin/python -m trainfleet eval

export: .venv/.stamp ## the model, for transformers or NxD [OUT=dir FORMAT=nxd]
	@.venv/bin/python -m trainfleet export

report: .venv/.stamp ## draw the plots and report.html again
	@.venv/bin/python -m trainfleet report

ls: .venv/.stamp ## what is ours in the cloud, its cost, since when
	@.venv/bin/python -m trainfleet ls

clean: .venv/.stamp ## stop all, remove what can be made again [PURGE=1 YES=1]
	@.venv/bin/python -m trainfleet clean

test: .venv/.stamp-test ## run the tests
	@.venv/bin/python -m trainfleet test

ifeq ($(filter help,$(MAKECMDGOALS)),)
drills: .venv/.stamp-test ## the slow tests: machines that die, links that are cut
	@.venv/bin/python -m pytest -q --durations=8 -m thorough tests/unit tests/oracles tests/distributed/test_line.py
	@.venv/bin/python -m pytest -q --durations=15 tests/distributed tests/conformance tests/fleet tests/drills \
	  --ignore=tests/distributed/test_line.py --ignore=tests/distributed/test_training.py # these two are in make test
else
drills: ;@echo "make drills: the slow tests: machines that die, links that are cut"
endif

check: .venv/.stamp-test ## lint, types, scripts, Dockerfile, versions
	@.venv/bin/python -m trainfleet check

# All else is no verb, also where a file has its name: `make tests` is never "up to date".
%: .force
	@[ -x .venv/bin/python ] || { echo "error: no such verb; make alone lists them" >&2; exit 2; }
	@.venv/bin/python -m trainfleet "$$MAKECMDGOALS"

.force $(filter-out $(MAKECMDGOALS),$(MAKEFILE_LIST) requirements.lock requirements-test.lock scripts/venv.sh): ;

.venv/.stamp: requirements.lock scripts/venv.sh
	@scripts/venv.sh apply requirements.lock

.venv/.stamp-test: .venv/.stamp requirements-test.lock
	@scripts/venv.sh apply requirements-test.lock
	@touch .venv/.stamp-test
