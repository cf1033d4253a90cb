"""The margin loss: values, gradients, both forms of targets, refusals."""

import pytest
import torch

import oracles
from xncaps import margin_loss
from xncaps.errors import InputError, InputTypeError

F64 = torch.float64


def draw(batch, classes):
    generator = torch.Generator().manual_seed(batch * classes)
    lengths = torch.rand(batch, classes, dtype=F64, generator=generator)
    return lengths, torch.randint(0, classes, (batch,), generator=generator)


def rows(target, classes):
    return [[1 if k == label else 0 for k in range(classes)] for label in target.tolist()]


@pytest.mark.parametrize(("batch", "classes"), [(1, 1), (5, 3), (3, 10)])
@pytest.mark.parametrize(
    "options", [{}, {"m_plus": 0.7, "m_minus": 0.2, "down_weight": 0.25}], ids=["paper", "other"]
)
def test_loss_equals_the_oracle(batch, classes, options):
    lengths, target = draw(batch, classes)
    expected = oracles.margin_loss(lengths.tolist(), rows(target, classes), **options)
    loss = margin_loss(lengths, target, **options)
    assert loss.shape == ()
    assert loss.item() == pytest.approx(expected, rel=1e-12)


def test_two_classes_at_once_equal_the_oracle():
    lengths, _ = draw(3, 4)
    present = [[1, 0, 0, 1], [0, 1, 1, 0], [0, 0, 0, 0]]
    expected = oracles.margin_loss(lengths.tolist(), present)
    assert margin_loss(lengths, torch.tensor(present)).item() == pytest.approx(expected, rel=1e-12)


def test_hand_made_values_are_summed_over_classes_and_averaged_over_the_batch():
    lengths = torch.tensor([[0.4, 0.3, 0.05], [0.95, 0.1, 0.6]], dtype=F64)
    loss = margin_loss(lengths, torch.tensor([0, 0]))
    first, second = 0.5**2 + 0.5 * 0.2**2, 0.5 * 0.5**2
    assert loss.item() == pytest.approx((first + second) / 2, rel=1e-12)


def test_lengths_on_the_right_side_of_the_margins_cost_nothing():
    assert margin_loss(torch.tensor([[0.9, 0.1, 0.0]]), torch.tensor([0])).item() == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.float32, F64])
def test_multi_hot_targets_of_any_dtype_agree_with_class_numbers(dtype):
    lengths, target = draw(5, 3)
    multi_hot = torch.tensor(rows(target, 3)).to(dtype)
    assert torch.equal(margin_loss(lengths, multi_hot), margin_loss(lengths, target))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_class_numbers_of_any_whole_dtype_agree(dtype):
    lengths, target = draw(5, 3)
    assert torch.equal(margin_loss(lengths, target.to(dtype)), margin_loss(lengths, target))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_dtype_is_kept(dtype):
    lengths, target = draw(5, 3)
    assert margin_loss(lengths.to(dtype), target).dtype == dtype


def test_the_gradient_has_its_closed_form():
    lengths, target = draw(4, 5)
    lengths.requires_grad_()
    margin_loss(lengths, target).backward()
    expected = [
        [
            -2 * max(0.0, 0.9 - value) / 4 if there else 0.5 * 2 * max(0.0, value - 0.1) / 4
            for value, there in zip(*pair, strict=True)
        ]
        for pair in zip(lengths.tolist(), rows(target, 5), strict=True)
    ]
    torch.testing.assert_close(lengths.grad, torch.tensor(expected, dtype=F64))


@pytest.mark.parametrize("target", [torch.zeros(0, dtype=torch.int64), torch.zeros(0, 3)])
def test_an_empty_batch_has_no_mean(target):
    assert margin_loss(torch.zeros(0, 3), target).isnan()


