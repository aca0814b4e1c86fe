"""What plan() takes, refuses and tells."""

import json
import pickle

import numpy
import pytest
import torch
import torch.utils._pytree as pytree
from blockcp._library import check_torch

import blockcp

IDS = [1, 1, 1, 2, 2, 0, 0, 7]


def same(**documents):
    return blockcp.plan(world_size=2, rank=1, **documents)


def test_four_ways_to_say_the_same_documents():
    want = same(lengths=[3, 2], rows=8).fingerprint
    positions = torch.tensor([0, 1, 2, 0, 1, 5, 5, 5])
    padding = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1], dtype=torch.bool)
    for documents in (
        {"doc_ids": [5, 5, 5, 9, 9, 0, 0, 0]},
        {"lengths": [[3, 2]], "rows": 8},
        {"lengths": torch.tensor([[3, 2, 0]]), "rows": 8},
        {"cu_seqlens": [0, 3, 5], "rows": 8},
        {"position_ids": positions, "padding_mask": padding},
        {"position_ids": positions[None], "padding_mask": padding[None]},
    ):
        assert same(**documents).fingerprint == want
    assert same(lengths=[2, 3], rows=8).fingerprint != want


def test_nested_lengths_are_sequences():
    plan = blockcp.plan(lengths=[[3, 1], [], [2]], world_size=1, rank=0)
    assert (plan.batch, plan.rows, plan.documents, plan.real_rows) == (3, 4, 3, 6)


@pytest.mark.parametrize(
    "arguments,words",
    [
        ({}, "none was given"),
        ({"doc_ids": IDS, "lengths": [8]}, "doc_ids and lengths"),
        ({"doc_ids": IDS, "rows": 9}, "rows must come with lengths"),
        ({"doc_ids": IDS, "padding_mask": IDS}, "padding_mask must come with position_ids"),
        ({"doc_ids": [1, 2, 1]}, "row 2"),
        ({"doc_ids": [1, 0, 1]}, "row 2"),
        ({"lengths": [4, -2]}, "-2"),
        ({"lengths": [4, 8], "rows": 8}, "12"),
        ({"cu_seqlens": [0, 4, 3]}, "3"),
        ({"cu_seqlens": [1, 4]}, "1"),
        ({"position_ids": [0, -1]}, "-1"),
        ({"position_ids": [0, 1], "padding_mask": [1]}, "shape"),
        ({"lengths": [8], "layout": "balanced"}, "does not exist yet"),
        ({"lengths": [8], "layout": "zigzag"}, "zigzag"),
        ({"lengths": [8], "exchange": "teleport"}, "teleport"),
        ({"lengths": [8], "exchange": {"nope": "ring"}}, "nope"),
        ({"lengths": [8], "masks": {}}, "at least one"),
        ({"lengths": [8], "masks": {"m": 3}}, "blockcp.Mask"),
        ({"lengths": [8], "masks": {"m": blockcp.Mask(spans=[1, 2])}}, "spans"),
        ({"lengths": [3], "masks": {"m": blockcp.Mask(spans=[1, 0, 1])}}, "span"),
        ({"lengths": [3], "masks": {"m": blockcp.Mask(spans=[1, -4, 0])}}, "-4"),
        ({"lengths": [8], "world_size": 4, "rank": 4}, "4"),
        ({"lengths": [8], "world_size": 4}, "rank"),
        ({"lengths": [8], "world_size": 0, "rank": 0}, "0"),
        ({"lengths": [8], "world_size": 2, "rank": 0, "group": "g"}, "not both"),
    ],
)
def test_refusals_say_what_is_wrong(arguments, words):
    with pytest.raises(ValueError) as caught:
        blockcp.plan(**arguments)
    message = str(caught.value)
    assert words in message and message.startswith(("[plan]", "[mask]")) and "\n" not in message


def test_unknown_keywords_are_type_errors():
    with pytest.raises(TypeError):
        blockcp.plan(lengths=[8], doc_id=IDS)
    with pytest.raises(ValueError, match="span_window"):
        blockcp.Mask(span_window="right")


