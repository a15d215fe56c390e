"""The `autotune` command: thin; every command's work is elsewhere."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from autotune import __version__
from autotune.commands.compact import compact
from autotune.commands.compare import compare
from autotune.commands.cost import cost
from autotune.commands.reading import reading
from autotune.commands.views import journal, tensorboard
from autotune.commands.watch import watch
from autotune.confirm.command import confirm
from autotune.errors import AutotuneError, InfrastructureError, UserError, printable
from autotune.report.command import report
from autotune.scaling.command import scale
from autotune.signals import EXIT_INTERRUPTED, interrupt_in_order
from autotune.verify.command import verify
from autotune.waterfall.command import waterfall

SIMULATE = click.option(
    "--simulate",
    metavar="CLUSTER",
    help="Measure nothing: ask a modelled cluster, e.g. \"nodes=8 gpus=8 device='NVIDIA H100 80GB HBM3'\".",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="fsdp-autotune")
def cli() -> None:
    """Find the PyTorch FSDP settings with the highest measured MFU that do not run out of memory."""


@cli.command()
@click.option("--template", default="quickstart", show_default=True, help="Shipped job to start from.")
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    default=Path("job.yaml"),
    show_default=True,
    help="File to write.",
)
def init(template: str, output: Path) -> None:
    """Write a commented job file to edit, and what goes with it.

    Templates for a trainer of your own: own-trainer, lightning, transformers, accelerate, torchtitan, slurm.
    """
    from autotune.templates import write_template

    click.echo("\n".join(write_template(template, output)))


@cli.command()
@click.argument("job")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key, e.g. budget.trials=8.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder of the run (default: the job's `output`).")
@click.option("--trials", type=click.IntRange(min=1), help="Trials to explore (overrides budget.trials).")
@click.option("--resume", is_flag=True, help="Go on with the run in that folder; nothing it finished is run again.")
@click.option(
    "--warm-start",
    "warm_start",
    multiple=True,
    metavar="RUN",
    type=click.Path(path_type=Path),
    help="Folder of an earlier run of this model, which the search is told of; may be given again. --resume keeps it.",
)
@click.option("--warm-start-other-model", "other_model", is_flag=True, help="Take it also if it is of another model.")
@click.option("--waterfall", "explain", is_flag=True, help="Then take the gain apart, as `autotune waterfall` does.")
@SIMULATE
def run(
    job: str,
    overrides: tuple[str, ...],
    output: Path | None,
    trials: int | None,
    resume: bool,
    warm_start: tuple[Path, ...],
    other_model: bool,
    explain: bool,
    simulate: str | None,
) -> None:
    """Tune JOB, a path or a shipped name (try: quickstart), and write best.yaml."""
    from autotune.folder import run_of
    from autotune.job_file import load_job

    if trials is not None:
        overrides = (*overrides, f"budget.trials={trials}")
    loaded = load_job(job, overrides)
    if resume and output is None:
        output = run_of(job)
    if output is not None:
        loaded = loaded.model_copy(update={"output": str(output)})
    _refuse_warm_starts(warm_start, Path(loaded.output), other_model)
    _run(loaded, job, resume, simulate, [path.absolute() for path in warm_start], other_model, explain)


@cli.command()
@click.argument("job")
@click.option("--set", "settings", multiple=True, metavar="KNOB=VALUE", help="Or section.key=value of the job.")
@click.option("--repeat", type=click.IntRange(min=1), default=1, show_default=True, help="Fresh runs of the config.")
@click.option("--profile", is_flag=True, help="Keep a trace of one step of each rank; it opens in Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder (default: the job's `output` + -measure).")
@SIMULATE
def measure(
    job: str,
    settings: tuple[str, ...],
    repeat: int,
    profile: bool,
    as_json: bool,
    output: Path | None,
    simulate: str | None,
) -> None:
    """Measure one config of JOB by hand: its baseline, with the knobs that --set changes."""
    from autotune.job_file import load_job
    from autotune.measure import measure as measure_config
    from autotune.measure import overrides_of

    loaded = load_job(job, overrides_of(settings))
    loaded = loaded.model_copy(update={"output": str(output or f"{loaded.output}-measure")})

    def work(out: Path, runner: Any, screen: Any) -> Any:
        return measure_config(loaded, out, runner, screen, repeat, profile)

    survey, attempts = _at_work(loaded, job, work, goes_on=False, to_stderr=as_json, simulate=simulate)
    if as_json:
        from autotune.report.text import json_safe

        click.echo(json.dumps(json_safe([attempt.row for attempt in attempts]), default=str))
        return
    from rich.console import Console

    from autotune.report.sheet import print_sheet

    console = Console(highlight=False)
    print_sheet(console, survey.study, attempts)
    logs = Path(loaded.output) / attempts[-1].row["log_path"]
    console.print(f"{'traces and output' if profile else 'output'}: {_shown(logs.absolute())}", soft_wrap=True)


@cli.command()
@click.argument("job", required=False)
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job.")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
def doctor(job: str | None, overrides: tuple[str, ...], as_json: bool) -> None:
    """Say whether JOB can run here, and how fast its devices are; without JOB, look at this machine.

    Exit codes: 0 it can run, 2 something in the job is wrong, 3 this machine or cluster cannot run it.
    """
    from rich.console import Console

    from autotune.doctor.command import diagnose
    from autotune.report.findings import print_findings, verdict
    from autotune.report.text import json_safe

    with Console(stderr=True).status("looking at the machine: under a minute on a CPU"):
        diagnosis = diagnose(job, overrides)
    name = job or "a job like the quickstart"
    if as_json:
        content = diagnosis.to_dict() | {"verdict": verdict(diagnosis.findings, name)}
        click.echo(json.dumps(json_safe(content)))
    else:
        print_findings(Console(highlight=False), diagnosis.findings, name)
    sys.exit(diagnosis.exit_code)


def _world_sizes(_ctx: click.Context, _param: click.Parameter, value: str | None) -> tuple[int, ...]:
    """`8,64,512` -> numbers of ranks."""
    parts = value.split(",") if value else []
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise click.BadParameter(f"{value!r}: expected numbers of ranks with commas between them, e.g. 8,64,512")
    return tuple(int(part) for part in parts)


@cli.command()
@click.argument("job")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job.")
@click.option(
    "--world", "worlds", callback=_world_sizes, metavar="N,N,...", help="Numbers of ranks to predict for as well."
)
@click.option("--device", metavar="NAME", help="GPU, as torch names it (default: the job's cluster.device_name).")
@click.option("--json", "as_json", is_flag=True, help="Machine-readable, on standard output.")
def plan(job: str, overrides: tuple[str, ...], worlds: tuple[int, ...], device: str | None, as_json: bool) -> None:
    """Predict what JOB would search, take and cost; no trial runs."""
    from rich.console import Console

    from autotune.job_file import load_job
    from autotune.plan import make_plan
    from autotune.report.plan import plan_content, print_plan

    with Console(stderr=True).status("predicting the configs of the space"):
        made = make_plan(load_job(job, overrides), worlds, device)
    if as_json:
        from autotune.report.text import json_safe

        click.echo(json.dumps(json_safe(plan_content(made))))
        return
    print_plan(Console(highlight=False), made)


def _refuse_warm_starts(runs: tuple[Path, ...], output: Path, other_model: bool) -> None:
    """Before anything is started or moved."""
    from autotune.warm_start import OPTION, OTHER_MODEL_OPTION, refuse_without_history

    if other_model and not runs:
        raise UserError(f"{OTHER_MODEL_OPTION} without {OPTION}: it has no effect", f"add {OPTION} RUN, or remove it")
    for path in runs:
        refuse_without_history(path)
        if path.resolve() == output.resolve():
            raise UserError(
                f"{OPTION} {path}: that is the folder of this run itself",
                "give another folder by --output; to go on with that run, use --resume instead",
            )


def _run(
    loaded: Any,
    name: str,
    resume: bool,
    simulate: str | None,
    warm_start: list[Path],
    other_model: bool,
    explain: bool,
) -> None:
    from rich.console import Console

    from autotune.best import read_best
    from autotune.report.tables import print_best
    from autotune.report.text import is_kept
    from autotune.run import Run
    from autotune.waterfall.command import explained, show_waterfall

    def work(out: Path, runner: Any, screen: Any) -> Any:
        found = Run(loaded, out, runner, screen, resume, warm_start, other_model).go()
        return found, explained(loaded, out, found, runner, screen) if explain else None

    def options_again() -> str:
        from autotune.kept_warm_starts import has_kept

        options = "".join(f" --warm-start {_shown(path)}" for path in warm_start)
        options += " --warm-start-other-model" if other_model else ""
        return ("" if has_kept(Path(loaded.output)) else options) + (" --waterfall" if explain else "")

    result, made = _at_work(loaded, name, work, resume=resume, simulate=simulate, options=options_again)
    console, out = Console(highlight=False), Path(loaded.output).absolute()
    console.print()
    print_best(console, read_best(out))
    show_waterfall(console, made, read_best(out))
    target = "command" if loaded.trainer is not None else loaded.export_for or "plain"
    kept = is_kept(read_best(out))
    then = f"show {_shown(out)}" if kept else f"export {_shown(out)} --to {target}"
    lines = (
        f"{result.num_trials} configs tried, {result.num_out_of_memory} ran out of memory; "
        f"{result.elapsed_s / 60:.1f} {'simulated ' if simulate else ''}min. History: {_shown(out)}/history",
        f"next: {_command()} {then}",
    )
    for line in lines:
        click.echo(printable(line))


def _at_work(
    loaded: Any,
    name: str,
    work: Callable[..., Any],
    *,
    resume: bool = False,
    goes_on: bool = True,
    to_stderr: bool = False,
    simulate: str | None = None,
    options: Callable[[], str] = lambda: "",
) -> Any:
    """Does `work(out, runner, screen)` as the only driver of the job's folder, with Ray up.

    Args:
        goes_on: what is interrupted can be resumed.
        simulate: the modelled cluster to ask instead.
        options: that the same command needs once more when it is resumed.
    """
    from rich.console import Console

    from autotune.folder import check_resumable, prepare_folder, sole_driver
    from autotune.report.screen import make_screen
    from autotune.runners import runner_of

    out = Path(loaded.output).absolute()
    shown = _shown(out)
    open_runner, label = runner_of(loaded, out, simulate)
    screen = make_screen(Console(highlight=False, stderr=to_stderr))
    with sole_driver(out):
        if resume:
            check_resumable(out, loaded, label)
            moved = None
        else:
            moved = prepare_folder(out, loaded)
        screen.message(f"autotune {__version__}: {name} -> {shown}{' (resumed)' if resume else ''}")
        if moved is not None:
            screen.message(f"  an earlier run was there: moved to {_shown(moved)}")
        try:
            with open_runner() as runner, screen:
                return work(out, runner, screen)
        except KeyboardInterrupt:
            click.echo("autotune: interrupted; the ranks are gone, the history is kept", err=True)
            if goes_on:
                again = f' --simulate "{label}"' if label else ""
                click.echo(f"resume: {_command()} run {_shown(out / 'job.yaml')} --resume{again}{options()}", err=True)
            sys.exit(EXIT_INTERRUPTED)
        except OSError as error:
            raise InfrastructureError(
                f"{error.filename or out}: {error.strerror or error}",
                "what was measured before is kept"
                + (f"; once it can be written: autotune run {shown}/job.yaml --resume" if goes_on else ""),
            ) from error


@cli.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
@click.option("--trial", type=int, help="Everything about one trial.")
@click.option(
    "--brief", is_flag=True, help="At most 12 plain lines: verdict, settings, where the time goes, what next."
)
def show(run_folder: Path, as_json: bool, trial: int | None, brief: bool) -> None:
    """Show a run's result and its trials."""
    from rich.console import Console

    from autotune.best import read_best
    from autotune.folder import latest_moved
    from autotune.history import History
    from autotune.report.brief import brief_lines
    from autotune.report.tables import print_best, print_trial, print_trials
    from autotune.report.text import json_safe

    if brief and (as_json or trial is not None):
        raise UserError("--brief: it stands for itself", "leave out --json and --trial")
    with reading() as told:
        rows, skipped = History(run_folder / "history").rows(told=told)
    for line in skipped:
        click.echo(f"skipped {printable(line)}", err=True)
    if not rows and not (run_folder / "best.yaml").exists():
        moved = latest_moved(run_folder)
        hint = f"an earlier run was moved to {moved}" if moved else "give the folder of a run: its job's `output`"
        raise UserError(f"{run_folder}: no run there that has measured anything", hint)
    if trial is not None:
        rows = [row for row in rows if row["trial"] == trial]
        if not rows:
            raise UserError(f"{run_folder}: no trial {trial}", "`autotune show RUN` lists them")
    best = read_best(run_folder) if (run_folder / "best.yaml").exists() else None
    if as_json:
        content = {"trials": rows} | ({} if trial is not None else {"best": best})
        click.echo(json.dumps(json_safe(content), default=str))
        return
    if brief:
        click.echo("\n".join(brief_lines(run_folder, best, rows)))
        return
    console = Console(highlight=False)
    if trial is not None:
        for row in rows:
            print_trial(console, row)
        return
    print_trials(console, rows)
    if best is not None:
        print_best(console, best)


