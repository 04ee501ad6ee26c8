"""What Neuron's tools say: AWS's own examples are read as they mean it, and nothing else gets through."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
import yaml

from trainfleet.devices import neuron
from trainfleet.health import neuron_telemetry
from trainfleet.health.neuron_telemetry import Reading, read_collectives, read_devices, read_monitor
from trainfleet.hosts import collectives
from trainfleet.hosts.facts import parse
from trainfleet.hosts.host_results import Host, Result
from trainfleet.hosts.node_checks import neuron_cores
from trainfleet.trust.errors import InputError

CATALOGUE = Path(__file__).parents[2] / "python/trainfleet/watch/catalogue/neuron.yaml"
# As in neuron-monitor-user-guide, neuron-ls and nccom-test (SDK 2.32), with two cores and an error of each kind.
REPORT = {
    "neuron_runtime_data": [{
        "pid": 7, "address": "", "neuron_runtime_tag": "x", "error": "",
        "report": {
            "neuroncore_counters": {"period": 1.0, "error": "", "neuroncores_in_use": {
                "0": {"neuroncore_utilization": 42.0, "flops": 1234567891011}, "1": {"neuroncore_utilization": 44.0}}},
            "execution_stats": {
                "period": 1.03, "error": "",
                "error_summary": {"generic": 0, "numerical": 1, "transient": 0, "model": 0, "runtime": 0, "hardware": 2},
                "execution_summary": {"completed": 123, "completed_with_err": 0, "timed_out": 1},
                "latency_stats": {"total_latency": None, "device_latency": {"p0": 0.01, "p50": 0.0125, "p99": 0.02}},
            },
            "memory_used": {"period": 1.0, "error": "", "neuron_runtime_used_bytes": {"host": 1, "neuron_device": 12519788544}},
        },
    }],
    "system_data": {"neuron_hw_counters": {"period": 1.0, "error": "", "neuron_devices": [
        {"neuron_device_index": 0, "mem_ecc_corrected": 3, "mem_ecc_uncorrected": 1, "sram_ecc_uncorrected": 1, "sram_ecc_corrected": 0}]}},
    "instance_info": {"instance_id": "i-0"},
}  # fmt: skip
LISTED = [
    {"neuron_device": number, "bdf": "cc:00.0", "connected_to": [1], "nc_count": 2, "memory_size": 34359738368,
     "neuron_processes": [{"pid": 113985, "command": command, "neuron_runtime_version": "2.0.0"}]}
    for number, command in ((1, "python -m trainfleet.engine"), (0, "neuron-bench exec --run-as-cc-neff"))
]  # fmt: skip
TABLE = """
     size(B)    count(elems)     type    time(us)    algbw(GB/s)    busbw(GB/s)
    33554432        33554432    uint8         768          40.69          40.69
