# One target per verb; FILES in python/trainfleet/cli/__init__.py maps verbs to their code. `make` without arguments lists them.
ifneq ($(dir $(lastword $(MAKEFILE_LIST))),./)
$(error This Makefile works on the folder it is in. Type: make -C $(dir $(lastword $(MAKEFILE_LIST))))
endif

# Recipes use no variables, and none is exported: Python reads their raw values from MAKEFLAGS, so that a value is never executed.
# The loop is needed because make would export (and expand) the variables on its command line.
$(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(eval unexport $(name))))
override export PYTHONPATH := python
override export PYTHONSAFEPATH := 1 # a user's yaml.py or random.py here must not shadow a package
override export PYTHONUTF8 := 1
unexport PYTHONDONTWRITEBYTECODE # set in some containers, where every verb would compile the modules again
export MAKECMDGOALS
.DEFAULT_GOAL := help
.SUFFIXES: # disables the built-in rules, including those below for files such as a.c, a.tex and a.out
%.out: %
%.c: %.w %.ch
%.tex: %.w %.ch
.NOTPARALLEL: # `make -j8 train tokenize` runs one after the other
.PHONY: .force help setup build push image doctor recipes config plan tokenize compile train profile scaling sweep rehearse inspect sample chat runs watch compare status logs explain stop checkpoints verify eval export report ls clean new-backend test drills check release

ifeq ($(word 2,$(MAKECMDGOALS)),)
help:
	@echo "trainfleet: from bare nodes to a trained model. Begin with: make train"
	@awk -F ':.*## | +\\[' '/^new-backend:/ { print "To work on trainfleet itself:" } /^[a-z-]+:.*## / { printf $$3 ? "  make %-11s %-40s [%s\n" : "  make %-11s %s\n", $$1, $$2, $$3 }' Makefile
	@echo "CONFIG=path: another config; RUN=name: a run; SET='train.steps=50' sets any key"
else # `make help train` runs both targets; Python sees the word help and explains train
help: ;@:
endif

setup: .venv/.stamp ## set up this machine or the fleet [NODES YES OFFLINE]
	@.venv/bin/python -m trainfleet setup

build: .venv/.stamp ## build the image that jobs run in [OFFLINE]
	@.venv/bin/python -m trainfleet build

push: .venv/.stamp ## push the image to ECR [OFFLINE]
	@.venv/bin/python -m trainfleet push

image: .venv/.stamp ## bake a machine image (AMI) of an ec2 node
	@.venv/bin/python -m trainfleet image

doctor: .venv/.stamp ## check the fleet: health, links [LIFT=host NODES]
	@.venv/bin/python -m trainfleet doctor

recipes: .venv/.stamp ## list the complete configs that come with trainfleet
	@.venv/bin/python -m trainfleet recipes

config: .venv/.stamp ## write a recipe to config.yaml [RECIPE=name YES=1]
	@.venv/bin/python -m trainfleet config

plan: .venv/.stamp ## show what would run, its cost, and why [TOKENS DAYS ANY]
	@.venv/bin/python -m trainfleet plan

tokenize: .venv/.stamp ## tokenize the sources [NODES]
	@.venv/bin/python -m trainfleet tokenize

compile: .venv/.stamp ## compile the programs of a run in advance [NODES]
	@.venv/bin/python -m trainfleet compile

train: .venv/.stamp ## tokenize, train and report, or resume [NODES]
	@.venv/bin/python -m trainfleet train

profile: .venv/.stamp ## time the parts of a short run [NODES]
	@.venv/bin/python -m trainfleet profile

scaling: .venv/.stamp ## run one job at several sizes [NODES='1 2 4' WEAK]
	@.venv/bin/python -m trainfleet scaling

sweep: .venv/.stamp ## train a run per combination of values [GRID SAMPLES STOP]
	@.venv/bin/python -m trainfleet sweep

