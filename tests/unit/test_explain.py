"""make explain: the cause in anybody's log, from a file, a folder with a log of each node, or a pipe."""

from __future__ import annotations

import io
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainfleet.cli import main

# torch 2.11's own words behind torchrun's and kubectl's prefixes
MEMORY = """[rank3]: Traceback (most recent call last):
[rank3]:   File "/opt/train.py", line 10, in <module>
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has a total capacity of 79.10 GiB
"""
LOST = "[rank0]: torch.distributed.DistBackendError: NCCL error: remote process exited or there was a network error\n"


def explain(capsys: pytest.CaptureFixture[str], log: object) -> tuple[int, str]:
    code = main(["explain", f"LOG={log}"])
    said = capsys.readouterr()
    return code, said.out + said.err


def test_a_log_of_all_ranks_names_the_rank_and_no_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (log := tmp_path / "train.log").write_text(MEMORY + LOST)
    code, said = explain(capsys, log)
    assert code == 0 and said.startswith(
        "failed: rank 3: the device ran out of memory (device-memory)"
    ), said
    assert "  next: " in said and "node" not in said.splitlines()[0]


def test_a_folder_has_a_log_of_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("name: a\n")  # as in a run folder
    (logs := tmp_path / "logs").mkdir()
    (logs / "worker-0.log").write_text(LOST)
    (logs / "worker-1.log").write_text(MEMORY)
    code, said = explain(capsys, tmp_path)
    assert (code, said) == explain(capsys, logs)
    assert code == 0 and said.startswith(
        "failed: rank 3 on node 1: the device ran out of memory"
    ), said


def test_what_is_piped_in_is_read_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=io.BytesIO(MEMORY.encode())))
    assert explain(capsys, "-")[1].startswith("failed: rank 3: the device ran out of memory")


def test_a_log_of_no_failure_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (log := tmp_path / "train.log").write_text(
        "step 1 loss 3.2\nstep 2 loss 3.1\n\x1b[31mstep 3 loss 3.0\n"
    )
    code, said = explain(capsys, log)
    assert (
        code == 1
        and said.startswith("no line explains why the job ended")
        and "step 3" in said
        and "\x1b" not in said
    ), said


@pytest.mark.parametrize(
    "content", [None, b"", b"\x7fELF\0\0\n\0 write error: No space left on device\n"]
)
def test_what_is_not_a_log_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes | None
) -> None:
    log = tmp_path / "log"
    if content is not None:
        log.write_bytes(content)
    code, said = explain(capsys, log)
    assert (
        code not in (0, 130)
        and f"{log}: is not a log" in said
        and "make explain LOG=train.log" in said
    ), said


@pytest.mark.parametrize("cause, log", [
    ("rendezvous", "[W1127 10:00:03.1 socket.cpp:752] [c10d] The IPv6 network addresses of (gpu-0, 29500) cannot be retrieved "
     "(gai error: -3 - Temporary failure in name resolution).\n[rank1]: socket.gaierror: [Errno -3] Temporary failure in name resolution"),
    ("rendezvous", "torch.distributed.DistNetworkError: The client socket has failed to connect to any network address of (gpu-0, 1). "
     "The client socket has failed to connect to 10.0.0.1:1 (errno: 110 - Connection timed out)."),
    ("rendezvous", "RuntimeError: getaddrinfo: Temporary failure in name resolution"),
    ("storage", "urllib.error.URLError: <urlopen error [Errno -3] Temporary failure in name resolution>"),
    ("storage", "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host huggingface.co:443 ssl:default "
     "[Temporary failure in name resolution]"),
])  # fmt: skip
def test_a_name_that_does_not_resolve_is_a_peer_s_or_a_server_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str, log: str
) -> None:
    (tmp_path / "log").write_text(log + "\n")
    assert f"({cause})\n" in explain(capsys, tmp_path / "log")[1]


# Slurm 22.05's and 23.11's words (src/common/slurm_errno.c), and those of PBS's and Grid Engine's qsub
@pytest.mark.parametrize("cause, log", [
    ("request", "sbatch: error: Batch job submission failed: Invalid generic resource (gres) specification"),
    ("request", "srun: error: Unable to create step for job 7: Invalid generic resource (gres) specification"),
    ("request", "sbatch: error: invalid partition specified: gpux"),
    ("request", "salloc: error: Job submit/allocate failed: Invalid qos specification"),
    ("request", "sbatch: error: Batch job submission failed: Requested node configuration is not available"),
    ("request", "srun: error: Unable to create step for job 7: More processors requested than permitted"),
    ("request", "sbatch: fatal: Invalid node list specification"),
    ("request", "srun: error: Task launch for StepId=7.0 failed on node gpu-3: Unable to satisfy cpu bind request"),
    ("request", "sbatch: error: Batch job submission failed: User's group not permitted to use this partition"),
    ("request", "qsub: Unknown queue MSG=requested queue not found"),
    ("request", 'Unable to run job: unknown queue "gpux".'),
    ("capacity", "srun: error: Unable to create step for job 7: Requested nodes are busy"),
    ("environment", "srun: error: Unable to allocate resources: Invalid job credential"),
    ("code", "sbatch: error: Unable to open file job.sh"),
])  # fmt: skip
def test_what_a_scheduler_can_t_give_is_no_bug_of_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str, log: str
) -> None:
    (tmp_path / "log").write_text(log + "\n")
    said = explain(capsys, tmp_path / "log")[1]
    assert f"({cause})\n" in said and (cause != "request" or "sinfo" in said), said