def test_local_views():
    plan = same(doc_ids=IDS)
    assert plan.doc_ids.tolist() == [[2, 0, 0, 3]] and plan.position_ids.tolist() == [[1, 0, 0, 0]]
    assert plan.global_doc_ids.tolist() == [[1, 1, 1, 2, 2, 0, 0, 3]]
    assert plan.global_position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert plan.visible().int().sum(-1).tolist() == [[2, 0, 0, 1]]
    assert (plan.world_size, plan.rank, plan.local_rows, plan.documents, plan.real_rows) == (2, 1, 4, 3, 6)


def test_choices_and_explanations():
    masks = {"full": blockcp.Mask(), "local": blockcp.Mask(window=2)}
    plan = blockcp.plan(lengths=[13, 3], world_size=4, rank=0, masks=masks, exchange={"full": "ring"})
    assert plan.choice["full"].path == "ring" and plan.choice["local"].path in ("halo", "a2a")
    assert plan.choice["local"].reason in plan.explain()
    assert json.loads(plan.to_json(q_heads=4, kv_heads=1, head_dim=64, dtype=torch.bfloat16))["world"] == 4
    assert "ring" in repr(plan)
    with pytest.raises(ValueError, match="declared"):
        plan.kv()
    with pytest.raises(ValueError, match="masks="):
        plan.kv("other")
    with pytest.raises(ValueError, match="dtype"):
        plan.explain(dtype=torch.int8)


def test_an_explicit_path_that_cannot_run_is_refused_with_the_reason():
    with pytest.raises(ValueError, match="halo"):
        blockcp.plan(lengths=[16], world_size=4, rank=0, exchange="halo")


def test_needed_splits_are_the_split_matrix():
    all_ranks = [blockcp.plan(lengths=[10, 6], world_size=4, rank=rank) for rank in range(4)]
    matrix = all_ranks[0].split_matrix()
    for rank, plan in enumerate(all_ranks):
        splits = plan.needed_splits()
        assert splits.in_splits == matrix[rank] and splits.out_splits == [row[rank] for row in matrix]
        assert len(splits.send_index) == sum(splits.in_splits)
        assert torch.equal(splits.send_index, all_ranks[0].needed_splits(rank=rank).send_index)


def test_pickling_pickles_the_inputs():
    spans = torch.tensor([0, 1, 1, 0, 0, 0, 0, 0, 0])
    masks = {"m": blockcp.Mask(window=3, spans=spans)}
    ids = torch.tensor([1, 1, 1, 1, 1, 1, 2, 2, 2])
    plan = blockcp.plan(doc_ids=ids, world_size=2, rank=1, masks=masks, pad=True, exchange="ring")
    ids.fill_(0)
    again = pickle.loads(pickle.dumps(plan))
    assert again.fingerprint == plan.fingerprint and again.choice == plan.choice
    assert (again.rank, again.rows, again.given_rows) == (1, 10, 9)
    assert again.handle.item() != plan.handle.item()


def test_the_words_of_a_plan():
    assert repr(blockcp.plan(lengths=[1])) == "Plan(rank 0 of 1, 1 document in 1 x 1 row, full: halo)"
    assert repr(blockcp.plan(lengths=[1, 2])) == "Plan(rank 0 of 1, 2 documents in 1 x 3 rows, full: halo)"


def test_a_plan_is_a_leaf():
    plan = blockcp.plan(lengths=[3])
    assert pytree.tree_leaves({"plan": plan, "x": 1}) == [plan, 1]


def test_a_handle_that_is_no_plan():
    q = torch.zeros(1, 1, 3, 2)
    for handle, words in ((torch.tensor(10**9), "not among"), (torch.zeros(2), "handle")):
        with pytest.raises(ValueError, match=words):
            torch.ops.blockcp.attention(q, q, q, handle)


