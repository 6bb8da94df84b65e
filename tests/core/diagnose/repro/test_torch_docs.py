"""What torch documents about an op: read from the installed torch, matched by name, step and device."""

from __future__ import annotations

import pytest
import torch

from hashbench.core.diagnose.repro import torch_docs
from hashbench.core.diagnose.repro.torch_docs import NOT_LISTED, UNREADABLE, deterministic_by_flag, look_up, parse

DOCSTRING = torch.use_deterministic_algorithms.__doc__ or ""

DETERMINISTIC, RAISES = "deterministic under the flag: ", "raises under the flag: "
DIFFERENTIATING = " when attempting to differentiate a CUDA tensor"

SAID = {
    "an in-place op on the processor": (
        ("aten.put_.default", "cpu", ""),
        f"{DETERMINISTIC}torch.Tensor.put_ with accumulate=True when called on a CPU tensor; "
        f"{RAISES}torch.Tensor.put_ when accumulate=False",
    ),
    "the same op on another device": (
        ("aten.put_.default", "cuda:1", ""),
        f"{RAISES}torch.Tensor.put_ when accumulate=False; "
        f"{RAISES}torch.Tensor.put_ when accumulate=True and called on a CUDA tensor",
    ),
    "an item without a condition": (("aten.max_unpool2d.default", "cpu", ""), f"{RAISES}torch.nn.MaxUnpool2d"),
    "an item on two lines": (
        ("aten.bincount.default", "cuda", ""),
        f"{RAISES}torch.bincount when called on a CUDA tensor and weights tensor is given",
    ),
    "the kernel behind a public function": (
        ("aten._index_put_impl_.default", "cpu", ""),
        f"{DETERMINISTIC}torch.Tensor.index_put with accumulate=False; "
        f"{DETERMINISTIC}torch.Tensor.index_put with accumulate=True when called on a CPU tensor",
    ),
    "a kernel in the backward of indexing": (
        ("aten.new_zeros.default", "cpu", "aten.index.Tensor"),
        f"{DETERMINISTIC}torch.Tensor.__getitem__ when attempting to differentiate a CPU tensor "
        "and the index is a list of tensors",
    ),
    "the record of a forward op": (
        ("backward/0/Net/aten.new_zeros.default#3", "cuda", "forward/0/Net.pick/aten.index_select.default#0"),
        f"{DETERMINISTIC}torch.index_select{DIFFERENTIATING}",
    ),
    "a gradient that torch announces as requires grad": (
        ("aten.new_zeros.default", "cuda", "aten.gather.default"),
        f"{DETERMINISTIC}torch.gather when called on a CUDA tensor that requires grad",
    ),
    "a backward kernel of a module": (
        ("aten._adaptive_avg_pool2d_backward.default", "cuda", ""),
        f"{RAISES}torch.nn.AdaptiveAvgPool2d{DIFFERENTIATING}",
    ),
    "an abbreviation in capitals": (
        ("aten._ctc_loss_backward.default", "cuda", ""),
        f"{RAISES}torch.nn.CTCLoss{DIFFERENTIATING}",
    ),
    "dimensions that the public name lacks": (
        ("aten.nll_loss2d_forward.default", "cuda", ""),
        f"{RAISES}torch.nn.NLLLoss when called on a CUDA tensor",
    ),
    "a longer name that contains a shorter one": (
        ("aten._embedding_bag_dense_backward.default", "cuda", ""),
        f"{RAISES}torch.nn.EmbeddingBag{DIFFERENTIATING} when mode='max'",
    ),
    "one of the modes of a function": (
        ("aten.upsample_bicubic2d_backward.default", "cuda", ""),
        f"{RAISES}torch.nn.functional.interpolate{DIFFERENTIATING} and one of the following modes is used: "
        "linear, bilinear, bicubic, trilinear",
    ),
    "another name in ATen": (
        ("aten.grid_sampler_3d_backward.default", "cuda", ""),
        f"{RAISES}torch.nn.functional.grid_sample{DIFFERENTIATING}",
    ),
    "a transposed convolution of a library": (
        ("aten.cudnn_convolution_transpose.default", "cuda", ""),
        f"{DETERMINISTIC}torch.nn.ConvTranspose1d, torch.nn.ConvTranspose2d, torch.nn.ConvTranspose3d "
        "when called on CUDA tensor",
    ),
    "only for other devices": (
        ("aten.histc.default", "cpu", ""),
        f"{NOT_LISTED} for cpu ({RAISES}torch.histc when called on a CUDA tensor)",
    ),
}

SINCE_2_15 = (
    "        * :func:`torch.nn.MaxPool2d`, :func:`torch.nn.MaxPool3d`, and :func:`torch.nn.AvgPool3d`\n"
    "          when attempting to differentiate an MPS tensor\n"
    "        * :func:`torch.nn.functional.interpolate` when attempting to differentiate an MPS tensor\n"
    "          in some cases\n"
)
"""Items of the list of what raises."""

