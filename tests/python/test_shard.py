"""From whole batches to a rank's rows, and back."""

import pytest
import torch
from probe import ids_of
from ranks import run_ranks

import blockcp

pytestmark = pytest.mark.dist


def plans(world, **documents):
    return [blockcp.plan(world_size=world, rank=rank, pad=True, **documents) for rank in range(world)]


def whole(parts, name, dim=1):
    return torch.cat([part[name] for part in parts], dim)


def test_sequence_aligned_tensors_are_cut_and_the_rest_is_left():
    ids = torch.tensor([ids_of([3, 4]), ids_of([5], 2)])
    pixels, config = torch.randn(3, 5, 9), object()
    batch = {
        "input_ids": torch.arange(14).reshape(2, 7),
        "features": torch.randn(2, 7, 5),
        "rope": torch.randn(3, 2, 7),
        "cache_position": torch.arange(7),
        "pixels": pixels,
        "config": config,
        "number": 7,
        "attention_mask": torch.ones(2, 7),
        "full_mask": torch.ones(2, 1, 7, 7),
    }
    kept = {name: value.clone() for name, value in batch.items() if isinstance(value, torch.Tensor)}
    parts = [blockcp.shard(batch, plan) for plan in plans(2, doc_ids=ids)]
    assert "attention_mask" not in parts[0] and "full_mask" not in parts[0]
    assert parts[1]["pixels"] is pixels and parts[1]["config"] is config and parts[1]["number"] == 7
    for name, dim in (("input_ids", 1), ("features", 1), ("rope", 2), ("cache_position", 0)):
        joined = whole(parts, name, dim)
        assert torch.equal(joined.narrow(dim, 0, 7), batch[name])
        assert joined.shape[dim] == 8 and not joined.narrow(dim, 7, 1).any()
    assert whole(parts, "position_ids").tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert all(torch.equal(batch[name], value) for name, value in kept.items())


def test_labels_are_shifted_over_the_ranks_and_not_over_documents():
    labels = torch.arange(10, 18).reshape(1, 8)
    parts = [blockcp.shard({"labels": labels}, plan) for plan in plans(3, lengths=[5, 2], rows=8)]
    assert whole(parts, "labels").tolist() == [[*range(10, 18), -100]]
    assert whole(parts, "shift_labels").tolist() == [[11, 12, 13, 14, -100, 16, -100, -100, -100]]
    flat = [blockcp.shard({"labels": labels[0]}, plan) for plan in plans(3, lengths=[5, 2], rows=8)]
    assert torch.equal(whole(flat, "shift_labels", 0), whole(parts, "shift_labels")[0])


def test_given_positions_are_kept():
    position_ids = torch.arange(100, 108).reshape(1, 8)
    parts = [blockcp.shard({"position_ids": position_ids}, plan) for plan in plans(2, lengths=[8])]
    assert torch.equal(whole(parts, "position_ids"), position_ids)


def test_a_batch_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"input_ids must be a tensor of \[1, 8, ...\].*\[1, 9\]"):
        blockcp.shard({"input_ids": torch.zeros(1, 9)}, blockcp.plan(lengths=[8]))
    with pytest.raises(ValueError, match=r"loss_mask must be a tensor of \[1, 8, ...\].*ndarray"):
        blockcp.shard({"loss_mask": torch.zeros(1, 8).numpy()}, blockcp.plan(lengths=[8]))


@pytest.mark.parametrize(
    "batch, lengths, named",
    [
        ([1], [8], "[1]"),
        ({"labels": torch.zeros(8)}, [[8], [8]], "labels must be a tensor of [2, 8]"),
        ({"labels": torch.zeros(1, 8, 3)}, [8], "[1, 8, 3]"),
        ({"labels": torch.zeros(3, 1, 8)}, [8], "[3, 1, 8]"),
        ({"labels": [0] * 8}, [8], "list"),
        ({"labels": torch.zeros(1, 8).to_sparse()}, [8], "labels"),
    ],
)
def test_what_cannot_be_cut_is_one_clear_line(batch, lengths, named):
    with pytest.raises(ValueError) as refused:
        blockcp.shard(batch, blockcp.plan(lengths=lengths))
    assert named in str(refused.value) and str(refused.value).startswith("[shard]") and "\n" not in str(refused.value)


def test_the_plan_must_be_one():
    with pytest.raises(ValueError, match=r"\[shard\] plan must be what blockcp.plan returns, but it is None"):
        blockcp.shard({}, None)


def test_names_need_not_be_text():
    assert blockcp.shard({3: torch.zeros(1, 8)}, blockcp.plan(lengths=[8]))[3].shape == (1, 8)


def test_only_masks_of_the_whole_square_are_dropped():
    square, image = torch.ones(1, 1, 8, 8), torch.ones(1, 3, 8, 8)
    got = blockcp.shard({"causal_mask": square, "block_mask": square[0, 0], "pixels": image}, blockcp.plan(lengths=[8]))
    assert set(got) == {"pixels", "position_ids"} and got["pixels"] is image


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_labels_that_cannot_say_that_there_is_none_are_refused(dtype):
    plan = blockcp.plan(lengths=[4], world_size=2, rank=0)
    with pytest.raises(ValueError, match=rf"^\[shard\] labels must be signed, .* {dtype}\.$"):
        blockcp.shard({"labels": torch.ones(1, 4, dtype=dtype)}, plan)


def there_and_back(rank, world):
    plan = blockcp.plan(lengths=[3, 4], world_size=world, rank=rank, pad=True)
    x = torch.randn(1, 7, 2, generator=torch.Generator().manual_seed(2))
    part = blockcp.shard({"x": x}, plan)["x"].requires_grad_()
    back = blockcp.unshard(part, plan)
    assert torch.equal(back, x)
    (grad,) = torch.autograd.grad((back * torch.arange(7.0)[None, :, None]).sum(), part)
    rows = torch.arange(rank * plan.local_rows, (rank + 1) * plan.local_rows)
    want = torch.where(rows < 7, float(world) * rows, 0.0)  # every rank's loss reads the row
    assert torch.equal(grad[0, :, 0], want)
    heads = part.detach()[:, None]
    assert torch.equal(blockcp.unshard(heads, plan, dim=2), x[:, None])
    with pytest.raises(ValueError, match="local rows"):
        blockcp.unshard(part, plan, dim=2)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_unshard_is_the_way_back(world):
    run_ranks(world, there_and_back)