def test_torch_of_another_release_is_refused():
    check_torch("2.13.0", "2.13.1+cpu")
    with pytest.raises(ImportError, match=r"built for, 2\.13, but this is torch 2\.14\.0"):
        check_torch("2.13.0", "2.14.0+cu130")


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"world_size": 2**32 + 4, "rank": 0}, "4294967300"),
        ({"world_size": 4, "rank": 2**32}, "4294967296"),
        ({"rows": -4}, "-4"),
        ({"rows": 2**40}, str(2**40)),
        ({"lengths": "abc"}, "lengths"),
        ({"lengths": [10**20]}, "lengths"),
        ({"masks": "full"}, "'full'"),
        ({"masks": [blockcp.Mask()]}, "Mask"),
        ({"exchange": None}, "None"),
        ({"exchange": ["ring"]}, "ring"),
        ({"pad": "no"}, "'no'"),
        ({"pad": torch.ones(3, 3)}, "shape [3, 3]"),
        ({"lengths": [[1, 2], 3]}, "lengths[1] is 3"),
        ({"lengths": [[[1]]]}, "lengths[0] is [[1]]"),
        ({"lengths": torch.ones(1, 1, 1, dtype=torch.int64)}, "[1, 1, 1]"),
        ({"lengths": [True, True]}, "True"),
        ({"lengths": [3, True]}, "lengths[1] must be an integer, but it is True"),
        ({"lengths": torch.ones(2, dtype=torch.bool)}, "True or False"),
        ({"lengths": [[3], [2**70]]}, f"lengths[1][0] must fit into 64 bits, but it is {2**70}"),
        ({"lengths": [10**5000]}, "lengths[0] must fit into 64 bits, but it is int that cannot be printed"),
        ({"lengths": [1.5]}, "lengths[0] must be an integer, but it is 1.5"),
        ({"lengths": ["a"]}, "'a'"),
        ({"lengths": {3: 5}}, "{3: 5}"),
        ({"rows": True}, "True"),
        ({"world_size": 4, "rank": False}, "False"),
        ({"world_size": 4, "rank": torch.tensor([1, 2])}, "shape [2]"),
        ({"exchange": {"full": 3}}, "but it is 3"),
        ({"exchange": {"full": "ri\nng"}}, "ri\\nng"),
        ({"exchange": {3: "ring"}}, "[3]"),
        ({"layout": torch.ones(2, 2)}, "shape [2, 2]"),
        ({"masks": {"a\nb": blockcp.Mask()}}, "a\\nb"),
        ({"masks": {"\ud800": blockcp.Mask()}}, "ud800"),
        ({"mesh": 3}, "but it is 3"),
        ({"group": 3}, "but it is 3"),
        ({"group": "nobody"}, "but it is 'nobody'"),
    ],
)
def test_what_cannot_be_meant_is_one_clear_line(arguments, named):
    with pytest.raises(ValueError) as refused:
        blockcp.plan(**{"lengths": [8], **arguments})
    assert named in str(refused.value) and str(refused.value).startswith("[plan]") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"doc_ids": torch.tensor([1, 1]).to_sparse()}, "sparse"),
        ({"doc_ids": torch.zeros(2, dtype=torch.int64, device="meta")}, "meta"),
        ({"doc_ids": torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)}, "nested"),
        (
            {"doc_ids": torch.tensor([5, 2**63 + 5], dtype=torch.uint64)},
            f"doc_ids[1] must be less than 2^63, but it is {2**63 + 5}",
        ),
        ({"doc_ids": [[1, 2**63 + 3]]}, str(2**63 + 3)),
        ({"doc_ids": [[1, 1], [2]]}, "doc_ids must be of parts alike"),
        ({"doc_ids": [1, None]}, "doc_ids[1]"),
        ({"doc_ids": 3}, "[]"),
        ({"doc_ids": torch.tensor([1.5])}, "first value 1.5"),
        ({"doc_ids": numpy.array(["a"])}, "'a'"),
        ({"cu_seqlens": [0, 2**40]}, f"cu_seqlens[1] = {2**40}"),
        ({"cu_seqlens": [False, True]}, "True or False"),
        ({"cu_seqlens": [0, 3, 8], "rows": 7}, "the last is 8 and rows = 7"),
        ({"position_ids": [0, 1, 2, 3], "padding_mask": [[0, 0], [0, 0]]}, "[2, 2]"),
        ({"position_ids": [0, 1], "padding_mask": "ab"}, "'ab'"),
    ],
)
def test_numbers_that_cannot_be_meant_are_named_as_they_were_given(arguments, named):
    with pytest.raises(ValueError) as refused:
        blockcp.plan(**arguments)
    assert named in str(refused.value) and str(refused.value).startswith("[plan]") and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "arguments, named",
    [
        ({"causal": "no"}, "'no'"),
        ({"span_window": ["left"]}, "['left']"),
        ({"spans": "abc"}, "spans must be integers, but it is 'abc'"),
        ({"spans": [[1, 2], [3]]}, "spans must be of parts alike"),
        ({"spans": torch.zeros(2, device="meta", dtype=torch.int64)}, "meta"),
        ({"window": 2**70}, str(2**70)),
        ({"window": (2**63, 0)}, str(2**63)),
        ({"window": (1, 2, 3)}, "(1, 2, 3)"),
        ({"window": torch.ones(40, 40)}, "shape [40, 40]"),
        ({"window": True}, "True"),
    ],
)
def test_masks_that_cannot_be_meant(arguments, named):
    with pytest.raises(ValueError) as refused:
        blockcp.Mask(**arguments)
    assert named in str(refused.value) and str(refused.value).startswith("[mask]") and "\n" not in str(refused.value)