Avg bus bandwidth:      40.6901GB/s
"""


def test_a_report_is_summed_over_processes_and_devices() -> None:
    reading = read_monitor(json.dumps(REPORT).encode())
    assert reading == Reading(2, 43.0, 12519788544, 3, 2, 4, 1, 0.0125)
    assert reading.metrics() == {
        "core_utilization": 43.0, "execution_seconds": 0.0125, "device_bytes": 12519788544, "ecc_corrected": 3,
        "ecc_uncorrected": 2, "execution_errors": 4, "execution_timeouts": 1,
    }  # fmt: skip


@pytest.mark.parametrize(
    "absent",
    [
        {},
        {"neuron_runtime_data": None, "system_data": None},
        {"neuron_runtime_data": [{"report": None}]},
    ],
)
def test_what_is_not_measured_is_nothing(absent: dict[str, object]) -> None:
    assert read_monitor(json.dumps(absent).encode()) == Reading()


@pytest.mark.parametrize(
    "line",
    [b"", b"[]", b"{", b"\xff", b'{"neuron_runtime_data": 3}', b'{"neuron_runtime_data": [{"report": {"neuroncore_counters": []}}]}',
     json.dumps(REPORT).replace("42.0", "1e999").encode(), json.dumps(REPORT).replace("42.0", "-5").encode(),
     json.dumps(REPORT).replace('"generic": 0', '"generic": true').encode(), b"[" * 10_000],
)  # fmt: skip
def test_a_report_that_is_none_is_refused(line: bytes) -> None:
    with pytest.raises(InputError):
        read_monitor(line)


def test_the_log_tells_of_each_new_error_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    watch = neuron.Monitor()
    for reading in (
        Reading(uncorrected=2),
        Reading(uncorrected=2),
        Reading(uncorrected=2, errors=3, timed_out=1),
    ):
        watch.take(reading)
    assert capsys.readouterr().out.splitlines() == [
        "neuron-monitor: 2 uncorrectable memory errors on this node",
        "neuron-monitor: 3 executions failed, 1 of them timed out",
    ]


def test_a_monitor_is_read_as_long_as_the_rank_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in prints AWS's example, and something that is no report."""
    tool = tmp_path / neuron.TOOL
    (tmp_path / "report").write_text("no report\n" + json.dumps(REPORT) + "\n")
    tool.write_text(f"#!/bin/sh\ncat {tmp_path}/report\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    watch = neuron.Monitor()
    watch.process.wait(20)
    for _ in range(200):
        if watch.newest.cores:
            break
        watch.process.poll()
        time.sleep(0.02)
    assert watch.newest.utilization == 43.0


def test_devices_are_listed_with_who_uses_them() -> None:
    first, second = read_devices(json.dumps(LISTED))
    assert (first.number, first.cores, first.memory) == (0, 2, 34359738368)
    assert first.users == ("113985 neuron-bench exec --run-as-cc-neff",) and second.number == 1


def test_the_gate_names_who_uses_the_cores_and_how_many_there_are() -> None:
    from trainfleet.hardware import node_types

    text = "\n".join(f"neuron_ls={line}" for line in json.dumps(LISTED, indent=4).splitlines())
    facts = parse(f"== facts\nhostname=a\nneuron=/dev/neuron0\n{text}\n== end\n")
    row = node_types.INSTANCE_TYPES["trn1.32xlarge"]

    class Wanted:
        type = row

    found = [str(finding) for finding in neuron_cores({Host("a", "10.0.0.1"): facts}, Wanted())]  # type: ignore[arg-type]
    assert any("4 logical NeuronCores, but a trn1.32xlarge has 32" in line for line in found)
    assert any(
        "another program uses its NeuronCores: 113985 neuron-bench" in line for line in found
    )
    assert not any("trainfleet.engine" in line for line in found)


@pytest.mark.parametrize(
    "said", ["neuron-ls: command failed", "[1, 2]", '{"neuron_device": 0}', "[" * 9000]
)
def test_what_neuron_ls_says_in_place_of_a_list_is_told(said: str) -> None:
    lines = "".join(
        f"neuron_ls={said[start : start + 4000]}\n" for start in range(0, len(said), 4000)
    )
    facts = parse(f"== facts\nhostname=a\n{lines}== end\n")
    assert not facts.neuron_devices and facts.neuron_trouble


def test_bandwidth_is_told_in_powers_of_ten() -> None:
    (row,) = read_collectives(TABLE.splitlines())
    assert (row.bytes, row.microseconds) == (33554432, 768) and row.gbs == pytest.approx(
        40.69 * 2**30 / 1e9
    )
    with_algorithm = TABLE.replace("40.69          40.69", "40.69          80.5    Ring")
    assert read_collectives(with_algorithm.splitlines())[0].gbs == pytest.approx(80.5 * 2**30 / 1e9)


@pytest.mark.parametrize(
    "said", ["", "size(B)\n", "Error: NRT_FAILURE \x1b]0;x\x07", "1 2 3 4 5 6", "9" * 100_000]
)
def test_no_table_is_an_error_with_the_last_words(said: str) -> None:
    with pytest.raises(InputError) as error:
        read_collectives(said.splitlines())
    assert str(error.value).isprintable()


def test_the_trial_between_nodes_meets_on_the_first() -> None:
    assert collectives.command(32).startswith("/opt/aws/neuron/bin/nccom-test allr --nworkers 32")
    words = collectives.command(32, {"a": "10.0.0.1", "b": "10.0.0.2"})
    assert "NEURON_RT_ROOT_COMM_ID=10.0.0.1:29400" in words and "--nworkers 64" in words
    assert words.endswith("--nnodes 2 --hosts 10.0.0.1 10.0.0.2")


def test_a_trial_that_fails_says_why() -> None:
    assert collectives.read(None) == "no answer"
    assert "NRT_FAILURE" in str(collectives.read(Result(1, "Error: NRT_FAILURE", "", 0.1)))
    assert "exit code 1" in str(collectives.read(Result(1, TABLE, "", 0.1)))
    assert isinstance(collectives.read(Result(0, TABLE, "", 0.1)), neuron_telemetry.Collective)


# neuron-runtime/api/nrt_status (SDK 2.32): what is no success and says what went wrong.
CODES = {
    "NRT_INVALID": 2, "NRT_INVALID_HANDLE": 3, "NRT_RESOURCE": 4, "NRT_TIMEOUT": 5, "NRT_HW_ERROR": 6, "NRT_QUEUE_FULL": 7,
    "NRT_LOAD_NOT_ENOUGH_NC": 9, "NRT_UNSUPPORTED_NEFF_VERSION": 10, "NRT_FAIL_HOST_MEM_ALLOC": 11, "NRT_UNINITIALIZED": 13,
    "NRT_EXEC_UNIT_UNRECOVERABLE": 101, "NRT_EXEC_BAD_INPUT": 1002, "NRT_EXEC_COMPLETED_WITH_NUM_ERR": 1003,
    "NRT_EXEC_NC_BUSY": 1005, "NRT_EXEC_OOB": 1006, "NRT_EXEC_HW_ERR_COLLECTIVES": 1200, "NRT_EXEC_HW_ERR_HBM_UE": 1201,
    "NRT_EXEC_HW_ERR_NC_UE": 1202, "NRT_EXEC_HW_ERR_DMA_ABORT": 1203, "NRT_EXEC_SW_NQ_OVERFLOW": 1204,
    "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE": 1205, "NRT_NETWORK_PROXY_FAILURE": 1206,
}  # fmt: skip


@pytest.mark.parametrize("name", CODES)
def test_every_status_of_the_runtime_is_in_the_catalogue_by_name_and_number(name: str) -> None:
    entries = yaml.safe_load(CATALOGUE.read_text())["entries"]
    says = [
        re.compile(pattern)
        for entry in entries
        for pattern in [*entry.get("closed", ()), *entry.get("says", ())]
    ]
    assert any(pattern.search(f"nrt_execute failed: {name}") for pattern in says)
    assert any(pattern.search(f"nrt_execute status={CODES[name]}") for pattern in says)
