"""The image of the cpu platform, really built by buildah on a base that mmdebstrap makes here, and two nodes that train in it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from checkouts import CANARY, ROOT, Checkout, Tell, buildah, layers, reference_in

from trainfleet.run.run_folder import Run

LINE = "# a changed line\n"
pytestmark = pytest.mark.timeout(1800)


def test_the_same_again_makes_nothing_again(
    built: tuple[str, str], checkout: Checkout, base: str, tell: Tell
) -> None:
    said, seconds = checkout.build(base)
    assert reference_in(said) == built[0] and "exists" in said and "COPY" not in said
    image = buildah(checkout.outside, "images", "--quiet", "--no-trunc", built[0])
    buildah(checkout.outside, "tag", built[0], "localhost/kept:1")
    buildah(checkout.outside, "rmi", built[0])  # its name alone, as it has another
    said, again = checkout.build(base)
    assert (
        "COPY" in said
        and buildah(checkout.outside, "images", "--quiet", "--no-trunc", reference_in(said))
        == image
    )
    tell(
        f"second build: {seconds:.1f} s where the image is here, {again:.1f} s where only its layers are"
    )


def test_a_changed_line_of_python_is_one_small_layer(
    built: tuple[str, str], checkout: Checkout, base: str, tell: Tell
) -> None:
    before = layers(checkout.outside, built[0])
    file = checkout.folder / "python" / "trainfleet" / "node/placement.py"
    text = file.read_text()
    file.write_text(text + LINE)
    said, seconds = checkout.build(base)
    file.write_text(text)
    after = layers(checkout.outside, reference_in(said))
    assert (
        reference_in(said) != built[0]
        and f"layers to rebuild: code; other layers reused from {built[0]}" in said
    )
    same = [one for one, other in zip(before, after, strict=True) if one == other]
    assert len(same) == len(before) - 1 and before[-1][0] != after[-1][0]
    assert after[-1][1] < 10e6 < sum(size for _, size in after) / 50
    tell(
        f"a changed line: {seconds:.1f} s; layers in MB: "
        + ", ".join(f"{size / 1e6:.1f}" for _, size in after)
        + ", only the last is new"
    )


def test_another_base_has_its_own_labels(
    built: tuple[str, str], checkout: Checkout, base: str
) -> None:
    """The same base under another name: all steps' lines are the same, and a cache that knows lines alone would give it the other's."""
    other = f"{base.rpartition(':')[0]}:other"
    buildah(checkout.outside, "tag", base, other)
    said, _ = checkout.build(other)
    one, another = (layers(checkout.outside, name) for name in (built[0], reference_in(said)))
    assert reference_in(said) != built[0] and one[:-1] == another[:-1] and one[-1] != another[-1]


def test_what_it_says_of_itself(built: tuple[str, str], checkout: Checkout) -> None:
    image = json.loads(buildah(checkout.outside, "inspect", "--type=image", built[0]))["Docker"][
        "config"
    ]
    labels = image["Labels"]
    assert (
        labels["org.opencontainers.image.version"] == built[0].rpartition(":")[2]
        and labels["trainfleet.platform"] == "cpu"
    )
    assert re.fullmatch(r"cpu \d{4}-\d\d-\d\d [0-9a-f]{12}", labels["trainfleet.lock"])
    assert (
        image["User"] == "trainer"
        and image["Entrypoint"] == ["python", "-m"]
        and image["Healthcheck"]
    )
    mounted = Path(
        buildah(
            checkout.outside,
            "mount",
            container := buildah(checkout.outside, "from", built[0]).strip(),
        ).strip()
    )
    bill = json.loads((mounted / "opt/sbom.json").read_text())
    named = {package["name"]: package for package in bill["packages"]}
    pins = dict(
        re.findall(
            r"^([a-z0-9.-]+)==([^ ]+)", (ROOT / "requirements.lock").read_text(), re.MULTILINE
        )
    )
    assert (
        bill["spdxVersion"] == "SPDX-2.3"
        and named["libc6"]
        and named["torch"]["versionInfo"].partition("+")[0] == pins["torch"]
    )
    assert named["numpy"]["versionInfo"] == pins["numpy"] and len(
        {package["SPDXID"] for package in bill["packages"]}
    ) == len(bill["packages"])
    assert (
        not list((mounted / "opt/trainfleet").glob("**/tests"))
        and (mounted / "opt/trainfleet/docker/platforms.lock.yaml").exists()
    )
    buildah(checkout.outside, "rm", container)


def test_a_secret_is_in_no_layer_label_history_or_log(
    built: tuple[str, str], checkout: Checkout, store: Path
) -> None:
    """Nor in anything else that buildah keeps: `graph` has all layers as files, and every image's configuration and manifest."""

    def search(word: str) -> list[str]:
        """The files that have a word in them or in their names."""
        grep = ["grep", "-rlF", "--devices=skip", word, str(store / "graph")]
        inside = subprocess.run(
            grep,
            env={"LC_ALL": "C", "PATH": os.environ["PATH"]},
            capture_output=True,
            text=True,
            check=False,
        )
        assert inside.returncode < 2, inside.stderr
        return inside.stdout.splitlines() + [
            str(path) for path in (store / "graph").rglob(f"*{word}*")
        ]

    assert CANARY not in built[1] and not search(CANARY)
    there = search(
        built[0].rpartition(":")[2]
    )  # of the same search, what is in layers, labels and names
    assert [path for path in there if path.endswith("opt/trainfleet/image-tag")]
    assert [path for path in there if "/overlay-images/" in path]


