"""Why jobs die: the causes that a verdict can name, and the words by which logs give them away.

The words are those of torch, gloo, NCCL, aws-ofi-nccl, libfabric, the Neuron runtime, NVIDIA's drivers, Linux, Lustre and Slurm,
as their sources and public issues have them; tests/unit/verdict_corpus holds a log for each, with where it is from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

VICTIM, HINT, WORD, PROOF = range(4)  # what a line is worth: it lost a peer; it may mean this; it says so; the machine says so


@dataclass(frozen=True)
class Cause:
    """A class of failures: in words, what to type, and whether the same program may go on elsewhere or again.

    `again`: a new attempt can succeed. `elsewhere`: only without the node that failed, which goes into quarantine.
    """

    name: str
    words: str
    next: str
    again: bool = False
    elsewhere: bool = False


CAUSES = {
    cause.name: cause
    for cause in (
        Cause("device-memory", "the device ran out of memory",
              "make train SET='train.micro_batch=1', or shard over more ranks: train.layout"),
        Cause("host-memory", "the node ran out of memory", "free -h on the node; fewer ranks or workers on it", again=True),
        Cause("hardware", "the device or its link failed", "make doctor; replace the node", again=True, elsewhere=True),
        Cause("fabric", "the network between the nodes does not work", "make doctor names the node and why", again=True),
        Cause("victim", "a peer went away and left no word", "make logs; the peer's node may be gone: make doctor", again=True),
        Cause("hang", "the ranks waited for one that no longer took part", "logs/stacks-*.txt in the run folder", again=True),
        Cause("disk", "the disk is full or can't be written", "df -h; checkpoint.keep=1 keeps fewer"),
        Cause("storage", "the file system failed", "mount; dmesg on the node; lfs df -h on Lustre", again=True),
        Cause("data", "the data is broken or missing", "look at the file that is named; make tokenize"),
        Cause("busy", "another job is at work on the same dataset", "wait for it, or: make stop"),
        Cause("nan", "numbers not finite, or a spike", "lower train.learning_rate or raise train.warmup_steps; make train"),
        Cause("code", "the program has a bug, or can't run with this config", "make logs shows all of it"),
        Cause("port", "another process has the rendezvous port", "make train takes a free one; fleet.port asks for this one",
              again=True),
        Cause("lost-node", "the node can't be reached", "make doctor; make train goes on without it", again=True),
        Cause("preempted", "the machine was taken away", "make train goes on from the last checkpoint", again=True),
        Cause("killed", "something killed it", "dmesg on the node; make train goes on from the last checkpoint", again=True),
        Cause("unknown", "it ended and left no word", "make logs", again=True),
    )
}  # fmt: skip

# NVIDIA's Xid catalogue (docs.nvidia.com/deploy/xid-errors): these are the device's or a link's fault; 13, 31 and 43 a program's.
BROKEN_XIDS = "48|61|62|64|74|79|92|94|95|109|110|119|120|121|122|123|136|140|143|145|149|154"


@dataclass(frozen=True)
class Signature:
    """Words that mean a cause, and how surely."""

    pattern: re.Pattern[str]
    cause: str
    weight: int


def _signatures(table: dict[tuple[str, int], tuple[str, ...]]) -> tuple[Signature, ...]:
    return tuple(
        Signature(re.compile(pattern), cause, weight) for (cause, weight), patterns in table.items() for pattern in patterns
    )


SIGNATURES = _signatures({
    ("hardware", PROOF): (
        rf"NVRM: Xid \(.*?\): (?:{BROKEN_XIDS})\b",
        r"NVRM:.*fallen off the bus",
        r"neuron.*(?:uncorrectable|UE detected)",
    ),
    ("hardware", WORD): (
        r"CUDA error: uncorrectable (?:ECC|NVLink) error",
        r"Uncorrectable memory error is detected on (?:Neuron device|\[?ND)",
        r"\[ND \d+\]\[NC \d+\] Uncorrectable memory error",
        r"NRT_EXEC_HW_ERR_\w+",
        r"nrt_execute status=12\d\d",
        r"CUDA error: (?:system not yet initialized|hardware stack error)",
    ),
    ("host-memory", PROOF): (
        r"(?:Out of memory|Memory cgroup out of memory): Killed process \d+",
        r"Detected \d+ oom[-_]kill event",
        r"memory\.events: oom_kill",
    ),
    ("host-memory", WORD): (
        r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",
        r"^(?:[\w.]+\.)?_?(?:Array)?MemoryError\b",
        r"insufficient shared memory \(shm\)",
        r"dataloader's workers are out of shared memory",
        r"OSError: \[Errno 12\]",
    ),
    ("device-memory", WORD): (
        r"CUDA out of memory\. Tried to allocate",
        r"CUBLAS_STATUS_ALLOC_FAILED",
        r"Cuda failure (?:2 )?'out of memory'",
        r"CUDA error: out of memory",
        r"TDRV:\w+\s+Failed to alloc(?:ate)? .*(?:DEVICE|on ND)",
        r"Allocation Failure\"?$",
        r"NRT_RESOURCE in nrt_",
    ),
    ("storage", PROOF): (
        r"LustreError: .*This client was evicted by",
        r"LustreError: .*(?:operation \w+ to node .* failed: rc = -1\d\d)",
        r"nfs: server \S+ not responding",
    ),
    ("storage", WORD): (r"OSError: \[Errno (?:5|108|110|116|121)\]", r"Cannot send after transport endpoint shutdown",
                        r"^S3Error: .*, \d+ times"),
    ("disk", PROOF): (r"EXT4-fs error|XFS .*(?:Corruption|shut(?:ting)? down)|Remounting filesystem read-only",),
    ("disk", WORD): (
        r"OSError: \[Errno (?:28|30|122)\]",
        r"(?:why|RunError|can't write).*(?:No space left on device|Disk quota exceeded|Read-only file system)",
        r"enforce fail at inline_container\.cc:\d+\] \. unexpected pos",
    ),
    ("fabric", PROOF): (r"infiniband efa_\d+: Failed to",),
    ("fabric", WORD): (
        r"NCCL WARN NET/OFI Request \S+ completed with error",
        r"NCCL WARN NET/OFI (?:Couldn't|Unable|No NIC|Creating new endpoint.*failed|Failed)",
        r"prov_err: ",
        r"provider efa output empty list",
        r"efa_rdm_\w+_handle_error.*err: ",
        r"NCCL WARN NET/IB ?: Got completion from peer \S+ with (?:status|error)",
        r"mlx5: .*got completion with error",
        r"NCCL WARN NET/IB.*(?:port error|Async fatal)",
        r"NCCL WARN Bootstrap : no socket interface found",
        r"Mismatched NCCL version detected",
        r"OFI plugin initNet\(\) failed",
        r"Gloo connectFullMesh failed",
    ),
    ("preempted", PROOF): (
        r"CANCELLED AT \S+ DUE TO (?:PREEMPTION|JOB REQUEUE|TIME LIMIT)",
        r"spot/instance-action: ",
    ),
    ("lost-node", PROOF): (
        r"lost node \d+: ",
        r"CANCELLED AT \S+ DUE TO NODE FAILURE",
        r"Host EC2 \(instance i-[0-9a-f]+\) terminated",
    ),
    ("lost-node", HINT): (r"has failed to send a keep-alive heartbeat to the rendezvous",),
    ("hang", PROOF): (r"^silent rank \d+: ", r"^no rank has moved for \d", r"gave no sign of life in \d"),
    ("hang", WORD): (r"\(FATAL-RT-UNDEFINED-STATE\)", r"Missing infer_status notification"),
    ("hang", HINT): (
        r"Watchdog caught collective operation timeout",
        r"gloo/transport/tcp/unbound_buffer\.cc:\d+\] Timed out waiting",
    ),
    ("killed", WORD): (r"was killed by signal (?:9|15)\b",),
    ("port", WORD): (r"EADDRINUSE",),
    ("nan", WORD): (
        r"(?:loss|gradients?) .*(?:(?:were|was) not finite|spiked)",
        r"returned nan values in its \d+th output",
        r"NRT_EXEC_COMPLETED_WITH_NUM_ERR|nrt_execute status=1003",
        r"FloatingPointError",
    ),
    ("busy", PROOF): (r"another job is tokenizing this dataset",),
    ("data", WORD): (
        r"^DataError: ",
        r"^S3Error: (?!.*, \d+ times)",
        r"JSONDecodeError: ",
        r"UnicodeDecodeError: ",
        r"FileNotFoundError: \[Errno 2\]",
        r"EOFError: Compressed file ended|BadGzipFile: ",
        r"SafetensorError: ",
    ),
    ("code", WORD): (
        r"CUDA error: device-side assert triggered",
        r"NVRM: Xid \(.*?\): (?:13|31|43),",
        r"Expected to have finished reduction in the prior iteration",
        r"'neuronx-cc'.* returned non-zero exit status",
    ),
    ("code", HINT): (r"CUDA error: (?:an illegal memory access was encountered|unspecified launch failure|misaligned address)",),
    ("victim", VICTIM): (
        r"gloo/transport/tcp/\S+\] .*(?:Connection closed by peer|Connection reset by peer|Broken pipe|Connection refused)",
        r"NCCL WARN .*(?:Connection closed by remote peer|Call to \w+ (?:from|to) \S+ failed|Connection reset by peer)",
        r"NCCL communicator was aborted",
        r"remote process exited or there was a network error",
        r"ncclRemoteError",
        r"DistBackendError|DistStoreError|DistNetworkError",
        r"\[c10d\] (?:recvValue|sendBytes|recvBytes|recvVector) failed",
        r"RendezvousClosedError|RendezvousTimeoutError|RendezvousConnectionError",
        r"CheckpointException ranks",
        r"RuntimeError: Connection reset by peer",
        r"SignalException: Process \d+ got signal",
    ),
})  # fmt: skip