class ExporterOption(click.Option):
    """Names the exporters in its help, and only there imports them: `autotune --help` stays fast."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        from autotune.export import EXPORTERS

        *others, last = EXPORTERS
        self.help = f"{', '.join(others)} or {last}; of a trainer of your own also command."
        return super().get_help_record(ctx)


@cli.command()
@click.argument("run_folder", metavar="RUN", type=click.Path(path_type=Path))
@click.option("--to", "target", required=True, cls=ExporterOption)
@click.option(
    "--output",
    "-o",
    type=click.Path(path_type=Path),
    help="File to write, further files beside it; or a folder that exists (default: RUN/export/TARGET/).",
)
@click.option("--incomplete", is_flag=True, help="Take the best config so far of a run that has not ended.")
@click.option("--confirmed", is_flag=True, help="Take what `autotune confirm` found to hold, on its number of ranks.")
def export(run_folder: Path, target: str, output: Path | None, incomplete: bool, confirmed: bool) -> None:
    """Write the best config in a trainer's own format."""
    from rich.console import Console

    from autotune.export.command import export_run
    from autotune.report.export import print_exported

    written = export_run(run_folder, target, output, incomplete, confirmed)
    for path in written.paths:
        click.echo(f"wrote {path}")
    print_exported(Console(highlight=False), written.best, written.exported, written.left)
    for warning in written.warnings:
        click.echo(printable(warning), err=True)


