"""Releases by upload: what the page makes of good packages, of wrong ones, and of hostile forms."""

import os
import random
import re
import socket

import pytest
from tests.fleet.console.conftest import log_in
from tests.toolkit.cases import cases
from tests.waiting import wait_for

from edgekit_cli.fleet.demo_packages import make_setup
from edgekit_fleet.operations import releases
from edgekit_fleet.releases.repository import TufRepository
from edgekit_fleet.web import uploads
from edgekit_fleet.web.multipart import MultipartParser, PartBegin
from edgekit_fleet.web.uploads import clean_name
from edgekit_runtime.errors import RequestError

EDGE = "xxboundaryxx"
TYPE = f"multipart/form-data; boundary={EDGE}"


@pytest.fixture(scope="module")
def setup(tmp_path_factory):
    return make_setup(tmp_path_factory.mktemp("packages"))


@pytest.fixture
def site(served, setup, monkeypatch):
    monkeypatch.setenv("EDGEKIT_HOME", str(setup.home))
    folder = served.folder
    TufRepository(folder.repository, folder.repository_keys).create(1_700_000_000.0)
    return served


def part(name, value, file_name=None):
    file = "" if file_name is None else f'; filename="{file_name}"'
    head = f'--{EDGE}\r\nContent-Disposition: form-data; name="{name}"{file}\r\n'
    kind = "" if file_name is None else "Content-Type: application/octet-stream\r\n"
    return f"{head}{kind}\r\n".encode() + value + b"\r\n"


def body_of(*parts):
    return b"".join(parts) + f"--{EDGE}--\r\n".encode()


def upload(client, *files, body=None, kind=TYPE, **fields):
    """Send the form as a browser does: its fields in order, files last; a `csrf` of None is left out."""
    if "csrf" not in fields:
        fields["csrf"] = client.get("/").text.partition('name="csrf" value="')[2].partition('"')[0]
    parts = [part(name, value.encode()) for name, value in fields.items() if value is not None]
    parts += [part("packages", data, name) for name, data in files]
    return client.send("POST", "/releases", body_of(*parts) if body is None else body, {"content-type": kind})


def words(text):
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", text.partition("<main")[2]))


def left_over(site):
    return sorted(path.name for path in site.folder.uploads.rglob("*"))


def names(site):
    return {one.name for one in releases.list_releases(site.store)}


def test_uploaded_package_becomes_a_release_that_devices_can_fetch(client, site, setup):
    assert "signed with one of these keys: demo" in words(client.get("/releases/new").text)
    data = setup.first.path.read_bytes()
    answer = upload(client, ("digits.edgepkg", data), name="spring", note="by <hand>", min_agreement="0,9")
    page = client.follow(answer).text
    assert "spring is released" in words(page)
    assert "by &lt;hand&gt;" in page
    assert "0.900" in words(page)
    made = releases.find_release(site.store, "spring")
    assert made.created_by == "maria"
    assert [package[1] for package in made.packages] == [setup.first.version]
    assert any(path.read_bytes() == data for path in site.folder.repository.glob("targets/**/*.edgepkg"))
    assert left_over(site) == []


@cases(
    ("name", "data", "said"),
    [
        ("model.onnx", b"\x08\x07 not a package", "model.onnx"),
        ("digits.edgepkg", b"", "digits.edgepkg"),
        ("cut.edgepkg", None, "cut.edgepkg"),
        ("changed.edgepkg", "flip", "changed.edgepkg"),
        ("../../etc/passwd", b"root", "passwd"),
        ("..\\..\\boot.ini", b"x", "boot.ini"),
        ("<img src=x>.edgepkg", b"x", "img_src_x_.edgepkg"),
    ],
)
def test_wrong_file_is_refused_by_its_name_and_keeps_the_form(client, site, setup, name, data, said):
    good = setup.first.path.read_bytes()
    content = good[:-100] if data is None else data
    if data == "flip":
        content = good[:-1] + bytes([good[-1] ^ 1])
    before = names(site)
    answer = upload(client, (name, content), name="mine", note="kept note")
    assert answer.status == 422
    assert said in words(answer.text)
    assert "kept note" in answer.text
    assert str(site.folder.path) not in answer.text
    assert "<img src=x>" not in answer.text
    assert names(site) == before
    assert left_over(site) == []


