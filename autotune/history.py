"""The trial history: Parquet, one row and one file an attempt, under one explicit schema.

It is the one truth of a study. A file appears whole or not at all: written under a temporary name that starts with
a dot (which readers skip), synced, renamed. Many files are slow to read: `autotune compact` makes one of them, after
which a run that goes on adds its own again.
"""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from trials.breakdown import Breakdown
from trials.files import write_whole
from trials.record import Knobs

SCHEMA_VERSION = 1

_KNOBS = pa.struct(
    [
        ("engine", pa.string()),
        ("micro_batch_size", pa.int32()),
        ("grad_accum_steps", pa.int32()),
        ("sync_each_micro_batch", pa.bool_()),
        ("reshard_after_forward", pa.bool_()),
        ("bucket_cap_mb", pa.float64()),
        ("blocks_per_unit", pa.int32()),
        ("activation_checkpointing", pa.string()),
        ("num_workers", pa.int32()),
        ("prefetch_factor", pa.int32()),
        # Null where the engine has no such knob:
        ("keep_last_units", pa.int32()),
        ("reshard_group_size", pa.int32()),
        ("forward_prefetch_units", pa.int32()),
        ("backward_prefetch_units", pa.int32()),
        ("replicate_degree", pa.int32()),
        ("reduce_dtype", pa.string()),
        ("cpu_offload", pa.bool_()),
        ("limit_all_gathers", pa.bool_()),
        ("backward_prefetch", pa.string()),
        ("forward_prefetch", pa.bool_()),
        ("compile", pa.bool_()),
        ("attention_backend", pa.string()),
        ("fused_optimizer", pa.bool_()),
        ("custom", pa.map_(pa.string(), pa.string())),  # of a user's own trainer; null where the ranks are ours
    ]
)
_SECONDS = pa.list_(pa.float64())
_BREAKDOWN = pa.struct([(field.name, pa.float64()) for field in dataclasses.fields(Breakdown)])
_ENDURANCE = pa.struct(
    [
        (
            "phases",  # train, evaluate, save, load: the worst rank's peaks
            pa.list_(
                pa.struct(
                    [("phase", pa.string())]
                    + [(name, pa.float64()) for name in ("seconds", "allocated_gib", "reserved_gib", "host_gib")]
                )
            ),
        ),
        ("host_growth_mib_per_step", pa.float64()),  # ranks and their loader's workers, worst host
        ("hours_to_host_limit", pa.float64()),  # null: it does not go on growing
    ]
)
_TIME = pa.timestamp("us", tz="UTC")

