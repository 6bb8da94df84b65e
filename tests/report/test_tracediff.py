"""The text of ``hashbench diff``, on traces written by hand."""

from __future__ import annotations

from dataclasses import replace

from hashbench.divergence import find as find_divergence
from hashbench.records import Leaf, OpRecord, Ref, Result, TensorDigest, Trace
from hashbench.report.text import diff_text


def digest(value: str) -> TensorDigest:
    return TensorDigest("float32", (2,), (1,), value)


def record(name: str, *values: str, reads: str = "input/0", module: str = "Net.layer", **others) -> OpRecord:
    return OpRecord(
        id=f"forward.0/{module}/{name}#0",
        phase="forward",
        iteration=0,
        module=module,
        op=name,
        inputs=(Ref("0", reads),),
        outputs=tuple(map(digest, values)),
        **others,
    )


def trace(*records: OpRecord, value: str = "aa", start: str = "11") -> Trace:
    leaf = Leaf("input/0", "input", digest(start), 0)
    return Trace(records, (leaf,), (Result("output.0", digest(value), records[-1].id),))


def diff(first: Trace, second: Trace, *, context: int = 3) -> list[str]:
    return diff_text(first, second, find_divergence(first, second), context=context).splitlines()


def excerpt(lines: list[str]) -> list[str]:
    """Sign and op of the lines that show records."""
    return [f"{line[0]} {line.split('/')[2].split('#')[0]}" for line in lines if line[1:].startswith(" op\t")]


def chain(value: str) -> Trace:
    names = ["a", "b", "c", "d", "e"]
    reads = ["input/0", *(f"forward.0/Net.layer/{name}#0" for name in names)]
    values = ["11", "22", value, value, value]
    return trace(*(record(n, v, reads=r) for n, v, r in zip(names, values, reads, strict=False)), value=value)


def test_both_records_stand_between_their_neighbours() -> None:
    lines = diff(chain("33"), chain("44"), context=1)
    assert excerpt(lines) == ["  b", "- c", "+ c", "- d", "+ d"]
    assert "records 1 to 3 (- first run, + second run):" in lines


def test_facts_of_the_divergence_come_first() -> None:
    lines = diff(chain("33"), chain("44"))
    assert lines[0].split() == ["first", "divergence:", "forward.0/Net.layer/c#0"]
    facts = {line.partition(":")[0]: line.partition(":")[2].strip() for line in lines}
    assert (facts["origin"], facts["kernel"], facts["module"]) == ("kernel", "c", "Net.layer")
    assert facts["phase"] == "forward, iteration 0"
    assert "source line" not in facts
    assert lines[-1] == "1 results differ: output.0"


def test_reader_of_a_second_output_is_marked_as_changed() -> None:
    def two(second: str) -> Trace:
        return trace(
            record("pair", "11", second), record("reader", "55", reads="forward.0/Net.layer/pair#0"), value=second
        )

    assert excerpt(diff(two("22"), two("33"))) == ["- pair", "+ pair", "- reader", "+ reader"]


def test_op_of_one_run_alone_is_shown_on_its_side() -> None:
    first = trace(record("a", "22"), record("b", "33"))
    second = trace(record("a", "22"), record("extra", "44"), record("b", "55"), value="bb")
    lines = diff(first, second)
    assert "+ extra" in excerpt(lines)
    assert "- extra" not in excerpt(lines)


def test_difference_of_an_input_shows_the_op_that_read_it() -> None:
    first, second = trace(record("a", "22"), start="11"), trace(record("a", "33"), start="12", value="bb")
    lines = diff(first, second)
    assert lines[0].endswith("input/0")
    assert excerpt(lines) == ["- a", "+ a"]


def test_equal_traces_are_said_to_be_equal() -> None:
    assert diff(chain("33"), chain("33")) == ["The traces are equal: 5 records, 1 results."]


def test_harmless_differences_are_listed_and_not_blamed() -> None:
    def garbage(value: str) -> Trace:
        return trace(record("workspace", value), record("a", "22"))

    lines = diff(garbage("33"), garbage("44"))
    assert lines[0] == "No divergence reaches a result (2 records, 1 results compared)."
    assert lines[-1] == "1 records differ without reaching a result: forward.0/Net.layer/workspace#0"


def test_scalar_that_steered_is_named() -> None:
    first, second = chain("33"), chain("44")
    verdict = find_divergence(first, second)
    assert verdict.divergence is not None
    from hashbench.records import Steering

    steered = replace(verdict.divergence, steered_by=Steering("forward.0//item#0", "1", "2", "aten.rand"))
    text = diff_text(first, second, replace(verdict, divergence=steered))
    assert "forward.0//item#0 returned 1 and 2, which came from aten.rand" in text