SAID_SINCE_2_15 = {
    "a mode that is not in the list": (
        ("aten.upsample_nearest2d_backward.default", "cuda", ""),
        f"{NOT_LISTED} for cuda ({RAISES}torch.nn.functional.interpolate "
        "when attempting to differentiate an MPS tensor in some cases)",
    ),
    "several modules in one item": (
        ("aten.max_pool2d_with_indices_backward.default", "mps", ""),
        f"{RAISES}torch.nn.MaxPool2d, torch.nn.MaxPool3d, torch.nn.AvgPool3d "
        "when attempting to differentiate an MPS tensor",
    ),
}

NOT_SAID = {
    "an op that no item names": ("aten.add.Tensor", "cpu", ""),
    "the forward of what differs in backward only": ("aten.embedding.default", "cuda", ""),
    "other dimensions than the listed ones": ("aten.adaptive_max_pool3d_backward.default", "cuda", ""),
    "a name that ends in a listed one": ("aten.select_scatter.default", "cuda", ""),
    "a name that begins with a listed one": ("aten.embedding_renorm_.default", "cuda", ""),
    "somebody else's op of a listed name": ("mylib.put_.default", "cpu", ""),
    "the backward of an op whose forward is listed": ("aten.mm.default", "cuda", "aten.histc.default"),
    "a higher-order operator": ("flex_attention", "cuda", ""),
    "nothing": ("", "cpu", ""),
}


@pytest.mark.parametrize(("asked", "said"), SAID.values(), ids=SAID)
def test_what_is_listed(asked: tuple[str, str, str], said: str) -> None:
    op, device, backward_of = asked
    assert look_up(op, device=device, backward_of=backward_of).text == said


@pytest.mark.parametrize(("asked", "said"), SAID_SINCE_2_15.values(), ids=SAID_SINCE_2_15)
def test_what_is_listed_since_torch_2_15(
    asked: tuple[str, str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    docstring = torch.use_deterministic_algorithms.__doc__
    assert docstring is not None
    if SINCE_2_15 not in docstring:
        before, last, after = docstring.rpartition("        * :func:`torch.Tensor.scatter_reduce`")
        monkeypatch.setattr(torch.use_deterministic_algorithms, "__doc__", f"{before}{SINCE_2_15}{last}{after}")
    op, device, backward_of = asked
    assert look_up(op, device=device, backward_of=backward_of).text == said


@pytest.mark.parametrize(("op", "device", "backward_of"), NOT_SAID.values(), ids=NOT_SAID)
def test_what_is_not_listed(op: str, device: str, backward_of: str) -> None:
    assert look_up(op, device=device, backward_of=backward_of).text == NOT_LISTED


def test_every_item_is_read_and_nothing_else() -> None:
    items = parse(DOCSTRING)
    assert len(items) == sum(line.lstrip().startswith("* ") for line in DOCSTRING.splitlines())
    assert [item.names for item in items if item.modes] == [("torch.nn.functional.interpolate",)]


def test_every_listed_name_exists_in_torch() -> None:
    for item in parse(DOCSTRING):
        for name in item.names:
            owner = torch
            for part in name.split(".")[1:]:
                owner = getattr(owner, part)
            assert callable(owner)


CHANGED = {
    "no docstring, as with python -OO": "",
    "other words above the second list": DOCSTRING.replace("will throw", "raise"),
    "a first list without bullets": DOCSTRING.replace("* :class:`torch.nn.Conv", ":class:`torch.nn.Conv").replace(
        "        * :", "        :"
    ),
    "items without markup": DOCSTRING.replace(":func:`torch.histc`", "histc"),
}


@pytest.mark.parametrize("docstring", CHANGED.values(), ids=CHANGED)
def test_docstring_of_another_form_is_not_guessed_at(docstring: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_docs.torch.use_deterministic_algorithms, "__doc__", docstring)
    assert look_up("aten.put_.default", device="cpu").text == UNREADABLE
    assert not look_up("aten.put_.default", device="cpu").verdicts


def test_only_what_is_listed_for_the_device_is_a_promise() -> None:
    put, bmm = look_up("aten.put_.default", device="cpu:0"), look_up("aten.bmm.default", device="cpu")
    assert put.verdicts == {torch_docs.BECOMES_DETERMINISTIC, torch_docs.RAISES}
    assert (bmm.verdicts, bmm.here, bool(bmm.elsewhere)) == (frozenset(), (), True)
    assert bmm.text.startswith("not listed for cpu (deterministic under the flag: torch.bmm")


def test_what_is_said_of_put_is_what_torch_does() -> None:
    assert "raises" in look_up("aten.put_.default", device="cpu").text
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.ones(2))
    finally:
        torch.use_deterministic_algorithms(False)


def test_ops_that_are_deterministic_by_the_flag_alone() -> None:
    ops = [
        "aten.relu.default",
        "aten.put_.default",
        "aten.index_put.default",
        "aten.index_add_.default",
        "mine.op.default",
    ]
    assert deterministic_by_flag(ops, device="cpu") == ("aten.index_put.default", "aten.put_.default")
    assert "aten.index_add_.default" in deterministic_by_flag(ops, device="cuda:0")
