import json
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nestdata.redaction import redacted, redacted_url

SCHEMES = st.sampled_from(["s3", "S3", "gs", "az", "http", "https", "ftp", "oss", "abfss", "x"])
# No part of `***@` and of what follows, and long enough not to be elsewhere by chance.
_CHARACTERS = string.ascii_letters + string.digits + "/:@?#;&=%+.,'\"()[]{}\\~!$é\N{SNOWMAN}"
SECRETS = st.text(_CHARACTERS, min_size=0, max_size=12).map(lambda text: f"hunter{text}hunter")
SECRETS_WITH_SPACES = st.text(_CHARACTERS + " \n\t", max_size=12).map(lambda text: f"hunter{text}hunter")
AROUND = st.sampled_from([("", ""), ("cut 'a': cannot read ", ": no such file."), ('{"url":"', '"}'), ("x ", "\n")])


def assert_hidden(text: str) -> None:
    shown = redacted(text)
    assert "hunter" not in shown
    assert redacted(shown) == shown


@given(SCHEMES, SECRETS, SECRETS, AROUND)
def test_no_user_name_or_password_is_shown(scheme: str, user: str, password: str, around: tuple[str, str]) -> None:
    for at in ("@", "%40", "%2540"):
        assert_hidden(f"{around[0]}{scheme}://{user}:{password}{at}bucket/a/b.wav{around[1]}")
        assert_hidden(f"{around[0]}{scheme}://{user}{at}bucket/a/b.wav{around[1]}")


@given(SCHEMES, SECRETS, AROUND, st.sampled_from(["?", "?v=1&auth=", "#", ";token=", "?a@b=", "?jwt="]))
def test_no_query_and_no_fragment_is_shown(scheme: str, secret: str, around: tuple[str, str], query: str) -> None:
    assert_hidden(f"{around[0]}{scheme}://host:8080/a/b.wav{query}{secret}{around[1]}")


@given(SCHEMES, SECRETS_WITH_SPACES, SECRETS_WITH_SPACES)
def test_of_a_single_url_secrets_with_spaces_are_hidden(scheme: str, user: str, secret: str) -> None:
    for url in (f"{scheme}://{user}:{secret}@bucket/x", f"{scheme}://{user}@bucket/x", f"{scheme}://b/x?sig={secret}"):
        assert "hunter" not in redacted_url(url)


@given(SCHEMES, SECRETS)
def test_secrets_are_hidden_where_a_path_has_lost_a_slash_or_json_has_escaped_it(scheme: str, secret: str) -> None:
    if len(scheme) > 1:
        assert_hidden(f"/data/{scheme}:/key:{secret}@bucket/x: does not exist")
    escaped = json.dumps(f"{scheme}://key:{secret}@bucket/x", ensure_ascii=False).replace("/", "\\/")
    assert_hidden(escaped)


@given(st.text())
def test_any_text_is_redacted_once(text: str) -> None:
    assert redacted(redacted(text)) == redacted(text)


@pytest.mark.parametrize(
    "text",
    [
        "/data/a@b.wav: does not exist",
        r"C:\Users\me@home\a.wav and D:\x?y",
        "mail me@host: the ratio is 1:2/3",
        "s3://bucket/a b.wav: no such object (s3://bucket:8080/c), or 'gs://bucket/d'; az://e.",
        "expected an absolute path or a URL (s3://, gs://, az://, https://).",
        "cut 's3://bucket/a/b@1.000+2.000': too short",
    ],
)
def test_text_without_secrets_is_unchanged(text: str) -> None:
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("s3://KEY:se/cret@bucket/x: no", "s3://***@bucket/x: no"),
        ("(s3://KEY:cut off", "(s3://*** off"),
        ("s3://bucket/a@b.wav: no", "s3://***@b.wav: no"),
        ("'https://host/a.tar?o=0&e=1024': no", "'https://host/a.tar?***': no"),
        ("https://host/x?user=a@b", "https://***"),
    ],
)
def test_what_is_left_of_a_url_is_readable(text: str, expected: str) -> None:
    assert redacted(text) == expected


def test_long_hostile_text_takes_linear_time() -> None:
    for text in ("a" * 10**5, "s3://a:b " * 10**4, "@1.000" * 10**4 + "x", "s3:" + "\\" * 10**5, "a:/" * 10**4):
        redacted(text)
        redacted(f"s3://b/{text}")
