"""Where the verdict abstains, and what it takes for certain enough: a rule of watch/ a test, in words of no real log."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from trainfleet.health import kernel_log
from trainfleet.health.kernel_log import Counters, Kernel
from trainfleet.watch.diagnosis import Diagnosis, diagnose, parse

HEAD = "Traceback (most recent call last):"
OURS, THEIRS = (
    '  File "/w/train.py", line 7, in step',
    '  File "/venv/lib/python3.11/site-packages/frob/core.py", line 7, in frob',
)


def found(*lines: str, node: int = 0) -> Diagnosis:
    finding = diagnose(list(parse(lines, node)))
    assert finding is not None
    return finding


def cause(*lines: str) -> str:
    finding = diagnose(list(parse(lines, 0)))
    return finding.cause if finding else "none"


def test_an_exception_that_nobody_knows_has_no_cause_but_a_place_and_its_words() -> None:
    finding = found(
        "[rank3]: " + HEAD, "[rank3]: " + THEIRS, "[rank3]: frob.FrobError: the moon is full"
    )
    assert (finding.cause, finding.node, finding.rank, finding.sure) == ("unknown", 0, 3, False)
    assert finding.words == "frob.FrobError: the moon is full"


@pytest.mark.parametrize("frame, words, expected", [
    (OURS, "RuntimeError: phase two lacks its teacher", "code"),
    (THEIRS, "RuntimeError: phase two lacks its teacher", "unknown"),
    (THEIRS, "RuntimeError: expected 3 tensors, but got 2", "code"),
    (THEIRS, "ValueError: hidden size 10 is not divisible by 3 heads", "code"),
    (THEIRS, "frob.FrobError: the moon is full", "unknown"),
    (OURS, "frob.FrobError: the moon is full", "unknown"),
    (THEIRS, "AssertionError", "code"),
    (THEIRS, "OSError: the tape is torn", "unknown"),
    ('  File "/w/my/datasets/samplers.py", line 7, in pick', "frob.FrobError: the moon is full", "unknown"),
    ('  File "/venv/lib/python3.11/site-packages/pyarrow/parquet.py", line 7, in read', "OSError: torn", "data"),
])  # fmt: skip
def test_who_raised_it_and_whether_it_argues_about_arguments_makes_it_the_programs(
    frame: str, words: str, expected: str
) -> None:
    assert cause(HEAD, frame, words) == expected


@pytest.mark.parametrize("words, cause, sure", [
    ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", "device-memory", True),
    ("OSError: [Errno 28] No space left on device", "disk", True),
    ("NameError: name 'lr' is not defined", "code", True),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/d/shard-7'", "data", False),  # or a checkpoint, or a program
    ("AttributeError: 'NoneType' object has no attribute 'shape'", "code", False),  # or a record that is not there
    ("RuntimeError: CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`", "device-memory", False),
])  # fmt: skip
def test_only_words_that_mean_nothing_else_make_a_verdict_sure(
    words: str, cause: str, sure: bool
) -> None:
    finding = found(HEAD, OURS, words)
    assert (finding.cause, finding.sure) == (cause, sure)


def test_what_a_process_had_complained_of_just_before_leaves_a_doubt() -> None:
    before = (
        "gpu-1:77:78 [0] NCCL WARN Call to ibv_modify_qp failed with error Network is unreachable"
    )
    assert found(HEAD, OURS, "NameError: name 'lr' is not defined").sure
    assert not found(before, HEAD, OURS, "NameError: name 'lr' is not defined").sure


def test_a_line_that_quotes_its_reason_is_of_that_cause() -> None:
    failed = "ERROR ||NEURON_CC_WRAPPER||: Failed compilation with ['neuronx-cc', 'compile']"
    assert cause(failed) == "compiler"
    finding = found(
        f"{failed}: walrus_driver: error while loading shared libraries: libxml2.so.2: cannot open shared object file"
    )
    assert (finding.cause, finding.sure) == ("environment", False)


def test_processes_that_a_launcher_ended_itself_were_not_killed() -> None:
    assert cause("ERROR: worker 2 exited with return code 137") == "killed"
    assert (
        cause(
            "ERROR: a worker exited with code 1; cleaned up the processes on other nodes with return code 137"
        )
        == "none"
    )


def test_what_names_a_cause_comes_before_what_nobody_knows() -> None:
    unknown = [
        "[rank0]: " + HEAD,
        "[rank0]: " + THEIRS,
        "[rank0]: frob.FrobError: the moon is full",
    ]
    wide = [
        "[rank1]: " + HEAD,
        "[rank1]: " + THEIRS,
        "[rank1]: frob.FrobError: the checkpoint is missing a shard",
    ]
    assert cause(*unknown, *wide) == "checkpoint"


@pytest.mark.parametrize("source, expected", [
    ("    optimizer.load_state_dict(state['optimizer'])", "checkpoint"),
    ("    step = checkpoint['optimizer']", "checkpoint"),
    ("    rate = schedule['optimizer']", "code"),
])  # fmt: skip
def test_a_key_that_a_checkpoint_lacks_is_the_checkpoints_fault(source: str, expected: str) -> None:
    assert cause(HEAD, OURS, source, "KeyError: 'optimizer'") == expected


@pytest.mark.parametrize("words, expected", [
    ("ImportError: cannot import name 'frob' from 'data' (/w/data/__init__.py)", "code"),
    ("ImportError: cannot import name 'frob' from 'frob' (/venv/lib/python3.11/site-packages/frob/__init__.py)", "environment"),
    ("ImportError: cannot import name 'frob' from partially initialized module 'a' (most likely due to a circular import)", "code"),
])  # fmt: skip
def test_whose_module_lacks_a_name(words: str, expected: str) -> None:
    assert cause(HEAD, OURS, words) == expected


@pytest.mark.parametrize("function, expected", [("save", "disk"), ("load", "checkpoint")])
def test_a_checkpoint_that_can_not_be_written_is_the_disks_fault(
    function: str, expected: str
) -> None:
    frame = (
        f'  File "/venv/lib/python3.11/site-packages/torch/serialization.py", line 7, in {function}'
    )
    assert (
        cause(
            HEAD,
            frame,
            THEIRS,
            "RuntimeError: File run/checkpoints/checkpoint_0.pt can not be opened: not there",
        )
        == expected
    )


def test_the_rest_that_a_progress_bar_foretells_is_no_clock() -> None:
    bar = "Steps: 25%| 38/150 [5:29:27<15:48:09, 50.8s/it, loss=0.08]"
    said = "[rank9]:[E113 11:43:02.2 ProcessGroupNCCL.cpp:1899] watchdog thread terminated: CUDA error: unspecified launch failure"
    assert [line.time for line in parse([bar, said], 0)] == [42182.2, 42182.2]
    assert cause(bar, said) == "code"


def test_what_srun_kills_when_a_task_has_failed_was_not_killed_by_somebody() -> None:
    failed, killed = (
        "srun: error: n1: task 5: Exited with exit code 1",
        "srun: error: n1: tasks 3,7: Killed",
    )
    assert cause(failed, killed) == "none"
    assert cause(killed, failed) == "killed"


def test_a_traceback_in_one_line_is_read_as_one() -> None:
    assert (
        cause(
            f'"callstack": "{HEAD}\\n  File \\"m.py\\", line 3, in main\\nIndexError: list index out of range\\n",'
        )
        == "code"
    )


@pytest.mark.parametrize("words, expected", [
    ('ERROR (train[5.4]:Copy():cu.cc:899) cudaError_t 4 : "unspecified launch failure" returned', "code"),
    ("OSError: (External) CUDA error(719), unspecified launch failure.", "code"),
    ("RuntimeError: DataLoader worker (pid 25) is killed by signal: Segmentation fault.", "code"),
    ("OSError: ((' gsutil cat gs://b/20.tar',), {}): exit 1 (read) {'worker_id': 0}", "storage"),
    ("frob.ResponseParserError: no element", "unknown"),
    ("trainfleet.trust.errors.ConfigError: train.parallelism: three ranks leave one over", "code"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/w/configs/train.yaml'", "code"),
    ("FileNotFoundError: [Errno 2] No such file or directory: '/w/tokens/train.bin'", "data"),
    ("ValueError: Configuration file options/train_frob not found.", "code"),
    ("RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing", "environment"),
])  # fmt: skip
def test_words_of_a_kind_mean_the_same_whoever_says_them(words: str, expected: str) -> None:
    assert cause(HEAD, THEIRS, words) == expected


@pytest.mark.parametrize("words, expected", [
    ("/bin/bash: /var/scratch/run.sh: Is a directory", "environment"),
    ("container exited with code 126", "environment"),
    ("2022/05/13 23:09:23 Failed to initialize NVML: could not load NVML library.", "environment"),
    ("frob.CreateError: no machines: capacity-not-available", "capacity"),
    ("llite kernel: LustreError: 2:0:(super25.c:187:fill()) llite: Unable to mount <unknown>: rc = -5", "mount"),
])  # fmt: skip
def test_what_launchers_and_engines_say_in_their_own_words(words: str, expected: str) -> None:
    assert cause(words) == expected


def test_a_program_without_python_names_its_rank() -> None:
    finding = found("FROB error on rank 2 (reader.cpp:374): Cannot open file /3/samples_201.bundle")
    assert (finding.cause, finding.rank) == ("data", 2)


def test_a_process_that_was_killed_where_the_node_counts_one_for_memory_lacked_memory() -> None:
    killed = [
        "agent   10:00:00.000 |   rank      : 3 (local_rank: 3)",
        "agent   10:00:00.000 |   exitcode  : -9 (pid: 77)",
    ]
    counted = "kernel  10:00:01.000 | vmstat: oom_kill 1 on this node"
    finding = found(*killed, counted)
    assert (finding.cause, finding.rank, finding.sure) == ("host-memory", 3, False)
    assert cause(*killed) == "killed"


@pytest.mark.parametrize("words, expected", [
    ("counters: pci 0000:17:00.0 aer_dev_fatal: 1 more", "hardware"),
    ("counters: pci 0000:b3:00.0 has no driver", "hardware"),
    ("counters: edac mc0 ue_count: 1 more", "hardware"),
    ("counters: neuron neuron3 mem_ecc_uncorrected: 2 more", "hardware"),
    ("nvidia-smi: GPU 00000000:44:00.0: recovery action Reset", "hardware"),
    ("nvidia-smi: Unable to determine the device handle for GPU0: 0000:44:00.0: GPU is lost.", "hardware"),
    ("counters: efa efa_2 no_completion_cmds: 1 more", "fabric"),
    ("counters: nvme nvme1 is resetting", "disk"),
    ("counters: /data is read-only now", "disk"),
    ("counters: /data answers with an input/output error", "disk"),
])  # fmt: skip
def test_counters_speak_where_the_kernels_log_is_closed(words: str, expected: str) -> None:
    victim = "rank 0  10:00:00.000 | RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.4]:1"
    assert cause(victim, f"kernel  10:00:01.000 | {words}") == expected


def put(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_counters_tell_what_rose_or_went_bad_since_they_were_first_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fatal, efa = (
        "sys/bus/pci/devices/0000:17:00.0/aer_dev_fatal",
        "sys/class/infiniband/efa_2/hw_counters/no_completion_cmds",
    )
    ecc = "sys/devices/virtual/neuron_device/neuron3/stats/hardware/mem_ecc_uncorrected/total"
    for name in (
        efa,
        ecc,
        "sys/fs/ext4/nvme1n1/errors_count",
        "sys/devices/system/edac/mc/mc0/ue_count",
    ):
        put(tmp_path, name, "3\n")
    put(tmp_path, fatal, "DLP 0\nTLP 0\nTOTAL_ERR_FATAL 0\n")
    put(tmp_path, kernel_log.NVME.replace("*", "1"), "live\n")
    put(
        tmp_path,
        kernel_log.MOUNTS,
        "/dev/root / ext4 rw,relatime 0 0\n/dev/loop1 /snap squashfs ro 0 0\nproc /proc proc ro 0 0\n",
    )
    monkeypatch.setattr(kernel_log, "SMI", ("no-such-program",))
    before = Counters(tmp_path)
    assert before.words() == []
    put(tmp_path, efa, "4\n")
    put(tmp_path, ecc, "5\n")
    put(tmp_path, fatal, "DLP 1\nTLP 0\nTOTAL_ERR_FATAL 1\n")
    put(tmp_path, kernel_log.NVME.replace("*", "1"), "dead\n")
    put(
        tmp_path,
        kernel_log.MOUNTS,
        "/dev/root / ext4 ro,relatime 0 0\n/dev/loop1 /snap squashfs ro 0 0\n",
    )
    assert sorted(before.words()) == [
        "counters: / is read-only now", "counters: efa efa_2 no_completion_cmds: 1 more",
        "counters: neuron neuron3 mem_ecc_uncorrected: 2 more", "counters: nvme nvme1 is dead",
        "counters: pci 0000:17:00.0 aer_dev_fatal: 1 more",
    ]  # fmt: skip


def test_a_file_system_that_has_shut_down_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(
        tmp_path,
        kernel_log.MOUNTS,
        "/dev/nvme1n1 /data xfs rw,relatime 0 0\n/dev/root / ext4 rw 0 0\n/dev/gone /gone ext4 rw 0 0\n",
    )
    put(tmp_path, "data/file", "")
    monkeypatch.setattr(kernel_log, "SMI", ("no-such-program",))
    before, plain = Counters(tmp_path), os.open

    def opened(path: Path, *rest: int) -> int:
        if Path(path) == tmp_path / "data":
            raise OSError(errno.EIO, "Input/output error")
        return plain(path, *rest)

    monkeypatch.setattr(kernel_log.os, "open", opened)
    assert before.words() == ["counters: /data answers with an input/output error"]


def test_a_gpu_that_never_came_up_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_log, "SMI", ("no-such-program",))
    for name, vendor in (
        ("0000:b3:00.0", "0x10de"),
        ("0000:b4:00.0", "0x10de"),
        ("0000:00:03.0", "0x1d0f"),
    ):
        put(tmp_path, f"sys/bus/pci/devices/{name}/vendor", f"{vendor}\n")
        put(tmp_path, f"sys/bus/pci/devices/{name}/class", "0x030200\n")
    (tmp_path / "sys/bus/pci/devices/0000:b4:00.0/driver").symlink_to("../../drivers/nvidia")
    assert Counters(tmp_path).words() == [], (
        "no driver is loaded: a node of CPUs, or one whose set-up is not done"
    )
    put(tmp_path, "sys/module/nvidia/refcnt", "0\n")
    assert Counters(tmp_path).words() == ["counters: pci 0000:b3:00.0 has no driver"]


def test_gpus_that_are_lost_or_need_a_reset_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = [
        "00000000:0A:00.0, None",
        "00000000:44:00.0, Reset",
        "Unable to determine the device handle for GPU1: GPU is lost.",
    ]
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in said))
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert Counters(tmp_path).words() == [
        "nvidia-smi: GPU 00000000:44:00.0: recovery action Reset",
        f"nvidia-smi: {said[2]}",
    ]


@pytest.mark.parametrize("closed", [True, False])
def test_the_counters_are_read_where_the_kernels_log_can_not_be(
    closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_log, "_messages", lambda: None if closed else [])
    monkeypatch.setattr(Counters, "words", lambda self: ["counters: edac mc0 ue_count: 1 more"])
    assert (
        "counters: edac mc0 ue_count: 1 more" in [words.text for words in Kernel().words()]
    ) is closed


def test_a_traceback_whose_head_was_cut_off_is_one_if_an_exception_ends_it() -> None:
    assert cause(THEIRS, "requests.exceptions.ReadTimeout: the far end is silent") == "storage"
    assert cause(THEIRS, "    frob(1)", "stack: printed for whoever likes it") == "none"
    assert (
        found(THEIRS, "    frob(1)", HEAD, THEIRS, "Odd: the moon is full").words
        == "Odd: the moon is full"
    )