cli.add_command(compact)
cli.add_command(compare)
cli.add_command(confirm)
cli.add_command(cost)
cli.add_command(journal)
cli.add_command(tensorboard)
cli.add_command(report)
cli.add_command(verify)
cli.add_command(watch)
cli.add_command(waterfall)
cli.add_command(scale)


def _refuse_foreign_packages() -> None:
    """`trials` and `search_spaces` are common names: a user's own on PYTHONPATH must not stand in for ours."""
    import search_spaces
    import trials

    ours = Path(__file__).parents[1]
    for package in (trials, search_spaces):
        found = Path(package.__path__[0]).parent
        if found != ours:
            raise UserError(
                f"the package {package.__name__} was found in {found}, not beside autotune in {ours}",
                "remove that folder from PYTHONPATH; a job names its modules by model.workload",
            )


def _command() -> str:
    """How this program can be called again: by its name, or where it is not on PATH by its path."""
    return "autotune" if shutil.which("autotune") else _shown(Path(sys.argv[0]).absolute())


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def main() -> NoReturn:
    """Runs the command line; errors meant for people are printed as such, with their exit code."""
    interrupt_in_order()
    try:
        _refuse_foreign_packages()
        cli(standalone_mode=False)
    except AutotuneError as error:
        # Words of a job, a model or a history, which anybody may have written.
        click.echo(f"autotune: {printable(str(error))}", err=True)
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (KeyboardInterrupt, click.Abort):
        click.echo("autotune: interrupted", err=True)
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0)


if __name__ == "__main__":
    main()