@pytest.mark.parametrize("form", ["class numbers", "multi-hot"])
def test_compiled_equals_eager_forward_and_backward(form):
    torch.compiler.reset()
    lengths, target = draw(4, 5)
    lengths.requires_grad_()
    target = target if form == "class numbers" else torch.tensor(rows(target, 5))
    eager = margin_loss(lengths, target)
    compiled = torch.compile(margin_loss, fullgraph=True, backend="aot_eager")(lengths, target)
    torch.testing.assert_close(compiled, eager)
    (got,) = torch.autograd.grad(compiled, lengths)
    (wanted,) = torch.autograd.grad(eager, lengths)
    torch.testing.assert_close(got, wanted)


def test_gradients_of_each_sample_through_vmap():
    lengths, target = torch.rand(5, 4), torch.tensor([0, 3, 1, 1, 2])

    def of_one(row, digit):
        return margin_loss(row[None], digit[None])

    each = torch.func.vmap(torch.func.grad(of_one))(lengths, target)
    lengths.requires_grad_()
    margin_loss(lengths, target).backward()
    torch.testing.assert_close(each, 5 * lengths.grad)


REFUSED = {
    "no classes": (
        lambda: margin_loss(torch.ones(2, 0), torch.tensor([0, 0])),
        InputError,
        "margin_loss: scores must have at least one class; got (2, 0).",
    ),
    "values beyond 0 and 1": (
        lambda: margin_loss(torch.ones(1, 2), torch.tensor([[2, 0]])),
        InputError,
        "margin_loss: target must hold values from 0 to 1; got 2.",
    ),
    "another device": (
        lambda: margin_loss(torch.ones(1, 2), torch.ones(1, 2, device="meta")),
        InputTypeError,
        "margin_loss: target must be on the scores' device cpu; got meta. "
        "Move one of them with .to(device).",
    ),
    "rank": (
        lambda: margin_loss(torch.ones(3), torch.tensor([0, 1, 2])),
        InputError,
        "margin_loss: lengths must have shape (batch, classes); got (3,).",
    ),
    "int lengths": (
        lambda: margin_loss(torch.ones(2, 3, dtype=torch.int64), torch.tensor([0, 1])),
        InputTypeError,
        "margin_loss: lengths must be a floating-point tensor; got torch.int64. "
        "Convert it first, for example with .float().",
    ),
    "target list": (
        lambda: margin_loss(torch.ones(2, 3), [0, 1]),
        InputTypeError,
        "margin_loss: target must be a tensor; got list.",
    ),
    "target batch": (
        lambda: margin_loss(torch.ones(2, 3), torch.tensor([0, 1, 2])),
        InputError,
        "margin_loss: target must have shape (batch=2,) or (batch=2, classes=3); got (3,).",
    ),
    "target classes": (
        lambda: margin_loss(torch.ones(2, 3), torch.ones(2, 4)),
        InputError,
        "margin_loss: target must have shape (batch=2,) or (batch=2, classes=3); got (2, 4).",
    ),
    "float class numbers": (
        lambda: margin_loss(torch.ones(2, 3), torch.tensor([0.0, 1.0])),
        InputTypeError,
        "margin_loss: target must hold whole numbers when it has shape (batch,); "
        "got torch.float32. Convert class numbers with .long().",
    ),
    "bool class numbers": (
        lambda: margin_loss(torch.ones(2, 3), torch.tensor([False, True])),
        InputTypeError,
        "margin_loss: target must hold whole numbers when it has shape (batch,); "
        "got torch.bool. Convert class numbers with .long().",
    ),
    "class too high": (
        lambda: margin_loss(torch.ones(2, 3), torch.tensor([0, 3])),
        InputError,
        "margin_loss: target must hold classes 0 to 2; got 3.",
    ),
    "class too low": (
        lambda: margin_loss(torch.ones(2, 3), torch.tensor([-1, 3])),
        InputError,
        "margin_loss: target must hold classes 0 to 2; got -1.",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_input_is_told_what_is_wrong(call, error, message):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == message
