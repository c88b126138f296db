"""Labels survive the way into a trace and out of it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from z3trace.engine import labels
from z3trace.engine.labels import Label, format_label, parse_label

values = st.dictionaries(
    st.sampled_from(sorted(labels.KEYS)), st.one_of(st.integers(0, 1 << 60), st.text(max_size=40))
).map(
    lambda drawn: {
        key: value
        if isinstance(value, int) == (key in labels.INTEGER_KEYS)
        else (7 if key in labels.INTEGER_KEYS else "x")
        for key, value in drawn.items()
    }
)


@given(st.sampled_from(sorted(labels.VERBS)), values)
def test_round_trip(verb: str, given_values: dict[str, int | str]) -> None:
    text = format_label(verb, **given_values)
    encodable = {
        k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v for k, v in given_values.items()
    }
    assert parse_label(text) == Label(verb, encodable)
    # Kineto of some versions writes names into JSON as they are.
    assert json.loads(f'"{text}"') == text
    assert text.isascii() and text.isprintable()


@given(st.text(max_size=60))
def test_other_names_are_no_labels(name: str) -> None:
    assert parse_label(name) is None or name.startswith("z3::")


def test_the_model_itself_is_written_so_that_it_is_seen() -> None:
    text = format_label("gather", unit="", reason="demand", bytes=8)
    assert text == "z3::gather unit=(root) reason=demand bytes=8"
    label = parse_label(text)
    assert label is not None
    assert label.text("unit") == "" and label.integer("bytes") == 8
    assert label.text("bytes") is None and label.integer("unit") is None and label.integer("seq") is None


def test_a_module_that_is_named_like_the_root_is_not_the_root() -> None:
    label = parse_label(format_label("gather", unit="(root)"))
    assert label is not None and label.text("unit") == "(root)"


@pytest.mark.parametrize(
    "damaged",
    [
        "z3::gather unit",
        "z3::gather  unit=a",
        "z3::dance unit=a",
        "z3::gather colour=red",
        "z3::gather bytes=many",
        "z3:gather",
        "",
    ],
)
def test_damaged_labels_are_refused(damaged: str) -> None:
    assert parse_label(damaged) is None


def test_what_the_grammar_does_not_have_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="verb"):
        format_label("dance")
    with pytest.raises(ValueError, match="key"):
        format_label("gather", colour="red")
    with pytest.raises(ValueError, match="bytes"):
        format_label("gather", bytes="8")
    with pytest.raises(ValueError, match="unit"):
        format_label("gather", unit=8)
    with pytest.raises(ValueError, match="bytes"):
        format_label("gather", bytes=True)
