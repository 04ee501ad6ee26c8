"""Nine questions of users, answered by make plan as they read it. The figures are bounds by published runs, not by our own words."""

from __future__ import annotations

import re

import pytest

from trainfleet.cli import main as command
from trainfleet.recipes import FOLDER

SLURM = "llama-3-8b-p5-slurm"
LLAMA_2 = (
    "data.tokenizer=bpe data.vocab_size=32000 train.sequence_length=4096 budget.max_usd=null"
    " train.global_batch_size=1024"
)
ON_P4D = f"SET=model.preset=llama-2-7b fleet.instance_type=p4d.24xlarge {LLAMA_2}"
# question, recipe, words, patterns that the answer must match, and the range of tokens/s of a rank
QUESTIONS: dict[str, tuple[str, list[str], list[str], tuple[float, float]]] = {
    # MosaicML has 3,725 tokens/s of a GPU for 2,048 tokens, which is 97 days and 205,000 dollars
    "how long do four p4d take for 7B and 1T tokens, and what do they cost": (
        SLURM,
        [ON_P4D, "NODES=4", "TOKENS=1e12"],
        [
            r"answer: NODES=4: 1e\+12 tokens in [89][0-9]-1[0-9]{2} days for about \$(19|20|21)[0-9],000"
        ],
        (0, 0),
    ),
    # torchtitan has 829 in fp8 at 500 W, MaxText 1,056 on H200
    "how fast do 32 p5 train 70B": (
        SLURM,
        ["SET=model.preset=llama-3-70b budget.max_usd=null", "NODES=32"],
        [
            r"time about 5 h [0-9]+ min; 4\.[0-9]-6\.[0-9] hours for four of five",
            r"cost about \$[0-9,]+, at \$55\.04 per node-hour \(on-demand list price in us-east-1, 20",
            r"about [0-9.]+ failures \(H100: Llama 3, arXiv:2407\.21783",
        ],
        (650, 1000),
    ),
    # AWS: less than 8 hours
    "how long does BERT-Large take on 16 trn1": (
        "bert-large-trn1",
        ["NODES=16"],
        [r"time about 2 h", r"AWS: 459,263 tokens/s per node, on 16 nodes", "this one has none"],
        (10_000, 15_000),
    ),
    # AWS: 25,933 tokens/s of a node, 810 of a core
    "what does Llama 2 7B cost on AWS Batch, as AWS runs it": (
        "llama-2-7b-trn1-batch",
        [],
        [
            r"AWS: 25,933 tokens/s per node",
            r"cost about \$9,[0-9]{3}, including \$[0-9.]+ for setup and idle time",
            r"setup takes about [0-9]+ min before; waiting in a queue or for machines is not included",
        ],
        (730, 890),
    ),
    "is the speed of RoBERTa-large on eight p3dn measured": (
        "roberta-large-p3dn-ec2",
        ["NODES=8", "SET=budget.max_usd=null"],
        [
            r"predicted from related devices, because no run of a similar trainer on this device has been published",
            r"warning: model\.vocab_size per tensor rank is 50265, not a multiple of 8; its matmuls",
        ],
        (6_000, 14_000),
    ),
    # 16 bytes times 13e9 over 8 GPUs are 24.2 GiB of 19.9
    "does 13B fit one g5.48xlarge": (
        SLURM,
        [f"SET=model.preset=llama-2-13b fleet.instance_type=g5.48xlarge {LLAMA_2}", "NODES=1"],
        [
            r"no layout of 8 ranks of 19\.9 GiB .* set NODES=2, or train\.param_dtype=bf16 train\.precision=bf16"
        ],
        (0, 0),
    ),
    # others reach 38,500
    "how fast does one H100 train 1B": (
        "llama-3.2-1b-h100-slurm",
        [
            "NODES=1",
            "SET=train.global_batch_size=64 fleet.accelerator.per_node=1 fleet.slurm.gres=gpu:1",
        ],
        [r"MFU of [34][0-9]%", r"\$0: your own machines have no price; set fleet\.accelerator"],
        (34_000, 48_000),
    ),
    # 16 bytes times 70e9 over 8 GPUs are 131 GiB
    "why does 70B not fit one p4d, and what would": (
        SLURM,
        [
            "SET=model.preset=llama-3-70b fleet.instance_type=p4d.24xlarge budget.max_usd=null",
            "NODES=1",
        ],
        [r"the smallest needs 13[0-9]\.[0-9] GiB per rank; set NODES=8"],
        (0, 0),
    ),
    # 13.2 days by hand on 32, of which half are late
    "how many p4d train 7B on 1T tokens in 14 days": (
        SLURM,
        [ON_P4D, "TOKENS=1e12", "DAYS=14"],
        [
            r"answer: NODES=32: 1e\+12 tokens in 1[0-9]-1[0-9] days for about \$2[0-9]{2},000",
            r"in time with 50 % confidence; with 90 %: NODES=(48|64): 1e\+12 tokens in",
            r"next: make plan CONFIG=\S+ SET='.*p4d.24xlarge.*' NODES=32$",
        ],
        (0, 0),
    ),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_user_reads_the_answer(question: str, capsys: pytest.CaptureFixture[str]) -> None:
    recipe, words, patterns, (least, most) = QUESTIONS[question]
    command(["plan", f"CONFIG={FOLDER / recipe}.yaml", "OFFLINE=1", *words])
    printed = capsys.readouterr()
    said = " ".join((printed.out + printed.err).split())
    for pattern in patterns:
        assert re.search(pattern, said), (pattern, said)
    if most:
        speed = re.search(r"tokens/s, ([0-9,]+) per rank", said)
        assert speed and least < float(speed[1].replace(",", "")) < most