@pytest.mark.parametrize("head, log", [
    ("rank 11: ", "[default3]:torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 3 has 79.10 GiB\n"
     "Root Cause (first observed failure):\n[0]:\n  host      : b\n  rank      : 11 (local_rank: 3)\n  exitcode  : 1 (pid: 77)"),
    ("rank 3: ", "-- Process 3 terminated with the following error:\nTraceback (most recent call last):\n"
     '  File "/opt/train.py", line 10, in run\nNameError: name \'y\' is not defined'),
    ("rank 2: ", "torch.multiprocessing.spawn.ProcessExitedException: process 2 terminated with signal SIGKILL"),
    ("rank 3: ", "[rank: 3] Child process with PID 42 terminated with code -9. Forcefully terminating all other processes"),
    ("rank 5: ", "KeyError: '7b'\nMPI_ABORT was invoked on rank 5 in communicator MPI_COMM_WORLD\nwith errorcode 1."),
    ("rank 6: ", "[rank6]: RuntimeError: CUDA error: unspecified launch failure\n"
     "[Sat Nov  1 21:40:09 2025] NVRM: Xid (PCI:0000:ab:00): 94, pid=88, name=python3, Contained: SM (0x1)."),
    ("rank 2: ", "KeyError: 'x'\nE1112 10:15:02.000 41 api.py:869] failed (exitcode: 1) local_rank: 2 (pid: 77) of binary: python"),
    ("the job: ", "KeyError: 'x'\nE1112 10:15:02.000 41 api.py:869] failed (exitcode: 1) local_rank: 2 (pid: 77) of binary: python\n"
     "E1112 10:15:02.100 45 api.py:869] failed (exitcode: 1) local_rank: 0 (pid: 79) of binary: python"),
    ("rank 3: ", "[rank0]: torch.distributed.checkpoint.api.CheckpointException: CheckpointException ranks:dict_keys([3])\n"
     "[rank0]: Traceback (most recent call last): (RANK 3)\n[rank0]:   File \"/opt/train.py\", line 10, in save\n"
     "[rank0]: OSError: [Errno 28] No space left on device"),
    ("rank 2: ", "ERROR:composer.cli.launcher:Rank 2 crashed with exit code 1.\nTypeError: main() missing 1 required positional argument: 'x'"),
    ("rank 6: ", "[E101 00:30:00.0 ProcessGroupGloo.cpp:145] Rank 3 successfully reached monitoredBarrier, but received errors "
     "while waiting for send/recv from rank 6. Please check rank 6 logs for faulty rank."),
    ("rank 1: ", "KeyError: 'x'\n[2024-11-02 10:12:41,000] [ERROR] [launch.py:325:sigkill_handler] "
     "['python3', '-u', 'train.py', '--local_rank=1'] exits with return code = 1"),
    ("rank 4: ", "2025-Mar-03 10:11:12.0001  44:45  ERROR  TDRV:dmem_alloc_internal  Failed to alloc DEVICE memory: 2147483648\n"
     '[rank4]: RuntimeError: nrt_tensor_allocate status=4, error message="Allocation failure".'),
])  # fmt: skip
def test_a_launcher_s_report_names_the_rank_also_in_a_log_of_all_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], head: str, log: str
) -> None:
    (tmp_path / "log").write_text(log + "\n")
    said = explain(capsys, tmp_path / "log")[1]
    assert said.startswith(f"failed: {head}"), said


