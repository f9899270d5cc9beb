import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from nestdata import fork_server
from nestdata.storage import StoreEnvironment
from nestdata.storage.clients import storage_error


def report(environment: StoreEnvironment, pipe: Connection) -> None:
    environment.apply()
    pipe.send({name: value for name, value in os.environ.items() if name.startswith("AWS_")})


@pytest.mark.multiprocess
def test_a_worker_of_a_fork_server_gets_the_variables_of_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of-the-fork-server")
    fork_server.start()
    monkeypatch.delenv("AWS_SESSION_TOKEN")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "set-later")
    expected = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    context = multiprocessing.get_context("forkserver")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=report, args=(StoreEnvironment(), sender))
    process.start()
    assert receiver.poll(60)
    assert receiver.recv() == expected
    process.join()


def test_the_variables_are_in_no_other_pickle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret-0123456789")
    environment = StoreEnvironment()
    with pytest.raises(RuntimeError, match="StoreEnvironment"):
        pickle.dumps(environment)
    assert "secret-0123456789" not in repr(environment) + str(vars(environment))


def test_a_profile_that_is_not_read_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    exceptions = pytest.importorskip("obstore").exceptions
    refused = exceptions.PermissionDeniedError("no privileges: 403 Forbidden: <Error><Token-0>secret</Token-0></Error>")
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("AWS_PROFILE", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    without = storage_error(refused, "s3://bucket/a")
    expected = "s3://bucket/a: no privileges: 403 Forbidden. Check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the"
    assert str(without).startswith(expected)
    assert without.kind == "denied"
    assert "secret" not in str(without)
    assert "are not read" not in str(without)
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text("[default]\n")
    advice = '`eval "$(aws configure export-credentials --format env)"`'
    assert advice in str(storage_error(refused, "s3://bucket/a"))
    assert advice not in str(storage_error(refused, "gs://bucket/a"))
