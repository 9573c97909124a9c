"""`tailrace inspect`: what the ledger of a run says, also while the run goes on.

The balance: how many prompts and tokens had each fate. With a prompt: its group, sample by sample. Prompts
drawn = trained + filtered + dropped + living. Tokens generated, by the engines' own count, = trained + masked
out of the loss + held by samples without a fate + wasted + evaluated + unwritten, which the ledger does not
hold yet. With [prices]: what they cost until the last commit.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter
from rich.table import Table

from tailrace.contracts.engine import counted_tokens
from tailrace.drivers.assembly.folder import RunFolder
from tailrace.drivers.assembly.placement import prices_of
from tailrace.drivers.commands.tables import open_console, print_table
from tailrace.errors import ConfigError
from tailrace.ledger.base import GroupRow, LedgerTables, ProbeRow, SampleRow
from tailrace.ledger.prices import BillItem, total_cost
from tailrace.ledger.recovery import totals_of
from tailrace.ledger.store import open_store, read_ledger
from tailrace.types import Turn

NUM_OLDEST = 5
"""Living groups in the balance: those that were drawn first."""


def inspect(
    run: Path,
    /,
    *,
    group: int | None = None,
    as_json: Annotated[bool, Parameter("--json")] = False,
    overrides: Mapping[str, str],
) -> None:
    """Print what the ledger of a run says.

    Args:
        run: its output directory.
        group: the index of a prompt, to see what became of its group, instead of the balance of the run.
        as_json: print JSON.
    """
    folder = RunFolder(run)
    folder.check_wrote("a balance of prompts and tokens", "train")
    config = folder.read_config(overrides)
    with closing(open_store(config.ledger, run, only_read=True)) as store:
        tables = read_ledger(store, tokens=False)
    num_generated, prices = counted_tokens(folder.counts), prices_of(config)
    bill = prices.bill(totals_of(tables), num_generated) if prices else []
    found = _balance(tables, num_generated, bill) if group is None else _group(tables, group)
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())
        return
    console = open_console()
    for table in _balance_tables(found) if group is None else [_group_table(found)]:
        print_table(console, table)
    if config.run.replay and group is None:
        console.print(f"replay    the samples are those of {config.run.replay}")
    if config.prices and group is None:
        console.print(f"cost      {config.prices.words(found['cost']['total'])}")


def _balance(tables: LedgerTables, num_generated: int, bill: Sequence[BillItem]) -> dict[str, Any]:
    totals, held, drafted = totals_of(tables), tables.held_tokens, tables.drafted_tokens
    living = [group for group in tables.groups.values() if group.fate is None]
    undone = [training for training in tables.trainings.values() if training.undone is not None]
    items = [{"what": item.what, "amount": item.amount, "price": item.price} for item in bill if item.price]
    return {
        "prompts": {
            "drawn": totals.num_drawn,
            **{fate: totals.groups[fate] for fate in ("trained", "filtered", "dropped")},
            "living": len(living),
        },
        "tokens": {
            "generated": num_generated,
            "trained": totals.trained_tokens,
            "masked": totals.masked_tokens,
            "held": held,
            "drafted": drafted,
            "wasted": dict(totals.wasted_tokens),
            "evaluated": totals.evaluated_tokens,
            "unwritten": num_generated - totals.num_known_tokens - held - drafted,
            "trained_again": totals.undone_tokens,
        },
        **({"cost": {"items": items, "total": total_cost(bill)}} if bill else {}),
        "lives": [
            _fields_of(row, "life", "parent", "round", "version", "step", "crash_tokens")
            | {"samples_undone": sum(training.life == row.life for training in undone)}
            for row in tables.lives.values()
        ],
        "probes": _probes(tables.probes),
        "checkpoints": [
            {"name": row.checkpoint, **_fields_of(row, "round", "version", "step")}
            for row in tables.checkpoints
            if row.undone is None
        ],
        "oldest": [_living(tables, group) for group in living[:NUM_OLDEST]],
    }


def _probes(rows: Sequence[ProbeRow]) -> list[dict[str, Any]]:
    """How each engine answered the probes of all publications."""
    by_engine = {row.engine: [each for each in rows if each.engine == row.engine] for row in rows}
    return [
        {
            "engine": engine,
            "probes": len(mine),
            "largest_difference": max((each.difference for each in mine if not each.cause), default=None),
            "failed": [_fields_of(each, "life", "version", "cause") for each in mine if each.cause],
        }
        for engine, mine in by_engine.items()
    ]


def _fields_of(row: msgspec.Struct, *names: str) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _living(tables: LedgerTables, row: GroupRow) -> dict[str, Any]:
    samples = [sample for sample in tables.samples.values() if sample.prompt == row.prompt]
    return {
        **_fields_of(row, "prompt", "round", "deferrals"),
        "kept": len(row.kept),
        "num_required": row.num_required,
        "tokens": sum(sample.num_tokens for sample in samples if sample.fate is None),
    }


def _group(tables: LedgerTables, prompt: int) -> dict[str, Any]:
    if (row := tables.groups.get(prompt)) is None:
        known = f"choose from 0 to {tables.run.num_drawn - 1}" if tables.groups else "none was drawn yet"
        raise ConfigError("--group", prompt, "the ledger has no such group", known)
    members = [sample for sample in tables.samples.values() if sample.prompt == prompt]
    attempts = {"attempts": 1 + max([row.attempt, *(sample.attempt for sample in members)])}
    drawn = _fields_of(row, "prompt", "life", "round", "deferrals")
    samples = {"samples": [_sample(tables, sample) for sample in members]}
    return {**drawn, **attempts, **_fields_of(row, "fate", "reason"), **samples}


def _sample(tables: LedgerTables, row: SampleRow) -> dict[str, Any]:
    trainings = [training for training in tables.trainings.values() if training.id == row.id]
    return {
        "id": str(row.id),
        "spans": row.spans,
        "finish_reason": None if row.in_episode else row.finish_reason,
        **_fields_of(row, "reward", "failure", "fate"),
        "steps": [
            f"{training.step} in life {training.life}"
            + (f", undone by life {training.undone}" if training.undone else "")
            for training in trainings
        ],
        "turns": row.turns,
    }


def _balance_tables(balance: Mapping[str, Any]) -> list[Table]:
    prompts, tokens = balance["prompts"], balance["tokens"]
    sums = Table("", "prompts", "tokens", title="the balance", title_justify="left")
    for label, num_prompts, num_tokens in (
        ("drawn, generated", prompts["drawn"], tokens["generated"]),
        ("= trained", prompts["trained"], tokens["trained"]),
        ("+ masked", None, tokens["masked"]),
        ("+ living, held", prompts["living"], tokens["held"]),
        ("+ drafted", None, tokens["drafted"]),
        ("+ filtered", prompts["filtered"], None),
        ("+ dropped", prompts["dropped"], None),
        *((f"+ wasted: {reason}", None, wasted) for reason, wasted in tokens["wasted"].items()),
        ("+ evaluated", None, tokens["evaluated"]),
        ("+ not yet written", None, tokens["unwritten"]),
    ):
        sums.add_row(label, _number(num_prompts), _number(num_tokens))
    sums.caption = f"{tokens['trained_again']:,} tokens were trained once more after a kill"
    lives = Table("life", "began with", "round", "version", "step", "lost in the kill before", "undone later")
    for life in balance["lives"]:
        number, parent, *numbers = life.values()
        began = f"a checkpoint of life {parent}" if parent else "the config's weights"
        lives.add_row(str(number), began, *map(_number, numbers))
    oldest = Table("prompt", "drawn in round", "parked", "finished", "tokens", title="oldest living groups")
    for group in balance["oldest"]:
        prompt, round, parked, kept, num_required, num_tokens = group.values()
        oldest.add_row(*map(str, (prompt, round, parked)), f"{kept} of {num_required}", f"{num_tokens:,}")
    bill = Table("what", "amount", "price", "cost", title="the bill", title_justify="left")
    for item in balance.get("cost", {"items": []})["items"]:
        what, amount, price = item.values()
        bill.add_row(what, f"{amount:,.6f}", f"{price:,g}", f"{amount * price:,.4f}")
    arrived = "some did not arrive" if any(each["failed"] for each in balance["probes"]) else "all arrived"
    title = f"probes of the weights: {arrived}"
    probes = Table("engine", "answers", "largest difference", "not arrived", title=title)
    for each in balance["probes"]:
        engine, num, largest, failed = each.values()
        causes = "; ".join(f"version {one['version']}: {one['cause']}" for one in failed) or "none"
        probes.add_row(engine, str(num), "" if largest is None else f"{largest:.2g}", causes)
    return [sums, lives, *(table for table in (probes, oldest, bill) if table.rows)]


def _number(number: int | None) -> str:
    return "" if number is None else f"{number:,}"


def _group_table(group: Mapping[str, Any]) -> Table:
    samples = group["samples"]
    table = Table("sample", "tokens by life and version", "ended", "reward", "fate", "steps")
    if has_turns := any(sample["turns"] for sample in samples):
        table.add_column("turns: tokens (environment's, calls; *: a branch follows)")
    table.title = (
        f"prompt {group['prompt']}: drawn in round {group['round'] + 1} of life {group['life']}, "
        f"parked {group['deferrals']} times, {group['attempts']} attempts; "
        f"{group['reason'] or group['fate'] or 'alive'}"
    )
    table.title_justify = "left"
    for sample in samples:
        spans = " + ".join(f"{span.num_tokens} by {span.life}.{span.version}" for span in sample["spans"])
        reward = sample["failure"] or ("" if sample["reward"] is None else f"{sample['reward']:g}")
        known = (sample["id"], spans, sample["finish_reason"] or "", reward, sample["fate"] or "alive")
        turns = [_turns(sample["turns"])] if has_turns else []
        table.add_row(*known, "; ".join(sample["steps"]), *turns)
    return table


def _turns(turns: Sequence[Turn]) -> str:
    starts = [0, *(turn.num_tokens for turn in turns)]
    return ", ".join(
        f"{turn.num_tokens - start} ({len(turn.observation_ids)}, {len(turn.results)})"
        + ("*" if turn.begins_branch else "")
        for start, turn in zip(starts, turns, strict=False)
    )
