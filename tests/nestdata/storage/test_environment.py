import multiprocessing
import os
import pickle
from multiprocessing.connection import Connection

import pytest

from nestdata import fork_server
from nestdata.storage import StoreEnvironment
from nestdata.storage.failures import classify


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


def test_a_profile_that_is_not_read_is_named_with_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    error = OSError("error sending request for url (http://169.254.169.254/latest/api/token)")
    assert "profile" not in classify(error, "s3").cure
    monkeypatch.setenv("AWS_PROFILE", "team")
    cure = classify(error, "s3").cure
    assert "The profile 'team' in AWS_PROFILE is not read: run `eval \"$(aws configure export-credentials" in cure
    monkeypatch.delenv("AWS_PROFILE")
    folder = os.path.join(str(tmp_path), ".aws")
    os.mkdir(folder)
    with open(os.path.join(folder, "credentials"), "w") as file:
        file.write("[default]\n")
    assert "The file ~/.aws/credentials is not read" in classify(error, "s3").cure
    assert "not read" not in classify(error, "gs").cure
