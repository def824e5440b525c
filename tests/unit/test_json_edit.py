"""Editing one key of JSON text: examples of every layout, and properties over generated documents."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vllm_fleet.errors import FleetError, RefusedError, UsageError
from vllm_fleet.json_edit import apply, set_key

KEY = "text_config.dtype"
BOM = b"\xef\xbb\xbf"


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        # added, in the layout of its neighbours
        ('{"text_config":{"a":1}}', '{"text_config":{"dtype":"fp8","a":1}}', "added"),
        ('{"text_config": {"a": 1}}', '{"text_config": {"dtype": "fp8", "a": 1}}', "added"),
        ('{"text_config": { "a" : 1 } }', '{"text_config": { "dtype" : "fp8", "a" : 1 } }', "added"),
        ('{"text_config": {"a": 1 , "b": 2}}', '{"text_config": {"dtype": "fp8" , "a": 1 , "b": 2}}', "added"),
        (
            '{\n  "text_config": {\n    "a": 1\n  }\n}\n',
            '{\n  "text_config": {\n    "dtype": "fp8",\n    "a": 1\n  }\n}\n',
            "added",
        ),
        (
            '{\r\n\t"text_config": {\r\n\t\t"a": 1\r\n\t}\r\n}',
            '{\r\n\t"text_config": {\r\n\t\t"dtype": "fp8",\r\n\t\t"a": 1\r\n\t}\r\n}',
            "added",
        ),
        # empty objects take the layout of their parent
        ('{"text_config":{}}', '{"text_config":{"dtype":"fp8"}}', "added"),
        ('{"text_config": { }}', '{"text_config": { "dtype": "fp8" }}', "added"),
        ('{\n  "text_config": {}\n}', '{\n  "text_config": {\n    "dtype": "fp8"\n  }\n}', "added"),
        ('{\n  "text_config": {\n  }\n}', '{\n  "text_config": {\n    "dtype": "fp8"\n  }\n}', "added"),
        ('{\r\n "text_config": {}\r\n}', '{\r\n "text_config": {\r\n  "dtype": "fp8"\r\n }\r\n}', "added"),
        # a stale copy, wherever it stands
        ('{"dtype": "fp8", "text_config": {"a": 1}}', '{"text_config": {"dtype": "fp8", "a": 1}}', "moved"),
        ('{"text_config": {"a": 1}, "dtype": "fp8"}', '{"text_config": {"dtype": "fp8", "a": 1}}', "moved"),
        (
            '{"text_config": {"a": 1}, "dtype": "fp8", "z": 1}',
            '{"text_config": {"dtype": "fp8", "a": 1}, "z": 1}',
            "moved",
        ),
        (
            '{\n  "z": 1,\n  "text_config": {},\n  "dtype": "fp8"\n}',
            '{\n  "z": 1,\n  "text_config": {\n    "dtype": "fp8"\n  }\n}',
            "moved",
        ),
        (
            '{"text_config": {"dtype": "fp8"}, "dtype": "fp8"}',
            '{"text_config": {"dtype": "fp8"}}',
            "stale_copy_removed",
        ),
        # names that only look like the object
        (
            '{"a": "\\"text_config\\": {", "text_config": {}}',
            '{"a": "\\"text_config\\": {", "text_config": {"dtype": "fp8"}}',
            "added",
        ),
        (
            '{"a": {"text_config": {}}, "text_config": {}}',
            '{"a": {"text_config": {}}, "text_config": {"dtype": "fp8"}}',
            "added",
        ),
        ('{"text\\u005fconfig": {}}', '{"text\\u005fconfig": {"dtype": "fp8"}}', "added"),
        ('{"text_config": {"\\u0064type": "fp8"}}', '{"text_config": {"\\u0064type": "fp8"}}', "already_set"),
        ('{"text_config": {"dtype": "\\u0066p8"}}', '{"text_config": {"dtype": "\\u0066p8"}}', "already_set"),
        # the rest of the document is not judged
        (
            '{"a": 1, "a": 2, "n": 1.50e+01, "i": NaN, "text_config": {}}',
            '{"a": 1, "a": 2, "n": 1.50e+01, "i": NaN, "text_config": {"dtype": "fp8"}}',
            "added",
        ),
    ],
)
def test_edits(before, after, reason):
    edit = set_key(before.encode(), KEY, "fp8")
    assert (edit.raw.decode(), edit.reason) == (after, reason)
    assert edit.changed == (before != after)
    again = set_key(edit.raw, KEY, "fp8")
    assert (again.raw, again.reason) == (edit.raw, "already_set")


@pytest.mark.parametrize(
    ("document", "reason"),
    [
        ("", "bad_json"),
        ("{", "bad_json"),
        ('{"text_config": {},}', "bad_json"),
        ('{"text_config": {}} x', "bad_json"),
        ("[" * 100_000, "bad_json"),
        ("[1]", "not_an_object"),
        ('"text_config"', "not_an_object"),
        ("{}", "parent_missing"),
        ('{"dtype": "fp8"}', "parent_missing"),
        ('{"text_config": null}', "parent_not_an_object"),
        ('{"text_config": [{"dtype": "fp8"}]}', "parent_not_an_object"),
        ('{"text_config": {}, "text_config": {}}', "duplicate_key"),
        ('{"text_config": {}, "text\\u005fconfig": {}}', "duplicate_key"),
        ('{"text_config": {"dtype": "fp8", "dtype": "fp8"}}', "duplicate_key"),
        ('{"text_config": {}, "dtype": "fp8", "dtype": "fp8"}', "duplicate_key"),
        ('{"text_config": {"dtype": "bf16"}}', "value_differs"),
        ('{"text_config": {"dtype": null}}', "value_differs"),
        ('{"text_config": {"dtype": {"fp8": 1}}}', "value_differs"),
        ('{"text_config": {}, "dtype": "bf16"}', "stale_copy_differs"),
        ('{"text_config": {"dtype": "fp8"}, "dtype": null}', "stale_copy_differs"),
    ],
)
def test_refusals(document, reason):
    with pytest.raises(RefusedError) as error:
        set_key(document.encode(), KEY, "fp8")
    assert error.value.reason == reason


@pytest.mark.parametrize("raw", ['{"text_config": {}}'.encode("utf-16"), b'{"text_config": {"a": "\xff"}}'])
def test_other_encodings_are_refused(raw):
    with pytest.raises(RefusedError) as error:
        set_key(raw, KEY, "fp8")
    assert error.value.reason == "bad_json"


def test_byte_order_mark_stays():
    assert set_key(BOM + b'{"text_config":{}}', KEY, "fp8").raw == BOM + b'{"text_config":{"dtype":"fp8"}}'


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('{"text_config": {"a":1,"dtype" : null }}', '{"text_config": {"a":1,"dtype" : "fp8" }}', "replaced"),
        ('{"dtype": 1, "text_config": {"dtype": [1, 2]}}', '{"text_config": {"dtype": "fp8"}}', "replaced"),
        ('{"text_config": {"dtype": "fp8"}, "dtype": 1}', '{"text_config": {"dtype": "fp8"}}', "stale_copy_removed"),
        ('{"text_config": {}, "dtype": 1}', '{"text_config": {"dtype": "fp8"}}', "moved"),
    ],
)
def test_force(before, after, reason):
    edit = set_key(before.encode(), KEY, "fp8", force=True)
    assert (edit.raw.decode(), edit.reason) == (after, reason)


@pytest.mark.parametrize(
    ("before", "key", "after"),
    [
        ("{}", "dtype", '{"dtype": "fp8"}'),
        ("{\n}\n", "dtype", '{\n  "dtype": "fp8"\n}\n'),
        ('{"a":{"b":{"c":1}}}', "a.b.dtype", '{"a":{"b":{"dtype":"fp8","c":1}}}'),
        ('{"a":{"b":{}},"dtype":"fp8"}', "a.b.dtype", '{"a":{"b":{"dtype":"fp8"}}}'),
        ('{"a": {"b": 1}}', "a.a", '{"a": {"a": "fp8", "b": 1}}'),
        ('{\n "a": {\n  "b": {}\n }\n}', "a.b.c", '{\n "a": {\n  "b": {\n   "c": "fp8"\n  }\n }\n}'),
    ],
)
def test_other_depths(before, key, after):
    assert set_key(before.encode(), key, "fp8").raw.decode() == after


@pytest.mark.parametrize(
    ("found", "same"), [("1", True), ("1.0", False), ("true", False), ('"1"', False), ("1e0", False)]
)
def test_values_compare_by_type(found, same):
    raw = f'{{"a": {found}}}'.encode()
    if same:
        assert not set_key(raw, "a", 1).changed
    else:
        with pytest.raises(RefusedError):
            set_key(raw, "a", 1)


@pytest.mark.parametrize(
    ("key", "value"), [("", 1), (".a", 1), ("a..b", 1), ("a.", 1), ("a", {1}), ("a", float("nan"))]
)
def test_bad_arguments(key, value):
    with pytest.raises(UsageError):
        set_key(b"{}", key, value)


# --- properties -----------------------------------------------------------------------------------------------------

KEYS = st.sampled_from(["text_config", "dtype", "a", "b", "\u00e4", 'q"uote', "back\\slash", "{", "}", ",", ""])
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from(["fp8", "bf16", "text_config", '"text_config": {', "\u2028", "\U0001f600", "\ud800", ""])
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
)
SPACE = st.sampled_from(["", " ", "\n", "\r\n  ", "\t"])


@st.composite
def texts(draw, depth=3, force_object=False):
    """JSON text with odd spacing, escapes, number spellings and repeated keys."""
    space = lambda: draw(SPACE)  # noqa: E731
    kind = "object" if force_object else draw(st.sampled_from(["object", "array", "scalar"] if depth else ["scalar"]))
    if kind == "scalar":
        value = draw(SCALARS)
        text = json.dumps(value, ensure_ascii=draw(st.booleans()) or "\ud800" in str(value))
        if isinstance(value, int) and not isinstance(value, bool) and draw(st.booleans()):
            text += draw(st.sampled_from([".0", "e2", "E-05", ".500"]))
        return text
    items = draw(st.lists(st.integers(), max_size=4))
    pieces = []
    for _ in items:
        value = draw(texts(depth=depth - 1))
        if kind == "object":
            name = json.dumps(draw(KEYS), ensure_ascii=draw(st.booleans()))
            if draw(st.booleans()):
                name = name.replace("_", "\\u005f")
            value = name + space() + ":" + space() + value
        pieces.append(space() + value + space())
    inside = ",".join(pieces) or space()
    return ("{" + inside + "}") if kind == "object" else ("[" + inside + "]")


@st.composite
def documents(draw):
    """A document and a wanted value; nested key and top-level copy are often there, with that value or another."""
    wanted = draw(st.sampled_from(["fp8", None, 1, 1.5, {"x": [1]}]))
    if draw(st.integers(0, 5)) == 0:
        text = draw(texts(force_object=True))
    else:
        mine = json.dumps(wanted)
        found = st.sampled_from([None, None, mine, mine, '"bf16"'])
        others = st.lists(KEYS.filter(lambda key: key not in ("text_config", "dtype")), unique=True, max_size=3)

        def an_object(named):
            members = [(key, draw(texts(depth=2))) for key in draw(others)]
            members += [(key, value) for key, value in named if value is not None]
            members = draw(st.permutations(members))
            pieces = []
            for key, value in members:
                name = json.dumps(key).replace("_", draw(st.sampled_from(["_", "\\u005f"])))
                pieces.append(draw(SPACE) + name + draw(SPACE) + ":" + draw(SPACE) + value + draw(SPACE))
            return "{" + (",".join(pieces) or draw(SPACE)) + "}"

        text = an_object([("text_config", an_object([("dtype", draw(found))])), ("dtype", draw(found))])
    raw = (draw(SPACE) + text + draw(SPACE)).encode("utf-8")
    return (BOM if draw(st.booleans()) else b"") + raw, wanted


def pairs(raw: bytes):
    """Parse with order, duplicates and spelling kept, independently of the code under test."""
    keep = {"parse_int": lambda text: ("#", text), "parse_float": lambda text: ("#", text)}
    return json.loads(raw.decode("utf-8-sig"), object_pairs_hook=lambda found: ("object", found), **keep)


@settings(max_examples=300, deadline=None)
@given(documents(), st.booleans())
def test_the_result_is_the_intended_document_and_can_be_undone(document, force):
    raw, value = document
    try:
        edit = set_key(raw, KEY, value, force)
    except RefusedError as error:
        assert error.reason != "bad_json"
        return
    top = [pair for pair in pairs(raw)[1] if pair[0] != "dtype"]
    found = pairs(edit.raw)[1]
    assert [pair for pair in found if pair[0] != "text_config"] == [pair for pair in top if pair[0] != "text_config"]
    assert [pair[0] for pair in found] == [pair[0] for pair in top]
    (old,) = [pair[1][1] for pair in top if pair[0] == "text_config"]
    (new,) = [pair[1][1] for pair in found if pair[0] == "text_config"]
    assert [pair for pair in new if pair[0] != "dtype"] == [pair for pair in old if pair[0] != "dtype"]
    parsed = json.loads(edit.raw.decode("utf-8-sig"))
    assert json.dumps(parsed["text_config"]["dtype"]) == json.dumps(value)
    # undoing the edit gives the original bytes, computed from the new text alone
    bom = BOM if raw.startswith(BOM) else b""
    text, shift, back = edit.raw[len(bom) :].decode("utf-8"), 0, []
    for splice in edit.splices:
        back.append(type(splice)(splice.start + shift, splice.new, splice.old))
        shift += len(splice.new) - len(splice.old)
        start = back[-1].start
        assert text[start : start + len(splice.new)] == splice.new
    assert bom + apply(text, back).encode("utf-8") == raw
    if edit.reason == "added":  # a pure insertion: nothing that was there has gone
        (splice,) = edit.splices
        assert splice.old == ""
    assert set_key(edit.raw, KEY, value).raw == edit.raw


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet='{}[]",:\\ \n1atext_config', max_size=40).map(str.encode))
def test_garbage_is_refused_and_never_a_traceback(raw):
    try:
        set_key(raw, KEY, "fp8")
    except FleetError as error:
        assert error.reason