def test_package_of_a_foreign_key_is_refused(client, site, setup, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKIT_HOME", str(tmp_path))
    assert "No key is trusted" in words(client.get("/releases/new").text)
    answer = upload(client, ("digits.edgepkg", setup.first.path.read_bytes()))
    assert answer.status == 422
    assert "digits.edgepkg" in words(answer.text)


def test_two_files_of_one_name_are_told_apart(client, site, setup):
    data = setup.first.path.read_bytes()
    answer = upload(client, ("a.edgepkg", data), ("a.edgepkg", data))
    assert answer.status == 422
    assert "a.edgepkg and 2-a.edgepkg are both model" in words(answer.text)


def test_form_without_a_file_or_with_nonsense_says_what_is_missing(client, site, setup):
    data = setup.first.path.read_bytes()
    assert "at least one package" in words(upload(client, ("", b"")).text)
    assert "at least one package" in words(upload(client).text)
    assert "is no number" in words(upload(client, ("a", data), min_agreement="much").text)
    assert "expected 0 to" in words(upload(client, ("a", data), min_agreement="nan").text)
    assert "release name" in words(upload(client, ("a", data), name="../up").text)


def test_only_operators_may_upload_and_only_with_the_form_of_their_login(client, site, setup):
    file = ("a.edgepkg", setup.first.path.read_bytes())
    before = names(site)
    assert upload(log_in(site, "vera"), file).status == 403
    assert upload(client, file, csrf="x" * 43).status == 403
    assert upload(client, file, csrf=None).status == 403
    late = body_of(part("packages", file[1], "a"), part("csrf", b"x"))
    assert upload(client, body=late).status == 403
    client.cookies.clear()
    assert upload(client, file, csrf="").headers["location"].startswith("/login")
    assert names(site) == before
    assert left_over(site) == []
    operator = upload(log_in(site, "olaf"), file)
    assert operator.status == 303


def test_oversize_is_told_and_not_kept(client, site, monkeypatch):
    monkeypatch.setattr(uploads, "MAX_PACKAGE_BYTES", 200_000)
    answer = upload(client, ("big.edgepkg", bytes(300_000)))
    assert answer.status == 413
    assert "over 200000 bytes" in words(answer.text)
    assert left_over(site) == []
    assert upload(client, ("a", b"x"), note="n" * 100_000).status == 413


def test_upload_that_is_cut_off_leaves_nothing(client, site, setup):
    csrf = client.get("/").text.partition('name="csrf" value="')[2].partition('"')[0]
    body = body_of(part("csrf", csrf.encode()), part("packages", setup.first.path.read_bytes(), "a.edgepkg"))
    cookie = "; ".join(f"{name}={value}" for name, value in client.cookies.items())
    host = f"127.0.0.1:{site.port}"  # cookies are named by the port
    head = f"POST /releases HTTP/1.1\r\nhost: {host}\r\ncookie: {cookie}\r\ncontent-type: {TYPE}\r\n"
    with socket.create_connection(("127.0.0.1", site.port)) as connection:
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body[:-200])
        wait_for(lambda: "a.edgepkg" in left_over(site), "the file to arrive")
    wait_for(lambda: left_over(site) == [], "what was cut off to be removed")
    whole = upload(client, body=body.removesuffix(f"--{EDGE}--\r\n".encode()))
    assert whole.status == 400
    assert "cut off" in words(whole.text)


def test_what_a_killed_process_left_is_removed_a_day_later(client, site):
    old = site.folder.uploads / ".form-old"
    old.mkdir(parents=True)
    (old / "half.edgepkg").write_bytes(b"x")
    new = site.folder.uploads / ".form-new"
    new.mkdir()
    os.utime(old, (1, 1))
    upload(client, ("a", b"x"))
    assert left_over(site) == [".form-new"]


def test_hostile_forms_are_refused_and_never_an_error_of_ours(client, site):
    csrf = client.get("/").text.partition('name="csrf" value="')[2].partition('"')[0]
    good = body_of(part("csrf", csrf.encode()), part("name", b"n"), part("packages", b"x" * 50, "a"))
    draw = random.Random(5)
    bodies = [b"", b"--", good * 2, b"x" + good, good.replace(b"\r\n", b"\n"), good.replace(b"name=", b"n=")]
    bodies += [body_of(part("csrf", csrf.encode()), part("csrf", b"y")), body_of(part("csrf", b"\xff\xfe"))]
    bodies += [body_of(*[part(f"f{number}", b"") for number in range(200)])]
    bodies += [f"--{EDGE}\r\n".encode() + b"a" * 9000]
    for _ in range(60):
        changed = bytearray(good)
        for _ in range(draw.randint(1, 4)):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        bodies.append(bytes(changed[: draw.randint(1, len(changed))]))
    assert {upload(client, body=body).status for body in bodies} <= {400, 403, 413, 422}
    for kind in ("text/plain", "multipart/form-data", "multipart/form-data; boundary=", f"{TYPE}; x=y", ""):
        assert upload(client, body=good, kind=kind).status == 415
    assert left_over(site) == []


def test_parser_gives_the_same_parts_however_the_body_is_split():
    value = b"\r\n--xxboundary\r\r\n--\r\n" + bytes(range(256))
    body = body_of(part("csrf", b""), part("packages", value, "a\xe9.edgepkg"), part("note", b"--"))
    for step in (1, 2, 3, 7, 64, len(body)):
        parser, found = MultipartParser(TYPE), []
        for begin in range(0, len(body), step):
            for one in parser.feed(body[begin : begin + step]):
                if isinstance(one, PartBegin):
                    found.append([one.name, one.file_name, b""])
                else:
                    found[-1][2] += one
        assert parser.is_complete
        assert found == [["csrf", None, b""], ["packages", "a\xe9.edgepkg", value], ["note", None, b"--"]]


def test_parser_keeps_little_in_memory():
    parser = MultipartParser(TYPE)
    list(parser.feed(part("packages", b"", "a")[:-2]))
    for _ in range(100):
        assert sum(map(len, parser.feed(bytes(1000)))) > 900
    with pytest.raises(RequestError, match="too long"):
        list(MultipartParser(TYPE).feed(f"--{EDGE}\r\n".encode() + bytes(5000)))


@pytest.mark.parametrize(
    ("stated", "name"),
    [("/etc/passwd", "passwd"), ("C:\\a\\b.edgepkg", "b.edgepkg"), ("..", "package"), (".hidden", "hidden")],
)
def test_name_of_a_client_is_harmless(stated, name):
    assert clean_name(stated) == name
    assert len(clean_name("x" * 1000)) == 100
