"""A store in memory. In virtual time a simulated run can be killed and resumed within one process."""

from tailrace.ledger.base import Cut, Row, TokensRow


class MemoryStore:
    """Keeps the contract of `ledger.base.Store`."""

    def __init__(self) -> None:
        self.name = "memory"
        self._tables: dict[str, dict[tuple[object, ...], Row]] = {}

    def commit(self, cut: Cut) -> None:
        for row in cut.rows:
            self._tables.setdefault(row.table, {})[key_of(row)] = row
        if cut.pruned:
            gone = set(cut.pruned)
            tokens = self._tables.get(TokensRow.table, {})
            self._tables[TokensRow.table] = {key: row for key, row in tokens.items() if key[:3] not in gone}

    def rows(self, kind: type[Row]) -> list[Row]:
        table = self._tables.get(kind.table, {})
        return [table[key] for key in sorted(table)]

    def close(self) -> None:
        """Do nothing: the rows stay for the next life."""


def key_of(row: Row) -> tuple[object, ...]:
    """Return the values of the key fields."""
    return tuple(getattr(row, name) for name in row.__struct_fields__[: row.num_keys])
