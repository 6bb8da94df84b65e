"""Two recordings of a model: which kernels changed, and which cannot be compared."""

from __future__ import annotations

from dataclasses import replace

from hashbench.extensions.fingerprint.changes import Changes, changes_between, changes_text
from hashbench.extensions.fingerprint.document import Fingerprints

OLD, NEW = ({"packages": {"torch": version}} for version in ("2.15.0", "2.15.1"))


def test_equal_recordings_have_no_changes(base: Fingerprints) -> None:
    (model,) = base.models
    assert changes_between(model, model) == Changes(model.kernels, ())


def test_changes_keep_the_order_of_the_recording(base: Fingerprints) -> None:
    (model,) = base.models
    changed = [replace(kernel, outputs=("float32[1]:1",)) for kernel in model.kernels[:3]]
    new = replace(model, kernels=(*reversed(changed), *model.kernels[3:]))

    changes = changes_between(model, new)

    assert changes.changed == model.kernels[:3]
    assert (changes.same, changes.compared) == (len(model.kernels) - 3, len(model.kernels))


def test_other_settings_are_other_inputs(base: Fingerprints) -> None:
    (model,) = base.models
    changes = changes_between(model, replace(model, deterministic="off"))
    assert (changes.compared, changes.other_inputs) == (0, len(model.kernels))


def test_new_and_missing_kernels_are_counted(base: Fingerprints) -> None:
    (model,) = base.models
    changes = changes_between(
        replace(model, kernels=model.kernels[1:]), replace(model, kernels=(*model.kernels[:1], *model.kernels[2:]))
    )
    assert (changes.alone, changes.same) == (2, len(model.kernels) - 2)


def test_text_names_library_and_environment(base: Fingerprints) -> None:
    kernel = replace(base.models[0].kernels[0], op="aten.mm.default", library="MKL SGEMM")
    text = changes_text(Changes((kernel,) * 3, (kernel,), other_inputs=2), base=OLD, new=NEW)
    assert text == "1 of 4 kernels changed with torch 2.15.0 -> 2.15.1: aten.mm.default (MKL); 2 had other inputs"
    assert changes_text(Changes((), ()), base=OLD, new=OLD) == (
        "no kernel can be compared with no known change of the environment"
    )