rehearse: .venv/.stamp ## inject faults into a short run [FAULTS YES]
	@.venv/bin/python -m trainfleet rehearse

inspect: .venv/.stamp ## show a sample of the training order [SAMPLE=0 VERIFY=1]
	@.venv/bin/python -m trainfleet inspect

sample: .venv/.stamp ## continue a text with the model [PROMPT TEMPERATURE]
	@.venv/bin/python -m trainfleet sample

chat: .venv/.stamp ## talk to a model of conversations [PROMPT TEMPERATURE]
	@.venv/bin/python -m trainfleet chat

runs: .venv/.stamp ## list all runs here, one per line
	@.venv/bin/python -m trainfleet runs

watch: .venv/.stamp ## serve a page of all runs, or of one [RUN PORT]
	@.venv/bin/python -m trainfleet watch

compare: .venv/.stamp ## compare runs and plot their curves [RUNS='one another']
	@.venv/bin/python -m trainfleet compare

status: .venv/.stamp ## show the state of the run [RUN=name]
	@.venv/bin/python -m trainfleet status

logs: .venv/.stamp ## print the log of every node [FOLLOW=1]
	@.venv/bin/python -m trainfleet logs

explain: .venv/.stamp ## name the cause of a failure from any log [LOG=file]
	@.venv/bin/python -m trainfleet explain

stop: .venv/.stamp ## save a checkpoint and stop the run
	@.venv/bin/python -m trainfleet stop

checkpoints: .venv/.stamp ## list every checkpoint, good or broken
	@.venv/bin/python -m trainfleet checkpoints

verify: .venv/.stamp ## check every byte of one checkpoint [STEP=200]
	@.venv/bin/python -m trainfleet verify

eval: .venv/.stamp ## measure loss on validation text [TASKS]
	@.venv/bin/python -m trainfleet eval

export: .venv/.stamp ## write the model for transformers or NxD [OUT=dir FORMAT=nxd]
	@.venv/bin/python -m trainfleet export

report: .venv/.stamp ## redraw the plots and report.html
	@.venv/bin/python -m trainfleet report

ls: .venv/.stamp ## list everything in the cloud, with its cost and age
	@.venv/bin/python -m trainfleet ls

clean: .venv/.stamp ## stop all, remove rebuildable files [PURGE=1 YES=1]
	@.venv/bin/python -m trainfleet clean

new-backend: .venv/.stamp ## write a package for a new backend [NAME=x]
	@.venv/bin/python -m trainfleet new-backend

test: .venv/.stamp-test ## run the tests
	@.venv/bin/python -m trainfleet test

ifeq ($(filter help,$(MAKECMDGOALS)),)
drills: .venv/.stamp-test ## run the slow tests, in groups [ONLY CHANGED]
	@.venv/bin/python tests/groups.py
else
drills: ;@echo "make drills: run the slow tests, in groups [ONLY CHANGED]"
endif

check: .venv/.stamp-test ## check lint, types, prose, scripts, Dockerfile, versions
	@.venv/bin/python -m trainfleet check

release: .venv/.stamp ## build wheel and sdist, check them in a clean environment
	@.venv/bin/python -m trainfleet release

# Any other word is an unknown verb, even if a file has its name: `make tests` is never "up to date".
%: .force
	@[ -x .venv/bin/python ] || { echo "error: no such verb; run make to list them" >&2; exit 2; }
	@.venv/bin/python -m trainfleet "$$MAKECMDGOALS"

.force $(filter-out $(MAKECMDGOALS),$(MAKEFILE_LIST) requirements.lock requirements-test.lock scripts/venv.sh): ;

.venv/.stamp: requirements.lock scripts/venv.sh
	@scripts/venv.sh apply requirements.lock

.venv/.stamp-test: .venv/.stamp requirements-test.lock
	@scripts/venv.sh apply requirements-test.lock
	@touch .venv/.stamp-test
