"""Which hosts can take the next attempt of a job: those that answer and have the shared folder, on real sshd nodes."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import yaml

from fleet.lab import Lab
from trainfleet.backends import terms_of
from trainfleet.backends.ssh import Ssh
from trainfleet.config import Settings, load


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_host_that_has_lost_the_shared_folder_takes_no_other_attempt(
    pair: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(
        yaml.safe_dump({"name": "surveyed", "fleet": pair.fleet(nodes=2)})
    )
    backend = Ssh(load(Settings(Path("config.yaml")), terms_of)[0])
    (pair.shared / "trainfleet").mkdir()
    with backend.head().transport as transport:
        sound, unsound = backend.head().survey(transport.hosts)
        assert len(sound) == 2 and not unsound
        pair.server.fail(1, number)
        sound, unsound = backend.head().survey(transport.hosts, again=True)
        assert [host.name for host in sound] == ["node0"], unsound
        assert [host.name for host in unsound] == ["node1"] and "/fsx/trainfleet" in str(unsound), (
            unsound
        )
        pair.server.fail(1, 0)
        assert len(backend.head().survey(transport.hosts, again=True)[0]) == 2
