"""Whatever bytes a reader gets, it accepts the original or raises one of our errors, in bounded memory."""

import io
import json
import tracemalloc
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekit_runtime.errors import ManifestError, PackageError, SignatureError
from edgekit_runtime.package.archive import read_package
from edgekit_runtime.package.golden import MAX_INPUT_BYTES
from edgekit_runtime.package.manifest import MANIFEST_NAME, SIGNATURE_NAME, parse_manifest
from edgekit_runtime.trust.dsse import PACKAGE_PREDICATE_TYPE

# Derandomized: the same examples each time, so that a failure is one of the change under test.
fuzz = settings(
    max_examples=2 * settings().max_examples,  # 200 in the long run
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def original(maker: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    data: bytes = maker.write(tmp_path_factory.mktemp("original") / "x.edgepkg")
    return data


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "x.edgepkg"


def reads(path: Path, data: bytes, maker: Any) -> bool:
    """Whether `data` reads as a package; checks that this takes little memory, whatever it claims to hold."""
    path.write_bytes(data)
    tracemalloc.start()
    try:
        read_package(path, maker.trust).close()
    except PackageError:
        return False
    else:
        return True
    finally:
        peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak_bytes < 1 << 20


@fuzz
@given(
    edits=st.lists(
        st.tuples(st.integers(0, 1 << 16), st.binary(min_size=1, max_size=9)), min_size=1, max_size=6
    )
)
def test_a_package_with_overwritten_bytes_is_refused(
    edits: list[tuple[int, bytes]], original: bytes, scratch: Path, maker: Any
) -> None:
    data = bytearray(original)
    for offset, replacement in edits:
        start = offset % len(original)
        data[start : start + len(replacement)] = replacement
    assert reads(scratch, bytes(data), maker) is (bytes(data) == original)


@fuzz
@given(
    cuts=st.lists(
        st.tuples(st.integers(0, 1 << 16), st.integers(0, 200), st.integers(0, 1 << 16)), max_size=4
    )
)
def test_a_package_with_moved_pieces_is_refused(
    cuts: list[tuple[int, int, int]], original: bytes, scratch: Path, maker: Any
) -> None:
    data = original
    for source, length, target in cuts:
        start, position = source % len(data), target % len(data)
        data = data[:position] + data[start : start + length] + data[position:]
    assert reads(scratch, data, maker) is (data == original)


@fuzz
@given(data=st.binary(max_size=400), tail=st.booleans())
def test_arbitrary_bytes_are_refused(
    data: bytes, tail: bool, original: bytes, scratch: Path, maker: Any
) -> None:
    assert not reads(scratch, data + original[-22:] if tail else data, maker)


@fuzz
@given(
    members=st.dictionaries(
        st.sampled_from([MANIFEST_NAME, SIGNATURE_NAME, "../x", "a/b"]) | st.text(min_size=1, max_size=8),
        st.binary(max_size=50),
        max_size=5,
    ),
    method=st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED]),
)
def test_an_arbitrary_zip_is_refused(
    members: dict[str, bytes], method: int, scratch: Path, maker: Any
) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(zipfile.ZipInfo(name), content, method)
    assert not reads(scratch, buffer.getvalue(), maker)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of each value within a JSON document."""
    if path:
        yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def encode(document: Any) -> bytes:
    return json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


DEFAULTS = [("repeat", None), ("every", 1)]  # optional fields of a manifest


@fuzz
@given(choice=st.integers(0, 1 << 16), value=json_values)
def test_a_manifest_with_any_value_in_any_place_is_refused_or_survives(
    choice: int, value: Any, maker: Any
) -> None:
    document = json.loads(maker.sampled_manifest().to_bytes())
    every_place = list(places(document))
    *parents, key = every_place[choice % len(every_place)]
    target = document
    for parent in parents:
        target = target[parent]
    target[key] = value
    try:
        encoded = encode(document)
    except UnicodeEncodeError:  # a lone surrogate, which no UTF-8 document can hold
        return
    try:
        manifest = parse_manifest(encoded)
    except ManifestError:
        return
    if (key, value) in DEFAULTS:
        del target[key]  # a writer leaves it out
    assert manifest.to_bytes() == encode(document)


sizes = st.integers(-1, 8) | st.integers(0, 1 << 64)


@fuzz
@given(
    shape=st.lists(sizes, max_size=3),
    repeat=st.lists(sizes, max_size=3) | st.sampled_from(["shape", None]),
    every=sizes,
)
def test_golden_fields_of_any_size_are_refused_or_decode_in_bounds(
    shape: list[int], repeat: list[int] | str | None, every: int, maker: Any
) -> None:
    document = json.loads(maker.sampled_manifest().to_bytes())
    (golden_input,), (golden_output,) = document["golden"]["inputs"], document["golden"]["outputs"]
    document["inputs"][0]["shape"] = document["outputs"][0]["shape"] = shape
    golden_input["shape"] = golden_output["shape"] = shape
    # "shape" is the worst: one code for all.
    golden_input["codes"]["repeat"] = shape if repeat == "shape" else repeat
    golden_output["every"] = every
    stored_bytes = {"golden/x.bin": 1, "golden/y.bin": 4}
    for artifact in document["artifacts"]:
        artifact["bytes"] = stored_bytes.get(artifact["path"], artifact["bytes"])
    try:
        golden = parse_manifest(encode(document)).golden
    except ManifestError:
        return
    (tensor,) = golden.inputs
    assert tensor.decoded_bytes <= MAX_INPUT_BYTES
    if tensor.decoded_bytes <= 1 << 20:  # larger ones only take time
        assert tensor.decode(bytes(1)).shape == tuple(shape)
    assert golden.outputs[0].decode(bytes(4)).size == 1


@fuzz
@given(value=json_values)
def test_an_arbitrary_document_is_no_manifest(value: Any) -> None:
    data = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    with pytest.raises(ManifestError):
        parse_manifest(data.encode(errors="replace"))


@fuzz
@given(choice=st.integers(0, 1 << 16), value=json_values)
def test_an_envelope_with_any_other_value_in_any_place_is_refused(
    choice: int, value: Any, maker: Any
) -> None:
    payload = b'{"a":1}'
    document = json.loads(maker.signer(payload))
    every_place = list(places(document))
    *parents, key = every_place[choice % len(every_place)]
    target = document
    for parent in parents:
        target = target[parent]
    target[key] = value
    data = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    with pytest.raises(SignatureError):
        maker.trust.verify(data.encode(errors="replace"), PACKAGE_PREDICATE_TYPE, "here")
