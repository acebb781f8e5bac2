"""Fingerprints depend on facts, not on order, and refuse what has no canonical form."""

import math

import pytest

from planner.planfile.fingerprint import cluster_fingerprint, fingerprint, short_fingerprint
from tests.plans import cluster_document, parse_cluster, tiny_cluster


def test_form_and_stability():
    text = fingerprint({"a": [1, 2.5, None, True], "b": "x"})
    assert text == "sha256:eb68bad33141c1838809b2db65164deeb826e79de5b49b20fa63966595e28b01"
    assert short_fingerprint(text) == "eb68bad33141"


def test_order_of_keys_and_kind_of_sequence_do_not_matter():
    assert fingerprint({"a": 1, "b": (1, 2)}) == fingerprint({"b": [1, 2], "a": 1})


def test_values_matter():
    values = [1, 1.0, "1", True, None, [1], {"1": 1}, [], {}, ""]
    assert len({fingerprint(value) for value in values}) == len(values)


@pytest.mark.parametrize("value", [{1: 2}, {"a": {None: 1}}, [{3: 4}], {1, 2}, object(), b"x"])
def test_no_canonical_form(value):
    with pytest.raises(TypeError):
        fingerprint(value)


def test_not_a_number():
    with pytest.raises(ValueError):
        fingerprint([math.nan])


def test_cluster_fingerprint_ignores_prices_and_sees_links():
    cluster = tiny_cluster()
    document = cluster_document()
    document["group"][0]["price_per_device_hour"] = 99.0
    assert cluster_fingerprint(parse_cluster(document, {})) == cluster_fingerprint(cluster)
    document["link"][0]["latency_s"] = 1e-3
    assert cluster_fingerprint(parse_cluster(document, {})) != cluster_fingerprint(cluster)
