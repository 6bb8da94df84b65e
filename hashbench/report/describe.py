"""Which models of a history deserve words, and in which order: the newest trouble first."""

from __future__ import annotations

from hashbench.catalog import kind_of
from hashbench.report.history import History, ModelHistory, Spell

_WORST_FIRST = {"differ": 0, "fail": 1}


def worth_telling(history: History) -> tuple[int, ...]:
    """Indices of the models that have a row to tell of (:attr:`ModelHistory.told`): those in trouble in the last night
    before those that were, what began last before what began earlier, differences before failures."""
    told = [index for index, model in enumerate(history.models) if model.told is not None]
    last = len(history.nights) - 1
    return tuple(sorted(told, key=lambda index: _urgency(history.models[index], last)))


def _urgency(model: ModelHistory, last: int) -> tuple[bool, int, int, tuple[str, ...]]:
    spell = spell_at(model, model.told_night)
    began = spell.first if spell is not None else -1
    kind = _WORST_FIRST.get(kind_of(model.told.accuracy), 2) if model.told is not None else 2
    return model.told_night != last, -began, kind, model.key


def spell_at(model: ModelHistory, night: int | None) -> Spell | None:
    """The spell that holds a night; ``None`` where the model has no row in it."""
    if night is None:
        return None
    return next((spell for spell in reversed(model.spells) if spell.first <= night <= spell.last), None)
