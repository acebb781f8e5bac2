"""Stacks of one piece of software: how fits of published tables bind what they share."""

import pytest

from benchmarks.accuracy.fit import FAMILIES, bind, fitted_kinds
from benchmarks.accuracy.spec import GROUPS, Group


def test_a_member_has_its_familys_constant_times_its_own_deviation() -> None:
    stacks = GROUPS[0].stack_records()
    values = {"megatron-a100.traffic": 0.5, "selene.traffic": 1.2, "megatron-a100.tier_share": 0.9}
    values |= {"vtrain.tier_share": 1.3, "vtrain.step_s": 0.7}
    _, bound = bind(values, {}, stacks)
    assert bound["selene"].traffic == pytest.approx(0.6) and bound["vtrain"].traffic == bound["jeanzay"].traffic == 0.5
    assert bound["selene-2022"].traffic == bound["selene"].traffic  # the same stack at another time
    assert bound["vtrain"].tier_share == 1.0 and bound["vtrain"].step_s == 0.7  # a share is at most 1
    assert bound["llm-foundry"] == stacks["llm-foundry"]


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.name)
def test_every_fitted_constant_has_an_owner(group: Group) -> None:
    stacks = group.stack_records()
    kinds = fitted_kinds(group.free, stacks)
    owners = {one.of for one in group.free}
    assert owners == {*kinds, *(owners & stacks.keys()), *(owners & FAMILIES.keys())} and kinds
    for family in owners & FAMILIES.keys():
        assert set(FAMILIES[family]) <= stacks.keys()
    names = [f"{one.of}.{constant.name}" for one in group.free for constant in one.constants]
    assert len(names) == len(set(names))
