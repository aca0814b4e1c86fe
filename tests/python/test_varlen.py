"""blockcp.varlen against a dense oracle in fp64, its refusals, and reported cases by id."""

import ctypes
import itertools
import math
import random
import time

import dense
import pytest
import torch

import blockcp

OPS = torch.ops.blockcp
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
# One rounding to the type leaves half an ulp; sums over hundreds of terms in the accumulator type little more.
LIMIT = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}
NAMES = ("out", "lse", "dq", "dk", "dv")


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN in tensors and large numbers elsewhere."""
    libc, perturb = ctypes.CDLL(None), -6
    torch.use_deterministic_algorithms(True)
    libc.mallopt(perturb, 1)
    yield
    libc.mallopt(perturb, 0)
    torch.use_deterministic_algorithms(False)


def offsets(lengths):
    return [0, *itertools.accumulate(lengths)]


def visible(cu_q, cu_k, rows_q, rows_k, causal=False, window=None):
    """``[1, rows_q, rows_k]``, row by row from the definition."""
    left, right = dense._sides(window, causal)
    seen = torch.zeros(1, rows_q, rows_k, dtype=torch.bool)
    for q0, q1, k0, k1 in zip(cu_q, cu_q[1:], cu_k, cu_k[1:]):
        position = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0)
        ahead = torch.arange(k1 - k0)[None] - position
        inside = torch.ones_like(ahead, dtype=torch.bool)
        if left is not None:
            inside &= -ahead <= left
        if right is not None:
            inside &= ahead <= right
        seen[0, q0:q1, k0:k1] = inside
    return seen


def make(rows_q, rows_k, heads, dims, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((rows_q, heads[0], dims[0]), (rows_k, heads[1], dims[0]), (rows_k, heads[1], dims[1]))
    shapes += ((rows_q, heads[0], dims[1]),)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(q, k, v, dout, *args, **options):
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out, lse = blockcp.varlen(*leaves, *args, return_lse=True, **options)
    return [x.detach() for x in (out, lse, *torch.autograd.grad(out, leaves, dout))]


def oracle(q, k, v, dout, seen, scale=None):
    def first(x):  # [T, H, D] as [1, H, T, D], and back
        return x.transpose(0, 1)[None]

    out, lse, *grads = dense.gradients(*(first(x) for x in (q, k, v, dout)), seen, scale)
    return [out[0].transpose(0, 1), lse[0], *(x[0].transpose(0, 1) for x in grads)]


def expect(got, want, dtype):
    largest = max(x.norm().item() for x in want[2:])
    for name, a, b in zip(NAMES, got, want):
        assert a.shape == b.shape, name
        if name == "lse":
            torch.testing.assert_close(a.double(), b, rtol=1e-5, atol=1e-12 if dtype == torch.float64 else 2e-5)
            continue
        norm = largest if name[0] == "d" else b.norm().item()
        assert (a.double() - b).norm().item() <= LIMIT[dtype] * norm, name


def expect_same(a, b):
    for name, x, y in zip(NAMES, a, b):
        assert torch.equal(x, y), name


@pytest.mark.parametrize("kernel", [None, "reference"])
def test_random_problems_equal_the_oracle(poisoned, kernel):
    for _ in range(25):
        seed = random.randrange(2**32)
        rng = random.Random(seed)
        documents = rng.randint(1, 5)
        lengths_q = [rng.choice((0, 1, 2, rng.randint(1, 70))) for _ in range(documents)]
        lengths_k = [rng.choice((q, q, 0, 1, rng.randint(1, 90))) for q in lengths_q]
        cu_q, cu_k = offsets(lengths_q), offsets(lengths_k)
        rows_q, rows_k = cu_q[-1] + rng.choice((0, 3)), cu_k[-1] + rng.choice((1, 4))
        causal = rng.random() < 0.6
        side = (None, -1, 0, rng.randint(0, 40))
        window = rng.choice((None, -1, 1, rng.randint(1, 80), (rng.choice(side), 0 if causal else rng.choice(side))))
        heads, dims = rng.choice(((1, 1), (4, 2), (6, 2), (3, 1))), rng.choice(((16, 16), (5, 33), (64, 24)))
        dtype, scale = rng.choice(DTYPES), rng.choice((None, 0.3))
        q, k, v, dout = make(rows_q, rows_k, heads, dims, dtype, seed)
        seen = visible(cu_q, cu_k, rows_q, rows_k, causal, window)
        unseen = ~seen[0].any(0)
        k[unseen] = v[unseen] = math.nan
        q[cu_q[-1] :] = dout[cu_q[-1] :] = math.nan
        wanted = oracle(*(x.nan_to_num(0.0) for x in (q, k, v, dout)), seen, scale)
        try:
            got = run(q, k, v, dout, cu_q, cu_k, causal=causal, window=window, scale=scale, kernel=kernel)
            expect(got, wanted, dtype)
            blind = ~seen[0].any(1)
            assert not got[0][blind].any() and not got[2][blind].any()
            assert (got[1][:, blind] == -torch.inf).all()
            assert not got[3][unseen].any() and not got[4][unseen].any()
        except Exception as error:
            raise AssertionError(
                f"seed {seed}: {lengths_q} {lengths_k} {causal} {window} {heads} {dims} {dtype}"
            ) from error


@pytest.mark.parametrize("kernel", [None, "reference"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": (2, 1)}, {"causal": True, "window": 3}])
def test_gradcheck(kernel, options):
    q, k, v, _ = make(6, 7, (2, 1), (3, 2), torch.float64)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def call(*x):
        return blockcp.varlen(*x, [0, 3, 3, 5], [0, 2, 3, 6], kernel=kernel, **options)

    assert torch.autograd.gradcheck(call, leaves)


def test_opcheck():
    q, k, v, dout = make(8, 9, (4, 2), (5, 3))
    cu_q, cu_k = torch.tensor([0, 5, 7]), torch.tensor([0, 3, 8], dtype=torch.int32)
    out, lse = OPS.varlen(q, k, v, cu_q, cu_k, causal=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    for args in ((*leaves, cu_q, cu_k), (q, k, v, cu_q, cu_k, 5, 5, True, [2], 0.5, "cpu")):
        assert set(torch.library.opcheck(OPS.varlen.default, args, test_utils=tests).values()) == {"SUCCESS"}
    args = (dout, q, k, v, out, lse, cu_q, cu_k, True, [], None, "")
    assert set(torch.library.opcheck(OPS.varlen_backward.default, args, test_utils=tests).values()) == {"SUCCESS"}


def test_compiles_into_one_graph():
    q, k, v, _ = (x.requires_grad_() for x in make(8, 9, (4, 2), (5, 3)))
    cu_q, cu_k = torch.tensor([0, 5, 7]), torch.tensor([0, 3, 8])

    def loss(q, k, v):
        return blockcp.varlen(q, k, v, cu_q, cu_k, 5, 5, causal=True, window=4).square().sum()

    want = torch.autograd.grad(loss(q, k, v), (q, k, v))
    got = torch.autograd.grad(torch.compile(loss, fullgraph=True, backend="aot_eager")(q, k, v), (q, k, v))
    assert all(torch.equal(a, b) for a, b in zip(got, want))


def test_double_backward_is_refused():
    q, k, v, _ = (x.requires_grad_() for x in make(4, 4, (1, 1), (4, 4)))
    (dq,) = torch.autograd.grad(blockcp.varlen(q, k, v, [0, 4], [0, 4]).square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="varlen_backward"):
        dq.sum().backward()


def test_equals_attention_of_a_plan_on_one_rank():
    lengths = [70, 1, 33]
    plan = blockcp.plan(lengths=lengths, rows=110)
    q, k, v, dout = make(110, 110, (4, 2), (16, 24))
    leaves = [x.clone().transpose(0, 1)[None].requires_grad_() for x in (q, k, v)]
    out, lse = blockcp.attention(*leaves, plan, return_lse=True)
    grads = torch.autograd.grad(out, leaves, dout.transpose(0, 1)[None])
    want = [out[0].transpose(0, 1), lse[0], *(x[0].transpose(0, 1) for x in grads)]
    expect_same(run(q, k, v, dout, offsets(lengths), offsets(lengths), causal=True), want)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_KE_01_more_queries_than_keys(poisoned, dtype):
    cu_q, cu_k, last = [0, 76, 110, 256], [0, 1, 2, 3], [75, 109, 255]
    q, k, v, dout = make(256, 3, (1, 1), (32, 32), dtype)
    out, lse, dq, dk, dv = run(q, k, v, dout, cu_q, cu_k, causal=True)
    blind = torch.ones(256, dtype=torch.bool)
    blind[last] = False
    assert torch.equal(out[last], v)
    assert not out[blind].any() and not dq[blind].any() and (lse[:, blind] == -torch.inf).all()
    # One key: p = 1, so ds = <dout, v> - <dout, out> = 0 and dv = dout.
    torch.testing.assert_close(dv, dout[last])
    for zero in (dq, dk):
        torch.testing.assert_close(zero, torch.zeros_like(zero), rtol=0, atol=1e-4)


def test_KE_02_longest_query_of_one_row_and_empty_documents(poisoned):
    cu_q, cu_k = offsets([0, 1, 0, 1]), offsets([0, 3, 0, 5])
    for causal in (False, True):
        q, k, _, dout = make(2, 8, (9, 3), (64, 64))
        v = torch.arange(8.0)[:, None, None].expand(8, 3, 64)
        out, *_ = run(torch.zeros_like(q), k, v, dout, cu_q, cu_k, 1, 5, causal=causal)
        torch.testing.assert_close(out, torch.tensor([1.0, 5.0])[:, None, None].expand(2, 9, 64))
        q, k, v, dout = make(3, 3, (3, 1), (64, 64))
        got = run(q, k, v, dout, [0, 3], [0, 3], causal=causal)
        expect(got, oracle(q, k, v, dout, visible([0, 3], [0, 3], 3, 3, causal)), torch.float32)


@pytest.mark.parametrize("width", [16, 128, 256])
def test_KE_03_documents_with_keys_and_no_queries(poisoned, width):
    cu_q, cu_k = [0, 0, 3, 5, 5], [0, 6, 10, 12, 20]
    for causal in (False, True):
        q, k, v, dout = make(5, 20, (4, 1), (width, width))
        begin = time.perf_counter()
        got = run(q, k, v, dout, cu_q, cu_k, causal=causal)
        assert time.perf_counter() - begin < 1
        expect(got, oracle(q, k, v, dout, visible(cu_q, cu_k, 5, 20, causal)), torch.float32)
        for grad in got[3:]:
            assert not grad[:6].any() and not grad[12:].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_KE_04_rows_past_the_last_offset(poisoned, dtype):
    cu = [0, 144, 432, 944]
    q, k, v, dout = make(946, 946, (2, 1), (16, 16), dtype)
    for x in (q, k, v, dout):
        x[944:] = math.nan
    out, lse, dq, dk, dv = run(q, k, v, dout, cu, cu, causal=True)
    for x in (out, dq, dk, dv):
        assert (x[944:] == 0).all()
    assert (lse[:, 944:] == -torch.inf).all()
    x = torch.randn(946, 8).to(dtype)
    alone = run(*(x[:944] for x in (q, k, v, dout)), cu, cu, causal=True)
    expect_same((out[:944], lse[:, :944], dq[:944], dk[:944], dv[:944]), alone)
    weights = dk[:, 0].T.double() @ x.double()
    assert torch.equal(weights, alone[3][:, 0].T.double() @ x[:944].double())


def test_KE_05_offsets_of_both_widths_and_lists():
    q, k, v, dout = make(9, 9, (2, 1), (8, 8))
    want = run(q, k, v, dout, [0, 5, 9], [0, 4, 9], 5, 5)
    for dtype in (torch.int32, torch.int64):
        cu_q, cu_k = (torch.tensor(x, dtype=dtype) for x in ([0, 5, 9], [0, 4, 9]))
        expect_same(run(q, k, v, dout, cu_q, cu_k), want)
        expect_same(run(q, k, v, dout, cu_q.repeat_interleave(2)[::2], cu_k, torch.tensor(5), 100), want)


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"max_seqlen_q": 4}, ["max_seqlen_q", "is 4", "document 0 has 5"]),
        ({"max_seqlen_k": 4}, ["max_seqlen_k", "is 4", "document 1 has 5"]),
        ({"max_seqlen_q": -1}, ["max_seqlen_q", "is -1"]),
        ({"max_seqlen_q": 5.5}, ["max_seqlen_q", "5.5"]),
        ({"cu_seqlens_q": [1, 5, 9]}, ["cu_seqlens_q[0] = 1"]),
        ({"cu_seqlens_k": [1, 5, 9]}, ["cu_seqlens_k[0] = 1"]),
        ({"cu_seqlens_q": [0, 6, 5]}, ["cu_seqlens_q[1] = 6", "cu_seqlens_q[2] = 5"]),
        ({"cu_seqlens_k": [0, -1, 5]}, ["cu_seqlens_k[1] = -1"]),
        ({"cu_seqlens_q": [0, 5, 10]}, ["cu_seqlens_q", "ends at 10", "9 rows"]),
        ({"cu_seqlens_k": [0, 5, 2**40]}, ["cu_seqlens_k", "1099511627776", "9 rows"]),
        ({"cu_seqlens_q": [0, 5, 7, 9]}, ["cu_seqlens_q", "cu_seqlens_k", "4 and 3"]),
        ({"cu_seqlens_q": []}, ["cu_seqlens_q", "empty"]),
        ({"cu_seqlens_q": [0.0, 9.0]}, ["cu_seqlens_q", "Float"]),
        ({"cu_seqlens_k": torch.tensor([0, 1], dtype=torch.int16)}, ["cu_seqlens_k", "Short"]),
        ({"cu_seqlens_k": torch.zeros(1, 3, dtype=torch.int64)}, ["cu_seqlens_k", "[1, 3]"]),
        ({"cu_seqlens_q": torch.zeros(3, dtype=torch.int32, device="meta")}, ["cu_seqlens_q", "meta"]),
        ({"k": torch.zeros(9, 1, 8, device="meta")}, ["cpu, meta and cpu"]),
        ({"q": torch.zeros(1, 9, 2, 8)}, ["q must", "three dimensions", "[1, 9, 2, 8]"]),
        ({"k": torch.zeros(9, 1, 7)}, ["8, 7 and 8"]),
        ({"k": torch.zeros(9, 2, 8)}, ["k has 2 and v has 1"]),
        ({"k": torch.zeros(8, 1, 8)}, ["k has 8 and v has 9"]),
        ({"q": torch.zeros(9, 3, 8), "k": torch.zeros(9, 2, 8), "v": torch.zeros(9, 2, 8)}, ["q has 3", "k has 2"]),
        ({"v": torch.zeros(9, 1, 8).half()}, ["Float, Float and Half"]),
        ({x: torch.zeros(9, 1, 8, dtype=torch.int32) for x in "qkv"}, ["Int"]),
        ({"window": 0}, ["window", "0"]),
        ({"window": (2, 1), "causal": True}, ["(2, 1)"]),
        ({"window": (-2, 0)}, ["-2"]),
        ({"kernel": "abacus"}, ["abacus"]),
        ({"kernel": 3}, ["kernel", "3"]),
        ({"scale": float("nan")}, ["scale", "nan"]),
        ({"scale": 1e300}, ["scale", "fp32", "1e+300"]),
        ({"scale": "1"}, ["scale", "'1'"]),
        ({"scale": True}, ["scale", "True"]),
        ({"q": None}, ["q must be a dense tensor", "NoneType"]),
        ({"cu_seqlens_q": None}, ["cu_seqlens_q", "None"]),
        ({"cu_seqlens_k": "0,9"}, ["cu_seqlens_k", "'0,9'"]),
        ({"cu_seqlens_q": [0, 2**64]}, ["cu_seqlens_q", "18446744073709551616"]),
        ({"cu_seqlens_q": torch.tensor([0, 9]).to_sparse()}, ["cu_seqlens_q", "sparse"]),
    ],
)
def test_KE_05_misuse_is_refused_with_its_values(changes, words):
    q, k, v, _ = make(9, 9, (2, 1), (8, 8))
    call = {"q": q, "k": k, "v": v, "cu_seqlens_q": [0, 5, 9], "cu_seqlens_k": [0, 4, 9]}
    with pytest.raises(ValueError) as error:
        blockcp.varlen(**call | changes)
    for word in words:
        assert word in str(error.value)
    assert len(str(error.value).splitlines()) == 1


def variants(q, k, v):
    """The same values in other places."""
    rows, heads, width = q.shape
    packed = torch.stack([q, k, v], 1)
    yield packed.unbind(1)
    yield [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    wide = torch.full((rows, heads, 2 * width), math.nan, dtype=q.dtype)
    wide[..., ::2] = q
    yield wide[..., ::2], k.flip(0).contiguous().flip(0), v.transpose(0, 2).contiguous().transpose(0, 2)
    shifted = [torch.full((x.numel() + 1,), math.nan, dtype=x.dtype) for x in (q, k, v)]
    for to, x in zip(shifted, (q, k, v)):
        to[1:] = x.flatten()
    yield [x[1:].view(rows, heads, width) for x in shifted]


@pytest.mark.parametrize("dtype", DTYPES)
def test_KE_07_strides_change_no_bit(dtype):
    cu = offsets([70, 58])
    q, k, v, dout = make(130, 130, (3, 3), (40, 40), dtype)
    want = run(q, k, v, dout, cu, cu, causal=True)
    for others in variants(q, k, v):
        expect_same(run(*others, dout, cu, cu, causal=True), want)
    for other_dout, *_ in variants(dout, dout, dout):
        expect_same(run(q, k, v, other_dout, cu, cu, causal=True), want)
    spread = [x[:, :1].expand(-1, 3, -1) for x in (k, v)]
    copies = [x.contiguous() for x in spread]
    expect_same(run(q, *spread, dout, cu, cu, causal=True), run(q, *copies, dout, cu, cu, causal=True))
    ones = torch.ones((), dtype=dtype).expand_as(dout)
    expect_same(run(q, k, v, ones, cu, cu), run(q, k, v, ones.contiguous(), cu, cu))


@pytest.mark.parametrize("width", [1, 8, 20, 40, 64, 72, 80, 104, 128, 192, 256, 320, 512])
def test_KE_10_gradients_in_every_column(poisoned, width):
    cu = offsets([70, 58])
    q, k, v, dout = make(128, 128, (2, 1), (width, width))
    got = run(q, k, v, dout, cu, cu, causal=True)
    expect(got, oracle(q, k, v, dout, visible(cu, cu, 128, 128, True)), torch.float32)
    expect_same(run(q, k, v, dout, cu, cu, causal=True), got)


@pytest.mark.parametrize("dtype", DTYPES)
def test_BW_06_types_of_results(dtype):
    q, k, v, dout = make(5, 7, (4, 2), (8, 12), dtype)
    # The operators themselves: autograd would convert a gradient that has another type than its input.
    cu = (torch.tensor([0, 5], dtype=torch.int32), torch.tensor([0, 7], dtype=torch.int32))
    out, lse = OPS.varlen(q, k, v, *cu)
    dq, dk, dv = OPS.varlen_backward(dout, q, k, v, out, lse, *cu, False, [], None, "")
    for got, like in ((out, dout), (dq, q), (dk, k), (dv, v)):
        assert (got.dtype, got.device, got.shape) == (like.dtype, like.device, like.shape)
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32) and lse.shape == (4, 5)


def test_nothing_to_do():
    for cu_q, cu_k in (([0], [0]), ([0, 0], [0, 0]), ([0, 0], [0, 3])):
        q, k, v, dout = make(0, 3, (2, 1), (8, 8))
        out, lse, dq, dk, dv = run(q, k, v, dout, cu_q, cu_k)
        assert out.shape == (0, 2, 8) and lse.shape == (2, 0) and dq.shape == q.shape
        assert not dk.any() and not dv.any()
    q, k, v, dout = make(3, 0, (2, 1), (8, 8))
    out, lse, dq, *_ = run(q, k, v, dout, [0, 3], [0, 0])
    assert not out.any() and not dq.any() and (lse == -torch.inf).all()