SCHEMA = pa.schema(
    [
        ("study_id", pa.string()),
        ("trial", pa.int32()),
        ("attempt", pa.int32()),
        ("stage", pa.string()),  # baseline, explore, finalist, round, endurance; measure; confirm; waterfall; scale
        (
            "round",
            pa.int32(),
        ),  # number of the interleaved round, in confirm, waterfall, scale too; null outside of rounds
        (
            "changes",
            pa.list_(pa.string()),
        ),  # of a waterfall: what this config takes from the winner, in order; else null
        ("role", pa.string()),  # of a scaling: the config's, as best or baseline; else null
        ("spec_digest", pa.string()),  # equal where the same thing was measured
        ("started_at", _TIME),
        ("ended_at", _TIME),
        ("knobs", _KNOBS),  # asked
        ("applied", _KNOBS),  # read back from the live objects; null if the trial did not get that far
        ("outcome", pa.string()),
        ("reason", pa.string()),
        ("failed_rank", pa.int32()),
        ("log_path", pa.string()),  # relative to the run's folder
        ("tokens_per_s_per_rank", pa.float64()),
        ("tokens_per_s_per_rank_low", pa.float64()),  # 95 % interval over the blocks of this run
        ("tokens_per_s_per_rank_high", pa.float64()),
        ("step_time_s", pa.float64()),  # one optimizer step: all timed seconds / all timed steps
        ("predicted_step_time_s", pa.float64()),
        ("block_times_s", _SECONDS),  # seconds a step of each timed block, slowest rank
        ("rank_step_times_s", pa.list_(_SECONDS)),  # each timed step, a list a rank
        ("num_steps", pa.int32()),  # timed optimizer steps
        (
            "timing",
            pa.string(),
        ),  # whole: of steps as they are; composed: of short steps, put together (trials/composed.py)
        ("step_parts_s", pa.map_(pa.string(), pa.float64())),  # of a composed step; their sum is it; slowest rank
        ("composed_step_time_s", pa.float64()),  # beside whole steps: what the search had composed for this config
        ("composed_difference", pa.float64()),  # composed / whole - 1
        ("loader_sustained", pa.bool_()),  # false: the rate may be that of a full loader queue
        ("drift", pa.float64()),  # second half of the blocks / first half - 1
        ("data_wait_s", pa.float64()),  # waited for batches in the timed blocks, worst rank
        ("mfu", pa.float64()),  # fractions; null when the peak is not known
        ("mfu_causal", pa.float64()),
        ("hfu", pa.float64()),
        ("model_tflops_per_s_per_rank", pa.float64()),
        ("flops_per_token", pa.float64()),
        ("hardware_flops_per_token", pa.float64()),  # executed: with checkpointing and by the attention kernel
        ("attention_recompute_flops_per_token", pa.float64()),  # of these, by a fused kernel's backward
        ("flops_convention", pa.string()),
        ("peak_tflops_per_s", pa.float64()),
        ("peak_dtype", pa.string()),
        ("peak_source", pa.string()),
        ("achievable_tflops_per_s", pa.float64()),  # one rank's rate in the model's matmuls; null: not calibrated
        ("share_of_achievable", pa.float64()),  # a fraction: model_tflops_per_s_per_rank / that
        ("predicted_gib", pa.float64()),
        ("allocated_gib", pa.float64()),  # peak of live tensors, worst rank
        (
            "reserved_gib",
            pa.float64(),
        ),  # CUDA: peak reserved; CPU: growth of the data segment, what the limit sees
        ("limit_gib", pa.float64()),
        ("alloc_retries", pa.int32()),
        # Of the profiled step, on the rank that the others wait for; null in trials that were not profiled.
        ("frac_compute", pa.float64()),
        ("frac_exposed_comm", pa.float64()),
        ("frac_exposed_copy", pa.float64()),
        ("frac_data_wait", pa.float64()),
        ("frac_optimizer", pa.float64()),
        ("frac_idle", pa.float64()),
        ("non_matmul_share", pa.float64()),  # of the compute outside of the optimizer, on the same rank
        ("rank_breakdowns", pa.list_(_BREAKDOWN)),  # of the profiled step, one a rank
        (
            "losses",
            pa.list_(pa.float64()),
        ),  # mean over ranks of each optimizer step, from the first update on
        ("endurance", _ENDURANCE),  # null in all other stages
        ("phase_s", pa.map_(pa.string(), pa.float64())),  # where the trial's own time went, slowest rank
        ("detected_s", pa.float64()),  # from the start of the ranks to the first sign of failure
        ("world_size", pa.int32()),
        ("hosts", pa.list_(pa.string())),  # one entry a rank
        ("attention_backend", pa.string()),  # the kernel that was seen; null where blocks are compiled
        ("device_name", pa.string()),
        ("torch_version", pa.string()),
        ("driver_version", pa.string()),
        ("nccl_version", pa.string()),
        ("workload_digest", pa.string()),
        ("loader_measured", pa.bool_()),  # false: synthetic data, whose loader has nothing to do
        ("simulated", pa.bool_()),
    ],
    metadata={"schema_version": str(SCHEMA_VERSION), "product": "fsdp-autotune"},
)


MOST_TRIALS = 999_999
_NUMBERED = re.compile(r"trial-(\d{4,6})-attempt-")
_NUMBERED_TO = re.compile(r"trials-\d{4,6}-to-(\d{4,6})\.parquet")


Told = Callable[[int, int], None]
"""Takes how many files were read of how many, after each; some milliseconds pass between two."""


def to_nobody(_done: int, _of: int) -> None:
    """Nobody is told."""


@dataclass(frozen=True)
class Compacted:
    """What became of a history's files."""

    num_rows: int
    num_files: int
    """That there were, without those left as they are."""
    num_bytes: int
    """In them."""
    path: Path
    """The one file that there is now."""
    left: list[str]
    """A line on each file that is no history, and was left as it is."""


