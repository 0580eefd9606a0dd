"""Which mesh a run takes for a number of processes."""

from __future__ import annotations

import pytest

from mpishard.elastic.mesh_choice import MeshChoice, MeshSizes


@pytest.mark.parametrize(
    ("layouts", "ranks", "expected"),
    [
        ([{}], 5, (5, 1, 1)),
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}], 8, (2, 2, 2)),  # the first of those with the most ranks
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}], 7, (3, 2, 1)),
        ([{"tensor": 2, "pipeline": 2}, {"tensor": 2}, {}], 7, (7, 1, 1)),
        ([{"data": 2, "tensor": 2}, {"data": 3}, {"data": -1, "tensor": 4}], 3, (3, 1, 1)),
        ([{"tensor": 2}], 1, None),
        ([{}], 30, (16, 1, 1)),  # more data ranks than samples would idle
        ([{"data": 20}, {"data": 2}], 30, (2, 1, 1)),
        (lambda ranks: {"tensor": 2} if ranks % 2 == 0 else None, 7, (3, 2, 1)),
        (lambda ranks: {"pipeline": 4}, 11, (2, 1, 4)),
        (lambda ranks: None, 4, None),
    ],
)
def test_best(layouts, ranks, expected):
    assert MeshChoice(layouts, 1).best(ranks, batch_size=16) == expected


def test_no_mesh_is_smaller_than_the_limit():
    choice = MeshChoice([{"tensor": 4}, {"tensor": 2, "data": 1}], 3)
    assert choice.best(4, 16) == (1, 4, 1)
    assert choice.best(3, 16) is None
    assert MeshChoice(lambda ranks: {"data": min(ranks, 2)}, 3).best(8, 16) is None


@pytest.mark.parametrize("returned", [{"data": 5}, {"data": 3, "tensor": 2}, {"tensor": 5}])
def test_a_function_that_returns_more_than_there_is(returned):
    with pytest.raises(ValueError, match=r"layouts\(4\) returned .* at most 4 ranks, or None"):
        MeshChoice(lambda ranks: returned, 1).best(4, 4)


@pytest.mark.parametrize(
    ("layouts", "error", "match"),
    [
        ([], ValueError, "empty"),
        ("tensor=2", TypeError, "a list of mesh sizes, a function of a number of ranks, or"),
        ([{"tensr": 2}], TypeError, "sizes by axis"),
        ([(2, 2)], TypeError, "sizes by axis"),
        ([{"tensor": 0}], ValueError, "below 1"),
        ([{"tensor": 2.5}], TypeError, "tensor"),
    ],
)
def test_invalid_layouts(layouts, error, match):
    with pytest.raises(error, match=match):
        MeshChoice(layouts, 1)


def test_a_mesh_that_is_asked_for_must_be_listed():
    choice = MeshChoice([{"tensor": 2}, {"data": 3}], 1)
    assert [choice.refuse(MeshSizes(*sizes)) for sizes in ((4, 2, 1), (3, 1, 1))] == ["", ""]
    assert choice.refuse(MeshSizes(2, 1, 2)) == "data=2,pipeline=2 is none of the layouts of the run: tensor=2; data=3"
    assert choice.refuse(MeshSizes(2))
    assert not MeshChoice(lambda ranks: None, 1).refuse(MeshSizes(2, 1, 2))


def test_sizes_as_text():
    assert MeshSizes.parse("data=2, tensor=3") == MeshSizes(2, 3, 1)
    assert str(MeshSizes(2, 3, 1)) == "data=2,tensor=3"
    assert str(MeshSizes(1)) == "data=1"
    assert MeshSizes.parse(str(MeshSizes(1, 1, 4))).ranks == 4
    for text in ("", "2x2", "data=0", "data=2,data=3", "tensor", "node=3", "data=-1"):
        with pytest.raises(ValueError, match="give sizes such as"):
            MeshSizes.parse(text)


def test_meshes_that_the_model_cannot_have():
    def why_not(sizes):
        return "heads are odd" if sizes.tensor == 2 else ""

    listed, function = MeshChoice([{}, {"tensor": 2}], 1), MeshChoice(lambda ranks: {"tensor": 2}, 1)
    listed.check()
    listed.why_not = function.why_not = why_not
    with pytest.raises(ValueError, match="layouts has tensor=2, but heads are odd"):
        listed.check()
    function.check()
    with pytest.raises(ValueError, match=r"layouts\(4\) returned .*, but heads are odd"):
        function.best(4, 8)
    assert [choice.refuse(MeshSizes(1, 2)) for choice in (listed, function)] == ["heads are odd"] * 2