def test_two_nodes_train_in_it_with_the_losses_of_outside(
    built: tuple[str, str], checkout: Checkout, tmp_path: Path, tell: Tell
) -> None:
    settings = {
        "name": "small", "fleet": {"nodes": 2, "secrets": ["HF_TOKEN"]},
        "train": {"steps": 8, "global_batch_size": 8, "sequence_length": 128, "log_every": 1}, "data": {"sources": [f"{ROOT}/python/**/*.py"]},
    }  # fmt: skip
    home = tmp_path / "outside"
    home.mkdir()
    (home / "config.yaml").write_text(yaml.safe_dump(settings))
    words = [sys.executable, "-m", "trainfleet"]
    done = subprocess.run(
        [*words, "train"],
        cwd=home,
        env=checkout.outside,
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    subprocess.run(
        [*words, "plan", f"OUT={tmp_path}/plan"],
        cwd=home,
        env=checkout.outside,
        check=True,
        capture_output=True,
        timeout=300,
    )
    work = tmp_path / "work"
    (work / "runs" / "small").mkdir(parents=True)
    shutil.copytree(home / "data", work / "data")
    shutil.copy(home / "runs" / "small" / "config.yaml", work / "runs" / "small")
    shutil.copy(
        os.environ["TRAINFLEET_TRIAL"], work / "trial.json"
    )  # products by the same library as outside
    subprocess.run(["chmod", "-R", "a+rwX", work], check=True)
    run_inside(
        built[0],
        [path.read_text() for path in sorted((tmp_path / "plan").glob("train-node-*.sh"))],
        work,
        checkout.outside,
    )
    losses = [
        [line["loss"] for line in Run(folder / "runs" / "small").read_metrics()]
        for folder in (home, work)
    ]
    tell(f"losses, outside and in the image: {losses[0]}")
    assert losses[0] == losses[1] and len(losses[0]) == 8
    assert Run(work / "runs" / "small").read_results()["status"] == "finished"
    written = [path for path in work.rglob("*") if path.is_file() and path.stat().st_size < 1 << 20]
    assert not [path for path in written if CANARY.encode() in path.read_bytes()]


def run_inside(image: str, scripts: list[str], work: Path, outside: dict[str, str]) -> None:
    """The nodes' scripts of a plan, but in the image: their environment, and their words behind its entrypoint."""
    assert len(scripts) == 2
    processes = []
    for script in scripts:
        exports = dict(re.findall(r"^export (\w+)=(.*)$", script, re.MULTILINE))
        command = shlex.split(script.replace("\\\n", " ").splitlines()[-1])
        told = [
            f"--env={name}={shlex.split(value)[0] if value else ''}"
            for name, value in exports.items()
            if name != "PYTHONPATH"
        ]
        told += [
            "--env=HF_TOKEN",
            "--env=TRAINFLEET_SECRETS=HF_TOKEN",
            "--env=TRAINFLEET_TRIAL=trial.json",
        ]
        container = buildah(outside, "from", image).strip()
        own = ["--user=trainer", f"--volume={work}:/work", "--workingdir=/work"]
        words = [
            "buildah",
            "run",
            *own,
            *told,
            container,
            "--",
            "python",
            "-m",
            *command[command.index("trainfleet.node.entrypoint") :],
        ]
        processes.append(
            subprocess.Popen(
                words, env=outside, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [process.communicate(timeout=900)[0] for process in processes]
    logs = [path.read_text()[-2000:] for path in (work / "runs" / "small" / "logs").glob("*.log")]
    assert [process.returncode for process in processes] == [0, 0], [*said, *logs]
    assert CANARY not in "".join(said)