class History:
    """The `history/` folder of a run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def append(self, row: dict[str, Any]) -> Path:
        """Writes one attempt; fields not given are null.

        Raises:
            ValueError: a field that the schema has not.
        """
        unknown = set(row) - set(SCHEMA.names)
        if unknown:
            raise ValueError(f"no such fields in the history's schema: {sorted(unknown)}")
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"trial-{row['trial']:04d}-attempt-{row['attempt']}.parquet"
        return self._write(name, [row])

    def file_names(self) -> set[str]:
        return {path.name for path in self._files()}

    def last_trial(self) -> int | None:
        """The highest number of a trial that has a file, be it unreadable; None: there is none."""
        names = self.file_names()
        found = [match for name in names for match in (_NUMBERED.match(name), _NUMBERED_TO.fullmatch(name)) if match]
        return max((int(match[1]) for match in found), default=None)

    def rows(self, without: Collection[str] = (), told: Told = to_nobody) -> tuple[list[dict[str, Any]], list[str]]:
        """All attempts in order, and a line on each file that is not one (torn, foreign, of another version).

        Args:
            without: names of files to leave out.
            told: how far it is.
        """
        rows, skipped, _ = self._read_files(without, told)
        return rows, skipped

    def compact(self, told: Told = to_nobody) -> Compacted | None:
        """Makes one file of all that can be read; the caller is the folder's only driver.

        The one file is whole before the others go. Interrupted in between, rows are there twice; readers take one.

        Args:
            told: how far it is.

        Returns:
            None: there was no more than one file.

        Raises:
            OSError: the folder cannot be written.
        """
        rows, left, read = self._read_files((), told)
        if len(read) < 2:
            return None
        num_bytes = sum(path.stat().st_size for path in read)
        first, last = (pick(row["trial"] for row in rows) for pick in (min, max))
        path = self._write(f"trials-{first:04d}-to-{last:04d}.parquet", rows)
        for one in read:
            if one != path:
                one.unlink()
        return Compacted(len(rows), len(read), num_bytes, path, left)

    def _read_files(self, without: Collection[str], told: Told) -> tuple[list[dict[str, Any]], list[str], list[Path]]:
        """As `rows`; and the files that these are of."""
        rows: dict[tuple[str, int, int], dict[str, Any]] = {}
        skipped: list[str] = []
        read: list[Path] = []
        paths = [path for path in self._files() if path.name not in without]
        for number, path in enumerate(paths, 1):
            told(number, len(paths))
            try:
                found, problem = _read(path)
            except (pa.ArrowException, OSError, ValueError, KeyError, OverflowError) as error:
                if path not in self._files():  # made one with others since they were listed: look again
                    return self._read_files(without, told)
                found, problem = [], f"unreadable: {(str(error).splitlines() or [''])[0]}"
            if any(row[name] is None for row in found for name in ("trial", "attempt", "knobs")):
                problem, found = "no attempt: it has no trial number or no knobs", []
            elif not all(0 <= row["trial"] <= MOST_TRIALS for row in found):
                problem, found = f"no attempt: trial numbers are 0 to {MOST_TRIALS}", []
            for row in found:
                rows.setdefault((row["study_id"], row["trial"], row["attempt"]), row)
            if problem:
                skipped.append(f"{path.name}: {problem}")
            else:
                read.append(path)
        return sorted(rows.values(), key=lambda row: (row["trial"], row["attempt"])), skipped, read

    def _files(self) -> list[Path]:
        return sorted(p for p in self.folder.glob("*.parquet") if not p.name.startswith("."))

    def _write(self, name: str, rows: list[dict[str, Any]]) -> Path:
        whole = io.BytesIO()
        pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), whole, compression="zstd")
        write_whole(self.folder / name, whole.getvalue())
        return self.folder / name


def _read(path: Path) -> tuple[list[dict[str, Any]], str]:
    """The rows of a file, and what is wrong with it; nothing if it can be read.

    Raises:
        pa.ArrowException, OSError, ValueError, KeyError, OverflowError: it is torn, or not what it says.
    """
    with pq.ParquetFile(path) as file:
        theirs = file.schema_arrow
        problem = _not_ours(theirs)
        if problem:
            return [], problem
        # What was not written by this version is read under our schema, whatever types the file claims; a column that
        # it has not is null.
        table = file.read() if theirs.equals(SCHEMA) else pq.read_table(path, partitioning=None, schema=SCHEMA)
    return [_migrated(row, theirs) for row in table.to_pylist(maps_as_pydicts="strict")], ""


_DEFAULTS = {
    field.name: field.default
    for field in dataclasses.fields(Knobs)
    if field.default is not dataclasses.MISSING and field.default is not None
}


def _migrated(row: dict[str, Any], theirs: pa.Schema) -> dict[str, Any]:
    """A row as this version writes it. A knob that the file has no column for was not there to be set: it had the value
    that leaves torch alone, which is its default."""
    for column in ("knobs", "applied"):
        knobs = row[column]
        if knobs is None or column not in theirs.names:
            continue
        had = {field.name for field in theirs.field(column).type}
        row[column] = knobs | {name: value for name, value in _DEFAULTS.items() if name not in had}
    return row


def _not_ours(schema: pa.Schema) -> str:
    metadata = schema.metadata or {}
    if metadata.get(b"product") != b"fsdp-autotune":
        return "not written by fsdp-autotune"
    version = metadata.get(b"schema_version", b"").decode()
    return "" if version == str(SCHEMA_VERSION) else f"schema version {version}; this program reads {SCHEMA_VERSION}"