def test_methods_of_a_plan_refuse_in_the_same_way():
    plan = blockcp.plan(lengths=[8], world_size=2, rank=0)
    for call, named in (
        (lambda: plan.kv(3), "3"),
        (lambda: plan.visible(["full"]), "['full']"),
        (lambda: plan.kv(batch="0"), "'0'"),
        (lambda: plan.kv(batch=1), "in [0, 1), but it is 1"),
        (lambda: plan.needed_splits(rank=2), "in [0, 2), but it is 2"),
        (lambda: plan.explain(dtype=[]), "[]"),
        (lambda: plan.explain(q_heads=torch.ones(2, 2)), "shape [2, 2]"),
    ):
        with pytest.raises(ValueError) as refused:
            call()
        assert named in str(refused.value) and str(refused.value).startswith("[plan]"), refused.value


def test_lists_of_numbers_of_any_kind():
    want = same(lengths=[3, 5]).fingerprint
    for lengths in (
        list(torch.tensor([3, 5])),
        [torch.tensor(3), 5],
        [numpy.int32(3), numpy.array(5)],
        [torch.tensor([3, 5])],
        (range(3, 6, 2),),
        numpy.array([5, 3])[::-1],
        numpy.array([3, 5], ">i4"),
        torch.tensor([3, 5], dtype=torch.uint64),
    ):
        assert same(lengths=lengths).fingerprint == want
    assert same(cu_seqlens=list(torch.tensor([0, 3, 8]))).fingerprint == want
    assert same(doc_ids=[torch.tensor([1, 1]), torch.tensor([4, 4])]).batch == 2
    ragged = blockcp.plan(lengths=[torch.tensor([3, 1]), torch.tensor([4])])
    assert (ragged.batch, ragged.documents) == (2, 3)


def test_a_window_of_any_size_is_explained_as_it_was_given():
    plan = blockcp.plan(lengths=[8], masks=blockcp.Mask(window=(2**63 - 1, 0)))
    assert f"window {2**63}" in plan.explain()


def test_later_changes_of_the_lists_do_not_reach_the_plan():
    lengths = [[3, 5], [8]]
    plan = blockcp.plan(lengths=lengths)
    lengths[0][0] = 4
    assert pickle.loads(pickle.dumps(plan)).fingerprint == plan.fingerprint


def test_explain_needs_a_shape_that_exists():
    for shape in ({"head_dim": -1}, {"q_heads": 0}, {"q_heads": 3, "kv_heads": 2}):
        with pytest.raises(ValueError, match=r"heads|head_dim"):
            blockcp.plan(lengths=[8]).explain(**shape)