@pytest.mark.parametrize("step, log", [
    ("pip install apex)", "ModuleNotFoundError: No module named 'apex'"),
    ("--shm-size", "RuntimeError: DataLoader worker (pid 12) is killed by signal: Bus error."),
    ("sbatch --mem", "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0."),
    ("HF_TOKEN", "huggingface_hub.errors.GatedRepoError: 401 Client Error."),
    ("docker login", "slurmstepd: error: pyxis:     [ERROR] URL https://nvcr.io/proxy_auth returned error code: 401 Unauthorized"),
    ("get-caller-identity", "botocore.exceptions.NoCredentialsError: Unable to locate credentials"),
    ("HF_HUB_OFFLINE", "huggingface_hub.errors.HfHubHTTPError: 429 Client Error: Too Many Requests for url: https://huggingface.co/api"),
    ("sbatch --time", "slurmstepd: error: *** JOB 9 ON n1 CANCELLED AT 2024-08-02T18:00:21 DUE TO TIME LIMIT ***"),
    ("expandable_segments", "torch.OutOfMemoryError: CUDA out of memory. 5.02 GiB is reserved by PyTorch but unallocated."),
    ("micro_batch_size=1", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("vocabulary size", "RuntimeError: Error(s) in loading state_dict for Llama:\n\tsize mismatch for model.embed_tokens.weight: "
     "copying a param with shape torch.Size([8, 4]) from checkpoint, the shape in current model is torch.Size([9, 4])."),
    ("reboot", "NVRM: Xid (PCI:0000:18:00): 119, pid=2211, Timeout after 45s of waiting for RPC response from GPU0 GSP! (0x20802a02)."),
    ("update the NVIDIA driver", "UserWarning: CUDA initialization: The NVIDIA driver on your system is too old (found version 12020).\n"
     "ValueError: ProcessGroupNCCL is only supported with GPUs, no GPUs found!"),
    ("parallelism.tensor", "ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc']: [NCC_EVRF007] "
     "Input computation graph is too big due to large operators."),
    ("libcurand", "/usr/bin/ld: cannot find -lcurand: No such file or directory\nRuntimeError: Error building extension 'fused_adam'"),
    ("memlock", "n1:18:55 [1] nccl_net_ofi_rdma.c:2221 NCCL WARN NET/OFI Couldn't register memory region. RC: -12, Error: Cannot allocate memory"),
    ("drain the node and reboot", "dcgm: GPU 3: XID error 79 detected"),
    ("first error in the other ranks", "RuntimeError: [/gloo/transport/tcp/pair.cc:598] Connection closed by peer [10.0.0.7]:1\n"
     '"py_callstack": "Traceback (most recent call last):\\n  File \\"/opt/e.py\\", line 3, in f\\n    return f()\\n"\n    }\n}'),
    ("docker login", "CannotPullContainerError: Error response from daemon: toomanyrequests: You have reached your pull rate limit."),
    ("HTTPS_PROXY", "curl: (6) Could not resolve host: huggingface.co"),
    ("installed version", "TypeError: Trainer.__init__() got an unexpected keyword argument 'tokenizer'"),
    ("find_unused_parameters", "RuntimeError: Expected to have finished reduction in the prior iteration before starting a new one."),
])  # fmt: skip
def test_the_next_step_fits_the_failure_and_not_only_its_class(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str, log: str
) -> None:
    (tmp_path / "log").write_text(log + "\n")
    last = explain(capsys, tmp_path / "log")[1].splitlines()[-1]
    assert last.startswith("  next: ") and step in last, last


def test_torchruns_first_failure_is_named_and_not_the_ranks_that_it_killed_afterwards(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = (
        "[{}]:\n  time      : 2026-09-07_13:0{}\n  host      : localhost\n  rank      : {} (local_rank: {})\n"
        "  exitcode  : {} (pid: 1469{})\n  error_file: <N/A>\n  traceback : {}\n"
    )
    (log := tmp_path / "train.log").write_text(
        "train.py FAILED\nFailures:\n"
        + entry.format(1, "3:29", 0, 0, -9, 0, "Signal 9 (SIGKILL) received by PID 14690")
        + "Root Cause (first observed failure):\n"
        + entry.format(0, "2:58", 1, 1, 1, 1, "To enable traceback see: https://pytorch.org")
    )
    code, said = explain(capsys, log)
    assert code == 0 and said.startswith("failed: rank 1: ") and "exited with code 1" in said, said


@pytest.mark.parametrize("cause, log", [
    ("nan", "{'loss': nan, 'grad_norm': nan, 'learning_rate': 5e-05}\n{'loss': 0.0, 'grad_norm': nan, 'learning_rate': 5e-05}"),
    ("nan", "step 500: train loss nan, val loss nan"),
    ("device-memory", "step 500: train loss nan\n[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."),
    ("host-memory", "2026-03-02 11:02:11.000883:  4120  ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile']: "
     "2026-03-02T11:02:10Z [F137] neuronx-cc was forcibly killed - This most commonly occurs due to insufficient system memory."),
])  # fmt: skip
def test_a_loss_that_is_nan_and_a_killed_compiler_explain_an_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], cause: str, log: str
) -> None:
    (tmp_path / "log").write_text(log + "\n")
    assert f"({cause})\n" in explain(capsys, tmp_path / "log")[1]
